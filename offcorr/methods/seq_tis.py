"""Truncated importance weights of whole sequences that correct the trainer/engine mismatch.

    dL/dlogp_t = -min(prod_t rho_t, cap) c_t A_t / Z

rho_t = exp(old_logp_t - rollout_logp_t) is the token's engine ratio; the product is over the sequence; c_t is PPO's
multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the
advantage and Z the denominator of the aggregation. The weight is detached: it scales the gradient and receives none.

Source: verl's code; VCPO (2602.17616) uses it with cap 8, CTPO's script with cap 5.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, weights


@register(
    "seq_tis",
    multiplier="as ppo; the weight is min(prod rho, cap)",
    paper="verl; 2602.17616",
    provenance="framework code",
    notes="VCPO uses cap 8, CTPO's script cap 5",
)
def seq_tis(
    cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Importance weight min(prod rho, cap), the same for every token of a sequence, on the surrogate of PPO.

    Args:
        cap: upper bound on the product of rho over the sequence.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

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
