"""M2PO: importance sampling without the tokens that contribute most to the second moment of the log-ratio.

    dL/dlogp_t = -r_t A_t / Z on the tokens that are kept, 0 on the others

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. The tokens with the largest log^2 r are dropped until the mean of log^2 r over the remaining ones is at
most tau. There is one threshold for the global batch, found by an exact sort.

Source: the paper's text, 2510.01161. The released code differs from the paper. AReaL differs too: it compares old_logp
with rollout_logp instead of logp with old_logp, takes one threshold per micro-batch, and applies the mask to PPO's
clipped surrogate.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios
from offcorr.stages.controllers import MomentBudget


@register(
    "m2po",
    multiplier="r; the rejection drops the tokens with the largest log^2 r",
    paper="2510.01161",
    provenance="paper text",
    notes="the paper's rule, over the global batch; the released code differs; AReaL compares old_logp with "
    "rollout_logp, per micro-batch, and keeps PPO's clip",
)
def m2po(tau: float = 0.04) -> Correction:
    """Surrogate r A on the tokens that are kept.

    Args:
        tau: bound on the mean of log^2 r over the tokens that are kept, in nats^2.

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
