"""PSPO: importance sampling with the ratio of a policy that is smoothed towards the old one.

    dL/dlogp_t = -(1 - alpha) r_t A_t / Z

The surrogate is ((1 - alpha) r_t + alpha) A_t, without a clip. r_t = exp(logp_t - old_logp_t) is the token's staleness
ratio; A_t is the advantage and Z the denominator of the aggregation. The constant alpha A_t has no gradient, so the
gradient is (1 - alpha) times that of unclipped importance sampling, on-policy too.

Source: TRL's pull request 4548, after 2509.21282.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.base import Number
from offcorr.stages.checks import check_number


class Share(NamedTuple):
    alpha: Number


def smoothed(log_ratio: Any, advantage: Any, p: Any) -> Any:
    gradient = (1 - p.alpha) * ops.exp(log_ratio) * advantage
    return gradient + p.alpha * advantage, gradient


@dataclass(frozen=True)
class SmoothedRatio(gates.Gate):
    """Surrogate ((1 - alpha) ratio + alpha) A: multiplier (1 - alpha) ratio (PSPO, 2509.21282).

    Args:
        alpha: the old policy's share of the smoothed one, in [0, 1).
    """

    alpha: Number = 0.1

    surrogate = staticmethod(smoothed)

    def __post_init__(self) -> None:
        check_number(self, "alpha", low=0)
        if not isinstance(self.alpha, Tensor) and self.alpha >= 1:
            raise ValueError(f"SmoothedRatio: alpha is {self.alpha!r}, expected a number < 1")

    @property
    def params(self) -> Share:
        return Share(self.alpha)


@register(
    "pspo",
    multiplier="(1 - alpha) r",
    paper="2509.21282",
    provenance="framework code (TRL, pull request)",
    notes="1 - alpha on-policy, as if the learning rate were smaller; no clip",
    on_policy=False,
)
def pspo(alpha: float = 0.1) -> Correction:
    """Surrogate ((1 - alpha) r + alpha) A.

    Args:
        alpha: the old policy's share of the smoothed one, in [0, 1).

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("pspo")(batch).coefficient  # the multipliers
    tensor([[1.4838, 0.5459, 2.4465]])
    """
    return Correction(ratio=ratios.Token(), gate=SmoothedRatio(alpha), aggregate="seq-mean-token-mean")
