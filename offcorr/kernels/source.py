"""The text of a composition's kernel, top to bottom."""

from __future__ import annotations

import math

from offcorr.batch import LOG_LIMIT
from offcorr.kernels.compose import Carried, Composition, NotFused
from offcorr.kernels.metrics import entry_size
from offcorr.kernels.spans import REDUCTIONS, RUNNING
from offcorr.shapes import Mismatch
from offcorr.stages.base import arguments

ARGUMENTS = (
    *("logp_ptr", "old_logp_ptr", "rollout_logp_ptr", "advantages_ptr", "mask_ptr", "rewards_ptr"),
    *("turn_ids_ptr", "run_ids_ptr", "run_totals_ptr", "run_counts_ptr", "turn_means_ptr"),
    *("cu_seqlens_ptr", "row_factor_ptr", "summary_ptr", "edges_ptr", "places_ptr"),
    *("coefficient_ptr", "partials_ptr", "merged_ptr", "loss_ptr", "found_z_ptr", "tickets_ptr"),
    *("row_weight", "z", "tokens", "width", "rows", "parts", "part_length", "group"),
)
"""What every kernel takes before the stages' parameters, in order; an absent field is None."""

_POLICIES = {
    "staleness": ("logp", "old_logp"),
    "engine": ("old_logp", "rollout_logp"),
    "total": ("logp", "rollout_logp"),
}

_COMPARED = {"engine": "scored", "staleness": "trainable"}
"""Where both log-probs are numbers."""


