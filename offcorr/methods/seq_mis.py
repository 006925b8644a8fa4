"""Masked importance sampling with the product over the sequence.

dL/dlogp_t = -(prod rho) 1[prod rho <= cap] c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "seq_mis",
    multiplier="prod rho up to cap, else 0; * ppo",
    paper="TRL; verl",
    provenance="framework code",
)
def seq_mis(
    cap: float = 3.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """prod rho where it is at most cap, else 0, on the PPO gate.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("seq_mis")(batch).coefficient  # the multipliers
    tensor([[2.7183, 2.7183, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Bound(high=cap, outside="mask", level="sequence"),
        aggregate="token-mean",
    )
