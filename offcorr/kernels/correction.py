"""The correction kernel: every stage, the metrics and dL/dlogp of a row in one pass over its tokens.

One source for all corrections.  ``PLAN``, a ``composition.Composition``, is a compile-time constant that holds the
stages' own functions (rebound to Triton by ``rebind.for_triton``) and the Triton twins of their spans; the stages'
numbers are run-time arguments.  A program reads one row: first, where its tokens need any, for its reductions
(``first_pass``), then for everything else (``correction``).  A few long rows are split: several programs share a row,
and ``summary`` is a launch of its own that does the first pass for every part.  The programs leave their metrics as
entries, which the last one to end merges (``metrics.merge``).
"""

# mypy: disable-error-code="assignment"
# (A Triton function builds its tuples item by item, so that their types change from line to line.)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from offcorr.batch import LOG_LIMIT as _LOG_LIMIT
from offcorr.kernels import metrics, ops, spans
from offcorr.kernels.rebind import for_triton
from offcorr.stages import pointwise

LOG_LIMIT: tl.constexpr = tl.constexpr(_LOG_LIMIT)
SIZES = ["rows", "parts", "part_length", "group"]
"""Run-time integers that change from batch to batch; none of them is worth compiling anew for."""

trainable = for_triton(pointwise.trainable)
finite = for_triton(pointwise.finite)
dropped_to_zero = for_triton(pointwise.dropped_to_zero)
truncated_by = for_triton(pointwise.truncated)
held_back_by = for_triton(pointwise.held_back)
changed_by = for_triton(pointwise.changed)
row_weight_of = for_triton(pointwise.row_weight)


class Fields(NamedTuple):
    """Pointers to the batch; None where it lacks a field."""

    logp: Any
    old_logp: Any
    rollout_logp: Any
    advantages: Any  # of each token or of each row, as ``PLAN.token_advantages`` says
    weight: Any  # the same, ``PLAN.token_weight``
    rewards: Any
    entropy: Any
    mask: Any
    turn_ids: Any
    cu_seqlens: Any
    z: Any  # the denominator, where it is a tensor
    given: Any  # a tuple: the values of each span that torch computes, [tokens]


