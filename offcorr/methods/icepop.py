"""IcePop: masked importance sampling, token by token.

dL/dlogp_t = -rho_t 1[low <= rho_t <= high] c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "icepop",
    multiplier="rho inside [low, high], else 0; * ppo",
    paper="2510.18855",
    provenance="framework code",
)
def icepop(
    low: float = 0.5,
    high: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """rho where low <= rho <= high, else 0, on the PPO gate.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("icepop")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 2.7183]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Mask(low, high),
        aggregate="token-mean",
    )
