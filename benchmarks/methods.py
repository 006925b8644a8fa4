"""Methods side by side on the embedded task: the same stale, quantised sampler, the same data, one flag apart.

    python benchmarks/methods.py [--methods minpro ctpo ...] [--seeds 0 1] [--updates 160] [--output FILE.json]

Every run is recipes/grpo.py at lag 16 with an int8 sampler, as in the demo.  Reported for each method: held-out sampled
accuracy at start, peak and end, the largest fall from a peak, and mean mismatch; JSON, a table and a PNG.  One learning
rate for all and every method at its defaults: a comparison of defaults under one setting, not a ranking of papers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
from demo import LAG, PRECISION, Run, largest_fall, train_all  # noqa: E402
from grpo import accuracy, means, series  # noqa: E402

from offcorr import embedded  # noqa: E402

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
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--runs", type=Path, default=Path("runs/methods"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/methods.json"))
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        embedded.model_path(seed=seed)
        runs = {
            name: Run(name, ("--loss_type", f"offcorr:{name}", "--anchor", "snapshot"), "snapshot")
            for name in args.methods
        }
        logs = train_all(runs, args.runs / str(seed), args.updates, seed)
        rows += [row_of(name, seed, entries) for name, entries in logs.items()]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report(rows, args), indent=1) + "\n")
    Console().print(table_of(rows))
    print(f"numbers: {args.output}\npicture: {plot(rows, args.output.with_suffix('.png'))}")
    return 0


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


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    chosen = f"--methods {' '.join(args.methods)} --seeds {' '.join(map(str, args.seeds))} --updates {args.updates}"
    return {
        "command": f"python benchmarks/methods.py {chosen}",
        "setting": {"lag": LAG, "precision": PRECISION, "learning_rate": 5e-4, "anchor": "snapshot"},
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "offcorr")},
        "runs": rows,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"held-out sampled accuracy at lag {LAG}, {PRECISION} sampler")
    for name in ("method", "seed", "start", "peak", "end", "largest fall", "staleness |d|"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["end"]):
        cells = [row["start"], row["peak"], row["end"], row["largest_fall"], row["offcorr/staleness/abs_mean"]]
        table.add_row(row["method"], str(row["seed"]), *(f"{cell:.3f}" for cell in cells))
    return table


def plot(rows: list[dict[str, Any]], file: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    for i, row in enumerate(rows):
        style = "-" if i < 10 else "--"
        axis.plot(row["held_out"]["step"], row["held_out"]["accuracy"], style, label=f"{row['method']} ({row['seed']})")
    axis.set(xlabel="optimizer update", ylabel="held-out sampled accuracy", title=f"lag {LAG}, {PRECISION} sampler")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


if __name__ == "__main__":
    sys.exit(main())
