"""DPPO: the policy gradient without the tokens whose probability has moved too far from the rollout's.

    dL/dlogp_t = -M_t min(R_t, cap) A_t / Z

    "tv":  M_t = 0 where p_t - mu_t > high for A_t > 0, or p_t - mu_t < -low for A_t <= 0; else 1
    "kl":  M_t = 0 where the Bernoulli KL(mu_t, p_t) > delta and p_t has moved from mu_t in the direction that A_t
           pushes it; else 1

p_t = exp(logp_t) and mu_t = exp(rollout_logp_t); R_t = p_t / mu_t is the token's total ratio, detached; A_t is the
advantage and Z the denominator of the aggregation, a constant length by default.

Source: the authors' code, 2602.04879. The policy that supplies the old log-probs is the rollout policy.
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "dppo",
    aliases=("dppo_tv",),
    multiplier="min(R, cap); the rejection drops tokens whose probability moved too far",
    paper="2602.04879",
    provenance="official code",
    notes="low and high bound a difference of probabilities; ratios are relative to the rollout policy; with a "
    "KL: dppo_kl",
)
def dppo(
    divergence: Literal["tv", "kl"] = "tv",
    low: float = 0.2,
    high: float = 0.2,
    delta: float = 0.05,
    cap: float | None = 20.0,
) -> Correction:
    """Surrogate sg(min(R, cap)) A log pi on the tokens that are kept.

    Args:
        divergence: "tv": the difference of probabilities; "kl": the Bernoulli KL of this token against all others.
        low, high: bounds on the difference of probabilities, for "tv".
        delta: bound on the KL in nats, for "kl".
        cap: upper bound on R; None: no bound.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("dppo", max_length=3)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.DetachedClip(cap),
        reject=rejections.DPPO(divergence, low, high, delta),
        aggregate="seq-mean-token-sum-norm",
    )
