"""The tables of docs/lab.md and docs/which.md, made from the committed results of the lab.

    python benchmarks/lab_pages.py [--check]

It reads the files ``RESULTS`` of benchmarks/results; each holds the command that made it.  A table stands between
``<!-- lab NAME -->`` and ``<!-- end -->``; ``--check`` changes nothing and fails where one is out of date.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from offcorr.cli.tables import markdown
from offcorr.lab import results
from offcorr.methods.registry import catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/lab.md", "docs/which.md")
BLOCK = re.compile(r"(<!-- lab (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
ARENAS = (("arena_default",), ("arena", "arena_more", "arena_lam", "arena_mu_grpo"))
"""The arena's files in groups; a method is compared with the best of its own.  Of a method in two groups the
one with more seeds counts."""
RESULTS = ("exact", "loop", "loop_long", "loop_variants", *ARENAS[0], *ARENAS[1], "arena_ess")
OWN = "near_overlap"
SAFEST = "minpro"
"""What docs/which.md advises where nothing is known: its numbers stand in every row there."""

ENDS = "rate smallest, largest"
"""Over the column of settings whose best learning rate lies at an end of those tried."""

LEVEL = 2.0
"""Standard errors of a paired difference within which two methods are said to be level."""

Row = dict[str, str]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """A committed result."""
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"lab_{name}.json").read_text()))


# -- the three worlds ----------------------------------------------------------------------------------------


def exact() -> list[Row]:
    """Methods with different updates, by direction quality in large batches."""
    data = result("exact")
    columns = list(data["columns"])
    rows = {row["method"]: dict(zip(columns, row["all"], strict=True)) for row in data["methods"]}
    drawn = {row["method"] for row in data["methods"] if row["drawn"]}
    groups = sorted(data["same_update"], key=lambda group: -(rows[group[0]]["direction_1024_mean"] or -1))
    heads = {
        "direction, N = 64": ("direction_64_mean", "direction_64_worst"),
        "direction, N = 1024": ("direction_1024_mean", "direction_1024_worst"),
        "RMSE, N = 1024": ("rmse_1024_mean", "rmse_1024_worst"),
        "bias": ("bias_mean", "bias_worst"),
    }
    return [
        {"method": ", ".join(f"`{name}`" for name in group) + (" *" if group[0] in drawn else "")}
        | {head: " / ".join(_short(rows[group[0]][key]) for key in keys) for head, keys in heads.items()}
        | {"cos < 0": f"{rows[group[0]]['away']:.0f}"}
        for group in groups
    ]


def loop() -> list[Row]:
    """Every method: smallest and mean relative return of both parts."""
    data = result("loop")
    rows = sorted(data["methods"], key=lambda row: -row["summary"]["held-out"]["mean"])
    return [
        {"method": f"`{row['method']}`"} | _parts(row) | {ENDS: _at_the_ends(row, data["settings"])} for row in rows
    ]


def _parts(row: Mapping[str, Any]) -> Row:
    line: Row = {}
    for part in ("held-out", "development"):
        summary = row["summary"][part]
        line[f"{part}, mean"] = f"{summary['mean']:.3f} ± {summary['error']:.3f}"
        line[f"{part}, worst"] = f"{summary['worst']:.2f} ({summary['worst_setting']})"
    return line | {"held-out, over all rates": f"{row['summary']['held-out']['every_rate']:.2f}"}


def _at_the_ends(row: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> str:
    """In how many settings the best learning rate was the smallest tried, and in how many the largest."""
    ends = [
        sum(rate == setting["rates"][end] for rate, setting in zip(row["rate"], settings, strict=True))
        for end in (0, -1)
    ]
    return f"{ends[0]}, {ends[1]} of {len(settings)}"


def loop_long() -> list[Row]:
    """The methods that were run with more seeds."""
    data = result("loop_long")
    rows = sorted(data["methods"], key=lambda row: -row["summary"]["held-out"]["mean"])
    return [
        {"method": f"`{row['method']}`"} | _parts(row) | {ENDS: _at_the_ends(row, data["settings"])} for row in rows
    ]


def variants() -> list[Row]:
    """Variants of near_overlap and what was tried on top of it."""
    rows = sorted(result("loop_variants")["methods"], key=lambda row: -row["summary"]["held-out"]["mean"])
    return [{"variant": f"`{row['method'].rpartition(':')[2]}`"} | _parts(row) for row in rows]


def loop_settings() -> list[Row]:
    """Setting by setting: the methods that were run with more seeds."""
    data = result("loop_long")
    methods = sorted(data["methods"], key=lambda row: -row["summary"]["held-out"]["mean"])
    held_out = set(data["parts"]["held-out"])
    return [
        {
            "setting": setting["name"] + ("" if setting["name"] in held_out else " (development)"),
            "tokens, lag": f"{setting['length']}, {setting['lag']}",
        }
        | {f"`{row['method']}`": _level(row["relative"][place], row["error"][place]) for row in methods}
        for place, setting in enumerate(data["settings"])
    ]


def _level(relative: float, error: float) -> str:
    """A relative return; bold where it is level with the best."""
    level = 1 - relative <= LEVEL * (error or 0) + 1e-9
    return f"**{relative:.2f}**" if level else f"{relative:.2f}"


def arena() -> list[Row]:
    """Every sampler and method; differences between the runs of the same seeds."""
    lines = []
    for cell, runs in sorted(trained().items()):
        for run in sorted(runs.values(), key=lambda run: -run.relative):
            lines.append({"sampler": "lag {}, {}".format(*cell)} | _arena_row(run))
    return lines


class Trained(NamedTuple):
    """A method in the arena, and the best of its group at the same lag and precision: rows of the result files."""

    row: Mapping[str, Any]
    best: Mapping[str, Any]

    @property
    def against(self) -> list[float]:
        """The AUC of the best, of the seeds that this method has."""
        known = dict(zip(self.best["seeds"], self.best["auc_of_seeds"], strict=True))
        return [known[seed] for seed in self.row["seeds"]]

    @property
    def relative(self) -> float:
        """The mean AUC over that of the best method's runs of the same seeds."""
        return statistics.fmean(self.row["auc_of_seeds"]) / statistics.fmean(self.against)


