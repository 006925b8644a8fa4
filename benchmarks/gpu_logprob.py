"""``linear_logprob`` on one GPU: correctness first, then times against the floor of its matrix products.

    python benchmarks/gpu_logprob.py [--output result.json] [--budget 480] [--skip-timings]
    TRITON_INTERPRET=1 python benchmarks/gpu_logprob.py --device cpu     the same code, tiny, where there is no GPU

Needs torch, triton, numpy and einops.  The report goes to --output, or to $OUT/gpu_logprob.json.  A floor is a number
of matrix products at the rate measured here for a large one; ratios to it are what matters.  Timings are medians
of CUDA events; competitors (TRL, Liger, cut-cross-entropy, torch) are timed where they can be imported.  Nothing is
timed if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from offcorr.kernels import logprob
from offcorr.kernels.correction import use
from offcorr.kernels.logprob import linear_logprob, logits_logprob, naive_logprob, out_of_vocabulary

KEPT = 0.4
"""The fraction of tokens with a gradient, in the cases that say so."""


class Run:
    """One device, the sizes that suit it, and what has been found so far."""

    def __init__(self, device: str, budget: float) -> None:
        self.device, self.gpu = torch.device(device), device != "cpu"
        self.chunk = None if self.gpu else 4  # the interpreter runs rows one by one, padding included
        self.began, self.budget = time.perf_counter(), budget
        self.found: dict[str, Any] = {"machine": self.machine(), "checks": {}, "rates": {}, "cases": [], "layouts": []}

    def machine(self) -> dict[str, Any]:
        import triton

        name = torch.cuda.get_device_name() if self.gpu else platform.machine()
        return {"device": name, "torch": torch.__version__, "triton": triton.__version__}

    def left(self) -> bool:
        return time.perf_counter() - self.began < self.budget

    def problem(self, tokens: int, size: int, vocabulary: int, dtype: torch.dtype, scale: float = 2.0) -> list[Tensor]:
        """hidden, weight, target, gradient of logp; logits of standard deviation ``scale``."""
        draw = torch.Generator(self.device).manual_seed(0)
        options = {"generator": draw, "device": self.device}
        hidden = (scale * torch.randn(tokens, size, **options)).to(dtype).requires_grad_()
        weight = (torch.randn(vocabulary, size, **options) / size**0.5).to(dtype).requires_grad_()
        return [
            hidden,
            weight,
            torch.randint(vocabulary, (tokens,), **options),
            torch.randn(tokens, **options),
        ]

    def seconds(self, work: Callable[[], Any], rounds: int) -> float:
        """Median over ``rounds`` after two to warm up."""
        taken = []
        for _ in range(rounds + 2 if self.gpu else 3):
            if self.gpu:
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                work()
                ended.record()
                ended.synchronize()
                taken.append(began.elapsed_time(ended) / 1e3)
            else:
                start = time.perf_counter()
                work()
                taken.append(time.perf_counter() - start)
        return statistics.median(taken[2:])


# -- correctness ---------------------------------------------------------------------------------------------


def relative(mine: Tensor, true: Tensor) -> float:
    return ((mine.double() - true).norm() / true.norm().clamp(min=1e-30)).item()


def check_against_float64(run: Run) -> None:
    """Every combination of dtype, frozen head, soft cap and entropy gradient, at odd sizes."""
    sizes = [(1, 64, 257), (1000, 192, 33001)] if run.gpu else [(5, 8, 65)]
    limit = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    worst: dict[str, float] = {}
    torch.backends.cuda.matmul.allow_tf32 = False
    for size, dtype, frozen, soft_cap, entropy in itertools.product(
        sizes, limit, (False, True), (None, 20.0), (False, True)
    ):
        hidden, weight, target, d = run.problem(*size, dtype)
        bias = torch.randn(size[2], device=run.device).to(dtype).requires_grad_()
        options: dict[str, Any] = {"soft_cap": soft_cap, "temperature": 0.9, "logit_scale": 1.1}
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
        want = naive_logprob(exact[0], exact[1], target, bias=exact[2], **options)
        got = linear_logprob(
            hidden,
            weight,
            target,
            bias=bias,
            entropy=True,
            sum_sq_probs=True,
            frozen_head=frozen,
            chunk=run.chunk,
            **options,
        )
        name = str(dtype)[6:]
        for field, mine, true in zip(got._fields, got, want, strict=True):
            error = (mine - true).abs().max().item()
            assert error < 1e-4, f"{field} is {error} off: {size} {name} frozen={frozen} soft_cap={soft_cap}"
            worst[f"{name} {field}"] = max(error, worst.get(f"{name} {field}", 0))
        d = torch.where(torch.rand_like(d) < 0.3, 0, d) if size[0] > 1 else d
        leaves, true_leaves = ([hidden], exact[:1]) if frozen else ([hidden, weight, bias], exact)
        losses = [(x.logp * d + (x.entropy * d.flip(0) if entropy else 0)).sum() for x in (got, want)]
        grads = [torch.autograd.grad(loss, to) for loss, to in zip(losses, (leaves, true_leaves), strict=True)]
        for to, mine, true in zip(("hidden", "weight", "bias"), *grads, strict=False):
            error = relative(mine, true)
            assert error < limit[dtype], f"gradient of {to} {error}: {size} {name} {frozen=} {soft_cap=} {entropy=}"
            worst[f"{name} d{to}"] = max(error, worst.get(f"{name} d{to}", 0))
    run.found["checks"]["largest errors against float64"] = worst


def check_masks_and_targets(run: Run) -> None:
    hidden, weight, target, d = run.problem(*((777, 128, 5001) if run.gpu else (9, 8, 70)), torch.bfloat16)
    mask = torch.rand(len(target), device=run.device) < 0.6
    mask[1] = True
    with torch.no_grad():
        hidden[~mask] = torch.nan
    target = torch.where(mask, target, -100)
    target[1] = len(weight)
    out_of_vocabulary(reset=True)
    for frozen in (False, True):
        found = linear_logprob(hidden, weight, target, mask=mask, frozen_head=frozen, entropy=True, chunk=run.chunk)
        fine = mask.clone()
        fine[1] = False
        assert found.logp[1].isnan() and (found.logp[~mask] == 0).all() and found.logp[fine].isfinite().all()
        (gradient,) = torch.autograd.grad(torch.where(fine, found.logp * d, 0).sum(), hidden)
        assert gradient.isfinite().all() and (gradient[~fine] == 0).all() and (gradient[fine] != 0).any()
    assert out_of_vocabulary(reset=True) == 2
    run.found["checks"]["NaN under the mask, a target outside the vocabulary"] = "ok"


def check_batch_invariance(run: Run) -> None:
    """Bit for bit, and gradients the same twice."""
    hidden, weight, target, d = run.problem(*((3000, 512, 33001) if run.gpu else (10, 8, 70)), torch.bfloat16)
    options: dict[str, Any] = {"entropy": True, "batch_invariant": True, "chunk": 1024 if run.gpu else 4}
    whole = linear_logprob(hidden, weight, target, **options)
    differs = 0
    for tokens in (1, 7, len(target) // 2):
        chosen = torch.randperm(len(target), device=run.device)[:tokens]
        part = linear_logprob(hidden[chosen], weight, target[chosen], **options)
        differs += sum((a != b[chosen]).sum().item() for a, b in zip(part[:2], whole[:2], strict=True))
    assert not differs, f"{differs} results depend on the batch"
    grads = [
        torch.autograd.grad((linear_logprob(hidden, weight, target, chunk=run.chunk).logp * d).sum(), [hidden, weight])
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "two runs differ"
    run.found["checks"]["batch-invariant to the bit; the same gradient bits twice"] = "ok"


def check_no_synchronisation(run: Run) -> None:
    """A forward pass never waits for the device; a frozen head's backward pass neither."""
    if not run.gpu:
        return
    hidden, weight, target, _ = run.problem(700, 128, 5001, torch.bfloat16)
    mask = torch.rand(700, device=run.device) < 0.6
    linear_logprob(hidden, weight, target, mask=mask, entropy=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_logprob(hidden, weight, target, mask=mask, entropy=True, sum_sq_probs=True)
        logits_logprob((hidden @ weight.T).detach(), target, mask=mask, entropy=True)
        linear_logprob(hidden, weight, target, frozen_head=True).logp.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.found["checks"]["no host synchronisation in forward"] = "ok"


def check_past_int32(run: Run) -> None:
    """More than 2^31 logits: offsets are 64 bits wide."""
    tokens, vocabulary = (16384, 151936) if run.gpu else (3, 50)
    logits = torch.randn(tokens, vocabulary, device=run.device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device=run.device)
    found = logits_logprob(logits, target, entropy=True)
    (gradient,) = torch.autograd.grad(found.logp.sum(), logits)
    exact = logits.detach()[-3:].double().requires_grad_()
    want = torch.log_softmax(exact, -1).gather(1, target[-3:, None])[:, 0]
    (true,) = torch.autograd.grad(want.sum(), exact)
    assert (found.logp[-3:] - want).abs().max() < 1e-4 and relative(gradient[-3:], true) < 2**-8
    run.found["checks"]["more than 2^31 logits"] = f"ok, {logits.numel()} elements"


def accuracy(run: Run) -> None:
    """Largest and mean error of a log-probability, bfloat16 inputs, logits of standard deviation 6."""
    tokens, size, vocabulary = (512, 4096, 151936) if run.gpu else (8, 64, 500)
    hidden, weight, target, _ = (x.detach() for x in run.problem(tokens, size, vocabulary, torch.bfloat16, 6.0))
    exact = torch.cat(
        [
            naive_logprob(h.double(), weight.double(), t).logp
            for h, t in zip(hidden.split(64), target.split(64), strict=True)
        ]
    )
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, target[:, None])[:, 0]
    ours = linear_logprob(hidden, weight, target, chunk=run.chunk).logp
    said = {}
    for name, mine in {"linear_logprob": ours, "logits rounded to bfloat16": rounded}.items():
        said[name] = {"largest": (mine - exact).abs().max().item(), "mean": (mine - exact).abs().mean().item()}
    ratio = said["logits rounded to bfloat16"]["largest"] / said["linear_logprob"]["largest"]
    run.found["checks"]["error of logp, nats"] = said | {"ratio of the largest": ratio}
    assert ratio >= 5, f"only {ratio} times more accurate than bfloat16 logits"


