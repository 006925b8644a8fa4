"""LUSPO: GSPO with every sequence weighted by its length.

dL/dlogp_t = -s A_t / Z inside or recovering, else 0; s is the geometric ratio.  The factor T is in the aggregation: a
sum over tokens, averaged over sequences.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "luspo",
    multiplier="s inside or recovering, else 0",
    paper="2602.05261",
    provenance="paper text",
    notes="the factor T is the token sum of the aggregation; do not multiply by it again",
)
def luspo(eps_low: float = 2e-3, eps_high: float = 2.5e-3, dual_clip: float | None = None) -> Correction:
    """min(s A, clip(s) A), s the geometric ratio, in token form, summed over tokens.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -1 * offcorr.get("luspo", eps_high=0.5)(batch).coefficient  # the multipliers
    tensor([[1.3956, 1.3956, 1.3956]])
    """
    return Correction(
        ratio=ratios.Geometric(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="seq-mean-token-sum",
    )
