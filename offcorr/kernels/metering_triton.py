"""Metric accumulators in a kernel: every program leaves a column of numbers, the last one to end merges them.

Sums are taken in a fixed order, and the one atomic is an integer: who comes last is chance, what it computes is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from offcorr.kernels.scans_triton import stretch

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
    "rows",  # that count where only what is kept does
)
MISMATCH_COLUMNS = (
    # added up
    *("abs", "seen", "k1", "k3", "first_token", "first_seen", "rows"),
    # the largest taken
    "max",
    # moments of e^x, scaled: the largest x, sum e^(x - largest), sum e^(2 (x - largest)); x of a token, of a sequence,
    # and minus the sequence's mean
    *("top", "first", "second"),
    *("seq_top", "seq_first", "seq_second"),
    *("ppl_top", "ppl_first"),
    "histogram",  # 64 columns, added up
)
BINS: tl.constexpr = tl.constexpr(64)
LOSS_SIZE: tl.constexpr = tl.constexpr(len(LOSS_COLUMNS))
MISMATCH_NUMBERS: tl.constexpr = tl.constexpr(MISMATCH_COLUMNS.index("histogram"))
MISMATCH_SUMS: tl.constexpr = tl.constexpr(MISMATCH_COLUMNS.index("max"))
MISMATCH_SIZE: tl.constexpr = tl.constexpr(MISMATCH_COLUMNS.index("histogram") + 64)

LOSS, KEPT, VALID, ROWS = (tl.constexpr(LOSS_COLUMNS.index(name)) for name in ("loss", "kept", "valid", "rows"))
SEEN, K1 = (tl.constexpr(MISMATCH_COLUMNS.index(name)) for name in ("seen", "k1"))
MAX, TOP, SEQ, PPL = (tl.constexpr(MISMATCH_COLUMNS.index(name)) for name in ("max", "top", "seq_top", "ppl_top"))

WIDE: tl.constexpr = tl.constexpr(16)
"""Columns that are merged together; the loss has fewer, a series as many, and four times as many bins."""
LANES: tl.constexpr = tl.constexpr(64)
"""Entries that are merged together."""

PLACES: tl.constexpr = tl.constexpr(8)
"""Most places that one merged number goes to."""

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
def mismatch_store(state, first, column_ptr, slots):
    """``column_ptr``: this program's entry in the series' first column; columns lie ``slots`` numbers apart.

    ``first``: |d| at the row's first valid token, below 0 where there is none to compare.
    """
    size_sum, count, largest, k1, k3, top, moment, second, bins = state
    minus_d, seen = tl.sum(k1, 0), tl.sum(count, 0)
    column = tl.arange(0, WIDE)
    numbers = tl.zeros([WIDE], tl.float32)
    numbers = tl.where(column == 0, tl.sum(size_sum, 0), numbers)
    numbers = tl.where(column == SEEN, seen, numbers)
    numbers = tl.where(column == K1, minus_d, numbers)
    numbers = tl.where(column == 3, tl.sum(k3, 0), numbers)
    numbers = tl.where(column == 4, tl.maximum(first, 0.0), numbers)
    numbers = tl.where(column == 5, tl.where(first >= 0, 1.0, 0.0), numbers)
    numbers = tl.where(column == MAX, tl.max(largest, 0), numbers)
    numbers = tl.where(column == TOP, top, numbers)
    numbers = tl.where(column == TOP + 1, tl.sum(moment, 0), numbers)
    numbers = tl.where(column == TOP + 2, tl.sum(second, 0), numbers)
    numbers = _of_a_row(numbers, minus_d, seen)
    tl.store(column_ptr + column.to(tl.int64) * slots, numbers)
    number = tl.arange(0, 128)
    tl.store(column_ptr + (number + MISMATCH_NUMBERS).to(tl.int64) * slots, bins.to(tl.float32), mask=number < BINS)


@triton.jit
def _of_a_row(numbers, minus_d, seen):
    """[WIDE] with the columns that hold something of whole rows: one row, of which all is known."""
    column = tl.arange(0, WIDE)
    present = tl.where(seen > 0, 1.0, 0.0)
    numbers = tl.where(column == MISMATCH_SUMS - 1, present, numbers)
    numbers = tl.where(column == SEQ, tl.where(seen > 0, -minus_d, _NOTHING), numbers)
    numbers = tl.where((column == SEQ + 1) | (column == SEQ + 2), present, numbers)
    # clamped as in the reference, where e^700 is still a number
    mean = tl.minimum(minus_d / tl.maximum(seen, 1.0), 700.0)
    numbers = tl.where(column == PPL, tl.where(seen > 0, mean, _NOTHING), numbers)
    return tl.where(column == PPL + 1, present, numbers)


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
def loss_store(state, column_ptr, slots, DIVIDES: tl.constexpr):
    """``DIVIDES``: the loss is divided by how many of its row's tokens were kept (see ``merge``)."""
    total, clipped, weights, kept_bounded, vetoed_zero, blind_bad, valid = state
    kept, valid_sum = _total(kept_bounded, False), tl.sum(valid, 0).to(tl.float32)
    column = tl.arange(0, WIDE)
    numbers = tl.where(column == LOSS, tl.sum(total, 0), 0.0)
    numbers = tl.where(column == 1, tl.sum(clipped, 0), numbers)
    numbers = tl.where(column == 2, _total(kept_bounded, True), numbers)
    numbers = tl.where(column == KEPT, kept, numbers)
    numbers = tl.where(column == 4, valid_sum - kept, numbers)
    numbers = tl.where(column == 5, _total(vetoed_zero, False), numbers)
    numbers = tl.where(column == 6, tl.sum(weights, 0), numbers)
    numbers = tl.where(column == 7, _total(vetoed_zero, True), numbers)
    numbers = tl.where(column == 8, _total(blind_bad, False), numbers)
    numbers = tl.where(column == 9, _total(blind_bad, True), numbers)
    numbers = tl.where(column == VALID, valid_sum, numbers)
    numbers = _of_a_rows_loss(numbers, kept, valid_sum, DIVIDES)
    tl.store(column_ptr + column.to(tl.int64) * slots, numbers, mask=column < LOSS_SIZE)


