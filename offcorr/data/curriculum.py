"""``Curriculum``: how much of a trace is given, prompt by prompt, by the success with it."""

from __future__ import annotations

from dataclasses import dataclass

from offcorr.stages.checks import check_number


@dataclass(frozen=True)
class Curriculum:
    """Length of a prompt's prefix, as a share of its trace, that follows the rewards of the groups that had it.

    After each group with a prefix its prompt's share becomes ``step`` smaller where the group's mean reward was above
    ``bound``, ``step`` larger where it was below, and stays where it was equal; always within ``low`` and ``high``.
    The rule is this library's own, not one of PrefixRL (2601.18795) or POPE (2601.18779).

    Args:
        start: share of a prompt's first group.
        step: change of the share, above 0.
        bound: mean reward.
        low, high: smallest and largest share; with a share of 0 nothing is given.

    Raises:
        ValueError: a number out of range.

    >>> curriculum = Curriculum(start=0.5, step=0.25)
    >>> curriculum.after(0.5, reward=0.75), curriculum.after(0.5, reward=0.0), curriculum.after(0.0, reward=1.0)
    (0.25, 0.75, 0.0)
    """

    start: float = 0.75
    step: float = 0.125
    bound: float = 0.5
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "low", low=0.0, high=1.0)
        check_number(self, "high", low=self.low, high=1.0)
        check_number(self, "start", low=self.low, high=self.high)
        check_number(self, "step", low=0.0, above=True)
        check_number(self, "bound")

    def after(self, share: float, reward: float) -> float:
        """The share after a group with this share and this mean reward."""
        change = self.step * ((reward < self.bound) - (reward > self.bound))
        return min(max(share + change, self.low), self.high)
