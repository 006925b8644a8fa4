"""A correction in one launch: a composed kernel over the rows, whose last program merges what all of them metered.

A few long rows are split, so that they fill a GPU; each part has to know what came before it, which is a launch more.
So is dividing by what was kept (``count_rejected=False``), which is known when all rows have been read.

``run`` gives what ``Correction`` needs of a batch, or None where the reference has to do it; ``backend`` says which it
is and why.  The torch reference stays the definition; float64 always runs there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.kernels.compose import Composition, NotFused, compose, numbers
from offcorr.kernels.rebind import for_triton
from offcorr.metrics import KINDS, LOSS, MISMATCH, Histogram
from offcorr.stages.aggregate import AGGREGATIONS, constant_length
from offcorr.stages.gates import Gate
from offcorr.stages.multipliers import Multiplier

if TYPE_CHECKING:
    from offcorr.correction import Correction

Choice = Literal["auto", "reference", "triton"]
BLOCK, WARPS = 512, 4
"""Tokens a program looks at together (fewer where the rows are shorter), and the warps that do."""
REGISTERS, CROWDED = 168, 4
"""What a thread may have: left alone, the assembler spills some.  With more stages than CROWDED it may have all."""
FILL, PART = 512, 4096
"""Rows of more than two parts are split, a part is PART tokens or more, until there are FILL programs."""
ALONE = 256
"""Up to so many rows the last program merges them all; of more it merges groups, each merged by its own last."""

_choice: contextvars.ContextVar[Choice] = contextvars.ContextVar("offcorr_backend", default="auto")


_refused: dict[Composition, str] = {}
"""What Triton cannot run and why, so that it is asked once only."""


class Fused(NamedTuple):
    """What the kernel gives: a scalar, dL/dlogp in the layout of ``logp``, the metrics' accumulators."""

    loss: Tensor
    coefficient: Tensor
    metrics: dict[str, Tensor]


@contextlib.contextmanager
def use(choice: Choice) -> Iterator[None]:
    """Which implementation corrections run on: "auto" (Triton on CUDA and ROCm tensors), "reference" or "triton".

    On a CPU ``torch.compile`` of the reference takes .73 of its 35 ms for 64 x 2048 tokens, after seconds of compiling
    for each width (benchmarks/results/cpu_correction.md); a model's step takes far longer, so "auto" leaves it alone.

    >>> with use("reference"):
    ...     chosen()
    'reference'
    """
    if choice not in get_args(Choice):
        raise ValueError(f"backend is {choice!r}, expected one of {list(get_args(Choice))}")
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def chosen() -> Choice:
    return _choice.get()


def backend(loss_fn: Correction, batch: Batch) -> str:
    """ "triton", or "reference: " and why, for this correction on a batch like this one."""
    why = _why_reference(batch)
    if why is None:
        try:
            _prepare(loss_fn.resolve(loss_fn.statistics(batch)), batch, None)
            return "triton"
        except NotFused as reason:
            why = str(reason)
    return f"reference: {why}"


def run(loss_fn: Correction, batch: Batch, denominator: float | Tensor | None) -> Fused | None:
    """A resolved correction by the kernel, no host synchronisation; None: the reference has to run."""
    if _why_reference(batch) is not None:
        return None
    try:
        fused = _prepare(loss_fn, batch, denominator)()
    except NotFused as reason:
        _say_once(f"{loss_fn.method!r} runs on the torch reference: {reason}")
        return None
    if loss_fn.strict and fused.metrics["offcorr/loss/nonfinite"].item():
        return None  # the reference says where
    return fused


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _why_reference(batch: Batch) -> str | None:
    """Why this batch is none for the kernel, whatever the correction."""
    if chosen() == "reference":
        return "it was asked for"
    if chosen() == "auto" and not batch.logp.is_cuda:
        return f"logp is on {batch.logp.device}"
    if torch.promote_types(batch.logp.dtype, torch.float32) != torch.float32:
        return f"logp is {batch.logp.dtype}"
    if not batch.logp.numel():
        return "the batch is empty"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


# -- one call ------------------------------------------------------------------------------------------------


def _prepare(loss_fn: Correction, batch: Batch, denominator: float | Tensor | None) -> _Call:
    rewards, row_factor = _rewards(loss_fn.gate, batch), _row_factor(loss_fn, batch)
    z = _denominator(loss_fn, batch, denominator)
    composition = compose(
        loss_fn,
        batch,
        z_on_device=isinstance(z, Tensor),
        row_factor=row_factor is not None,
        split=_parts(batch) > 1,
    )
    if composition in _refused:
        raise NotFused(_refused[composition])
    return _Call(loss_fn, batch, composition, kernels_of(composition), z, rewards, row_factor)


