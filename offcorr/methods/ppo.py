"""PPO's clipped surrogate, with GRPO's aggregation.

dL/dlogp_t = -c_t A_t / Z, c_t = r_t where r_t is inside [1 - eps_low, 1 + eps_high] or recovering, else 0.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "ppo",
    aliases=("grpo",),
    multiplier="r inside or recovering, else 0",
    paper="1707.06347, 2402.03300",
    provenance="paper text; equals TRL's code (tested)",
)
def ppo(eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """min(r A, clip(r) A); with ``dual_clip`` the loss at A < 0 is at most -dual_clip A.

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
