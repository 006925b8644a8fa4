"""``Composition``: the compile-time constant of the correction kernel.

It holds a plan's functions, spans, pairs of policies and which fields a batch has, never a number; a kernel is compiled
for each.  Triton passes it around as it is: its own attributes are read when the kernel is compiled.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from triton.language.core import constexpr_type

from offcorr.batch import Batch
from offcorr.kernels import spans
from offcorr.kernels.metrics import entry_size
from offcorr.kernels.rebind import NotFused, for_triton
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.base import GateSpec, Plan, arguments
from offcorr.stages.spans import SPANS

OF_ROW = ("position", "length", "mean_advantage")
"""The inputs that are known once a token's row has been read."""

OF_TOKEN = ("log_ratio", "raw_log_ratio", "value", "logp", "anchor_logp", "advantage", "reward", "entropy")
INPUTS = (*OF_TOKEN, *OF_ROW)
"""The inputs of pointwise functions, in the order of ``correction.inputs_of``."""

_POLICIES = {"staleness": (0, 1), "engine": (1, 2), "total": (0, 2)}
"""Which of (logp, old_logp, rollout_logp) a mismatch compares."""

MISMATCHES = {pair: name for name, pair in _POLICIES.items()}

_NONE = spans.Reduction((), None, spans.nothing, None)


class Constant:
    """An object that a kernel is compiled for.

    Its ``repr`` is a digest of all that it holds, the source of functions included: Triton tells compiled kernels apart
    by it, and would take two functions with the same name for the same.
    """

    def __post_init__(self) -> None:
        held = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        digest = hashlib.sha256(_text(held).encode()).hexdigest()[:16]
        object.__setattr__(self, "_repr", f"{type(self).__name__}_{digest}")

    def __repr__(self) -> str:
        return self._repr  # type: ignore[attr-defined, no-any-return]

    # triton 3.6 takes what has these two for a constant that may be handed to a function.
    @property
    def type(self) -> Any:
        return constexpr_type(self)

    def _flatten_ir(self, handles: Any) -> None:
        pass


