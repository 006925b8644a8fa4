"""Kernels on a GPU: correctness first, then timings.  Needs torch, triton, numpy and einops, nothing else.

    python benchmarks/gpu.py [--parts correction] [--output result.json] [--methods dapo minpro] [--quick]

Writes JSON to ``--output``, or to ``$OUT/gpu.json`` where OUT is set, and prints a short table.  If a number is wrong
it says so and times nothing.  Without a GPU it checks tiny batches under Triton's interpreter (TRITON_INTERPRET=1).

A part is one entry of ``PARTS``: a function from options to ``{"checks": [...], "timings": [...]}``, where a check has
``ok`` and a timing is a flat row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import offcorr
from offcorr.contract import _with_length
from offcorr.kernels import correction as fused
from offcorr.registry import catalogue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = dict[str, Any]

# -- measuring -----------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """Median wall-clock seconds of a call, the device waited for."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def replay_seconds(run: Callable[[], Any], rounds: int = 100) -> float:
    """Seconds of device time of a call, captured as a CUDA graph and replayed; caches stay as the call left them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / rounds


def attempt(measure: Callable[[], float]) -> tuple[float | None, str]:
    """(seconds, "") or (None, why not): a competitor that does not run is reported, not hidden."""
    try:
        return measure(), ""
    except Exception as error:
        torch.cuda.synchronize()
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a 1 GiB copy."""
    source = torch.empty(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_seconds(lambda: target.copy_(source), rounds=20)


# -- the correction ------------------------------------------------------------------------------------------


def batch(rows: int, width: int, dtype: torch.dtype = torch.float32, packed: bool = False) -> offcorr.Batch:
    """Three policies some distance apart, a fifth of the tokens masked, groups of eight."""
    draw = torch.Generator(device=DEVICE).manual_seed(rows + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE)

    logp = -normal(rows, width).abs() - 0.01
    old_logp = logp + 0.05 * normal(rows, width)
    per_token = {"logp": logp, "old_logp": old_logp, "rollout_logp": old_logp + 0.02 * normal(rows, width)}
    per_token = {name: value.to(dtype) for name, value in per_token.items()}
    per_token["mask"] = torch.rand(rows, width, generator=draw, device=DEVICE) > 0.2
    rest = {
        "advantages": normal(rows),
        "rewards": normal(rows).sign(),
        "group_ids": torch.arange(rows, device=DEVICE) // 8,
    }
    if not packed:
        return offcorr.Batch(**per_token, **rest)
    ends = torch.arange(rows + 1, device=DEVICE) * width
    return offcorr.Batch.packed(**{n: v.flatten() for n, v in per_token.items()}, **rest, cu_seqlens=ends)


def double(given: offcorr.Batch) -> offcorr.Batch:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "rewards")
    return dataclasses.replace(given, **{name: getattr(given, name).double() for name in names})


