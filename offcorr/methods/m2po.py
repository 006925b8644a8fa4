"""M2PO: drop the tokens that carry too much of the ratio's second moment.

dL/dlogp_t = -r_t A_t / Z on the kept tokens, else 0.  Dropped are the tokens with the largest log^2 r, until the mean
of log^2 r over what is left is at most tau: one threshold for the global batch, by an exact sort.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios
from offcorr.stages.controllers import MomentBudget


@register(
    "m2po",
    multiplier="r on kept tokens, else 0",
    paper="2510.01161",
    provenance="paper text",
    notes="the released code differs from the paper; this is the paper's, over the global batch",
)
def m2po(tau: float = 0.04) -> Correction:
    """r A on the tokens within the budget.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("m2po", tau=0.25)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Unclipped(),
        reject=MomentBudget(tau),
        aggregate="token-mean",
    )