def _text(value: Any) -> str:
    """A description that differs where what it describes does."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}{getattr(value, '_fields', '')}"
    return str(getattr(value, "cache_key", None) or repr(value))


@dataclass(frozen=True, eq=False, repr=False)
class Part(Constant):
    """A pointwise function, and which of ``INPUTS`` its arguments are, before and after ``p``."""

    function: Any
    before: tuple[int, ...]
    takes_p: bool
    after: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class KernelStage(Constant):
    """A ratio, weight or rejection (``base.Spec``), or the gate (``base.GateSpec``, whose rule is its surrogate)."""

    rule: Part
    first: int  # the policy compared
    second: int  # the policy compared against
    limit: float
    params: type[Any]
    on_device: tuple[bool, ...]
    kind: str = "gate"  # "token", "turn", "nearby", "torch", "reduction", "running"
    counts_as: str = ""  # as in ``Spec``; "ratio" for the ratio
    measure: Part | None = None
    twin: Any = None
    reduction: spans.Reduction = _NONE  # read by the first pass: the span, or, of a split row, a running span's carry
    slot: int = 0  # of its first number in the summary
    turn: int = 0  # its place among the stages that look at turns
    nearby: int = 0  # its place among the stages that sum over nearby tokens
    given: int = 0  # its place among the stages whose span torch computes

    @property
    def limited(self) -> bool:
        return math.isfinite(self.limit)

    @property
    def slots(self) -> int:
        """The number of numbers of a part of a row that it needs in the summary."""
        return 2 if self.kind == spans.NEARBY else len(self.reduction.first)

    @property
    def first_carry(self) -> float:
        return self.twin.first if self.kind == "running" else 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Composition(Constant):
    """Everything that the kernel is compiled for."""

    stages: tuple[KernelStage, ...]  # the ratio first
    gate: KernelStage
    detached: bool
    divides_by: Literal["", "valid", "kept"]  # the tokens whose number in a row its sum is divided by
    unit: Literal["tokens", "sequences"] | None  # what Z counts, where the kernel has to find it
    series: tuple[tuple[int, int], ...]  # the policies whose mismatch is metered, in the order of the metrics
    split: bool  # whether several programs share a row
    turns: int  # how many stages look at turns
    nearby: int  # how many stages sum over nearby tokens
    joins_runs: bool  # whether a turn may be several runs; else the mean of a run is that of its turn
    runs_slot: int  # of the number of runs in the summary
    asks_position: bool
    asks_length: bool
    asks_mean_advantage: bool
    asks_reward: bool
    asks_entropy: bool
    token_advantages: bool
    token_weight: bool

    @property
    def specs(self) -> tuple[KernelStage, ...]:
        return (*self.stages, self.gate)

    @property
    def has_turns(self) -> bool:
        return self.turns > 0

    @property
    def summary_size(self) -> int:
        """The number of numbers that the first launch leaves of each part of a row."""
        return self.runs_slot + (2 if self.turns else 0)

    @property
    def entry_size(self) -> int:
        return entry_size(len(self.series))

    @property
    def reads_first(self) -> bool:
        """Whether a row's tokens need the row's reductions, turns, count or mean advantage."""
        reduced = any(stage.kind == "reduction" for stage in self.stages) or self.asks_mean_advantage
        return reduced or self.asks_length or self.has_turns or self.divides_by == "valid"


class Given(NamedTuple):
    """The fields of a batch, and whether its rows are split: all that the kernel depends on beside the plan."""

    old_logp: bool
    rollout_logp: bool
    turn_ids: bool
    token_advantages: bool
    token_weight: bool
    split: bool


_known: dict[Any, Composition | str] = {}
"""Each composition, or why Triton cannot run it, so that this is found out once."""


def composition(plan: Plan, batch: Batch, split: bool) -> Composition:
    """The composition of a plan for batches like this one; ``split`` asks for several programs per row.

    Raises:
        NotFused: it cannot run in Triton.
    """
    device, per_sequence = batch.logp.device, (batch.sequences,)
    specs = specs_of(plan)
    given = Given(
        batch.old_logp is not None,
        batch.rollout_logp is not None,
        batch.turn_ids is not None,
        batch.advantages.shape != per_sequence,  # as ``Batch`` reads them: where S = N, they are per sequence
        batch.weight is not None and batch.weight.shape != per_sequence,
        split and all(_may_be_split(spec.span) for spec in specs[:-1]),
    )
    key = (
        tuple([_without_numbers(spec, device) for spec in specs]),
        plan.ratio is not None,
        plan.aggregate,
        plan.count_rejected,
        given,
    )
    known = _known.get(key)
    if known is None:
        for spec in specs[:-1]:
            if SPANS[spec.span] not in spans.TWINS:  # not remembered, since it may be registered later
                raise NotFused(f"the span {spec.span!r} has no Triton twin")
        try:
            known = _compose(*key)
        except NotFused as reason:
            known = str(reason)
        _known[key] = known
    if isinstance(known, str):
        raise NotFused(known)
    return known


def specs_of(plan: Plan) -> tuple[Any, ...]:
    """The ratio, weights and rejections, and the gate."""
    return (*(() if plan.ratio is None else (plan.ratio,)), *plan.factors, plan.gate)


def refuse(composition: Composition, why: str) -> NotFused:
    """Remembers that Triton cannot run a composition."""
    _known.update({key: why for key, known in _known.items() if known is composition})
    return NotFused(why)


def numbers(params: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """A stage's numbers as the kernel takes them: floats, since Triton would compile anew for an int."""
    if not params:
        return ()
    kind: Any = type(params)
    return kind(*[number if _on(device, number) else float(number) for number in params])


def _on(device: torch.device, number: Any) -> bool:
    """Whether the kernel reads a number there, so that the host need not wait for it."""
    return isinstance(number, Tensor) and number.device == device


