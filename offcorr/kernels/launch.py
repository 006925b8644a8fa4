"""A launch of the correction kernel: its buffers, its arguments, and what is read from it afterwards.

Nothing here waits for the device.  A few long rows are split, so that they fill a GPU; each part has to know what came
before it, which is a launch more.  So is dividing by what was kept (``count_rejected=False``), which is known when all
rows have been read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from offcorr.batch import Batch
from offcorr.kernels import composition as composing
from offcorr.kernels import correction as kernels
from offcorr.kernels import metrics, spans
from offcorr.kernels.composition import Composition, composition
from offcorr.kernels.dispatch import Fused
from offcorr.kernels.rebind import NotFused
from offcorr.metrics import LOSS, MISMATCH, Histogram, Mean, Metric
from offcorr.stages import reference
from offcorr.stages.aggregate import AGGREGATIONS, row_constant
from offcorr.stages.base import Plan, Spec

BLOCK, WARPS = 512, 4
"""Tokens a program looks at together (fewer where the rows are shorter), and the warps that do."""
REGISTERS, CROWDED, MANY = 168, 4, 3
"""Registers per thread; without a limit ptxas spills.  All 255 with turns, running spans, split rows, more than CROWDED
stages, or a gate of more than MANY inputs."""
FILL, PART = 512, 4096
"""Rows of more than two parts are split, a part is PART tokens or more, until there are FILL programs."""
ALONE = 256
"""Up to so many rows the last program merges them all; of more it merges groups, each merged by its own last."""


def prepare(plan: Plan, batch: Batch, denominator: float | Tensor | None) -> Launch:
    """Everything that is known before a launch.

    Raises:
        NotFused: Triton cannot run the plan.
    """
    if denominator is not None and not plan.count_rejected:
        raise NotFused(f"{plan.aggregate} over kept tokens with a given denominator is not in the kernel")
    z = _denominator(plan, batch, denominator)
    composed = composition(plan, batch, _parts(batch) > 1)
    call = Launch(plan, batch, composed, z)
    if call.part_length > metrics.LONGEST:
        raise NotFused(f"rows of up to {call.part_length} tokens for one program, expected at most {metrics.LONGEST}")
    return call


def _parts(batch: Batch) -> int:
    """The number of programs that should share a row, by the mean row."""
    rows, tokens = batch.sequences, batch.logp.numel()
    if tokens <= 2 * PART * rows:
        return 1
    longest = _longest(batch)
    most = min(-(-FILL // rows), _power_of_two(longest, BLOCK))  # a program looks at all the parts of its row at once
    return min(most, -(-longest // PART))


def _longest(batch: Batch) -> int:
    """No row is longer; what a packed batch may have at most, where it does not say."""
    if batch.cu_seqlens is None:
        return batch.logp.shape[1]
    return batch.logp.numel() if batch.max_seqlen is None else batch.max_seqlen


def _denominator(plan: Plan, batch: Batch, denominator: float | Tensor | None) -> float | Tensor:
    """Z where it is known before the kernel runs, else 1."""
    unit = AGGREGATIONS[plan.aggregate].unit
    if not plan.count_rejected or unit == "none":
        return 1.0
    if denominator is not None:
        device = denominator.device if isinstance(denominator, Tensor) else torch.device("cpu")
        if device.type == "cpu":
            return float(denominator)
        if device != batch.logp.device:
            raise ValueError(f"denominator is on {device}, expected {batch.logp.device}, where logp is, or the CPU")
        return denominator
    return float(max(batch.sequences, 1)) if unit == "sequences" else batch.mask.sum()


def _power_of_two(n: int, most: int) -> int:
    return min(most, max(16, 1 << (n - 1).bit_length()))


class Launch:
    """One call of the kernel; calling it launches."""

    def __init__(self, plan: Plan, batch: Batch, composed: Composition, z: float | Tensor) -> None:
        self.plan, self.batch, self.composition, self.z = plan, batch, composed, z
        longest = _longest(batch)
        self.block = _power_of_two(longest, BLOCK)
        self.parts = _parts(batch) if composed.split else 1
        """Programs that share a row."""
        self.part_length = -(-longest // (self.parts * self.block)) * self.block
        """Positions of a row that one of them looks at: whole blocks."""
        self.entries = batch.sequences * self.parts
        """Programs, each of which leaves an entry of numbers."""
        self.width = batch.logp.shape[1] if batch.cu_seqlens is None else 0

    def __call__(self) -> Fused:
        buffers, layout = self.buffers(), self.layout
        with _on(self.batch.logp.device):
            self.launch(buffers)
            if self.composition.unit:
                self.divide_by_kept(buffers)
        vectors = zip(layout.metrics.items(), buffers.merged.split(layout.sizes), strict=True)
        data = {name: metric.kind(vector, metric.outputs) for (name, metric), vector in vectors}
        return Fused(buffers.loss, buffers.coefficient, data)

    def launch(self, buffers: kernels.Buffers) -> None:
        arguments = self.arguments(buffers)
        grid = (self.entries, 1, 1)
        constants = {"PLAN": self.composition, "BLOCK": self.block, **self.options}
        try:
            for kernel in self.functions:
                kernel[grid](*arguments, **constants)
        except BaseException as error:
            _tickets.cache_clear()  # the interpreter may have stopped half-way
            if not isinstance(error, TritonError):
                raise
            cause = _first_cause(error)
            raise composing.refuse(self.composition, f"Triton cannot compile it: {cause}") from error

    def divide_by_kept(self, buffers: kernels.Buffers) -> None:
        metrics.divide_by_kept[self.entries,](
            buffers.coefficient,
            buffers.partials,
            buffers.found_z,
            _plain(self.batch.cu_seqlens),
            self.width,
            self.parts,
            self.part_length,
            SIZE=self.composition.entry_size,
            DIVIDES=self.composition.divides_by == "kept",
            BLOCK=self.block,
        )

    @property
    def functions(self) -> tuple[Any, ...]:
        """In the order of their launches."""
        return (kernels.summary, kernels.correction) if self.composition.split else (kernels.correction,)

    @property
    def layout(self) -> Layout:
        return _layout(self.composition.series, self.batch.logp.device)

    @property
    def group(self) -> int:
        """Entries that are merged before the last program merges what is left: a row's parts, or as many as groups."""
        if self.composition.split:
            return self.parts
        return 1 if self.entries <= ALONE else 1 << (math.isqrt(self.entries - 1).bit_length())

    @property
    def groups(self) -> int:
        return -(-self.entries // self.group)

    @property
    def options(self) -> dict[str, int]:
        """For the compiler."""
        composed = self.composition
        carries = any(stage.kind in ("turn", "running", "nearby") for stage in composed.stages)
        gate = composed.gate.rule
        crowded = composed.split or carries or len(composed.stages) > CROWDED or len(gate.before + gate.after) > MANY
        registers = 255 if crowded else REGISTERS
        return {"num_warps": WARPS} | ({} if torch.version.hip else {"maxnreg": registers})  # ROCm has no such option

    def buffers(self) -> kernels.Buffers:
        """Everything that the kernel writes to."""
        composed, entries, groups, device = self.composition, self.entries, self.groups, self.batch.logp.device
        tokens = self.batch.logp.numel()
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        joins, turns = composed.joins_runs, range(composed.turns)
        return kernels.Buffers(
            floats(self.batch.logp.shape),
            floats(entries + (groups if self.group > 1 else 0), composed.entry_size),
            torch.empty(self.layout.size, dtype=torch.float64, device=device),
            floats(()),
            floats(()) if composed.unit else None,
            _tickets_on(device, 1 + groups),
            self.layout.edges,
            self.layout.places,
            floats(composed.summary_size, entries, dtype=torch.float64) if composed.split else None,
            torch.empty(tokens, dtype=torch.int64, device=device) if joins else None,
            floats(tokens) if joins else None,
            tuple([floats(tokens) for _ in turns]) if joins else None,
            tuple([floats(tokens) for _ in turns]),
            tuple([floats(tokens // 16 + entries + 1, dtype=torch.float64) for _ in range(composed.nearby)]),
        )

    def arguments(self, buffers: kernels.Buffers) -> tuple[Any, ...]:
        """In the order of ``kernels.correction``."""
        plan, batch, z = self.plan, self.batch, self.z
        mask = batch.mask if batch.mask.dtype == torch.bool else batch.mask.bool()
        fields = kernels.Fields(
            _plain(batch.logp),
            _plain(batch.old_logp),
            _plain(batch.rollout_logp),
            _plain(batch.advantages),
            _plain(batch.weight),
            _plain(batch.rewards) if self.composition.asks_reward else None,
            _plain(batch.entropy) if self.composition.asks_entropy else None,
            _plain(mask).view(torch.uint8),
            _plain(batch.turn_ids) if self.composition.turns else None,
            _plain(batch.cu_seqlens),
            z if isinstance(z, Tensor) else None,
            tuple([_plain(batch.repack(reference.carried(spec, batch.tokens))) for spec in self.by_torch]),
        )
        return (
            fields,
            buffers,
            tuple([composing.numbers(spec.params, batch.logp.device) for spec in composing.specs_of(plan)]),
            self.row_weight if isinstance(z, Tensor) else self.row_weight / z,
            self.width,
            batch.sequences,
            self.parts,
            self.part_length,
            self.group,
        )

    @property
    def by_torch(self) -> list[Spec]:
        """The stages whose span torch computes before the launch."""
        specs = composing.specs_of(self.plan)
        return [spec for spec, stage in zip(specs, self.composition.stages, strict=False) if stage.kind == spans.TORCH]

    @property
    def row_weight(self) -> float:
        """The weight of a row's sum, but for any division by its count.

        The padded width of a packed batch is looked up on the device, but only where it is needed and not known.
        """
        plan, batch = self.plan, self.batch
        if not AGGREGATIONS[plan.aggregate].constant_length:
            return 1.0
        width = _longest(batch)
        if plan.max_length is None and batch.cu_seqlens is not None and batch.max_seqlen is None:
            width = int(batch.cu_seqlens.diff().max())
        return row_constant(plan.aggregate, plan.max_length, width)


def _plain(field: Tensor | None) -> Any:
    return None if field is None else field.detach().contiguous()


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _first_cause(error: BaseException) -> BaseException:
    """The error of the innermost function: those around it only say where they call it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# -- tables --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the numbers that programs leave belong in the vector of the metrics."""

    edges: Tensor  # of the histogram's bins
    places: Tensor
    metrics: dict[str, Metric]  # in their order in the vector
    sizes: list[int]
    size: int


@functools.cache
def _layout(series: tuple[tuple[int, int], ...], device: torch.device) -> Layout:
    """``places``: int32, [WIDE, PLACES] of the loss, and two of every series, its numbers and its bins."""
    prefixes = [f"offcorr/{composing.MISMATCHES[pair]}/" for pair in series]
    known = {prefix + metric.name: metric for prefix in prefixes for metric in MISMATCH}
    known |= {f"offcorr/loss/{metric.name}": metric for metric in LOSS}
    sizes = [metric.kind.size for metric in known.values()]
    at = dict(zip(known, itertools.accumulate(sizes, initial=0), strict=False))

    def table(columns: tuple[str, ...], places: dict[str, list[int]]) -> list[list[int]]:
        rows = [places.get(column, []) for column in columns]
        rows += [[]] * (int(metrics.WIDE) - len(rows))
        return [[*row, *([-1] * (int(metrics.PLACES) - len(row)))] for row in rows]

    loss = {metric.name: at[f"offcorr/loss/{metric.name}"] for metric in LOSS}
    places = {name: [loss[name]] for name in metrics.LOSS_COLUMNS if name in loss}
    places |= {"weight": [loss["weight_mean"]], "zero": [loss["coefficient_zero"]]}
    changed, after, before = ("dropped", "damped", "amplified"), loss["after"], loss["before"]
    against = loss["multiplier_vs_ratio"]
    places |= {
        "advantaged": [*(loss[name] + 1 for name in changed), after + 2, before + 2],
        "c": [after, against],
        "c_squared": [after + 1],
        "ratio": [before, against + 1],
        "ratio_squared": [before + 1],
    }
    over_valid = [m.name for m in LOSS if m.kind is Mean and m.name not in (*changed, "multiplier_vs_ratio", "skipped")]
    places["valid"] = [loss[name] + 1 for name in over_valid]
    places |= {"none": [loss["skipped"]], "all": [loss["skipped"] + 1]}
    tables = [table((*metrics.LOSS_COLUMNS, "none", "all"), places)]
    for prefix in prefixes:
        mismatch = {metric.name: at[prefix + metric.name] for metric in MISMATCH}
        token, seq = mismatch["token"], mismatch["seq"]
        places = {
            "abs": [mismatch["abs_mean"]],
            "seen": [*(mismatch[name] + 1 for name in ("abs_mean", "k1", "k3")), token + 3],
            "k1": [mismatch["k1"]],
            "k3": [mismatch["k3"]],
            "first_token": [mismatch["first_token"]],
            "first_seen": [mismatch["first_token"] + 1],
            "rows": [seq + 3, mismatch["ppl_ratio"] + 1],
            "bottom": [mismatch["extremes"] + 1],
            "top": [mismatch["extremes"], token],
            **{name: [token + i] for i, name in enumerate(("first", "second"), 1)},
            **{name: [seq + i] for i, name in enumerate(("seq_top", "seq_first", "seq_second"))},
            "ppl_first": [mismatch["ppl_ratio"]],
        }
        tables.append(table(metrics.MISMATCH_COLUMNS[:-1], places))
        tables.append(table(("histogram",), {"histogram": [mismatch["abs_histogram"]]}))  # where its bins begin
    table_of_all = torch.tensor(tables, dtype=torch.int32, device=device)
    return Layout(_edges(device), table_of_all, known, sizes, sum(sizes))


def _edges(device: torch.device) -> Tensor:
    """The histogram's edges, rounded down: a float32 lies above the exact edge where it lies above this one."""
    exact = torch.tensor(Histogram.edges(), dtype=torch.float64)
    edges = exact.float()
    below = torch.nextafter(edges, torch.tensor(-math.inf))
    return torch.where(edges.double() > exact, below, edges).to(device)


def _tickets_on(device: torch.device, count: int) -> Tensor:
    """[count or more] zeros that the kernel leaves as zeros: which programs have come to an end.

    A graph has its own, since it may run beside what its stream does later.
    """
    if device.type != "cuda":
        return _tickets(device, 0, count)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _tickets(device, torch.cuda.current_stream(device).cuda_stream, 1 << count.bit_length())


@functools.cache
def _tickets(device: torch.device, stream: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
