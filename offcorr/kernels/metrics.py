"""Metric accumulators in a kernel: every program leaves an entry of numbers, the last one to end merges them.

Sums are taken in a fixed order, and the one atomic is an integer: who comes last is chance, what it computes is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from offcorr.kernels.rebind import for_triton
from offcorr.kernels.spans import stretch
from offcorr.stages import pointwise

nonnegative_kl = for_triton(pointwise.nonnegative_kl)

LOSS_COLUMNS = (
    # sums; c and ratio of the tokens with an advantage
    *("loss", "clipped", "weight", "c", "c_squared", "ratio", "ratio_squared"),
    # numbers of tokens; "dropped" to "amplified" of those with an advantage
    *("kept", "truncated", "vetoed", "zero", "unscored", "nonfinite", "valid", "advantaged"),
    *("dropped", "damped", "amplified", "trainable"),
    # what follows from them; "rows": those that count where only what is kept does
    *("rejected", "no_advantage", "rows"),
)
MISMATCH_COLUMNS = (
    # added up
    *("abs", "seen", "k1", "k3", "first_token", "first_seen", "rows"),
    # the largest -d; the largest d is "top"
    "bottom",
    # moments of e^x, scaled: the largest x, sum e^(x - largest), sum e^(2 (x - largest)); x of a token, of a sequence,
    # and minus the sequence's mean
    *("top", "first", "second"),
    *("seq_top", "seq_first", "seq_second"),
    *("ppl_top", "ppl_first"),
    "histogram",  # 64 columns, added up
)
BINS: tl.constexpr = tl.constexpr(64)
WIDE: tl.constexpr = tl.constexpr(32)
"""Columns of the loss, and rows of every table of ``launch.Layout.places``."""
SERIES_WIDE: tl.constexpr = tl.constexpr(16)
"""Columns of a series before its bins."""
LOSS_SIZE: tl.constexpr = tl.constexpr(len(LOSS_COLUMNS))
SERIES_SIZE: tl.constexpr = tl.constexpr(int(SERIES_WIDE) + int(BINS))


def entry_size(series: int) -> int:
    """Numbers of an entry: those of the loss, then those of every series."""
    return int(WIDE) + series * int(SERIES_SIZE)


LOSS, KEPT, UNSCORED, VALID, ADVANTAGED, TRAINABLE, REJECTED, NO_ADVANTAGE, ROWS = (
    tl.constexpr(LOSS_COLUMNS.index(name))
    for name in ("loss", "kept", "unscored", "valid", "advantaged", "trainable", "rejected", "no_advantage", "rows")
)
ABS, SEEN, K1, K3, FIRST_TOKEN, FIRST_SEEN, PRESENT, BOTTOM, TOP, _, _, SEQ, _, _, PPL, _, _ = map(
    tl.constexpr, range(len(MISMATCH_COLUMNS))
)

LANES: tl.constexpr = tl.constexpr(32)
"""Entries that are merged together."""

PLACES: tl.constexpr = tl.constexpr(8)
"""Most places that one merged number goes to."""

FOLD: tl.constexpr = tl.constexpr(4)
"""Tokens that share one lane of an accumulator, BLOCK / FOLD apart: in the compiler's layout of a block they are one
thread's, so that adding them up moves nothing between threads and an accumulator costs one register.  (Neighbours are
not: ptxas spills then.)"""

LONGEST = 65535 * 128
"""Tokens that one program may look at: a count has 16 bits, and there are 128 lanes where a row is longer than 512."""

_NOTHING: tl.constexpr = tl.constexpr(-1e30)  # below every log-ratio; e^(_NOTHING - x) is 0


@triton.jit
def _folded(x):
    """[BLOCK] to [BLOCK / FOLD] sums."""
    return tl.sum(tl.reshape(x, [FOLD, x.shape[0] // FOLD]), 0)


@triton.jit
def _folded_max(x):
    return tl.max(tl.reshape(x, [FOLD, x.shape[0] // FOLD]), 0)


@triton.jit
def later(last, index):
    """The larger of ``last`` [BLOCK / FOLD] and ``index`` [BLOCK], lane by lane."""
    return tl.maximum(last, _folded_max(index))


@triton.jit
def mismatch_start(BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK // FOLD], tl.float32)
    return zeros, zeros + _NOTHING, zeros, zeros, tl.max(zeros, 0) + _NOTHING, zeros, zeros, tl.zeros([128], tl.int32)


@triton.jit
def mismatch_step(state, d, seen, edges_ptr):
    """One block of unclamped log-ratios."""
    size_sum, bottom, k1, k3, top, moment, second, bins = state

    bottom = tl.maximum(bottom, _folded_max(tl.where(seen, -d, _NOTHING)))
    d = tl.where(seen, d, 0.0)
    new_top = tl.maximum(top, tl.max(tl.where(seen, d, _NOTHING), 0))
    shrink = tl.exp(top - new_top)
    scaled = tl.where(seen, tl.exp(d - new_top), 0.0)
    # The nearest of the 63 edges, far apart: one comparison settles the bin.
    size = tl.abs(d)
    place = (tl.log2(tl.maximum(size, 1e-30)) * 0.30102999566398 + 6.0) * (62.0 / 9.0)
    nearest = tl.floor(tl.minimum(tl.maximum(place, 0.0), 62.0) + 0.5).to(tl.int32)
    bin_of = nearest + tl.where(size > tl.load(edges_ptr + nearest), 1, 0)
    bins += tl.histogram(tl.where(seen, bin_of, 127), 128)

    return (
        size_sum + _folded(tl.abs(d)),
        bottom,
        k1 - _folded(d),
        k3 + _folded(nonnegative_kl(d)),
        new_top,
        moment * shrink + _folded(scaled),
        second * shrink * shrink + _folded(scaled * scaled),
        bins,
    )


@triton.jit
def _added_but_the_second(a, b, c, d, e, f, a2, b2, c2, d2, e2, f2):
    return a + a2, tl.maximum(b, b2), c + c2, d + d2, e + e2, f + f2


@triton.jit
def mismatch_store(state, seen, first, series_ptr):
    """``seen``: tokens compared; ``first``: |d| at the row's first valid token, below 0 where it is not compared."""
    size_sum, bottom, k1, k3, top, moment, second, bins = state
    # The sum over the row is an exponent, so that its rounding would be a relative error.
    size_sum, bottom, minus_d, k3, moment, second = tl.reduce(
        (size_sum, bottom, k1.to(tl.float64), k3, moment, second), 0, _added_but_the_second
    )
    column = tl.arange(0, SERIES_WIDE)
    numbers = tl.where(column == ABS, size_sum, 0.0)
    numbers = tl.where(column == SEEN, seen, numbers)
    numbers = tl.where(column == K1, minus_d.to(tl.float32), numbers)
    numbers = tl.where(column == K3, k3, numbers)
    numbers = tl.where(column == FIRST_TOKEN, tl.maximum(first, 0.0), numbers)
    numbers = tl.where(column == FIRST_SEEN, tl.where(first >= 0, 1.0, 0.0), numbers)
    numbers = tl.where(column == BOTTOM, bottom, numbers)
    numbers = tl.where(column == TOP, top, numbers)
    numbers = tl.where(column == TOP + 1, moment, numbers)
    numbers = tl.where(column == TOP + 2, second, numbers)
    numbers = _of_a_row(numbers, minus_d, seen)
    tl.store(series_ptr + column, numbers)
    number = tl.arange(0, 128)
    tl.store(series_ptr + SERIES_WIDE + number, bins.to(tl.float32), mask=number < BINS)


