"""Metric accumulators in a kernel: a column of numbers, one a row or part of it; a second launch merges the rows.

Both launches add in a fixed order and use no atomics, so the same batch gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

MISMATCH_COLUMNS = (
    "abs",
    "seen",
    "max",
    "k1",
    "k3",
    "top",
    "first",
    "second",
    "first_token",
    "first_seen",
    "histogram",  # 64 columns
)
LOSS_COLUMNS = (
    "loss",
    "clipped",
    "truncated",
    "kept",
    "rejected",
    "vetoed",
    "weight",
    "zero",
    "unscored",
    "nonfinite",
    "valid",
)
LOSS_SIZE: tl.constexpr = tl.constexpr(len(LOSS_COLUMNS))
MISMATCH_SIZE: tl.constexpr = tl.constexpr(len(MISMATCH_COLUMNS) + 63)

SUM, MAX, TOKEN_MOMENTS, ROW_MOMENTS, PERPLEXITY, NO_ROWS, SUMS = range(7)
"""What ``merge_rows`` may be asked for."""

TOGETHER: tl.constexpr = tl.constexpr(16)
"""Neighbouring columns that SUMS adds up in one program."""

PLACES = 8
"""Most places that one merged number goes to."""

JOB_SIZE: tl.constexpr = tl.constexpr(3 + PLACES)

FOLD: tl.constexpr = tl.constexpr(4)
"""Neighbouring tokens that share one lane of an accumulator: a thread's own, so that it costs one register."""

_NOTHING: tl.constexpr = tl.constexpr(-1e30)  # below every log-ratio; e^(_NOTHING - x) is 0


