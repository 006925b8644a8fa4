"""Truncated importance weights that correct the trainer/engine mismatch, token by token.

    dL/dlogp_t = -min(rho_t, cap) c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; c_t is PPO's multiplier, exp(logp_t - old_logp_t)
or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the advantage and Z the denominator of the
aggregation. The weight is detached: it scales the gradient and receives none.

Source: FlashRL's code (Yao et al., 2025), and verl, slime and SkyRL.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "tis",
    multiplier="as ppo; the weight is min(rho, cap)",
    paper="Yao et al. 2025 (FlashRL)",
    provenance="framework code",
    notes="frameworks use caps from 1.5 to 8",
)
def tis(cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """Importance weight min(rho, cap) on the surrogate of PPO.

    Args:
        cap: upper bound on rho.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("tis")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Truncate(cap),
        aggregate="token-mean",
    )
