"""GMPO: the geometric mean of token ratios that are clipped one by one.

    dL/dlogp_t = -s A_t / Z on tokens that are not clipped, 0 on tokens that are
    s = (prod_t r'_t)^(1/T),    log r'_t = min(log r_t, eps_high) for A_t > 0, max(log r_t, -eps_low) for A_t <= 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; T is the number of valid tokens of the sequence; A_t is
the advantage and Z the denominator of the aggregation.

Source: the paper's text, 2507.20673, whose advantage is one number per sequence.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "gmpo",
    multiplier="s = geometric mean of the clipped ratios; 0 on clipped tokens",
    paper="2507.20673",
    provenance="paper text",
    notes="eps_low and eps_high are in log space; the paper's advantage is one number per sequence",
)
def gmpo(eps_low: float = 0.4, eps_high: float = 0.4) -> Correction:
    """Surrogate s A, with s the geometric mean of the sequence's one-sidedly clipped ratios.

    Args:
        eps_low, eps_high: distances of the clip bounds from 0 in log space, in nats.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("gmpo")(batch).coefficient  # the multipliers
    tensor([[0.0000, 1.1052, 0.0000]])
    """
    return Correction(
        ratio=ratios.ClippedGeometric(eps_low=eps_low, eps_high=eps_high),
        gate=gates.Unclipped(),
        aggregate="seq-mean-token-mean",
    )