# -- times ---------------------------------------------------------------------------------------------------


def rates(run: Run) -> None:
    """The ceilings: bf16 products to bf16 and to float32, a copy."""
    m, k, n = (16384, 4096, 16384) if run.gpu else (64, 64, 64)
    a = torch.randn(m, k, device=run.device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=run.device, dtype=torch.bfloat16)
    out = {dtype: torch.empty(m, n, device=run.device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    products = run.found["rates"]
    products["bf16 TFLOP/s"] = 2e-12 * m * k * n / run.seconds(lambda: torch.mm(a, b.T, out=out[torch.bfloat16]), 10)
    products["bf16 to fp32 TFLOP/s"] = (
        2e-12 * m * k * n / run.seconds(lambda: logprob._product(a, b.T, out[torch.float32]), 10)
    )
    wide = out[torch.float32]
    other = torch.empty_like(wide)
    products["copy TB/s, read + write"] = 2e-12 * wide.nbytes / run.seconds(lambda: other.copy_(wide), 10)


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, target[:, None])[:, 0]


def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, ())[0]


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # One scalar: its gradients are made in the forward pass.
    return -LigerFusedLinearCrossEntropyLoss(reduction="mean")(weight, hidden, target)[None]


def cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, target, reduction="none")


def torch_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, target, reduction="none")


