"""What a kernel is composed of: the stages' own pointwise parts around the hand-written spans.

Nothing of a stage is written twice: its pointwise parts are called, rebound to ``triton.language``, with the
inputs their arguments name; its numbers are run-time arguments.  What the text depends on is which functions, spans
and policies a composition uses and which fields a batch has, never a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Batch
from offcorr.shapes import Mismatch
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.base import Stage
from offcorr.stages.multipliers import Multiplier
from offcorr.stages.ratios import Ratio
from offcorr.stages.weights import _Bounded

if TYPE_CHECKING:
    from offcorr.correction import Correction
    from offcorr.kernels.source import Source


class NotFused(Exception):
    """This composition runs on the reference; the message says why."""


Part = Callable[..., Any]


@dataclass(frozen=True)
class Carried:
    """A stage that carries a measure over a span: the ratio, or a weight or rejection."""

    place: str
    mismatch: Mismatch
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
    ratio_of: Mismatch
    surrogate: Part
    detached: bool
    log_limit: float
    parameters: tuple[tuple[str, type[Any], frozenset[str]], ...]
    """(place, NamedTuple of numbers, those of them that are tensors)."""
    divides_by: Literal["", "valid", "kept"]
    """Which tokens of a row its sum is divided by the number of."""
    unit: Literal["", "kept", "rows"]
    """What Z counts, where the kernel has to find it."""
    fields: frozenset[str]

    @property
    def functions(self) -> dict[str, Part]:
        """The pointwise parts, under the names that the source calls."""
        found: dict[str, Part] = {"gate_surrogate": self.surrogate}
        for one in self.carried:
            found[f"{one.place}_measure"] = one.measure
            found |= {f"{one.place}_{name}": part for name, part in one.parts}
        return found

    @property
    def series(self) -> list[Mismatch]:
        """The pairs whose mismatch is metered, in the order of the metrics."""
        known: list[tuple[str, Mismatch]] = [("rollout_logp", "engine"), ("old_logp", "staleness")]
        return [of for name, of in known if name in self.fields]

    @property
    def split(self) -> bool:
        """Whether several programs share a row."""
        return "split" in self.fields

    @property
    def params(self) -> dict[str, tuple[type[Any], frozenset[str]]]:
        """By place: the kind of a stage's numbers, and those of them that are tensors."""
        return {place: (kind, on_device) for place, kind, on_device in self.parameters}

    @property
    def kinds(self) -> dict[str, type[Any]]:
        """The NamedTuples of the stages' numbers, under the names that the source calls."""
        return {f"P_{place}": kind for place, kind, _ in self.parameters}

    @property
    def writer(self) -> Source:
        from offcorr.kernels.source import Source  # needs triton

        return Source(self)


DIVIDES_BY_COUNT = {
    "token-mean": False,
    "seq-mean-token-mean": True,
    "seq-mean-token-sum": False,
    "seq-mean-token-sum-norm": False,
}
"""Whether an aggregation divides a row's weight by its count of tokens; nothing else in it depends on the row."""


def compose(
    loss_fn: Correction, batch: Batch, *, z_on_device: bool, row_factor: bool = False, split: bool = False
) -> Composition:
    """The composition of a resolved correction for batches like this one.

    Args:
        z_on_device: Z is a tensor.
        row_factor: weights have a factor of each sequence.
        split: several programs share a row.

    Raises:
        NotFused: a stage does something that is no pointwise part.
    """
    carried = []
    for place, stage in loss_fn.stages.items():
        name = place.replace(".", "_")
        if isinstance(stage, Ratio):
            _refuse_own(stage, Ratio, "__call__")
            parts = (("read", stage.read), ("slope", stage.slope))
            carried.append(Carried(name, stage.mismatch, stage.span, stage.measure, parts, LOG_LIMIT))
        elif isinstance(stage, Multiplier):
            _refuse_own(stage, Multiplier, "__call__", "inputs")
            bounded = type(stage).truncated is _Bounded.truncated
            if not bounded:
                _refuse_own(stage, Multiplier, "truncated")
            carried.append(
                Carried(
                    name,
                    _pair(stage, batch),
                    stage.span,
                    stage.measure,
                    (("rule", stage.rule),),
                    stage.value_limit,
                    bounded,
                    stage.drops_as == "vetoed",
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
    given = {"z": z_on_device, "row_factor": row_factor, "split": split}
    fields |= {name for name, there in given.items() if there}
    return Composition(
        tuple(carried),
        loss_fn.ratio.mismatch if loss_fn.ratio else "staleness",
        loss_fn.gate.surrogate,
        loss_fn.gate.detached,
        float(loss_fn.gate.log_limit),
        _parameters(loss_fn, batch.logp.device),
        ("valid" if loss_fn.count_rejected else "kept") if DIVIDES_BY_COUNT[loss_fn.aggregate] else "",
        "" if loss_fn.count_rejected else _UNITS[AGGREGATIONS[loss_fn.aggregate].unit],
        frozenset(fields),
    )


_UNITS: dict[str, Literal["kept", "rows"]] = {"tokens": "kept", "sequences": "rows"}


def _parameters(loss_fn: Correction, device: torch.device) -> tuple[tuple[str, type[Any], frozenset[str]], ...]:
    known = _params(loss_fn)
    for _, params in known:
        _refuse_odd_numbers(params)
    return tuple(
        (
            place.replace(".", "_"),
            type(params),
            frozenset(name for name, value in params._asdict().items() if _on(device, value)),
        )
        for place, params in known
    )


def numbers(loss_fn: Correction, device: torch.device) -> list[tuple[Any, ...]]:
    """Every stage's parameters, in the order of the kernel's arguments; as floats, since an int is specialised on."""
    return [
        type(params)(*(value if _on(device, value) else float(value) for value in params))
        for _, params in _params(loss_fn)
    ]


def _params(loss_fn: Correction) -> list[tuple[str, Any]]:
    known = ((place, stage.params) for place, stage in sorted(loss_fn.stages.items()))
    return [(place, params) for place, params in known if params]


def _refuse_odd_numbers(params: Any) -> None:
    """The kernel takes numbers by name, and reads one of a tensor."""
    if not hasattr(params, "_asdict"):
        raise NotFused(f"params is a {type(params).__name__}, expected a NamedTuple")
    for name, value in params._asdict().items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise NotFused(f"{type(params).__name__}.{name} has shape {tuple(value.shape)}, expected a number")
        if not isinstance(value, Real | Tensor):
            raise NotFused(f"{type(params).__name__}.{name} is {value!r}, expected a number")


def _on(device: torch.device, value: Any) -> bool:
    """Whether the kernel reads a number there, so that nobody waits for it."""
    return isinstance(value, Tensor) and value.device == device


def _pair(stage: Multiplier, batch: Batch) -> Mismatch:
    try:
        return stage.pair(SimpleNamespace(batch=batch))  # type: ignore[arg-type]
    except AttributeError as missing:
        raise NotFused(f"{type(stage).__name__}.pair looks at more than the batch: {missing}") from None


def _refuse_own(stage: Stage, base: type, *names: str) -> None:
    for name in names:
        if getattr(type(stage), name) is not getattr(base, name):
            raise NotFused(f"{type(stage).__name__} has a {name}() of its own")
