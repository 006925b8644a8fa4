"""AIPO (LlamaRL): truncated importance sampling against the policy that sampled.

dL/dlogp_t = -min(R_t, cap) A_t / Z, R the total ratio, detached.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "aipo",
    multiplier="min(R, cap)",
    paper="2505.24034",
    provenance="paper text",
    notes="no official code; caps between 2 and 10 are in use",
)
def aipo(cap: float = 4.0) -> Correction:
    """sg(min(R, cap)) A log pi.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("aipo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.DetachedClip(cap),
        aggregate="token-mean",
    )
