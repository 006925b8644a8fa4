"""The correction kernel: every stage, the metrics and dL/dlogp of a row in one pass over its tokens.

One source for all corrections.  ``PLAN``, a ``composition.Composition``, is a compile-time constant that holds the
stages' own functions (rebound to Triton by ``rebind.for_triton``) and the Triton twins of their spans; the stages'
numbers are run-time arguments.  A program reads one row: first, where its tokens need any, for its reductions
(``first_pass``), then for everything else (``correction``).  A few long rows are split:
several programs share a row, and ``summary`` is a launch of its own that does the first pass for every part.  The
programs leave their metrics as entries, which the last one to end merges (``metrics.merge``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from offcorr.batch import LOG_LIMIT as _LOG_LIMIT
from offcorr.kernels import metrics, ops, spans
from offcorr.kernels.rebind import for_triton
from offcorr.stages import pointwise

LOG_LIMIT: tl.constexpr = tl.constexpr(_LOG_LIMIT)
SIZES = ["tokens", "rows", "parts", "part_length", "group"]
"""Run-time integers that change from batch to batch; none of them is worth compiling anew for."""

trainable = for_triton(pointwise.trainable)
finite = for_triton(pointwise.finite)
clamped = for_triton(pointwise.clamped)
dropped_to_zero = for_triton(pointwise.dropped_to_zero)
truncated_by = for_triton(pointwise.truncated)
held_back_by = for_triton(pointwise.held_back)
row_weight_of = for_triton(pointwise.row_weight)


class Fields(NamedTuple):
    """Pointers to the batch; None where it lacks a field."""

    logp: Any
    old_logp: Any
    rollout_logp: Any
    advantages: Any  # of each token or of each row, as ``PLAN.token_advantages`` says
    weight: Any  # the same, ``PLAN.token_weight``
    rewards: Any
    mask: Any
    turn_ids: Any
    cu_seqlens: Any


class Scratch(NamedTuple):
    """Pointers to what the kernel writes for itself; None where nothing is needed."""

    run_ids: Any  # [tokens], see ``spans.turn_means``
    run_totals: Any  # [turn stages, tokens]
    run_counts: Any  # [tokens]
    turn_means: Any  # [turn stages, tokens]
    summary: Any  # [PLAN.summary_size, entries]


class Outputs(NamedTuple):
    """Pointers to the results."""

    coefficient: Any  # like ``logp``
    partials: Any  # an entry of every program, then one of every group
    merged: Any  # float64, the metrics
    loss: Any
    found_z: Any  # where the kernel has to find Z
    tickets: Any  # see ``metrics.merge``


class Tables(NamedTuple):
    """Pointers to constants of the metrics."""

    edges: Any  # of the histogram's bins
    places: Any  # see ``launch.Layout``


class Row(NamedTuple):
    """The part of a row that a program reads, and the values that its tokens share."""

    start: Any  # position of the row's first token in the batch
    length: Any
    begin: Any  # first position of this program within the row
    end: Any  # one past its last
    advantage: Any
    weight: Any
    reward: Any


class Block(NamedTuple):
    """Tokens that a program looks at together, selected as ``batch.Tokens`` does; each [BLOCK]."""

    index: Any  # position within the row
    inside: Any  # before ``row.end``
    mask: Any
    trainable: Any
    scored: Any
    policies: Any  # log-probs: (logp, old_logp, rollout_logp)
    advantage: Any
    reward: Any


# -- reading -------------------------------------------------------------------------------------------------


@triton.jit
def read_row(fields, width, number, part, part_length, PLAN: tl.constexpr):
    start, length, begin, end = spans.stretch(fields.cu_seqlens, width, number, part, part_length)
    advantage = 0.0
    weight = 1.0
    reward = 0.0
    if not PLAN.token_advantages:
        advantage = tl.load(fields.advantages + number).to(tl.float32)
    if fields.weight is not None and not PLAN.token_weight:
        weight = tl.load(fields.weight + number).to(tl.float32)
    if PLAN.asks_reward:
        reward = tl.load(fields.rewards + number).to(tl.float32)
    return Row(start, length, begin, end, advantage, weight, reward)


@triton.jit
def read_block(fields, row, index, inside, PLAN: tl.constexpr):
    """All of a block is read: a load that skips masked tokens one by one is not read four at a time."""
    place = row.start + index
    mask = tl.load(fields.mask + place, mask=inside, other=0) != 0
    logp = tl.load(fields.logp + place, mask=inside, other=0.0).to(tl.float32)
    advantage = tl.zeros_like(logp) + row.advantage
    if PLAN.token_advantages:
        advantage = tl.load(fields.advantages + place, mask=inside, other=0.0).to(tl.float32)
    old_logp = logp
    if fields.old_logp is not None:
        old_logp = tl.load(fields.old_logp + place, mask=inside, other=0.0).to(tl.float32)
    train = trainable(mask, logp, old_logp, advantage)
    logp = tl.where(train, logp, 0.0)
    old_logp = tl.where(train, old_logp, 0.0)
    advantage = tl.where(train, advantage, 0.0)
    scored = index < 0
    rollout_logp = old_logp
    if fields.rollout_logp is not None:
        reported = tl.load(fields.rollout_logp + place, mask=inside, other=0.0).to(tl.float32)
        scored = train & finite(reported)
        rollout_logp = tl.where(scored, reported, old_logp)
    reward = tl.zeros_like(logp) + row.reward
    return Block(index, inside, mask, train, scored, (logp, old_logp, rollout_logp), advantage, reward)


@triton.jit
def read_number(number, ON_DEVICE: tl.constexpr):
    if ON_DEVICE:
        return tl.load(number).to(tl.float32)
    else:
        return number


@triton.jit
def read_params(STAGE: tl.constexpr, params):
    """The numbers of a stage, those on the device loaded: a plain tuple, since triton 3.6 drops the names of a
    NamedTuple that is added to a tuple (``call`` gives them back)."""
    numbers = ()
    for k in tl.static_range(len(STAGE.on_device)):
        numbers = numbers + (read_number(params[k], STAGE.on_device[k]),)
    return numbers


@triton.jit
def read_all_params(params, PLAN: tl.constexpr):
    """The numbers of every stage, then those of the gate."""
    numbers = ()
    for k in tl.static_range(len(PLAN.stages)):
        numbers = numbers + (read_params(PLAN.stages[k], params[k]),)
    return numbers + (read_params(PLAN.gate, params[len(PLAN.stages)]),)


# -- one stage -----------------------------------------------------------------------------------------------


@triton.jit
def put(items, K: tl.constexpr, item):
    """A tuple with its ``K``-th item replaced."""
    return items[:K] + (item,) + items[K + 1 :]


@triton.jit
def call(PART: tl.constexpr, inputs, STAGE: tl.constexpr, numbers):
    """Calls a pointwise function with the inputs that its arguments name."""
    before = ()
    for k in tl.static_range(len(PART.before)):
        before = before + (inputs[PART.before[k]],)
    if PART.takes_p:
        after = ()
        for k in tl.static_range(len(PART.after)):
            after = after + (inputs[PART.after[k]],)
        return PART.function(*before, STAGE.params(*numbers), *after)
    else:
        return PART.function(*before)


@triton.jit
def inputs_of(STAGE: tl.constexpr, block, position, value):
    """The inputs of a stage's functions, in the order of ``composition.INPUTS``."""
    logp = block.policies[STAGE.first]
    anchor_logp = block.policies[STAGE.second]
    raw = logp - anchor_logp
    return clamped(raw, LOG_LIMIT), raw, value, logp, anchor_logp, block.advantage, position, block.reward


