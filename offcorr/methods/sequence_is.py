"""Plain importance sampling with the sequence's product of ratios.

dL/dlogp_t = -min(ratio_t, cap) * A_t / Z, the ratio detached.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "sequence_is",
    multiplier="the ratio, at most cap",
    paper="Precup et al. 2000",
    provenance="textbook",
)
def sequence_is(cap: float | None = None) -> Correction:
    """sg(min(ratio, cap)) A log pi, ratio = the sequence's product of ratios; ``cap`` None: none.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("sequence_is")(batch).coefficient  # the multipliers
    tensor([[2.7183, 2.7183, 2.7183]])
    """
    return Correction(
        ratio=ratios.Sequence(),
        gate=gates.DetachedClip(cap),
        aggregate="token-mean",
    )
