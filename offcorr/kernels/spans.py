"""The spans of ``offcorr.spans`` for Triton: a row is read block by block, and what a span carries goes along.

Each torch function of a span has a Triton twin in ``TWINS``, as data: a ``Reduction`` over the row, a ``Running`` span,
``TOKEN``, ``TURN``, ``NEARBY``, or ``TORCH`` where the torch function itself runs before the launch.  ``register``
adds the twin of a span of one's own.  Every function of a twin takes the stage's parameters ``p`` last.  ``x``, the
measure, is 0 under the mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from offcorr.kernels.rebind import named_by_source
from offcorr.stages.spans import SPANS


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


class Reduction(NamedTuple):
    """A span with one value for the whole row.

    Its state is a tuple of vectors, one entry per lane, so that only the end of the row reduces over lanes.  Where
    several programs share a row, the folded numbers of each are the lanes of a state that is folded again.
    """

    first: tuple[float, ...]
    """Start values of the state's vectors; a lane that still holds its start value changes no result."""
    step: Any
    """``(state, x, mask, p) -> state``, for each block."""
    fold: Any
    """``(state, p) -> numbers``: one number for each vector of the state."""
    end: Any
    """``(numbers, count, p) -> value``; ``count`` is the row's number of valid tokens."""
    wide: bool = False
    """Whether the state is float64 rather than float32.  For a sum of numbers of both signs: in float32 one that goes
    far and returns keeps the rounding of where it was."""


@triton.jit
def nothing(state, p):
    """The fold of an empty state."""
    return state


@triton.jit
def total_step(state, x, mask, p):
    return (state[0] + x,)


@triton.jit
def total_fold(state, p):
    return (tl.sum(state[0], 0),)


@triton.jit
def total(numbers, count, p):
    return numbers[0]


@triton.jit
def mean(numbers, count, p):
    return numbers[0] / tl.maximum(count, 1.0)


@triton.jit
def largest_step(state, x, mask, p):
    return (tl.maximum(state[0], tl.where(mask, x, -float("inf"))),)


@triton.jit
def largest_fold(state, p):
    return (tl.max(state[0], 0),)


@triton.jit
def smallest_step(state, x, mask, p):
    return (tl.minimum(state[0], tl.where(mask, x, float("inf"))),)


@triton.jit
def smallest_fold(state, p):
    return (tl.min(state[0], 0),)


@triton.jit
def extreme(numbers, count, p):
    return tl.where(count > 0, numbers[0], 0.0)


@triton.jit
def log_mean_exp_step(state, x, mask, p):
    """State: the largest so far (any number where nothing was seen), sum of expm1(x - largest), how many."""
    largest, below, seen = state
    top = tl.where(mask, tl.where(seen > 0, tl.maximum(largest, x), x), largest)
    drop = tl.where(seen > 0, largest - top, 0.0)
    below = below * tl.exp(drop) + seen * expm1(drop)
    return top, below + tl.where(mask, expm1(x - top), 0.0), seen + tl.where(mask, 1.0, 0.0)


@triton.jit
def log_mean_exp_fold(state, p):
    largest, below, seen = state
    count = tl.sum(seen, 0)
    top = tl.where(count > 0, tl.max(tl.where(seen > 0, largest, -float("inf")), 0), 0.0)
    drop = tl.where(seen > 0, largest - top, 0.0)
    return top, tl.sum(below * tl.exp(drop) + seen * expm1(drop), 0), count


@triton.jit
def log_mean_exp(numbers, count, p):
    return numbers[0] + log1p(numbers[1] / tl.maximum(count, 1.0))


# -- running spans -------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A span whose value depends on the tokens before, read in their order."""

    step: Any
    """``(x, mask, position, carry, p) -> (values, carry)``, for each block; ``position`` counts valid tokens from 1,
    ``carry`` is a float64 scalar, and the values may be float64 too: see ``Reduction.wide``."""
    first: float = 0.0
    """The carry before the first token."""
    carry: str | None = None
    """The reduction whose folded number over the earlier tokens is the carry; None: a row is never shared by several
    programs, since a later one could not know where to begin."""
    needs_position: bool = True
    """False spares the kernel the count where nothing else needs it; ``position`` is 0 then."""