@triton.jit
def measure(STAGE: tl.constexpr, block, position, numbers):
    """The number of each token that the span carries, 0 under the mask."""
    measured = call(STAGE.measure, inputs_of(STAGE, block, position, block.advantage), STAGE, numbers)
    return tl.where(block.mask, measured, 0.0)


@triton.jit
def carried(STAGE: tl.constexpr, block, position, of_row, carry, means_ptr, numbers):
    """(the measure carried over the span, the carry after this block).

    ``of_row`` is the value of a span over the whole row, ``means_ptr`` points to the mean of each token's turn.
    """
    value = tl.zeros_like(block.advantage) + of_row
    if STAGE.kind == "turn":
        value = tl.load(means_ptr, mask=block.mask, other=0.0)
    if STAGE.kind == "token":
        value = measure(STAGE, block, position, numbers)
    if STAGE.kind == "running":
        x = measure(STAGE, block, position, numbers)
        value, carry = STAGE.twin.step(x, block.mask, position, carry, STAGE.params(*numbers))
    if STAGE.limited:
        value = clamped(value, STAGE.limit)
    return value, carry


@triton.jit
def log_ratio_of(block, PLAN: tl.constexpr, K: tl.constexpr):
    """(unclamped log-ratio, where both log-probs are numbers) of the ``K``-th mismatch that is metered."""
    d = block.policies[PLAN.series[K][0]] - block.policies[PLAN.series[K][1]]
    if PLAN.series[K][0] == 0:
        return d, block.trainable
    else:
        return d, block.scored


