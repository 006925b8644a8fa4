"""PNPO: the policy gradient weighted by the geometric prefix ratio, without the tokens where it is outside an interval.

    dL/dlogp_t = -c_t A_t / Z
    c_t = w_t if h_t log(low) <= log w_t <= h_t log(high), otherwise 0
    w_t = (prod_{s <= t} r_s)^(1/t),    h_t = (T/t)^length_power

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; t counts the T valid tokens of the sequence from 1; A_t
is the advantage and Z the denominator of the aggregation. w_t is detached: it scales the gradient and receives none.
The interval is wide at the first tokens and [low, high] at the last; ``length_power=0`` keeps it fixed.

Source: a reader's notes about 2608.01418. Weight, detached surrogate, rejection and the power of T/t are from there;
the numbers low and high are in no source that could be read, so that they have no default. That the interval is closed,
and that h_t multiplies the logarithms of its ends, is assumed. This is the mechanism, not a reproduction of the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ops, ratios, rejections
from offcorr.stages.base import Number
from offcorr.stages.checks import check_mismatch, check_number, check_order, warn_of_bounds


class Narrowing(NamedTuple):
    low: Number
    high: Number
    power: Number


def within_narrowing(value: Any, position: Any, length: Any, p: Any) -> Any:
    width = ops.exp(p.power * (ops.log(ops.maximum(length, 1.0)) - ops.log(ops.maximum(position, 1.0))))
    return ops.zeros_like(value) + 1, (value >= p.low * width) & (value <= p.high * width)


@dataclass(frozen=True)
class NarrowingInterval(rejections.Rejection):
    """Keep tokens whose geometric prefix ratio lies in an interval that narrows with the position (PNPO, 2608.01418).

    The interval is [low^h, high^h] with h = (T/t)^length_power: [low, high] at the last of the T valid tokens.

    Args:
        low, high: absolute bounds on the t-th root of the product, at the last token.
        length_power: 0 keeps the interval fixed.
        mismatch: the pair of policies that is compared.
    """

    low: float
    high: float
    length_power: Number = 0.5
    mismatch: Mismatch = "staleness"

    span = "prefix_geometric"
    rule = staticmethod(within_narrowing)

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, above=True)
        check_number(self, "high", low=0, above=True)
        check_order(self, "low", "high")
        warn_of_bounds("NarrowingInterval", "are dropped", low=self.low, high=self.high)
        check_number(self, "length_power", low=0)
        check_mismatch(self)

    @property
    def params(self) -> Narrowing:
        return Narrowing(math.log(self.low), math.log(self.high), self.length_power)


@register(
    "pnpo",
    multiplier="w = (prod of r_s, s <= t)^(1/t) if h log(low) <= log w <= h log(high), otherwise 0; "
    "h = (T/t)^length_power",
    paper="2608.01418",
    provenance="notes by others about the paper",
    notes="low and high are in no source that could be read: required; not a reproduction",
    example={"low": 0.8, "high": 1.25},
)
def pnpo(low: float, high: float, length_power: float = 0.5) -> Correction:
    """Surrogate sg(w) A log pi where the geometric prefix ratio w is inside an interval that narrows to [low, high].

    Args:
        low, high: bounds on w at the last token of the sequence.
        length_power: exponent of T/t, by which the logarithms of the bounds are multiplied; 0: a fixed interval.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("pnpo", low=0.7, high=1.35)(batch).coefficient  # the multipliers
    tensor([[1.6487, 1.0000, 0.0000]])
    """
    return Correction(
        ratio=ratios.PrefixGeometric(),
        gate=gates.DetachedRatio(),
        reject=NarrowingInterval(low, high, length_power),
        aggregate="seq-mean-token-mean",
    )
