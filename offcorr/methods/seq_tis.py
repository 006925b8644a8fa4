"""Truncated importance sampling with the product over the sequence.

dL/dlogp_t = -min(prod rho, cap) c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "seq_tis",
    multiplier="min(prod rho, cap) * ppo",
    paper="verl; 2602.17616",
    provenance="framework code",
)
def seq_tis(
    cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """min(prod rho, cap) on the PPO gate.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("seq_tis")(batch).coefficient  # the multipliers
    tensor([[2., 2., 2.]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Truncate(cap, level="sequence"),
        aggregate="token-mean",
    )
