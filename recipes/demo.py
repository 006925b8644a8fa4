"""The effect of a correction: the same run three times, at lag 16 with an int8 sampler.

    make demo            # or: python recipes/demo.py [--short]

TRL's default loss, MinPRO and CTPO, side by side: held-out sampled accuracy at start, peak and end, the mismatch
between the policies, and the effect of each correction on the gradient.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offcorr import toy

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where installed, warns that it found nothing else

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from grpo import accuracy, means, series  # noqa: E402

LAG, PRECISION = 16, "int8"


class Run(NamedTuple):
    title: str
    flags: tuple[str, ...]
    anchor: str


RUNS = {
    "trl": Run("TRL's default", (), "recomputed"),
    "minpro": Run("MinPRO", ("--loss_type", "minpro", "--anchor", "snapshot"), "snapshot"),
    "ctpo": Run("CTPO", ("--loss_type", "ctpo", "--anchor", "snapshot"), "snapshot"),
}
SETTING = f"""\
The sampler is {LAG} optimizer updates behind the trainer, with {PRECISION} weights.
  TRL's default  the loss of a plain GRPOConfig, one update per generation: its anchor is
                 recomputed with the current weights, so every ratio is 1 at any lag
  MinPRO, CTPO   --loss_type minpro, ctpo: their anchor is a snapshot, the log-probs of
                 the weights that sampled, in the trainer's precision"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few updates: too few to compare the methods")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps = 12 if args.short else 160

    toy.model_path(seed=args.seed)  # the warm start, once, with its progress bar
    print(f"{SETTING}\nThree runs of recipes/grpo.py, {steps} updates each:")
    logs = train_all(RUNS, args.output, steps, args.seed)
    Console().print(comparison(logs))
    print(verdict(logs, full=not args.short))
    print(f"picture: {plot(logs, args.output / 'demo.png')}")
    print(f"numbers: {record(logs, args.output / 'demo.json', vars(args) | {'updates': steps})}")
    return 0


