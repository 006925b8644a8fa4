"""``offcorr methods``, ``offcorr metrics``: what there is, as tables; ``offcorr docs`` writes them into the docs.

Every table is generated from the code that it describes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offcorr.correction import Correction
from offcorr.methods.registry import Method, catalogue
from offcorr.metrics import LOSS, MISMATCH

Table = list[dict[str, str]]


def methods_table() -> Table:
    """One row a method: its signature and stages, what it multiplies the gradient by, and where that was read."""
    return [
        {
            "method": " = ".join((method.name, *method.aliases)),
            "options": _signature(method),
            **_stations(method()),
            "multiplier c": method.multiplier,
            "paper": method.paper,
            "provenance": method.provenance,
            "notes": method.notes,
        }
        for method in catalogue()
    ]


def short_methods_table() -> Table:
    """The same, short enough for a README."""
    keep = ("method", "ratio", "weight", "reject", "gate", "multiplier c", "paper")
    return [{name: row[name] for name in keep} for row in methods_table()]


def metrics_table() -> Table:
    rows = []
    for prefix, series, applied in (
        ("offcorr/{engine,staleness}/", MISMATCH, "raw"),
        ("offcorr/loss/", LOSS, "applied"),
    ):
        for metric in series:
            names = ", ".join(metric.outputs or (metric.name,))
            kind = type(metric.kind).__name__
            rows.append({"metric": prefix + names, "formula": metric.formula, "values": applied, "accumulator": kind})
    return rows


def markdown(table: Table) -> str:
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([row[name].replace("|", "\\|") for name in head] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str, tables: dict[str, Callable[[], Table]]) -> str:
    """``text`` with the table between ``<!-- table NAME -->`` and ``<!-- end -->`` written anew."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(tables[match[2]]())}\n<!-- end -->"

    return re.sub(r"(<!-- table (\w+) -->)\n.*?<!-- end -->", written, text, flags=re.DOTALL)


TABLES: dict[str, Callable[[], Table]] = {
    "methods": methods_table,
    "short_methods": short_methods_table,
    "metrics": metrics_table,
}
GENERATED = ("README.md", "docs/methods.md", "docs/metrics.md")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="offcorr", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("methods", "every method, a row each"), ("metrics", "every metric, a row each")):
        command = commands.add_parser(name, help=about)
        command.add_argument("--markdown", action="store_true", help="the whole table, as Markdown")
    docs = commands.add_parser("docs", help="write the generated tables into the docs of a checkout")
    docs.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    docs.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)

    if args.command == "docs":
        return _write_docs(args.root, args.check)
    try:
        if args.markdown:
            print(markdown(TABLES[args.command]()))
        else:
            _print(short_methods_table() if args.command == "methods" else metrics_table())
        sys.stdout.flush()
    except BrokenPipeError:  # `offcorr methods | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _write_docs(root: Path, check: bool) -> int:
    stale = []
    for name in GENERATED:
        text = (root / name).read_text()
        fresh = fill(text, TABLES)
        if fresh != text:
            stale.append(name)
            if not check:
                (root / name).write_text(fresh)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


def _print(table: Table) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    for row in ({name: name for name in widths}, *table):
        print("  ".join(row[name].ljust(width) for name, width in widths.items()).rstrip())


def _signature(method: Method) -> str:
    return ", ".join(f"{name}={option.default!r}" for name, option in method.options.items()) or "none"


def _stations(loss_fn: Correction) -> dict[str, str]:
    def described(stages: Any) -> str:
        stages = stages if isinstance(stages, tuple) else (stages,)
        return ", ".join(_station(s) for s in stages if s is not None) or "none"

    return {
        "ratio": described(loss_fn.ratio),
        "weight": described(loss_fn.weight),
        "reject": described(loss_fn.reject),
        "gate": described(loss_fn.gate),
        "aggregate": loss_fn.aggregate,
    }


def _station(stage: Any) -> str:
    words = [stage.name()]
    if (level := getattr(stage, "level", "token")) != "token":
        words.append(f"by {level}")
    if of := getattr(stage, "mismatch", None):
        words.append(f"of {of}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
