"""``DumpWriter``: records to parquet or JSON lines; ``StepDumps``: one file per optimizer step of a training run."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from offcorr.diagnose.record import LOGPS, NAMES, Record
from offcorr.optional import require

__all__ = ["DumpWriter", "StepDumps"]

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")

ROW_GROUP = 1 << 18
"""Tokens of a row group of parquet, at least (but for the last)."""


class DumpWriter:
    """Writes records to a file, which ``offcorr.diagnose.read`` reads back as they were, to the last bit.

    JSON lines are on disk after each ``write``.  Parquet is written in row groups under a temporary name, which begins
    with a dot, and has its own once it is closed: what a killed process leaves under that name cannot be read.  A run
    that may be killed writes one file per step (``StepDumps``).

    Log-probs, entropy and advantages lie in parquet as float32 where every value of the first row group is one, else
    as float64; a field that no record of the first row group has cannot come later.

    Args:
        path: a file that does not exist; ``.parquet`` (needs pyarrow), ``.jsonl`` or ``.jsonl.gz``.
        float64: store float64, whatever the first row group is.

    Raises:
        FileExistsError: the file exists.
        ValueError: another suffix; from ``write`` or ``close``, records of parquet that do not fit those before them.

    >>> import tempfile
    >>> from offcorr.diagnose import read
    >>> record = Record.of({"prompt_ids": [5], "completion_ids": [7], "rollout_logp": [-0.1], "logp": [-0.2]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DumpWriter(Path(folder, "dump.jsonl")) as writer:
    ...         writer.write([record])
    ...     (back,) = read([folder], warn=lambda text: None)
    >>> back.rollout_logp.tolist(), back.old_logp.tolist()
    ([-0.1], [-0.2])
    """

    def __init__(self, path: str | Path, *, float64: bool = False) -> None:
        self.path = Path(path)
        if not self.path.name.endswith(SUFFIXES):
            wanted = ", ".join(SUFFIXES)
            raise ValueError(f"the path of the dump is {str(path)!r}, expected one that ends with one of {wanted}")
        _refuse_existing(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parquet = self.path.suffix == ".parquet"
        self._sink: _Parquet | _JsonLines | None = _Parquet(self.path, float64) if parquet else _JsonLines(self.path)

    def write(self, records: Iterable[Record]) -> None:
        """Append records."""
        if self._sink is None:
            raise ValueError(f"{self.path} is closed, and takes no more records")
        self._sink.write(records)

    def close(self) -> None:
        """Write what is left, and give a parquet file its name; a parquet file without a record is not made."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def __enter__(self) -> DumpWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StepDumps:
    """Writes what a training run was trained on to a folder: ``step_000001.rank_0.parquet``, a file per step and rank.

    A file appears complete at the end of its step.  After a restart, a step that is trained a second time has a second
    file (``step_000001.rank_0.2.parquet``), which ``offcorr.diagnose.read`` reads in the place of the first.

    Args:
        folder: made where it does not exist.
        rank: of this process.
        every: steps 1, 1 + every, 1 + 2 every ... are written.

    >>> dumps = StepDumps("dump", every=10)
    >>> [step for step in range(1, 30) if dumps.wants(step)]
    [1, 11, 21]
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, every: int = 1) -> None:
        self.folder, self.rank, self.every = Path(folder), rank, every
        self._step = 0
        self._pending: list[Record] = []

    def begin(self, *, resumed: bool = False) -> None:
        """Start a run.

        Raises:
            FileExistsError: the folder holds steps of another run, or files of another kind.
        """
        self._pending = []
        others = sorted(path.name for path in self.folder.glob("*") if not path.match("step_*.rank_*"))
        if others:
            raise FileExistsError(
                f"{self.folder} holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}, expected a new or "
                "empty folder for the dump"
            )
        there = sorted(self.folder.glob(f"step_*.rank_{self.rank}.*"))
        if there and not resumed:
            raise FileExistsError(
                f"{self.folder} holds {there[0].name}, the dump of another run, expected a new or empty folder: two "
                "runs in one folder would be diagnosed as one"
            )

    def wants(self, step: int) -> bool:
        """Whether the step, counted from 1, is written."""
        return (step - 1) % self.every == 0

    def add(self, step: int, records: Sequence[Record]) -> None:
        """Keep the records of a micro-batch of the step until its end."""
        self._step = step
        self._pending += records

    def end(self) -> None:
        """Write the step's file, if it has records."""
        records, self._pending = self._pending, []
        if not records:
            return
        name = f"step_{self._step:06d}.rank_{self.rank}"
        path, times = self.folder / f"{name}.parquet", 1
        while path.exists():
            times += 1
            path = self.folder / f"{name}.{times}.parquet"
        with DumpWriter(path) as writer:
            writer.write(records)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists, and no dump is overwritten: choose another name, or move it away")


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "xb")
        self._stream = (
            gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=5) if path.suffix == ".gz" else self._file
        )

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._stream.write(_line(record))
        self._stream.flush()
        self._file.flush()

    def close(self) -> None:
        self._stream.close()
        self._file.close()


