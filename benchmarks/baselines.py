"""Comparison of VCPO's baselines: the group's mean, the token proxy OTB, and the exact minimum-variance baseline OPOB.

    python benchmarks/baselines.py [--baselines group token opob] [--seeds 0 1 2] [--output FILE.json]

Every run is recipes/accelerate_loop.py with VCPO's sequence weight and ESS learning rate, at lag 16 with an int8
sampler, padded rows, one thread and four updates per generation; only the baseline differs.  ``group`` also divides by
the group's standard deviation, as GRPO does; the other two do not.  Seconds are wall-clock seconds of the whole run,
with sampling, evaluation and other load on the machine.  Without --output the report goes to the folder of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import flags  # noqa: E402

from offcorr import toy  # noqa: E402
from offcorr.lab import arena_report, results  # noqa: E402

BASELINES = ("group", "token", "opob")
SETTING = {"loss": "vcpo", "ess_lr": "sqrt", "lag": 16, "precision": "int8", "packed": False, "updates": 4}


def run(baseline: str, seed: int, generations: int, folder: Path) -> dict[str, Any]:
    """Returns the run's record, as ``offcorr bench arena`` has it; its ``method`` is the baseline."""
    settings = SETTING | {"baseline": baseline, "seed": seed, "generations": generations, "eval_every": 4}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    script = HERE.parent / "recipes" / "accelerate_loop.py"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(script), *arguments, "--output_dir", str(folder), "--use_cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run {baseline!r}, seed {seed}, failed:\n{done.stderr[-3000:]}")
    logs = json.loads((folder / "history.json").read_text())
    return record(baseline, seed, logs) | {"seconds": time.perf_counter() - began}


def record(baseline: str, seed: int, logs: list[dict[str, Any]]) -> dict[str, Any]:
    evaluations = [(entry["step"], entry["eval_reward"]) for entry in logs if "eval_reward" in entry]
    steps, accuracy = (list(column) for column in zip(*evaluations, strict=True))
    setting = SETTING | {"method": baseline, "learning_rate": None, "seed": seed}
    return {"setting": setting, "exit_code": 0, "held_out": {"step": steps, "value": accuracy}, "metrics": {}}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--baselines", nargs="+", default=BASELINES, choices=BASELINES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--runs", type=Path, default=Path("runs/baselines"))
    parser.add_argument("--output", type=flags.output, help="by default report.json in the folder of the runs")
    args = parser.parse_args()
    file = args.output or flags.output(args.runs / "report.json")
    for seed in args.seeds:
        toy.model_path(seed=seed)
    chosen = list(product(args.seeds, args.baselines))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = pool.map(lambda c: run(c[1], c[0], args.generations, args.runs / f"{c[1]}-{c[0]}"), chosen)
        records = list(track(started, total=len(chosen), description="runs"))
    command = f"python benchmarks/baselines.py --baselines {' '.join(args.baselines)}"
    command += f" --seeds {' '.join(map(str, args.seeds))} --generations {args.generations}"
    report = arena_report.report(records)
    seconds = [
        {"baseline": name, "seed": seed, "seconds": run["seconds"]}
        for (seed, name), run in zip(chosen, records, strict=True)
    ]
    results.save(results.about(command, SETTING) | report | {"seconds": seconds}, file)
    print(f"{arena_report.text(report)}\nnumbers: {file}")
    for picture in arena_report.pictures(report, file):
        print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
