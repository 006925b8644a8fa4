"""Kimi's policy mirror descent, at token level the same as DRO: REINFORCE with a quadratic penalty.

    dL/dlogp_t = -(A_t - tau (logp_t - old_logp_t)) / Z

A_t is the advantage and Z the denominator of the aggregation. The penalty tau / 2 (logp_t - old_logp_t)^2 keeps the
policy near the one that supplies ``old_logp``.

Source: ROLL's and verl's code; papers 2501.12599 (Kimi k1.5) and 2405.19107 (DRO). The papers square the log-ratio of
the whole sequence; the frameworks and this method square each token's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios
from offcorr.stages.checks import check_number


class Pull(NamedTuple):
    tau: float


def quadratic(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    return advantage * logp - p.tau / 2 * log_ratio * log_ratio, advantage - p.tau * log_ratio


@dataclass(frozen=True)
class Quadratic(gates.Gate):
    """Surrogate A log pi - tau / 2 (log ratio)^2, for ratios in token form (Kimi k1.5, 2501.12599).

    The derivative is A - tau log ratio.

    Args:
        tau: strength of the penalty, in units of A per nat, >= 0.
    """

    tau: float = 0.1

    surrogate = staticmethod(quadratic)
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "tau", low=0)

    @property
    def params(self) -> Pull:
        return Pull(self.tau)


@register(
    "kimi",
    aliases=("dro",),
    multiplier="1 - tau (logp - old_logp) / A",
    paper="2501.12599; 2405.19107 (DRO)",
    provenance="framework code (ROLL, verl)",
    notes="each token's log-ratio is squared; the papers square that of the whole sequence",
)
def kimi(tau: float = 0.1) -> Correction:
    """Surrogate A log pi - tau / 2 (logp - old_logp)^2.

    Args:
        tau: strength of the penalty, in units of A per nat, >= 0.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("kimi")(batch).coefficient  # the multipliers
    tensor([[0.9500, 1.0500, 0.9000]])
    """
    return Correction(ratio=ratios.Token(), gate=Quadratic(tau), aggregate="token-mean")