class Buffers(NamedTuple):
    """Pointers to what the kernel writes, and to two constants of the metrics; None where they are not needed."""

    coefficient: Any  # like ``logp``
    partials: Any  # an entry of every program, then one of every group
    merged: Any  # float64, the metrics
    loss: Any
    found_z: Any  # where the kernel has to find Z
    tickets: Any  # see ``metrics.merge``
    edges: Any  # of the histogram's bins
    places: Any  # see ``launch.Layout``
    summary: Any  # float64 [PLAN.summary_size, entries]
    run_ids: Any  # [tokens], see ``spans.turn_means``
    run_counts: Any  # [tokens]
    run_totals: Any  # [tokens] for each stage that looks at turns
    turn_means: Any  # the same
    after: Any  # float64 for each stage that sums over nearby tokens, see ``after``


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
    weight: Any
    reward: Any
    entropy: Any


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
def read_block(fields, row, index, end, PLAN: tl.constexpr):
    """All of a block is read: a load that skips masked tokens one by one is not read four at a time."""
    place = row.start + index
    inside = index < end
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
    weight = tl.zeros_like(logp) + row.weight
    if PLAN.token_weight:
        weight = tl.load(fields.weight + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(mask, weight, 0.0)
    reward = tl.zeros_like(logp) + row.reward
    entropy = tl.zeros_like(logp)
    if PLAN.asks_entropy:
        entropy = tl.load(fields.entropy + place, mask=inside, other=0.0).to(tl.float32)
        entropy = tl.where(train, entropy, 0.0)
    policies = (logp, old_logp, rollout_logp)
    return Block(index, inside, mask, train, scored, policies, advantage, weight, reward, entropy)


@triton.jit
def read_numbers(params, PLAN: tl.constexpr):
    """The numbers of every stage, then of the gate, those on the device loaded.

    Plain tuples, since triton 3.6 drops the names of a NamedTuple that is added to a tuple; ``named`` gives them back.
    """
    everything = ()
    for k in tl.static_range(len(PLAN.specs)):
        numbers = ()
        for j in tl.static_range(len(PLAN.specs[k].on_device)):
            number = params[k][j]
            if PLAN.specs[k].on_device[j]:
                number = tl.load(number).to(tl.float32)
            numbers = numbers + (number,)
        everything = everything + (numbers,)
    return everything


# -- one stage -----------------------------------------------------------------------------------------------


@triton.jit
def put(items, K: tl.constexpr, item):
    """A tuple with its ``K``-th item replaced."""
    return items[:K] + (item,) + items[K + 1 :]


@triton.jit
def named(STAGE: tl.constexpr, numbers):
    """The numbers of a stage in their NamedTuple, as its functions see them."""
    if len(STAGE.on_device) > 0:
        return STAGE.params(*numbers)
    else:
        return numbers


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
        return PART.function(*before, named(STAGE, numbers), *after)
    else:
        return PART.function(*before)


@triton.jit
def inputs_of(STAGE: tl.constexpr, block, context, value):
    """The inputs of a stage's functions, in the order of ``composition.INPUTS``.

    ``context`` is (position, length, mean advantage): what a token's row says beside its own values.
    """
    logp = block.policies[STAGE.first]
    anchor_logp = block.policies[STAGE.second]
    raw = logp - anchor_logp
    clamped = ops.clamp(raw, -LOG_LIMIT, LOG_LIMIT)
    position, length, mean_advantage = context  # not joined as tuples: Triton cannot where one holds a constant
    return (
        clamped,
        raw,
        value,
        logp,
        anchor_logp,
        block.advantage,
        block.reward,
        block.entropy,
        position,
        length,
        mean_advantage,
    )


@triton.jit
def measure(STAGE: tl.constexpr, block, context, numbers):
    """The number of each token that the span carries, 0 under the mask."""
    measured = call(STAGE.measure, inputs_of(STAGE, block, context, block.advantage), STAGE, numbers)
    return tl.where(block.mask, measured, 0.0)


@triton.jit
def measure_ahead(STAGE: tl.constexpr, block, numbers):
    """``measure`` before the row has been read: it may not ask for ``composition.OF_ROW``."""
    unread = tl.zeros_like(block.advantage)
    return measure(STAGE, block, (unread, unread, unread), numbers)


@triton.jit
def carried(STAGE: tl.constexpr, fields, row, block, context, of_row, carry, buffers, place, block_place, numbers):
    """(the measure carried over the span, the carry after this block).

    ``of_row`` is the value of a reduction, ``place`` that of each token's run in the means of turns, ``block_place``
    that of the block in ``buffers.after``.
    """
    if STAGE.kind == "reduction":
        value = tl.zeros_like(block.advantage) + of_row
    elif STAGE.kind == "turn":
        value = tl.load(buffers.turn_means[STAGE.turn] + place, mask=block.mask, other=0.0)
    elif STAGE.kind == "torch":
        value = tl.load(fields.given[STAGE.given] + row.start + block.index, mask=block.mask, other=0.0)
    else:
        value = measure(STAGE, block, context, numbers)
    if STAGE.kind == "running":
        value, carry = STAGE.twin.step(value, block.mask, context[0], carry, named(STAGE, numbers))
        value, carry = value.to(tl.float32), carry.to(tl.float64)
    if STAGE.kind == "nearby":
        later = tl.load(buffers.after[STAGE.nearby] + block_place)
        value, carry = spans.nearby(value, block.mask, carry, later, named(STAGE, numbers).lam)
    if STAGE.limited:
        value = ops.clamp(value, -STAGE.limit, STAGE.limit)
    return value, carry


@triton.jit
def log_ratio_of(block, PLAN: tl.constexpr, K: tl.constexpr):
    """(unclamped log-ratio, where both log-probs are numbers) of the ``K``-th mismatch that is metered."""
    d = block.policies[PLAN.series[K][0]] - block.policies[PLAN.series[K][1]]
    if PLAN.series[K][0] == 0:
        return d, block.trainable
    else:
        return d, block.scored


# -- nearby tokens -------------------------------------------------------------------------------------------


@triton.jit
def place_of_blocks(row, entry):
    """Where the blocks of a program lie in ``buffers.after``: a block has 16 tokens or more, but for a part's last."""
    return (row.start + row.begin) // 16 + entry


@triton.jit
def after(STAGE: tl.constexpr, fields, buffers, row, carry, entry, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """Stores, for every block of a program, the decayed sum of the tokens behind it at the nearest of them.

    ``carry`` is that of the tokens behind the program's own.
    """
    blocks = tl.cdiv(row.end - row.begin, BLOCK)
    after_ptr = buffers.after[STAGE.nearby] + place_of_blocks(row, entry)
    lam = named(STAGE, numbers).lam
    for k in range(0, blocks):
        number = blocks - 1 - k
        tl.store(after_ptr + number, carry)
        block = read_block(fields, row, row.begin + number * BLOCK + tl.arange(0, BLOCK), row.end, PLAN)
        count, _, first = spans.at_edges(measure_ahead(STAGE, block, numbers), block.mask, lam)
        carry = first + spans.power(lam, count) * carry
    tl.debug_barrier()  # other threads read what was stored


@triton.jit
def other_parts(STAGE: tl.constexpr, parts_ptr, stride, counts, there, own, numbers):
    """The decayed sums of a row's earlier parts and of its later ones, each at its end that is next to part ``own``."""
    lam = named(STAGE, numbers).lam
    lanes = tl.arange(0, counts.shape[0])
    until = tl.cumsum(counts, 0)
    since = until - counts
    own_since = tl.sum(tl.where(lanes == own, since, 0.0), 0)
    own_until = tl.sum(tl.where(lanes == own, until, 0.0), 0)
    at_last = tl.load(parts_ptr + STAGE.slot * stride, mask=there & (lanes < own), other=0.0)
    at_first = tl.load(parts_ptr + (STAGE.slot + 1) * stride, mask=there & (lanes > own), other=0.0)
    before = tl.sum(at_last * spans.power(lam, tl.maximum(own_since - until, 0.0)), 0)
    behind = tl.sum(at_first * spans.power(lam, tl.maximum(since - own_until, 0.0)), 0)
    return before, behind


# -- the first pass ------------------------------------------------------------------------------------------


@triton.jit
def empty_state(STAGE: tl.constexpr, BLOCK: tl.constexpr):
    DTYPE: tl.constexpr = tl.float64 if STAGE.reduction.wide else tl.float32
    state = ()
    for k in tl.static_range(len(STAGE.reduction.first)):
        state = state + (tl.full([BLOCK], STAGE.reduction.first[k], DTYPE),)
    return state


@triton.jit
def find_runs(fields, row, block, runs, turns):
    """The runs of one turn's tokens: (starts, ends, id of the turn, run of the token, runs so far, turns so far).

    A program counts its runs from 0: one ends where the next turn starts, or where the part of the row does.
    """
    index = block.index
    first = index == row.begin
    last = index + 1 == row.end
    if fields.turn_ids is None:
        mask_ptr = fields.mask + row.start + index
        preceded = tl.load(mask_ptr - 1, mask=block.inside & (index > 0), other=0) != 0
        followed = tl.load(mask_ptr + 1, mask=index + 1 < row.end, other=0) != 0
        starts_turn = block.mask & ~preceded
        starts = block.inside & (first | starts_turn)
        ends = block.inside & (last | (followed & ~block.mask))
        turn_id = turns + tl.cumsum(tl.where(starts_turn, 1, 0), 0)
        turns += tl.sum(tl.where(starts_turn, 1, 0), 0)
    else:
        ids_ptr = fields.turn_ids + row.start + index
        turn_id = tl.load(ids_ptr, mask=block.inside, other=0).to(tl.int64)
        starts = block.inside & (first | (turn_id != tl.load(ids_ptr - 1, mask=block.inside & ~first, other=0)))
        ends = block.inside & (last | (turn_id != tl.load(ids_ptr + 1, mask=index + 1 < row.end, other=0)))
    ones = tl.where(starts, 1, 0)
    return starts, ends, turn_id, runs + tl.cumsum(ones, 0) - 1, runs + tl.sum(ones, 0), turns


@triton.jit
def store_runs(STAGE: tl.constexpr, buffers, x, mask, starts, ends, place, going_on, PLAN: tl.constexpr):
    """Stores the runs that end in this block; (sum, count) of the run that goes on after it."""
    total, count = spans.run_totals(x, mask, starts, going_on[0], going_on[1])
    if PLAN.joins_runs:
        tl.store(buffers.run_totals[STAGE.turn] + place, total, mask=ends)
        tl.store(buffers.run_counts + place, count, mask=ends)
    else:
        tl.store(buffers.turn_means[STAGE.turn] + place, total / tl.maximum(count, 1.0), mask=ends)
    last = tl.arange(0, x.shape[0]) == x.shape[0] - 1
    return tl.sum(tl.where(last, total, 0.0), 0), tl.sum(tl.where(last, count, 0.0), 0)


@triton.jit
def first_pass(fields, buffers, row, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """Reads this program's tokens for what their row's first token needs to know already.

    Returns the number of valid tokens, the sum of their advantages, the folded numbers of every stage's reduction, the
    number of runs, the number of turns that start here, and of every stage the decayed sums at the last and at the
    first token (of split rows).
    """
    count = tl.zeros([BLOCK], tl.float32)
    advantages = tl.zeros([BLOCK], tl.float64)
    runs = row.begin * 0
    turns = row.start * 0
    states = ()
    going_on = ()
    edges = ()
    for k in tl.static_range(len(PLAN.stages)):
        edges = edges + ((tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)),)
        states = states + (empty_state(PLAN.stages[k], BLOCK),)
        going_on = going_on + ((tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)),)
    for first in range(row.begin, row.end, BLOCK):
        block = read_block(fields, row, first + tl.arange(0, BLOCK), row.end, PLAN)
        if PLAN.split:
            before = tl.sum(count, 0)
            for k in tl.static_range(len(PLAN.stages)):
                if PLAN.stages[k].kind == "nearby":
                    lam = named(PLAN.stages[k], numbers[k]).lam
                    x = measure_ahead(PLAN.stages[k], block, numbers[k])
                    own, at_last, at_first = spans.at_edges(x, block.mask, lam)
                    at_last += spans.power(lam, own) * edges[k][0]
                    edges = put(edges, k, (at_last, edges[k][1] + spans.power(lam, before) * at_first))
        count += tl.where(block.mask, 1.0, 0.0)
        if PLAN.asks_mean_advantage:
            advantages += block.advantage
        if PLAN.has_turns:
            starts, ends, turn_id, run, runs, turns = find_runs(fields, row, block, runs, turns)
            place = row.start + row.begin + run
            if PLAN.joins_runs:
                tl.store(buffers.run_ids + place, turn_id, mask=ends)
        for k in tl.static_range(len(PLAN.stages)):
            if len(PLAN.stages[k].reduction.first) > 0:
                x = measure_ahead(PLAN.stages[k], block, numbers[k])
                state = PLAN.stages[k].reduction.step(states[k], x, block.mask, named(PLAN.stages[k], numbers[k]))
                states = put(states, k, state)
            if PLAN.stages[k].kind == "turn":
                x = measure_ahead(PLAN.stages[k], block, numbers[k])
                left = store_runs(PLAN.stages[k], buffers, x, block.mask, starts, ends, place, going_on[k], PLAN)
                going_on = put(going_on, k, left)
    folded = ()
    for k in tl.static_range(len(PLAN.stages)):
        folded = folded + (PLAN.stages[k].reduction.fold(states[k], named(PLAN.stages[k], numbers[k])),)
    return tl.sum(count, 0), tl.sum(advantages, 0), folded, runs, turns, edges


@triton.jit(do_not_specialize=SIZES)
def summary(
    fields, buffers, numbers, scale, width, rows, parts, part_length, group, PLAN: tl.constexpr, BLOCK: tl.constexpr
):
    """The launch before ``correction`` where rows are split: the first pass of every part of a row.

    Leaves [PLAN.summary_size, entries] numbers in float64: the count, the sum of the advantages where it is
    asked for, every stage's folded numbers, runs and turns.
    """
    entry = tl.program_id(0)
    stride = (rows * parts).to(tl.int64)
    row = read_row(fields, width, entry // parts, entry % parts, part_length, PLAN)
    numbers = read_numbers(numbers, PLAN)
    count, advantages, folded, runs, turns, edges = first_pass(fields, buffers, row, numbers, PLAN, BLOCK)
    own_ptr = buffers.summary + entry
    tl.store(own_ptr, count)
    if PLAN.asks_mean_advantage:
        tl.store(own_ptr + stride, advantages)
    for k in tl.static_range(len(PLAN.stages)):
        for j in tl.static_range(len(PLAN.stages[k].reduction.first)):
            tl.store(own_ptr + (PLAN.stages[k].slot + j) * stride, folded[k][j])
        if PLAN.stages[k].kind == "nearby":
            tl.store(own_ptr + PLAN.stages[k].slot * stride, edges[k][0])
            tl.store(own_ptr + (PLAN.stages[k].slot + 1) * stride, edges[k][1])
    if PLAN.has_turns:
        tl.store(own_ptr + PLAN.runs_slot * stride, runs.to(tl.float64))
        tl.store(own_ptr + (PLAN.runs_slot + 1) * stride, turns.to(tl.float64))


@triton.jit
def load_state(STAGE: tl.constexpr, parts_ptr, stride, there, earlier):
    """The numbers of a row's parts, as the lanes of a state: all parts, for a carry the earlier ones."""
    DTYPE: tl.constexpr = tl.float64 if STAGE.reduction.wide else tl.float32
    which = earlier if STAGE.kind == "running" else there
    state = ()
    for k in tl.static_range(len(STAGE.reduction.first)):
        at = parts_ptr + (STAGE.slot + k) * stride
        state = state + (tl.load(at, mask=which, other=STAGE.reduction.first[k]).to(DTYPE),)
    return state


@triton.jit
def rest_of_row(fields, buffers, row, entry, entries, parts, numbers, PLAN: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers that a program's tokens need of the rest of their row.

    Returns the number of valid tokens of the row and of those before this program's, the mean of their advantages,
    every stage's value of the row and first carry, the number of this program's runs, and the turns that start before
    it.
    """
    count = tl.full([], 0.0, tl.float32)
    count_before = count
    advantages = tl.full([], 0.0, tl.float64)
    runs = row.begin * 0
    turns_before = row.start * 0
    folded = ()
    if PLAN.split:
        stride = entries.to(tl.int64)
        lanes = tl.arange(0, BLOCK)
        there = lanes < parts
        earlier = lanes < entry % parts
        parts_ptr = buffers.summary + (entry - entry % parts) + lanes
        counts = tl.load(parts_ptr, mask=there, other=0.0).to(tl.float32)
        count = tl.sum(counts, 0)
        count_before = tl.sum(tl.where(earlier, counts, 0.0), 0)
        if PLAN.asks_mean_advantage:
            advantages = tl.sum(tl.load(parts_ptr + stride, mask=there, other=0.0), 0)
        for k in tl.static_range(len(PLAN.stages)):
            state = load_state(PLAN.stages[k], parts_ptr, stride, there, earlier)
            folded = folded + (PLAN.stages[k].reduction.fold(state, named(PLAN.stages[k], numbers[k])),)
        if PLAN.has_turns:
            runs = tl.load(buffers.summary + PLAN.runs_slot * stride + entry).to(tl.int32)
            turns = tl.load(parts_ptr + (PLAN.runs_slot + 1) * stride, mask=earlier, other=0.0)
            turns_before = tl.sum(turns.to(tl.int64), 0)
    elif PLAN.reads_first:
        count, advantages, folded, runs, _, _ = first_pass(fields, buffers, row, numbers, PLAN, BLOCK)
    values = ()
    carries = ()
    for k in tl.static_range(len(PLAN.stages)):
        carry = tl.full([], PLAN.stages[k].first_carry, tl.float64)
        value = tl.full([], 0.0, tl.float32)
        if PLAN.stages[k].kind == "reduction":
            end = PLAN.stages[k].reduction.end(folded[k], count, named(PLAN.stages[k], numbers[k]))
            value = end.to(tl.float32)
        if PLAN.split and PLAN.stages[k].kind == "running":
            carry = folded[k][0].to(tl.float64)
        if PLAN.stages[k].kind == "nearby":
            behind = tl.full([], 0.0, tl.float64)
            if PLAN.split:
                carry, behind = other_parts(PLAN.stages[k], parts_ptr, stride, counts, there, entry % parts, numbers[k])
            after(PLAN.stages[k], fields, buffers, row, behind, entry, numbers[k], PLAN, BLOCK)
        values = values + (value,)
        carries = carries + (carry,)
    mean_advantage = advantages.to(tl.float32) / tl.maximum(count, 1.0)
    return count, count_before, mean_advantage, values, carries, runs, turns_before


@triton.jit
def join_runs(fields, buffers, row, runs, turns_before, entry, entries, parts, part_length, PLAN: tl.constexpr):
    """The mean of each of this program's runs over its turn, which other runs may belong to."""
    runs_ptr = None
    turns_ptr = None
    if PLAN.split:
        runs_ptr = buffers.summary + PLAN.runs_slot * entries.to(tl.int64) + (entry - entry % parts)
        if fields.turn_ids is None:
            turns_ptr = runs_ptr + entries
    else:
        tl.debug_barrier()  # other threads read the runs
    if PLAN.joins_runs:
        for k in tl.static_range(len(buffers.turn_means)):
            totals_ptr, means_ptr = buffers.run_totals[k], buffers.turn_means[k]
            spans.turn_means(
                buffers.run_ids,
                totals_ptr,
                buffers.run_counts,
                means_ptr,
                row,
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
    fields, buffers, numbers, scale, width, rows, parts, part_length, group, PLAN: tl.constexpr, BLOCK: tl.constexpr
):
    """dL/dlogp of every token, the loss and the metrics.

    Args:
        fields, buffers: ``Fields`` and ``Buffers``.
        numbers: the params of every stage, then of the gate.  (Triton's launcher has a ``params`` of its own.)
        scale: the weight of a row's sum over Z, but for what is known on the device only.
        width: of a padded batch.
        rows: how many there are.
        parts, part_length: programs that share a row, and the tokens that each of them reads.
        group: see ``metrics.merge``.
    """
    entry = tl.program_id(0)
    entries = rows * parts
    row = read_row(fields, width, entry // parts, entry % parts, part_length, PLAN)
    numbers = read_numbers(numbers, PLAN)
    count, valid_before, mean_advantage, of_rows, carries, runs, turns_before = rest_of_row(
        fields, buffers, row, entry, entries, parts, numbers, PLAN, BLOCK
    )
    if PLAN.has_turns:
        join_runs(fields, buffers, row, runs, turns_before, entry, entries, parts, part_length, PLAN)
    count_before = valid_before
    if fields.z is not None:
        scale = scale / tl.load(fields.z).to(tl.float32)
    if PLAN.divides_by == "valid":
        scale = row_weight_of(count, scale, True)

    runs = row.begin * 0
    tally = metrics.loss_start(BLOCK)
    before_end = tl.zeros([BLOCK // metrics.FOLD], tl.int32)
    metered = ()
    for _ in tl.static_range(len(PLAN.series)):
        metered = metered + (metrics.mismatch_start(BLOCK),)
    for first in range(row.begin, row.end, BLOCK):
        block = read_block(fields, row, first + tl.arange(0, BLOCK), row.end, PLAN)
        zeros = tl.zeros([BLOCK], tl.float32)
        position = zeros
        if PLAN.asks_position:
            ones = tl.where(block.mask, 1.0, 0.0)
            position = valid_before + tl.cumsum(ones, 0)
            valid_before += tl.sum(ones, 0)
        context = (position, zeros + count, zeros + mean_advantage)
        place = row.start + block.index
        if PLAN.has_turns:
            found = find_runs(fields, row, block, runs, turns_before)
            runs = found[4]
            place = row.start + row.begin + found[3]

        block_place = place_of_blocks(row, entry) + (first - row.begin) // BLOCK

        # The stages.
        weight = block.weight
        log_ratio = tl.zeros([BLOCK], tl.float32)
        slope = tl.zeros([BLOCK], tl.float32) + 1.0
        kept = block.mask
        truncated = block.index < 0
        vetoed = block.index < 0
        for k in tl.static_range(len(PLAN.stages)):
            value, carry = carried(
                PLAN.stages[k],
                fields,
                row,
                block,
                context,
                of_rows[k],
                carries[k],
                buffers,
                place,
                block_place,
                numbers[k],
            )
            carries = put(carries, k, carry)
            inputs = inputs_of(PLAN.stages[k], block, context, value)
            if PLAN.stages[k].counts_as == "ratio":
                log_ratio, slope = call(PLAN.stages[k].rule, inputs, PLAN.stages[k], numbers[k])
                log_ratio = ops.clamp(log_ratio, -LOG_LIMIT, PLAN.gate.limit)
            else:
                factor, accepted = call(PLAN.stages[k].rule, inputs, PLAN.stages[k], numbers[k])
                accepted = accepted & block.mask
                kept = kept & accepted
                weight *= dropped_to_zero(factor, accepted)
                if PLAN.stages[k].counts_as == "truncated":
                    truncated = truncated | truncated_by(factor, value, accepted)
                if PLAN.stages[k].counts_as == "vetoed":
                    vetoed = vetoed | (block.mask & ~accepted)

        # The gate: ``log_ratio`` and ``value`` are the ratio's, and ``logp`` is that of the policy being trained.
        if PLAN.detached:
            slope = tl.zeros([BLOCK], tl.float32) + 1.0
        inputs = inputs_of(PLAN.gate, block, context, log_ratio)
        clamped, raw, value, logp = log_ratio, inputs[1], log_ratio, block.policies[0]
        inputs = (clamped, raw, value, logp) + inputs[4:]
        surrogate, derivative = call(PLAN.gate.rule, inputs, PLAN.gate, numbers[len(PLAN.stages)])
        derivative = derivative * slope
        held_back = held_back_by(derivative, log_ratio, slope, block.advantage)
        loss = -scale * weight * surrogate
        coefficient = -scale * weight * derivative
        good = block.trainable & finite(loss + coefficient)
        if PLAN.asks_reward:
            good = good & finite(block.reward)
        loss = tl.where(good, loss, 0.0)
        coefficient = tl.where(good, coefficient, 0.0)
        tl.store(buffers.coefficient + row.start + block.index, coefficient, mask=block.inside)

        # The metrics.
        before_end = metrics.later(before_end, tl.where(block.mask, row.length - block.index, 0))
        unscored = block.index < 0
        if fields.rollout_logp is not None:
            unscored = block.trainable & ~block.scored
        advantaged = block.advantage != 0
        staleness = ops.clamp(block.policies[0] - block.policies[1], -LOG_LIMIT, LOG_LIMIT)
        plain_ratio = tl.where(advantaged, tl.exp(staleness), 0.0)
        derivative = tl.where(advantaged & good, weight * derivative, 0.0)
        change = changed_by(derivative, block.advantage, plain_ratio) + (plain_ratio,)
        tally = metrics.loss_step(
            tally,
            block.mask,
            block.trainable,
            loss,
            held_back,
            truncated,
            kept,
            vetoed,
            weight,
            coefficient,
            unscored,
            ~good,
            advantaged,
            change,
        )
        for k in tl.static_range(len(PLAN.series)):
            d, compared = log_ratio_of(block, PLAN, k)
            metered = put(metered, k, metrics.mismatch_step(metered[k], d, compared, buffers.edges))

    entry_ptr = buffers.partials + entry.to(tl.int64) * PLAN.entry_size
    trainable_tokens, unscored_tokens = metrics.loss_store(
        tally, entry_ptr, PLAN.divides_by == "kept" and not PLAN.split
    )
    if len(PLAN.series) > 0:
        # The row's first valid token once more, in every lane.
        index = tl.arange(0, BLOCK) * 0 + row.length - tl.max(before_end, 0)
        block = read_block(fields, row, index, row.length, PLAN)
        for k in tl.static_range(len(PLAN.series)):
            d, compared = log_ratio_of(block, PLAN, k)
            first_token = tl.max(tl.where(compared, tl.abs(d), -1.0), 0)
            first_token = tl.where(count_before > 0, -1.0, first_token)
            compared_tokens = trainable_tokens
            if PLAN.series[k][0] != 0:
                compared_tokens = trainable_tokens - unscored_tokens
            series_ptr = entry_ptr + metrics.WIDE + k * metrics.SERIES_SIZE
            metrics.mismatch_store(metered[k], compared_tokens.to(tl.float32), first_token, series_ptr)
    metrics.merge(buffers, entry, entries, group, rows, PLAN)
