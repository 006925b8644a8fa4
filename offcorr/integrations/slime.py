"""slime: ``--use-tis --custom-tis-function-path offcorr.integrations.slime.tis``, and the method in a YAML file.

``offcorr: icepop?low=0.5&high=5`` in the file of ``--custom-config-path``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.integrations.hook import Hook
from offcorr.stages.gates import ScoreFunction

__all__ = ["HOOK", "tis"]

HOOK = Hook(
    "slime",
    sees="micro-batch",
    carries=frozenset({"old_logp", "rollout_logp"}),
    surrogate=False,
    aggregates=False,
)
"""slime computes PPO's, GSPO's or CISPO's loss and lets a function multiply it before it reduces."""


def tis(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's loss times the weights and rejections of the method ``args.offcorr``; the masks without what they drop.

    The surrogate stays slime's own, with its ``--eps-clip``; the method's clip range is not used.

    Args:
        args: slime's arguments.
        pg_loss: [N], the loss of each token, of all sequences end to end.
        train_log_probs, rollout_log_probs, loss_masks: one [T] tensor for each sequence.

    Raises:
        ValueError: there is no ``args.offcorr``, slime's hook cannot carry the method, or sequences are split over
            context-parallel ranks.

    >>> from types import SimpleNamespace
    >>> train, masks = [torch.full((2,), -2.0), torch.full((3,), -2.0)], [torch.ones(2), torch.ones(3)]
    >>> engine = [train[0] - 1, train[1] - 0.1]
    >>> args = SimpleNamespace(offcorr="tis?cap=2")
    >>> tis(args, pg_loss=torch.ones(5), train_log_probs=train, rollout_log_probs=engine, loss_masks=masks)[0]
    tensor([2.0000, 2.0000, 1.1052, 1.1052, 1.1052])
    """
    spec = getattr(args, "offcorr", None)
    if not isinstance(spec, str):
        raise ValueError(
            f"args.offcorr is {spec!r}, expected a method: write 'offcorr: tis?cap=2' into the YAML file of "
            "--custom-config-path"
        )
    lengths = [len(logp) for logp in train_log_probs]
    for name, values in (("rollout_log_probs", rollout_log_probs), ("loss_masks", loss_masks)):
        if (found := [len(value) for value in values]) != lengths:
            raise ValueError(
                f"{name} has sequences of {found} tokens, expected {lengths} as in train_log_probs; with context "
                "parallelism, which splits sequences over ranks, this function does not work"
            )
    old = torch.cat(list(train_log_probs)).detach()
    mask = torch.cat(list(loss_masks)).bool()
    ends = torch.tensor([0, *lengths], device=old.device).cumsum(0)
    batch = Batch.packed(
        logp=old,
        old_logp=old,
        rollout_logp=torch.cat(list(rollout_log_probs)),
        advantages=-torch.ones_like(old),
        mask=mask,
        cu_seqlens=ends,
        max_seqlen=max(lengths, default=0),
    )
    factor = _factor(spec)(batch).coefficient.to(pg_loss.dtype)
    kept = [(part != 0) & own.bool() for part, own in zip(factor.split(lengths), loss_masks, strict=True)]
    masks = [part.to(own.dtype) for part, own in zip(kept, loss_masks, strict=True)]
    rejected = (mask & (factor == 0)).to(pg_loss.dtype)
    return pg_loss * factor, masks, {"offcorr/weight": factor.detach(), "offcorr/rejected": rejected}


@functools.cache
def _factor(spec: str) -> Correction:
    """The weights and rejections alone: with the advantage -1, the coefficient is their product."""
    whole = HOOK.resolve(spec)
    return Correction(
        ratio=None, gate=ScoreFunction(), weight=whole.weight, reject=whole.reject, aggregate="sum", strict=whole.strict
    )
