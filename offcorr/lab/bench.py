"""``offcorr bench``: the worlds in which corrections are measured, one command each."""

from __future__ import annotations

from typing import Any

from offcorr.lab import arena, grid, kernels, loop

WORLDS: tuple[Any, ...] = (grid, loop, arena, kernels)
"""The modules of the worlds; each adds its command with ``add_parser``."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``bench`` with one subcommand per world."""
    parser = subparsers.add_parser(
        "bench",
        help="measure methods in one of the worlds of the lab",
        description="Measures methods in one of the worlds of the lab; docs/lab.md describes them and shows results.",
    )
    worlds = parser.add_subparsers(dest="world", required=True, metavar="WORLD")
    for world in WORLDS:
        world.add_parser(worlds)
