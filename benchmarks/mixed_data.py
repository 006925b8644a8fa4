"""Replay, demonstrations and prefixes compared on the toy task: the table and the picture of docs/mixed_data.md.

    python benchmarks/mixed_data.py [--seeds 3] [--folder runs/mixed_data] [--output FILE.json]
    python benchmarks/mixed_data.py --page          # table and picture from the committed result; trains nothing

Every run is recipes/mixed_data.py with the flags of ``RUNS``, in a process of its own.  A finished run is kept in
``--folder``, and the same command goes on from there.  About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flags import output as output_file

from offcorr import toy
from offcorr.cli.tables import markdown
from offcorr.lab import results
from offcorr.lab.arena import Workers

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "mixed_data.json"
PAGE = ROOT / "docs" / "mixed_data.md"
PICTURE = PAGE.with_suffix(".png")
BLOCK = re.compile(r"(<!-- mixed (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

UPDATES, EVERY, LAST = 160, 20, 3
"""Optimizer updates of a run, updates between two evaluations, and the evaluations whose mean is the end of a run."""
COMMON = {"learning_rate": "5e-4", "eval_steps": EVERY, "max_steps": UPDATES, "picture": False, "disable_tqdm": True}
WARM_START = 300
"""Updates of the warm start of the model that leaves prompts unsolved."""
HARD = {"warm_start": WARM_START, "unsolved": 16, "train_size": 512, "eval_size": 512, "loss_type": "ppo"}
REPLAYED = {"replay_share": 0.75}

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "replay": {
        "new samples for every update": {"loss_type": "ppo"},
        "a quarter of the updates": {"loss_type": "ppo", "max_steps": UPDATES // 4, "eval_steps": EVERY // 4},
        "replay, uncorrected": {"loss_type": "reinforce", **REPLAYED},
        "replay, PPO": {"loss_type": "ppo", **REPLAYED},
        "replay, MinPRO": {"loss_type": "minpro", **REPLAYED},
        "replay, TOPR": {"loss_type": "topr", **REPLAYED},
    },
    "traces": {
        "samples alone": HARD,
        "demonstration, ratio 1": {**HARD, "demonstrations": "toy", "without_logp": "ratio_one"},
        "demonstration, ratio pi": {**HARD, "demonstrations": "toy", "without_logp": "deterministic"},
        "CHORD, mu .1": {**HARD, "demonstrations": "toy", "chord_mu": 0.1},
        "prefix of half a trace": {**HARD, "prefixes": "toy", "prefix_length": "0.5"},
        "prefix by curriculum": {**HARD, "prefixes": "toy", "prefix_length": "curriculum"},
    },
}
"""By part of the table: the runs, with their flags of recipes/mixed_data.py."""


def job(part: str, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """A job of ``offcorr.lab.arena_worker``."""
    own = run_folder(part, name, seed, folder)
    (own / "history.json").unlink(missing_ok=True)
    flags = {**COMMON, **RUNS[part][name], "seed": seed, "output_dir": own}
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return {"recipe": str(ROOT / "recipes" / "mixed_data.py"), "argv": argv, "output": str(own / "output.txt")}


def run_folder(part: str, name: str, seed: int, folder: Path) -> Path:
    return (folder / f"{part} {re.sub('[^a-zA-Z0-9]+', ' ', name).strip()} {seed}".replace(" ", "_")).resolve()


def train(seeds: Sequence[int], folder: Path, processes: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The curves of all runs; the runs that end first are in the folder already."""
    for seed in seeds:
        for steps in (None, WARM_START):
            toy.model_path(seed=seed, recipe=None if steps is None else toy.Recipe(steps=steps))
    every = [(part, name, seed) for seed in seeds for part, runs in RUNS.items() for name in runs]
    waiting = {run: job(*run, folder) for run in every if not (run_folder(*run, folder) / "curve.json").exists()}
    print(f"{len(every) - len(waiting)} of {len(every)} runs are finished already, in {folder}", file=sys.stderr)
    with ExitStack() as stack:
        for done, (run, answer) in enumerate(Workers(processes, stack).do(waiting), 1):
            own = run_folder(*run, folder)
            if answer["exit_code"]:
                raise SystemExit(f"{run} failed: {answer['error']} ({own / 'output.txt'})")
            results.save(curve(json.loads((own / "history.json").read_text())), own / "curve.json")
            print(f"{done} of {len(waiting)}: {run}, {answer['seconds']:.0f} s", file=sys.stderr, flush=True)
    read = {run: json.loads((run_folder(*run, folder) / "curve.json").read_text()) for run in every}
    return {part: {name: [read[part, name, seed] for seed in seeds] for name in runs} for part, runs in RUNS.items()}