# -- the first pass ------------------------------------------------------------------------------------------


@triton.jit
def empty_state(STAGE: tl.constexpr, BLOCK: tl.constexpr):
    state = ()
    for k in tl.static_range(len(STAGE.reduction.first)):
        state = state + (tl.full([BLOCK], STAGE.reduction.first[k], tl.float32),)
    return state


@triton.jit
def find_runs(fields, row, index, inside, mask, runs):
    """(where a run of one turn's tokens starts, the run that each token is in, the runs up to the block's end).

    A program counts its runs from 0: one ends where the next turn starts, or where the part of the row does.
    """
    if fields.turn_ids is None:
        preceded = tl.load(fields.mask + row.start + index - 1, mask=inside & (index > 0), other=0) != 0
        starts = inside & ((index == row.begin) | (mask & ~preceded))
    else:
        turn_id = tl.load(fields.turn_ids + row.start + index, mask=inside, other=0)
        id_before = tl.load(fields.turn_ids + row.start + index - 1, mask=inside & (index > row.begin), other=0)
        starts = inside & ((index == row.begin) | (turn_id != id_before))
    ones = tl.where(starts, 1, 0)
    return starts, runs + tl.cumsum(ones, 0) - 1, runs + tl.sum(ones, 0)


@triton.jit
def find_turns(fields, row, index, inside, mask, turns):
    """(the id of each token's turn, where a run ends, the turns that have started up to the block's end)."""
    if fields.turn_ids is None:
        preceded = tl.load(fields.mask + row.start + index - 1, mask=inside & (index > 0), other=0) != 0
        followed = tl.load(fields.mask + row.start + index + 1, mask=index + 1 < row.end, other=0) != 0
        ones = tl.where(mask & ~preceded, 1, 0)
        ends = inside & ((index + 1 == row.end) | (followed & ~mask))
        return turns + tl.cumsum(ones, 0), ends, turns + tl.sum(ones, 0)
    else:
        turn_id = tl.load(fields.turn_ids + row.start + index, mask=inside, other=0).to(tl.int64)
        id_after = tl.load(fields.turn_ids + row.start + index + 1, mask=index + 1 < row.end, other=0)
        return turn_id, inside & ((index + 1 == row.end) | (turn_id != id_after)), turns


