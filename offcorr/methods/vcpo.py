"""VCPO's loss: REINFORCE weighted by the truncated total ratio of the sequence.

    dL/dlogp_t = -min(prod_t R_t, cap) A_t / Z

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio; A_t is the advantage and Z the denominator of the
aggregation. The weight is detached: it scales the gradient and receives none. The two other parts of VCPO are outside
the loss: the learning rate that follows the effective sample size (``offcorr.training.ess_lr``) and the
minimum-variance baseline (``offcorr.training.baselines``).

Source: the authors' code, 2602.17616. Their weight compares old_logp with rollout_logp; here it compares logp with
rollout_logp, which is the same at the first optimizer step on a batch.
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
    notes="the weight is the total ratio; the released code's compares old_logp with rollout_logp, the same at "
    "the first step on a batch. This is VCPO's loss alone: its learning rate is ess_lr='sqrt' of GRPOConfig, and its "
    "baseline is in recipes/vcpo.py",
)
def vcpo(cap: float = 8.0) -> Correction:
    """Surrogate sg(min(prod R, cap)) A log pi.

    Args:
        cap: upper bound on the sequence's total ratio.

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
