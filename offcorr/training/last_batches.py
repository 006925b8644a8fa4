"""``LastBatches``: the micro-batches that a monitor keeps, and their records for a diagnosis."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from offcorr.batch import Batch
from offcorr.diagnose import Record, records_of
from offcorr.training.origins import WATCHED

Ids = Callable[[Batch], Mapping[str, Any]]
"""The token ids of a micro-batch, as keyword arguments of ``offcorr.diagnose.records_of``."""

SEQUENCES = 64
"""Number of sequences that are kept for the diagnosis."""

STEPS_KEPT, SEQUENCES_OF_STEP = 8, 8
"""Number of optimizer steps of which the first micro-batch is kept, and of its sequences that are looked at: whether d
grows from step to step is seen in these."""


class LastBatches:
    """The last micro-batches, of ``SEQUENCES`` sequences at least, and the first one of each of the last steps."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Batch, Ids, int | None]] = deque()
        self._earlier: deque[tuple[Batch, Ids, int | None]] = deque(maxlen=STEPS_KEPT)

    def keep(self, batch: Batch, ids: Ids, step: int | None) -> None:
        """Keep a micro-batch of an optimizer step, without its graph; its ids are asked for with its records."""
        kept = (batch.replaced(logp=batch.logp.detach()), ids, step)
        if step is not None and (not self._earlier or self._earlier[-1][2] != step):
            self._earlier.append(kept)
        self._batches.append(kept)
        while sum(kept.sequences for kept, *_ in self._batches) - self._batches[0][0].sequences >= SEQUENCES:
            self._batches.popleft()

    @property
    def device(self) -> torch.device | None:
        """The device of the last micro-batch; None: there is none."""
        return self._batches[-1][0].logp.device if self._batches else None

    def records(self, step: int, since: int | None = None) -> list[Record]:
        """Those of the last sequences, and of some of the steps after ``since``.

        Args:
            step: of micro-batches that were kept without one.
        """
        last = {id(batch) for batch, *_ in self._batches}
        found: list[Record] = []
        for batch, ids, own in self._earlier:
            if since is not None and own is not None and own > since and id(batch) not in last:
                found += records_of(batch, **ids(batch), step=own)[:SEQUENCES_OF_STEP]
        for batch, ids, own in self._batches:
            if since is None or own is None or own > since:
                found += records_of(batch, **ids(batch), step=own or step)
        return [record for record in found if record.origin in (None, *WATCHED)]


class NothingToCompare(ValueError):
    """Raised where no token of the records has log-probs of both sides."""


def check_comparable(records: list[Record]) -> None:
    """Raise ``NothingToCompare`` unless a token has finite log-probs of both sides."""
    for record in records:
        known = np.isfinite(record.rollout_logp) & np.isfinite(record.old_logp)
        if (known if record.mask is None else known & record.mask).any():
            return
    raise NothingToCompare("the last sequences have no log-probs of the engine, so no cause can be read from them")


def of_updates(records: list[Record]) -> list[Record]:
    """The records with ``logp`` in the place of ``old_logp``, for the gap that the trainer's updates make."""
    return [replace(record, old_logp=record.logp, logp=None) for record in records if record.logp is not None]


def against_old_logp(records: list[Record]) -> list[Record]:
    """The records of ``of_updates`` with ``old_logp`` in the place of the sampler's log-probs where it logged none."""
    return [
        moved if np.isfinite(moved.rollout_logp).any() else replace(moved, rollout_logp=record.old_logp)
        for record in records
        if record.logp is not None
        for moved in of_updates([record])
    ]


def without_ids(batch: Batch) -> dict[str, Any]:
    """Stand-ins for the ids of a batch: empty prompts, and 0 up to the last valid token of each sequence."""
    mask = batch.padded().mask.bool()
    lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).tolist()
    return {"prompt_ids": [[] for _ in lengths], "completion_ids": [[0] * length for length in lengths]}
