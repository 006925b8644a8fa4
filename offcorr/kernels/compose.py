"""What a kernel is composed of: the stations' own pointwise parts around the hand-written spans.

Nothing of a station is written twice: its pointwise parts are called, rebound to ``triton.language``, with the
inputs their arguments name; its numbers are run-time arguments.  What the text depends on is which functions, spans
and policies a composition uses and which fields a batch has, never a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from offcorr.batch import LOG_LIMIT, Batch
from offcorr.multipliers import Multiplier
from offcorr.ratios import Ratio
from offcorr.shapes import Pair
from offcorr.station import Station
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
    def split(self) -> bool:
        """Whether several programs share a row."""
        return "split" in self.fields

    @property
    def summary_size(self) -> int:
        """How many numbers the first launch leaves of each part of a row."""
        return 1 + sum(len(slots) for *_, slots in self._writer.summary_slots())

    @property
    def source(self) -> str:
        return self._writer.text()

    @property
    def _writer(self) -> Any:
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
        split: several programs should share a row; they cannot where a station looks at turns.

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
    given = {"z": z_on_device, "row_factor": row_factor, "split": split and all(c.span != "turn" for c in carried)}
    fields |= {name for name, there in given.items() if there}
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
