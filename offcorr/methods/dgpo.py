"""DGPO: a clip whose gradient decays outside the bounds where PPO's is cut to 0.

dL/dlogp_t = -c_t A_t / Z, with L = 1 - eps_low and U = 1 + eps_high:

    A < 0, r < L:  c = r (r / L)^n
    A > 0, r > U:  c = r (U / r)^(1/m)
    else           c = r

c is continuous at both bounds.  The loss reports sg(c / r) r A, whose value is c A and whose derivative is c A too, as
in the authors' code; the potential of c, an integral with other constants, would have the same gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number


class Tails(NamedTuple):
    log_low: float
    log_high: float
    low_power: float
    high_power: float


def decaying(log_ratio: Any, value: Any, advantage: Any, p: Any) -> Any:
    below, above = ops.minimum(value - p.log_low, 0.0), ops.maximum(value - p.log_high, 0.0)
    tail = ops.exp(ops.where(advantage < 0, p.low_power * below, -p.high_power * above))
    surrogate = tail * ops.exp(log_ratio) * advantage
    return surrogate, surrogate


@dataclass(frozen=True)
class Decaying(gates.Gate):
    """sg(tail) ratio A: multiplier ratio * tail, tail 1 inside or recovering, else (ratio / L)^n or (U / ratio)^(1/m).

    Args:
        eps_low, eps_high: distances from 1 of L and U.
        n: how fast it decays below L, for A < 0; 0: not at all.
        m: how slowly it decays above U, for A > 0; 1: c stays at U.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    n: float = 1.0
    m: float = 2.0

    surrogate = staticmethod(decaying)

    def __post_init__(self) -> None:
        for field in ("eps_low", "eps_high", "n"):
            check_number(self, field, low=0)
        check_number(self, "m", low=0, above=True)
        if self.eps_low >= 1:
            raise ValueError(f"Decaying: eps_low is {self.eps_low!r}, expected a number < 1, so that L is above 0")

    @property
    def params(self) -> Tails:
        return Tails(math.log(1 - self.eps_low), math.log(1 + self.eps_high), self.n, 1 / self.m)


@register(
    "dgpo",
    multiplier="r (r / L)^n below L for A < 0, r (U / r)^(1/m) above U for A > 0, else r",
    paper="2603.14389",
    provenance="official code",
    notes="no dual clip; the loss's value is c A",
)
def dgpo(eps_low: float = 0.2, eps_high: float = 0.2, n: float = 1.0, m: float = 2.0) -> Correction:
    """c A with the gradient c A, c the ratio with decaying tails.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("dgpo")(batch).coefficient  # the multipliers
    tensor([[1.4066, 0.6065, 1.8061]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=Decaying(eps_low, eps_high, n, m),
        aggregate="token-mean",
    )
