"""GMPO: the geometric mean of token ratios that were clipped one by one.

dL/dlogp_t = -s A_t / Z on tokens that were not clipped, 0 on those that were; s is the T-th root of the product of the
ratios, each clipped in log space before the mean: above at eps_high for A > 0, below at -eps_low for A <= 0.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "gmpo",
    multiplier="s on tokens that were not clipped, else 0",
    paper="2507.20673",
    provenance="paper text",
    notes="eps_low and eps_high are in log space; the paper's advantage is one number a sequence",
)
def gmpo(eps_low: float = 0.4, eps_high: float = 0.4) -> Correction:
    """s A, s the geometric mean of one-sidedly clipped ratios.

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
