"""BAPO: PPO's clip with bounds that are raised until praise balances blame.

dL/dlogp_t = -c_t A_t / Z, c_t as PPO inside [c_low, c_high] and with dual_clip.  From [low_start, high_start], first
c_low and then c_high is raised step by step to its maximum, until over the global batch the sum of the positive terms
min(r, c_high) A is at least ``target`` times that of the negative ones max(r, c_low) |A|.  Measured like that, as in
the authors' code, raising c_low never helps: where the first bounds miss the target, c_low ends at low_max.
``loss_fn.resolve(loss_fn.statistics(batch)).gate`` is the clip with the bounds found.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import ratios
from offcorr.stages.controllers import BalancedClip


@register(
    "bapo",
    multiplier="r inside [c_low, c_high] or recovering, else 0",
    paper="2510.18927",
    provenance="official code",
    notes="target is positive / negative, as in the code; the paper's rho_0 is a share, .5 there is 1 here; "
    "the code balances each micro-batch, here it is the global batch",
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
    """min(r A, clip(r, c_low, c_high) A), the bounds found on the global batch.

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
