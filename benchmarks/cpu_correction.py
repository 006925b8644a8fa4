"""The torch reference of a correction on a CPU against ``torch.compile`` of it: is compiling worth it there?

    python benchmarks/cpu_correction.py [--output benchmarks/results/cpu_correction] [--rounds 9]

Loss, metrics and backward of 64 x 2048 tokens in one process with one thread, in its own seconds, the two in turn; a
ratio is the median over rounds of (compiled / reference in the same round).  ``compiled after`` is what the first call
takes, ``another width after`` what the next takes when the width of the batch changes, as it does from step to step in
training.
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


def seconds(correct: Any, given: offcorr.Batch) -> float:
    began = time.process_time()
    loss, _ = correct(given)
    loss.backward()
    given.logp.grad = None
    return time.process_time() - began


def measure(name: str, rounds: int) -> dict[str, float]:
    loss_fn = offcorr.get(name)

    def reference(given: offcorr.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = loss_fn(given)
        return out.loss, out.metrics.pack()

    torch._dynamo.reset()
    compiled = torch.compile(reference)
    given, wider = batch(64, 2048), batch(64, 2000)
    first, changed = seconds(compiled, given), seconds(compiled, wider)
    seconds(reference, given)
    taken = [(seconds(reference, given), seconds(compiled, given)) for _ in range(rounds)]
    return {
        "reference_seconds": statistics.median(a for a, _ in taken),
        "compiled_seconds": statistics.median(b for _, b in taken),
        "ratio": statistics.median(b / a for a, b in taken),
        "first_call_seconds": first,
        "another_width_seconds": changed,
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "| method | reference, ms | compiled / reference | compiled after, s | another width after, s |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["methods"].items():
        cells = (1e3 * row["reference_seconds"], row["ratio"], row["first_call_seconds"], row["another_width_seconds"])
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    about = found["machine"]
    lines += ["", f"64 x 2048 tokens, one thread. {about['processor']}, torch {about['torch']}, load {about['load']}."]
    return "\n".join([*lines, "", "`python benchmarks/cpu_correction.py`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="without a suffix; writes .json and .md")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"methods": {name: measure(name, options.rounds) for name in METHODS}, "machine": machine()}
    print(table(found))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
