"""``offcorr bench exact``: every method over a grid of exactly solvable worlds.

A cell of the grid is a ``Setting`` of ``offcorr.lab.exact``, measured as ``offcorr compare`` measures its one setting.
Direction quality and RMSE differ more between cells than between methods, so each is divided by the best of its cell
before it is averaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from offcorr.correction import Correction
from offcorr.lab import compare, comparison, results
from offcorr.lab.contract import marked, notes_of, warn_of_failures
from offcorr.lab.exact import SIZES, Advantages, EngineRegime, Policy, Regime, Setting, World, couples
from offcorr.lab.processes import Clock, add_processes, shared_out
from offcorr.lab.text import HelpFormatter, Progress, duration, entries, examples, folded

__all__ = ["Cell", "Grid", "add_parser", "as_data", "cells", "measured", "picture", "run", "table"]

SMALL, LARGE = SIZES
REGIMES: dict[str, tuple[Regime | None, EngineRegime | None]] = {
    "noise": ("noise", None),
    "stale": ("stale", None),
    "drift": ("drift", None),
    "early": ("early", None),
    "quantised": (None, "quantised"),
    "sharper": (None, "sharper"),
    "flatter": (None, "flatter"),
    "drift+quantised": ("drift", "quantised"),
}
"""Name -> staleness and engine mismatch, as ``Setting`` has them; None: there is none."""
ENGINE_GAP = 0.1
"""The engine's gap in a regime that has both; else the gap of the cell is that of the one there is."""
KEYS = (
    "bias",
    f"rmse_{SMALL}",
    f"rmse_{LARGE}",
    f"direction_{SMALL}",
    f"direction_{LARGE}",
    "direction_limit",
)
"""The columns of ``offcorr compare`` that are measured in every cell."""
LENGTHS, GAPS, SEEDS, DRAWS = (3, 6, 12), (0.1, 0.5, 0.85), (0, 1), 20
"""The defaults: with all regimes 576 cells, minutes on two cores for all methods."""
AXES = ("regime", "gap", "length", "policy", "advantages")
"""The sides of the grid along which the numbers are also given apart."""
LABEL = 14
"""Characters of a name in the table before it is folded."""


class Cell(NamedTuple):
    """A cell of the grid: the name of its regime, its gap, and the setting that they make."""

    regime: str
    gap: float
    setting: Setting

    def __str__(self) -> str:
        setting = self.setting
        return (
            f"{self.regime} {self.gap:g}, {setting.length} tokens over {setting.vocabulary} symbols, {setting.policy}, "
            f"{setting.advantages} advantages, seed {setting.seed}"
        )

    def at(self, axis: str) -> Any:
        """The place of the cell on one of the ``AXES``."""
        return getattr(self if axis in ("regime", "gap") else self.setting, axis)


