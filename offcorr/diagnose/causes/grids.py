"""Whether log-probs stand on a grid, as they do once they were rounded, and on which."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offcorr.diagnose.evidence import Booleans
from offcorr.diagnose.record import Floats

NEAR_ZERO = 2.0**-8
"""Size of a log-prob below which the differences of two logits in float32 have few digits, whatever they are stored in:
logits around 20 are multiples of 2^-19."""


def _values(values: Floats) -> NDArray[np.float32]:
    """The log-probs below 0 in float32; none, unless enough of them have digits that storage could have taken."""
    inside = values[(values < 0) & (values > -1e4)].astype(np.float32)
    return inside if len(np.unique(inside[inside < -NEAR_ZERO])) >= 16 else inside[:0]


def all_bf16(values: Floats) -> bool:
    """Whether there are enough log-probs, and every one is a bfloat16 number."""
    inside = _values(values)
    return len(inside) > 0 and bool((inside.view(np.uint32) & 0xFFFF == 0).all())


FINEST = 2.0**-9
"""The least difference of two numbers in float8 (e4m3)."""


def few_digits(values: Floats) -> int | None:
    """The number of binary digits that every log-prob has at most, up to four, as 8-bit formats do; None: more."""
    inside = _values(values)
    for digits in (3, 4):
        if len(inside) and bool((inside.view(np.uint32) & (0xFFFFFF >> digits) == 0).all()):
            return digits
    return None


FINEST_STEP, OF_FP16 = 12, 10
"""Binary places of the finest fixed step that is looked for, and those from which float16 leaves it above .5."""


def fixed_step(values: Floats) -> float | None:
    """The power of 2 that all log-probs are multiples of; None: there is none."""
    inside = _values(values)
    for places in range((OF_FP16 if all_fp16(values) else FINEST_STEP + 1) if len(inside) else 0):
        scaled = inside * 2.0**places
        if bool((scaled == np.round(scaled)).all()):
            return float(0.5**places)
    return None


FEW_VALUES, MORE_VALUES, ENOUGH_VALUES = 0.125, 4, 512
"""Different values of one side, as a share of its log-probs below 0, up to which they are steps, where the other side
has so many times more at the same tokens; and log-probs that it takes to say so."""


def few_values(values: Floats, others: Floats, once: Booleans) -> Floats | None:
    """The distance of each log-prob from the next smaller value, where the values are few; None: they are not.

    Args:
        once: one token of each id after one context, as a value that returns there says nothing.
    """
    # 0 stands at any token that is certain, or that a truncation left alone, and the least value where it was cut off.
    below = once & (values < 0) & (values > values.min())
    different = len(np.unique(values[below]))
    if below.sum() < ENOUGH_VALUES or len(_values(values)) == 0 or different > FEW_VALUES * below.sum():
        return None
    if len(np.unique(others[below])) < MORE_VALUES * different:
        return None
    steps, at = np.unique(values, return_inverse=True)
    apart = np.diff(steps)
    decimals = decimals_of(values)
    if decimals and np.median(apart) < 1.5 * 0.1**decimals:  # which says more
        return None
    return np.asarray(np.maximum(np.append(apart, apart[-1]), np.append(apart[0], apart))[at])


def all_fp16(values: Floats) -> bool:
    """The same of float16."""
    inside = _values(values)
    return len(inside) > 0 and bool((inside.astype(np.float16) == inside).all())


def probabilities_of(values: Floats) -> int | None:
    """The number of binary digits, of float16 or bfloat16, that the probability of every log-prob has; None: more."""
    inside = _values(values)
    likely = np.exp(inside.astype(np.float64))[(inside > -8) & (inside < -0.01)]
    if len(np.unique(likely)) < MANY_PROBABILITIES:
        return None
    for digits in (8, 11):
        scaled = likely * 2.0 ** (digits - 1 - np.floor(np.log2(likely)))
        if bool((np.abs(scaled - np.round(scaled)) < 2e-3).all()):
            return digits
    return None


MANY_PROBABILITIES = 32
"""Different probabilities that it takes to say so, not too near to 0 and 1."""

WHOLE = 4
"""Different whole numbers, at least, among log-probs that have no decimals."""


def decimals_of(values: Floats) -> int | None:
    """The number of decimals, up to three, that every log-prob has at most; None: they have more."""
    inside = values[(values < 0) & (values > -1e4)]
    for decimals in (0, 1, 2, 3):
        scaled = inside * 10.0**decimals
        places = np.round(scaled)
        if len(np.unique(places[places < 0])) >= (16 if decimals else WHOLE) and bool(
            (np.abs(scaled - places) < 0.002).all()
        ):
            return decimals
    return None


def significant_of(values: Floats) -> int | None:
    """The number of significant decimal digits, two to four, that every log-prob has at most; None: they have more."""
    inside = _values(values).astype(np.float64)
    if not len(inside):
        return None
    size = np.floor(np.log10(-inside) + 1e-6)
    for digits in (2, 3, 4):
        scaled = inside * 10.0 ** (digits - 1 - size)
        if bool((np.abs(scaled - np.round(scaled)) < 1e-7 * 10.0**digits).all()):
            return digits
    return None


def on_a_grid(values: Floats) -> bool:
    """Whether the log-probs were rounded so far that many are equal by chance."""
    return all_bf16(values) or all_fp16(values) or decimals_of(values) is not None
