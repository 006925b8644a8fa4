"""DPPO with the Bernoulli KL in the place of a difference of probabilities.

dL/dlogp_t = -min(R_t, cap) M_t A_t / Z, R the total ratio, detached.  M drops a token whose Bernoulli KL from the
rollout's is above ``delta`` and that moves on in the direction that A pushes.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.dppo import dppo
from offcorr.methods.registry import register


@register(
    "dppo_kl",
    multiplier="min(R, cap)",
    paper="2602.04879",
    provenance="official code",
    notes='dppo with divergence="kl"; the anchor is the rollout policy',
)
def dppo_kl(delta: float = 0.05, cap: float | None = 20.0) -> Correction:
    """sg(min(R, cap)) A log pi on the tokens whose Bernoulli KL stayed small, or that move back.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("dppo_kl", max_length=3)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return dppo("kl", delta=delta, cap=cap)
