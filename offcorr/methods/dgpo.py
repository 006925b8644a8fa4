"""DGPO: a clip outside whose bounds c / r decays instead of dropping to 0.

    dL/dlogp_t = -c_t A_t / Z,    L = 1 - eps_low,  U = 1 + eps_high

    A_t < 0 and r_t < L:  c_t = r_t (r_t / L)^n
    A_t > 0 and r_t > U:  c_t = r_t (U / r_t)^(1/m)
    otherwise:            c_t = r_t

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. c_t is continuous at both bounds. The surrogate is sg(c / r) r A, whose value and derivative are both c A,
as in the authors' code; an integral of c would have the same gradient and other values.

Source: the authors' code, 2603.14389; no dual clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number, warn_of_distances


class Tails(NamedTuple):
    log_low: float
    log_high: float
    low_power: float
    high_power: float


def decaying_clip(log_ratio: Any, value: Any, advantage: Any, p: Any) -> Any:
    below, above = ops.minimum(value - p.log_low, 0.0), ops.maximum(value - p.log_high, 0.0)
    tail = ops.exp(ops.where(advantage < 0, p.low_power * below, -p.high_power * above))
    surrogate = tail * ops.exp(log_ratio) * advantage
    return surrogate, surrogate


@dataclass(frozen=True)
class DecayingClip(gates.Gate):
    """Surrogate sg(tail) ratio A; the multiplier is ratio * tail.

    tail = (ratio / L)^n for A < 0 and ratio < L, (U / ratio)^(1/m) for A > 0 and ratio > U, otherwise 1, with
    L = 1 - eps_low and U = 1 + eps_high (DGPO, 2603.14389).

    Args:
        eps_low, eps_high: distances of L and U from 1; eps_low < 1.
        n: exponent of the decay below L for A < 0; 0: no decay.
        m: inverse exponent of the decay above U for A > 0; at m = 1 ratio * tail stays at U.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    n: float = 1.0
    m: float = 2.0

    surrogate = staticmethod(decaying_clip)

    def __post_init__(self) -> None:
        for field in ("eps_low", "eps_high", "n"):
            check_number(self, field, low=0)
        check_number(self, "m", low=0, above=True)
        warn_of_distances("DecayingClip", eps_low=self.eps_low, eps_high=self.eps_high)
        if self.eps_low >= 1:
            raise ValueError(f"DecayingClip: eps_low is {self.eps_low!r}, expected a number < 1, so that L is above 0")

    @property
    def params(self) -> Tails:
        return Tails(math.log(1 - self.eps_low), math.log(1 + self.eps_high), self.n, 1 / self.m)


@register(
    "dgpo",
    multiplier="r (r / L)^n below L for A < 0, r (U / r)^(1/m) above U for A > 0, else r",
    paper="2603.14389",
    provenance="official code",
    notes="no dual clip; the surrogate's value is c A, as in the authors' code",
)
def dgpo(eps_low: float = 0.2, eps_high: float = 0.2, n: float = 1.0, m: float = 2.0) -> Correction:
    """Surrogate sg(c / r) r A, with c the ratio multiplied by decaying tails.

    Args:
        eps_low, eps_high: distances of L and U from 1; eps_low < 1.
        n: exponent of the decay below L for A < 0; 0: no decay.
        m: inverse exponent of the decay above U for A > 0; at m = 1 c stays at U.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("dgpo")(batch).coefficient  # the multipliers
    tensor([[1.4066, 0.6065, 1.8061]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=DecayingClip(eps_low, eps_high, n, m),
        aggregate="token-mean",
    )
