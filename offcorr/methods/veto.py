"""Rejection of sequences with a token that is far less likely under the trainer than under the engine.

    dL/dlogp_t = -1[no valid token of the sequence has rho < threshold] c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; it is not clamped for this comparison; c_t is
PPO's multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the
advantage and Z the denominator of the aggregation. The mask is detached.

Source: the code of slime and of older versions of verl.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "veto",
    multiplier="as ppo; the rejection drops sequences with a token of rho < threshold",
    paper="slime; verl",
    provenance="framework code",
)
def veto(
    threshold: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """Rejection of sequences that have a valid token with rho < threshold, on the surrogate of PPO.

    Args:
        threshold: lower bound on rho itself, above 0.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("veto")(batch).coefficient  # the multipliers
    tensor([[1., 1., 1.]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        reject=rejections.Veto(threshold),
        aggregate="token-mean",
    )