@triton.jit
def prefix(x, mask, position, carry, p):
    x = x.to(tl.float64)
    return carry + tl.cumsum(x, 0), carry + tl.sum(x, 0)


@triton.jit
def prefix_geometric(x, mask, position, carry, p):
    total, carry = prefix(x, mask, position, carry, p)
    return total.to(tl.float32) / tl.maximum(position, 1.0), carry


@triton.jit
def _smaller(before, through, next_before, next_through):
    """(smallest of all but the last, smallest) of two stretches, joined."""
    return tl.minimum(through, next_before), tl.minimum(through, next_through)


@triton.jit
def min_before(x, mask, position, carry, p):
    """The carry is the smallest of the row so far."""
    seen = tl.where(mask, x, float("inf"))
    carry = carry.to(tl.float32)
    before, _ = tl.associative_scan((tl.zeros_like(x) + float("inf"), seen), 0, _smaller)
    return tl.minimum(before, carry), tl.minimum(carry, tl.min(seen, 0))


@triton.jit
def _minimum_before(x, mask, position, carry, p):
    """As ``min_before``, with 0 for the first token."""
    before, carry = min_before(x, mask, position, carry, p)
    return tl.where(before == float("inf"), 0.0, before), carry


@triton.jit
def min_prefix(x, mask, position, carry, p):
    before, carry = _minimum_before(x, mask, position, carry, p)
    return before + x, carry


@triton.jit
def bounded_min_prefix(x, mask, position, carry, p):
    before, carry = _minimum_before(x, mask, position, carry, p)
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
    ids_ptr, totals_ptr, counts_ptr, means_ptr, row, runs, turns_before, parts, part_length, runs_ptr, turns_ptr
):
    """The mean over its turn for each run of this program, at the runs' places.

    Args:
        ids_ptr, totals_ptr, counts_ptr, means_ptr: [tokens]; a part's runs lie from where its tokens do.
        runs: how many runs this part has.
        turns_before: what is added to this part's ids, so that they are the row's.
        runs_ptr, turns_ptr: [parts], how many runs a part has, and what its ids add to those of later parts; None:
            the row has one part, and ids are the row's already.
    """
    many: tl.constexpr = 32
    lanes = tl.arange(0, many)
    for first in range(0, runs, many):
        own = row.start + row.begin + first + lanes
        own_id = tl.load(ids_ptr + own, mask=first + lanes < runs, other=0) + turns_before
        total = tl.zeros([many], tl.float32)
        count = tl.zeros([many], tl.float32)
        before = turns_before * 0
        part_start = row.start
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


# -- sums that decay on both sides -----------------------------------------------------------------------------
# A token n valid tokens away counts lam^n.  A block needs, at its edges, the decayed sums of the tokens before it and
# behind it: the first is carried along, the second stored for each block by a pass from the row's end
# (``correction.after``).


@triton.jit
def power(lam, n):
    """lam^n in float64, 0^0 = 1."""
    lam = tl.zeros_like(n).to(tl.float64) + lam
    return tl.where(n == 0, 1.0, tl.where(lam > 0, tl.exp(n * tl.log(tl.maximum(lam, 1e-300))), 0.0))


@triton.jit
def at_edges(x, mask, lam):
    """(number of valid tokens, their decayed sum at the last of them, at the first)."""
    ones = tl.where(mask, 1.0, 0.0)
    count = tl.sum(ones, 0)
    position = tl.cumsum(ones, 0)
    x = x.to(tl.float64)
    return count, tl.sum(x * power(lam, count - position), 0), tl.sum(x * power(lam, tl.maximum(position - 1, 0.0)), 0)


@triton.jit
def _decayed(factor, total, next_factor, next_total):
    """(product of the factors, decayed sum at the end) of two stretches, joined."""
    return factor * next_factor, total * next_factor + next_total


