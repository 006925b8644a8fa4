"""CISPO: clip the weight, keep every gradient.

dL/dlogp_t = -clip(r_t, low, cap) A_t / Z, the ratio detached.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "cispo",
    multiplier="min(r, cap), never 0",
    paper="2506.13585",
    provenance="paper text; equals TRL's code (tested)",
    notes="TRL's epsilon_high is cap itself; verl's is cap - 1",
)
def cispo(cap: float = 5.0, low: float = 0.0) -> Correction:
    """sg(clip(r, low, cap)) A log pi.

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
