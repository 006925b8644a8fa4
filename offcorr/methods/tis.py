"""Truncated importance sampling of the engine ratio.

dL/dlogp_t = -min(rho_t, cap) c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "tis",
    multiplier="min(rho, cap) * ppo",
    paper="Yao et al. 2025 (FlashRL)",
    provenance="framework code",
)
def tis(cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """min(rho, cap) on the PPO gate.

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