@triton.jit
def _folded(x):
    """[BLOCK] to [BLOCK / FOLD] sums, of whichever numbers lie together in a thread."""
    return tl.sum(tl.reshape(x, [x.shape[0] // FOLD, FOLD], can_reorder=True), 1)


@triton.jit
def _folded_max(x):
    return tl.max(tl.reshape(x, [x.shape[0] // FOLD, FOLD], can_reorder=True), 1)


@triton.jit
def later(last, index):
    """The larger of ``last`` [BLOCK / FOLD] and ``index`` [BLOCK], lane by lane."""
    return tl.maximum(last, _folded_max(index))


@triton.jit
def mismatch_start(BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK // FOLD], tl.float32)
    return zeros, zeros, zeros, zeros, zeros, tl.max(zeros, 0) + _NOTHING, zeros, zeros, tl.zeros([128], tl.int32)


@triton.jit
def mismatch_step(state, d, seen, edges_ptr):
    """One block of unclamped log-ratios."""
    size_sum, count, largest, k1, k3, top, moment, second, bins = state

    # The nearest of the 63 edges, far apart: one comparison settles the bin.
    size = tl.abs(d)
    place = (tl.log2(tl.maximum(size, 1e-30)) * 0.30102999566398 + 6.0) * (62.0 / 9.0)
    nearest = tl.floor(tl.minimum(tl.maximum(place, 0.0), 62.0) + 0.5).to(tl.int32)
    bin_of = nearest + tl.where(size > tl.load(edges_ptr + nearest), 1, 0)
    bins += tl.histogram(tl.where(seen, bin_of, 127), 128)

    d = tl.where(seen, d, 0.0)
    size = tl.abs(d)
    # e^d - 1 - d: its series near 0, where the difference would cancel; beyond d = 80 float32 ends
    series = 1 + d * (1 / 6) * (1 + d * (1 / 7) * (1 + d * (1 / 8)))
    series = d * d * 0.5 * (1 + d * (1 / 3) * (1 + d * (1 / 4) * (1 + d * (1 / 5) * series)))
    limited = tl.minimum(d, 80.0)
    excess = tl.where(size < 0.5, series, tl.exp(limited) - 1 - limited)

    new_top = tl.maximum(top, tl.max(tl.where(seen, d, _NOTHING), 0))
    shrink = tl.exp(top - new_top)
    scaled = tl.where(seen, tl.exp(d - new_top), 0.0)
    return (
        size_sum + _folded(size),
        count + _folded(tl.where(seen, 1.0, 0.0)),
        tl.maximum(largest, _folded_max(size)),
        k1 - _folded(d),
        k3 + _folded(excess),
        new_top,
        moment * shrink + _folded(scaled),
        second * shrink * shrink + _folded(scaled * scaled),
        bins,
    )


@triton.jit
def mismatch_store(state, first, column_ptr, rows):
    """``column_ptr``: this row (or its part) in the series' first column; columns lie ``rows`` numbers apart.

    ``first``: |d| at the row's first valid token, below 0 where there is none to compare.
    """
    size_sum, count, largest, k1, k3, top, moment, second, bins = state
    tl.store(column_ptr, tl.sum(size_sum, 0))
    tl.store(column_ptr + rows, tl.sum(count, 0))
    tl.store(column_ptr + 2 * rows, tl.max(largest, 0))
    tl.store(column_ptr + 3 * rows, tl.sum(k1, 0))
    tl.store(column_ptr + 4 * rows, tl.sum(k3, 0))
    tl.store(column_ptr + 5 * rows, top)
    tl.store(column_ptr + 6 * rows, tl.sum(moment, 0))
    tl.store(column_ptr + 7 * rows, tl.sum(second, 0))
    tl.store(column_ptr + 8 * rows, tl.maximum(first, 0.0))
    tl.store(column_ptr + 9 * rows, tl.where(first >= 0, 1.0, 0.0))
    number = tl.arange(0, 128)
    tl.store(column_ptr + (10 + number) * rows, bins.to(tl.float32), mask=number < 64)


@triton.jit
def loss_start(BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK // FOLD], tl.float32)
    none = tl.zeros([BLOCK // FOLD], tl.int32)
    return zeros, zeros, zeros, none, none, none, none


@triton.jit
def _pair(mask, low, high):
    """Two counts in one word: 16 bits each are enough for rows of 16 million tokens."""
    return _folded(tl.where(mask & low, 1, 0) + tl.where(mask & high, 65536, 0))


@triton.jit
def loss_step(state, mask, loss, held_back, truncated, kept, vetoed, weight, coefficient, unscored, nonfinite):
    total, clipped, weights, kept_bounded, vetoed_zero, blind_bad, valid = state
    return (
        total + _folded(loss),
        clipped + _folded(tl.where(mask, held_back, 0.0)),
        weights + _folded(tl.where(mask, weight, 0.0)),
        kept_bounded + _pair(mask, kept, truncated),
        vetoed_zero + _pair(mask, vetoed, coefficient == 0),
        blind_bad + _pair(mask, unscored, nonfinite),
        valid + _folded(tl.where(mask, 1, 0)),
    )


@triton.jit
def _total(words, high: tl.constexpr):
    return tl.sum((words >> 16) & 65535 if high else words & 65535, 0).to(tl.float32)


@triton.jit
def loss_store(state, column_ptr, rows):
    total, clipped, weights, kept_bounded, vetoed_zero, blind_bad, valid = state
    kept, valid_sum = _total(kept_bounded, False), tl.sum(valid, 0).to(tl.float32)
    tl.store(column_ptr, tl.sum(total, 0))
    tl.store(column_ptr + rows, tl.sum(clipped, 0))
    tl.store(column_ptr + 2 * rows, _total(kept_bounded, True))
    tl.store(column_ptr + 3 * rows, kept)
    tl.store(column_ptr + 4 * rows, valid_sum - kept)
    tl.store(column_ptr + 5 * rows, _total(vetoed_zero, False))
    tl.store(column_ptr + 6 * rows, tl.sum(weights, 0))
    tl.store(column_ptr + 7 * rows, _total(vetoed_zero, True))
    tl.store(column_ptr + 8 * rows, _total(blind_bad, False))
    tl.store(column_ptr + 9 * rows, _total(blind_bad, True))
    tl.store(column_ptr + 10 * rows, valid_sum)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_rows(partials_ptr, jobs_ptr, merged_ptr, loss_ptr, rows, parts, BLOCK: tl.constexpr):
    """One job a program, in float64: (kind, column, column that counts, places ...) -> numbers at those places.

    A column has one number for each part of each row.
    """
    job = tl.program_id(0)
    kind = tl.load(jobs_ptr + job * JOB_SIZE)
    entries = rows.to(tl.int64) * parts
    column_ptr = partials_ptr + tl.load(jobs_ptr + job * JOB_SIZE + 1) * entries
    count_ptr = partials_ptr + tl.load(jobs_ptr + job * JOB_SIZE + 2) * entries
    place = tl.load(jobs_ptr + job * JOB_SIZE + 3)
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float64)
    if kind == 0:  # SUM
        total = zeros
        for first in range(0, entries, BLOCK):
            total += tl.load(column_ptr + first + lanes, mask=first + lanes < entries, other=0.0).to(tl.float64)
        number = tl.arange(0, 8)
        places = tl.load(jobs_ptr + job * JOB_SIZE + 3 + number)
        result = tl.sum(total, 0)
        tl.store(merged_ptr + places, tl.zeros([8], tl.float64) + result, mask=places >= 0)
        if job == 0:  # the loss
            tl.store(loss_ptr, result.to(tl.float32))
    elif kind == 1:  # MAX
        largest = zeros
        for first in range(0, entries, BLOCK):
            values = tl.load(column_ptr + first + lanes, mask=first + lanes < entries, other=0.0).to(tl.float64)
            largest = tl.maximum(largest, values)
        tl.store(merged_ptr + place, tl.max(largest, 0))
    elif kind == 4:  # PERPLEXITY: mean over rows of e^(-mean d)
        total = zeros
        present = zeros
        for first in range(0, rows, BLOCK):
            inside = first + lanes < rows
            count = _row_sum(count_ptr, first + lanes, inside, parts, BLOCK)
            minus_d = _row_sum(column_ptr, first + lanes, inside, parts, BLOCK)
            # clamped as in the reference, where e^700 is still a number
            mean = tl.minimum(minus_d / tl.maximum(count, 1.0), 700.0)
            total += tl.where(count > 0, tl.exp(mean), 0.0)
            present += tl.where(count > 0, 1.0, 0.0)
        tl.store(merged_ptr + place, tl.sum(total, 0))
        tl.store(merged_ptr + place + 1, tl.sum(present, 0))
    elif kind == 5:  # NO_ROWS: none of them
        tl.store(merged_ptr + place, tl.sum(zeros, 0))
        tl.store(merged_ptr + place + 1, rows.to(tl.float64))
    elif kind == 6:  # SUMS: of neighbouring columns
        column = tl.arange(0, TOGETHER)
        totals = tl.zeros([TOGETHER, BLOCK], tl.float64)
        for first in range(0, entries, BLOCK):
            place_of = column[:, None] * entries + (first + lanes)[None, :]
            inside = (first + lanes < entries)[None, :]
            totals += tl.load(column_ptr + place_of, mask=inside, other=0.0).to(tl.float64)
        tl.store(merged_ptr + place + column, tl.sum(totals, 1))
    else:  # moments of e^x: of each token (kind 2), or of each row's sum (kind 3)
        summed = tl.where(kind == 3, parts, 1)  # entries that make one x
        xs = entries // summed
        top = zeros - 1e300
        for first in range(0, xs, BLOCK):
            inside = first + lanes < xs
            count = _row_sum(count_ptr, first + lanes, inside, summed, BLOCK)
            x = _row_sum(column_ptr, first + lanes, inside, summed, BLOCK)
            x = tl.where(kind == 3, -x, x)
            top = tl.where(count > 0, tl.maximum(top, x), top)
        largest = tl.max(top, 0)
        moment = zeros
        second = zeros
        seen = zeros
        for first in range(0, xs, BLOCK):
            inside = first + lanes < xs
            count = _row_sum(count_ptr, first + lanes, inside, summed, BLOCK)
            x = _row_sum(column_ptr, first + lanes, inside, summed, BLOCK)
            x = tl.where(kind == 3, -x, x)
            scale = tl.where(count > 0, tl.exp(tl.where(count > 0, x - largest, 0.0)), 0.0)
            own = tl.load(column_ptr + entries + first + lanes, mask=inside & (kind == 2), other=1.0).to(tl.float64)
            square = tl.load(column_ptr + 2 * entries + first + lanes, mask=inside & (kind == 2), other=1.0)
            moment += own * scale
            second += square.to(tl.float64) * scale * scale
            seen += tl.where(kind == 3, tl.where(count > 0, 1.0, 0.0).to(tl.float64), count)
        tl.store(merged_ptr + place, largest)
        tl.store(merged_ptr + place + 1, tl.sum(moment, 0))
        tl.store(merged_ptr + place + 2, tl.sum(second, 0))
        tl.store(merged_ptr + place + 3, tl.sum(seen, 0))


@triton.jit
def _row_sum(column_ptr, row, inside, parts, BLOCK: tl.constexpr):
    """Sum of a row's parts, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for part in range(0, parts):
        total += tl.load(column_ptr + row * parts + part, mask=inside, other=0.0).to(tl.float64)
    return total