def ours(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda hidden, weight, target: linear_logprob(hidden, weight, target, **options).logp


OTHERS = {
    "naive": naive,
    "TRL": trl,
    "Liger (one scalar)": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "torch linear_cross_entropy": torch_cross_entropy,
}


def case(run: Run, name: str, function: Callable[..., Tensor], given: list[Tensor], **about: Any) -> None:
    """Forward, and forward with backward, of one implementation; products: how many the floor has."""
    hidden, weight, target, d = given
    products, kept = about.pop("products"), about.pop("kept", 1.0)
    weight = weight.detach() if about.get("frozen") else weight
    if kept < 1:
        d = torch.where(torch.arange(len(d), device=d.device) % 100 < 100 * kept, d, 0)

    def forward() -> None:
        function(hidden, weight, target)

    def both() -> None:
        hidden.grad = weight.grad = None
        logp = function(hidden, weight, target)
        logp.backward(d[: len(logp)])

    row = {"name": name, "N": len(hidden), "H": hidden.shape[1], "V": len(weight), "dtype": str(hidden.dtype)[6:]}
    row |= {"kept": kept, **about}
    try:
        both()
        if run.gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        both()
        if run.gpu:
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        rounds = 5
        row["forward_ms"] = 1e3 * run.seconds(forward, rounds)
        row["total_ms"] = 1e3 * run.seconds(both, rounds)
        product = 2e-12 * len(hidden) * hidden.shape[1] * len(weight) / run.found["rates"]["bf16 TFLOP/s"]
        row["floor_ms"] = 1e3 * product * products
        row["total_to_floor"] = row["total_ms"] / row["floor_ms"]
    except Exception as error:  # a competitor that is absent or out of memory is a result, not an end
        if name.startswith("linear_logprob"):
            raise
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    finally:
        hidden.grad = weight.grad = None
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    run.found["cases"].append(row)
    print(json.dumps(row), flush=True)


def times(run: Run) -> None:
    shapes = (
        [
            (16384, 4096, 151936, torch.bfloat16),
            (16384, 4096, 151936, torch.float16),
            (4096, 4096, 151936, torch.bfloat16),
            (16384, 2048, 32000, torch.bfloat16),
            (65536, 1024, 151936, torch.bfloat16),
        ]
        if run.gpu
        else [(8, 16, 200, torch.bfloat16)]
    )
    for number, shape in enumerate(shapes):
        if not run.left():
            break
        given = run.problem(*shape)
        case(run, "linear_logprob", ours(chunk=run.chunk), given, products=4)
        case(run, "linear_logprob", ours(chunk=run.chunk), given, products=1 + 3 * KEPT, kept=KEPT)
        case(run, "linear_logprob", ours(chunk=run.chunk), given, products=2, frozen=True)
        if not number:
            case(
                run,
                "linear_logprob, recomputing",
                ours(chunk=run.chunk, frozen_head=False),
                given,
                products=3,
                frozen=True,
            )
            case(run, "linear_logprob, batch-invariant", ours(chunk=run.chunk, batch_invariant=True), given, products=4)
            case(run, "linear_logprob, entropy", ours(chunk=run.chunk, entropy=True), given, products=4)
        for name, function in OTHERS.items():
            if run.left():
                case(run, name, function, given, products=3 if name == "naive" else 4)
        if not number:
            layouts(run, given)


def layouts(run: Run, given: list[Tensor]) -> None:
    """Which tile is best: tokens by vocabulary entries."""
    usual = logprob._tiles_for
    chunks, columns = ((2048, 4096, 8192), (8192, 16384, 32768)) if run.gpu else ((4,), (64, 128))
    hidden, weight, target, d = given
    for chunk, width in itertools.product(chunks, columns):
        if not run.left():
            return
        logprob._tiles_for = lambda *given, width=width: usual(*given) | {"columns": width}

        def both(chunk: int = chunk) -> None:
            hidden.grad = weight.grad = None
            linear_logprob(hidden, weight, target, chunk=chunk).logp.backward(d)

        try:
            found = {"chunk": chunk, "columns": width, "total_ms": 1e3 * run.seconds(both, 3)}
        finally:
            logprob._tiles_for = usual
        run.found["layouts"].append(found)
        print(json.dumps(found), flush=True)
    hidden.grad = weight.grad = None


def table(found: dict[str, Any]) -> str:
    lines = ["| case | N, H, V | dtype | kept | forward ms | total ms | floor ms | total / floor | peak GiB |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in found["cases"]:
        name = row["name"] + (", frozen head" if row.get("frozen") else "")
        shape = f"{row['N']}, {row['H']}, {row['V']}"
        if "failed" in row:
            lines.append(f"| {name} | {shape} | {row['dtype']} | {row['kept']} | {row['failed'][:60]} |||||")
            continue
        cells = [f"{row[key]:.2f}" for key in ("forward_ms", "total_ms", "floor_ms", "total_to_floor")]
        cells.append(f"{row['peak_gib']:.2f}" if "peak_gib" in row else "")
        lines.append(f"| {name} | {shape} | {row['dtype']} | {row['kept']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


CHECKS = (
    check_against_float64,
    check_masks_and_targets,
    check_batch_invariance,
    check_no_synchronisation,
    check_past_int32,
    accuracy,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no further case is begun")
    parser.add_argument("--skip-timings", action="store_true")
    options = parser.parse_args(arguments)
    output = options.output or Path(os.environ.get("OUT", ".")) / "gpu_logprob.json"
    run = Run(options.device, options.budget)
    try:
        with use("triton"):
            for check in CHECKS:
                check(run)
                print(f"{check.__name__}: ok, {time.perf_counter() - run.began:.0f} s", flush=True)
            if not options.skip_timings:
                rates(run)
                print(json.dumps(run.found["rates"]), flush=True)
                times(run)
    finally:  # what was found before a failure is worth having
        output.write_text(json.dumps(run.found, indent=1) + "\n")
    print(json.dumps(run.found["checks"], indent=1))
    print(table(run.found))


if __name__ == "__main__":
    main()
