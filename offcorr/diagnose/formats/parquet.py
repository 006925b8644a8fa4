"""Parquet, by batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from offcorr.diagnose.formats.base import Container, DumpError, Row, Rows
from offcorr.optional import require

MAGIC = b"PAR1"

BATCH = 4 << 20
"""Bytes of a batch of rows, decoded, about."""


def _opened(files: Sequence[Path], columns: Set[str]) -> Rows:
    require(f"reading {files[0]}", ["pyarrow"], install="pip install pyarrow")

    def rows(path: Path) -> Iterator[Row]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        except (pa.ArrowInvalid, OSError) as error:
            raise DumpError(
                f"{path} begins as a parquet file and cannot be read, most likely because its writer was killed before "
                f"it wrote the end of the file: {error}"
            ) from error
        with file:
            about = file.metadata
            if about.num_rows == 0:
                return
            names = [name for name in file.schema_arrow.names if name in columns] or file.schema_arrow.names
            decoded = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            batch_size = min(max(BATCH * about.num_rows // max(decoded, 1), 1), 4096)
            number, size = 0, path.stat().st_size
            try:
                for batch in file.iter_batches(batch_size, columns=names, use_threads=False):
                    values = [_values(column) for column in batch.columns]
                    for row in zip(*values, strict=True):
                        number += 1
                        yield Row(
                            number, dict(zip(batch.schema.names, row, strict=True)), size * number // about.num_rows
                        )
            except (pa.ArrowInvalid, OSError) as error:
                raise DumpError(f"{path}: the data after row {number} cannot be read: {error}") from error

    return rows


def _values(column: Any) -> list[Any]:
    """One value per row: arrays of numbers for lists of numbers, where nulls are NaN; else Python's objects."""
    import pyarrow as pa

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_primitive(kind.value_type):
        return column.to_pylist()
    numbers, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [numbers[start:end] if there else None for start, end, there in zip(ends, ends[1:], present, strict=False)]


PARQUET = Container(
    name="parquet",
    suffixes=(".parquet",),
    recognises=lambda path, head: head.startswith(MAGIC),
    opened=_opened,
)
"""One row per sequence; per-token fields are lists."""