class Source:
    """Writes a composition's kernel, top to bottom."""

    def __init__(self, composition: Composition) -> None:
        self.composition, self.fields, self.split = composition, composition.fields, composition.split
        self.reductions, self.first_carry = REDUCTIONS, {name: one.first for name, one in RUNNING.items()}
        self.reduced = [one for one in composition.carried if one.span in REDUCTIONS]
        self.running = [one for one in composition.carried if one.span in RUNNING]
        # What a reduction pass reads: the row's reductions, and what running spans carry from part to part.
        self.reduction_of = {one: one.span for one in self.reduced}
        if self.split:
            self.reduction_of |= {one: RUNNING[one.span].carry for one in self.running}
        self.turns = [one for one in composition.carried if one.span == "turn"]
        # Whether a turn may be several runs; else the mean of a run is that of its turn.
        self.joins_runs = bool(self.turns) and (self.split or "turn_ids" in self.fields)
        known = {"token", "turn", *REDUCTIONS, *RUNNING}
        for one in composition.carried:
            if one.span not in known:
                raise NotFused(f"the kernel does not know the span {one.span!r}")
        for one in (*self.reduction_of, *self.turns):
            if "position" in arguments(one.measure):
                raise NotFused("a measure asks for a token's position before its row has been read")
        asked = {name for part in composition.functions.values() for name in arguments(part)}
        self.asks_reward = "reward" in asked
        self.asks_position = "position" in asked or any(one.span == "prefix_geometric" for one in self.running)
        self.lines: list[str] = []

    def text(self) -> str:
        self.lines += [
            f'"""Composed by offcorr.kernels; {"several programs" if self.split else "one program"} a row."""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "from offcorr.kernels import kernel_metrics as metering",
            "from offcorr.kernels import kernel_ops as ops",
            "from offcorr.kernels import kernel_spans as spans",
        ]
        if self.split:
            self.head("summary")
            self.first_pass()
            self.summary_store()
        self.head("correction")
        if self.split:
            self.summary_load()
        elif self.reduced or self.turns or self.divides_by_valid:
            self.first_pass()
            self.row_values()
        self.turn_means()
        self.main_pass()
        self.tail()
        return "\n".join(self.lines) + "\n"

    @property
    def divides_by_valid(self) -> bool:
        return self.composition.divides_by == "valid"

    def write(self, block: str, indent: int = 1) -> None:
        self.lines += ["    " * indent + line for line in block.strip("\n").split("\n")]

    def head(self, kernel: str) -> None:
        params = [f"p_{place}" for place in sorted(self.composition.params)]
        self.lines += [
            "",
            "",
            '@triton.jit(do_not_specialize=["rows", "tokens", "parts", "part_length", "group"])',
            f"def {kernel}({', '.join((*ARGUMENTS, *params))}, BLOCK: tl.constexpr):",
        ]
        self.write(
            """
entry = tl.program_id(0)
entries = rows * parts
row = entry // parts
number = entry % parts
start, length, begin, end = spans.stretch(cu_seqlens_ptr, width, row, number, part_length)
"""
        )
        for place, (kind, on_device) in sorted(self.composition.params.items()):
            if on_device:
                read = [
                    f"tl.load(p_{place}.{name}).to(tl.float32)" if name in on_device else f"p_{place}.{name}"
                    for name in kind._fields
                ]
                self.write(f"p_{place} = P_{place}({', '.join(read)})")
        self.write("lanes = tl.arange(0, BLOCK)")
        if "advantages" not in self.fields:
            self.write("row_advantage = tl.load(advantages_ptr + row).to(tl.float32)")
        if self.asks_reward:
            self.write("reward = tl.zeros([BLOCK], tl.float32) + tl.load(rewards_ptr + row).to(tl.float32)")

    def load(self, indent: int = 2) -> None:
        """The tokens at ``index``, selected before any arithmetic, as ``batch.Tokens`` does.

        All of a block is read: a load that skips masked tokens one by one is not read four at a time.
        """
        self.write("mask = tl.load(mask_ptr + start + index, mask=inside, other=0) != 0", indent)
        selected = ["logp", "old_logp"] if "old_logp" in self.fields else ["logp"]
        if "advantages" in self.fields:
            selected.append("advantage")
        else:
            self.write("advantage = tl.zeros([BLOCK], tl.float32) + row_advantage", indent)
        for name in selected:
            pointer = "advantages_ptr" if name == "advantage" else f"{name}_ptr"
            self.write(f"{name} = tl.load({pointer} + start + index, mask=inside, other=0.0).to(tl.float32)", indent)
        everything = [name for name in ("logp", "old_logp", "advantage") if name in (*selected, "advantage")]
        finite = " & ".join(f'(tl.abs({name}) < float("inf"))' for name in everything)
        self.write(f"trainable = mask & {finite}", indent)
        for name in everything:
            self.write(f"{name} = tl.where(trainable, {name}, 0.0)", indent)
        if "old_logp" not in self.fields:
            self.write("old_logp = logp", indent)
        if "rollout_logp" in self.fields:
            self.write(
                "reported = tl.load(rollout_logp_ptr + start + index, mask=inside, other=0.0).to(tl.float32)", indent
            )
            self.write('scored = trainable & (tl.abs(reported) < float("inf"))', indent)
            self.write("rollout_logp = tl.where(scored, reported, old_logp)", indent)
        else:
            self.write("rollout_logp = old_logp", indent)
        for of in sorted({one.of for one in self.composition.carried} | {self.composition.ratio_of}):
            ours, theirs = _POLICIES[of]
            self.write(f"raw_{of} = {ours} - {theirs}", indent)
            self.write(f"log_ratio_{of} = {_clamped(f'raw_{of}', LOG_LIMIT)}", indent)

    def call(self, name: str, place: str, of: Mismatch, **own: str) -> str:
        """A call of a pointwise part, with what its arguments name."""
        names = {
            "log_ratio": f"log_ratio_{of}",
            "raw_log_ratio": f"raw_{of}",
            "value": f"value_{place}",
            "logp": "logp" if place == "gate" else _POLICIES[of][0],
            "anchor_logp": _POLICIES[of][1],
            "p": f"p_{place}",
        } | own
        part = self.composition.functions[name]
        return f"{name}({', '.join(names.get(argument, argument) for argument in arguments(part))})"

    def measure(self, one: Carried) -> str:
        return f"tl.where(mask, {self.call(f'{one.place}_measure', one.place, one.of)}, 0.0)"

    def blocks(self) -> None:
        self.write("for first in range(begin, end, BLOCK):")
        self.write("index = first + lanes\ninside = index < end", 2)

    def first_pass(self) -> None:
        """Sums, extremes, runs of turns and the count over the tokens of this program."""
        self.write("count_lanes = tl.zeros([BLOCK], tl.float32)")
        for one, span in self.reduction_of.items():
            self.write(f"state_{one.place} = spans.{self.reductions[span].start.__name__}(lanes)")
        if self.turns:
            self.write("runs = 0\nturns = start * 0")
        for one in self.turns:
            self.write(f"total_{one.place} = 0.0\ncount_{one.place} = 0.0")
        self.blocks()
        if self.reduction_of or self.turns:
            self.load()
        else:
            self.write("mask = tl.load(mask_ptr + start + index, mask=inside, other=0) != 0", 2)
        self.write("count_lanes += tl.where(mask, 1.0, 0.0)", 2)
        for one, span in self.reduction_of.items():
            self.write(f"measured = {self.measure(one)}", 2)
            step = self.reductions[span].step.__name__
            self.write(f"state_{one.place} = spans.{step}(state_{one.place}, measured, mask)", 2)
        if self.turns:
            self.measure_runs()

    def row_values(self) -> None:
        """What a row's first token needs of the whole row."""
        self.write("count = tl.sum(count_lanes, 0)")
        for one in self.reduced:
            self.write(f"row_{one.place} = spans.{one.span}(state_{one.place}, count)")

    # Turns: the first pass sums every run of tokens, ``turn_means`` joins those of one turn, the main pass looks up.

    def find_runs(self) -> None:
        """``starts``, and the run that each token is in, counted from this program's first."""
        if "turn_ids" in self.fields:
            self.write(
                """
turn_id = tl.load(turn_ids_ptr + start + index, mask=inside, other=0).to(tl.int64)
id_before = tl.load(turn_ids_ptr + start + index - 1, mask=inside & (index > begin), other=0)
starts = inside & ((index == begin) | (turn_id != id_before))
""",
                2,
            )
        else:
            self.write(
                """
preceded = tl.load(mask_ptr + start + index - 1, mask=inside & (index > 0), other=0) != 0
starts_turn = mask & ~preceded
starts = inside & ((index == begin) | starts_turn)
""",
                2,
            )
        self.write("run = runs + tl.cumsum(tl.where(starts, 1, 0), 0) - 1", 2)
        self.write("runs += tl.sum(tl.where(starts, 1, 0), 0)", 2)

    def measure_runs(self) -> None:
        self.find_runs()
        if "turn_ids" in self.fields:
            self.write(
                """
id_after = tl.load(turn_ids_ptr + start + index + 1, mask=index + 1 < end, other=0)
ends = inside & ((index + 1 == end) | (turn_id != id_after))
""",
                2,
            )
        else:
            self.write(
                """
turn_id = turns + tl.cumsum(tl.where(starts_turn, 1, 0), 0)
turns += tl.sum(tl.where(starts_turn, 1, 0), 0)
followed = tl.load(mask_ptr + start + index + 1, mask=index + 1 < end, other=0) != 0
ends = inside & ((index + 1 == end) | (followed & ~mask))
""",
                2,
            )
        self.write("place = start + begin + run\nlast = lanes == BLOCK - 1", 2)
        if self.joins_runs:
            self.write("tl.store(run_ids_ptr + place, turn_id, mask=ends)", 2)
        for number, one in enumerate(self.turns):
            total, count = f"total_{one.place}", f"count_{one.place}"
            self.write(f"measured = {self.measure(one)}", 2)
            self.write(f"total, valid = spans.run_totals(measured, mask, starts, {total}, {count})", 2)
            if self.joins_runs:
                self.write(f"tl.store(run_totals_ptr + {_nth(number)} + place, total, mask=ends)", 2)
                self.write("tl.store(run_counts_ptr + place, valid, mask=ends)", 2)
            else:
                mean = "total / tl.maximum(valid, 1.0)"
                self.write(f"tl.store(turn_means_ptr + {_nth(number)} + place, {mean}, mask=ends)", 2)
            self.write(f"{total} = tl.sum(tl.where(last, total, 0.0), 0)", 2)
            self.write(f"{count} = tl.sum(tl.where(last, valid, 0.0), 0)", 2)

    def turn_means(self) -> None:
        if not self.turns:
            return
        if not self.split:
            self.write("tl.debug_barrier()  # other threads read the runs")
        if self.joins_runs:
            turns_before, runs_ptr, turns_ptr = "start * 0", "None", "None"
            if self.split:
                runs_ptr = f"summary_row_ptr + {self.runs_slot} * entries.to(tl.int64)"
                if "turn_ids" not in self.fields:
                    turns_before, turns_ptr = "turns_before", f"{runs_ptr} + entries"
            for number, _ in enumerate(self.turns):
                totals, means = (f"{of} + {_nth(number)}" for of in ("run_totals_ptr", "turn_means_ptr"))
                self.write(
                    f"""
spans.turn_means(
    run_ids_ptr, {totals}, run_counts_ptr, {means}, start, begin,
    runs, {turns_before}, parts, part_length, {runs_ptr}, {turns_ptr},
)
"""
                )
            self.write("tl.debug_barrier()  # other threads read the means")
        self.write("runs = 0")

    # A split row is read twice: a first launch leaves every part's folded states, from which each program of the
    # second takes the row's values and what comes before its own part.

    def summary_slots(self) -> list[tuple[Carried, str, list[int]]]:
        """(stage, reduction, slots of its folded state); slot 0 is the count."""
        found, slot = [], 1
        for one, span in self.reduction_of.items():
            size = self.reductions[span].size
            found.append((one, span, [*range(slot, slot + size)]))
            slot += size
        return found

    @property
    def runs_slot(self) -> int:
        """Of how many runs a part has; how many turns start in it comes after."""
        return 1 + sum(len(slots) for *_, slots in self.summary_slots())

    @property
    def summary_size(self) -> int:
        """How many numbers the first launch leaves of each part of a row."""
        return self.runs_slot + (2 if self.turns else 0)

    def summary_store(self) -> None:
        self.write("stride = entries.to(tl.int64)")
        self.write("tl.store(summary_ptr + entry, tl.sum(count_lanes, 0))")
        if self.turns:
            for place, what in enumerate(("runs", "turns")):
                self.write(f"tl.store(summary_ptr + {self.runs_slot + place} * stride + entry, {what}.to(tl.float32))")
        for one, span, slots in self.summary_slots():
            self.write(f"folded_{one.place} = spans.{self.reductions[span].fold.__name__}(state_{one.place})")
            for place, slot in enumerate(slots):
                self.write(f"tl.store(summary_ptr + {slot} * stride + entry, folded_{one.place}[{place}])")

    def summary_load(self) -> None:
        self.write(
            """
stride = entries.to(tl.int64)
summary_row_ptr = summary_ptr + row.to(tl.int64) * parts
there = lanes < parts
earlier = lanes < number
counts = tl.load(summary_row_ptr + lanes, mask=there, other=0.0)
count = tl.sum(counts, 0)
count_earlier = tl.sum(tl.where(earlier, counts, 0.0), 0)
"""
        )
        if self.turns:
            self.write(f"runs = tl.load(summary_ptr + {self.runs_slot} * stride + entry).to(tl.int32)")
            earlier = f"tl.load(summary_row_ptr + {self.runs_slot + 1} * stride + lanes, mask=earlier, other=0.0)"
            self.write(f"turns_before = tl.sum({earlier}.to(tl.int64), 0)")
        for one, span, slots in self.summary_slots():
            functions = self.reductions[span]
            which = "there" if one in self.reduced else "earlier"
            self.write(f"nothing = spans.{functions.start.__name__}(lanes)")
            for place, slot in enumerate(slots):
                loaded = f"tl.load(summary_row_ptr + {slot} * stride + lanes, mask={which}, other=0.0)"
                self.write(f"state_{place} = tl.where({which}, {loaded}, nothing[{place}])")
            state = "".join(f"state_{place}, " for place in range(len(slots)))
            if one in self.reduced:
                self.write(f"row_{one.place} = spans.{one.span}(({state}), count)")
            else:
                self.write(f"carried = spans.{functions.fold.__name__}(({state}))\ncarry_{one.place} = carried[0]")

    def main_pass(self) -> None:
        self.write("tally = metering.loss_start(BLOCK)\nbefore_end = tl.zeros([BLOCK // metering.FOLD], tl.int32)")
        for of in self.composition.series:
            self.write(f"metered_{of} = metering.mismatch_start(BLOCK)")
        if not self.split:
            for one in self.running:
                self.write(f"carry_{one.place} = {self.first_carry[one.span]}")
        if self.asks_position:
            self.write(f"valid_before = {'count_earlier' if self.split else '0.0'}")
        divided = " / tl.maximum(count, 1.0)" if self.divides_by_valid else ""
        self.write(f"row_scale = row_weight{divided}")
        self.write("total_weight = tl.load(z).to(tl.float32)" if "z" in self.fields else "total_weight = z")
        self.blocks()
        self.load()
        if self.asks_position:
            self.write(
                """
ones = tl.where(mask, 1.0, 0.0)
position = valid_before + tl.cumsum(ones, 0)
valid_before += tl.sum(ones, 0)
""",
                2,
            )
        if self.turns:
            self.find_runs()
        factor = "tl.load(row_factor_ptr + row).to(tl.float32)" if "row_factor" in self.fields else "1.0"
        self.write(f"weight = tl.zeros([BLOCK], tl.float32) + {factor}", 2)
        self.write("kept = mask\ntruncated = lanes < 0\nvetoed = lanes < 0", 2)
        for one in self.composition.carried:
            self.value(one)
            if one.place != "ratio":
                self.multiply(one)
        self.gate()
        self.meter()

    def value(self, one: Carried) -> None:
        """What the stage's span makes of its measure, as ``value_PLACE``."""
        value = f"value_{one.place}"
        if one in self.reduced:
            self.write(f"{value} = tl.zeros([BLOCK], tl.float32) + row_{one.place}", 2)
        elif one in self.turns:
            mean_ptr = f"turn_means_ptr + {_nth(self.turns.index(one))} + start + begin + run"
            self.write(f"{value} = tl.load({mean_ptr}, mask=mask, other=0.0)", 2)
        else:
            self.write(f"{value} = {self.measure(one)}", 2)
        if one in self.running:
            position = "position" if self.asks_position else "0.0"
            carry = f"carry_{one.place}"
            self.write(f"{value}, {carry} = spans.{one.span}({value}, mask, {position}, {carry})", 2)
        if one.place == "ratio":
            self.write(f"{value} = {self.call('ratio_read', 'ratio', one.of)}", 2)
        if math.isfinite(one.limit):
            self.write(f"{value} = {_clamped(value, one.limit)}", 2)

    def multiply(self, one: Carried) -> None:
        """The stage's multiplier and kept flag, as ``Multiplier.__call__`` combines them."""
        self.write(f"multiplier, inside_bounds = {self.call(f'{one.place}_rule', one.place, one.of)}", 2)
        self.write("kept_here = inside_bounds & mask\nmultiplier = tl.where(kept_here, multiplier, 0.0)", 2)
        self.write("weight *= multiplier\nkept = kept & kept_here", 2)
        if one.bounded:
            self.write(f"truncated = truncated | (kept_here & (multiplier != tl.exp(value_{one.place})))", 2)
        if one.vetoes:
            self.write("vetoed = vetoed | (mask & ~kept_here)", 2)

    def gate(self) -> None:
        """The surrogate and its derivative, as ``Correction.terms`` has them."""
        composition = self.composition
        of = composition.ratio_of
        has_ratio = any(one.place == "ratio" for one in composition.carried)
        if has_ratio:
            self.write(f"log_ratio = ops.clamp(value_ratio, -{LOG_LIMIT}, {composition.log_limit})", 2)
        else:
            self.write("log_ratio = tl.zeros([BLOCK], tl.float32)", 2)
        if has_ratio and not composition.detached:
            self.write(f"slope = {self.call('ratio_slope', 'ratio', of)}", 2)
        else:
            self.write("slope = tl.zeros([BLOCK], tl.float32) + 1", 2)
        called = self.call("gate_surrogate", "gate", of, log_ratio="log_ratio", value="log_ratio")
        self.write(
            f"""
ratio = tl.exp(log_ratio) * slope
surrogate, derivative = {called}
derivative = derivative * slope
full = ratio * tl.abs(advantage)
held_back = tl.where(full > 0, 1 - tl.abs(derivative) / full, 0.0)
held_back = ops.clamp(held_back, 0.0, 1.0)
scale = row_scale * weight / total_weight
loss = -scale * surrogate
coefficient = -scale * derivative
finite = trainable & (tl.abs(loss) < float("inf")) & (tl.abs(coefficient) < float("inf"))
loss = tl.where(finite, loss, 0.0)
coefficient = tl.where(finite, coefficient, 0.0)
tl.store(coefficient_ptr + start + index, coefficient, mask=inside)
""",
            2,
        )

    def meter(self) -> None:
        self.write("before_end = metering.later(before_end, tl.where(mask, length - index, 0))", 2)
        for of in self.composition.series:
            d = " - ".join(_POLICIES[of])
            self.write(f"metered_{of} = metering.mismatch_step(metered_{of}, {d}, {_COMPARED[of]}, edges_ptr)", 2)
        self.write(f"unscored = {'trainable & ~scored' if 'rollout_logp' in self.fields else 'lanes < 0'}", 2)
        self.write(
            """
tally = metering.loss_step(
    tally, mask, loss, held_back, truncated, kept, vetoed, weight, coefficient, unscored, mask & ~finite
)
""",
            2,
        )

    def tail(self) -> None:
        composition = self.composition
        divides = composition.divides_by == "kept"
        self.write(f"entry_ptr = partials_ptr + entry.to(tl.int64) * {entry_size(len(composition.series))}")
        self.write(f"metering.loss_store(tally, entry_ptr, {divides and not self.split})")
        if composition.series:
            # The row's first valid token once more, in every lane.
            self.write("index = lanes * 0 + length - tl.max(before_end, 0)\ninside = index < length")
            self.load(1)
        for number, of in enumerate(composition.series):
            d = " - ".join(_POLICIES[of])
            self.write(f"first_token = tl.max(tl.where({_COMPARED[of]}, tl.abs({d}), -1.0), 0)")
            if self.split:
                self.write("first_token = tl.where(count_earlier > 0, -1.0, first_token)")
            self.write(f"metering.mismatch_store(metered_{of}, first_token, entry_ptr + {entry_size(number)})")
        unit = f"metering.{composition.unit.upper()}" if composition.unit else "None"
        self.write(
            f"""
metering.merge(
    partials_ptr, places_ptr, merged_ptr, loss_ptr, found_z_ptr, tickets_ptr, entry, entries, group, rows,
    SERIES={len(composition.series)}, SPLIT={self.split}, UNIT={unit}, DIVIDES={divides},
)
"""
        )


def _nth(number: int) -> str:
    """Where the numbers of the n-th stage begin that looks at turns."""
    return f"{number} * tokens.to(tl.int64)"


def _clamped(name: str, limit: float) -> str:
    return f"ops.clamp({name}, -{limit}, {limit})"
