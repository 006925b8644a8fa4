"""HolderPO: clip a power mean of the token ratios, its exponent annealed from + to -.

dL/dlogp_t = -s^(1 - p) r_t^p A_t / Z where s = (mean r^p)^(1/p) is inside [1 - eps_low, 1 + eps_high] or recovering,
else 0.  p > 1 favours the largest ratios, p < 0 the smallest; p = 1 is the arithmetic mean, 0 the geometric one.

The paper publishes neither eps nor the shape of the annealing; here it is linear.  The trainers of ``offcorr.trl``
anneal, and hold an exponent that is given; a loop of one's own asks ``offcorr.schedules.Annealed``.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "holderpo",
    multiplier="s^(1 - p) r_t^p where s is inside or recovering, else 0",
    paper="2605.12058",
    provenance="secondary",
    notes="eps and the shape of the annealing are unpublished; the trainers of offcorr.trl run p linearly from 2 to "
    "-1, unless given",
    schedules={"power": {"start": 2.0, "end": -1.0}},
)
def holderpo(
    power: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Correction:
    """min(s A, clip(s) A), s = (mean r^power)^(1/power) over the sequence.

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