@triton.jit
def store_runs(STAGE: tl.constexpr, scratch, tokens, x, mask, starts, ends, place, going_on, PLAN: tl.constexpr):
    """Stores the runs that end in this block; (sum, count) of the run that goes on after it."""
    total, count = spans.run_totals(x, mask, starts, going_on[0], going_on[1])
    skip = STAGE.turn * tokens.to(tl.int64)
    if PLAN.joins_runs:
        tl.store(scratch.run_totals + skip + place, total, mask=ends)
        tl.store(scratch.run_counts + place, count, mask=ends)
    else:
        tl.store(scratch.turn_means + skip + place, total / tl.maximum(count, 1.0), mask=ends)
    last = tl.arange(0, x.shape[0]) == x.shape[0] - 1
    return tl.sum(tl.where(last, total, 0.0), 0), tl.sum(tl.where(last, count, 0.0), 0)


@triton.jit
def first_pass(fields, scratch, row, tokens, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """Reads this program's tokens for what their row's first token needs to know already.

    Returns the number of valid tokens, the folded numbers of every stage that has a reduction, the number of runs and
    the number of turns that start here.
    """
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.float32)
    runs = row.begin * 0
    turns = row.start * 0
    states = ()
    going_on = ()
    for k in tl.static_range(len(PLAN.stages)):
        states = states + (empty_state(PLAN.stages[k], BLOCK),)
        going_on = going_on + ((tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)),)
    for first in range(row.begin, row.end, BLOCK):
        index = first + lanes
        inside = index < row.end
        block = read_block(fields, row, index, inside, PLAN)
        count += tl.where(block.mask, 1.0, 0.0)
        if len(PLAN.turns) > 0:
            starts, run, runs = find_runs(fields, row, index, inside, block.mask, runs)
            turn_id, ends, turns = find_turns(fields, row, index, inside, block.mask, turns)
            place = row.start + row.begin + run
            if PLAN.joins_runs:
                tl.store(scratch.run_ids + place, turn_id, mask=ends)
        for k in tl.static_range(len(PLAN.stages)):
            if len(PLAN.stages[k].reduction.first) > 0:
                x = measure(PLAN.stages[k], block, 0.0, numbers[k])
                state = PLAN.stages[k].reduction.step(states[k], x, block.mask, PLAN.stages[k].params(*numbers[k]))
                states = put(states, k, state)
            if PLAN.stages[k].kind == "turn":
                x = measure(PLAN.stages[k], block, 0.0, numbers[k])
                left = store_runs(
                    PLAN.stages[k], scratch, tokens, x, block.mask, starts, ends, place, going_on[k], PLAN
                )
                going_on = put(going_on, k, left)
    folded = ()
    for k in tl.static_range(len(PLAN.stages)):
        folded = folded + (fold(PLAN.stages[k], states[k], numbers[k]),)
    return tl.sum(count, 0), folded, runs, turns


@triton.jit
def fold(STAGE: tl.constexpr, state, numbers):
    if len(STAGE.reduction.first) > 0:
        return STAGE.reduction.fold(state, STAGE.params(*numbers))
    else:
        return state


@triton.jit
def of_row(STAGE: tl.constexpr, folded, count, numbers):
    """The value of a reduction, 0 for other spans."""
    if STAGE.kind == "reduction":
        return STAGE.reduction.end(folded, count, STAGE.params(*numbers))
    else:
        return tl.full([], 0.0, tl.float32)


@triton.jit
def first_carry(STAGE: tl.constexpr):
    """The carry of a running span before the row's first token, 0 for other spans."""
    if STAGE.kind == "running":
        return tl.full([], STAGE.twin.first, tl.float32)
    else:
        return tl.full([], 0.0, tl.float32)


