"""Comparison of methods on the toy task: the same stale, quantised sampler and the same data; only the loss differs.

    python benchmarks/methods.py [--methods minpro ctpo ...] [--seeds 0 1] [--updates 160] [--output FILE.json]

Every run is recipes/grpo.py at lag 16 with an int8 sampler, as in the demo.  The report (JSON, a table and a PNG) has
for each method the held-out sampled accuracy at start, peak and end, the largest fall from a peak, and the mean
mismatch.  All methods use one learning rate and their own defaults, so the result compares defaults in one setting and
does not rank the papers.  Without --output it goes to the folder of the runs; the committed results are not touched.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "recipes")]
import flags  # noqa: E402
from demo import LAG, PRECISION, Run, largest_fall, train_all  # noqa: E402
from grpo import accuracy, means, series  # noqa: E402

from offcorr import toy  # noqa: E402

METHODS = (
    "reinforce",
    "ppo",
    "decoupled_ppo",
    "token_is",
    "cispo",
    "sapo",
    "gspo",
    "minpro",
    "ctpo",
    "topr",
    "vcpo",
    "aipo",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", type=flags.method, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--runs", type=Path, default=Path("runs/methods"))
    parser.add_argument("--output", type=flags.output, help="by default report.json in the folder of the runs")
    args = parser.parse_args()
    file = args.output or flags.output(args.runs / "report.json")

    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        toy.model_path(seed=seed)
        runs = {
            name: Run(name, ("--loss_type", f"offcorr:{name}", "--anchor", "snapshot"), "snapshot")
            for name in args.methods
        }
        logs = train_all(runs, args.runs / str(seed), args.updates, seed)
        rows += [row_of(name, seed, entries) for name, entries in logs.items()]
    chosen = f"--methods {' '.join(args.methods)} --seeds {' '.join(map(str, args.seeds))} --updates {args.updates}"
    setting = {"lag": LAG, "precision": PRECISION, "learning_rate": 5e-4, "anchor": "snapshot"}
    write(rows, report(rows, f"python benchmarks/methods.py {chosen}", setting), file)
    return 0


def write(rows: list[dict[str, Any]], report: dict[str, Any], file: Path) -> None:
    """Writes the report and its picture, and prints the table: whole where it goes to a file or a pipe."""
    file.write_text(json.dumps(report, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 1000).print(table_of(rows))
    print(f"numbers: {file}\npicture: {plot(rows, file.with_suffix('.png'))}")


def row_of(method: str, seed: int, logs: list[dict[str, Any]]) -> dict[str, Any]:
    steps, values = series(logs, "eval_reward")
    measured = ("offcorr/staleness/abs_mean", "offcorr/engine/abs_mean", "offcorr/loss/coefficient_zero")
    return {
        "method": method,
        "seed": seed,
        **accuracy(logs),
        "largest_fall": largest_fall(logs),
        **means(logs, measured),
        "held_out": {"step": steps, "accuracy": values},
    }


def report(rows: list[dict[str, Any]], command: str, setting: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": command,
        "setting": setting,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "offcorr")},
        "runs": rows,
    }


def by_method(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the runs of each method, one per seed, sorted by the mean accuracy at the end, best first."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["method"], []).append(row)
    return dict(sorted(grouped.items(), key=lambda item: -mean(row["end"] for row in item[1])))


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"held-out sampled accuracy at lag {LAG}, {PRECISION} sampler; means over the seeds")
    for name in ("method", "start", "peak", "end", "end per seed", "largest fall", "staleness |d|"):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for method, runs in by_method(rows).items():
        start, peak, end, fall, moved = (
            f"{mean(run[name] for run in runs):.3f}"
            for name in ("start", "peak", "end", "largest_fall", "offcorr/staleness/abs_mean")
        )
        table.add_row(method, start, peak, end, " ".join(f"{run['end']:.3f}" for run in runs), fall, moved)
    return table


def plot(rows: list[dict[str, Any]], file: Path) -> Path:
    """Plots the mean over the seeds and the range of every method, and returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    for i, (method, runs) in enumerate(by_method(rows).items()):
        steps = runs[0]["held_out"]["step"]
        values = list(zip(*(run["held_out"]["accuracy"] for run in runs), strict=True))
        (line,) = axis.plot(steps, [mean(at) for at in values], "-" if i < 10 else "--", label=method)
        low, high = ([pick(at) for at in values] for pick in (min, max))
        axis.fill_between(steps, low, high, alpha=0.1, color=line.get_color())
    seeds = len({row["seed"] for row in rows})
    title = f"lag {LAG}, {PRECISION} sampler; mean and range of {seeds} seeds"
    axis.set(xlabel="optimizer update", ylabel="held-out sampled accuracy", title=title)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


if __name__ == "__main__":
    sys.exit(main())
