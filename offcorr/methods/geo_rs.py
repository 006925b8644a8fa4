"""Rejection of sequences by their geometric engine ratio.

dL/dlogp_t = -1[low <= (prod rho)^(1/T) <= high] c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "geo_rs",
    multiplier="1 inside [low, high], else 0; * ppo",
    paper="verl; slime",
    provenance="framework code",
)
def geo_rs(
    low: float = 0.999,
    high: float = 1.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """Keep a sequence where low <= (prod rho)^(1/T) <= high, on the PPO gate.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("geo_rs")(batch).coefficient  # the multipliers
    tensor([[0., 0., 0.]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        reject=rejections.Geometric(low, high),
        aggregate="token-mean",
    )
