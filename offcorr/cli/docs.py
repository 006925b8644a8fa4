"""``offcorr docs``: the pages of the documentation, and the parts of them that are generated from the code."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offcorr.cli.guide import guide
from offcorr.cli.output import PAGES, Refusal, terminal_width
from offcorr.cli.tables import TABLES, fill, markdown
from offcorr.folders import check_file
from offcorr.lab.text import entries
from offcorr.stages.checks import nearest

READERS = {
    "To begin": {
        "quickstart": "you have just installed offcorr: a first run, and the two lines to change in a TRL script",
    },
    "To train": {
        "using_trl": "you have a TRL script: every option, example scripts, PEFT, several processes",
        "which": "you must choose a method",
        "metrics": "you have a run and want to know whether it is healthy",
        "mismatch": "the sampler's log-probs differ from the trainer's, and you want the cause",
        "mixed_data": "you also train on replayed or recorded samples",
        "trainers": "you train with verl, prime-rl, slime, SkyRL or Tinker",
        "migrating": "you come from another framework and look for its option here",
        "scale": "you go from one machine to many",
        "exact": "you want sampler and trainer to agree to the last bit",
        "tokens": "you train on conversations or tool calls, whose token ids can change",
    },
    "To compare": {
        "compare": "you want bias and variance of several methods, in seconds",
        "lab": "you want to see how methods were compared, or to repeat it",
        "benchmarks": "you want to know what offcorr costs in time and memory",
        "versions": "you want to know which versions are tested",
    },
    "To understand and extend": {
        "methods": "you look a method up: formula, options, source",
        "papers": "you want the setting of a paper",
        "math": "you want the derivations",
        "architecture": "you want to read the code",
        "extending": "you want a method, a stage or an adapter of your own",
    },
}
"""The pages by what a reader wants to do, each with the reader it is for."""

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that the package lies in: of a checkout, the one with docs/."""

GENERATED = ("docs/methods.md", "docs/metrics.md", "docs/trainers.md")


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``docs``."""
    parser = commands.add_parser(
        "docs",
        help="the pages of the documentation, and whom each is for; with a PAGE, where it is",
        description="Lists the pages of the documentation with the reader that each is for. With a PAGE: its file in "
        "the checkout that offcorr is installed from, else its address. --write and --check are "
        "for those who change offcorr itself: they compare the tables on the pages of a checkout with the code.",
    )
    parser.add_argument("page", nargs="?", metavar="PAGE", help="a page, as which or docs/which.md")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--write", action="store_true", help="write the generated tables into the pages of a checkout")
    either.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table is out of date")
    parser.add_argument(
        "--root", type=Path, metavar="FOLDER", help="the checkout, for --write and --check (default: this folder)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    if options.page and (options.write or options.check):
        raise Refusal("--write and --check are about all generated pages and take no PAGE")
    if options.write or options.check:
        return _generate(options.root or Path.cwd(), options.check)
    if options.root is not None:
        raise Refusal("--root is given without --write or --check, which it belongs to")
    print(_place(options.page) if options.page else _pages(terminal_width() or 100))
    return 0


def _place(page: str) -> str:
    """The file of a page, where offcorr runs from a checkout, else its address; then the reader that it is for."""
    name = page.removeprefix("docs/").removesuffix(".md")
    readers = {known: reader for pages in READERS.values() for known, reader in pages.items()}
    if name not in readers:
        raise Refusal(f"unknown page {page!r}{nearest(name, readers, ';')} `offcorr docs` lists all")
    file = CHECKOUT / "docs" / f"{name}.md"
    return f"{file if file.is_file() else f'{PAGES}/{name}.md'}\nfor you if {readers[name]}"


def _pages(width: int) -> str:
    lines = textwrap.wrap(f"The documentation is at {PAGES}. New to offcorr: read quickstart.md first.", width)
    longest = max(len(page) for pages in READERS.values() for page in pages) + len(".md")
    for purpose, pages in READERS.items():
        rows = [(f"  {page}.md".ljust(longest + 2), reader) for page, reader in pages.items()]
        lines += ["", purpose, *entries(rows, width)]
    hint = "On the command line: `offcorr methods NAME` and `offcorr metrics NAME` explain one method or one metric."
    return "\n".join([*lines, "", *textwrap.wrap(hint, width)])


def written() -> dict[str, Callable[[], str]]:
    """The generated parts of the pages, by the names of their marks."""
    return {f"table {name}": partial(_markdown, name) for name in TABLES} | {"guide": guide}


def _markdown(name: str) -> str:
    return markdown(TABLES[name]())


def _generate(root: Path, check: bool) -> int:
    missing = [name for name in GENERATED if not (root / name).is_file()]
    if missing:
        raise Refusal(
            f"{root.resolve()} is not a checkout of offcorr: it has no {' and no '.join(missing)}, whose tables "
            f"--write and --check are about. --root names the checkout; to read the pages: {PAGES}"
        )
    if not check:
        _check_pages(root)
    stale = []
    for name in GENERATED:
        text = (root / name).read_text()
        fresh = fill(text, written())
        if fresh != text:
            stale.append(name)
            if not check:
                (root / name).write_text(fresh)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


def _check_pages(root: Path) -> None:
    for name in GENERATED:
        try:
            check_file("--root", root / name)
        except ValueError as error:
            raise Refusal(str(error)) from None
