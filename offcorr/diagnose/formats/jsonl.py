"""JSON lines, plain or compressed with gzip: one object per line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from offcorr.diagnose.formats.base import Container, DumpError, Row, Unreadable

GZIP = b"\x1f\x8b"

LONGEST = 1 << 28
"""Bytes of a line at most."""


def _recognises(path: Path, head: bytes) -> bool:
    return head.startswith(GZIP) or head.lstrip().startswith(b"{")


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file, line by line; empty lines are passed over."""
    with open(path, "rb") as file:
        compressed = file.read(2) == GZIP
        file.seek(0)
        stream: IO[bytes] = gzip.open(file) if compressed else file  # type: ignore[assignment]
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(LONGEST + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                message = f"the compressed data ends or breaks here ({error}): this line and all after it are lost"
                yield Row(number, Unreadable("truncated", message), file.tell())
                return
            if len(line) > LONGEST:
                raise DumpError(
                    f"{path}, row {number}: the line is longer than {LONGEST >> 20} MiB, expected one JSON object per "
                    "sequence"
                )
            if not line:
                return
            if line.strip():
                yield Row(number, _parsed(line), file.tell())


def _parsed(line: bytes) -> Mapping[str, Any] | Unreadable:
    try:
        value = json.loads(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return Unreadable("truncated", "the last line ends in the middle of its JSON object: the file is truncated")
        return Unreadable("json", f"no JSON object, of which a line holds one ({error})")
    if isinstance(value, dict):
        return value
    return Unreadable("json", f"a JSON {type(value).__name__}, expected an object")


JSONL = Container(
    name="JSON lines (jsonl, jsonl.gz)",
    suffixes=(".jsonl", ".jsonl.gz"),
    recognises=_recognises,
    opened=lambda files, columns: rows,
)
"""One JSON object per line."""