@triton.jit
def _of_a_rows_loss(numbers, kept, valid, DIVIDES: tl.constexpr):
    column = tl.arange(0, WIDE)
    if DIVIDES:
        numbers = tl.where(column == LOSS, numbers / tl.maximum(kept, 1.0), numbers)
    return tl.where(column == ROWS, tl.where((kept > 0) | (valid == 0), 1.0, 0.0), numbers)


# -- merging -------------------------------------------------------------------------------------------------


@triton.jit
def _arrive(ticket_ptr, members):
    """Whether this program is the last of ``members`` to come here; it may read what the others stored before."""
    tl.debug_barrier()  # what this program's other threads stored is stored
    before = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == members - 1:
        tl.store(ticket_ptr, 0)  # for the next launch
    return before == members - 1


@triton.jit
def slots_of(entries, group):
    """How far apart columns lie: an entry for every program, and one for every group of them."""
    return entries.to(tl.int64) + tl.where(group > 1, tl.cdiv(entries, group), 0)


@triton.jit
def _one(numbers, AT: tl.constexpr):
    """One of [WIDE]."""
    return tl.sum(tl.where(tl.arange(0, WIDE) == AT, numbers, 0.0), 0)


@triton.jit
def _sums(column_ptr, slots, count, COLUMNS: tl.constexpr, USED: tl.constexpr):
    """[COLUMNS] of as many neighbouring columns, over ``count`` neighbouring entries."""
    column, lanes = tl.arange(0, COLUMNS), tl.arange(0, LANES)
    total = tl.zeros([COLUMNS, LANES], tl.float64)
    for first in range(0, count, LANES):
        inside = (column < USED)[:, None] & (first + lanes < count)[None, :]
        place = column.to(tl.int64)[:, None] * slots + (first + lanes)[None, :]
        total += tl.load(column_ptr + place, mask=inside, other=0.0).to(tl.float64)
    return tl.sum(total, 1)


@triton.jit
def _largest(column_ptr, count, least):
    lanes = tl.arange(0, LANES)
    largest = tl.zeros([LANES], tl.float32) + least
    for first in range(0, count, LANES):
        largest = tl.maximum(largest, tl.load(column_ptr + first + lanes, mask=first + lanes < count, other=least))
    return tl.max(largest, 0).to(tl.float64)


