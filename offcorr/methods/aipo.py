"""AIPO (LlamaRL): the policy gradient weighted by the truncated ratio to the policy that sampled.

    dL/dlogp_t = -min(R_t, cap) A_t / Z

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio, detached: it scales the gradient and receives none; A_t
is the advantage and Z the denominator of the aggregation.

Source: the paper's text, 2505.24034; there is no official code. Caps between 2 and 10 are in use.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "aipo",
    multiplier="min(R, cap)",
    paper="2505.24034",
    provenance="paper text",
    notes="no official code; caps between 2 and 10 are in use",
)
def aipo(cap: float = 4.0) -> Correction:
    """Surrogate sg(min(R, cap)) A log pi.

    Args:
        cap: upper bound on R.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("aipo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.DetachedClip(cap),
        aggregate="token-mean",
    )
