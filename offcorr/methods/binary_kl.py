"""Binary-KL masking (KPop in AReaL): rejection of tokens whose probability differs between engine and trainer.

    dL/dlogp_t = -1[KL(p_t, mu_t) <= bound and KL(mu_t, p_t) <= bound] c_t A_t / Z

p_t and mu_t are the Bernoulli distributions of this token against all others, under old_logp and rollout_logp; c_t is
PPO's multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the
advantage and Z the denominator of the aggregation. The mask is detached.

Source: AReaL's code. The bound is unpublished; .05 is DPPO's delta.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "binary_kl",
    multiplier="as ppo; the rejection drops tokens with a Bernoulli KL above bound",
    paper="AReaL",
    provenance="framework code",
    notes="AReaL's name is KPop; the bound is unpublished, and .05 is DPPO's delta",
)
def binary_kl(
    bound: float = 0.05, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Rejection of tokens with a Bernoulli KL above ``bound``, in either direction, on the surrogate of PPO.

    Args:
        bound: upper bound on both KLs, in nats.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("binary_kl")(batch).coefficient  # the multipliers
    tensor([[1., 1., 0.]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        reject=rejections.BinaryKL(bound),
        aggregate="token-mean",
    )
