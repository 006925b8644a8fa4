"""Configurations that name a correction where a test names no loss; in a module, since TRL pickles them."""

from __future__ import annotations

from dataclasses import dataclass

import offcorr.trl

try:
    from offcorr.trl import async_grpo
except ImportError:  # TRL before 1.16
    async_grpo = None


@dataclass
class GRPOConfig(offcorr.trl.GRPOConfig):
    """``loss_type`` is ``offcorr:dapo`` unless it is given."""

    loss_type: str = "offcorr:dapo"


if async_grpo is not None:

    @dataclass
    class AsyncGRPOConfig(async_grpo.AsyncGRPOConfig):
        """``loss_type`` is ``dapo`` unless it is given."""

        loss_type: str | None = "dapo"
