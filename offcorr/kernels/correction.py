"""A correction in two launches: one composed kernel over the rows, one that merges what the rows metered.

A few long rows are split, so that they fill a GPU; each part has to know what came before it, which is a launch more.

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

from offcorr.aggregate import AGGREGATIONS, row_weights, total
from offcorr.batch import Batch
from offcorr.gates import Gate
from offcorr.kernels.compose import Composition, NotFused, compose, numbers
from offcorr.kernels.rebind import for_triton
from offcorr.metrics import KINDS, LOSS, MISMATCH, Histogram
from offcorr.multipliers import Multiplier

if TYPE_CHECKING:
    from offcorr.correction import Correction

Choice = Literal["auto", "reference", "triton"]
BLOCK, WARPS = 512, 4
"""Tokens a program looks at together (fewer where the rows are shorter), and the warps that do."""
SPLIT_WARPS, SPLIT_REGISTERS = 8, 128
"""The same where a row is split, and the registers a thread may have: left alone, the assembler spills some."""
FILL, PART = 512, 4096
"""Rows of more than two parts are split, a part is PART tokens or more, until there are FILL programs."""
MERGED_BLOCK = 256
"""Rows that a merging program looks at together."""

_choice: contextvars.ContextVar[Choice] = contextvars.ContextVar("offcorr_backend", default="auto")


_not_compiled: dict[Composition, str] = {}
"""What Triton refused, so that it is asked once only."""


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
    if composition in _not_compiled:
        raise NotFused(_not_compiled[composition])
    return _Call(loss_fn, batch, composition, kernels_of(composition), z, rewards, row_factor)


def _parts(batch: Batch) -> int:
    """How many programs should share a row.  The longest row of a packed batch is not known here, the mean is."""
    rows, tokens = batch.sequences, batch.logp.numel()
    if tokens <= 2 * PART * rows:
        return 1
    longest = batch.logp.shape[1] if batch.cu_seqlens is None else tokens
    most = min(-(-FILL // rows), _power_of_two(longest, BLOCK))  # a program looks at all the parts of its row at once
    return min(most, -(-longest // PART))


def _row_factor(loss_fn: Correction, batch: Batch) -> Tensor | None:
    """[S], the product of what weights multiply whole sequences with; None: 1."""
    factors = [s.row_factor(batch) for s in loss_fn.stations.values() if isinstance(s, Multiplier)]
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
        on_device = isinstance(denominator, Tensor) and denominator.device.type != "cpu"
        return denominator if on_device else float(denominator)
    if AGGREGATIONS[loss_fn.aggregate].unit == "sequences":
        return float(max(batch.sequences, 1))
    return batch.mask.sum().clamp(min=1)


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
        from offcorr.kernels.metering_triton import merge_rows

        batch, device = self.batch, self.batch.logp.device
        rows, parts = batch.sequences, self.parts
        series = self.composition.series
        jobs = _jobs(tuple(series), device)
        coefficient = torch.empty(batch.logp.shape, dtype=torch.float32, device=device)
        partials = torch.empty(jobs.columns, rows * parts, dtype=torch.float32, device=device)
        merged = torch.empty(jobs.size, dtype=torch.float64, device=device)
        loss = torch.empty((), dtype=torch.float32, device=device)
        with _on(device):
            self.launch(coefficient, partials)
            if not self.loss_fn.count_rejected:
                self.scale(coefficient, partials)
            merge_rows[(len(jobs.table),)](
                partials, jobs.table, merged, loss, rows, parts, BLOCK=_power_of_two(rows * parts, MERGED_BLOCK)
            )
        sizes = [KINDS[name].kind.size for name in jobs.names]
        return Fused(loss, coefficient, dict(zip(jobs.names, merged.split(sizes), strict=True)))

    def launch(self, coefficient: Tensor, partials: Tensor) -> None:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import InterpreterError

        arguments = (*self.arguments(coefficient, partials), *numbers(self.loss_fn))
        grid = (self.batch.sequences * self.parts,)
        try:
            for kernel in self.kernels:
                kernel[grid](*arguments, BLOCK=self.block, **self.options)
        except (CompilationError, InterpreterError) as error:
            _not_compiled[self.composition] = f"Triton cannot compile it: {error}"
            raise NotFused(_not_compiled[self.composition]) from error

    @property
    def width(self) -> int:
        batch = self.batch
        return batch.logp.shape[1] if batch.cu_seqlens is None else 0

    @property
    def block(self) -> int:
        return _power_of_two(self.width or self.batch.logp.numel(), BLOCK)

    @property
    def options(self) -> dict[str, int]:
        """For the compiler."""
        if not self.composition.split:
            return {"num_warps": WARPS}
        registers = {} if torch.version.hip else {"maxnreg": SPLIT_REGISTERS}  # Triton on ROCm has no such option
        return {"num_warps": SPLIT_WARPS} | registers

    @property
    def parts(self) -> int:
        """Programs that share a row."""
        return _parts(self.batch) if self.composition.split else 1

    @property
    def part_length(self) -> int:
        """Tokens of a row that one of them looks at: whole blocks."""
        longest = self.width or self.batch.logp.numel()
        return -(-longest // (self.parts * self.block)) * self.block

    def arguments(self, coefficient: Tensor, partials: Tensor) -> list[Any]:
        """In the order of ``source.ARGUMENTS``."""
        batch, tokens = self.batch, self.batch.logp.numel()
        turn_ids = order = means = turn_of = summary = None
        turns = sum(one.span == "turn" for one in self.composition.carried)
        if turns:
            means = torch.empty(turns, tokens, dtype=torch.float32, device=batch.logp.device)
            turn_of = torch.empty(tokens, dtype=torch.int32, device=batch.logp.device)
            if batch.turn_ids is not None:
                turn_ids, order = batch.turn_ids.contiguous(), _turn_order(batch).contiguous()
        if self.composition.split:
            slots, programs = self.composition.summary_size, batch.sequences * self.parts
            summary = torch.empty(slots, programs, dtype=torch.float32, device=batch.logp.device)
        fields = (batch.logp, batch.old_logp, batch.rollout_logp, batch.advantages)
        mask = batch.mask if batch.mask.dtype == torch.bool else batch.mask.bool()
        return [
            *(None if x is None else x.detach().contiguous() for x in fields),
            mask.contiguous().view(torch.uint8),
            None if self.rewards is None else self.rewards.contiguous(),
            turn_ids,
            order,
            means,
            turn_of,
            None if batch.cu_seqlens is None else batch.cu_seqlens.contiguous(),
            _edges(batch.logp.device),
            coefficient,
            partials,
            None if self.row_factor is None else self.row_factor.contiguous(),
            summary,
            self.row_weight,
            self.z,
            tokens,
            self.width,
            batch.sequences,
            self.parts,
            self.part_length,
        ]

    @property
    def row_weight(self) -> float:
        """The weight of a row with one token; the kernel divides by the count where the aggregation does."""
        if not self.loss_fn.count_rejected:
            return 1.0
        return float(row_weights(self.loss_fn.aggregate, torch.ones(1), self.loss_fn.max_length, self.longest)[0])

    @property
    def longest(self) -> int:
        """The padded width.  Packed, it is looked up on the device, but only where a constant length is missing."""
        if self.batch.cu_seqlens is None:
            return self.width
        needed = AGGREGATIONS[self.loss_fn.aggregate].constant_length and self.loss_fn.max_length is None
        return int(self.batch.cu_seqlens.diff().max()) if needed else 1

    def scale(self, coefficient: Tensor, partials: Tensor) -> None:
        """count_rejected=False: the weights of rows and Z follow from what the kernel kept."""
        from offcorr.kernels.metering_triton import LOSS_COLUMNS

        name, batch = self.loss_fn.aggregate, self.batch
        kept, valid = (partials[LOSS_COLUMNS.index(column)].view(-1, self.parts).sum(1) for column in ("kept", "valid"))
        z = total(name, kept, ((kept > 0) | (valid == 0)).sum())
        scale = row_weights(name, kept, self.loss_fn.max_length, self.longest) / z
        partials[LOSS_COLUMNS.index("loss")] *= scale.repeat_interleave(self.parts)
        if batch.cu_seqlens is None:
            coefficient *= scale[:, None]
        else:
            coefficient *= scale.repeat_interleave(batch.cu_seqlens.diff(), output_size=len(coefficient))


def _turn_order(batch: Batch) -> Tensor:
    """Within each row, its positions sorted by turn, stably."""
    assert batch.turn_ids is not None
    if batch.cu_seqlens is None:
        return batch.turn_ids.argsort(dim=1, stable=True)
    ends = batch.cu_seqlens
    row = torch.arange(batch.sequences, device=ends.device)
    row = row.repeat_interleave(ends.diff(), output_size=len(batch.turn_ids))
    by_turn = batch.turn_ids.argsort(stable=True)
    order = by_turn[row[by_turn].argsort(stable=True)]
    return order - ends[:-1][row]


def _power_of_two(n: int, most: int) -> int:
    return min(most, max(16, 1 << (n - 1).bit_length()))


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# -- tables --------------------------------------------------------------------------------------------------


class Jobs(NamedTuple):
    """What ``metering_triton.merge_rows`` does with which column, and where the result belongs."""

    table: Tensor  # [jobs, JOB_SIZE] int32
    names: list[str]  # of the metrics, in their order in the merged vector
    columns: int
    size: int


@functools.cache
def _jobs(series: tuple[str, ...], device: torch.device) -> Jobs:
    from offcorr.kernels import metering_triton as metering

    metrics = [(f"offcorr/{of}/", metric) for of in series for metric in MISMATCH]
    metrics += [("offcorr/loss/", metric) for metric in LOSS]
    places, size = {}, 0
    for prefix, metric in metrics:
        places[prefix + metric.name] = size
        size += metric.kind.size
    table: list[list[int]] = []

    def job(kind: int, column: int, *where: int, count: int = 0) -> None:
        table.append([kind, column, count, *where, *([-1] * (metering.PLACES - len(where)))])

    loss = {name: column for column, name in enumerate(metering.LOSS_COLUMNS)}
    at = {metric.name: places[f"offcorr/loss/{metric.name}"] for metric in LOSS}
    job(metering.SUM, loss["loss"])
    job(metering.SUM, loss["valid"], *(at[m.name] + 1 for m in LOSS if m.kind.size == 2 and m.name != "skipped"))
    for metered, source in (
        *((name, name) for name in ("clipped", "truncated", "rejected", "vetoed", "kept", "unscored", "nonfinite")),
        ("weight_mean", "weight"),
        ("coefficient_zero", "zero"),
    ):
        job(metering.SUM, loss[source], at[metered])
    job(metering.NO_ROWS, 0, at["skipped"])
    for number, of in enumerate(series):
        first = len(metering.LOSS_COLUMNS) + number * int(metering.MISMATCH_SIZE)
        column = {name: first + i for i, name in enumerate(metering.MISMATCH_COLUMNS)}
        at = {metric.name: places[f"offcorr/{of}/{metric.name}"] for metric in MISMATCH}
        seen = column["seen"]
        job(metering.SUM, seen, *(at[name] + 1 for name in ("abs_mean", "k1", "k3")))
        job(metering.SUM, column["abs"], at["abs_mean"])
        job(metering.SUM, column["k1"], at["k1"])
        job(metering.SUM, column["k3"], at["k3"])
        job(metering.SUM, column["first_token"], at["first_token"])
        job(metering.SUM, column["first_seen"], at["first_token"] + 1)
        job(metering.MAX, column["max"], at["abs_max"])
        job(metering.TOKEN_MOMENTS, column["top"], at["token"], count=seen)
        job(metering.ROW_MOMENTS, column["k1"], at["seq"], count=seen)
        job(metering.PERPLEXITY, column["k1"], at["ppl_ratio"], count=seen)
        for bin_ in range(0, Histogram.size, int(metering.TOGETHER)):
            job(metering.SUMS, column["histogram"] + bin_, at["abs_histogram"] + bin_)
    columns = len(metering.LOSS_COLUMNS) + len(series) * int(metering.MISMATCH_SIZE)
    return Jobs(torch.tensor(table, dtype=torch.int32, device=device), list(places), columns, size)


@functools.cache
def _edges(device: torch.device) -> Tensor:
    """The histogram's edges, rounded down: a float32 lies above the exact edge where it lies above this one."""
    exact = torch.tensor(Histogram.edges(), dtype=torch.float64)
    edges = exact.float()
    below = torch.nextafter(edges, torch.tensor(-math.inf))
    return torch.where(edges.double() > exact, below, edges).to(device)


# -- from source to kernel -----------------------------------------------------------------------------------


Kernels = tuple[Any, ...]
"""In the order of their launches, the correction itself last."""


@functools.cache
def kernels_of(composition: Composition) -> Kernels:
    """The composition's kernels, not yet compiled.

    Raises:
        NotFused: a pointwise part has no source that Triton can read.
    """
    parts = {}
    for name, part in composition.functions.items():
        try:
            parts[name] = for_triton(part)
        except (OSError, AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise NotFused(
                f"{getattr(part, '__qualname__', part)} has no source that Triton can read ({error})"
            ) from None
    path = _write(composition.source)
    spec = importlib.util.spec_from_file_location(f"offcorr_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(parts)
    spec.loader.exec_module(module)
    return (module.summary, module.correction) if composition.split else (module.correction,)


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