@triton.jit
def _of_a_row(numbers, minus_d, seen):
    """[SERIES_WIDE] with the columns that hold something of whole rows: one row, of which all is known."""
    column = tl.arange(0, SERIES_WIDE)
    present = tl.where(seen > 0, 1.0, 0.0)
    numbers = tl.where(column == PRESENT, present, numbers)
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
    return zeros, zeros, zeros, zeros, zeros, zeros, zeros, none, none, none, none, none, none


@triton.jit
def _pair(first, second):
    """Two counts in one register, 16 bits each; see ``LONGEST``."""
    return _folded(tl.where(first, 1, 0) + tl.where(second, 65536, 0))


@triton.jit
def loss_step(
    state,
    mask,
    trainable,
    loss,
    held_back,
    truncated,
    kept,
    vetoed,
    weight,
    coefficient,
    unscored,
    nonfinite,
    advantaged,
    change,
):
    """One block of tokens; ``change``: (c, damped, amplified, plain ratio), 0 where there is no advantage."""
    total, clipped, weights, cs, squared_cs, ratios, squared_ratios, keeps, vetoes, blind, valid, drops, rises = state
    c, damped, amplified, ratio = change
    return (
        total + _folded(loss),
        clipped + _folded(tl.where(mask & (held_back == held_back), held_back, 0.0)),  # NaN is not itself
        weights + _folded(tl.where(mask & (weight == weight), weight, 0.0)),
        cs + _folded(c),
        squared_cs + _folded(c * c),
        ratios + _folded(ratio),
        squared_ratios + _folded(ratio * ratio),
        keeps + _pair(mask & kept, mask & truncated),
        vetoes + _pair(mask & vetoed, mask & (coefficient == 0)),
        blind + _pair(mask & unscored, mask & nonfinite),
        valid + _pair(mask, advantaged),
        drops + _pair(advantaged & (c == 0), damped),
        rises + _pair(amplified, trainable),
    )