def _without_numbers(spec: Any, device: torch.device) -> Any:
    """A spec of no class, with (type, which are on the device) for its params, and the torch function for its span."""
    params = (type(spec.params), tuple([_on(device, number) for number in spec.params]))
    if isinstance(spec, GateSpec):
        return spec._replace(params=params, owner="")
    return spec._replace(params=params, span=SPANS[spec.span], owner="")


def _may_be_split(span: str) -> bool:
    twin = spans.TWINS.get(SPANS[span])
    return not isinstance(twin, spans.Running) or twin.carry is not None


def _compose(
    specs: tuple[Any, ...], has_ratio: bool, aggregate: str, count_rejected: bool, given: Given
) -> Composition:
    *others, gate = specs
    aggregation = AGGREGATIONS[aggregate]
    stages: list[KernelStage] = []
    functions = [gate.surrogate] + [part for spec in others for part in (spec.measure, spec.rule)]
    asked = {name for function in functions for name in arguments(function)}
    slot, turns, nearby, by_torch = 2 if "mean_advantage" in asked else 1, 0, 0, 0
    for place, spec in enumerate(others):
        at = slot, turns, nearby, by_torch
        stage = _stage(spec, at, given.split, "ratio" if has_ratio and place == 0 else spec.counts_as)
        slot, turns = slot + stage.slots, turns + (stage.kind == spans.TURN)
        nearby, by_torch = nearby + (stage.kind == spans.NEARBY), by_torch + (stage.kind == spans.TORCH)
        stages.append(stage)
    counted = any(isinstance(stage.twin, spans.Running) and stage.twin.needs_position for stage in stages)
    divided_by: Literal["valid", "kept"] = "valid" if count_rejected else "kept"
    return Composition(
        stages=tuple(stages),
        gate=KernelStage(_part(gate.surrogate), *_POLICIES[gate.mismatch], float(gate.log_limit), *gate.params),
        detached=gate.detached,
        divides_by=divided_by if aggregation.divides_by_count else "",
        unit=None if count_rejected or aggregation.unit == "none" else aggregation.unit,
        series=(_POLICIES["engine"],) * given.rollout_logp + (_POLICIES["staleness"],) * given.old_logp,
        split=given.split,
        turns=turns,
        nearby=nearby,
        joins_runs=bool(turns) and (given.split or given.turn_ids),
        runs_slot=slot,
        asks_position=counted or "position" in asked,
        asks_length="length" in asked,
        asks_mean_advantage="mean_advantage" in asked,
        asks_reward="reward" in asked,
        asks_entropy="entropy" in asked,
        token_advantages=given.token_advantages,
        token_weight=given.token_weight,
    )


def _stage(spec: Any, at: tuple[int, int, int, int], split: bool, counts_as: str) -> KernelStage:
    """``at``: its ``slot``, ``turn``, ``nearby`` and ``given``."""
    twin = spans.TWINS[spec.span]
    kind = twin if isinstance(twin, str) else type(twin).__name__.lower()
    reduction = twin if isinstance(twin, spans.Reduction) else _NONE
    if split and isinstance(twin, spans.Running):
        reduction = spans.TWINS[SPANS[twin.carry]]  # type: ignore[assignment, index]
    for name in OF_ROW:
        if (reduction.first or kind in (spans.TURN, spans.NEARBY)) and name in arguments(spec.measure):
            raise NotFused(f"a measure asks for {name} before its row has been read")
    (first, second), (params, on_device) = _POLICIES[spec.mismatch], spec.params
    own = _part(spec.measure), twin, reduction, *at
    return KernelStage(_part(spec.rule), first, second, float(spec.limit), params, on_device, kind, counts_as, *own)


def _part(function: Any) -> Part:
    names = arguments(function)
    at = names.index("p") if "p" in names else len(names)
    before, after = (tuple(INPUTS.index(name) for name in some) for some in (names[:at], names[at + 1 :]))
    return Part(for_triton(function), before, "p" in names, after)
