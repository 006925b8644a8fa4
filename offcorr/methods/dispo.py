"""DISPO: the policy gradient weighted by a clipped ratio, with bounds that depend on the sign of the advantage.

    dL/dlogp_t = -c_t A_t / Z
    c_t = clip(r_t, pos_low, pos_high) for A_t > 0, clip(r_t, neg_low, neg_high) for A_t <= 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio, detached: it scales the gradient and receives none; A_t
is the advantage and Z the denominator of the aggregation. With pos_low above 0, every token with A_t > 0 keeps a
gradient.

Source: notes by others about 2602.00983; there is no official code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number, check_order, warn_of_bounds


class SignBounds(NamedTuple):
    pos_low: float
    pos_high: float
    neg_low: float
    neg_high: float


def sign_clip(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    for_positive = ops.clamp(ratio, p.pos_low, p.pos_high)
    for_negative = ops.clamp(ratio, p.neg_low, p.neg_high)
    gradient = ops.where(advantage > 0, for_positive, for_negative) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class SignClip(gates.Gate):
    """Surrogate sg(clip(ratio)) A log pi, with bounds that depend on the sign of A (DISPO, 2602.00983).

    The multiplier is the clipped ratio.

    Args:
        pos_low, pos_high: bounds on the ratio itself for A > 0.
        neg_low, neg_high: bounds on the ratio itself for A <= 0.
    """

    pos_low: float = 0.8
    pos_high: float = 11.0
    neg_low: float = 0.0
    neg_high: float = 101.0

    surrogate = staticmethod(sign_clip)
    detached = True

    def __post_init__(self) -> None:
        for field in SignBounds._fields:
            check_number(self, field, low=0, above=field.endswith("high"))
        check_order(self, "pos_low", "pos_high")
        check_order(self, "neg_low", "neg_high")
        warn_of_bounds("SignClip", "are multiplied by it", "pos_high", pos_low=self.pos_low, pos_high=self.pos_high)
        warn_of_bounds("SignClip", "are multiplied by it", "neg_high", neg_low=self.neg_low, neg_high=self.neg_high)

    @property
    def params(self) -> SignBounds:
        return SignBounds(self.pos_low, self.pos_high, self.neg_low, self.neg_high)


@register(
    "dispo",
    multiplier="clip(r, pos_low, pos_high) for A > 0, clip(r, neg_low, neg_high) for A <= 0",
    paper="2602.00983",
    provenance="notes by others about the paper",
    notes="no official code",
)
def dispo(pos_low: float = 0.8, pos_high: float = 11.0, neg_low: float = 0.0, neg_high: float = 101.0) -> Correction:
    """Surrogate sg(c) A log pi, with c the ratio clipped between bounds chosen by the sign of A.

    Args:
        pos_low, pos_high: bounds on r for A > 0.
        neg_low, neg_high: bounds on r for A <= 0.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("dispo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.8000, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=SignClip(pos_low, pos_high, neg_low, neg_high),
        aggregate="token-mean",
    )
