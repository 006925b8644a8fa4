"""Host time of a fused correction: everything that Python does in a call, but for the launch of the kernel.

    python benchmarks/host_time.py [--output result.json]

Needs no GPU: tensors are on the CPU, and the place where Triton would be called does nothing, so Triton's own launcher
is not in the number.  A call checks the batch, resolves the correction, makes the buffers and attaches the gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import flags
import torch
from triton.runtime.jit import JITFunction

import offcorr
from offcorr.kernels import dispatch
from offcorr.kernels import launch as _before_the_interpreter_is_asked_for  # noqa: F401
from offcorr.lab import results


def microseconds(method: str, calls: int, rounds: int) -> list[float]:
    """Of one call, the mean of each round."""
    correction, batch = offcorr.get(method), offcorr.testing.example()
    batch = batch.replaced(logp=batch.logp.float().requires_grad_())
    found = []
    with dispatch.use("triton"):
        if dispatch.backend(correction, batch) != "triton":
            raise SystemExit(f"{method} runs on the reference, which launches nothing")
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for _ in range(calls):
                correction(batch)
            found.append((time.perf_counter() - began) / calls * 1e6)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", type=flags.method, default=["ppo", "tis", "minpro", "gspo"])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    options = parser.parse_args()
    JITFunction.__getitem__ = lambda self, grid: lambda *arguments, **constants: None
    os.environ["TRITON_INTERPRET"] = "1"  # else a batch on the CPU is refused; the kernels are compiled ones already
    torch.set_num_threads(1)
    rows = {}
    print(f"{'':12}{'us a call, least':>20}{'median':>10}")
    for method in options.methods:
        rounds = microseconds(method, options.calls, options.rounds)
        rows[method] = {"least": min(rounds), "median": statistics.median(rounds)}
        print(f"{method:12}{rows[method]['least']:>20.1f}{rows[method]['median']:>10.1f}")
    if options.output:
        setting = {"calls": options.calls, "rounds": options.rounds}
        head = results.about("python benchmarks/host_time.py", setting)
        options.output.write_text(json.dumps(head | {"microseconds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
