"""``Store``: finished prompt groups on the host, bounded in number and in age."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from offcorr.stages.checks import check_value

Group = TypeVar("Group")


@dataclass
class Entry(Generic[Group]):
    """A stored group.

    version: of the oldest weights that sampled one of its tokens.
    uses: how often it was replayed.
    ess: its effective sample size under the newest policy that is known, as a share of its sequences; None: not known.
    """

    group: Group
    version: int
    uses: int = 0
    ess: float | None = None


class Store(Generic[Group]):
    """Groups by the order in which they came, the oldest of which give way.

    Args:
        max_groups: number of groups that are kept at most.
        max_age: of a group in optimizer updates, the version now less that which sampled it; None: any.
        min_ess: groups whose effective sample size is below this are evicted; None: none are.

    Raises:
        ValueError: a number out of range.

    >>> store = Store(max_groups=2, max_age=3)
    >>> for version, group in enumerate("abc"):
    ...     _ = store.add(group, version)
    >>> [entry.group for entry in store.entries.values()]
    ['b', 'c']
    >>> store.evict(now=5)
    >>> [entry.group for entry in store.entries.values()], store.choose(1, seed=[0])
    (['c'], [2])
    """

    def __init__(self, max_groups: int, max_age: int | None = None, min_ess: float | None = None) -> None:
        for name, number, least in (("max_groups", max_groups, 1), ("max_age", max_age, 0)):
            if name == "max_age" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} is {number!r}, expected a whole number, {least} or more")
        if min_ess is not None:
            check_value("Replay", "min_ess", min_ess, low=0.0, high=1.0)
        self.max_groups, self.max_age, self.min_ess = max_groups, max_age, min_ess
        self.entries: dict[int, Entry[Group]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, group: Group, version: int) -> int:
        """Store a group; returns its key.  The oldest one gives way where there are more than ``max_groups``."""
        key = self._next
        self._next += 1
        self.entries[key] = Entry(group, version)
        if len(self.entries) > self.max_groups:
            del self.entries[next(iter(self.entries))]
        return key

    def evict(self, now: int) -> None:
        """Drop the groups that are too old at version ``now``, or whose effective sample size is too low."""

        def stays(entry: Entry[Group]) -> bool:
            young = self.max_age is None or now - entry.version <= self.max_age
            return young and (self.min_ess is None or entry.ess is None or entry.ess >= self.min_ess)

        self.entries = {key: entry for key, entry in self.entries.items() if stays(entry)}

    def choose(self, number: int, seed: Sequence[int]) -> list[int]:
        """The keys of that many different groups, in the order in which they came, and one more use for each.

        Groups with fewer uses come first; among equals ``seed`` alone decides.
        """
        keys = list(self.entries)
        drawn = np.random.default_rng(list(seed)).permutation(len(keys))
        fewest = sorted((keys[i] for i in drawn), key=lambda key: self.entries[key].uses)
        chosen = sorted(fewest[:number])
        for key in chosen:
            self.entries[key].uses += 1
        return chosen

    def note(self, key: int, log_ratios: Sequence[float]) -> None:
        """Note the log-ratios (nats) of a group's sequences under the current policy; of an evicted group, nothing."""
        if key in self.entries:
            self.entries[key].ess = effective_share(log_ratios)

    def clear(self) -> None:
        """Forget everything."""
        self.entries, self._next = {}, 0

    def state_dict(self, plain: Callable[[Group], Any]) -> dict[str, Any]:
        """State for a checkpoint; ``plain`` makes of a group what can be saved."""
        entries = [(key, plain(e.group), e.version, e.uses, e.ess) for key, e in self.entries.items()]
        return {"next": self._next, "entries": entries}

    def load_state_dict(self, state: dict[str, Any], made: Callable[[Any], Group]) -> None:
        """Continue from a result of ``state_dict``; ``made`` is the inverse of its ``plain``."""
        self._next = state["next"]
        self.entries = {key: Entry(made(group), *numbers) for key, group, *numbers in state["entries"]}


def effective_share(log_ratios: Sequence[float]) -> float:
    """(sum w)^2 / (n sum w^2) of the weights w = e^x; 0 where one of them is not finite.

    >>> effective_share([0.0, 0.0]), effective_share([0.0, -100.0])
    (1.0, 0.5)
    """
    x = np.asarray(log_ratios, dtype=np.float64)
    if not np.isfinite(x).all():
        return 0.0
    w = np.exp(x - x.max())
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum()))