def disagreement(name: str, given: offcorr.Batch) -> Row:
    """The kernel and the float32 reference, each against float64, and two runs against each other.

    A token on which float32 and float64 fall on different sides of a bound says nothing about the kernel, so tokens
    are counted where the kernel is further off than both rounding and the reference allow.
    """
    loss_fn = _with_length(offcorr.get(name))
    with fused.use("reference"):
        exact, single = loss_fn(double(given)), loss_fn(given)
    with fused.use("triton"):
        ran_on = fused.backend(loss_fn, given)
        out, again = loss_fn(given), loss_fn(given)
    size = exact.coefficient.abs().max()
    off = (out.coefficient.double() - exact.coefficient).abs()
    reference_off = (single.coefficient.double() - exact.coefficient).abs()
    wrong = (off > 4 * reference_off.clamp(min=0) + 1e-5 * size).double().mean().item()
    loss_off = abs(out.loss.item() - exact.loss.item())
    got, wanted = out.metrics.compute(), exact.metrics.compute()
    metrics_off = max(abs(got[n] - v) / max(1.0, abs(v)) for n, v in wanted.items())
    same = torch.equal(out.coefficient, again.coefficient) and torch.equal(out.metrics.pack(), again.metrics.pack())
    return {
        "ok": ran_on == "triton" and same and wrong < 1e-4 and metrics_off < 1e-3 and got.keys() == wanted.keys(),
        "what": f"correction {name}",
        "shape": [given.sequences, given.logp.numel() // given.sequences, str(given.logp.dtype)],
        "packed": given.cu_seqlens is not None,
        "ran_on": ran_on,
        "same_bits_twice": same,
        "share_of_tokens_off": wrong,
        "coefficient_off": (off.max() / size.clamp(min=1e-300)).item(),
        "reference_coefficient_off": (reference_off.max() / size.clamp(min=1e-300)).item(),
        "loss_off": loss_off,
        "metrics_off": metrics_off,
    }


def bytes_needed(given: offcorr.Batch) -> int:
    """Every input read once, the coefficient written once."""
    read = (given.logp, given.old_logp, given.rollout_logp, given.advantages, given.mask)
    return sum(x.nbytes for x in read) + 4 * given.logp.numel()


def time_correction(name: str, given: offcorr.Batch, bandwidth: float, compiled: bool) -> Row:
    loss_fn = _with_length(offcorr.get(name))
    loss_fn = loss_fn.resolve(loss_fn.statistics(given))  # a controller's statistics are another pass, not timed here
    denominator = float(given.logp.numel())

    def forward(choice: str) -> Callable[[], Any]:
        def run() -> Any:
            with fused.use(choice), torch.no_grad():
                return loss_fn(given, denominator=denominator)

        return run

    def both_ways() -> Any:
        logp = given.logp.detach().requires_grad_()
        loss_fn(dataclasses.replace(given, logp=logp), denominator=denominator).loss.backward()

    kernel, why = attempt(lambda: replay_seconds(forward("triton")))
    row: Row = {"part": "correction", "method": name, "rows": given.sequences, "tokens": given.logp.numel()}
    row |= {"dtype": str(given.logp.dtype), "packed": given.cu_seqlens is not None, "kernel_replay": kernel}
    if why:
        row["not_captured"] = why
    row["kernel_wall"] = seconds(forward("triton"))
    row["kernel_forward_backward_wall"] = seconds(both_ways)
    row["eager_replay"], row["eager_not_captured"] = attempt(lambda: replay_seconds(forward("reference"), rounds=20))
    row["eager_wall"] = seconds(forward("reference"), rounds=10)
    if compiled:
        torch._dynamo.reset()
        optimised = torch.compile(lambda: loss_fn._reference(given, denominator, None))

        def run() -> Any:
            with torch.no_grad():
                return optimised()

        row["compile_wall"], row["compile_failed"] = attempt(lambda: seconds(run, rounds=10))
        if not row["compile_failed"]:
            row["compile_replay"], row["compile_not_captured"] = attempt(lambda: replay_seconds(run, rounds=20))
    if kernel:
        row["share_of_copy_bandwidth"] = bytes_needed(given) / kernel / bandwidth
        row["eager_over_kernel"] = (row["eager_replay"] or row["eager_wall"]) / kernel
    return row


def correction(options: argparse.Namespace) -> dict[str, list[Row]]:
    names = options.methods or [method.name for method in catalogue()]
    shapes = [(8, 1000), (3, 4097), (300, 513)] if DEVICE == "cuda" else [(2, 33)]
    given = [batch(rows, width, packed=packed) for rows, width in shapes for packed in (False, True)]
    given += [batch(*shapes[0], dtype=torch.bfloat16)]
    checks = [disagreement(name, one) for name in names for one in given]
    if DEVICE != "cuda" or not all(check["ok"] for check in checks):
        return {"checks": checks, "timings": []}
    bandwidth = copy_bandwidth()
    timings: list[Row] = [{"part": "correction", "method": "(copy of 1 GiB, bytes a second)", "bandwidth": bandwidth}]
    usual = batch(64, 2048)
    compared = {"dapo", "gspo", "minpro", "ctpo", "tis", "seq_mis"}
    timings += [time_correction(name, usual, bandwidth, compiled=name in compared) for name in names]
    del usual
    if not options.quick:
        for shape in ((8192, 2048), (16, 2**20)):
            for packed in (False, True):
                large = batch(*shape, packed=packed)
                timings += [
                    time_correction(name, large, bandwidth, compiled=False) for name in names if name in compared
                ]
                del large
    return {"checks": checks, "timings": timings}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, list[Row]]]] = {"correction": correction}

# -- the report ----------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """One line a timing: microseconds, and how it compares."""
    lines = [f"{'part':<11}{'method':<16}{'tokens':>10}{'kernel us':>11}{'eager us':>10}{'x':>7}{'of copy':>9}"]
    for row in rows:
        if "kernel_wall" not in row:
            continue
        kernel, eager = row["kernel_replay"] or row["kernel_wall"], row["eager_replay"] or row["eager_wall"]
        share = row.get("share_of_copy_bandwidth")
        lines.append(
            f"{row['part']:<11}{row['method']:<16}{row['tokens']:>10}{kernel * 1e6:>11.1f}{eager * 1e6:>10.1f}"
            f"{eager / kernel:>7.1f}{f'{share:.0%}' if share else '-':>9}"
        )
    return "\n".join(lines)


def machine() -> Row:
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu, Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "offcorr": offcorr.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--methods", nargs="+", help="of the correction; all by default")
    parser.add_argument("--quick", action="store_true", help="leave out the large batches")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("no GPU: set TRITON_INTERPRET=1 to check tiny batches under the interpreter")
    output = options.output or (Path(os.environ["OUT"]) / "gpu.json" if "OUT" in os.environ else None)
    report: dict[str, Any] = {"machine": machine()}
    wrong: list[Row] = []
    for part in options.parts:
        report[part] = PARTS[part](options)
        wrong += [check for check in report[part]["checks"] if not check["ok"]]
        if output:  # after every part: what was measured is not lost if the next one fails
            output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{part}: {len(report[part]['checks'])} checks, {len(wrong)} wrong")
        print(table(report[part]["timings"]))
    if wrong:
        raise SystemExit("\n".join(map(str, wrong[:5])))


if __name__ == "__main__":
    main()
