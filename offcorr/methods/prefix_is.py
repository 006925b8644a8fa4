"""Plain importance sampling with the running product of ratios.

    dL/dlogp_t = -min(w_t, cap) A_t / Z,    w_t = prod_{s <= t} r_s

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. The weight w_t is detached: it scales the gradient and receives none.

Source: Precup et al., 2000 (per-decision importance sampling).
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "prefix_is",
    aliases=("cumulative_is",),
    multiplier="min(prod of r_s up to and including t, cap)",
    paper="Precup et al. 2000",
    provenance="textbook",
)
def prefix_is(cap: float | None = None) -> Correction:
    """Surrogate sg(min(w, cap)) A log pi, with w the running product of ratios.

    Args:
        cap: upper bound on w; None: no bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("prefix_is")(batch).coefficient  # the multipliers
    tensor([[1.6487, 1.0000, 2.7183]])
    """
    return Correction(
        ratio=ratios.Prefix(),
        gate=gates.DetachedClip(cap),
        aggregate="token-mean",
    )
