"""``skip_dead_sequences``: skips sequences whose gradient is known to be zero before the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

import offcorr
from offcorr.stages.reference import weight_of
from offcorr.training.schedules import Annealed

NEUTRAL = {"beta": 0.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}
"""TRL's options that make the loss look at every sequence, with the values at which they do not."""


def check_skipping(args: Any, loss: Annealed | None) -> None:
    """Raise ``ValueError`` for ``skip_dead_sequences=True`` beside a setting under which no sequence can be skipped.

    Args:
        loss: None: TRL's own loss.
    """
    if not getattr(args, "skip_dead_sequences", False):
        return
    if loss is None:
        loss_type = getattr(args, "loss_type", "dapo")
        raise ValueError(
            f"skip_dead_sequences=True goes with a correction, and loss_type={loss_type!r} is TRL's own loss, which "
            "runs on every sequence: name a loss of offcorr.available() ('offcorr:...'), or leave it out"
        )
    correction = loss.at(0.0)
    whole = {repr(correction.method): bool(correction.couples), "count_rejected=False": not correction.count_rejected}
    whole |= {
        f"{name}={getattr(args, name)!r}": getattr(args, name) != neutral
        for name, neutral in NEUTRAL.items()
        if hasattr(args, name)
    }
    for reason, looks_at_all in whole.items():
        if looks_at_all:
            raise ValueError(
                f"skip_dead_sequences=True leaves sequences out of the forward pass, and {reason} looks at all of "
                "them: leave one of the two out"
            )


def dead_sequences(correction: offcorr.Correction, batch: offcorr.Batch) -> Tensor:
    """[B] bool: sequences whose coefficients are all 0, whatever the current log-probs are.

    The reasons are an advantage of 0 under a gate that scales with it, no valid token, and tokens dropped by weights
    and rejections that compare ``old_logp`` with ``rollout_logp``.

    Args:
        batch: ``logp`` is a placeholder and is not looked at.
    """
    tokens = batch.tokens
    alive = tokens.mask
    if correction.scales_with_advantage:
        alive = alive & (tokens.advantages != 0)
    if batch.old_logp is not None and batch.rollout_logp is not None:
        for place, stage in correction.stages.items():
            if place.startswith(("weight", "reject")) and stage.mismatch == "engine":
                alive = alive & weight_of(stage, tokens).kept
    return ~alive.any(1)


def rows_kept(dead: Tensor) -> Tensor:
    """Indices of the other sequences; at least one, so that every rank takes part in the collectives."""
    alive = (~dead).nonzero()[:, 0]
    return alive if len(alive) else torch.zeros(1, dtype=torch.long, device=dead.device)


def only(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The micro-batch of ``rows``, each with its own images; values without one entry per sequence are unchanged."""
    size, kept = len(inputs["advantages"]), rows.tolist()

    def chosen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == size:
            return value[rows]
        return [value[row] for row in kept] if isinstance(value, list) and len(value) == size else value

    # Images lie end to end, any number per sequence; TRL splits them in the same way to shuffle a batch.
    parts = split_pixel_values_by_grid(inputs)
    return unsplit_pixel_values_by_grid({name: chosen(value) for name, value in parts.items()})
