"""``try_out``: a correction with stages of a user's own, called once before a model is loaded."""

from __future__ import annotations

from typing import Any

import torch

import offcorr
from offcorr.check_batches import example
from offcorr.kernels.dispatch import use
from offcorr.stages.checks import of_library, quietly


def try_out(correction: offcorr.Correction, asked: str) -> None:
    """Calls a correction with stages of a user's own on a small float32 batch; one of the library's alone is not.

    A correction that needs a field which that batch does not have (``sum_sq_probs``, the versions, ``turn_ids``) is not
    called either.

    Args:
        asked: the option that asked for it, the beginning of an error's message.

    Raises:
        TypeError: a stage gives another shape or type than expected, or cannot run.
        ValueError: as the correction raises it.
    """
    batch = example(dtype=torch.float32)
    classes: list[Any] = [type(stage) for stage in correction.stages.values()]
    if all(map(of_library, classes)) or any(getattr(batch, name) is None for name in correction.needs):
        return
    try:
        with quietly(), use("reference"):
            correction(batch)
    except Exception as error:  # a user's function may raise anything
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{asked} fails on an example batch: {error}") from error
