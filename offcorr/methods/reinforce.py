"""REINFORCE: the policy gradient without any off-policy correction.

    dL/dlogp_t = -A_t / Z

A_t is the advantage and Z the denominator of the aggregation.

Source: Williams, 1992.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates


@register(
    "reinforce",
    multiplier="1",
    paper="Williams 1992",
    provenance="textbook",
)
def reinforce() -> Correction:
    """Surrogate A log pi, averaged over tokens; no ratio and no options.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("reinforce")(batch).coefficient  # the multipliers
    tensor([[1., 1., 1.]])
    """
    return Correction(
        ratio=None,
        gate=gates.ScoreFunction(),
        aggregate="token-mean",
    )