# fmt: off
@triton.jit
def _all_added(
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t,
    a2, b2, c2, d2, e2, f2, g2, h2, i2, j2, k2, m2, n2, o2, p2, q2, r2, s2, t2,
):
    return (
        a + a2, b + b2, c + c2, d + d2, e + e2, f + f2, g + g2, h + h2, i + i2,
        j + j2, k + k2, m + m2, n + n2, o + o2, p + p2, q + q2, r + r2, s + s2, t + t2,
    )
# fmt: on


@triton.jit
def loss_store(state, entry_ptr, DIVIDES: tl.constexpr):
    """Returns the number of trainable tokens and of those that the engine could not score.

    ``DIVIDES``: the loss is divided by how many of its row's tokens were kept (see ``merge``).
    """
    numbers_of = state[:7]
    for k in tl.static_range(7, 13):
        numbers_of = numbers_of + (state[k] & 65535, (state[k] >> 16) & 65535)
    # All of them together: a reduction by itself is as long a wait as one of many.
    sums = tl.reduce(numbers_of, 0, _all_added)
    column = tl.arange(0, WIDE)
    numbers = tl.zeros([WIDE], tl.float32)
    for k in tl.static_range(19):
        numbers = tl.where(column == k, sums[k].to(tl.float32), numbers)
    numbers = tl.where(column == REJECTED, (sums[VALID] - sums[KEPT]).to(tl.float32), numbers)
    numbers = tl.where(column == NO_ADVANTAGE, (sums[VALID] - sums[ADVANTAGED]).to(tl.float32), numbers)
    numbers = _of_a_rows_loss(numbers, sums[KEPT].to(tl.float32), sums[VALID].to(tl.float32), DIVIDES)
    tl.store(entry_ptr + column, numbers)
    return sums[TRAINABLE], sums[UNSCORED]


@triton.jit
def _of_a_rows_loss(numbers, kept, valid, DIVIDES: tl.constexpr):
    column = tl.arange(0, WIDE)
    if DIVIDES:
        numbers = tl.where(column == LOSS, numbers / tl.maximum(kept, 1.0), numbers)
    return tl.where(column == ROWS, tl.where((kept > 0) | (valid == 0), 1.0, 0.0), numbers)


# -- merging -------------------------------------------------------------------------------------------------


@triton.jit
def _arrive(ticket_ptr, members):
    """Whether this program is the last of ``members`` to come here; it may read what the others stored before.

    The barrier and the atomic's release order the stores of all its threads, on NVIDIA GPUs.  On AMD's a barrier waits
    for no other wave's stores: there the first wave, whose atomic it is, stores an entry alone, a number a thread.
    """
    tl.debug_barrier()
    before = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if before == members - 1:
        tl.store(ticket_ptr, 0)  # for the next launch
    return before == members - 1


