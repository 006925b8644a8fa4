"""The command ``offcorr``: lists of methods and metrics, and the generated tables of the documentation.

Every table is made from the code that it describes.
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
from offcorr.lab import compare
from offcorr.methods.registry import Method, catalogue
from offcorr.metrics import LOSS, MISMATCH
from offcorr.stages.rejections import Rejection
from offcorr.stages.weights import Weight

Table = list[dict[str, str]]


def methods_table() -> Table:
    """One row per method: its stages, with the pair of policies that each compares, and its multiplier."""
    return [
        {
            "method": _names(method),
            "multiplier c": method.multiplier,
            **_stages(method()),
        }
        for method in catalogue()
    ]


def options_table() -> Table:
    """One row per method: its options with their defaults, the paper, and where the definition was read."""
    return [
        {
            "method and options": f"`{method.name}({_signature(method)})`",
            "paper": method.paper,
            "definition read in": method.provenance,
            "notes": method.notes,
        }
        for method in catalogue()
    ]


def metrics_table() -> Table:
    """One row per metric: its formula, whether it is of raw or applied values, and its accumulator."""
    rows = []
    for prefix, series, values in (
        ("offcorr/{engine,staleness}/", MISMATCH, "raw"),
        ("offcorr/loss/", LOSS, "applied"),
    ):
        for metric in series:
            names = ", ".join(metric.outputs or (metric.name,))
            kind = metric.kind.__name__
            rows.append({"metric": prefix + names, "formula": metric.formula, "values": values, "accumulator": kind})
    return rows


def markdown(table: Table) -> str:
    """A table as Markdown, with arXiv numbers as links."""
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([_cell(row[name]) for name in head] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str, tables: dict[str, Callable[[], Table]]) -> str:
    """``text`` with each table between ``<!-- table NAME -->`` and ``<!-- end -->`` generated anew."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(tables[match[2]]())}\n<!-- end -->"

    return re.sub(r"(<!-- table (\w+) -->)\n.*?<!-- end -->", written, text, flags=re.DOTALL)


TABLES: dict[str, Callable[[], Table]] = {
    "methods": methods_table,
    "options": options_table,
    "metrics": metrics_table,
}
GENERATED = ("docs/methods.md", "docs/metrics.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="offcorr", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("methods", "list every method"), ("metrics", "list every metric")):
        command = commands.add_parser(name, help=about)
        command.add_argument("--markdown", action="store_true", help="print a Markdown table")
    docs = commands.add_parser("docs", help="write the generated tables into the docs of a checkout")
    docs.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    docs.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: the current folder)")
    compare.add_parser(commands)
    args = parser.parse_args(argv)

    if args.command == "compare":
        return compare.run(args)
    if args.command == "docs":
        return _write_docs(args.root, args.check)
    try:
        table = TABLES[args.command]()
        if args.markdown:
            print(markdown(table))
        else:
            _print(table)
        sys.stdout.flush()
    except BrokenPipeError:  # `offcorr methods | head` closes the pipe early
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


def _names(method: Method) -> str:
    return " = ".join((method.name, *method.aliases))


def _signature(method: Method) -> str:
    return ", ".join(f"{name}={option.default!r}" for name, option in method.options.items())


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return re.sub(r"(?<![\w/.])(\d{4}\.\d{5})(?!\d)", r"[\1](https://arxiv.org/abs/\1)", text)


def _stages(loss_fn: Correction) -> dict[str, str]:
    def described(stages: Any) -> str:
        stages = stages if isinstance(stages, tuple) else (stages,)
        return ", ".join(_stage(s) for s in stages if s is not None) or "none"

    return {
        "ratio": described(loss_fn.ratio),
        "weight": described(loss_fn.weight),
        "reject": described(loss_fn.reject),
        "gate": described(loss_fn.gate),
        "aggregate": loss_fn.aggregate,
    }


def _stage(stage: Any) -> str:
    """A stage by its name, with its level where it has one, and the pair of policies it compares."""
    either = "total, else staleness" if isinstance(stage, Weight | Rejection) else None
    details = [getattr(stage, "level", "token"), stage.mismatch or either]
    shown = ", ".join(detail for detail in details if detail not in ("token", None))
    return stage.to_config()["name"] + (f" ({shown})" if shown else "")


if __name__ == "__main__":
    sys.exit(main())
