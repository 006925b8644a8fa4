"""Importance weights of whole sequences, for the sequences whose geometric ratio is inside an interval.

    dL/dlogp_t = -W 1[low <= W^(1/T) <= high] A_t / Z,    W = prod_t R_t

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio; the product is over the T valid tokens of the sequence;
A_t is the advantage and Z the denominator of the aggregation. W is detached: it scales the gradient and receives none.
It has no cap: within the interval it is at most high^T.

Source: the text of prime-rl's issue 3384; the code, whose name for it is ``seq_mis``, could not be read, nor its two
numbers, so that low and high have no default. Bounds in use elsewhere mean quite different filters: .999 and 1.001
(verl), .99 and 1.01 (SkyRL), .1 and 10 (an older mask of prime-rl). The ``seq_mis`` of this library is TRL's, which
tests the product itself.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, rejections, weights


@register(
    "geo_mis",
    multiplier="1; the weight is W = prod R, the rejection keeps sequences with low <= W^(1/T) <= high",
    paper="prime-rl",
    provenance="issue text (prime-rl)",
    notes="prime-rl's seq_mis; its bounds could not be read: required",
    example={"low": 0.5, "high": 2.0},
)
def geo_mis(low: float, high: float) -> Correction:
    """Surrogate sg(W) A log pi, with W = prod R, for sequences whose geometric ratio W^(1/T) is inside [low, high].

    Args:
        low, high: bounds on the geometric ratio.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("geo_mis", low=0.5, high=2.0)(batch).coefficient  # the multipliers
    tensor([[2.7183, 2.7183, 2.7183]])
    """
    return Correction(
        ratio=None,
        gate=gates.ScoreFunction(),
        weight=weights.Truncate(None, level="sequence", mismatch="total"),
        reject=rejections.Geometric(low, high, mismatch="total"),
        aggregate="token-mean",
    )
