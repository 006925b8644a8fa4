"""One kernel's source for one composition: the stations' own pointwise parts around the hand-written spans.

Nothing of a station is written twice: its pointwise parts are called, rebound to ``triton.language``, with the
inputs their arguments name; its numbers are run-time arguments.  What the text depends on is which functions, spans
and policies a composition uses and which fields a batch has, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from offcorr.batch import LOG_LIMIT, Batch
from offcorr.multipliers import Multiplier
from offcorr.ratios import Ratio
from offcorr.shapes import Pair
from offcorr.station import Station, arguments
from offcorr.weights import _Bounded

if TYPE_CHECKING:
    from offcorr.correction import Correction


class NotFused(Exception):
    """This composition runs on the reference; the message says why."""


Part = Callable[..., Any]


@dataclass(frozen=True)
class Carried:
    """A station that carries a measure over a span: the ratio, or a weight or rejection."""

    place: str
    of: Pair
    span: str
    measure: Part
    parts: tuple[tuple[str, Part], ...]  # called with the span's value
    limit: float  # on the value
    bounded: bool = False  # counts as truncated where its weight is not the ratio's own
    vetoes: bool = False


@dataclass(frozen=True)
class Composition:
    """Everything that the source depends on: functions, spans, policies and which fields a batch has."""

    carried: tuple[Carried, ...]
    ratio_of: Pair
    surrogate: Part
    detached: bool
    log_limit: float
    has_params: frozenset[str]
    divides_by_count: bool
    fields: frozenset[str]

    @property
    def functions(self) -> dict[str, Part]:
        """The pointwise parts, under the names that the source calls."""
        found = {"gate_surrogate": self.surrogate}
        for one in self.carried:
            found[f"{one.place}_measure"] = one.measure
            found |= {f"{one.place}_{name}": part for name, part in one.parts}
        return found

    @property
    def series(self) -> list[Pair]:
        """The pairs whose mismatch is metered, in the order of the metrics."""
        known: list[tuple[str, Pair]] = [("rollout_logp", "engine"), ("old_logp", "staleness")]
        return [of for name, of in known if name in self.fields]

    @property
    def source(self) -> str:
        return _Source(self).text()


DIVIDES_BY_COUNT = {
    "token-mean": False,
    "seq-mean-token-mean": True,
    "seq-mean-token-sum": False,
    "seq-mean-token-sum-norm": False,
}
"""Whether an aggregation divides a row's weight by its count of tokens; nothing else in it depends on the row."""


def compose(loss_fn: Correction, batch: Batch, *, z_on_device: bool) -> Composition:
    """The composition of a resolved correction for batches like this one.

    Raises:
        NotFused: a station does something that is no pointwise part.
    """
    carried = []
    for place, station in loss_fn.stations.items():
        name = place.replace(".", "_")
        if isinstance(station, Ratio):
            _refuse_own(station, Ratio, "__call__")
            parts = (("read", station.read), ("slope", station.slope))
            carried.append(Carried(name, station.of, station.span, station.measure, parts, LOG_LIMIT))
        elif isinstance(station, Multiplier):
            _refuse_own(station, Multiplier, "__call__", "inputs")
            bounded = type(station).truncated is _Bounded.truncated
            if not bounded:
                _refuse_own(station, Multiplier, "truncated")
            carried.append(
                Carried(
                    name,
                    _pair(station, batch),
                    station.span,
                    station.measure,
                    (("rule", station.rule),),
                    station.value_limit,
                    bounded,
                    station.drops_as == "vetoed",
                )
            )
    if loss_fn.aggregate not in DIVIDES_BY_COUNT:
        raise NotFused(f"the kernel does not know the aggregation {loss_fn.aggregate!r}")
    fields = {
        name for name in ("old_logp", "rollout_logp", "turn_ids", "cu_seqlens") if getattr(batch, name) is not None
    }
    # As ``Batch`` reads them: where S = N, advantages are per sequence.
    if batch.advantages.shape != (batch.sequences,):
        fields.add("advantages")
    if z_on_device:
        fields.add("z")
    return Composition(
        tuple(carried),
        loss_fn.ratio.of if loss_fn.ratio else "staleness",
        loss_fn.gate.surrogate,
        loss_fn.gate.detached,
        float(loss_fn.gate.log_limit),
        frozenset(place.replace(".", "_") for place, station in loss_fn.stations.items() if station.params),
        # Where rejected tokens leave the denominator, rows are weighted after the kernel.
        DIVIDES_BY_COUNT[loss_fn.aggregate] and loss_fn.count_rejected,
        frozenset(fields),
    )