@functools.cache
def trained() -> dict[tuple[int, str], dict[str, Trained]]:
    """Every method that was trained with a sampler, by lag and precision."""
    cells: dict[tuple[int, str], dict[str, Trained]] = {}
    for group in ARENAS:
        rows = [row for name in group for row in result(name)["rows"]]
        for cell in {(row["lag"], row["precision"]) for row in rows}:
            here = {row["method"]: row for row in rows if (row["lag"], row["precision"]) == cell}
            best = _best(here)
            known = cells.setdefault(cell, {})
            for name, row in here.items():
                if name not in known or len(row["seeds"]) >= len(known[name].row["seeds"]):
                    known[name] = Trained(row, best)
    return cells


def _best(rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The highest mean AUC among the methods with most seeds."""
    most = max(len(row["seeds"]) for row in rows.values())
    return max((row for row in rows.values() if len(row["seeds"]) == most), key=lambda row: row["auc"]["mean"])


def _arena_row(run: Trained) -> Row:
    row = run.row
    away = results.difference(row["auc_of_seeds"], run.against)
    return {
        "method": f"`{row['method']}`",
        "AUC": f"{row['auc']['mean']:.3f} ({row['auc']['low']:.3f} to {row['auc']['high']:.3f})",
        "final": f"{row['final']['mean']:.3f}",
        "largest fall": f"{row['fall']['mean']:.3f}",
        "to the best": "" if row is run.best else f"{away.mean:+.3f} ± {away.error:.3f}".replace(" ± nan", ""),
        "collapsed": f"{row['collapsed']} of {row['runs']}",
    }


# -- which method --------------------------------------------------------------------------------------------

SITUATIONS: dict[str, tuple[tuple[str, ...], tuple[tuple[int, str], ...]]] = {
    "on-policy": (("on-policy",), ((0, "fp32"),)),
    "4 updates behind": (("lag-4",), ((4, "int8"),)),
    "16 to 32 behind, 10 to 32 tokens": (
        (
            *("tied-10-lag-16", "tied-32-lag-16", "tied-32-lag-32", "tabular-32-lag-32"),
            *("keys", "free", "band", "sgd", "four-prompts"),
        ),
        ((16, "int8"),),
    ),
    "24 to 32 behind, 48 to 64 tokens": (("tabular-48-lag-24", "two-symbols", "tied-64-lag-32"), ()),
    "48 to 64 behind, 10 to 30 tokens": (
        ("tied-20-lag-48", "tabular-10-lag-64", "free-20-lag-64"),
        ((64, "int8"),),
    ),
    "64 behind, 64 to 96 tokens": (("tied-64-lag-64", "tabular-64-lag-64", "tied-96-lag-64"), ()),
    "a coarse engine besides": (("quantised-32-lag-32",), ((16, "int4"),)),
}
"""Situation -> settings of the loop, samplers of the arena.  The lengths are the loop's; the arena's outputs have some
30 tokens."""

NEAR_THE_BEST, FAR = 0.97, 0.85
"""Relative numbers from which a method is near the best of a situation, and below which it is far from it."""

WELL_KNOWN = ("reinforce", "ppo", "gspo", "cispo", "minpro", "ctpo", "topr", "token_is", "sequence_is", OWN)
"""The methods that are named where they are far from the best."""


def situations() -> list[Row]:
    """By situation: which methods are near the best, and which well-known ones are far from it, in loop and arena."""
    data = result("loop")
    places = {setting["name"]: place for place, setting in enumerate(data["settings"])}
    rows: list[Row] = []
    for situation, (settings, cells) in SITUATIONS.items():
        looped = {
            row["method"]: statistics.fmean(row["relative"][places[setting]] for setting in settings)
            for row in data["methods"]
        }
        top = max(looped.values())
        looped = {name: value / top for name, value in looped.items()}
        arena = {name: run.relative for cell in cells for name, run in trained()[cell].items()}
        rows.append(
            {
                "the sampler is": situation,
                "loop: near the best": _names(looped, lambda value: value >= NEAR_THE_BEST),
                "loop: far from it": _names({n: looped[n] for n in WELL_KNOWN}, lambda value: value < FAR),
                "arena: near the best": _names(arena, lambda value: value >= NEAR_THE_BEST) if cells else "",
                "arena: far from it": _names(arena, lambda value: value < FAR) if cells else "",
                f"`{SAFEST}`, loop": f"{looped[SAFEST]:.2f}",
                f"`{SAFEST}`, arena": f"{arena[SAFEST]:.2f}" if SAFEST in arena else "",
            }
        )
    return rows


def _names(values: Mapping[str, float], chosen: Callable[[float], bool]) -> str:
    found = sorted((name for name, value in values.items() if chosen(value)), key=lambda name: -values[name])
    if len(found) == len(values) > 10:
        return f"all {len(found)}"
    return ", ".join(f"`{name}` {values[name]:.2f}" for name in found)


# -- side by side --------------------------------------------------------------------------------------------


def worlds() -> list[Row]:
    """The methods that were measured in all three worlds, each number relative to the best of its world."""
    columns = list(result("exact")["columns"])
    exactly = {row["method"]: dict(zip(columns, row["all"], strict=True)) for row in result("exact")["methods"]}
    looped = {row["method"]: row["summary"]["held-out"] for row in result("loop")["methods"]}
    lowest = {row["method"]: min(row["relative"]) for row in result("loop")["methods"]}
    cells = {f"lag {lag}": trained()[lag, "int8"] for lag in (16, 64)}
    relative = {
        name: {cell: runs[name].relative for cell, runs in cells.items()}
        for name in exactly.keys() & looped.keys()
        if all(name in runs for runs in cells.values())
    }
    worst = {name: min(lowest[name], *numbers.values()) for name, numbers in relative.items()}
    return [
        {
            "method": f"`{name}`",
            "exact: direction at N = 1024": _short(exactly[name]["direction_1024_mean"]),
            "loop: mean, held-out": f"{looped[name]['mean']:.2f}",
            "loop: worst of all settings": f"{lowest[name]:.2f}",
        }
        | {f"arena: AUC, {cell}": f"{value:.2f}" for cell, value in relative[name].items()}
        | {
            "arena: collapses": " + ".join(
                f"{runs[name].row['collapsed']} of {runs[name].row['runs']}" for runs in cells.values()
            ),
            "worst of loop and arena": f"{worst[name]:.2f}",
        }
        for name in sorted(worst, key=lambda name: -worst[name])
    ]


def lam() -> list[Row]:
    """near_overlap by lam: the closed loop by length, the arena by lag."""
    data = result("loop_long")
    lengths = sorted({setting["length"] for setting in data["settings"] if setting["lag"] >= 16})
    rows: list[Row] = []
    for value, row in sorted(_by_lam(data["methods"]).items()):
        line = {"lam": f"{value:g}"}
        for length in lengths:
            found = [
                relative
                for relative, setting in zip(row["relative"], data["settings"], strict=True)
                if setting["length"] == length and setting["lag"] >= 16
            ]
            line[f"loop, {length} tokens"] = f"{statistics.fmean(found):.3f}"
        for lag in (16, 64):
            known = _by_lam([run.row for run in trained()[lag, "int8"].values()])
            name = known[value]["method"] if value in known else None
            line[f"arena, lag {lag}"] = f"{trained()[lag, 'int8'][name].relative:.3f}" if name else ""
        rows.append(line)
    return rows


def ess() -> list[Row]:
    """Methods with and without the ESS-scaled learning rate, in runs of one processor."""
    lines: list[Row] = []
    rows = result("arena_ess")["rows"]
    for lag in sorted({row["lag"] for row in rows}):
        here = sorted((row for row in rows if row["lag"] == lag), key=lambda row: -row["auc"]["mean"])
        lines += [{"sampler": f"lag {lag}, {row['precision']}"} | _arena_row(Trained(row, here[0])) for row in here]
    return lines


def _by_lam(rows: Sequence[Mapping[str, Any]]) -> dict[float, Mapping[str, Any]]:
    found = {}
    for row in rows:
        match = re.fullmatch(rf"{OWN}(?:\?lam=([\d.]+))?", row["method"])
        if match:
            found[float(match[1] or 0.8)] = row
    return found


def length() -> list[Row]:
    """Mean multipliers by length, as definitions alone decide them: of a positive and of a negative advantage."""
    data = result("length")
    cells = {(row["method"], row["sigma"], row["length"]): row for row in data["rows"]}
    setting = data["setting"]
    grid = list(product(setting["sigmas"], setting["lengths"]))

    def shown(method: str, sigma: float, tokens: int) -> str:
        cell = cells[method, sigma, tokens]
        return f"{cell['up']:.2f} / {cell['down']:.2f}"

    return [
        {"method": f"`{method}`"} | {f"σ {sigma}, {n:,} tokens": shown(method, sigma, n) for sigma, n in grid}
        for method in setting["methods"]
    ]


def seeds() -> list[Row]:
    """How many seeds tell two methods apart in the arena."""
    return [
        {
            "sampler": f"lag {row['lag']}, {row['precision']}",
            "sd of a paired difference in AUC": f"{row['sd']:.3f}",
            **{f"seeds for a difference of {gap}": f"{count}" for gap, count in row["seeds"].items()},
        }
        for row in result("arena")["seeds_needed"]
    ]


def warnings() -> list[Row]:
    """Early warnings in the runs of ``arena``."""
    return _warnings("arena")


def warnings_default() -> list[Row]:
    """Early warnings in the runs of ``arena_default``."""
    return _warnings("arena_default")


def _warnings(name: str) -> list[Row]:
    """Of every metric the threshold that finds most, and of those the one with fewest false alarms."""
    best: dict[tuple[str, bool], Mapping[str, Any]] = {}
    for row in result(name)["warnings"]:
        key = row["metric"], row["above"]
        if key not in best or _worth(row) > _worth(best[key]):
            best[key] = row
    rows = sorted((row for row in best.values() if row["warned"]), key=_worth, reverse=True)
    return [
        {
            "metric": f"`{row['metric'].removeprefix('offcorr/')}`",
            "warns": f"{'>' if row['above'] else '<'} {row['threshold']:g}",
            "collapses found": f"{row['warned']} of {row['collapses']}",
            "updates before, median": f"{row['updates_before']:g}",
            "false alarms": f"{row['false_alarms']} of {row['without_collapse']}",
        }
        for row in rows
    ]


def _worth(row: Mapping[str, Any]) -> float:
    """Share of the collapses found minus share of the other runs alarmed."""
    return float(row["warned"] / max(row["collapses"], 1) - row["false_alarms"] / max(row["without_collapse"], 1))


def sources() -> list[Row]:
    """The result files, what made them, and where."""
    return [
        {
            "file": f"[`{name}`](../benchmarks/results/lab_{name}.json)",
            "command": f"`{data['command']}`",
            "machine": ", ".join(
                (
                    f"{data['machine']['cores']} CPU cores",
                    *filter(None, [data["machine"].get("processor")]),
                    f"torch {data['versions']['torch']}",
                )
            ),
        }
        for name in RESULTS
        for data in [result(name)]
    ]


def _short(value: float | None) -> str:
    return "" if value is None else "0" if abs(value) < 5e-4 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


TABLES: dict[str, Callable[[], list[Row]]] = {
    table.__name__: table
    for table in (
        exact,
        loop,
        loop_long,
        loop_settings,
        variants,
        arena,
        worlds,
        lam,
        ess,
        seeds,
        warnings,
        warnings_default,
        situations,
        length,
        sources,
    )
}


def filled(page: str) -> str:
    """The page with every table made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{marked(markdown(TABLES[match[2]]()))}\n{match[3]}", page)


def marked(table: str) -> str:
    """A table with † behind each method that ran with the values of an illustration, as it lacks a default."""
    names = "|".join(method.name for method in catalogue() if method.example)
    return re.sub(rf"`({names})`", r"`\1` †", table)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    options = parser.parse_args()
    stale = []
    for name in PAGES:
        page = ROOT / name
        fresh = filled(page.read_text())
        if fresh != page.read_text():
            stale.append(name)
            if not options.check:
                page.write_text(fresh)
    if stale:
        print(f"{'out of date' if options.check else 'written'}: {', '.join(stale)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
