"""Causes in how log-probs were stored: fewer digits than float32 has."""

from __future__ import annotations

import dataclasses

import numpy as np

from offcorr.diagnose.causes.base import Cause, Found
from offcorr.diagnose.causes.grids import (
    FINEST,
    all_bf16,
    all_fp16,
    decimals_of,
    few_digits,
    few_values,
    fixed_step,
    probabilities_of,
    significant_of,
)
from offcorr.diagnose.causes.values import constant, one_for_each
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Floats


class StoredBF16(Cause):
    """Every log-prob of one side can be written in bfloat16."""

    id = "stored_bf16"
    stage = "values"
    robust = True
    title = "log-probs were computed or stored in bfloat16"
    advice = "keep log-probs in float32 from the log-softmax to the loss: bfloat16 has 3 digits"

    def found(self, evidence: Evidence) -> Found | None:
        for side, values in (("sampler", evidence.sampler), ("trainer", evidence.trainer)):
            if all_bf16(values) and few_digits(values) is None:
                said = "are numbers that bfloat16 can hold, and of float32 numbers only one in 65,536 is"
                return _rounded(evidence, side, values, _binary_half(values, bits=8), said)
        return None


class StoredRounded(Cause):
    """Every log-prob of one side is a float16 or an 8-bit number, the logarithm of a 16-bit one, or a multiple of one
    step, or has few decimals."""

    id = "stored_rounded"
    stage = "values"
    robust = True
    title = (
        "log-probs, or their probabilities, were rounded when they were computed or stored, to float16, 8 bits or a "
        "few decimals"
    )
    advice = "keep log-probs in float32 from the log-softmax to the loss, and write them with all digits"

    def found(self, evidence: Evidence) -> Found | None:
        one_number, once = constant(evidence) is not None, evidence.once
        sides = (("sampler", evidence.sampler), ("trainer", evidence.trainer))
        for (side, values), (_, others) in (sides, sides[::-1]):
            if (digits := few_digits(values)) is not None:
                said = f"have {digits} binary digits at most, as in an 8-bit format, and bfloat16 has 8"
                return _rounded(evidence, side, values, np.maximum(_binary_half(values, digits), FINEST / 2), said)
            if (
                not one_number
                and not evidence.shrunk  # by a rounding that leaves few values
                and not all_bf16(values)  # which are few, and another cause
                and not one_for_each(evidence, values)
                and (spacing := few_values(values, others, once)) is not None
            ):
                steps, different = (len(np.unique(side[values < 0])) for side in (values, others))
                said = (
                    f"take {steps:,} different values, as in 8 bits or fixed steps, and the other side's {different:,} "
                    "at the same tokens"
                )
                typical = np.full(len(values), np.median(spacing) / 2)  # unlikely values have gaps for neighbours
                return _rounded(evidence, side, values, spacing / 2, said, typical)
            decimals, digits = decimals_of(values), significant_of(values)
            if digits is not None and (decimals is None or _of_digits(values, digits).mean() > 0.5 * 0.1**decimals):
                said = f"have {digits} significant decimal digits at most"
                return _rounded(evidence, side, values, _of_digits(values, digits), said)
            if decimals is not None:
                said = f"have {decimals} decimal{'s' * (decimals > 1)} at most" if decimals else "are whole numbers"
                half = 0.5 * 0.1**decimals if decimals else 1.0  # an array of integers cuts off what follows the point
                return _rounded(evidence, side, values, np.full(len(values), half), said)
            if not all_bf16(values) and (step := fixed_step(values)) is not None:
                return _rounded(evidence, side, values, np.full(len(values), step / 2), f"are multiples of {step:g}")
            if all_fp16(values) and not all_bf16(values):
                said = "are numbers that float16 can hold, and of float32 numbers only one in 8,192 is"
                return _rounded(evidence, side, values, _binary_half(values, bits=11), said)
            if (digits := probabilities_of(values)) is not None:
                said = f"are the logarithms of probabilities in {'bfloat16' if digits == 8 else 'float16'}"
                return _rounded(evidence, side, values, np.full(len(values), 2.0**-digits), said)
        return None


def _rounded(
    evidence: Evidence, side: str, values: Floats, half: Floats, said: str, typical: Floats | None = None
) -> Found:
    """The finding that one side's values stand on a grid, and what is left of d where each may be off by ``half``.

    Args:
        typical: [N] half the grid's step, where ``half`` is more at some values; None: ``half``.
    """
    count = int((values < 0).sum())
    alone = (evidence.size > WHOLE * half).mean() <= ALONE
    others = evidence.trainer if side == "sampler" else evidence.sampler
    step = half if typical is None else typical
    moved = np.where(values == 0, np.minimum(np.abs(others), step), step)  # what is 0 now was as near to it
    part = WHOLE if alone else _part(evidence.size, half, float(np.square(moved).sum()) / 3)
    left = np.sign(evidence.d) * np.maximum(evidence.size - part * half, 0)
    return Found(
        1.0,
        0.0,
        1.0,
        count / 64,
        f"all {count} log-probs of the {side} {said}",
        dataclasses.replace(evidence.explained(evidence.d - left), shrunk=True),
        rough=not alone,
    )


WHOLE, ALONE = 1.001, 0.01
"""Half steps that rounding moves a value by at most, and share of the tokens that are off by more where it is alone."""


def _part(size: Floats, half: Floats, rounding: float) -> float:
    """The half steps to take off each |d|, so that as much of the sum of d^2 is left as another cause makes.

    Rounding adds a third of the squared half steps to that sum, and little to the |d| of a token that is off by more.

    Args:
        rounding: what it adds.
    """
    goal = float(np.square(size).sum()) - rounding

    def left(part: float) -> float:
        return float(np.square(np.maximum(size - part * half, 0)).sum())

    low, high = 0.0, WHOLE
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > goal else (low, middle)
    return high


def _of_digits(values: Floats, digits: int) -> Floats:
    """[N] half the distance of neighbouring numbers with so many significant decimal digits."""
    return np.asarray(0.5 * 10.0 ** (np.floor(np.log10(np.maximum(np.abs(values), 1e-30)) + 1e-6) + 1 - digits))


def _binary_half(values: Floats, bits: int) -> Floats:
    """[N] half the distance of neighbouring numbers with so many significant bits."""
    return np.asarray(2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 1e-30))) / 2**bits)
