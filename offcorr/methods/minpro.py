"""MinPRO: the policy gradient weighted by the token's ratio times the smallest ratio before it.

    dL/dlogp_t = -clip(r_t min_{s < t} r_s, 1 - eps_low, 1 + eps_high) A_t / Z

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; the minimum is over earlier valid tokens, and 1 for the
first; the weight is detached; A_t is the advantage and Z the denominator of the aggregation.

Source: notes by others about 2601.22718, which publishes neither eps nor code. The lower bound matters: in trials, .8
did no better than no correction, so eps_low is 1 by default, which is no lower bound. The running minimum may exceed 1,
as in the formula; ``bounded=True`` bounds it by 1.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios
from offcorr.stages.checks import check_value, warn_of_distances


@register(
    "minpro",
    multiplier="clip(r_t min_{s < t} r_s, 1 - eps_low, 1 + eps_high)",
    paper="2601.22718",
    provenance="notes by others about the paper",
    notes="the minimum is over the earlier valid tokens, and 1 for the first, which has none; eps is unpublished; "
    "no official code",
)
def minpro(eps_low: float = 1.0, eps_high: float = 0.28, bounded: bool = False) -> Correction:
    """Surrogate sg(clip(w, 1 - eps_low, 1 + eps_high)) A log pi, with w the ratio times the smallest ratio before it.

    The first valid token has none before it: there the minimum is 1, and w is the token's own ratio.

    Args:
        eps_low, eps_high: distances of the bounds from 1; eps_low = 1 is no lower bound.
        bounded: whether the running minimum is bounded by 1.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("minpro")(batch).coefficient  # the multipliers
    tensor([[1.2800, 1.0000, 1.2800]])
    """
    check_value("minpro", "eps_low", eps_low, low=0, high=1)
    check_value("minpro", "eps_high", eps_high, low=0)
    warn_of_distances("minpro", eps_high=eps_high)
    return Correction(
        ratio=ratios.MinPrefix(bounded=bounded),
        gate=gates.DetachedClip(cap=1 + eps_high, low=1 - eps_low),
        aggregate="token-mean",
    )
