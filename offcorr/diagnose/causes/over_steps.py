"""Changes of d, and of the surprise of the tokens, over the optimizer steps of a dump."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Floats

LEAST_STEPS = 6
"""Optimizer steps in which d has to grow before any growth counts."""

DOUBLED = 2.0
"""Factor by which d grows over fewer steps, at least, before it counts."""

AT_ONCE = 0.7
"""Share of the growth over a few steps which one of them may make."""

CHANGED = 30.0
"""Twice the log-likelihood ratio (nats) from which the surprise of the tokens is taken to change with the step."""

APART = 5.0
"""Factor by which the tokens of the steps with a cause are further from their entropy than the others."""


def growth(evidence: Evidence) -> tuple[float, float] | None:
    """Mean |d| / (1 - p) at the dump's first and last optimizer steps, if it grows from little and does not level off.

    Weights of a constant lag leave about the same d at every step, once the lag is reached.
    """
    sizes = _sizes(evidence)
    grown = _from_the_first(sizes)
    if len(sizes) < LEAST_STEPS or (len(grown) < min(LEAST_STEPS, len(sizes) - 1) and not _rises(grown)):
        return None
    early, middle, late = (float(third.mean()) for third in np.array_split(sizes, 3))
    if early > 0.7 * middle or middle > 0.9 * late or _trend(sizes) < STEADY or _jumps(sizes):
        return None
    return early, late


def small_growth(evidence: Evidence) -> tuple[float, float] | None:
    """``growth``, or of three to five steps the first and last, if d rises at each and by no jump, to its double.

    Too little for a d of any size, and enough where only rounding is the other explanation.  Steps that agree, at the
    beginning, do not count.
    """
    sizes = _sizes(evidence)
    if len(sizes) >= LEAST_STEPS:
        return growth(evidence)
    sizes = _from_the_first(sizes)
    return (float(sizes[0]), float(sizes[-1])) if _rises(sizes) else None


def _from_the_first(sizes: Floats) -> Floats:
    """Without the steps that agree, at the beginning."""
    return sizes[np.cumsum(sizes > 0.02 * sizes.max(initial=0)) > 0]


def _rises(sizes: Floats) -> bool:
    """Whether each of three steps or more is further off than the one before, by no jump, and the last twice as far as
    the first."""
    rises = np.diff(sizes)
    return len(sizes) >= 3 and bool(
        rises.min() > 0 and sizes[-1] >= DOUBLED * sizes[0] and rises.max() <= AT_ONCE * rises.sum()
    )


def steps_of(evidence: Evidence) -> Floats:
    """[sequences] optimizer steps; NaN: not logged."""
    return np.array([np.nan if record.step is None else record.step for record in evidence.records])


def last_steps(evidence: Evidence) -> Evidence:
    """The tokens of the last third of the optimizer steps."""
    step = steps_of(evidence)
    steps = np.unique(step[~np.isnan(step)])
    return evidence.keep(np.isin(step[evidence.sequence], steps[-max(1, len(steps) // 3) :]))


def _sizes(evidence: Evidence) -> Floats:
    """[steps] mean |d| / (1 - p)."""
    step, gaps = steps_of(evidence), Profile.of(evidence).gaps
    known = ~np.isnan(step + gaps)
    index = np.unique(step[known], return_inverse=True)[1]
    return np.asarray(np.bincount(index, gaps[known]) / np.bincount(index))


def at_first(evidence: Evidence) -> float:
    """Mean |d| / (1 - p) at the first of several optimizer steps; 0 where they are not logged, or there is one."""
    sizes = _sizes(evidence)
    return float(sizes[0]) if len(sizes) > 1 else 0.0


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


class Surprising(NamedTuple):
    """The tokens of the steps whose surprisal balance is off.

    Args:
        off: those tokens.
        said: half a sentence that names the steps; "": all.
        rest: the tokens of the other steps; None: there are none.
    """

    off: Evidence
    said: str = ""
    rest: Evidence | None = None


def surprising_steps(evidence: Evidence) -> Surprising:
    """The steps whose surprisal balance is off; all where it does not change with the step, or is off in each.

    A single step has too few tokens to be judged, so one range of steps is looked for, which is off or which alone is
    not.
    """
    step, known, whole = steps_of(evidence), evidence.with_entropy, evidence.balance
    if known is None or known.entropy is None or whole is None or not whole.error or np.isnan(step).any():
        return Surprising(evidence)
    steps, index = np.unique(step[known.sequence], return_inverse=True)
    count = np.bincount(index)
    off = np.bincount(index, -known.trainer - known.entropy - whole.value)
    first, last, gain = _range(np.asarray(count, float), np.asarray(off, float))
    if gain < CHANGED * len(known) * whole.error**2:
        return Surprising(evidence)
    chosen = np.isin(step[evidence.sequence], steps[first:last])
    parts = [evidence.keep(chosen), evidence.keep(~chosen)]
    balances = [part.balance for part in parts if part.balance is not None]
    if len(balances) < 2:
        return Surprising(evidence)
    worse = int(np.argmax([abs(one.value) for one in balances]))
    rest = balances[1 - worse]
    if abs(rest.value) > max(3 * rest.error, abs(balances[worse].value) / APART):
        return Surprising(evidence)
    inside = np.isin(np.arange(len(steps)), np.arange(first, last)) == (worse == 0)
    said = (
        f"; this is of {inside.sum()} of the {len(steps)} optimizer steps, {ranges(steps[inside], steps)}: in the "
        "others none shows"
    )
    return Surprising(parts[worse], said, parts[1 - worse])


def _range(count: Floats, off: Floats) -> tuple[int, int, float]:
    """The range of steps whose mean differs most from that of the others: first, after the last, sum of squares.

    Args:
        count: [steps] tokens.
        off: [steps] sum over the tokens of their distance from the mean of all, so that these add up to 0.
    """
    counts, offs = np.append(0, count.cumsum()), np.append(0, off.cumsum())
    best = (0, len(count), 0.0)
    for first in range(len(count)):
        inside, total = counts[first + 1 :] - counts[first], offs[first + 1 :] - offs[first]
        outside = counts[-1] - inside
        gains = np.where(outside > 0, np.square(total) * (1 / inside + 1 / np.maximum(outside, 1)), 0)
        at = int(gains.argmax())
        if gains[at] > best[2]:
            best = (first, first + 1 + at, float(gains[at]))
    return best


def ranges(chosen: Floats, steps: Floats) -> str:
    """The chosen steps in words; neighbours among ``steps`` are one range.

    >>> ranges(np.array([3.0, 4.0, 5.0, 9.0]), np.arange(12.0))
    '3 to 5 and 9'
    """
    places = np.searchsorted(steps, chosen)
    runs = np.split(chosen, np.flatnonzero(np.diff(places) > 1) + 1)
    named = [f"{run[0]:.0f} to {run[-1]:.0f}" if len(run) > 1 else f"{run[0]:.0f}" for run in runs]
    if len(named) > 3:
        return f"{named[0]}, {named[1]}, ... {named[-1]}"
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
