"""Time, peak memory and error of ``linear_logprob`` on a CPU, as ratios to the naive implementation.

    python benchmarks/cpu.py [--output benchmarks/results/cpu_logprob] [--threads 1] [--rounds 7]

Every variant computes the log-probabilities of N tokens and their gradients, forward and backward, from the same
tensors.  Every round times all variants in turn; a ratio is the median over rounds of variant / naive in the same
round.  With one thread the times are CPU seconds of the process, which other load on the machine hardly changes.  Peak
memory is measured in one process per variant and excludes the inputs.  Other libraries are measured where they can be
imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import flags
import torch
from torch import Tensor

from offcorr.kernels.logprob import linear_logprob, naive_logprob
from offcorr.lab.kernels import KEPT, Problem, in_turn, naive_head, ratio
from offcorr.lab.results import processor


def naive(p: Problem, frozen: bool) -> Tensor:
    return naive_head(p.hidden, p.weight.detach() if frozen else p.weight, p.target)


def torch_linear_cross_entropy(p: Problem, frozen: bool) -> Tensor:
    weight = p.weight.detach() if frozen else p.weight
    return -torch.nn.functional.linear_cross_entropy(p.hidden, weight, p.target, reduction="none")


def trl(p: Problem, frozen: bool) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    weight = p.weight.detach() if frozen else p.weight
    return ChunkedLogProbFunction.apply(p.hidden, weight, None, p.target, 1.0, 32768, None, 1.0, ())[0]


class _Products(torch.autograd.Function):
    """The matrix products of a forward and backward pass alone, in row chunks: a lower bound for every head."""

    @staticmethod
    def forward(ctx: Any, p: Problem, frozen: bool, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.p, ctx.frozen = p, frozen
        tile = torch.empty(256, len(weight))
        for chunk in hidden.split(256):
            torch.mm(chunk, weight.T, out=tile[: len(chunk)])
        return hidden[:, 0] * 1

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        hidden, weight = ctx.p.hidden.detach(), ctx.p.weight.detach()
        tile = torch.ones(256, len(weight))
        to_hidden = torch.empty_like(hidden)
        to_weight = None if ctx.frozen else torch.zeros_like(weight)
        for first in range(0, len(hidden), 256):
            own = slice(first, first + 256)
            used = tile[: len(hidden[own])]
            torch.mm(used, weight, out=to_hidden[own])
            if to_weight is not None:
                to_weight.addmm_(used.T, hidden[own])
        return None, None, to_hidden, to_weight


def products(p: Problem, frozen: bool) -> Tensor:
    return _Products.apply(p, frozen, p.hidden, p.weight.detach() if frozen else p.weight)


def ours(**options: Any) -> Callable[[Problem, bool], Tensor]:
    return lambda p, frozen: (
        linear_logprob(p.hidden, p.weight.detach() if frozen else p.weight, p.target, **options).logp
    )


Variant = tuple[Callable[[Problem, bool], Tensor], bool, bool]
VARIANTS: dict[str, Variant] = {
    "trainable head: naive": (naive, False, False),
    "trainable head: linear_logprob": (ours(), False, False),
    "trainable head: linear_logprob, batch-invariant": (ours(batch_invariant=True), False, False),
    "trainable head: the matrix products alone": (products, False, False),
    "trainable head: torch linear_cross_entropy": (torch_linear_cross_entropy, False, False),
    "trainable head: TRL ChunkedLogProbFunction": (trl, False, False),
    f"trainable head, {KEPT:.0%} of tokens kept: naive": (naive, False, True),
    f"trainable head, {KEPT:.0%} of tokens kept: linear_logprob": (ours(), False, True),
    "frozen head: naive": (naive, True, False),
    "frozen head: linear_logprob": (ours(), True, False),
    "frozen head: linear_logprob, recomputing": (ours(frozen_head=False), True, False),
    "frozen head: the matrix products alone": (products, True, False),
}
"""Name -> (function for the log-probabilities, frozen head, gradient for some tokens only)."""


def importable(name: str) -> bool:
    if "TRL" in name:
        try:
            import trl.kernels.chunked_logprob  # noqa: F401
        except Exception:
            return False
    return "linear_cross_entropy" not in name or hasattr(torch.nn.functional, "linear_cross_entropy")


def step(p: Problem, variant: Variant) -> None:
    run, frozen, some = variant
    p.hidden.grad = p.weight.grad = None
    run(p, frozen).backward(p.some(KEPT) if some else p.d)


def peak_memory(name: str, size: tuple[int, int, int]) -> float:
    """Returns the peak memory of one forward and backward pass beyond the inputs, in MiB."""
    command = [sys.executable, __file__, "--memory-of", name, "--size", *map(str, size)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(name: str, size: tuple[int, int, int]) -> float:
    step(Problem.of("cpu", 16, size[1], 64), VARIANTS[name])  # loads libraries and their buffers
    p = Problem.of("cpu", *size)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    status = {line.split(":")[0]: line.split()[1] for line in open("/proc/self/status") if "kB" in line}
    before = int(status["VmRSS"])
    step(p, VARIANTS[name])
    status = {line.split(":")[0]: line.split()[1] for line in open("/proc/self/status") if "kB" in line}
    return (int(status["VmHWM"]) - before) / 1024


def errors() -> dict[str, float]:
    """Returns the largest error of a log-probability against float64, in nats, for bfloat16 inputs.

    Logits are up to about 40.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = (8 * torch.randn(512, 256, generator=draw)).bfloat16()
    weight = (torch.randn(8000, 256, generator=draw) / 16).bfloat16()
    target = torch.randint(8000, (512,), generator=draw)
    exact = naive_logprob(hidden.double(), weight.double(), target).logp
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, target[:, None])[:, 0]
    fused = linear_logprob(hidden, weight, target).logp
    return {
        "linear_logprob": (fused - exact).abs().max().item(),
        "logits rounded to bfloat16": (rounded - exact).abs().max().item(),
    }


