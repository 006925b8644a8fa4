"""DRPO: importance sampling with a quadratic penalty on the distance of the ratio from 1, weighted by |A|.

    dL/dlogp_t = -c_t A_t / Z
    c_t = R_t (1 - sign(A_t) m_t (R_t - 1) / delta)
    m_t = mu_t = exp(rollout_logp_t) with divergence="tv";  m_t = 1 with divergence="chi2" (SPO, 2401.16025)

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio; A_t is the advantage and Z the denominator of the
aggregation. Beyond m_t |R_t - 1| = delta on the side that the advantage pushes towards, c_t is negative: the token is
pulled back.

With "tv", m_t |R_t - 1| is the change of the token's probability, which is at most 1: at the default delta c_t stays
within 8 % of R_t, so that there is hardly a trust region. ``delta`` near DPPO's .2 makes one.

Source: UniRL's code, and the paper, 2606.09821, whose recipe takes the sums of sequences over a constant length:
``aggregate="seq-mean-token-sum-norm", max_length=8192``. This is not the DRPO of 2510.04474.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.base import Number, Pointwise
from offcorr.stages.checks import check_choice, check_number


class Radius(NamedTuple):
    delta: Number


def penalised(log_ratio: Any, advantage: Any, scale: Any) -> Any:
    """ratio A - scale |A| (ratio - 1)^2 / 2 and its derivative in the log-ratio."""
    ratio = ops.exp(log_ratio)
    pull = scale * ops.abs(advantage) * (ratio - 1)
    return ratio * advantage - pull * (ratio - 1) / 2, ratio * (advantage - pull)


def penalised_by_probability(log_ratio: Any, anchor_logp: Any, advantage: Any, p: Any) -> Any:
    return penalised(log_ratio, advantage, ops.exp(anchor_logp) / p.delta)


def penalised_by_ratio(log_ratio: Any, advantage: Any, p: Any) -> Any:
    return penalised(log_ratio, advantage, 1 / p.delta)


@dataclass(frozen=True)
class RatioPenalty(gates.Gate):
    """Surrogate ratio A - |A| m (ratio - 1)^2 / (2 delta) (DRPO, 2606.09821).

    The multiplier is ratio (1 - sign(A) m (ratio - 1) / delta).

    Args:
        delta: the distance m |ratio - 1| at which the multiplier of an outward token is 0.
        divergence: "tv", m is the token's probability under the policy compared against; "chi2", m is 1.
    """

    delta: Number = 12.5
    divergence: Literal["tv", "chi2"] = "tv"

    def __post_init__(self) -> None:
        check_number(self, "delta", low=0, above=True)
        check_choice(self, "divergence", ("tv", "chi2"))

    @property
    def surrogate(self) -> Pointwise:
        return penalised_by_probability if self.divergence == "tv" else penalised_by_ratio

    @property
    def params(self) -> Radius:
        return Radius(self.delta)


@register(
    "drpo",
    multiplier="R (1 - sign(A) m (R - 1) / delta), m = mu (divergence='tv') or 1 ('chi2')",
    paper="2606.09821; 2401.16025 (SPO)",
    provenance="official code (UniRL)",
    notes="at the default delta hardly a trust region; not the DRPO of 2510.04474",
)
def drpo(delta: float = 12.5, divergence: Literal["tv", "chi2"] = "tv") -> Correction:
    """Surrogate R A - |A| m (R - 1)^2 / (2 delta), with m the sampler's probability of the token, or 1.

    Args:
        delta: the distance m |R - 1| at which the multiplier of an outward token is 0.
        divergence: "tv", m is the sampler's probability of the token; "chi2", m is 1 (SPO).

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("drpo", delta=0.2)(batch).coefficient  # the multipliers
    tensor([[ 0.9250,  0.7680, -0.4423]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=RatioPenalty(delta, divergence),
        aggregate="token-mean",
    )
