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
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import offcorr

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flags  # noqa: E402
from cpu import machine  # noqa: E402

METHODS = ("ppo", "dapo", "minpro", "gspo", "seq_tis")


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


def bare_ppo(inputs: offcorr.Batch) -> tuple[torch.Tensor, None]:
    """PPO's token-mean loss and nothing else."""
    ratio, advantages = (inputs.logp - inputs.old_logp).exp(), inputs.advantages[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * inputs.mask).sum() / inputs.mask.sum(), None


def seconds(correct: Any, inputs: offcorr.Batch) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    loss, _ = correct(dataclasses.replace(inputs))  # a new batch, since a batch keeps the view of it that stages use
    loss.backward()
    inputs.logp.grad = None
    return clock() - began


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
    taken = [[seconds(f, inputs) for f in (bare_ppo, reference, compiled)] for _ in range(rounds)]
    return {
        "bare_seconds": statistics.median(bare for bare, _, _ in taken),
        "reference_seconds": statistics.median(ours for _, ours, _ in taken),
        "compiled_seconds": statistics.median(fast for _, _, fast in taken),
        "reference_to_bare": statistics.median(ours / bare for bare, ours, _ in taken),
        "ratio": statistics.median(fast / ours for _, ours, fast in taken),
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=flags.output, help="path without a suffix; .json and .md are written")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"threads": options.threads, "rounds": options.rounds, "machine": machine()}
    report["methods"] = {name: measure(name, options.rounds) for name in METHODS}
    print(table(report))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
