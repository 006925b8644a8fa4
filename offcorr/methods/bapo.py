"""BAPO: PPO's clip with bounds that are raised until positive terms balance negative ones.

    dL/dlogp_t = -c_t A_t / Z
    c_t = r_t, unless r_t > c_high for A_t > 0, or r_t < c_low or r_t > dual_clip for A_t < 0: then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. The bounds start at [low_start, high_start]. While the sum of the positive terms min(r, c_high) A over the
global batch is below ``target`` times the sum of the negative terms max(r, c_low) |A|, first c_low and then c_high is
raised by its step up to its maximum. Raising c_low never lowers the negative sum, so where the first bounds miss the
target, c_low ends at low_max. ``loss_fn.resolve(loss_fn.statistics(batch)).gate`` is the clip with the chosen bounds.

Source: the authors' code, 2510.18927. Two differences: the code's target, used here, is positive / negative, whereas
the paper's rho_0 is the share positive / (positive + negative), so that its .5 is 1 here; and the code balances each
micro-batch, whereas this method balances the global batch.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import ratios
from offcorr.stages.controllers import BalancedClip


@register(
    "bapo",
    multiplier="r; 0 where clipped (r > c_high for A > 0; r < c_low or r > dual_clip for A < 0)",
    paper="2510.18927",
    provenance="official code",
    notes="target is positive / negative, as in the code; the paper's rho_0 is a share, and its .5 is 1 here; "
    "the code balances each micro-batch, this method the global batch",
)
def bapo(
    target: float = 1.0,
    low_start: float = 0.6,
    low_max: float = 0.8,
    low_step: float = 0.05,
    high_start: float = 1.2,
    high_max: float = 2.0,
    high_step: float = 0.05,
    dual_clip: float | None = 3.0,
) -> Correction:
    """Surrogate min(r A, clip(r, c_low, c_high) A), with bounds chosen on the global batch.

    Args:
        target: smallest ratio of the positive to the negative sum.
        low_start, low_max, low_step: first value, maximum and step of c_low, a bound on r itself.
        high_start, high_max, high_step: first value, maximum and step of c_high, a bound on r itself.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("bapo")(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=BalancedClip(target, low_start, low_max, low_step, high_start, high_max, high_step, dual_clip),
        aggregate="token-mean",
    )
