"""Importance weights of whole sequences for the trainer/engine mismatch, set to 0 above a bound.

    dL/dlogp_t = -(prod_t rho_t) 1[prod_t rho_t <= cap] c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; the product is over the sequence; c_t is PPO's
multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the
advantage and Z the denominator of the aggregation. The weight is detached: it scales the gradient and receives none.

Source: TRL's and verl's code.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights
from offcorr.stages.checks import check_value


@register(
    "seq_mis",
    multiplier="as ppo; the weight is prod rho up to cap, otherwise 0",
    paper="TRL; verl",
    provenance="framework code",
    notes="TRL's cap is 3; frameworks use 2 to 5",
)
def seq_mis(
    cap: float = 3.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Importance weight prod rho where it is at most cap, otherwise 0, on the surrogate of PPO.

    Args:
        cap: upper bound on the product of rho over the sequence.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("seq_mis")(batch).coefficient  # the multipliers
    tensor([[2.7183, 2.7183, 2.7183]])
    """
    check_value("seq_mis", "cap", cap, low=0.0, above=True)
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        weight=weights.Bound(high=cap, outside="mask", level="sequence"),
        aggregate="token-mean",
    )
