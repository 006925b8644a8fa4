"""Time of the torch reference of a correction on a CPU, plain and under ``torch.compile``.

    python benchmarks/cpu_correction.py [--output benchmarks/results/cpu_correction] [--rounds 9]

One call is loss, metrics and backward pass of 64 x 2048 tokens in one process with one thread; times are CPU seconds.
Every round times both in turn, and a ratio is the median over rounds of compiled / reference in the same round.
``first call`` is the time of the first compiled call, ``first call at another width`` that of the next call with
batches of another width, which changes from step to step in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import offcorr

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cpu import machine  # noqa: E402

METHODS = ("dapo", "minpro", "gspo", "seq_tis")


def batch(rows: int, width: int) -> offcorr.Batch:
    draw = torch.Generator().manual_seed(width)
    old_logp = -3 * torch.rand(rows, width, generator=draw)
    return offcorr.Batch(
        logp=(old_logp + 0.1 * torch.randn(rows, width, generator=draw)).requires_grad_(),
        old_logp=old_logp,
        rollout_logp=old_logp + 0.01 * torch.randn(rows, width, generator=draw),
        advantages=torch.randn(rows, generator=draw),
        mask=torch.rand(rows, width, generator=draw) < 0.9,
    )


def seconds(correct: Any, inputs: offcorr.Batch) -> float:
    began = time.process_time()
    loss, _ = correct(inputs)
    loss.backward()
    inputs.logp.grad = None
    return time.process_time() - began


def measure(name: str, rounds: int) -> dict[str, float]:
    loss_fn = offcorr.get(name)

    def reference(inputs: offcorr.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = loss_fn(inputs)
        return out.loss, out.metrics.pack()

    torch._dynamo.reset()
    compiled = torch.compile(reference)
    inputs, narrower = batch(64, 2048), batch(64, 2000)
    first, changed = seconds(compiled, inputs), seconds(compiled, narrower)
    seconds(reference, inputs)
    taken = [(seconds(reference, inputs), seconds(compiled, inputs)) for _ in range(rounds)]
    return {
        "reference_seconds": statistics.median(a for a, _ in taken),
        "compiled_seconds": statistics.median(b for _, b in taken),
        "ratio": statistics.median(b / a for a, b in taken),
        "first_call_seconds": first,
        "another_width_seconds": changed,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        "| method | reference, ms | compiled / reference | first call, s | first call at another width, s |",
        "|---|---|---|---|---|",
    ]
    for name, row in report["methods"].items():
        cells = (1e3 * row["reference_seconds"], row["ratio"], row["first_call_seconds"], row["another_width_seconds"])
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    about = report["machine"]
    lines += ["", f"64 x 2048 tokens, one thread. {about['processor']}, torch {about['torch']}, load {about['load']}."]
    return "\n".join([*lines, "", "`python benchmarks/cpu_correction.py`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="path without a suffix; .json and .md are written")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {"methods": {name: measure(name, options.rounds) for name in METHODS}, "machine": machine()}
    print(table(report))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
