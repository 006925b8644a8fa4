"""``Arrivals``: whether new weights still reach the sampler, by the lag that its versions report."""

from __future__ import annotations

from typing import Any

__all__ = ["Arrivals"]

FIRST, LATER, TIMES = 64, 16, 4
"""Optimizer steps without newer weights that are too many: ``FIRST`` until some have come, and from then on ``LATER``,
or ``TIMES`` the longest time that newer ones took to come."""

EXACT = 0.99
"""Share of the steps by which the mean lag rises where no sample is of newer weights; the rest is rounding."""


class Arrivals:
    """Counts the optimizer steps since a sample of newer weights came: up to then the lag rises by 1 in each step.

    >>> arrivals = Arrivals()
    >>> lags = [0, 1, 1, 1] + list(range(2, 20))  # from the fifth step on no newer weights come
    >>> late = [arrivals.add(lag, step) for step, lag in enumerate(lags, 1)]
    >>> [step for step, said in enumerate(late, 1) if said][0]
    20
    """

    def __init__(self) -> None:
        self.lag: float | None = None
        """The last mean lag, in optimizer steps; None: there was none yet."""
        self.step = 0
        """The optimizer step of it."""
        self.since = 0
        """The optimizer step at which newer weights came last, or the first lag was reported."""
        self.longest = 0
        """The longest time that newer weights took to come, in optimizer steps; 0: none have come."""

    def add(self, lag: float | None, step: int, least: int = 0) -> str:
        """Take the mean lag of a step; returns what to say where newer weights are overdue, else "".

        Args:
            lag: None where no versions are reported, and nothing is counted.
            least: number of steps that is not too many in any case, such as a multiple of a lag that is set.
        """
        if lag is None:
            return ""
        if self.lag is None:
            self.since = step
        elif lag - self.lag < EXACT * (step - self.step):
            self.longest = max(self.longest, step - self.since)
            self.since = step
        self.lag, self.step = lag, step
        late = step - self.since
        usual = max(LATER, TIMES * self.longest) if self.longest else FIRST
        if late < max(usual, least):
            return ""
        before = f"before, at least every {self.longest}" if self.longest else "and none before"
        return (
            f"by the reported versions no sample of newer weights has come in the {late} optimizer steps since step "
            f"{self.since} ({before}); the lag is {lag:.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, as plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        vars(self).update(state)
