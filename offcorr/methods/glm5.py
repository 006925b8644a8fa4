"""GLM-5: the policy gradient weighted by the total ratio, without the tokens whose ratio is outside an interval.

    dL/dlogp_t = -c_t A_t / Z
    c_t = R_t if 1 - eps_low < R_t < 1 + eps_high, otherwise 0

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio, detached: it scales the gradient and receives none; A_t
is the advantage and Z the denominator of the aggregation. Both ends are open: a token on a bound is dropped.

Source: GLM-5's report, 2602.15763, section 4.1.2, and SkyRL's code (``rollout_is``), whose .2 and .2 are the defaults
here; the report's own values could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.base import Number
from offcorr.stages.checks import check_number, warn_of_distances


class OpenInterval(NamedTuple):
    low: Number
    high: Number


def detached_mask(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    gradient = ops.where((ratio > p.low) & (ratio < p.high), ratio * advantage, 0.0)
    return gradient * logp, gradient


@dataclass(frozen=True)
class DetachedMask(gates.Gate):
    """Surrogate sg(ratio) A log pi where 1 - eps_low < ratio < 1 + eps_high, otherwise 0 (GLM-5, 2602.15763).

    The multiplier is the ratio, or 0 outside, whatever the sign of the advantage.

    Args:
        eps_low, eps_high: distances from 1, above 0.
    """

    eps_low: Number = 0.2
    eps_high: Number = 0.2

    surrogate = staticmethod(detached_mask)
    detached = True

    def __post_init__(self) -> None:
        check_number(self, "eps_low", low=0, high=1, above=True)
        check_number(self, "eps_high", low=0, above=True)
        warn_of_distances("DetachedMask", eps_low=self.eps_low, eps_high=self.eps_high)

    @property
    def params(self) -> OpenInterval:
        return OpenInterval(1 - self.eps_low, 1 + self.eps_high)


@register(
    "glm5",
    multiplier="R if 1 - eps_low < R < 1 + eps_high, otherwise 0",
    paper="2602.15763",
    provenance="framework code (SkyRL)",
    notes="SkyRL's rollout_is; the defaults are SkyRL's, the report's values are unread",
)
def glm5(eps_low: float = 0.2, eps_high: float = 0.2) -> Correction:
    """Surrogate sg(R) A log pi where 1 - eps_low < R < 1 + eps_high, otherwise 0.

    Args:
        eps_low, eps_high: distances of the open bounds from 1, above 0.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.1, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("glm5")(batch).coefficient  # the multipliers
    tensor([[1.1052, 0.0000, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=DetachedMask(eps_low, eps_high),
        aggregate="token-mean",
    )
