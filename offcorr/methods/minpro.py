"""MinPRO: the token ratio times the smallest ratio before it.

dL/dlogp_t = -clip(r_t min_{s<t} r_s, 1 - eps_low, 1 + eps_high) A_t / Z, the ratio detached.

The paper publishes no eps and no code.  The lower bound decides much: .8 did as badly as no correction in trials, so
eps_low defaults to 1 (no lower bound).  The running minimum is taken literally; ``bounded`` keeps it at or below 1.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "minpro",
    multiplier="clip(r_t min of the ratios before, 1 - eps_low, 1 + eps_high)",
    paper="2601.22718",
    provenance="secondary",
    notes="eps is unpublished; no official code",
)
def minpro(eps_low: float = 1.0, eps_high: float = 0.28, bounded: bool = False) -> Correction:
    """sg(clip(min-prefix ratio)) A log pi.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("minpro")(batch).coefficient  # the multipliers
    tensor([[1.2800, 1.0000, 1.2800]])
    """
    return Correction(
        ratio=ratios.MinPrefix(bounded=bounded),
        gate=gates.DetachedClip(cap=1 + eps_high, low=1 - eps_low),
        aggregate="token-mean",
    )
