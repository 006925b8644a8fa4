"""DISPO: a detached ratio, clipped by bounds that depend on the sign of the advantage.

dL/dlogp_t = -clip(r_t, low, high) A_t / Z, [pos_low, pos_high] for A > 0 and [neg_low, neg_high] for A <= 0, so the
multiplier is never 0 where its lower bound is above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number, check_order


class SignBounds(NamedTuple):
    pos_low: float
    pos_high: float
    neg_low: float
    neg_high: float


def sign_capped(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    praised = ops.clamp(ratio, p.pos_low, p.pos_high)
    blamed = ops.clamp(ratio, p.neg_low, p.neg_high)
    gradient = ops.where(advantage > 0, praised, blamed) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class SignCapped(gates.Gate):
    """sg(clip(ratio)) A log pi, between bounds that depend on the sign of A.

    Args:
        pos_low, pos_high: absolute bounds on the ratio where A > 0.
        neg_low, neg_high: absolute bounds on the ratio where A <= 0.
    """

    pos_low: float = 0.8
    pos_high: float = 11.0
    neg_low: float = 0.0
    neg_high: float = 101.0

    surrogate = staticmethod(sign_capped)
    detached = True

    def __post_init__(self) -> None:
        for field in SignBounds._fields:
            check_number(self, field, low=0)
        check_order(self, "pos_low", "pos_high")
        check_order(self, "neg_low", "neg_high")

    @property
    def params(self) -> SignBounds:
        return SignBounds(self.pos_low, self.pos_high, self.neg_low, self.neg_high)


@register(
    "dispo",
    multiplier="clip(r, pos_low, pos_high) for A > 0, clip(r, neg_low, neg_high) for A <= 0",
    paper="2602.00983",
    provenance="secondary",
    notes="no official code",
)
def dispo(pos_low: float = 0.8, pos_high: float = 11.0, neg_low: float = 0.0, neg_high: float = 101.0) -> Correction:
    """sg(clip(r, by the sign of A)) A log pi.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("dispo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.8000, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=SignCapped(pos_low, pos_high, neg_low, neg_high),
        aggregate="token-mean",
    )
