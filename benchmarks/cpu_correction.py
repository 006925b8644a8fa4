"""Time of the torch reference of a correction on a CPU: plain, under ``torch.compile``, and beside a bare PPO loss.

    python benchmarks/cpu_correction.py [--output benchmarks/results/cpu_correction] [--rounds 9] [--threads 1]

One call is loss, every metric and backward pass of a new batch of 64 x 2048 tokens.  The bare loss is PPO in four lines
of torch, without a metric.  Every round times all of them in turn, and a ratio is the median over rounds of a ratio in
the same round.  With one thread times are CPU seconds, with more they are wall-clock seconds.
``first call`` is the time of the first compiled call, ``first call at another width`` that of the next call with
batches of another width, which changes from step to step in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import offcorr
from offcorr.lab.kernels import METHODS, bare_ppo, batch, both_ways, in_turn, ratio, seconds

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flags  # noqa: E402
from cpu import machine  # noqa: E402


def measure(name: str, rounds: int) -> dict[str, float]:
    loss_fn = offcorr.get(name)

    def reference(inputs: offcorr.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = loss_fn(inputs)
        return out.loss, out.metrics.pack()

    torch._dynamo.reset()
    compiled = torch.compile(reference)
    given, narrower = batch("cpu", 64, 2048), batch("cpu", 64, 2000)
    first = seconds(both_ways(lambda inputs: compiled(inputs)[0], given))
    changed = seconds(both_ways(lambda inputs: compiled(inputs)[0], narrower))
    losses = {"bare": bare_ppo, "reference": lambda i: reference(i)[0], "compiled": lambda i: compiled(i)[0]}
    taken = in_turn({variant: both_ways(loss, given) for variant, loss in losses.items()}, rounds)
    return {
        **{f"{variant}_seconds": statistics.median(spent) for variant, spent in taken.items()},
        "reference_to_bare": ratio(taken["reference"], taken["bare"]),
        "ratio": ratio(taken["compiled"], taken["reference"]),
        "first_call_seconds": first,
        "another_width_seconds": changed,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| method | bare PPO loss, ms | reference, ms | reference / bare | compiled / reference | first call, s "
        "| first call at another width, s |",
        "|---" * 7 + "|",
    ]
    for name, row in report["methods"].items():
        cells = (
            *(1e3 * row["bare_seconds"], 1e3 * row["reference_seconds"], row["reference_to_bare"], row["ratio"]),
            *(row["first_call_seconds"], row["another_width_seconds"]),
        )
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    about = report["machine"]
    where = f"{about['processor']}, torch {about['torch']}, load {about['load']}"
    lines += ["", f"64 x 2048 tokens, {report['threads']} thread(s). {where}."]
    return "\n".join([*lines, "", "`python benchmarks/cpu_correction.py`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=flags.output, help="path without a suffix; .json and .md are written")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"threads": options.threads, "rounds": options.rounds, "machine": machine()}
    measure(next(iter(METHODS)), options.rounds)  # the first one of a process is slower, and is thrown away
    report["methods"] = {name: measure(name, options.rounds) for name in METHODS}
    print(table(report))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
