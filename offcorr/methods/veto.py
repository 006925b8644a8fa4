"""Veto of sequences with a token the trainer finds all but impossible.

dL/dlogp_t = -1[no valid token has rho < threshold] c_t A_t / Z, c_t as PPO.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "veto",
    multiplier="1 unless vetoed, then 0; * ppo",
    paper="slime; verl",
    provenance="framework code",
)
def veto(
    threshold: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Correction:
    """Drop a sequence that has a valid token with unclamped rho < threshold, on the PPO gate.

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
