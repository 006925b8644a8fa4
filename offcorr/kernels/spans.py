"""The spans of ``kernels.scans`` for Triton, under the same names: a row block by block, with a carry.

Every function sees one block of one row.  ``x`` is 0 under the mask.  A span is one of

    a reduction      NAME_start(lanes) -> state, NAME_step(state, x, mask) per block, NAME(state, count) -> one number
    a running span   NAME(x, mask, position, carry) -> (value, carry), blocks in order; the carry is a reduction of
                     what came before
    ``token``        the measure itself
    ``turn``         a segmented mean: ``run_totals`` in the order of the tokens, ``turn_means`` over the runs with the
                     same id, then a look-up by run

A reduction's state is one vector a block wide for each quantity, so only the end of a row reduces over lanes.
``NAME_fold(state)`` makes one number of each.  Where a row is split, its parts' folded states are the lanes of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def expm1(x):
    """e^x - 1, accurate for tiny x."""
    series = 1 + x * (1 / 7) * (1 + x * (1 / 8) * (1 + x * (1 / 9)))
    series = 1 + x * (1 / 4) * (1 + x * (1 / 5) * (1 + x * (1 / 6) * series))
    series = x * (1 + x * (1 / 2) * (1 + x * (1 / 3) * series))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x), accurate for tiny x (Kahan: the rounding of 1 + x cancels)."""
    shifted = 1 + x
    moved = shifted - 1
    return tl.where(moved == 0, x, tl.log(shifted) * (x / tl.where(moved == 0, 1.0, moved)))


@triton.jit
def stretch(cu_seqlens_ptr, width, row, number, part_length):
    """(where the row starts, its length, first and one past the last position of its part ``number``)."""
    if cu_seqlens_ptr is None:
        start = row.to(tl.int64) * width
        length = width
    else:
        start = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + row + 1) - start).to(tl.int32)
    begin = tl.minimum(number.to(tl.int64) * part_length, length).to(tl.int32)
    return start, length, begin, tl.minimum(begin + part_length, length)


# -- reductions ----------------------------------------------------------------------------------------------


@triton.jit
def sequence_start(lanes):
    return (tl.zeros_like(lanes).to(tl.float32),)


@triton.jit
def sequence_step(state, x, mask):
    return (state[0] + x,)


@triton.jit
def sequence_fold(state):
    return (tl.sum(state[0], 0),)


@triton.jit
def sequence(state, count):
    return sequence_fold(state)[0]


@triton.jit
def geometric(state, count):
    return tl.sum(state[0], 0) / tl.maximum(count, 1.0)


@triton.jit
def sequence_max_start(lanes):
    return (tl.zeros_like(lanes).to(tl.float32) - float("inf"),)


@triton.jit
def sequence_max_step(state, x, mask):
    return (tl.maximum(state[0], tl.where(mask, x, -float("inf"))),)


@triton.jit
def sequence_max_fold(state):
    return (tl.max(state[0], 0),)


@triton.jit
def sequence_max(state, count):
    return tl.where(count > 0, sequence_max_fold(state)[0], 0.0)


@triton.jit
def sequence_min_start(lanes):
    return (tl.zeros_like(lanes).to(tl.float32) + float("inf"),)


@triton.jit
def sequence_min_step(state, x, mask):
    return (tl.minimum(state[0], tl.where(mask, x, float("inf"))),)


@triton.jit
def sequence_min_fold(state):
    return (tl.min(state[0], 0),)


@triton.jit
def sequence_min(state, count):
    return tl.where(count > 0, sequence_min_fold(state)[0], 0.0)


@triton.jit
def log_mean_exp_start(lanes):
    zeros = tl.zeros_like(lanes).to(tl.float32)
    # the largest so far (any number where nothing was seen), sum of expm1(x - largest), how many
    return zeros, zeros, zeros


@triton.jit
def log_mean_exp_step(state, x, mask):
    largest, below, seen = state
    top = tl.where(mask, tl.where(seen > 0, tl.maximum(largest, x), x), largest)
    drop = tl.where(seen > 0, largest - top, 0.0)
    below = below * tl.exp(drop) + seen * expm1(drop)
    return top, below + tl.where(mask, expm1(x - top), 0.0), seen + tl.where(mask, 1.0, 0.0)


@triton.jit
def log_mean_exp_fold(state):
    largest, below, seen = state
    count = tl.sum(seen, 0)
    top = tl.where(count > 0, tl.max(tl.where(seen > 0, largest, -float("inf")), 0), 0.0)
    drop = tl.where(seen > 0, largest - top, 0.0)
    return top, tl.sum(below * tl.exp(drop) + seen * expm1(drop), 0), count


@triton.jit
def log_mean_exp(state, count):
    top, below, _ = log_mean_exp_fold(state)
    return top + log1p(below / tl.maximum(count, 1.0))


# -- running spans -------------------------------------------------------------------------------------------


@triton.jit
def prefix(x, mask, position, carry):
    return carry + tl.cumsum(x, 0), carry + tl.sum(x, 0)


@triton.jit
def prefix_geometric(x, mask, position, carry):
    return (carry + tl.cumsum(x, 0)) / tl.maximum(position, 1.0), carry + tl.sum(x, 0)


@triton.jit
def _smaller(before, through, next_before, next_through):
    """(smallest of all but the last, smallest) of two stretches, joined."""
    return tl.minimum(through, next_before), tl.minimum(through, next_through)


