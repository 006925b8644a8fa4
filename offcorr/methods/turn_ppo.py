"""Turn-level PPO: PPO's clip on the geometric mean of the ratios in a token's turn.

    dL/dlogp_t = -c_t A_t / Z,    s = (product of r over the turn of t)^(1 / valid tokens of the turn)
    c_t = s, unless s is outside [1 - eps_low, 1 + eps_high] on the side that the advantage pushes towards
          (above for A_t > 0, below for A_t < 0): then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; A_t is the advantage and Z the denominator of the
aggregation. Turns are given by ``Batch.turn_ids``; without them every contiguous run of the mask is a turn.

Source: the paper's text, 2511.20718 (ST-PPO). Only the ratio of ST-PPO is implemented: its correction of the gradient's
bias cannot be reproduced from what is public.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "turn_ppo",
    multiplier="s, the turn's geometric ratio; 0 where clipped (s > 1 + eps_high for A > 0, s < 1 - eps_low for A < 0)",
    paper="2511.20718",
    provenance="paper text",
    notes="the ratio of ST-PPO, without its gradient-bias correction; turns are Batch.turn_ids, or else the runs of "
    "the mask",
)
def turn_ppo(eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """Surrogate min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), with s the geometric ratio of the turn.

    Args:
        eps_low, eps_high: distances of the clip bounds from 1.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

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