class _Parquet:
    def __init__(self, path: Path, float64: bool) -> None:
        require(f"writing {path}", ["pyarrow"], install="pip install pyarrow, or write .jsonl.gz")
        self._path, self._float64 = path, float64
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._pending: list[Record] = []
        self._tokens = self._written = 0
        self._writer: Any = None

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            self._pending.append(record)
            self._tokens += len(record)
            if self._tokens >= ROW_GROUP:
                self._write_group()

    def close(self) -> None:
        try:
            if self._pending:
                self._write_group()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._file.close()
                _refuse_existing(self._path)
                self._temporary.rename(self._path)

    def _write_group(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        records, self._pending, self._tokens = self._pending, [], 0
        if self._writer is None:
            self._schema = pa.schema(_columns(records, self._float64))
            self._file = open(self._temporary, "xb")
            self._writer = parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        given = {name for name in NAMES for record in records if getattr(record, name) is not None}
        if more := given - {*self._schema.names}:
            raise ValueError(
                f"{', '.join(sorted(more))} is in these records and in none of the first {self._written} of "
                f"{self._path}, expected the same fields in all records of a parquet file"
            )
        columns = [self._column(field.name, field.type, records) for field in self._schema]
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._written += len(records)

    def _column(self, name: str, kind: Any, records: Sequence[Record]) -> Any:
        import pyarrow as pa

        values = [getattr(record, name) for record in records]
        if not pa.types.is_list(kind):
            odd = [value for value in values if value is not None and isinstance(value, str) != (kind == pa.string())]
            if odd:
                raise ValueError(f"{name} is {odd[0]!r}, and the first records of {self._path} have {kind} for it")
            return pa.array(values, kind)
        lists = [np.atleast_1d([] if value is None else value) for value in values]
        flat = np.concatenate(lists)
        if kind.value_type == pa.float32() and not _is_float32(flat):
            raise ValueError(
                f"{name} holds values that are no float32, unlike the first records of {self._path}: make the "
                "DumpWriter with float64=True"
            )
        ends = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        numbers = pa.array(flat.astype(kind.value_type.to_pandas_dtype()), kind.value_type)
        absent = np.array([value is None for value in values])
        return pa.ListArray.from_arrays(ends, numbers, kind, mask=pa.array(absent) if absent.any() else None)


def _columns(records: Sequence[Record], float64: bool) -> list[Any]:
    """The fields of a schema of parquet."""
    import pyarrow as pa

    columns = []
    for name in NAMES:
        values = [value for record in records if (value := getattr(record, name)) is not None]
        if not values:
            continue
        if name in ("prompt_ids", "completion_ids", "turn_ids", "rollout_version", "trainer_version"):
            kind = pa.list_(pa.int64())
        elif name in (*LOGPS, "entropy", "advantage"):
            exact = not float64 and all(map(_is_float32, values))
            kind = pa.list_(pa.float32() if exact else pa.float64())
        elif name == "mask":
            kind = pa.list_(pa.bool_())
        elif name == "reward":
            kind = pa.float64()
        else:
            kind = pa.string() if isinstance(values[0], str) else pa.int64()
        columns.append(pa.field(name, kind))
    return columns


def _is_float32(values: Any) -> bool:
    numbers = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers.astype(np.float32), numbers, equal_nan=True))


def _line(record: Record) -> bytes:
    row: dict[str, Any] = {}
    for name in NAMES:
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
            if name in (*LOGPS, "entropy", "advantage"):
                value = [None if one != one else one for one in value]  # NaN, which JSON does not have
        if value is not None:
            row[name] = value
    return (json.dumps(row, separators=(",", ":")) + "\n").encode()