def _parts(batch: Batch) -> int:
    """How many programs should share a row, by the mean row."""
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


def _row_factor(loss_fn: Correction, batch: Batch) -> Tensor | None:
    """[S], the product of what weights multiply whole sequences with; None: 1."""
    factors = [s.row_factor(batch) for s in loss_fn.stages.values() if isinstance(s, Multiplier)]
    return functools.reduce(_product, factors, None)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a * b


def _rewards(gate: Gate, batch: Batch) -> Tensor | None:
    """[S] rewards, as a gate sees them that knows something of the global batch (``Gate.inputs``)."""
    if type(gate).inputs is Gate.inputs:
        return batch.rewards
    given = {} if batch.rewards is None else {"reward": batch.rewards.detach().float()[:, None]}
    try:
        seen = gate.inputs(_Given(batch), dict(given))  # type: ignore[arg-type]
    except (AttributeError, KeyError) as missing:
        raise NotFused(f"{type(gate).__name__}.inputs looks at {missing}, which is per token") from None
    changed = {name for name in seen if seen[name] is not given.get(name)}
    if changed - {"reward"} or (changed and seen["reward"].shape != given["reward"].shape):
        raise NotFused(f"{type(gate).__name__}.inputs gives {sorted(changed)} token by token")
    return seen["reward"][:, 0] if given else None


class _Given(NamedTuple):
    """The part of ``Tokens`` that is there without any work."""

    batch: Batch


def _denominator(loss_fn: Correction, batch: Batch, denominator: float | Tensor | None) -> float | Tensor:
    """Z where it is known before the kernel runs, else 1."""
    if not loss_fn.count_rejected:
        return 1.0
    if denominator is not None:
        device = denominator.device if isinstance(denominator, Tensor) else torch.device("cpu")
        if device.type != "cpu" and device != batch.logp.device:
            raise ValueError(f"denominator is on {device}, expected {batch.logp.device}, where logp is, or the CPU")
        return float(denominator) if device.type == "cpu" else denominator
    if AGGREGATIONS[loss_fn.aggregate].unit == "sequences":
        return float(max(batch.sequences, 1))
    return batch.mask.sum()


class Outputs(NamedTuple):
    """What the kernel writes, in the order of its arguments."""

    coefficient: Tensor
    partials: Tensor  # an entry of every program, then one of every group
    merged: Tensor  # float64, the metrics
    loss: Tensor
    found_z: Tensor | None  # where the kernel has to find it
    tickets: Tensor