def numbers(loss_fn: Correction) -> list[tuple[float, ...]]:
    """Every station's parameters, in the order of the kernel's arguments; as floats, since an int is specialised on."""
    given: list[Any] = [station.params for _, station in sorted(loss_fn.stations.items()) if station.params]
    return [type(params)(*map(float, params)) for params in given]


def _pair(station: Multiplier, batch: Batch) -> Pair:
    try:
        return station.pair(SimpleNamespace(batch=batch))  # type: ignore[arg-type]
    except AttributeError as missing:
        raise NotFused(f"{type(station).__name__}.pair looks at more than the batch: {missing}") from None


def _refuse_own(station: Station, base: type, *names: str) -> None:
    for name in names:
        if getattr(type(station), name) is not getattr(base, name):
            raise NotFused(f"{type(station).__name__} has a {name}() of its own")


# -- the text ------------------------------------------------------------------------------------------------

ARGUMENTS = (
    *("logp_ptr", "old_logp_ptr", "rollout_logp_ptr", "advantages_ptr", "mask_ptr", "rewards_ptr"),
    *("turn_ids_ptr", "turn_order_ptr", "turn_means_ptr", "turn_of_ptr", "cu_seqlens_ptr", "edges_ptr"),
    *("coefficient_ptr", "partials_ptr", "row_weight", "z", "tokens", "width", "rows"),
)
"""What every kernel takes before the stations' parameters, in order; an absent field is None."""

_POLICIES = {
    "staleness": ("logp", "old_logp"),
    "engine": ("old_logp", "rollout_logp"),
    "total": ("logp", "rollout_logp"),
}


_COMPARED = {"engine": "scored", "staleness": "trainable"}
"""Where both log-probs are numbers."""


