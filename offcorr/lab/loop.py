"""``offcorr bench loop``: methods in closed-loop training with exact return, over settings and learning rates.

``offcorr.lab.closed_loop`` has the settings and trains.  A cell is one method in one setting, with all its seeds and
learning rates.  Here the cells are shared out to processes, kept while a command is unfinished, and summed up.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.lab import compare, comparison, results
from offcorr.lab.closed_loop import DEVELOPMENT, HELD_OUT, RATES, Setting, alone, evaluations, train
from offcorr.lab.contract import marked, notes_of, warn_of_failures
from offcorr.lab.processes import Clock, add_processes, shared_out
from offcorr.lab.text import HelpFormatter, Progress, duration, entries, examples, folded
from offcorr.stages.checks import nearest

__all__ = ["Found", "Plan", "add_parser", "as_data", "measured", "picture", "run", "table"]

PARTS = {"development": DEVELOPMENT, "held-out": HELD_OUT}
SURE = 2.0
"""Standard errors of a paired difference within which a method is said to be level with the best."""
CHOSEN_ON = "Development settings are those on which choices were made (near_overlap's lam, the learning rates tried)"
NOT_A_RANKING = "One kind of world is not a ranking: docs/lab.md has two more, and where they disagree."


class Found(NamedTuple):
    """One cell: mean return over training and last return [seeds][rates], and the seeds' mean curves [rates][steps]."""

    auc: list[list[float]]
    final: list[list[float]]
    curves: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one command.

    Args:
        specs: methods as ``offcorr compare`` takes them; none: every method.
        parts: the settings by part, "development" or "held-out".
        rates: learning rates; None: those of the setting's optimizer.
        seeds, steps: numbers of seeds and of optimizer steps.

    Raises:
        ValueError: a number is out of range, a setting is there twice, or a method is unknown.
    """

    specs: tuple[str, ...] = ()
    parts: Mapping[str, tuple[Setting, ...]] = dataclasses.field(default_factory=lambda: dict(PARTS))
    rates: tuple[float, ...] | None = None
    seeds: int = 3
    steps: int = 300

    def __post_init__(self) -> None:
        for name, low in (("seeds", 1), ("steps", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {low}")
        if self.rates is not None and (not self.rates or any(not rate > 0 for rate in self.rates)):
            raise ValueError(f"rates is {self.rates}, expected learning rates above 0")
        names = [setting.name for setting in self.settings]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"settings is {', '.join(names) or 'empty'}, expected each once, and at least one")

    @property
    def settings(self) -> list[Setting]:
        """The settings of all parts."""
        return [setting for part in self.parts.values() for setting in part]

    def rates_of(self, setting: Setting) -> tuple[float, ...]:
        """The learning rates that are tried in a setting, in rising order."""
        return tuple(sorted(set(self.rates or RATES[setting.optimizer])))

    def seconds(self, loss_fn: Correction, setting: Setting) -> float:
        """An estimate of the time of one cell on one core of a server."""
        replicas = self.seeds * len(self.rates_of(setting))
        tokens = replicas * setting.prompts * setting.samples * setting.length
        return self.steps * (1e-3 + 2.6e-7 * tokens + 1.7e-3 * replicas * alone(loss_fn))


# -- the cells -----------------------------------------------------------------------------------------------

Cell = tuple[str, str]
"""The names of a method and of a setting."""


def measured(
    plan: Plan,
    folder: Path | None = None,
    processes: int = 1,
    report: Callable[[int, str], None] = lambda done, left: None,
) -> dict[Cell, Found]:
    """Trains every method in every setting; the numbers do not depend on the number of processes.

    Args:
        folder: where finished cells are kept and, where they are there already, taken from; None: nowhere.
        report: called with the number of finished cells and how much is left, in words.

    Raises:
        ValueError: a method cannot be trained in a setting; the message names it.

    >>> plan = Plan(("cispo",), {"development": (Setting("short", length=4, lag=2),)}, rates=(0.1,), seeds=2, steps=10)
    >>> found = measured(plan)["cispo", "short"]
    >>> len(found.auc), len(found.curves[0])
    (2, 2)
    """
    methods = dict(compare.named_methods(plan.specs))
    settings = {setting.name: setting for setting in plan.settings}
    costs = {(m, s): plan.seconds(methods[m], settings[s]) for s in settings for m in methods}
    cells = sorted(costs, key=lambda cell: (-settings[cell[1]].length, cell[1], -costs[cell]))
    found = kept(plan, folder)
    todo = [cell for cell in cells if cell not in found]
    clock, spent = Clock(sum(costs[cell] for cell in todo), len(todo), processes), 0.0
    for cell, outcome in shared_out(_train, todo, processes, _prepare, (plan,)):
        found[cell] = outcome
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            results.save(outcome._asdict(), _path(folder, plan, cell, methods, settings))
        spent += costs[cell]
        report(len(found), f"cells, {cell[0]} in {cell[1]} done{clock.left(spent)}")
    return {cell: found[cell] for cell in costs}


def _path(
    folder: Path, plan: Plan, cell: Cell, methods: Mapping[str, Correction], settings: Mapping[str, Setting]
) -> Path:
    """The file of a cell; its name holds a digest of all that decides the numbers."""
    method, setting = cell
    source = Path(method.partition(":")[0])
    decides = {
        "method": method,
        "config": methods[method].to_config(),
        "source": source.read_text() if source.suffix == ".py" else "",
        "setting": dataclasses.asdict(settings[setting]),
        "rates": plan.rates_of(settings[setting]),
        "seeds": plan.seeds,
        "steps": plan.steps,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', f'{setting}--{method}')[:100]}-{digest}.json"


def kept(plan: Plan, folder: Path | None) -> dict[Cell, Found]:
    """The cells of a plan that an earlier call has finished."""
    if folder is None:
        return {}
    methods, settings = dict(compare.named_methods(plan.specs)), {setting.name: setting for setting in plan.settings}
    cells = [(method, setting) for setting in settings for method in methods]
    paths = {cell: _path(folder, plan, cell, methods, settings) for cell in cells}
    return {cell: Found(**json.loads(path.read_text())) for cell, path in paths.items() if path.exists()}


_prepared: dict[str, Any] = {}
"""In a process that trains: the plan, its methods and its settings by name."""


def _prepare(plan: Plan) -> None:
    settings = {setting.name: setting for setting in plan.settings}
    _prepared.update(plan=plan, methods=dict(compare.named_methods(plan.specs)), settings=settings)


def _train(cell: Cell) -> Found:
    method, plan, setting = cell[0], _prepared["plan"], _prepared["settings"][cell[1]]
    try:
        run = train(_prepared["methods"][method], setting, plan.rates_of(setting), plan.seeds, plan.steps)
    except (ValueError, TypeError) as error:
        raise ValueError(f"METHOD {method!r} cannot be trained in setting {setting.name!r}: {error}") from error
    return Found(run.auc.tolist(), run.returns[:, :, -1].tolist(), run.returns.mean(0).tolist())


# -- summed up -----------------------------------------------------------------------------------------------


def as_data(
    plan: Plan, found: Mapping[Cell, Found], head: Mapping[str, Any], failing: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The result file; the lists of a method are in the order of the settings."""
    names = list(dict.fromkeys(method for method, _ in found))
    order = [setting.name for setting in plan.settings]
    rates = {setting.name: plan.rates_of(setting) for setting in plan.settings}
    chosen = {cell: _best_rate(auc.auc) for cell, auc in found.items()}
    seeds = {cell: [by_rate[chosen[cell]] for by_rate in found[cell].auc] for cell in found}  # at the best rate
    auc = {cell: statistics.fmean(values) for cell, values in seeds.items()}
    best = {setting: max(names, key=lambda method: auc[method, setting]) for setting in order}
    tops = {setting: auc[best[setting], setting] for setting in order}
    methods: list[dict[str, Any]] = []
    for method in names:
        cells = [(method, setting) for setting in order]
        away = [results.difference(seeds[cell], seeds[best[cell[1]], cell[1]]) for cell in cells]
        row: dict[str, Any] = {
            "method": method,
            "fails_check": failing.get(method),
            "summary": {},
            "relative": [auc[cell] / tops[cell[1]] for cell in cells],
            "error": [difference.error / tops[setting] for difference, setting in zip(away, order, strict=True)],
            "rate": [rates[cell[1]][chosen[cell]] for cell in cells],
            "every_rate": [statistics.fmean(sum(found[cell].auc, [])) / tops[cell[1]] for cell in cells],
            "auc": [auc[cell] for cell in cells],
            "final": [statistics.fmean(last[chosen[cell]] for last in found[cell].final) for cell in cells],
            "curves": [found[cell].curves[chosen[cell]] for cell in cells],
            "auc_by_seed_and_rate": [found[cell].auc for cell in cells],
        }
        methods.append(row)
    for part, within in plan.parts.items():
        inside = [setting.name for setting in within]
        relative = {
            m: [statistics.fmean(seeds[m, s][i] / tops[s] for s in inside) for i in range(plan.seeds)] for m in names
        }
        leader = max(names, key=lambda method: statistics.fmean(relative[method]))
        for known in methods:
            at = {
                key: [known[key][order.index(setting)] for setting in inside]
                for key in ("relative", "every_rate", "final")
            }
            worst = min(at["relative"])
            known["summary"][part] = {
                "worst": worst,
                "worst_setting": inside[at["relative"].index(worst)],
                "mean": statistics.fmean(at["relative"]),
                "error": results.difference(relative[known["method"]], relative[leader]).error,
                "every_rate": statistics.fmean(at["every_rate"]),
                "final": statistics.fmean(at["final"]),
            }
    return {
        **head,
        "parts": {part: [setting.name for setting in settings] for part, settings in plan.parts.items()},
        "settings": [dataclasses.asdict(setting) | {"rates": rates[setting.name]} for setting in plan.settings],
        "seeds": plan.seeds,
        "steps": plan.steps,
        "evaluated": evaluations(plan.steps),
        "best": best,
        "columns": COLUMNS,
        "illustrated": comparison.illustrated(names),
        "note": _reading(plan.parts),
        "methods": results.rounded(methods),
    }


