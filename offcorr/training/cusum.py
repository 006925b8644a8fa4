"""``Cusum``: a one-sided CUSUM chart of a series, against the mean and standard deviation of its own first steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offcorr.stages.checks import check_number

__all__ = ["Cusum"]

LARGEST = 4.0
"""Standard deviations at which a value is cut off, so that no single step reaches the default threshold."""

RISES = 1.1
"""Factor by which a condition, such as the lag, may rise within a baseline."""


@dataclass
class Cusum:
    """One-sided CUSUM chart: S = max(0, S + min(z, 4) - drift) of z = (value - mean) / sd, on the host.

    The first ``warmup`` values give mean and sd; S begins after them.  There is a verdict where S exceeds ``threshold``
    and z has exceeded ``drift`` in each of the last ``persistence`` steps.

    Args:
        warmup: number of values that make the baseline.
        drift: k, in standard deviations: smaller shifts than this do not add up.
        threshold: h, in standard deviations.  With the defaults a series of independent normal values gives a false
            verdict about once in 50,000 steps, the error of the baseline included.
        persistence: number of steps in a row.
        smallest: smallest standard deviation that is assumed, in the unit of the values.

    >>> chart = Cusum(warmup=4, smallest=0.1)
    >>> [chart.add(value) for value in (1.0, 1.1, 0.9, 1.0, 1.05, 3.0, 1.0, 3.0, 3.0, 3.0)]
    [False, False, False, False, False, False, False, False, False, True]
    >>> round(chart.mean, 2), round(chart.sd, 2)
    (1.0, 0.1)
    """

    warmup: int = 20
    drift: float = 1.0
    threshold: float = 8.0
    persistence: int = 3
    smallest: float = 0.0
    values: list[float] = field(default_factory=list)
    """The values of the baseline so far, at most ``warmup``."""
    score: float = 0.0
    """S."""
    above: int = 0
    """Number of steps in a row whose z exceeded ``drift``."""
    below: int = 0
    """Number of steps in a row whose z did not."""
    usual: list[float] = field(default_factory=list)
    """The conditions when the baseline began."""
    seen: int = 0
    """Number of values of the warm-up, those before a new start included."""

    def __post_init__(self) -> None:
        for name, least in (("warmup", 2), ("persistence", 1)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"{name} is {count!r}, expected a whole number >= {least}")
        for name in ("drift", "threshold", "smallest"):
            check_number(self, name, low=0.0)

    @property
    def ready(self) -> bool:
        """Whether the baseline is complete."""
        return len(self.values) >= self.warmup

    @property
    def mean(self) -> float:
        """Mean of the baseline."""
        return sum(self.values) / max(len(self.values), 1)

    @property
    def sd(self) -> float:
        """Standard deviation of the baseline, at least ``smallest``."""
        mean = self.mean
        squares = sum((value - mean) ** 2 for value in self.values)
        return max(math.sqrt(squares / max(len(self.values) - 1, 1)), self.smallest)

    def add(self, value: float, conditions: Sequence[float] = ()) -> bool:
        """Take the next value; returns whether there is a verdict.

        Args:
            conditions: numbers that move the series in a healthy run, such as the lag and the learning rate.  Where one
                rises by a tenth during the warm-up the baseline starts again, but takes 4 * ``warmup`` steps at most.
        """
        if not self.ready:
            self._warm_up(value, conditions)
            return False
        spread = self.sd or 1e-12
        z = min((value - self.mean) / spread, LARGEST)
        self.score = max(0.0, self.score + z - self.drift)
        if z > self.drift:
            self.above, self.below = self.above + 1, 0
        else:
            self.above, self.below = 0, self.below + 1
        return self.score > self.threshold and self.above >= self.persistence

    def reset(self) -> None:
        """Set S to 0; the baseline stays."""
        self.score, self.above = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as plain numbers."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        for name in _STATE:
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)

    def _warm_up(self, value: float, conditions: Sequence[float]) -> None:
        self.seen += 1
        rose = any(new > RISES * old for new, old in zip(conditions, self.usual, strict=False))
        # Past 3 * warmup steps a new start would end after 4 * warmup.
        if not self.values or (rose and self.seen <= 3 * self.warmup):
            self.values, self.usual = [], list(conditions)
        self.values.append(value)


_STATE = ("values", "score", "above", "below", "usual", "seen")
