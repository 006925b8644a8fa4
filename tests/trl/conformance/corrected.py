"""Configurations that name a correction where a test names no loss; in a module, since TRL pickles them."""

from __future__ import annotations

from dataclasses import dataclass

import offcorr.trl
from offcorr.trl import async_grpo


@dataclass
class GRPOConfig(offcorr.trl.GRPOConfig):
    """``loss_type`` is ``offcorr:dapo`` unless it is given."""

    loss_type: str = "offcorr:dapo"


@dataclass
class AsyncGRPOConfig(async_grpo.AsyncGRPOConfig):
    """``loss_type`` is ``dapo`` unless it is given."""

    loss_type: str | None = "dapo"