def _reading(parts: Mapping[str, Any]) -> str:
    """The footer of these parts: which numbers to believe."""
    others = "; believe the held-out ones. " if "held-out" in parts else "; --settings held-out has others. "
    return (CHOSEN_ON + others if "development" in parts else "") + NOT_A_RANKING


COLUMNS = {
    "relative": "mean exact return over training at the method's best learning rate, over that of the best method",
    "error": "standard error of its paired difference to the best method, in the same unit",
    "rate": "that learning rate",
    "every_rate": "mean return over training, the mean of all learning rates, over the best method's at its best rate",
    "auc": "mean return over training at the best learning rate",
    "final": "return after the last step at that rate",
    "summary": "of each part: smallest and mean of relative; error of the paired difference to the largest mean; means",
}


def _best_rate(auc: Sequence[Sequence[float]]) -> int:
    means = [statistics.fmean(by_seed) for by_seed in zip(*auc, strict=True)]
    return means.index(max(means))


# -- the table and the picture -------------------------------------------------------------------------------


def table(data: Mapping[str, Any], width: int = 110) -> str:
    """Per part: the summary, then every setting; methods in the order of the first part's mean."""
    first = next(iter(data["parts"]))
    rows = sorted(data["methods"], key=lambda row: -row["summary"][first]["mean"])
    label = min(30, max(len(marked(row)) for row in rows))
    order = [setting["name"] for setting in data["settings"]]
    edges = {setting["name"]: (setting["rates"][0], setting["rates"][-1]) for setting in data["settings"]}
    lines: list[str] = []
    for part, names in data["parts"].items():
        places = [order.index(name) for name in names]
        heads = "".join(f"{place + 1:>6} " for place in places)
        lines += [
            f"{part} settings",
            " " * label + f"{'worst':>7}{'mean':>7}{'+-':>6}{'rates':>7}{'final':>7}  |{heads}",
        ]
        for row in rows:
            summary = row["summary"][part]
            error = "" if math.isnan(summary["error"]) else f"{summary['error']:.3f}"
            numbers = f"{summary['worst']:>7.2f}{summary['mean']:>7.2f}{error:>6}"
            numbers += f"{summary['every_rate']:>7.2f}{summary['final']:>7.2f}  |"
            for place in places:
                relative, away = row["relative"][place], 1 - row["relative"][place]
                level = "=" if away <= SURE * row["error"][place] or not away else " "
                low, high = edges[order[place]]
                edge = "" if low == high else {low: "<", high: ">"}.get(row["rate"][place], "")
                numbers += f"{relative:>5.2f}{edge or ' '}{level}"
            *above, last = folded(marked(row), label)
            lines += [*above, f"{last:<{label}}{numbers}".rstrip()]
        lines += [
            "",
            *entries([(str(place + 1), _described(data["settings"][place])) for place in places], width),
            "",
        ]
    one_seed = "; empty, since one seed has none: give --seeds 2 or more" if data["seeds"] == 1 else ""
    notes = [
        ("numbers", "mean exact return over training, over that of the best method of the setting, at best rates"),
        ("=", f"within {SURE:g} standard errors of its paired difference to the best"),
        ("< >", "the best learning rate was the smallest or largest tried, so a better one may exist"),
        ("+-", "standard error of the mean's paired difference to the largest mean" + one_seed),
        ("rates", "the same with the mean over all learning rates: how much depends on the choice of one"),
        ("final", "return after the last step, mean over the settings"),
    ]
    return "\n".join(
        [
            *lines,
            *entries(notes, width),
            *entries([("", note) for note in [*notes_of(rows), *data["illustrated"], data["note"]]], width),
        ]
    )