def train_all(runs: Mapping[str, Run], folder: Path, steps: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The histories of all runs, each in a process of its own, as many at a time as the cores can take."""
    waiting, running = list(runs), {}
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bars = {name: progress.add_task(run.title, total=steps, start=False) for name, run in runs.items()}
        while waiting or running:
            # One more than there are cores, or the last run of an odd number would leave a core idle.
            while waiting and len(running) <= (os.cpu_count() or 1):
                name = waiting.pop(0)
                progress.start_task(bars[name])
                running[name] = launch(runs[name], folder / name, steps, seed)
            time.sleep(0.5)
            for name, process in list(running.items()):
                progress.update(bars[name], completed=updates_done(folder / name))
                if process.poll() is None:
                    continue
                del running[name]
                progress.stop_task(bars[name])
                if process.returncode:
                    for other in running.values():
                        other.terminate()
                    raise SystemExit(f"the run {name!r} failed; its output is in {folder / name / 'output.txt'}")
    return {name: json.loads((folder / name / "history.json").read_text()) for name in runs}


def launch(run: Run, folder: Path, steps: int, seed: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.json").unlink(missing_ok=True)
    flags = {
        "lag": LAG,
        "precision": PRECISION,
        "max_steps": steps,
        "eval_steps": max(4, steps // 10),
        "learning_rate": 5e-4,
        "steps_per_generation": 1,
        "seed": seed,
        "output_dir": folder,
        "disable_tqdm": True,
    }
    command = [sys.executable, str(HERE / "grpo.py"), *run.flags]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    with open(folder / "output.txt", "wb") as output:
        # One thread each: the runs share the cores, and a model this small gains nothing from more.
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def updates_done(folder: Path) -> int:
    file = folder / "history.json"
    return max((int(entry["step"]) for entry in json.loads(file.read_text())), default=0) if file.exists() else 0


ROWS = {
    "staleness: mean |log-ratio|": "offcorr/staleness/abs_mean",
    "staleness: effective sample share": "offcorr/staleness/ess_seq",
    "engine gap: mean |log-ratio|": "offcorr/engine/abs_mean",
    "engine gap: effective sample share": "offcorr/engine/ess_seq",
    "share of the gradient clipped by the gate": "offcorr/loss/clipped",
    "tokens left without gradient": "offcorr/loss/coefficient_zero",
    "mean weight": "offcorr/loss/weight_mean",
}
"""The rows of the table beside accuracy: means over the run."""


def comparison(logs: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title=f"lag {LAG}, {PRECISION} sampler", caption="mismatch and correction: means over the run")
    table.add_column("", no_wrap=True)
    for name in logs:
        table.add_column(RUNS[name].title, justify="right", no_wrap=True)
    table.add_row("anchor: supplies old_logp", *(RUNS[name].anchor for name in logs), end_section=True)
    for moment in ("start", "peak", "end"):
        cells = (f"{accuracy(entries)[moment]:.3f}" for entries in logs.values())
        table.add_row(f"held-out sampled accuracy, {moment}", *cells)
    table.add_row(
        "  largest fall from a peak", *(f"{largest_fall(run):.3f}" for run in logs.values()), end_section=True
    )
    for label, name in ROWS.items():
        found = [means(entries, (name,)).get(name) for entries in logs.values()]
        # a dash: TRL's own loss has no correction to measure
        cells = ("-" if value is None else f"{value:.4f}" for value in found)
        table.add_row(label, *cells, end_section=name == "offcorr/engine/ess_seq")
    return table


def largest_fall(entries: list[dict[str, Any]]) -> float:
    """Largest fall of held-out accuracy below an earlier peak; a collapse oscillates, so its last value can mislead."""
    _, values = series(entries, "eval_reward")
    return max(max(values[: i + 1]) - value for i, value in enumerate(values))


def verdict(logs: dict[str, list[dict[str, Any]]], full: bool) -> str:
    found = {name: accuracy(entries) for name, entries in logs.items()}
    best = max(found, key=lambda name: found[name]["end"])
    lost = largest_fall(logs["trl"])
    lines = [f"Highest at the end: {RUNS[best].title}, {found[best]['end']:.3f}."]
    if full and lost < 0.2:
        lines.append(f"TRL's default loss fell only {lost:.3f} from its peak: this setting shows too little.")
    elif full:
        lines.append(
            f"Without a correction accuracy fell by {lost:.3f} from its peak: the samples were\n"
            f"{LAG} updates old, and the loss did not account for it."
        )
    return "\n".join(lines)


def record(logs: dict[str, list[dict[str, Any]]], file: Path, settings: dict[str, Any]) -> Path:
    """Writes the numbers of the table and the curves, with machine and versions."""
    packages = ("torch", "transformers", "trl", "accelerate", "reasoning-gym", "offcorr")
    report = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "settings": {name: str(value) for name, value in settings.items()} | {"lag": LAG, "precision": PRECISION},
        "runs": {
            name: {
                "anchor": RUNS[name].anchor,
                "accuracy": accuracy(entries) | {"largest_fall": largest_fall(entries)},
                "means": means(entries, tuple(ROWS.values())),
                "held_out": dict(zip(("step", "accuracy"), series(entries, "eval_reward"), strict=True)),
            }
            for name, entries in logs.items()
        },
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    return file


def plot(logs: dict[str, list[dict[str, Any]]], file: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("eval_reward", "held-out sampled accuracy"),
        ("offcorr/staleness/abs_mean", "staleness: mean |log-ratio|, nats"),
        ("offcorr/engine/abs_mean", "engine mismatch: mean |log-ratio|, nats"),
        ("offcorr/loss/clipped", "share of the gradient clipped"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(17, 4), constrained_layout=True)
    for axis, (name, label) in zip(axes, panels, strict=True):
        for colour, (run, entries) in enumerate(logs.items()):
            steps, values = series(entries, name)
            if steps:
                axis.plot(
                    steps,
                    values,
                    label=RUNS[run].title,
                    color=f"C{colour}",
                    marker="o" if name == "eval_reward" else "",
                )
        axis.set(xlabel="optimizer update", title=label)
        axis.legend()
    figure.suptitle(f"lag {LAG}, {PRECISION} sampler")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


if __name__ == "__main__":
    sys.exit(main())