@triton.jit
def _scaled_sum(column_ptr, top_ptr, top, count, power):
    """Sum of a column whose entries are scaled by e^(-power * their own top), scaled by e^(-power * top)."""
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for first in range(0, count, LANES):
        inside = first + lanes < count
        shift = tl.load(top_ptr + first + lanes, mask=inside, other=_NOTHING).to(tl.float64) - top
        scaled = tl.load(column_ptr + first + lanes, mask=inside, other=0.0).to(tl.float64)
        total += scaled * tl.exp(power * shift)
    return tl.sum(total, 0)


@triton.jit
def _merged_moments(numbers, AT: tl.constexpr, SECOND: tl.constexpr, column_ptr, slots, count):
    """[WIDE] with the columns AT, AT + 1 and, with SECOND, AT + 2."""
    column, top_ptr = tl.arange(0, WIDE), column_ptr + slots * AT
    top = _largest(top_ptr, count, _NOTHING)
    numbers = tl.where(column == AT, top, numbers)
    numbers = tl.where(column == AT + 1, _scaled_sum(top_ptr + slots, top_ptr, top, count, 1.0), numbers)
    if SECOND:
        numbers = tl.where(column == AT + 2, _scaled_sum(top_ptr + 2 * slots, top_ptr, top, count, 2.0), numbers)
    return numbers


@triton.jit
def _merged_mismatch(column_ptr, slots, count, ROW: tl.constexpr):
    """[WIDE], a series' numbers over ``count`` entries; ``ROW``: they are the parts of one row."""
    column = tl.arange(0, WIDE)
    numbers = _sums(column_ptr, slots, count, WIDE, MISMATCH_SUMS)
    numbers = tl.where(column == MAX, _largest(column_ptr + slots * MAX, count, 0.0), numbers)
    numbers = _merged_moments(numbers, TOP, True, column_ptr, slots, count)
    if ROW:
        return _of_a_row(numbers, _one(numbers, K1), _one(numbers, SEEN))
    numbers = _merged_moments(numbers, SEQ, True, column_ptr, slots, count)
    return _merged_moments(numbers, PPL, False, column_ptr, slots, count)


