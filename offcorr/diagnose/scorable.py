"""Sequences of a dump that a model at hand can score: of the optimizer step whose weights it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from torch import nn

from offcorr.diagnose.evidence import SAME
from offcorr.diagnose.record import Record
from offcorr.diagnose.rescore import FITS, fit

Item = TypeVar("Item")

STEPS = 24
"""Optimizer steps that are tried, at most."""

TRIED = 2
"""Sequences of each."""


def scorable(records: Sequence[Record]) -> list[Record]:
    """Those with a prompt and a token that both sides scored."""
    return [
        record
        for record in records
        if len(record.prompt_ids) and (np.isfinite(record.rollout_logp) & np.isfinite(record.old_logp)).any()
    ]


def of_the_model(records: Sequence[Record], model: nn.Module) -> list[Record]:
    """Those of the steps whose trainer had the model's weights, as its log-probs show.

    A checkpoint is of one step, and the trainer's log-probs of a step may be of an earlier one, at which the samples
    were drawn.  Without steps, all; where the model fits none better than the last step, those of the last.
    """
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.step is None:
            return list(records)
        by_step[record.step].append(record)
    steps = sorted(by_step)
    last = steps[-1]
    tried = spread(steps, STEPS)
    gaps = {step: fit(spread(by_step[step], TRIED), model)[1] for step in tried}
    best = min(tried, key=lambda step: (gaps[step], -step))
    if len(tried) < len(steps):  # between those that were tried
        place = steps.index(best)
        near = [step for step in steps[max(place - STEPS // 2, 0) : place + STEPS // 2] if step not in gaps]
        gaps |= {step: fit(spread(by_step[step], TRIED), model)[1] for step in near}
        best = min(gaps, key=lambda step: (gaps[step], -step))
    if not gaps[best] < 0.5 * gaps[last]:
        best = last
    alike = [step for step in gaps if gaps[step] <= 2 * gaps[best] + SAME] if gaps[best] < FITS else [best]
    return [record for step in sorted(alike) for record in by_step[step]]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Some, evenly spaced.

    >>> spread("abcde", 3), spread("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    return [items[int(place)] for place in np.linspace(0, len(items) - 1, min(count, len(items)))]
