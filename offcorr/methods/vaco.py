"""VACO's mask: rejection of the tokens that move further away, in sequences that have drifted.

    dL/dlogp_t = -r_t 1[A_t log R_t <= 0 or mean_t |R_t - 1| <= bound] A_t / Z

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; R_t = exp(logp_t - rollout_logp_t) is the token's total
ratio (the staleness ratio where there is no ``rollout_logp``); the mean is over the sequence; A_t is the advantage and
Z the denominator of the aggregation. The mask is detached.

Source: paper 2603.01365. The mask of |R - 1| was read in the code of open-instruct, which is reported to have replaced
it: by the sequence's mean total variation or KL in probability space, of the old policy against the engine's, masking
only what increases it. ``get("vaco", reject=VACO(divergence="tv", mismatch="engine"))`` is that form, as far as it is
known; its code was not read. The mask replaces a clip. The default bound is a guess.
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "vaco",
    multiplier="r; the rejection drops tokens with A log R > 0 in sequences with mean |R - 1| > bound",
    paper="2603.01365",
    provenance="framework code (open-instruct)",
    notes="the mask replaces a clip; the default bound is a guess; compares r where there is no rollout_logp",
)
def vaco(
    bound: float = 0.2, divergence: Literal["ratio", "tv", "kl"] = "ratio", increase_only: bool = True
) -> Correction:
    """Surrogate r A on the tokens that the mask keeps.

    Args:
        bound: upper bound on the sequence's mean divergence.
        divergence: "ratio", |R - 1|; "tv", the distance of a token's two probabilities; "kl", its Bernoulli KL (nats).
        increase_only: False drops every token of a sequence above the bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("vaco")(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.Unclipped(),
        reject=rejections.VACO(bound, divergence, increase_only),
        aggregate="token-mean",
    )