@triton.jit
def nearby(x, mask, before, after, lam):
    """Values, and the decayed sum at the last token; ``before`` and ``after`` are those at the nearest tokens."""
    x = x.to(tl.float64)
    factor = tl.where(mask, lam, 1.0).to(tl.float64)
    passed, earlier = tl.associative_scan((factor, x), 0, _decayed)
    earlier += passed * before
    passed, later = tl.associative_scan((factor, x), 0, _decayed, reverse=True)
    later += passed * after
    last = tl.arange(0, x.shape[0]) == x.shape[0] - 1
    return (earlier + later - x).to(tl.float32), tl.sum(tl.where(last, earlier, 0.0), 0)


# -- by name -------------------------------------------------------------------------------------------------

TOKEN, TURN, NEARBY, TORCH = "token", "turn", "nearby", "torch"
"""The twins that are no functions: the measure itself, the mean over the turn (``run_totals``, ``turn_means``), the
sum that decays on both sides (``at_edges``, ``nearby``), and values that torch computes before the launch, for a span
that no pass over a row can give, such as a quantile of it."""

_INFINITY = float("inf")

_BUILT_IN: dict[str, Reduction | Running | str] = {
    "token": TOKEN,
    "turn": TURN,
    "nearby": NEARBY,
    "sequence": Reduction((0.0,), total_step, total_fold, total, wide=True),
    "geometric": Reduction((0.0,), total_step, total_fold, mean, wide=True),
    "sequence_max": Reduction((-_INFINITY,), largest_step, largest_fold, extreme),
    "sequence_min": Reduction((_INFINITY,), smallest_step, smallest_fold, extreme),
    "log_mean_exp": Reduction((0.0, 0.0, 0.0), log_mean_exp_step, log_mean_exp_fold, log_mean_exp),
    "prefix": Running(prefix, carry="sequence", needs_position=False),
    "prefix_geometric": Running(prefix_geometric, carry="sequence"),
    "min_before": Running(min_before, _INFINITY, "sequence_min", needs_position=False),
    "min_prefix": Running(min_prefix, _INFINITY, "sequence_min", needs_position=False),
    "bounded_min_prefix": Running(bounded_min_prefix, _INFINITY, "sequence_min", needs_position=False),
    "budget_margin": TORCH,
}

TWINS = {SPANS[name]: twin for name, twin in _BUILT_IN.items()}
"""By torch function rather than by name, so that a name that is registered anew does not keep another's twin."""

_ARGUMENTS = {
    Reduction: {"step": "state, x, mask, p", "fold": "state, p", "end": "numbers, count, p"},
    Running: {"step": "x, mask, position, carry, p"},
}


def register(name: str, twin: Reduction | Running) -> None:
    """The Triton twin of a span that ``offcorr.spans.register`` knows; corrections over it then run fused.

    Raises:
        ValueError: there is no such span, it has a twin already, or a function of the twin takes other arguments.
    """
    if name not in SPANS:
        raise ValueError(f"there is no span {name!r}: register its torch function with offcorr.spans.register first")
    if SPANS[name] in TWINS:
        raise ValueError(f"the span {name!r} has a Triton twin already")
    if not isinstance(twin, Reduction | Running):
        raise ValueError(f"the twin of {name!r} is {twin!r}, expected a Reduction or a Running")
    carry = getattr(twin, "carry", None)
    if carry is not None and not (carry in SPANS and isinstance(TWINS.get(SPANS[carry]), Reduction)):
        raise ValueError(f"the carry of {name!r} is {carry!r}, expected the name of a Reduction or None")
    for part, wanted in _ARGUMENTS[type(twin)].items():
        got = ", ".join(getattr(getattr(twin, part), "arg_names", ["no @triton.jit function"]))
        if got != wanted:
            raise ValueError(f"{part} of the twin of {name!r} takes ({got}), expected ({wanted})")
        named_by_source(getattr(twin, part))
    TWINS[SPANS[name]] = twin