# -- rows that several programs share ------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def summary(
    fields,
    scratch,
    outputs,
    tables,
    params,
    row_weight,
    z,
    width,
    tokens,
    rows,
    parts,
    part_length,
    group,
    PLAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The launch before ``correction`` where rows are split: the first pass of every part of a row.

    [PLAN.summary_size, entries] numbers: the count, every stage's folded numbers, runs and turns.
    """
    entry = tl.program_id(0)
    stride = (rows * parts).to(tl.int64)
    row = read_row(fields, width, entry // parts, entry % parts, part_length, PLAN)
    numbers = read_all_params(params, PLAN)
    count, folded, runs, turns = first_pass(fields, scratch, row, tokens, numbers, PLAN, BLOCK)
    own_ptr = scratch.summary + entry
    tl.store(own_ptr, count)
    for k in tl.static_range(len(PLAN.stages)):
        for number in tl.static_range(len(PLAN.stages[k].reduction.first)):
            tl.store(own_ptr + (PLAN.stages[k].slot + number) * stride, folded[k][number])
    if len(PLAN.turns) > 0:
        tl.store(own_ptr + PLAN.runs_slot * stride, runs.to(tl.float32))
        tl.store(own_ptr + (PLAN.runs_slot + 1) * stride, turns.to(tl.float32))


@triton.jit
def load_state(STAGE: tl.constexpr, parts_ptr, stride, which):
    """The numbers of a row's parts, as the lanes of a reduction's state."""
    state = ()
    for k in tl.static_range(len(STAGE.reduction.first)):
        at = parts_ptr + (STAGE.slot + k) * stride
        state = state + (tl.load(at, mask=which, other=STAGE.reduction.first[k]),)
    return state


@triton.jit
def part_of_row(scratch, parts_ptr, stride, entry, number, parts, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """The same as ``whole_row`` for one of a row's parts, from the summary."""
    lanes = tl.arange(0, BLOCK)
    there = lanes < parts
    earlier = lanes < number
    counts = tl.load(parts_ptr + lanes, mask=there, other=0.0)
    count = tl.sum(counts, 0)
    values = ()
    carries = ()
    for k in tl.static_range(len(PLAN.stages)):
        # A reduction is over all the parts, the carry of a running span over the earlier ones.
        which = earlier if PLAN.stages[k].kind == "running" else there
        folded = fold(PLAN.stages[k], load_state(PLAN.stages[k], parts_ptr + lanes, stride, which), numbers[k])
        values = values + (of_row(PLAN.stages[k], folded, count, numbers[k]),)
        carries = carries + (folded[0] if PLAN.stages[k].kind == "running" else first_carry(PLAN.stages[k]),)
    runs = number * 0
    turns_before = entry.to(tl.int64) * 0
    if len(PLAN.turns) > 0:
        runs = tl.load(scratch.summary + PLAN.runs_slot * stride + entry).to(tl.int32)
        turns = tl.load(parts_ptr + (PLAN.runs_slot + 1) * stride + lanes, mask=earlier, other=0.0)
        turns_before = tl.sum(turns.to(tl.int64), 0)
    return count, tl.sum(tl.where(earlier, counts, 0.0), 0), values, carries, runs, turns_before