def _described(setting: Mapping[str, Any]) -> str:
    parts = [
        f"{setting['length']} tokens",
        f"lag {setting['lag']}",
        setting["policy"],
        setting["reward"],
        f"{setting['optimizer']} {', '.join(f'{rate:g}' for rate in setting['rates'])}",
        f"{setting['vocabulary']} symbols",
        f"{setting['prompts']} prompts x {setting['samples']}",
    ]
    return f"{setting['name']}: " + ", ".join(parts) + (f", logits to {setting['grid']:g}" if setting["grid"] else "")


def picture(data: Mapping[str, Any], path: Path) -> None:
    """Draws relative returns of methods x settings, and return curves of a few methods; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(data["methods"], key=lambda row: -statistics.fmean(row["relative"]))
    names = [setting["name"] for setting in data["settings"]]
    figure = plt.figure(figsize=(5 + 0.5 * len(names) + 5, 2.6 + 0.2 * len(rows)), constrained_layout=True)
    left, right = figure.subfigures(1, 2, width_ratios=(5 + 0.5 * len(names), 5))
    axis = left.subplots()
    image = axis.imshow([row["relative"] for row in rows], cmap="viridis", vmin=0.3, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row["relative"]):
            colour = "black" if value > 0.75 else "white"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axis.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=7)
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    end, heads = -0.5, []
    for part, inside in data["parts"].items():
        heads.append(f"{part}: {len(inside)}")
        end += len(inside)
        if end < len(names) - 1:
            axis.axvline(end, color="white", linewidth=3)
    axis.set_title(f"mean return over training, over the best of the setting ({'; '.join(heads)} settings)", fontsize=8)
    left.colorbar(image, ax=axis, shrink=0.5)

    shown = [*rows[:5], *rows[5:][-1:]]
    drawn = []
    for inside in data["parts"].values():
        drawn += sorted(inside, key=lambda name: -data["settings"][names.index(name)]["lag"])[:1]
    at = data["evaluated"]
    for axis, name in zip(right.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True):
        for row in shown:
            axis.plot(at, row["curves"][names.index(name)], label=row["method"], linewidth=1)
        axis.set_title(f"exact return, {name}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    axis.set_xlabel("optimizer step", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# -- the command ---------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``loop``."""
    default = Plan()
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "loop",
        help="training of a small policy with old samples, its expected return computed exactly",
        description="Trains a small policy with every method, on samples that are some optimizer steps old (the lag), "
        "and computes its expected return exactly. The name of a setting says what is trained: tied-32-lag-16 has 32 "
        "tokens per sequence and a lag of 16 steps; docs/lab.md describes them all.\n\n"
        "One method in one setting, with 3 seeds and 3 learning rates side by side, takes about 1 s (10 tokens) to 7 s "
        "(96 tokens) of one core, 2 to 5 times that for methods with statistics of the batch; the default command, "
        "every method in every setting, about 25 minutes on two cores. With --output, finished cells are kept, and "
        "the same command goes on from there if it was stopped.",
        formatter_class=HelpFormatter,
        epilog=examples(
            "offcorr bench loop near_overlap minpro reinforce --settings development",
            "offcorr bench loop 'cispo?cap=3' mine.py:my_method --settings tied-32-lag-32 --lags 8 128 --seeds 10",
        ),
    )
    add = parser.add_argument
    compare.add_methods(parser)
    add(
        "--settings",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="development, held-out, all (the default), or names: "
        + ", ".join(setting.name for part in PARTS.values() for setting in part),
    )
    add(
        "--lags",
        nargs="+",
        type=int,
        metavar="N",
        help="lags in optimizer steps, for every chosen setting, in place of its own",
    )
    rates = "; ".join(f"{' '.join(map(str, rates))} with {optimizer}" for optimizer, rates in RATES.items())
    add("--rates", nargs="+", type=float, metavar="RATE", help=f"learning rates, a run each (default: {rates})")
    add(
        "--seeds",
        type=int,
        default=default.seeds,
        metavar="N",
        help="number of seeds, a run each (default %(default)s)",
    )
    add("--steps", type=int, default=default.steps, metavar="N", help="optimizer steps per run (default %(default)s)")
    add_processes(parser)
    add(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="write the numbers as JSON; finished cells are kept in FILE.cells",
    )
    add("--picture", type=Path, metavar="FILE.png", help="draw relative returns and curves (needs matplotlib)")
    add("--overwrite", action="store_true", help="replace files that exist")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    try:
        plan = _planned(options)
        methods = compare.named_methods(plan.specs)
        if options.processes < 1:
            raise ValueError(f"--processes is {options.processes}, expected at least 1")
        results.check_overwrite(options.overwrite, output=options.output, picture=options.picture)
        results.check_picture("--picture", options.picture)
        for option, path in (("--output", options.output), ("--picture", options.picture)):
            if path is not None:
                results.free(path, options.overwrite, option)
        failing = warn_of_failures(plan.specs)
        folder = None if options.output is None else options.output.with_suffix(".cells")
        known, total = kept(plan, folder), len(methods) * len(plan.settings)
        with Progress(total, _first_line(plan, methods, known, options)) as progress:
            if known:
                progress.note(f"{len(known)} of {total} cells taken from {folder}")
            found = measured(plan, folder, options.processes, progress)
    except KeyboardInterrupt:
        goes_on = (
            f"the same command goes on from the cells in {folder}" if folder else "without --output nothing is kept"
        )
        print(f"offcorr bench loop: stopped; {goes_on}", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"offcorr bench loop: error: {error}", file=sys.stderr)
        return 2
    data = as_data(plan, found, results.about(_command(options), _given(options)), failing)
    if options.output is not None and folder is not None:
        results.save(data, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
        _forget(folder, plan, found)
    print(table(data), flush=True)
    if options.picture is not None:
        picture(data, options.picture)
        print(f"wrote {options.picture}", file=sys.stderr)
    return 0


def _planned(options: argparse.Namespace) -> Plan:
    known = {setting.name: part for part, settings in PARTS.items() for setting in settings}
    wanted: set[str] = set()
    for word in options.settings:
        if word not in (*known, *PARTS, "all"):
            raise ValueError(
                f"--settings has {word!r}{nearest(word, [*known, *PARTS, 'all'], '.')} Expected all, "
                f"{', '.join(PARTS)} or the names that --help lists"
            )
        wanted |= {name for name, part in known.items() if word in (name, part, "all")}
    parts = {}
    for part, settings in PARTS.items():
        inside = [setting for setting in settings if setting.name in wanted]
        if options.lags is not None:
            inside = [_lagging(setting, lag) for setting in inside for lag in options.lags]
        if inside:
            parts[part] = tuple(inside)
    rates = None if options.rates is None else tuple(options.rates)
    try:
        return Plan(tuple(options.methods), parts, rates, options.seeds, options.steps)
    except ValueError as error:
        raise ValueError(f"--{error}") from error


def _lagging(setting: Setting, lag: int) -> Setting:
    try:
        return dataclasses.replace(setting, name=f"{setting.name}@{lag}", lag=lag)
    except ValueError as error:
        raise ValueError(f"--lags {str(error).removeprefix('lag ')}") from error


def _given(options: argparse.Namespace) -> dict[str, Any]:
    names = ("settings", "lags", "rates", "seeds", "steps")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _command(options: argparse.Namespace) -> str:
    words = ["offcorr", "bench", "loop", *options.methods]
    for name, value in _given(options).items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _first_line(
    plan: Plan, methods: Sequence[tuple[str, Correction]], known: Mapping[Cell, Found], options: argparse.Namespace
) -> str:
    left = [(loss, setting) for name, loss in methods for setting in plan.settings if (name, setting.name) not in known]
    work = sum(plan.seconds(loss_fn, setting) for loss_fn, setting in left)
    seconds = Clock(work, len(left), options.processes).seconds
    warning = "" if options.output else "; without --output nothing is kept if this is interrupted"
    return (
        f"offcorr bench loop: methods: {len(methods)}, settings: {len(plan.settings)}, seeds: {plan.seeds}, "
        f"processes: {options.processes}; about {duration(max(seconds, 1.0))} on idle cores like ours{warning}"
    )


def _forget(folder: Path, plan: Plan, found: Mapping[Cell, Found]) -> None:
    """Removes the cells of a finished command, so that none is taken for that of a later version."""
    methods = dict(compare.named_methods(plan.specs))
    settings = {setting.name: setting for setting in plan.settings}
    for cell in found:
        _path(folder, plan, cell, methods, settings).unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
