"""Off-policy sequence masking: rejection of sequences with a negative advantage that have become unlikely.

    dL/dlogp_t = -1[A_t >= 0 or mean_t(q_t - logp_t) <= delta] c_t A_t / Z

q_t is rollout_logp_t, or old_logp_t where there is no ``rollout_logp``; the mean is over the sequence; c_t is PPO's
multiplier, exp(logp_t - old_logp_t) or 0 where that ratio is clipped (see ``offcorr.methods.ppo``), A_t is the
advantage and Z the denominator of the aggregation. The mask is detached. With ``level="sequence"`` the mean of A over
the sequence takes the place of A_t in the mask, which then keeps or drops whole sequences; where a sequence has one
advantage, that changes nothing.

Source: TRL's code, after the report of DeepSeek-V3.2, whose text decides per sequence; slime's pull request 1917. delta
is unpublished; .5 is a value in use.
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "opsm",
    multiplier="as ppo; the rejection drops sequences with A < 0 and a mean log-ratio below -delta",
    paper="DeepSeek-V3.2",
    provenance="framework code (TRL)",
    notes="delta is unpublished; .5 is a value in use",
)
def opsm(
    delta: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    level: Literal["token", "sequence"] = "token",
) -> Correction:
    """Rejection of sequences with A < 0 whose mean log-prob fell by more than ``delta``, on the surrogate of PPO.

    Args:
        delta: bound on the mean fall of the log-prob, in nats per token.
        eps_low, eps_high, dual_clip: options of PPO's clip (see ``ppo``).
        level: whose advantage is asked: "token", each token's own; "sequence", the mean over the sequence.

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
        reject=rejections.OPSM(delta, level=level),
        aggregate="token-mean",
    )
