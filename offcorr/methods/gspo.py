"""GSPO: PPO's clip on the geometric mean of the sequence's ratios.

    dL/dlogp_t = -c_t A_t / Z,    s = (prod_t r_t)^(1/T)
    c_t = s, unless s is outside [1 - eps_low, 1 + eps_high] on the side that the advantage pushes towards
          (above for A_t > 0, below for A_t < 0): then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; T is the number of valid tokens of the sequence; A_t is
the advantage and Z the denominator of the aggregation. The gradient is in token form: each token's term depends on s
through its own log-prob.

Source: the paper's text, 2507.18071; tested to equal TRL's loss.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "gspo",
    multiplier="s = (prod r)^(1/T); 0 where clipped (s > 1 + eps_high for A > 0, s < 1 - eps_low for A < 0)",
    paper="2507.18071",
    provenance="paper text; tested to equal TRL's code",
)
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4, dual_clip: float | None = None) -> Correction:
    """Surrogate min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), with s the geometric ratio of the sequence.

    Args:
        eps_low, eps_high: distances of the clip bounds from 1.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("gspo")(batch).coefficient  # the multipliers
    tensor([[0., 0., 0.]])
    """
    return Correction(
        ratio=ratios.Geometric(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="seq-mean-token-mean",
    )
