"""Changes of d over the optimizer steps of a dump."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Floats


def growth(evidence: Evidence) -> tuple[float, float] | None:
    """Mean |d| / (1 - p) at the dump's first and last optimizer steps, if it grows from little and does not level off.

    Weights of a constant lag leave about the same d at every step, once the lag is reached.
    """
    step = np.array([np.nan if record.step is None else record.step for record in evidence.records])
    gaps = Profile.of(evidence).gaps
    known = ~np.isnan(step + gaps)
    steps, index = np.unique(step[known], return_inverse=True)
    if len(steps) < 6:
        return None
    sizes = np.bincount(index, gaps[known]) / np.bincount(index)
    early, middle, late = (float(third.mean()) for third in np.array_split(sizes, 3))
    if early > 0.7 * middle or middle > 0.9 * late or _trend(sizes) < STEADY or _jumps(sizes):
        return None
    return early, late


STEADY = 0.7
"""Rank correlation of d with the optimizer step from which it grows steadily."""


def _trend(sizes: Floats) -> float:
    """Rank correlation of sizes with their order."""
    _, inverse, count = np.unique(sizes, return_inverse=True, return_counts=True)
    ranks = (count.cumsum() - (count + 1) / 2)[inverse]
    return float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) if len(count) > 1 else 0.0


def _jumps(sizes: Floats) -> bool:
    """Whether d changes once, from one level to another, and the longer of the two parts does not grow itself."""
    cuts = range(2, len(sizes) - 1)
    left = [sum(float(np.square(part - part.mean()).sum()) for part in np.split(sizes, [cut])) for cut in cuts]
    before, after = np.split(sizes, [cuts[int(np.argmin(left))]])
    return _trend(before if len(before) > len(after) else after) < STEADY
