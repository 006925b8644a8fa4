"""CISPO: the policy gradient weighted by a clipped ratio, so that every token keeps a gradient.

    dL/dlogp_t = -clip(r_t, low, cap) A_t / Z

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio, detached: it scales the gradient and receives none; A_t
is the advantage and Z the denominator of the aggregation.

Source: the paper's text, 2506.13585 (MiniMax-M1); tested to equal TRL's loss. Frameworks name the bound differently:
TRL's ``epsilon_high`` is the cap itself, verl's is the cap minus 1.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "cispo",
    multiplier="clip(r, low, cap)",
    paper="2506.13585",
    provenance="paper text; tested to equal TRL's code",
    notes="TRL's epsilon_high is the cap itself; verl's is the cap minus 1",
)
def cispo(cap: float = 5.0, low: float = 0.0) -> Correction:
    """Surrogate sg(clip(r, low, cap)) A log pi.

    Args:
        cap: upper bound on r itself, not a distance from 1.
        low: lower bound on r; 0: none.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("cispo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.DetachedClip(cap, low),
        aggregate="token-mean",
    )