@triton.jit
def _one(numbers, AT: tl.constexpr):
    """One of the columns."""
    return tl.sum(tl.where(tl.arange(0, numbers.shape[0]) == AT, numbers, 0.0), 0)


@triton.jit
def _merged_loss(entry_ptr, count, SIZE: tl.constexpr):
    """[WIDE], the sums over ``count`` entries."""
    lanes, column = tl.arange(0, LANES)[:, None], tl.arange(0, WIDE)[None, :]
    total = tl.zeros([WIDE], tl.float64)
    for first in range(0, count, LANES):
        numbers = tl.load(entry_ptr + lanes * SIZE + column, mask=first + lanes < count, other=0.0)
        total += tl.sum(numbers.to(tl.float64), 0)
        entry_ptr += LANES * SIZE
    return total


@triton.jit
def _merged_series(series_ptr, count, SIZE: tl.constexpr, ROW: tl.constexpr):
    """A series over ``count`` entries: [SERIES_WIDE] numbers and [BINS]; ``ROW``: they are the parts of one row.

    What is scaled has, before it, the column of the exponent that it is scaled by, and is scaled anew by the largest.
    """
    lanes, column, number = tl.arange(0, LANES)[:, None], tl.arange(0, SERIES_WIDE), tl.arange(0, BINS)[None, :]
    scaled_by = tl.where(column >= PPL, PPL, tl.where(column >= SEQ, SEQ, tl.where(column >= TOP, TOP, column)))
    power = (column - scaled_by).to(tl.float32)
    scaled = column > scaled_by
    top = tl.zeros([SERIES_WIDE], tl.float32) + _NOTHING
    total = tl.zeros([SERIES_WIDE], tl.float64)
    bins = tl.zeros([BINS], tl.float64)
    for first in range(0, count, LANES):
        inside = first + lanes < count
        # Everything is asked for before anything is waited for.
        numbers = tl.load(series_ptr + lanes * SIZE + column[None, :], mask=inside, other=0.0)
        tops = tl.load(series_ptr + lanes * SIZE + scaled_by[None, :], mask=inside, other=_NOTHING)
        counts = tl.load(series_ptr + lanes * SIZE + SERIES_WIDE + number, mask=inside, other=0.0)
        largest = tl.maximum(top, tl.max(tops, 0))
        numbers *= tl.where(scaled[None, :], tl.exp(power[None, :] * (tops - largest[None, :])), 1.0)
        total = total * tl.where(scaled, tl.exp(power * (top - largest)), 1.0) + tl.sum(numbers.to(tl.float64), 0)
        bins += tl.sum(counts.to(tl.float64), 0)
        top = largest
        series_ptr += LANES * SIZE
    total = tl.where((column == BOTTOM) | (column == TOP) | (column == SEQ) | (column == PPL), top, total)
    if ROW:
        total = _of_a_row(total, _one(total, K1), _one(total, SEEN))
    return total, bins


@triton.jit
def merge(buffers, entry, entries, group, rows, PLAN: tl.constexpr):
    """The last program merges every entry: the metrics, the loss and, where it is not known before, Z.

    Where there are many entries, the last of each ``group`` has merged its own before; entries of groups follow those
    of programs.  Where rows are split a group is a row.
    """
    SIZE: tl.constexpr = PLAN.entry_size
    from_ptr, count = buffers.partials, entries
    last = entry >= 0
    if group > 1:
        number = entry // group
        members = tl.minimum(group, entries - number * group)
        last = _arrive(buffers.tickets + 1 + number, members)
        groups_ptr = buffers.partials + entries.to(tl.int64) * SIZE
        if last:
            own_ptr = buffers.partials + (number * group).to(tl.int64) * SIZE
            _merge_group(own_ptr, groups_ptr + number.to(tl.int64) * SIZE, members, PLAN)
        from_ptr, count = groups_ptr, tl.cdiv(entries, group)
    if last:
        if _arrive(buffers.tickets, count):
            _publish(buffers, from_ptr, count, rows, PLAN)