@triton.jit
def whole_row(fields, scratch, row, tokens, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens of a program need of the rest of their row.

    Returns the row's number of valid tokens and how many come before this program's, every stage's value of the row
    and first carry, the number of this program's runs, and the turns that start before it.
    """
    zero = tl.full([], 0.0, tl.float32)
    values = ()
    carries = ()
    for k in tl.static_range(len(PLAN.stages)):
        carries = carries + (first_carry(PLAN.stages[k]),)
    if PLAN.reads_first:
        count, folded, runs, _ = first_pass(fields, scratch, row, tokens, numbers, PLAN, BLOCK)
        for k in tl.static_range(len(PLAN.stages)):
            values = values + (of_row(PLAN.stages[k], folded[k], count, numbers[k]),)
        return count, zero, values, carries, runs, row.start * 0
    else:
        for k in tl.static_range(len(PLAN.stages)):
            values = values + (zero,)
        return zero, zero, values, carries, row.begin * 0, row.start * 0


@triton.jit
def join_runs(fields, scratch, row, tokens, runs, turns_before, parts, part_length, runs_ptr, entries, PLAN: tl.constexpr):
    """The mean of each of this program's runs over its turn, which other runs may belong to."""
    if PLAN.split:
        turns_ptr = runs_ptr + entries if fields.turn_ids is None else None
    else:
        tl.debug_barrier()  # other threads read the runs
        runs_ptr = None
        turns_ptr = None
    if fields.turn_ids is not None:
        turns_before = turns_before * 0
    if PLAN.joins_runs:
        for k in tl.static_range(len(PLAN.turns)):
            skip = k * tokens.to(tl.int64)
            spans.turn_means(
                scratch.run_ids,
                scratch.run_totals + skip,
                scratch.run_counts,
                scratch.turn_means + skip,
                row.start,
                row.begin,
                runs,
                turns_before,
                parts,
                part_length,
                runs_ptr,
                turns_ptr,
            )
        tl.debug_barrier()  # other threads read the means


# -- the correction ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def correction(
    fields,
    scratch,
    outputs,
    tables,
    params,
    row_weight,
    z,
    width,
    tokens,
    rows,
    parts,
    part_length,
    group,
    PLAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/dlogp of every token, the loss and the metrics.

    Args:
        fields, scratch, outputs, tables: ``Fields``, ``Scratch``, ``Outputs``, ``Tables``.
        params: the numbers of every stage, then of the gate, in their NamedTuples.
        row_weight: the weight of a row's sum, but for any division by its count.
        z: what the loss is divided by, a float or (``PLAN.z_on_device``) a pointer.
        width: of a padded batch.
        tokens, rows: how many there are.
        parts, part_length: programs that share a row, and the tokens that each of them reads.
        group: see ``metrics.merge``.
    """
    entry = tl.program_id(0)
    entries = rows * parts
    number = entry % parts
    row = read_row(fields, width, entry // parts, number, part_length, PLAN)
    numbers = read_all_params(params, PLAN)
    if PLAN.split:
        stride = entries.to(tl.int64)
        parts_ptr = scratch.summary + (entry // parts).to(tl.int64) * parts
        count, count_before, of_rows, carries, runs, turns_before = part_of_row(
            scratch, parts_ptr, stride, entry, number, parts, numbers, PLAN, BLOCK
        )
        runs_ptr = parts_ptr + PLAN.runs_slot * stride
    else:
        runs_ptr = None
        count, count_before, of_rows, carries, runs, turns_before = whole_row(
            fields, scratch, row, tokens, numbers, PLAN, BLOCK
        )
    if len(PLAN.turns) > 0:
        join_runs(fields, scratch, row, tokens, runs, turns_before, parts, part_length, runs_ptr, entries, PLAN)

    scale = row_weight
    if PLAN.divides_by == "valid":
        scale = row_weight_of(count, row_weight, True)
    total_weight = read_number(z, PLAN.z_on_device)
    valid_before = count_before
    runs = runs * 0
    tally = metrics.loss_start(BLOCK)
    before_end = tl.zeros([BLOCK // metrics.FOLD], tl.int32)
    metered = ()
    for k in tl.static_range(len(PLAN.series)):
        metered = metered + (metrics.mismatch_start(BLOCK),)
    for first in range(row.begin, row.end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < row.end
        block = read_block(fields, row, index, inside, PLAN)
        position = 0.0
        if PLAN.asks_position:
            ones = tl.where(block.mask, 1.0, 0.0)
            position = valid_before + tl.cumsum(ones, 0)
            valid_before += tl.sum(ones, 0)
        means_ptr = None
        if len(PLAN.turns) > 0:
            _, run, runs = find_runs(fields, row, index, inside, block.mask, runs)
            means_ptr = scratch.turn_means + row.start + row.begin + run

        weight = tl.zeros([BLOCK], tl.float32) + row.weight
        if PLAN.token_weight:
            given = tl.load(fields.weight + row.start + index, mask=inside, other=0.0).to(tl.float32)
            weight = tl.where(block.mask, given, 0.0)
        log_ratio = tl.zeros([BLOCK], tl.float32)
        slope = tl.zeros([BLOCK], tl.float32) + 1.0
        kept = block.mask
        truncated = index < 0
        vetoed = index < 0
        for k in tl.static_range(len(PLAN.stages)):
            own_means_ptr = None
            if PLAN.stages[k].kind == "turn":
                own_means_ptr = means_ptr + PLAN.stages[k].turn * tokens.to(tl.int64)
            value, carry = carried(
                PLAN.stages[k], block, position, of_rows[k], carries[k], own_means_ptr, numbers[k]
            )
            carries = put(carries, k, carry)
            inputs = inputs_of(PLAN.stages[k], block, position, value)
            if PLAN.stages[k].counts_as == "ratio":
                log_ratio, slope = call(PLAN.stages[k].rule, inputs, PLAN.stages[k], numbers[k])
                log_ratio = ops.minimum(ops.maximum(log_ratio, -LOG_LIMIT), PLAN.gate.log_limit)
            else:
                multiplier, accepted = call(PLAN.stages[k].rule, inputs, PLAN.stages[k], numbers[k])
                accepted = accepted & block.mask
                kept = kept & accepted
                weight *= dropped_to_zero(multiplier, accepted)
                if PLAN.stages[k].counts_as == "truncated":
                    truncated = truncated | truncated_by(multiplier, value, accepted)
                if PLAN.stages[k].counts_as == "vetoed":
                    vetoed = vetoed | (block.mask & ~accepted)

        if PLAN.gate.detached:
            slope = tl.zeros([BLOCK], tl.float32) + 1.0
        anchor_logp = block.policies[PLAN.gate.second]
        raw = block.policies[PLAN.gate.first] - anchor_logp
        inputs = (log_ratio, raw, log_ratio, block.policies[0], anchor_logp, block.advantage, position, block.reward)
        surrogate, derivative = call(PLAN.gate.surrogate, inputs, PLAN.gate, numbers[len(PLAN.stages)])
        derivative = derivative * slope
        held_back = held_back_by(derivative, log_ratio, slope, block.advantage)
        of_token = scale * weight / total_weight
        loss = -of_token * surrogate
        coefficient = -of_token * derivative
        good = block.trainable & finite(loss) & finite(coefficient)
        loss = tl.where(good, loss, 0.0)
        coefficient = tl.where(good, coefficient, 0.0)
        tl.store(outputs.coefficient + row.start + index, coefficient, mask=inside)

        before_end = metrics.later(before_end, tl.where(block.mask, row.length - index, 0))
        for k in tl.static_range(len(PLAN.series)):
            d, compared = log_ratio_of(block, PLAN, k)
            metered = put(metered, k, metrics.mismatch_step(metered[k], d, compared, tables.edges))
        unscored = index < 0
        if fields.rollout_logp is not None:
            unscored = block.trainable & ~block.scored
        tally = metrics.loss_step(
            tally, block.mask, loss, held_back, truncated, kept, vetoed, weight, coefficient, unscored, ~good
        )

    entry_ptr = outputs.partials + entry.to(tl.int64) * PLAN.entry_size
    metrics.loss_store(tally, entry_ptr, PLAN.divides_by == "kept" and not PLAN.split)
    if len(PLAN.series) > 0:
        # The row's first valid token once more, in every lane.
        index = tl.arange(0, BLOCK) * 0 + row.length - tl.max(before_end, 0)
        block = read_block(fields, row, index, index < row.length, PLAN)
        for k in tl.static_range(len(PLAN.series)):
            d, compared = log_ratio_of(block, PLAN, k)
            first_token = tl.max(tl.where(compared, tl.abs(d), -1.0), 0)
            first_token = tl.where(count_before > 0, -1.0, first_token)
            metrics.mismatch_store(metered[k], first_token, entry_ptr + metrics.WIDE + k * metrics.SERIES_SIZE)
    metrics.merge(outputs, tables.places, entry, entries, group, rows, PLAN)
