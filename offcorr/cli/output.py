"""Output of the commands: refusals, and lists that fold to the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

from offcorr.cli.tables import Table

PAGES = "https://github.com/offcorr/offcorr/tree/main/docs"


class Refusal(Exception):
    """A command that cannot run as it was given; the message says why and what would."""


def listing(table: Table, width: int | None) -> str:
    """A table as aligned columns where they fit into ``width``, else a paragraph per row.

    Args:
        width: None: a line per row, its columns separated by tabs, for other programs.
    """
    if width is None:
        return "\n".join("\t".join(row) for row in (table[0], *(row.values() for row in table)))
    columns = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    if sum(columns.values()) + 2 * (len(columns) - 1) <= width:
        rows = ({name: name for name in columns}, *table)
        return "\n".join("  ".join(row[name].ljust(size) for name, size in columns.items()).rstrip() for row in rows)
    first, second, *others = columns
    lines = []
    for row in table:
        lines.append(row[first])
        for text in (row[second], "; ".join(f"{name}: {row[name]}" for name in others if row[name])):
            lines += textwrap.wrap(
                text,
                max(20, width),
                initial_indent="    ",
                subsequent_indent="      ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def paragraph(*texts: str) -> str:
    """Texts of a line each, wrapped to the terminal, or to 100 columns where there is none."""
    width = max(20, terminal_width() or 100)
    return "\n".join(textwrap.fill(text, width) for text in texts)


def terminal_width() -> int | None:
    """Columns of the terminal, or of the variable COLUMNS; None where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None
