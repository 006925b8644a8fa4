"""Decoupled PPO: clip against the proximal policy, weight by the behaviour policy.

dL/dlogp_t = -min(rho_t, cap) c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "decoupled_ppo",
    multiplier="min(rho, cap) * (r inside or recovering, else 0)",
    paper="2110.00641; AReaL 2505.24298",
    provenance="paper text; framework code",
    notes="AReaL drops the token where rho passes its bound of 5; here the weight is truncated",
)
def decoupled_ppo(
    cap: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """PPO's clip times min(rho, cap), rho the engine ratio.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("decoupled_ppo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Truncate(cap),
        aggregate="token-mean",
    )
