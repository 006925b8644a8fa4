"""Turn-level PPO: clip the geometric ratio of the turn that a token is in.

dL/dlogp_t = -s_turn A_t / Z where s_turn is inside [1 - eps_low, 1 + eps_high] or recovering, else 0.

It is the ratio of ST-PPO alone; that paper's correction of the gradient's bias cannot be reproduced from what is
public. Turns are ``Batch.turn_ids``, or the contiguous runs of the mask.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "turn_ppo",
    multiplier="the turn's geometric ratio inside or recovering, else 0",
    paper="2511.20718",
    provenance="paper text",
    notes="the ratio of ST-PPO, without its gradient-bias correction",
)
def turn_ppo(eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """min(s A, clip(s) A), s the turn's geometric ratio, in token form.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("turn_ppo", eps_high=0.5)(batch).coefficient  # the multipliers
    tensor([[1.3956, 1.3956, 1.3956]])
    """
    return Correction(
        ratio=ratios.Turn(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="token-mean",
    )
