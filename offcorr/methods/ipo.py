"""IPO of prime-rl: importance sampling of tokens whose probability has moved little, and a pull to the sampler's.

    dL/dlogp_t = -(keep_t R_t A_t - 2 kl_tau D_t) / Z
    keep_t = 1[|p_t - mu_t| <= threshold]

D_t = logp_t - rollout_logp_t is the total log-ratio and R_t = exp(D_t); p_t = exp(logp_t) and mu_t =
exp(rollout_logp_t) are the token's probabilities; A_t is the advantage and Z the denominator of the aggregation. keep_t
is detached and does not look at the sign of A_t. The pull, off by default, acts on every valid token: on those that are
not kept and on those with A_t = 0 too.

Source: prime-rl's code (``ipo_loss_fn``). Until September 2026 its values were .1 and 1e-3. This is not the
preference optimisation of the same name (2310.12036).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number, warn_of_differences
from offcorr.stages.rejections import probability_distance


class Region(NamedTuple):
    threshold: float
    kl_tau: float


def kept_or_pulled(log_ratio: Any, logp: Any, anchor_logp: Any, advantage: Any, p: Any) -> Any:
    kept = probability_distance(logp, anchor_logp) <= p.threshold
    weighted = ops.where(kept, ops.exp(log_ratio) * advantage, 0.0)
    return weighted - p.kl_tau * log_ratio * log_ratio, weighted - 2 * p.kl_tau * log_ratio


@dataclass(frozen=True)
class ProbabilityRegion(gates.Gate):
    """Surrogate ratio A where the probability has moved by at most ``threshold``, minus kl_tau (log ratio)^2 anywhere.

    The derivative is ratio A, or 0 beyond the threshold, minus 2 kl_tau log ratio.

    Args:
        threshold: on the distance of the two probabilities of the token, to either side.
        kl_tau: strength of the pull, in units of A per nat^2, >= 0.
    """

    threshold: float = 0.3
    kl_tau: float = 0.0

    surrogate = staticmethod(kept_or_pulled)

    def __post_init__(self) -> None:
        check_number(self, "threshold", low=0)
        check_number(self, "kl_tau", low=0)
        warn_of_differences("ProbabilityRegion", threshold=self.threshold)

    @property
    def scales_with_advantage(self) -> bool:
        return self.kl_tau == 0

    @property
    def params(self) -> Region:
        return Region(self.threshold, self.kl_tau)


@register(
    "ipo",
    multiplier="R where |p - mu| <= threshold, otherwise 0; less 2 kl_tau D / A, with D = log R",
    paper="prime-rl",
    provenance="framework code (prime-rl)",
    notes="not preference IPO; before September 2026 threshold .1 and kl_tau 1e-3",
)
def ipo(threshold: float = 0.3, kl_tau: float = 0.0) -> Correction:
    """Surrogate R A where |p - mu| <= threshold, minus kl_tau (logp - rollout_logp)^2 on every valid token.

    Args:
        threshold: on the distance of the token's probability from the sampler's.
        kl_tau: strength of the pull to the sampler's log-prob, in units of A per nat^2, >= 0.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("ipo", threshold=0.2)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=ProbabilityRegion(threshold, kl_tau),
        aggregate="token-mean",
    )
