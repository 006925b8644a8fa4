"""IcePop: token importance weights for the trainer/engine mismatch, set to 0 outside an interval.

    dL/dlogp_t = -rho_t 1[low <= rho_t <= high] c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; c_t is PPO's multiplier, exp(logp_t - old_logp_t)
or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the advantage and Z the denominator of the
aggregation. The weight is detached: it scales the gradient and receives none.

Source: verl's and NeMo's code; paper 2510.18855.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "icepop",
    multiplier="as ppo; the weight is rho inside [low, high], otherwise 0",
    paper="2510.18855",
    provenance="framework code (verl, NeMo)",
)
def icepop(
    low: float = 0.5,
    high: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """Importance weight rho where low <= rho <= high, otherwise 0, on the surrogate of PPO.

    Args:
        low, high: bounds on rho itself.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

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