class _Source:
    """Writes a composition's kernel, top to bottom."""

    def __init__(self, composition: Composition) -> None:
        from offcorr.kernels.scans_triton import REDUCTIONS, RUNNING

        self.composition, self.fields = composition, composition.fields
        self.reductions, self.first_carry = REDUCTIONS, {name: carry for name, (_, carry) in RUNNING.items()}
        self.reduced = [one for one in composition.carried if one.span in REDUCTIONS]
        self.running = [one for one in composition.carried if one.span in RUNNING]
        self.turns = [one for one in composition.carried if one.span == "turn"]
        known = {"token", "turn", *REDUCTIONS, *RUNNING}
        for one in composition.carried:
            if one.span not in known:
                raise NotFused(f"the kernel does not know the span {one.span!r}")
        for one in (*self.reduced, *self.turns):
            if "position" in arguments(one.measure):
                raise NotFused("a measure asks for a token's position before its row has been read")
        asked = {name for part in composition.functions.values() for name in arguments(part)}
        self.asks_reward = "reward" in asked
        self.asks_position = "position" in asked or any(one.span == "prefix_geometric" for one in self.running)
        self.lines: list[str] = []

    def text(self) -> str:
        self.head()
        if self.reduced or self.composition.divides_by_count:
            self.reduction_pass()
        for number, one in enumerate(self.turns):
            self.turn_pass(number, one)
        self.main_pass()
        self.tail()
        return "\n".join(self.lines) + "\n"

    def write(self, block: str, indent: int = 1) -> None:
        self.lines += ["    " * indent + line for line in block.strip("\n").split("\n")]

    def head(self) -> None:
        params = [f"p_{place}" for place in sorted(self.composition.has_params)]
        self.lines += [
            '"""Composed by offcorr.kernels.compose; one program a row."""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "from offcorr.kernels import metering_triton as metering",
            "from offcorr.kernels import scans_triton as spans",
            "",
            "",
            '@triton.jit(do_not_specialize=["rows", "tokens"])',
            f"def correction({', '.join((*ARGUMENTS, *params))}, BLOCK: tl.constexpr):",
        ]
        self.write("row = tl.program_id(0)")
        if "cu_seqlens" in self.fields:
            self.write("start = tl.load(cu_seqlens_ptr + row).to(tl.int64)")
            self.write("length = (tl.load(cu_seqlens_ptr + row + 1) - start).to(tl.int32)")
        else:
            self.write("start = row.to(tl.int64) * width")
            self.write("length = width")
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

    def call(self, name: str, place: str, of: Pair, **own: str) -> str:
        """A call of a pointwise part, with what its arguments name."""
        names = {
            "log_ratio": f"log_ratio_{of}",
            "raw_log_ratio": f"raw_{of}",
            "value": f"value_{place}",
            "anchor_logp": _POLICIES[of][1],
            "p": f"p_{place}",
        } | own
        part = self.composition.functions[name]
        return f"{name}({', '.join(names.get(argument, argument) for argument in arguments(part))})"

    def measure(self, one: Carried) -> str:
        return f"tl.where(mask, {self.call(f'{one.place}_measure', one.place, one.of)}, 0.0)"

    def blocks(self) -> None:
        self.write("for first in range(0, length, BLOCK):")
        self.write("index = first + lanes\ninside = index < length", 2)

    def reduction_pass(self) -> None:
        """What a row's first token needs of the whole row: sums, extremes, the count."""
        self.write("count_lanes = tl.zeros([BLOCK], tl.float32)")
        for one in self.reduced:
            start, _, _ = self.reductions[one.span]
            self.write(f"state_{one.place} = spans.{start.__name__}(lanes)")
        self.blocks()
        if self.reduced:
            self.load()
        else:
            self.write("mask = tl.load(mask_ptr + start + index, mask=inside, other=0) != 0", 2)
        self.write("count_lanes += tl.where(mask, 1.0, 0.0)", 2)
        for one in self.reduced:
            _, step, _ = self.reductions[one.span]
            self.write(f"measured = {self.measure(one)}", 2)
            self.write(f"state_{one.place} = spans.{step.__name__}(state_{one.place}, measured, mask)", 2)
        self.write("count = tl.sum(count_lanes, 0)")
        for one in self.reduced:
            self.write(f"row_{one.place} = spans.{one.span}(state_{one.place}, count)")

    def turn_pass(self, number: int, one: Carried) -> None:
        """The mean of every turn, to ``turn_means_ptr``, and each token's turn, to ``turn_of_ptr``."""
        self.write("total_before = 0.0\ncount_before = 0.0\nturns_before = 0")
        self.write("for first in range(0, length, BLOCK):")
        if "turn_ids" in self.fields:  # tokens of a turn are brought together by a stable sort
            self.write(
                """
place = first + lanes
inside = place < length
index = tl.load(turn_order_ptr + start + place, mask=inside, other=0)
before = tl.load(turn_order_ptr + start + place - 1, mask=inside & (place > 0), other=0)
after = tl.load(turn_order_ptr + start + place + 1, mask=place + 1 < length, other=0)
turn_id = tl.load(turn_ids_ptr + start + index, mask=inside, other=0)
id_before = tl.load(turn_ids_ptr + start + before, mask=inside, other=0)
id_after = tl.load(turn_ids_ptr + start + after, mask=inside, other=0)
starts = inside & ((place == 0) | (turn_id != id_before))
ends = inside & ((place + 1 == length) | (turn_id != id_after))
""",
                2,
            )
            self.load()
        else:
            self.write("index = first + lanes\ninside = index < length", 2)
            self.load()
            self.write(
                """
before = tl.load(mask_ptr + start + index - 1, mask=inside & (index > 0), other=0) != 0
after = tl.load(mask_ptr + start + index + 1, mask=index + 1 < length, other=0) != 0
starts = mask & ~before
ends = mask & ~after
""",
                2,
            )
        self.write(
            f"""
measured = {self.measure(one)}
total, valid = spans.turn_totals(measured, mask, starts, total_before, count_before)
turn_of = turns_before + tl.cumsum(tl.where(starts, 1, 0), 0) - 1
mean = total / tl.maximum(valid, 1.0)
tl.store(turn_means_ptr + {number} * tokens.to(tl.int64) + start + turn_of, mean, mask=ends)
tl.store(turn_of_ptr + start + index, turn_of, mask=inside)
last = lanes == BLOCK - 1
total_before = tl.sum(tl.where(last, total, 0.0), 0)
count_before = tl.sum(tl.where(last, valid, 0.0), 0)
turns_before = tl.sum(tl.where(last, turn_of, 0), 0) + 1
""",
            2,
        )
        self.write("tl.debug_barrier()  # the means are read by other threads")

    def main_pass(self) -> None:
        self.write("tally = metering.loss_start(BLOCK)\nbefore_end = tl.zeros([BLOCK // metering.FOLD], tl.int32)")
        for of in self.composition.series:
            self.write(f"metered_{of} = metering.mismatch_start(BLOCK)")
        for one in self.running:
            self.write(f"carry_{one.place} = {self.first_carry[one.span]}")
        if self.asks_position:
            self.write("valid_before = 0.0")
        divided = " / tl.maximum(count, 1.0)" if self.composition.divides_by_count else ""
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
        self.write(
            "weight = tl.zeros([BLOCK], tl.float32) + 1\nkept = mask\ntruncated = lanes < 0\nvetoed = lanes < 0", 2
        )
        for one in self.composition.carried:
            self.value(one)
            if one.place != "ratio":
                self.multiply(one)
        self.gate()
        self.meter()

    def value(self, one: Carried) -> None:
        """What the station's span makes of its measure, as ``value_PLACE``."""
        value = f"value_{one.place}"
        if one in self.reduced:
            self.write(f"{value} = tl.zeros([BLOCK], tl.float32) + row_{one.place}", 2)
        elif one in self.turns:
            offset = f"{self.turns.index(one)} * tokens.to(tl.int64) + start"
            self.write("turn_of = tl.load(turn_of_ptr + start + index, mask=mask, other=0)", 2)
            self.write(f"{value} = tl.load(turn_means_ptr + {offset} + turn_of, mask=mask, other=0.0)", 2)
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
        """The station's multiplier and kept flag, as ``Multiplier.__call__`` combines them."""
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
            self.write(f"log_ratio = tl.minimum(tl.maximum(value_ratio, -{LOG_LIMIT}), {composition.log_limit})", 2)
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
held_back = tl.minimum(tl.maximum(held_back, 0.0), 1.0)
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
        self.write("stride = rows.to(tl.int64)\ncolumn_ptr = partials_ptr + row")
        self.write("metering.loss_store(tally, column_ptr, stride)")
        if not self.composition.series:
            return
        # The first valid token once more, in every lane.
        self.write("index = lanes * 0 + length - tl.max(before_end, 0)\ninside = index < length")
        self.load(1)
        for number, of in enumerate(self.composition.series):
            d = " - ".join(_POLICIES[of])
            self.write(f"first_token = tl.max(tl.where({_COMPARED[of]}, tl.abs({d}), -1.0), 0)")
            self.write(
                f"column_ptr = partials_ptr + (metering.LOSS_SIZE + {number} * metering.MISMATCH_SIZE) * stride + row"
            )
            self.write(f"metering.mismatch_store(metered_{of}, first_token, column_ptr, stride)")


def _clamped(name: str, limit: float) -> str:
    return f"tl.minimum(tl.maximum({name}, -{limit}), {limit})"
