"""VCPO, its loss: REINFORCE weighted by the truncated total sequence ratio.

dL/dlogp_t = -min(prod R, cap) A_t / Z, the weight detached.  The rest of VCPO is not part of a loss: a learning rate
that follows the effective sample size, and a minimum-variance baseline in the advantages.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, weights


@register(
    "vcpo",
    multiplier="1; the weight is min(prod R, cap)",
    paper="2602.17616",
    provenance="official code",
    notes="the weight is of the total ratio; the released code's is old - rollout, the same at a batch's first step",
)
def vcpo(cap: float = 8.0) -> Correction:
    """min(sequence R, cap) A log pi.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("vcpo")(batch).coefficient  # the multipliers
    tensor([[2.7183, 2.7183, 2.7183]])
    """
    return Correction(
        ratio=None,
        gate=gates.ScoreFunction(),
        weight=weights.Truncate(cap, level="sequence", mismatch="total"),
        aggregate="seq-mean-token-mean",
    )