@triton.jit
def _merge_group(from_ptr, to_ptr, count, PLAN: tl.constexpr):
    """Merge ``count`` entries into one."""
    SIZE: tl.constexpr = PLAN.entry_size
    column = tl.arange(0, WIDE)
    numbers = _merged_loss(from_ptr, count, SIZE)
    if PLAN.split:
        numbers = _of_a_rows_loss(numbers, _one(numbers, KEPT), _one(numbers, VALID), PLAN.divides_by == "kept")
    tl.store(to_ptr + column, numbers.to(tl.float32))
    for series in range(len(PLAN.series)):
        skip = WIDE + series * SERIES_SIZE
        of_series, bins = _merged_series(from_ptr + skip, count, SIZE, PLAN.split)
        tl.store(to_ptr + skip + tl.arange(0, SERIES_WIDE), of_series.to(tl.float32))
        tl.store(to_ptr + skip + SERIES_WIDE + tl.arange(0, BINS), bins.to(tl.float32))


@triton.jit
def _publish(buffers, from_ptr, count, rows, PLAN: tl.constexpr):
    """Merge ``count`` entries into the vector of accumulators, float64, each number to its places."""
    SIZE: tl.constexpr = PLAN.entry_size
    numbers = _merged_loss(from_ptr, count, SIZE)
    # "skipped": the two columns after the last, none of all rows
    _place(tl.where(tl.arange(0, WIDE) == LOSS_SIZE + 1, rows, numbers), buffers.places, buffers.merged)
    loss = _one(numbers, LOSS)
    if PLAN.unit is not None:
        z = tl.maximum(_one(numbers, KEPT if PLAN.unit == "tokens" else ROWS), 1.0)
        tl.store(buffers.found_z, z.to(tl.float32))
        loss = loss / z
    tl.store(buffers.loss, loss.to(tl.float32))
    for series in range(len(PLAN.series)):
        of_series, bins = _merged_series(from_ptr + WIDE + series * SERIES_SIZE, count, SIZE, False)
        column = tl.arange(0, SERIES_WIDE)
        perplexity = _one(of_series, PPL + 1) * tl.exp(_one(of_series, PPL))
        of_series = tl.where(column == PPL + 1, perplexity, of_series)
        # as an empty accumulator has it
        is_largest = (column == BOTTOM) | (column == TOP) | (column == SEQ)
        of_series = tl.where(is_largest & (of_series <= _NOTHING), -1e300, of_series)
        places_of_ptr = buffers.places + (1 + series * 2) * WIDE * PLACES
        _place(of_series, places_of_ptr, buffers.merged)
        first_bin = tl.load(places_of_ptr + WIDE * PLACES)
        tl.store(buffers.merged + first_bin + tl.arange(0, BINS), bins)


@triton.jit
def _place(numbers, places_ptr, merged_ptr):
    """Numbers to the places that a table [numbers, PLACES] has for each; -1: none."""
    place = tl.load(places_ptr + tl.arange(0, numbers.shape[0])[:, None] * PLACES + tl.arange(0, PLACES)[None, :])
    spread = tl.zeros([numbers.shape[0], PLACES], tl.float64) + numbers[:, None]
    tl.store(merged_ptr + place, spread, mask=place >= 0)


@triton.jit(do_not_specialize=["parts", "part_length"])
def divide_by_kept(
    coefficient_ptr,
    partials_ptr,
    found_z_ptr,
    cu_seqlens_ptr,
    width,
    parts,
    part_length,
    SIZE: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """count_rejected=False: the coefficient by Z and, with ``DIVIDES``, by how many tokens of its row were kept."""
    entry = tl.program_id(0)
    row = entry // parts
    start, _, begin, end = stretch(cu_seqlens_ptr, width, row, entry % parts, part_length)
    scale = 1.0 / tl.load(found_z_ptr)
    if DIVIDES:
        numbers = _merged_loss(partials_ptr + row.to(tl.int64) * parts * SIZE, parts, SIZE)
        scale = scale / tl.maximum(_one(numbers, KEPT).to(tl.float32), 1.0)
    lanes = tl.arange(0, BLOCK)
    for first in range(begin, end, BLOCK):
        index = first + lanes
        place = coefficient_ptr + start + index
        tl.store(place, tl.load(place, mask=index < end, other=0.0) * scale, mask=index < end)
