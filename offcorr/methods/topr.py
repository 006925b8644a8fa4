"""TOPR: the full policy gradient for rewarded sequences, truncated importance sampling for the others.

    dL/dlogp_t = -c_t A_t / Z
    c_t = 1 where the reward is above 0, otherwise min(w, 1)

w is the product of the sequence's ratios r_t = exp(logp_t - old_logp_t), or the token's own ratio with
``level="token"``, detached; A_t is the advantage and Z the number of sequences. The rule depends on the sign of the
*reward*, not of the advantage.

Source: the paper's text, 2503.14286.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios


def tapered(log_ratio: Any, logp: Any, advantage: Any, reward: Any) -> Any:
    at_most_one = ops.minimum(ops.exp(log_ratio), 1.0)
    gradient = ops.where(reward > 0, 1.0, at_most_one) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class Tapered(gates.Gate):
    """Surrogate A log pi where the reward is above 0, otherwise sg(min(ratio, 1)) A log pi (TOPR, 2503.14286).

    The multiplier is 1 where the reward is above 0, otherwise min(ratio, 1). Needs ``Batch.rewards``.
    """

    surrogate = staticmethod(tapered)
    detached = True


@register(
    "topr",
    multiplier="1 where reward > 0, otherwise min(w, 1), w the sequence's or the token's ratio",
    paper="2503.14286",
    provenance="paper text",
    notes="depends on the sign of the reward, not of the advantage; needs rewards",
)
def topr(level: Literal["sequence", "token"] = "sequence") -> Correction:
    """Surrogate A log pi where the reward is above 0, otherwise sg(min(w, 1)) A log pi; needs ``Batch.rewards``.

    Args:
        level: "sequence" or "token": the ratio w.

    Raises:
        ValueError: ``level`` is neither "sequence" nor "token".

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(
    ...     logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0,
    ...     rewards=-torch.ones(1),
    ... )
    >>> -1 * offcorr.get("topr", level="token")(batch).coefficient  # the multipliers
    tensor([[1.0000, 0.6065, 1.0000]])
    """
    if level not in ("sequence", "token"):
        raise ValueError(f"topr: level is {level!r}, expected 'sequence' or 'token'")
    return Correction(
        ratio=ratios.Sequence() if level == "sequence" else ratios.Token(),
        gate=Tapered(),
        aggregate="seq-mean-token-sum",
    )
