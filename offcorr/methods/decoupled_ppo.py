"""Decoupled PPO: a clip relative to the proximal policy, times an importance weight relative to the sampling policy.

    dL/dlogp_t = -min(rho_t, cap) c_t A_t / Z
    c_t = r_t, unless r_t is outside [1 - eps_low, 1 + eps_high] on the side that the advantage pushes towards
          (above for A_t > 0, below for A_t < 0): then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio, relative to the proximal policy that supplies
``old_logp``; rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; A_t is the advantage and Z the
denominator of the aggregation. The weight is detached: it scales the gradient and receives none.

Source: the paper's text, 2110.00641 (Hilton et al.), and AReaL's code (2505.24298). Frameworks differ: AReaL drops a
token with rho above its bound of 5, whereas here the weight is truncated.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "decoupled_ppo",
    multiplier="as ppo; the weight is min(rho, cap)",
    paper="2110.00641; AReaL 2505.24298",
    provenance="paper text; framework code",
    notes="AReaL drops a token with rho above its bound of 5; here the weight is truncated. The anchor "
    "supplies the proximal policy: 'recomputed' is AReaL's, 'ewma' that of 2110.00641, 'log_linear' A-3PO's",
)
def decoupled_ppo(
    cap: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Surrogate min(rho, cap) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), with rho detached.

    Args:
        cap: upper bound on rho.
        eps_low, eps_high: distances of the clip bounds from 1.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

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
