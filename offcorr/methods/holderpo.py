"""HolderPO: PPO's clip on a power mean of the token ratios, whose exponent falls during training.

    dL/dlogp_t = -c_t A_t / Z,    s = (mean_t r_t^p)^(1/p)
    c_t = s^(1 - p) r_t^p, unless s is outside [1 - eps_low, 1 + eps_high] on the side that the advantage pushes
          towards (above for A_t > 0, below for A_t < 0): then 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; p is the exponent ``power``; A_t is the advantage and Z
the denominator of the aggregation. p > 1 favours the largest ratios and p < 0 the smallest; p = 1 is the arithmetic
mean and p = 0 the geometric one.

Source: notes by others about 2605.12058. The paper publishes neither eps nor the shape of the annealing, which is
linear here. The trainers of ``offcorr.trl`` anneal the exponent unless it is given; another loop can use
``offcorr.training.schedules.Annealed``.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "holderpo",
    multiplier="s^(1 - p) r^p, s the power mean; 0 where clipped (s > 1 + eps_high for A > 0, s < 1 - eps_low for A "
    "< 0)",
    paper="2605.12058",
    provenance="notes by others about the paper",
    notes="eps and the shape of the annealing are unpublished; the trainers of offcorr.trl anneal p linearly "
    "from 2 to -1 unless it is given",
    schedules={"power": {"start": 2.0, "end": -1.0}},
)
def holderpo(
    power: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """Surrogate min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), with s the power mean of the sequence's ratios.

    Args:
        power: exponent p of the mean.
        eps_low, eps_high: distances of the clip bounds from 1.
        dual_clip: for A < 0 the loss term is at most dual_clip |A|, and the gradient is 0 where the ratio is above
            dual_clip; None: no such bound.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("holderpo", eps_high=1.0)(batch).coefficient  # the multipliers
    tensor([[1.4547, 0.1969, 3.9543]])
    """
    return Correction(
        ratio=ratios.PowerMean(power=power),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="seq-mean-token-mean",
    )
