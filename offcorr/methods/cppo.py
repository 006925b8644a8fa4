"""CPPO: the policy gradient without the tokens that exceed what their sequence has left to drift.

    dL/dlogp_t = -M_t min(R_t, cap) A_t / Z
    M_t = 1 where A_t log R_t <= 0 or w_t G_t <= C_t, otherwise 0
    C_t = min(delta, delta + sum over s < t of w_s (b - G_s))

p_t = exp(logp_t), mu_t = exp(rollout_logp_t) and G_t = |p_t - mu_t|; R_t = p_t / mu_t is the token's total ratio,
detached; A_t is the advantage and Z the denominator of the aggregation. t counts the T valid tokens of the sequence
from 1, and w_t = 1 - (1 - w_min) (t - 1) / (T - 1) falls from 1 to w_min. b is the quantile of the sequence's own G,
linear between order statistics, clamped to [budget_low, budget_high]. Every valid token before t enters the sums,
dropped or kept. Tokens that move back towards mu are always kept.

Source: 2606.10968 and the code of UniRL (cppo.py), which agree. In verl's pull request 6731 the upper bound on b is 5
times budget_low rather than twice it (``budget_high=0.1`` gives it), T is the padded width rather than the sequence's
own length, and the cap is read from ``clip_ratio_c``, 3 by default. UniRL's surrogate R A has no cap and is
differentiable; the multiplier is the same up to the cap. The paper's main runs compare the 20 likeliest tokens'
probabilities rather than the sampled one's, as all released code does.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "cppo",
    multiplier="min(R, cap); the rejection drops outward tokens beyond what the sequence has left to drift",
    paper="2606.10968",
    provenance="official code (UniRL)",
    notes="delta is .15 in the paper's dense runs; verl's pull request takes the padded width for the length and 5 for "
    "the ceiling; not completion-pruning CPPO (2503.22342)",
)
def cppo(
    delta: float = 0.2,
    w_min: float = 0.8,
    budget_low: float = 0.02,
    budget_high: float = 0.04,
    quantile: float = 0.9,
    cap: float | None = 20.0,
) -> Correction:
    """Surrogate sg(min(R, cap)) A log pi on the tokens that are kept.

    Args:
        delta: largest weighted distance of one token's probabilities.
        w_min: weight of the last token.
        budget_low, budget_high: bounds on the mean distance that a sequence may spend per token.
        quantile: of the sequence's distances, which is its budget per token inside those bounds.
        cap: upper bound on R; None: no bound.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("cppo")(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.DetachedClip(cap),
        reject=rejections.CPPO(delta, w_min, budget_low, budget_high, quantile),
        aggregate="token-mean",
    )