def table(report: dict[str, Any]) -> str:
    n, h, v = report["size"]
    lines = [
        f"N={n}, H={h}, V={v}, float32, forward and backward; "
        f"{report['threads']} thread(s), {report['rounds']} rounds.",
        "",
        "| variant | time / naive (median) | time / naive (minima) | peak memory / naive | MiB |",
        "|---|---|---|---|---|",
    ]
    for name, row in report["variants"].items():
        memory = f"{row['memory']:.3f} | {row['memory_mib']:.0f}" if "memory" in row else " | "
        lines.append(f"| {name} | {row['time']:.2f} | {row['time_of_minima']:.2f} | {memory} |")
    lines += ["", "Largest error of a log-probability, bfloat16 inputs, against float64, nats:", ""]
    lines += [f"- {name}: {error:.1e}" for name, error in report["errors"].items()]
    about = report["machine"]
    lines += ["", f"{about['processor']}, torch {about['torch']}, load {about['load']}.  `python benchmarks/cpu.py`"]
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=flags.output, help="path without a suffix; .json and .md are written")
    parser.add_argument("--size", nargs=3, type=int, default=(2048, 256, 32000), metavar=("N", "H", "V"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = tuple(options.size)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options.memory_of, size))
        return
    names = [name for name in VARIANTS if importable(name)]
    p = Problem.of("cpu", *size)
    taken = in_turn({name: partial(step, p, VARIANTS[name]) for name in names}, options.rounds)
    rows: dict[str, dict[str, float]] = {}
    for name in names:
        base = taken[name.split(":")[0] + ": naive"]
        rows[name] = {
            "time": ratio(taken[name], base),
            "time_of_minima": min(taken[name]) / min(base),
        }
    if not options.no_memory:
        memory = {name: peak_memory(name, size) for name in names}
        for name in names:
            base = memory[name.split(":")[0] + ": naive"]
            rows[name] |= {"memory": memory[name] / base, "memory_mib": memory[name]}
    report = {
        "size": size,
        "threads": options.threads,
        "rounds": options.rounds,
        "variants": rows,
        "errors": errors(),
        "machine": machine(),
    }
    print(table(report))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