class _Call(NamedTuple):
    """Everything that a launch needs; calling it launches."""

    loss_fn: Correction
    batch: Batch
    composition: Composition
    kernels: Kernels
    z: float | Tensor
    rewards: Tensor | None
    row_factor: Tensor | None = None

    def __call__(self) -> Fused:
        layout, outputs = self.layout, self.outputs()
        with _on(self.batch.logp.device):
            self.launch(outputs)
            if self.composition.unit:
                self.divide_by_kept(outputs)
        sizes = [KINDS[name].kind.size for name in layout.names]
        metrics = dict(zip(layout.names, outputs.merged.split(sizes), strict=True))
        return Fused(outputs.loss, outputs.coefficient, metrics)

    def launch(self, outputs: Outputs) -> None:
        from triton.errors import TritonError

        arguments = (*self.arguments(outputs), *numbers(self.loss_fn, self.batch.logp.device))
        try:
            for kernel in self.kernels.launches:
                kernel[self.entries,](*arguments, BLOCK=self.block, **self.options)
        except BaseException as error:
            _tickets.cache_clear()  # the interpreter may have stopped half-way
            if not isinstance(error, TritonError):
                raise
            raise _refuse(self.composition, f"Triton cannot compile it: {_first_cause(error)}") from error

    def divide_by_kept(self, outputs: Outputs) -> None:
        from offcorr.kernels.metrics import divide_by_kept

        divide_by_kept[self.entries,](
            outputs.coefficient,
            outputs.partials,
            outputs.found_z,
            self.cu_seqlens,
            self.width,
            self.parts,
            self.part_length,
            SERIES=len(self.composition.series),
            DIVIDES=self.composition.divides_by == "kept",
            BLOCK=self.block,
        )

    @property
    def layout(self) -> Layout:
        return _layout(tuple(self.composition.series), self.batch.logp.device)

    def outputs(self) -> Outputs:
        """Buffers for what the kernel writes."""
        device = self.batch.logp.device
        slots = self.entries + (self.groups if self.group > 1 else 0)
        return Outputs(
            torch.empty(self.batch.logp.shape, dtype=torch.float32, device=device),
            torch.empty(slots, self.layout.entry, dtype=torch.float32, device=device),
            torch.empty(self.layout.size, dtype=torch.float64, device=device),
            torch.empty((), dtype=torch.float32, device=device),
            torch.empty((), dtype=torch.float32, device=device) if self.composition.unit else None,
            _tickets_on(device, 1 + self.groups),
        )

    @property
    def entries(self) -> int:
        """Programs, each of which leaves an entry of numbers."""
        return self.batch.sequences * self.parts

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
    def width(self) -> int:
        batch = self.batch
        return batch.logp.shape[1] if batch.cu_seqlens is None else 0

    @property
    def block(self) -> int:
        return _power_of_two(_longest(self.batch), BLOCK)

    @property
    def options(self) -> dict[str, int]:
        """For the compiler."""
        registers = REGISTERS if len(self.composition.carried) <= CROWDED else 255
        return {"num_warps": WARPS} | ({} if torch.version.hip else {"maxnreg": registers})  # ROCm has no such option

    @property
    def parts(self) -> int:
        """Programs that share a row."""
        return _parts(self.batch) if self.composition.split else 1

    @property
    def part_length(self) -> int:
        """Positions of a row that one of them looks at: whole blocks."""
        return -(-_longest(self.batch) // (self.parts * self.block)) * self.block

    @property
    def cu_seqlens(self) -> Tensor | None:
        ends = self.batch.cu_seqlens
        return None if ends is None else ends.contiguous()

    def arguments(self, outputs: Outputs) -> list[Any]:
        """In the order of ``source.ARGUMENTS``."""
        batch, tokens = self.batch, self.batch.logp.numel()
        device, turns = batch.logp.device, self.kernels.turns
        ids = totals = counts = means = summary = turn_ids = None
        if turns:
            means = torch.empty(turns, tokens, dtype=torch.float32, device=device)
            turn_ids = None if batch.turn_ids is None else batch.turn_ids.contiguous()
        if self.kernels.joins_runs:
            ids = torch.empty(tokens, dtype=torch.int64, device=device)
            totals = torch.empty(turns, tokens, dtype=torch.float32, device=device)
            counts = torch.empty(tokens, dtype=torch.float32, device=device)
        if self.composition.split:
            summary = torch.empty(self.kernels.summary_size, self.entries, dtype=torch.float32, device=device)
        fields = (batch.logp, batch.old_logp, batch.rollout_logp, batch.advantages)
        mask = batch.mask if batch.mask.dtype == torch.bool else batch.mask.bool()
        return [
            *(None if x is None else x.detach().contiguous() for x in fields),
            mask.contiguous().view(torch.uint8),
            None if self.rewards is None else self.rewards.contiguous(),
            turn_ids,
            ids,
            totals,
            counts,
            means,
            self.cu_seqlens,
            None if self.row_factor is None else self.row_factor.contiguous(),
            summary,
            _edges(device),
            self.layout.places,
            *outputs,
            self.row_weight,
            self.z,
            tokens,
            self.width,
            batch.sequences,
            self.parts,
            self.part_length,
            self.group,
        ]

    @property
    def row_weight(self) -> float:
        """The weight of a row with one token; the kernel divides by the count where the aggregation does."""
        name = self.loss_fn.aggregate
        return _weight_of_one(name, constant_length(name, self.loss_fn.max_length, self.longest))

    @property
    def longest(self) -> int:
        """The padded width.  Packed, it is looked up on the device, but only where it is needed and not known."""
        batch = self.batch
        if batch.cu_seqlens is None or batch.max_seqlen is not None:
            return _longest(batch)
        needed = AGGREGATIONS[self.loss_fn.aggregate].constant_length and self.loss_fn.max_length is None
        return int(batch.cu_seqlens.diff().max()) if needed else 1


@functools.cache
def _weight_of_one(aggregate: str, length: float) -> float:
    return float(AGGREGATIONS[aggregate].row_weight(torch.ones(1), length))


def _power_of_two(n: int, most: int) -> int:
    return min(most, max(16, 1 << (n - 1).bit_length()))


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# -- tables --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the numbers that programs leave belong in the vector of the metrics."""

    places: Tensor  # int32, [WIDE, PLACES] of the loss, and two of every series: its numbers, and its bins
    names: list[str]  # of the metrics, in their order in the vector
    entry: int  # numbers of one
    size: int


@functools.cache
def _layout(series: tuple[str, ...], device: torch.device) -> Layout:
    from offcorr.kernels import kernel_metrics as metering

    metrics = [(f"offcorr/{of}/", metric) for of in series for metric in MISMATCH]
    metrics += [("offcorr/loss/", metric) for metric in LOSS]
    at, size = {}, 0
    for prefix, metric in metrics:
        at[prefix + metric.name] = size
        size += metric.kind.size

    def table(columns: tuple[str, ...], places: dict[str, list[int]]) -> list[list[int]]:
        rows = [places.get(column, []) for column in columns]
        rows += [[]] * (int(metering.WIDE) - len(rows))
        return [[*row, *([-1] * (int(metering.PLACES) - len(row)))] for row in rows]

    loss = {metric.name: at[f"offcorr/loss/{metric.name}"] for metric in LOSS}
    places = {name: [loss[name]] for name in metering.LOSS_COLUMNS if name in loss}
    places |= {"weight": [loss["weight_mean"]], "zero": [loss["coefficient_zero"]]}
    places["valid"] = [loss[m.name] + 1 for m in LOSS if m.kind.size == 2 and m.name != "skipped"]
    places |= {"none": [loss["skipped"]], "all": [loss["skipped"] + 1]}
    tables = [table((*metering.LOSS_COLUMNS, "none", "all"), places)]
    for of in series:
        mismatch = {metric.name: at[f"offcorr/{of}/{metric.name}"] for metric in MISMATCH}
        token, seq = mismatch["token"], mismatch["seq"]
        places = {
            "abs": [mismatch["abs_mean"]],
            "seen": [*(mismatch[name] + 1 for name in ("abs_mean", "k1", "k3")), token + 3],
            "k1": [mismatch["k1"]],
            "k3": [mismatch["k3"]],
            "first_token": [mismatch["first_token"]],
            "first_seen": [mismatch["first_token"] + 1],
            "rows": [seq + 3, mismatch["ppl_ratio"] + 1],
            "max": [mismatch["abs_max"]],
            **{name: [token + i] for i, name in enumerate(("top", "first", "second"))},
            **{name: [seq + i] for i, name in enumerate(("seq_top", "seq_first", "seq_second"))},
            "ppl_first": [mismatch["ppl_ratio"]],
        }
        tables.append(table(metering.MISMATCH_COLUMNS[:-1], places))
        tables.append(table(("histogram",), {"histogram": [mismatch["abs_histogram"]]}))  # where its bins begin
    table_of_all = torch.tensor(tables, dtype=torch.int32, device=device)
    return Layout(table_of_all, list(at), metering.entry_size(len(series)), size)


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


@functools.cache
def _edges(device: torch.device) -> Tensor:
    """The histogram's edges, rounded down: a float32 lies above the exact edge where it lies above this one."""
    exact = torch.tensor(Histogram.edges(), dtype=torch.float64)
    edges = exact.float()
    below = torch.nextafter(edges, torch.tensor(-math.inf))
    return torch.where(edges.double() > exact, below, edges).to(device)


# -- from source to kernel -----------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """A composition's kernels, not yet compiled, and what their buffers depend on."""

    launches: tuple[Any, ...]  # in their order, the correction itself last
    turns: int  # stages that look at turns
    joins_runs: bool  # of one turn
    summary_size: int


@functools.cache
def kernels_of(composition: Composition) -> Kernels:
    """The kernels of a composition, their source written.

    Raises:
        NotFused: a pointwise part cannot run in Triton, for instance for want of a source.
    """
    parts = {}
    for name, part in composition.functions.items():
        try:
            parts[name] = for_triton(part)
        except (OSError, AttributeError, SyntaxError, TypeError, ValueError) as error:
            called = getattr(part, "__qualname__", part)
            raise _refuse(composition, f"{called} cannot run in Triton ({error})") from None
    writer = composition.writer
    path = _write(writer.text())
    spec = importlib.util.spec_from_file_location(f"offcorr_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(parts | composition.kinds)
    spec.loader.exec_module(module)
    launches = (module.summary, module.correction) if composition.split else (module.correction,)
    return Kernels(launches, len(writer.turns), writer.joins_runs, writer.summary_size)


def _refuse(composition: Composition, why: str) -> NotFused:
    _refused[composition] = why
    return NotFused(why)


def _first_cause(error: BaseException) -> BaseException:
    """What an error of the innermost function says: those around it only say where they call it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _write(source: str) -> Path:
    """The file that holds ``source``; Triton reads a kernel from its file."""
    name = f"correction_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offcorr"
    try:
        root.mkdir(parents=True, exist_ok=True)
        return _place(root / name, source)
    except OSError:
        return _place(Path(_private_folder()) / name, source)


@functools.cache
def _private_folder() -> str:
    return tempfile.mkdtemp(prefix="offcorr_")


def _place(path: Path, source: str) -> Path:
    """Written whole or not at all: several processes may do this at once."""
    if not path.is_file() or path.read_text() != source:
        handle, written = tempfile.mkstemp(dir=path.parent, suffix=".py")
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(written, path)
    return path
