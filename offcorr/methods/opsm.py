"""Off-policy sequence masking: negative sequences that have drifted.

dL/dlogp_t = -1[A >= 0 or mean_t(anchor - logp) <= delta] c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "opsm",
    multiplier="1 unless A < 0 and far, then 0; * ppo",
    paper="DeepSeek-V3.2",
    provenance="framework code",
    notes="delta is unpublished; .5 is a guess in use",
)
def opsm(delta: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> Correction:
    """Drop sequences with A < 0 whose mean log-ratio fell by more than ``delta`` nats, on the PPO gate.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> old = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("opsm")(batch).coefficient  # the multipliers
    tensor([[1., 1., 1.]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        reject=rejections.OPSM(delta),
        aggregate="token-mean",
    )
