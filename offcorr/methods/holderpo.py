"""HolderPO: clip a power mean of the token ratios, its exponent annealed from + to -.

dL/dlogp_t = -s^(1 - p) r_t^p A_t / Z where s = (mean r^p)^(1/p) is inside [1 - eps_low, 1 + eps_high] or recovering,
else 0.  p > 1 favours the largest ratios, p < 0 the smallest; p = 1 is the arithmetic mean, 0 the geometric one.

The paper publishes neither eps nor the shape of the annealing; ``PowerSchedule`` is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offcorr import gates, ratios
from offcorr.correction import Correction
from offcorr.registry import get, register
from offcorr.station import check_number


@dataclass(frozen=True)
class PowerSchedule:
    """The exponent over training, linear from ``start`` to ``end``.  It holds no step: the caller says how far it is.

    >>> schedule = PowerSchedule()
    >>> schedule.power(0.0), schedule.power(0.5), schedule.power(1.0)
    (2.0, 0.5, -1.0)
    >>> schedule.at(0.5, eps_high=0.3).ratio
    PowerMean(of='staleness', power=0.5)
    """

    start: float = 2.0
    end: float = -1.0

    def __post_init__(self) -> None:
        check_number(self, "start")
        check_number(self, "end")

    def power(self, fraction: float) -> float:
        """The exponent when ``fraction`` of the training is done.

        Raises:
            ValueError: ``fraction`` is not between 0 and 1.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction!r}, expected the share of the training done, between 0 and 1")
        return (1 - fraction) * self.start + fraction * self.end

    def at(self, fraction: float, **options: Any) -> Correction:
        """HolderPO when ``fraction`` of the training is done; ``options`` are the method's own."""
        return get("holderpo", power=self.power(fraction), **options)


@register(
    "holderpo",
    multiplier="s^(1 - p) r_t^p where s is inside or recovering, else 0",
    paper="2605.12058",
    provenance="secondary",
    notes="eps and the shape of the annealing are unpublished; PowerSchedule anneals p from 2 to -1",
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
