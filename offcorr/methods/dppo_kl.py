"""DPPO with the Bernoulli KL in place of the difference of probabilities.

    dL/dlogp_t = -M_t min(R_t, cap) A_t / Z
    M_t = 0 where the Bernoulli KL(mu_t, p_t) > delta and p_t has moved from mu_t in the direction that A_t pushes it;
          else 1

p_t = exp(logp_t) and mu_t = exp(rollout_logp_t); R_t = p_t / mu_t is the token's total ratio, detached; A_t is the
advantage and Z the denominator of the aggregation, a constant length by default. The Bernoulli distributions are those
of this token against all others: KL(mu, p) = mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)).

Source: the authors' code, 2602.04879.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.dppo import dppo
from offcorr.methods.registry import register


@register(
    "dppo_kl",
    multiplier="min(R, cap); the rejection drops tokens whose Bernoulli KL is too large",
    paper="2602.04879",
    provenance="official code",
    notes='dppo with divergence="kl"; ratios are relative to the rollout policy',
)
def dppo_kl(delta: float = 0.05, cap: float | None = 20.0) -> Correction:
    """Surrogate sg(min(R, cap)) A log pi on the tokens that are kept.

    Args:
        delta: bound on the KL, in nats.
        cap: upper bound on R; None: no bound.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("dppo_kl", max_length=3)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return dppo("kl", delta=delta, cap=cap)
