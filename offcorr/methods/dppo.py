"""DPPO: drop tokens by how far their probability moved, not by their ratio.

dL/dlogp_t = -min(R_t, cap) M_t A_t / Z, R the total ratio, detached.  M drops a token whose probability has moved from
the rollout's, in the direction that A pushes, by more than ``low`` or ``high`` (divergence "tv"), or whose Bernoulli
KL is above ``delta`` (divergence "kl").
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "dppo",
    aliases=("dppo_tv",),
    multiplier="min(R, cap)",
    paper="2602.04879",
    provenance="official code",
    notes="low and high bound a difference of probabilities; the anchor is the rollout policy; with a KL: dppo_kl",
)
def dppo(
    divergence: Literal["tv", "kl"] = "tv",
    low: float = 0.2,
    high: float = 0.2,
    delta: float = 0.05,
    cap: float | None = 20.0,
) -> Correction:
    """sg(min(R, cap)) A log pi on the tokens whose probability stayed close.

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
