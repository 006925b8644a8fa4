"""Binary-KL masking (AReaL's KPop): tokens whose probability differs between engine and trainer.

dL/dlogp_t = -1[KL(p, mu) <= bound and KL(mu, p) <= bound] c_t A_t / Z, c_t as PPO; p and mu are the Bernoulli
distributions of this token or another, under old_logp and rollout_logp.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "binary_kl",
    multiplier="1 unless a Bernoulli KL is above bound, then 0; * ppo",
    paper="AReaL",
    provenance="framework code",
    notes="AReaL calls it KPop; the bound is unpublished, .05 is DPPO's delta",
)
def binary_kl(
    bound: float = 0.05, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Drop tokens with a Bernoulli KL between engine and trainer above ``bound`` nats, on the PPO gate.

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
