"""``WorkerReplay``: replay for the rollout workers of the asynchronous trainer."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from offcorr.data.store import Store
from offcorr.stages.checks import check_value


class WorkerReplay:
    """Replaces a share of the prompt groups that a ``LocalWorker`` or a ``VLLMWorker`` puts on its buffer.

    ``LocalWorker(..., replay=WorkerReplay(share=0.5, max_age=3))``: half of the groups are stored ones, with the
    log-probs, the rewards, the advantages and the version of the time when they were sampled.  Those with the fewest
    uses come first, among equals by (seed, draw).  The worker keeps no state in checkpoints, and neither does this.

    Args:
        share: of the groups, from 0 to 1.
        max_groups: number of stored groups; the oldest give way.
        max_age: the oldest replayed group, in weight syncs; None: the trainer's ``max_staleness``.  TRL drops a sample
            that is older than ``max_staleness`` when it is read, so a larger ``max_age`` is refused, and groups that
            grow too old on the buffer are lost.

    Raises:
        ValueError: a number out of range; when the worker is made, a ``max_age`` above ``max_staleness``.
    """

    def __init__(self, share: float = 0.5, *, max_groups: int = 1024, max_age: int | None = None) -> None:
        check_value("WorkerReplay", "share", share, low=0.0, high=1.0)
        self.share = share
        self.store: Store[Sequence[Any]] = Store(max_groups, max_age)
        self._carry = 0.0
        self._seed = self._draws = 0

    def begin(self, max_staleness: int, seed: int) -> None:
        """Tie it to a run; called by the worker.

        Raises:
            ValueError: ``max_age`` is above ``max_staleness``.
        """
        if self.store.max_age is None:
            self.store.max_age = max_staleness
        if self.store.max_age > max_staleness:
            raise ValueError(
                f"max_age is {self.store.max_age}, expected at most max_staleness, {max_staleness}: TRL drops older "
                "samples when it reads them. Raise max_staleness of the trainer's configuration"
            )
        self._seed = seed

    def take(self, number: int, version: int, first_group: int) -> list[Any]:
        """The samples of the groups to replay in place of some of ``number`` new ones.

        Args:
            version: of the weights that would sample now.
            first_group: the id that the first of the groups gets, and so on: a group that is used again is another.
        """
        self.store.evict(version)
        self._carry += self.share * number
        wanted = math.floor(self._carry + 1e-9)
        self._carry -= wanted
        self._draws += 1
        chosen = self.store.choose(wanted, [self._seed, self._draws])
        return [
            dataclasses.replace(sample, group_id=first_group + place, enqueued_at=time.time(), origin="replay")
            for place, key in enumerate(chosen)
            for sample in self.store.entries[key].group
        ]

    def keep(self, samples: Sequence[Any]) -> None:
        """Store the groups of samples that are new."""
        groups: dict[int, list[Any]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        for group in groups.values():
            self.store.add(group, min(sample.model_version for sample in group))
