"""Rejection of sequences by the geometric mean of their engine ratios.

    dL/dlogp_t = -1[low <= (prod_t rho_t)^(1/T) <= high] c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; T is the number of valid tokens of the sequence;
c_t is PPO's multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is
the advantage and Z the denominator of the aggregation. The mask is detached.

Source: verl's and slime's code.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "geo_rs",
    multiplier="as ppo; the rejection keeps sequences with low <= (prod rho)^(1/T) <= high",
    paper="verl; slime",
    provenance="framework code",
    notes="SkyRL's bounds are .99 and 1.01",
)
def geo_rs(
    low: float = 0.999,
    high: float = 1.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """Rejection of sequences whose geometric engine ratio is outside [low, high], on the surrogate of PPO.

    Args:
        low, high: bounds on the geometric ratio itself.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

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
