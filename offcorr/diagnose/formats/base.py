"""``Container`` and ``Layout``: a kind of file, and the names under which a framework logs the fields of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offcorr.diagnose.record import RecordError

__all__ = ["Container", "DumpError", "Layout", "ReadWith", "Row", "Rows", "Unreadable", "needed"]


class DumpError(ValueError):
    """A file that is no dump, or has no usable record; the message names it, what it holds and what was expected."""


class ReadWith(Exception):
    """Raised in place of rows: those of this file come with another's."""


class Unreadable(NamedTuple):
    """A part of a file that holds no row, such as a line that is no JSON object."""

    kind: str
    message: str


class Row(NamedTuple):
    """One row of a file.

    number: from 1.
    fields: by the names of the file.
    position: bytes of the file that have been read.
    """

    number: int
    fields: Mapping[str, Any] | Unreadable
    position: int


Rows = Callable[[Path], Iterator[Row]]
"""Reads the rows of a file; raises ``DumpError`` where it cannot."""


@dataclass(frozen=True)
class Container:
    """A kind of file.

    Args:
        name: for messages.
        suffixes: of the files that are looked at in a folder.
        recognises: whether a file is of this kind, from its path and its first bytes.
        opened: from all files of this kind that are read together, and the names of the columns that any layout knows,
            the function that reads the rows of one.
    """

    name: str
    suffixes: tuple[str, ...]
    recognises: Callable[[Path, bytes], bool]
    opened: Callable[[Sequence[Path], Set[str]], Rows]


@dataclass(frozen=True)
class Layout:
    """The names and shapes under which a framework logs the fields of a ``Record``.

    Args:
        name: for messages.
        recognises: whether a row with these names has this layout.
        columns: the names that ``fields`` reads.
        fields: the row of ``Record.of``, from a row of the file and the file's path.
    """

    name: str
    recognises: Callable[[Set[str]], bool]
    columns: frozenset[str]
    fields: Callable[[Mapping[str, Any], Path], Mapping[str, Any]]


def needed(row: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of these names.

    Raises:
        RecordError: one is absent or None.

    >>> needed({"a": 1, "b": 2}, "b", "a")
    [2, 1]
    """
    missing = ", ".join(name for name in names if row.get(name) is None)
    if missing:
        present = ", ".join(name for name, value in row.items() if value is not None) or "nothing"
        raise RecordError("missing", missing, f"{missing} missing; present: {present}")
    return [row[name] for name in names]
