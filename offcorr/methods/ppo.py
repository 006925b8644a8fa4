"""PPO's clipped surrogate, with GRPO's aggregation: the mean over sequences of token means.

    dL/dlogp_t = -c_t A_t / Z
    c_t = r_t, unless r_t is outside [1 - eps_low, 1 + eps_high] on the side that the advantage pushes towards
          (above for A_t > 0, below for A_t < 0): then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. The clipped branch has no gradient because there the update has already gone as far as the bound allows; on
the other side of the interval the gradient leads back to it and is kept.

Source: the papers' text, 1707.06347 (PPO) and 2402.03300 (GRPO); tested to equal TRL's loss.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "ppo",
    aliases=("grpo",),
    multiplier="r; 0 where clipped (r > 1 + eps_high for A > 0, r < 1 - eps_low for A < 0)",
    paper="1707.06347; 2402.03300",
    provenance="paper text; tested to equal TRL's code",
)
def ppo(eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """Surrogate min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    Args:
        eps_low, eps_high: distances of the clip bounds from 1.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("ppo")(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="seq-mean-token-mean",
    )
