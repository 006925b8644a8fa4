"""``offcorr bench``: the worlds in which corrections are measured, one command each."""

from __future__ import annotations

from typing import Any

from offcorr.lab import arena, grid, kernels, loop
from offcorr.lab.text import HelpFormatter, examples

WORLDS: tuple[Any, ...] = (grid, loop, arena, kernels)
"""The modules of the worlds; each adds its command with ``add_parser``."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``bench`` with one subcommand per world."""
    parser = subparsers.add_parser(
        "bench",
        help="methods over many settings: exact gradients, training runs, speed",
        description="Measures methods over many settings, in one of the experiments (worlds) of the lab: docs/lab.md "
        "describes them and shows their results. `offcorr compare` measures one setting, in seconds.",
        formatter_class=HelpFormatter,
        epilog=examples("offcorr bench exact --help", "offcorr bench arena --quick"),
    )
    worlds = parser.add_subparsers(dest="world", required=True, metavar="WORLD")
    for world in WORLDS:
        world.add_parser(worlds)