def cells(
    regimes: Sequence[str] = tuple(REGIMES),
    lengths: Sequence[int] = LENGTHS,
    policies: Sequence[Policy] = get_args(Policy),
    advantages: Sequence[Advantages] = get_args(Advantages),
    gaps: Sequence[float] = GAPS,
    seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    """Every combination; cells that differ in the advantages alone are neighbours.

    A length up to 6 has 4 symbols, a longer one 2, so that at most 4,096 sequences are enumerated up to length 12.

    Raises:
        ValueError: a value is out of range; the message begins with the field of ``Setting``.

    >>> [str(cell) for cell in cells(["stale"], [6], ["tied"], ["grpo"], [0.5], [0])]
    ['stale 0.5, 6 tokens over 4 symbols, tied, grpo advantages, seed 0']
    """
    return [
        Cell(regime, gap, _setting(regime, gap, length, policy, kind, seed))
        for seed, length, policy, regime, gap, kind in itertools.product(
            seeds, lengths, policies, regimes, gaps, advantages
        )
    ]


def _setting(regime: str, gap: float, length: int, policy: Policy, advantages: Advantages, seed: int) -> Setting:
    staleness, engine = REGIMES[regime]
    distance: dict[str, Any] = {"gap": gap if staleness else 0.0}
    if staleness:
        distance["regime"] = staleness
    if engine:
        distance |= {"engine_regime": engine, "engine_gap": ENGINE_GAP if staleness else gap}
    vocabulary = 4 if length <= 6 else 2
    return Setting(vocabulary, length, policy, advantages=advantages, seed=seed, **distance)


# -- the numbers ---------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """One cell: by column, a number per method; and per method the place of the first one with the same update.

    other_gap: the gap that was asked for and the one reached, where they differ by more than a tenth.
    """

    values: dict[str, list[float]]
    same: list[int]
    other_gap: str = ""


@dataclass(frozen=True)
class Grid:
    """The numbers of every method in every cell, and their summaries.

    Args:
        methods: names and corrections.
        draws: batches drawn of each size, for a method that couples the sequences of a batch.
        cells: those that exist.
        found: the numbers of each.
        left_out: cells that do not exist, each with the reason.
    """

    methods: Sequence[tuple[str, Correction]]
    draws: int
    cells: Sequence[Cell]
    found: Sequence[Found]
    left_out: Sequence[tuple[Cell, str]] = ()

    @cached_property
    def groups(self) -> list[list[int]]:
        """The methods by number, those together whose update is the same in every cell."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for method in range(len(self.methods)):
            groups.setdefault(tuple(found.same[method] for found in self.found) or (method,), []).append(method)
        return list(groups.values())

    @cached_property
    def shares(self) -> dict[str, list[list[float]]]:
        """By column, [cells][methods]: direction quality and RMSE over the best of the cell; all else as it is."""
        return {
            key: [
                relative(found.values[key], max if key.startswith("direction") else min)
                if key.endswith((f"_{SMALL}", f"_{LARGE}"))
                else found.values[key]
                for found in self.found
            ]
            for key in KEYS
        }

    def summary(self, method: int, chosen: Callable[[Cell], bool] = lambda cell: True) -> list[float]:
        """The numbers of ``SUMMARY`` for one method over the chosen cells; NaN where there is none."""
        places = [place for place, cell in enumerate(self.cells) if chosen(cell)]
        numbers = []
        for column in SUMMARY:
            values = [self.shares[column.of][place][method] for place in places]
            values = [value for value in values if not math.isnan(value)]
            numbers.append(float(column.over(values)) if values else math.nan)
        return numbers


def relative(values: Sequence[float], best: Callable[[Sequence[float]], float]) -> list[float]:
    """Each value over the best one; NaN where the best is not above 0.

    >>> relative([0.5, 0.25, -0.5], max)
    [1.0, 0.5, -1.0]
    """
    reference = best(values)
    return [value / reference if reference > 0 else math.nan for value in values]


class Summary(NamedTuple):
    """A column of the table: its key in JSON, the column that it summarises, how, and its formula in the caption."""

    key: str
    of: str
    over: Callable[[Sequence[float]], float]
    formula: str


def _away(values: Sequence[float]) -> float:
    return sum(value < -1e-9 for value in values)


SUMMARY = (
    Summary(
        f"direction_{SMALL}_mean",
        f"direction_{SMALL}",
        statistics.fmean,
        "over the best of its cell, mean of the cells",
    ),
    Summary(f"direction_{SMALL}_worst", f"direction_{SMALL}", min, "over the best of its cell, smallest of the cells"),
    Summary(
        f"direction_{LARGE}_mean",
        f"direction_{LARGE}",
        statistics.fmean,
        "over the best of its cell, mean of the cells",
    ),
    Summary(f"direction_{LARGE}_worst", f"direction_{LARGE}", min, "over the best of its cell, smallest of the cells"),
    Summary(
        f"rmse_{SMALL}_mean",
        f"rmse_{SMALL}",
        statistics.geometric_mean,
        "over the smallest of its cell, geometric mean of the cells",
    ),
    Summary(f"rmse_{SMALL}_worst", f"rmse_{SMALL}", max, "over the smallest of its cell, largest of the cells"),
    Summary(
        f"rmse_{LARGE}_mean",
        f"rmse_{LARGE}",
        statistics.geometric_mean,
        "over the smallest of its cell, geometric mean of the cells",
    ),
    Summary(f"rmse_{LARGE}_worst", f"rmse_{LARGE}", max, "over the smallest of its cell, largest of the cells"),
    Summary("bias_mean", "bias", statistics.fmean, "mean of the cells"),
    Summary("bias_worst", "bias", max, "largest of the cells"),
    Summary("away", "direction_limit", _away, "number of cells where the cosine between E G and g is below 0"),
)
READING = (
    "Neither order is a ranking. RMSE rewards a small update (no update at all has 1), direction quality ignores its "
    "size, and how accurate one gradient is does not predict how training goes (docs/compare.md)."
)


def measured(
    chosen: Sequence[Cell],
    specs: Sequence[str] = (),
    draws: int = DRAWS,
    processes: int = 1,
    report: Callable[[int, str], None] = lambda done, left: None,
) -> Grid:
    """Measures methods in every cell; the numbers do not depend on the number of processes.

    Args:
        specs: methods as ``offcorr compare`` takes them: a name with or without options, or ``file.py:method``; none:
            every method.
        draws: batches drawn of each size, for a method that couples the sequences of a batch.
        report: called with the number of finished cells and how much is left, in words.

    Raises:
        ValueError: a method cannot be measured; the message names it.

    >>> grid = measured(cells(["noise"], [3], ["tabular"], ["grpo"], [0.5], [0]), ["ppo", "sequence_is"])
    >>> round(grid.found[0].values["bias"][0], 3), grid.found[0].values["bias"][1] < 1e-12
    (0.91, True)
    """
    worlds = [tuple(group) for _, group in itertools.groupby(chosen, _policies)]
    methods = compare.named_methods(specs)
    coupled = sum(couples(loss_fn) for _, loss_fn in methods)
    costs = {world: len(world) * _seconds(world[0].setting, len(methods), coupled * draws) for world in worlds}
    clock, spent, done = Clock(sum(costs.values()), len(worlds), processes), 0.0, 0
    found: dict[Cell, Found] = {}
    missing: list[tuple[Cell, str]] = []
    longest_first = sorted(worlds, key=costs.__getitem__, reverse=True)
    for world, outcome in shared_out(_measure, longest_first, processes, _prepare, (specs, draws)):
        if isinstance(outcome, str):
            missing += [(cell, outcome) for cell in world]
        else:
            found |= dict(zip(world, outcome, strict=True))
        spent, done = spent + costs[world], done + len(world)
        report(done, f"cells{clock.left(spent)}")
    kept = [cell for cell in chosen if cell in found]
    missing.sort(key=lambda left: chosen.index(left[0]))
    return Grid(methods, draws, kept, [found[cell] for cell in kept], missing)


def _policies(cell: Cell) -> Cell:
    """The same for cells that differ in the advantages alone."""
    return cell._replace(setting=dataclasses.replace(cell.setting, advantages="grpo"))


def _seconds(setting: Setting, methods: int, draws: int) -> float:
    """An estimate of the time of one cell on one core of a server."""
    sequences = setting.vocabulary**setting.length
    world = sequences * (6e-5 if setting.policy == "tied" else 1e-5)
    return world + methods * (1e-3 + 1.5e-6 * sequences) + 5e-3 * draws


Shared = tuple[Cell, ...]
"""Cells that share their policies."""


_prepared: list[Any] = []
"""In a process that measures: the methods and the number of draws."""


def _prepare(specs: Sequence[str], draws: int) -> None:
    _prepared[:] = [compare.named_methods(specs), draws]


def _measure(world: Shared) -> list[Found] | str:
    """The numbers of each cell, or the reason why the world does not exist."""
    methods, draws = _prepared
    try:
        policies = World.of(world[0].setting)
    except ValueError as error:
        return str(error)
    return [_in_cell(dataclasses.replace(policies, setting=cell.setting), methods, draws) for cell in world]


def _in_cell(world: World, methods: Sequence[tuple[str, Correction]], draws: int) -> Found:
    rows = compare.compare(world, methods, draws, timed=False)
    same = list(range(len(rows)))
    for group in comparison.same_updates(rows):
        first, *others = (place for place, row in enumerate(rows) if any(row is other for other in group))
        for other in others:
            same[other] = first
    columns = {column.key: column.value for column in comparison.COLUMNS}
    other_gap = "; ".join(comparison.other_gaps(world).values())
    return Found({key: [columns[key](row) for row in rows] for key in KEYS}, same, other_gap)


def as_data(
    grid: Grid, head: dict[str, Any], every_cell: bool = False, failing: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The result file: summaries over all cells and along every axis, as lists in the order of ``columns``."""
    along = {
        axis: {str(at): at for at in dict.fromkeys(cell.at(axis) for cell in grid.cells)} for axis in AXES
    }  # in the order of the command
    names = [name for name, _ in grid.methods]

    methods = []
    for number, (name, loss_fn) in enumerate(grid.methods):
        by = {
            axis: {
                word: results.rounded(grid.summary(number, lambda cell, axis=axis, at=at: cell.at(axis) == at))  # type: ignore[misc]
                for word, at in places.items()
            }
            for axis, places in along.items()
        }
        row = {"method": name, "drawn": grid.draws if couples(loss_fn) else 0, "config": loss_fn.to_config()}
        row |= {"fails_check": failing.get(name)}
        row |= {"all": results.rounded(grid.summary(number)), "by": by}
        if every_cell:
            row["cells"] = [results.rounded([found.values[key][number] for key in KEYS]) for found in grid.found]
        methods.append(row)
    data = head | {
        "columns": {column.key: f"{column.of}: {column.formula}" for column in SUMMARY},
        "cells": len(grid.cells),
        "left_out": [{"cell": str(cell), "why": why} for cell, why in grid.left_out],
        "other_gaps": [
            {"cell": str(cell), "why": found.other_gap}
            for cell, found in zip(grid.cells, grid.found, strict=True)
            if found.other_gap
        ],
        "same_update": [[names[method] for method in group] for group in grid.groups],
        "illustrated": comparison.illustrated(names),
        "note": READING,
        "methods": methods,
    }
    if every_cell:
        data |= {"cell_columns": list(KEYS), "cell_names": [str(cell) for cell in grid.cells]}
    return data


# -- the table and the picture -------------------------------------------------------------------------------


def table(data: dict[str, Any], width: int = 80) -> str:
    """One row per group of methods with the same update, and the caption."""
    rows = {row["method"]: row for row in data["methods"]}
    shown = [rows[group[0]] for group in data["same_update"]]
    label = min(LABEL, max(len(_label(row)) for row in shown))
    heads = [f"dir {SMALL}", f"dir {LARGE}", f"rmse {SMALL}", f"rmse {LARGE}", "bias"]
    lines = [
        " " * label + "".join(f"{head:>13}" for head in heads),
        " " * label + f"{'mean':>7}{'worst':>6}" * len(heads) + f"{'cos<0':>6}",
    ]
    for row in shown:
        *above, last = folded(_label(row), label)
        numbers = [_short(value) for value in row["all"][:-1]]
        pairs = "".join(f"{mean:>7}{worst:>6}" for mean, worst in zip(numbers[::2], numbers[1::2], strict=True))
        lines += [*above, f"{last:<{label}}{pairs}{row['all'][-1]:>6.0f}"]
    return "\n".join([*lines, "", *_caption(data, width)])


def _label(row: dict[str, Any]) -> str:
    return marked(row) + (" *" if row["drawn"] else "")


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for digits in (2, 1, 0):
        if len(text := f"{value:.{digits}f}") <= 5:
            return text
    return f"{value:.0e}"


def _caption(data: dict[str, Any], width: int) -> list[str]:
    heads = [
        ("dir", "direction quality E<G, g> / (sqrt(E|G|^2) |g|) over the best of the cell, at N = 64 and 1024"),
        ("rmse", "sqrt(bias^2 + var) over the smallest of the cell; its mean is the geometric one"),
        ("bias", "|E G - g| / |g|"),
        ("cos<0", f"cells of {data['cells']} in which the mean update leads away from g; a clip is a trust region"),
    ]
    notes = [
        "G is the gradient of a batch of N sequences drawn from the engine, g the true policy gradient. The best of a "
        "cell is the best of the methods measured here."
    ]
    if drawn := max(row["drawn"] for row in data["methods"]):
        notes.append(f"* couples the sequences of a batch: {drawn} batches of each size were drawn; all else is exact.")
    notes += [*notes_of(data["methods"]), *data["illustrated"]]
    for group in data["same_update"]:
        if len(group) > 1:
            notes.append(f"The same update in every cell: {', '.join(group)}.")
    if others := data.get("other_gaps"):  # a file of an earlier version has none
        cells = f"{len(others)} cell{'s' * (len(others) > 1)}"
        first = f"the first: {others[0]['cell']} ({others[0]['why'].partition(' ')[2]})"
        notes.append(f"The gap reached is more than a tenth off the one asked for in {cells}, {first}.")
    if missing := data["left_out"]:
        notes.append(f"Left out, since it does not exist: {len(missing)} cells, the first: {missing[0]['cell']}.")
    return [
        *entries(heads, width),
        *entries([("", note) for note in notes], width),
        "",
        *entries([("", data["note"])], width),
    ]


def picture(data: dict[str, Any], path: Path) -> None:
    """Draws the mean of the direction quality over the best of the cell, by regime; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {row["method"]: row for row in data["methods"]}
    groups = data["same_update"]
    regimes = list(rows[groups[0][0]]["by"]["regime"])
    figure, axes = plt.subplots(
        1, 2, figsize=(4 + len(regimes), 1.8 + 0.22 * len(groups)), sharey=True, constrained_layout=True
    )
    for axis, size in zip(axes, SIZES, strict=True):
        column = list(data["columns"]).index(f"direction_{size}_mean")
        values = [[rows[group[0]]["by"]["regime"][regime][column] for regime in regimes] for group in groups]
        image = axis.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
        for y, x in itertools.product(range(len(groups)), range(len(regimes))):
            colour = "white" if abs(values[y][x]) > 0.6 else "black"
            axis.text(x, y, f"{values[y][x]:.2f}", ha="center", va="center", fontsize=6, color=colour)
        axis.set_xticks(range(len(regimes)), regimes, rotation=30, ha="right", fontsize=8)
        axis.set_title(f"N = {size}", fontsize=10)
    axes[0].set_yticks(range(len(groups)), [_row_name(group, rows) for group in groups], fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8)
    figure.suptitle(
        f"Direction quality over the best of the cell\nmean by regime, {data['cells']} cells; not a ranking",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _row_name(group: Sequence[str], rows: dict[str, Any]) -> str:
    others = f" and {len(group) - 1} more" if len(group) > 2 else "".join(f", {name}" for name in group[1:])
    return _label(rows[group[0]]) + others


# -- the command ---------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``exact``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "exact",
        help="bias, RMSE and direction of every method's gradient, over a grid of settings of `offcorr compare`",
        description="Every method in every cell of a grid, exactly: the policies are so small that every sequence they "
        "can produce is enumerated. A cell is one setting of `offcorr compare`, whose --help explains the names. "
        "The default grid takes some minutes on two cores.",
        formatter_class=HelpFormatter,
        epilog=examples(
            "offcorr bench exact --output exact.json --picture exact.png",
            "offcorr bench exact ppo minpro mine.py:my_method --regimes stale drift+quantised --lengths 6",
        ),
    )
    add = parser.add_argument
    compare.add_methods(parser)
    add(
        "--regimes",
        nargs="+",
        choices=tuple(REGIMES),
        default=tuple(REGIMES),
        metavar="NAME",
        help="how the policies differ: staleness (noise, stale, drift, early), engine (quantised, sharper, flatter) or "
        f"both, where the engine's gap is {ENGINE_GAP:g} (default: all)",
    )
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=LENGTHS,
        metavar="N",
        help="tokens per sequence: up to 6 with a vocabulary of 4, above with one of 2 "
        f"(default: {' '.join(map(str, LENGTHS))})",
    )
    for flag, choices in (("--policies", get_args(Policy)), ("--advantages", get_args(Advantages))):
        known = ", ".join(choices)
        add(flag, nargs="+", choices=choices, default=choices, metavar="NAME", help=f"{known} (default: both)")
    add(
        "--gaps",
        nargs="+",
        type=float,
        default=GAPS,
        metavar="SHARE",
        help="staleness or engine gap, as the share of the samples that it costs (default: .1 .5 .85)",
    )
    add("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="seeds, each a cell (default: 0 1)")
    add(
        "--draws",
        type=int,
        default=DRAWS,
        metavar="N",
        help="batches drawn of each size, for methods that use statistics of the batch (default %(default)s)",
    )
    add_processes(parser)
    add("--output", type=Path, metavar="FILE.json", help="write the numbers as JSON")
    add("--every-cell", action="store_true", help="write also the numbers of every cell (about a megabyte)")
    add(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw the quality of the direction by regime (needs matplotlib)",
    )
    add("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    try:
        methods = compare.named_methods(options.methods)
        sides = {name: list(dict.fromkeys(getattr(options, name))) for name in GIVEN}
        chosen = cells(**sides)
        if options.draws < 2:
            raise ValueError(f"--draws is {options.draws}, expected at least 2 batches")
        if options.processes < 1:
            raise ValueError(f"--processes is {options.processes}, expected at least 1")
        results.check_overwrite(options.overwrite, output=options.output, picture=options.picture)
        results.check_picture("--picture", options.picture)
        for option, path in (("--output", options.output), ("--picture", options.picture)):
            if path is not None:
                results.free(path, options.overwrite, option)
        failing = warn_of_failures(options.methods)
        plan = _plan(chosen, methods, options.draws, options.processes)
        with Progress(len(chosen), plan) as progress:
            grid = measured(chosen, options.methods, options.draws, options.processes, progress)
        if not grid.cells:
            raise ValueError(f"none of the cells exists; {grid.left_out[0][0]}: {grid.left_out[0][1]}")
    except ValueError as error:
        print(f"offcorr bench exact: error: {error}", file=sys.stderr)
        return 2
    sides["draws"] = [options.draws]
    flags = [word for name, values in sides.items() for word in (f"--{name}", *map(str, values))]
    command = shlex.join(["offcorr", "bench", "exact", *options.methods, *flags])
    data = as_data(grid, results.about(command, sides), options.every_cell, failing)
    if options.output is not None:
        results.save(data, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    print(table(data), flush=True)
    if options.picture is not None:
        picture(data, options.picture)
        print(f"wrote {options.picture}", file=sys.stderr)
    return 0


GIVEN = ("regimes", "lengths", "policies", "advantages", "gaps", "seeds")
"""The sides of the grid, by the names of their options."""


def _plan(chosen: Sequence[Cell], methods: Sequence[tuple[str, Correction]], draws: int, processes: int) -> str:
    coupled = sum(couples(loss_fn) for _, loss_fn in methods)
    work = sum(_seconds(cell.setting, len(methods), coupled * draws) for cell in chosen)
    seconds = Clock(work, len(chosen), processes).seconds
    return (
        f"offcorr bench exact: methods: {len(methods)}, cells: {len(chosen)}, processes: {processes}; "
        f"about {duration(5 * math.ceil((seconds + 0.5) / 5))} on idle cores like ours"
    )