def curve(logs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Held-out accuracy by optimizer update, and what the run was trained on, means over its logs."""
    pairs = [(entry["step"], entry["eval_reward"]) for entry in logs if "eval_reward" in entry]
    means = {}
    for name in ("reward", "offcorr/staleness/lag", "offcorr/staleness/ess_seq", "frac_reward_zero_std"):
        values = [entry[name] for entry in logs if name in entry]
        if values:
            means[name] = statistics.fmean(values)
    return {"step": [step for step, _ in pairs], "accuracy": [value for _, value in pairs], "means": means}


# -- table and picture ---------------------------------------------------------------------------------------


def summary(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each seed: accuracy at the start, over the training (AUC), at the end, and the largest fall from a peak."""
    found: dict[str, list[float]] = {"start": [], "AUC": [], "end": [], "largest fall": []}
    for one in curves:
        values = one["accuracy"]
        peaks = [max(values[: i + 1]) for i in range(len(values))]
        found["start"].append(values[0])
        found["AUC"].append(statistics.fmean(values))
        found["end"].append(statistics.fmean(values[-LAST:]))
        found["largest fall"].append(max(peak - value for peak, value in zip(peaks, values, strict=True)))
    return found


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Means over the seeds; of AUC and end also the difference to the first run, paired by seed, and its error."""
    first = summary(next(iter(runs.values())))
    rows = []
    for name, curves in runs.items():
        found = summary(curves)
        row = {"run": name, "start": f"{statistics.fmean(found['start']):.2f}"}
        for column in ("AUC", "end"):
            row[column] = f"{statistics.fmean(found[column]):.3f}"
            away = results.difference(found[column], first[column])
            row[f"{column}, to the first"] = "" if curves is next(iter(runs.values())) else _signed(away)
        row["largest fall"] = f"{statistics.fmean(found['largest fall']):.2f}"
        lag = [one["means"].get("offcorr/staleness/lag") for one in curves]
        row["lag"] = f"{statistics.fmean(lag):.1f}" if None not in lag else ""
        flat = [one["means"].get("frac_reward_zero_std") for one in curves]
        row["groups without advantage"] = f"{statistics.fmean(flat):.2f}" if None not in flat else ""
        rows.append(row)
    return rows


def _signed(away: results.Difference) -> str:
    return f"{away.mean:+.3f}" + ("" if math.isnan(away.error) else f" ± {away.error:.3f}")


def picture(data: Mapping[str, Any], file: Path) -> None:
    """Held-out accuracy over the updates: mean over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(data["runs"]), figsize=(12, 4.2), constrained_layout=True)
    titles = {"replay": "each sample used once, or four times", "traces": "prompts that the model had never solved"}
    for axis, (part, runs) in zip(axes, data["runs"].items(), strict=True):
        for name, curves in runs.items():
            steps = curves[0]["step"]
            columns = list(zip(*(one["accuracy"] for one in curves), strict=True))
            (line,) = axis.plot(steps, [statistics.fmean(column) for column in columns], label=name)
            axis.fill_between(steps, [*map(min, columns)], [*map(max, columns)], alpha=0.12, color=line.get_color())
        axis.set(title=titles[part], xlabel="optimizer update", ylabel="held-out accuracy; mean and range of the seeds")
        axis.set_ylim(0, None)
        axis.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def page(data: Mapping[str, Any]) -> str:
    """The page with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{markdown(table(data['runs'][found[2]]))}\n{found[3]}"

    return BLOCK.sub(block, PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/mixed_data"), help="of the runs")
    parser.add_argument("--output", type=output_file, default=None, help="FILE.json; default: result.json in --folder")
    parser.add_argument("--page", action="store_true", help="table and picture of the page, from the committed result")
    options = parser.parse_args()
    if options.page:
        data = json.loads(RESULT.read_text())
        PAGE.write_text(page(data))
        picture(data, PICTURE)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    curves = train(range(options.seeds), options.folder, options.processes)
    command = shlex.join(["python", "benchmarks/mixed_data.py", "--seeds", str(options.seeds)])
    setting = {"runs": RUNS, "common": COMMON, "updates": UPDATES}
    file = options.output or options.folder / "result.json"
    data = results.about(command, setting) | {"runs": curves}
    print(results.save(data, file))
    for runs in curves.values():
        print(markdown(table(runs)))


if __name__ == "__main__":
    main()
