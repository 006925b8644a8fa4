"""Plain importance sampling with the token's ratio.

    dL/dlogp_t = -min(w_t, cap) A_t / Z,    w_t = r_t

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. The weight w_t is detached: it scales the gradient and receives none.

Source: Precup et al., 2000.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "token_is",
    multiplier="min(r_t, cap)",
    paper="Precup et al. 2000",
    provenance="textbook",
)
def token_is(cap: float | None = None) -> Correction:
    """Surrogate sg(min(w, cap)) A log pi, with w the token's ratio.

    Args:
        cap: upper bound on w; None: no bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("token_is")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.DetachedClip(cap),
        aggregate="token-mean",
    )
