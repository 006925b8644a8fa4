"""The picture and the numbers of docs/metrics.md: the short log of runs that went well, and of one that collapsed.

    make demo                                                # makes the runs
    python benchmarks/metrics_picture.py --runs runs/demo    # keeps their series in benchmarks/results/metrics.json
    python benchmarks/metrics_picture.py                     # picture and table anew, from that file

The runs are recipes/grpo.py at lag 16 with an int8 sampler, one seed: MinPRO, CTPO, and TRL's default loss.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
from grpo import EFFECT, MISMATCH, accuracy, lines, means  # noqa: E402

from offcorr.cli.tables import markdown  # noqa: E402

RUNS = {"minpro": "MinPRO", "ctpo": "CTPO", "trl": "TRL's default loss"}
DRAWN = {"minpro": "MinPRO: went well", "trl": "TRL's default loss: collapsed"}
TABLE = re.compile(r"(<!-- runs -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PANELS = {
    "held-out sampled accuracy": ("eval_reward",),
    "reward": ("reward",),
    "staleness/abs_mean, nats": ("offcorr/staleness/abs_mean",),
    "staleness/ess_seq": ("offcorr/staleness/ess_seq",),
    "engine/abs_mean, nats": ("offcorr/engine/abs_mean",),
    "engine/ess_seq": ("offcorr/engine/ess_seq",),
    "loss/multiplier_vs_ratio": ("offcorr/loss/multiplier_vs_ratio",),
    "loss/dropped, damped, amplified": ("offcorr/loss/dropped", "offcorr/loss/damped", "offcorr/loss/amplified"),
    "loss/ess_after": ("offcorr/loss/ess_after",),
    "entropy, nats": ("entropy",),
    "loss: says nothing": ("loss",),
    "gradient norm": ("grad_norm",),
}
LIMITS = {"staleness/ess_seq": 0.3, "engine/ess_seq": 0.3, "loss/ess_after": 0.3, "engine/abs_mean, nats": 0.05}
"""Where the healthy range of docs/metrics.md ends, if a source names a number."""
COLOURS, STYLES = {"minpro": "C0", "trl": "C3"}, ("-", "--", ":")


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="the folder of the demo's runs; without it the kept series are drawn")
    parser.add_argument("--kept", type=Path, default=ROOT / "benchmarks" / "results" / "metrics.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "metrics.md")
    args = parser.parse_args()
    if args.runs is not None:
        args.kept.write_text(json.dumps(report(args.runs)) + "\n")
    runs = json.loads(args.kept.read_text())["runs"]
    args.page.write_text(filled(args.page.read_text(), runs))
    print(f"picture: {plot(runs, args.page.with_suffix('.png'))}\ntable: {args.page}")
    return 0


def report(folder: Path) -> dict[str, Any]:
    """The series of the runs that are drawn and the means of all, with machine and versions."""
    names = [name for panel in PANELS.values() for name in panel]
    runs = {}
    for run in RUNS:
        logs = json.loads((folder / run / "history.json").read_text())
        found = lines(logs, names) if run in DRAWN else {}
        runs[run] = {
            "accuracy": accuracy(logs),
            "means": means(logs, (*MISMATCH, *EFFECT, "entropy")),
            "series": {
                name: {"step": steps, "value": [float(f"{value:.5g}") for value in values]}
                for name, (steps, values) in found.items()
            },
        }
    packages = ("torch", "transformers", "trl", "offcorr")
    return {
        "command": "make demo; python benchmarks/metrics_picture.py --runs runs/demo",
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "runs": runs,
    }


def filled(page: str, runs: dict[str, Any]) -> str:
    """The page with the table of the runs' means."""
    rows = [
        {"": f"accuracy, {moment}"} | {RUNS[run]: f"{kept['accuracy'][moment]:.3f}" for run, kept in runs.items()}
        for moment in ("start", "end")
    ]
    for name in (*MISMATCH, *EFFECT, "entropy"):
        cells = {RUNS[run]: kept["means"].get(name) for run, kept in runs.items()}
        shown = {run: "not measured" if value is None else f"{value:.4f}" for run, value in cells.items()}
        rows.append({"": f"`{name}`"} | shown)
    return TABLE.sub(lambda match: f"{match[1]}{markdown(rows)}\n{match[2]}", page)


def plot(runs: dict[str, Any], file: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(16, 9), constrained_layout=True, sharex=True)
    for axis, (title, names) in zip(axes.flat, PANELS.items(), strict=True):
        for run in DRAWN:
            logged = runs[run]["series"]
            for name, style in zip(names, STYLES, strict=False):
                if name in logged:
                    label = DRAWN[run] if len(names) == 1 else f"MinPRO: {name.rpartition('/')[2]}"
                    axis.plot(logged[name]["step"], logged[name]["value"], style, color=COLOURS[run], label=label)
        if title in LIMITS:
            axis.axhline(LIMITS[title], color="grey", linewidth=1, linestyle=":")
        if title in ("held-out sampled accuracy", "loss/dropped, damped, amplified"):
            axis.legend()
        axis.set(title=title)
    for axis in axes[-1]:
        axis.set(xlabel="optimizer update")
    figure.savefig(file, dpi=100)
    plt.close(figure)
    return file


if __name__ == "__main__":
    sys.exit(main())
