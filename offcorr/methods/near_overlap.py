"""Near overlap: the policy gradient weighted by a bounded ratio of the tokens around each one.  Experimental.

    dL/dlogp_t = -c_t A_t / Z,    c_t = 2 w_t / (1 + w_t),    log w_t = sum_u lam^|t - u| d_u

d_u = logp_u - rollout_logp_u is the token's total log-ratio, the staleness logp_u - old_logp_u where there is no
``rollout_logp``; |t - u| counts valid tokens; the sum is over the sequence's valid tokens, before and after; w is
detached; A_t is the advantage and Z the denominator of the aggregation. c is the ratio of the policy to the even
mixture of itself and the sampler, the harmonic mean of 1 and w: at most 2, smooth, and 1 on-policy. With lam = 0 w is
the token's ratio, with lam = 1 the sequence's. Where the log-ratios are independent with standard deviation sigma, the
variance of log w is at most (1 + lam^2) / (1 - lam^2) sigma^2, whatever the length.

Source: this project; docs/math.md derives it and docs/lab.md says where it wins and where it loses.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ratios


@register(
    "near_overlap",
    multiplier="2 w / (1 + w), log w the sum of log R over the sequence, a token n away counting lam^n",
    paper="this project",
    provenance="own derivation (docs/math.md)",
    notes="experimental; R is r where there is no rollout_logp",
)
def near_overlap(lam: float = 0.8, mismatch: Mismatch | None = None) -> Correction:
    """Surrogate sg(2 w / (1 + w)) A log pi, with w the product of the ratios around the token.

    Args:
        lam: how far around: a token n valid tokens away counts lam^n, from 0 (the token alone) to 1 (the sequence).
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("near_overlap", lam=0.5)(batch).coefficient  # the multipliers
    tensor([[1.2449, 1.1244, 1.4116]])
    """
    return Correction(
        ratio=ratios.Nearby(lam, mismatch=mismatch),
        gate=gates.Overlap(),
        aggregate="token-mean",
    )