@triton.jit
def merge(
    partials_ptr,
    places_ptr,
    merged_ptr,
    totals_ptr,
    tickets_ptr,
    entry,
    entries,
    group,
    rows,
    SERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """The last program merges every entry into ``merged_ptr`` and ``totals_ptr`` (the loss, what it was divided by).

    Where there are many entries, the last of each ``group`` has merged its own before; entries of groups follow those
    of programs.  Where rows are split (``SPLIT``) a group is a row.

    Args:
        UNIT: the column that Z is the sum of, where Z is not known before (``count_rejected=False``); else None.
        DIVIDES: together with that, the loss of a row is divided by how many of its tokens were kept.
    """
    slots = slots_of(entries, group)
    first, count = entries * 0, entries
    last = entry >= 0
    if group > 1:
        first, count = entries, tl.cdiv(entries, group)
        number = entry // group
        members = tl.minimum(group, entries - number * group)
        last = _arrive(tickets_ptr + 1 + number, members)
        if last:
            _merge_group(
                partials_ptr + number * group, partials_ptr + entries + number, slots, members, SERIES, SPLIT, DIVIDES
            )
    if last:
        if _arrive(tickets_ptr, count):
            _publish(partials_ptr + first, places_ptr, merged_ptr, totals_ptr, slots, count, rows, SERIES, UNIT)


@triton.jit
def _merge_group(from_ptr, to_ptr, slots, count, SERIES: tl.constexpr, SPLIT: tl.constexpr, DIVIDES: tl.constexpr):
    """Merge ``count`` entries into one."""
    column = tl.arange(0, WIDE)
    numbers = _sums(from_ptr, slots, count, WIDE, LOSS_SIZE)
    if SPLIT:
        numbers = _of_a_rows_loss(numbers, _one(numbers, KEPT), _one(numbers, VALID), DIVIDES)
    tl.store(to_ptr + column.to(tl.int64) * slots, numbers.to(tl.float32), mask=column < LOSS_SIZE)
    for series in range(SERIES):
        skip = slots * (LOSS_SIZE + series * MISMATCH_SIZE)
        numbers = _merged_mismatch(from_ptr + skip, slots, count, SPLIT)
        tl.store(to_ptr + skip + column.to(tl.int64) * slots, numbers.to(tl.float32))
        for bins in range(BINS // WIDE):
            bins_at = skip + slots * (MISMATCH_NUMBERS + bins * WIDE)
            counts = _sums(from_ptr + bins_at, slots, count, WIDE, WIDE)
            tl.store(to_ptr + bins_at + column.to(tl.int64) * slots, counts.to(tl.float32))


@triton.jit
def _publish(
    from_ptr, places_ptr, merged_ptr, totals_ptr, slots, count, rows, SERIES: tl.constexpr, UNIT: tl.constexpr
):
    """Merge ``count`` entries into the vector of accumulators, float64, each number to its places."""
    column = tl.arange(0, WIDE)
    numbers = _sums(from_ptr, slots, count, WIDE, LOSS_SIZE)
    # "skipped": the two columns after the last, none of all rows
    _place(tl.where(column == LOSS_SIZE + 1, rows, numbers), places_ptr, merged_ptr)
    loss = _one(numbers, LOSS)
    if UNIT is not None:
        z = tl.maximum(_one(numbers, UNIT), 1.0)
        tl.store(totals_ptr + 1, z.to(tl.float32))
        loss = loss / z
    tl.store(totals_ptr, loss.to(tl.float32))
    for series in range(SERIES):
        of_ptr = from_ptr + slots * (LOSS_SIZE + series * MISMATCH_SIZE)
        numbers = _merged_mismatch(of_ptr, slots, count, False)
        perplexity = _one(numbers, PPL + 1) * tl.exp(_one(numbers, PPL))
        numbers = tl.where(column == PPL + 1, perplexity, numbers)
        # as an empty accumulator has it
        numbers = tl.where(((column == TOP) | (column == SEQ)) & (numbers <= _NOTHING), -1e300, numbers)
        places_of_ptr = places_ptr + (1 + series * (1 + BINS // WIDE)) * WIDE * PLACES
        _place(numbers, places_of_ptr, merged_ptr)
        for bins in range(BINS // WIDE):
            counts = _sums(of_ptr + slots * (MISMATCH_NUMBERS + bins * WIDE), slots, count, WIDE, WIDE)
            _place(counts, places_of_ptr + (1 + bins) * WIDE * PLACES, merged_ptr)


@triton.jit
def _place(numbers, places_ptr, merged_ptr):
    """[WIDE] numbers to the places that a table [WIDE, PLACES] has for each; -1: none."""
    place = tl.load(places_ptr + tl.arange(0, WIDE)[:, None] * PLACES + tl.arange(0, PLACES)[None, :])
    spread = tl.zeros([WIDE, PLACES], tl.float64) + numbers[:, None]
    tl.store(merged_ptr + place, spread, mask=place >= 0)


@triton.jit(do_not_specialize=["entries", "group", "parts", "part_length"])
def divide_by_kept(
    coefficient_ptr,
    partials_ptr,
    totals_ptr,
    cu_seqlens_ptr,
    width,
    entries,
    group,
    parts,
    part_length,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """count_rejected=False: the coefficient by Z and, with ``DIVIDES``, by how many tokens of its row were kept."""
    entry = tl.program_id(0)
    row = entry // parts
    start, _, begin, end = stretch(cu_seqlens_ptr, width, row, entry % parts, part_length)
    slots = slots_of(entries, group)
    scale = 1.0 / tl.load(totals_ptr + 1)
    if DIVIDES:
        kept = _sums(partials_ptr + slots * KEPT + row * parts, slots, parts, 1, 1)
        scale = scale / tl.maximum(tl.sum(kept, 0).to(tl.float32), 1.0)
    lanes = tl.arange(0, BLOCK)
    for first in range(begin, end, BLOCK):
        index = first + lanes
        place = coefficient_ptr + start + index
        tl.store(place, tl.load(place, mask=index < end, other=0.0) * scale, mask=index < end)
