"""Kimi's policy mirror descent (DRO is the same at token level): REINFORCE with a quadratic pull to the anchor.

dL/dlogp_t = -(A_t - tau (logp_t - old_logp_t)) / Z.
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
    """A log pi - tau / 2 (log ratio)^2, for ratios in token form.

    Args:
        tau: strength of the pull, in units of A per nat.
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
    paper="2501.12599; DRO 2405.19107",
    provenance="ROLL's and verl's code",
    notes="token level; the papers square the whole sequence's log-ratio",
)
def kimi(tau: float = 0.1) -> Correction:
    """A log pi - tau / 2 (logp - old_logp)^2.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("kimi")(batch).coefficient  # the multipliers
    tensor([[0.9500, 1.0500, 0.9000]])
    """
    return Correction(ratio=ratios.Token(), gate=Quadratic(tau), aggregate="token-mean")