@triton.jit
def _minimum_before(x, mask, carry):
    """Smallest of the valid tokens before each one, 0 for the first; the carry is the smallest of the row so far."""
    seen = tl.where(mask, x, float("inf"))
    before, _ = tl.associative_scan((tl.zeros_like(x) + float("inf"), seen), 0, _smaller)
    before = tl.minimum(before, carry)
    return tl.where(before == float("inf"), 0.0, before), tl.minimum(carry, tl.min(seen, 0))


@triton.jit
def min_prefix(x, mask, position, carry):
    before, carry = _minimum_before(x, mask, carry)
    return before + x, carry


@triton.jit
def bounded_min_prefix(x, mask, position, carry):
    before, carry = _minimum_before(x, mask, carry)
    return tl.minimum(before, 0.0) + x, carry


# -- turns ---------------------------------------------------------------------------------------------------
# A program numbers the runs of tokens that it sees: a run ends where the next turn starts, or where its part of the
# row does.  A turn is the runs that have its id, wherever in the row they lie.


@triton.jit
def _same_run(total, count, starts, next_total, next_count, next_starts):
    """Running (sum, count) within a run; ``starts`` is 1 where one starts."""
    return (
        tl.where(next_starts > 0, next_total, total + next_total),
        tl.where(next_starts > 0, next_count, count + next_count),
        tl.maximum(starts, next_starts),
    )


@triton.jit
def run_totals(x, mask, starts, total_before, count_before):
    """Running (sum, number of valid tokens) of the run each token is in; ``*_before`` carry a run over blocks."""
    total, count, started = tl.associative_scan((x, tl.where(mask, 1.0, 0.0), tl.where(starts, 1.0, 0.0)), 0, _same_run)
    goes_on = started == 0
    return tl.where(goes_on, total_before + total, total), tl.where(goes_on, count_before + count, count)


@triton.jit
def turn_means(
    ids_ptr,
    totals_ptr,
    counts_ptr,
    means_ptr,
    row_start,
    begin,
    runs,
    turns_before,
    parts,
    part_length,
    runs_ptr,
    turns_ptr,
):
    """The mean over its turn for each run of this program, at the runs' places.

    Args:
        ids_ptr, totals_ptr, counts_ptr, means_ptr: [tokens]; a part's runs lie from where its tokens do.
        row_start, begin: where the row starts in them, and this part within the row.
        runs: how many runs this part has.
        turns_before: what is added to this part's ids, so that they are the row's.
        runs_ptr, turns_ptr: [parts], how many runs a part has, and what its ids add to those of later parts; None:
            the row has one part, and ids are the row's already.
    """
    many: tl.constexpr = 32
    lanes = tl.arange(0, many)
    for first in range(0, runs, many):
        own = row_start + begin + first + lanes
        own_id = tl.load(ids_ptr + own, mask=first + lanes < runs, other=0) + turns_before
        total = tl.zeros([many], tl.float32)
        count = tl.zeros([many], tl.float32)
        before = turns_before * 0
        part_start = row_start
        for part in range(0, parts):
            there = runs if runs_ptr is None else tl.load(runs_ptr + part).to(tl.int32)
            for other in range(0, there, many):
                place = part_start + other + lanes
                inside = other + lanes < there
                ids = tl.load(ids_ptr + place, mask=inside, other=0) + before
                same = (own_id[:, None] == ids[None, :]) & inside[None, :]
                totals = tl.load(totals_ptr + place, mask=inside, other=0.0)
                counts = tl.load(counts_ptr + place, mask=inside, other=0.0)
                total += tl.sum(tl.where(same, totals[None, :], 0.0), 1)
                count += tl.sum(tl.where(same, counts[None, :], 0.0), 1)
            part_start += part_length
            if turns_ptr is not None:
                before += tl.load(turns_ptr + part).to(tl.int64)
        tl.store(means_ptr + own, total / tl.maximum(count, 1.0), mask=first + lanes < runs)


class Reduction(NamedTuple):
    """A reduction's functions, and how many quantities its state has."""

    start: Any
    step: Any
    fold: Any
    end: Any
    size: int = 1


class Running(NamedTuple):
    """A running span, its first carry, and the reduction over a row's earlier parts that its carry is."""

    span: Any
    first: str
    carry: str


REDUCTIONS = {
    "sequence": Reduction(sequence_start, sequence_step, sequence_fold, sequence),
    "geometric": Reduction(sequence_start, sequence_step, sequence_fold, geometric),
    "sequence_max": Reduction(sequence_max_start, sequence_max_step, sequence_max_fold, sequence_max),
    "sequence_min": Reduction(sequence_min_start, sequence_min_step, sequence_min_fold, sequence_min),
    "log_mean_exp": Reduction(log_mean_exp_start, log_mean_exp_step, log_mean_exp_fold, log_mean_exp, size=3),
}

RUNNING = {
    "prefix": Running(prefix, "0.0", "sequence"),
    "prefix_geometric": Running(prefix_geometric, "0.0", "sequence"),
    "min_prefix": Running(min_prefix, 'float("inf")', "sequence_min"),
    "bounded_min_prefix": Running(bounded_min_prefix, 'float("inf")', "sequence_min"),
}

SPANS = frozenset({"token", "turn", *REDUCTIONS, *RUNNING})
