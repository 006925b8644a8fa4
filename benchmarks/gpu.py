"""The correction kernel on a GPU: correctness first, then times.  Needs torch, triton, numpy and einops, nothing else.

    python benchmarks/gpu.py [--output gpu.json] [--budget 270] [--sections checks usual ...] [--methods dapo minpro]
    python benchmarks/gpu.py --smoke                             where there is no GPU

checks    every method against float64, padded and packed; a method that is wrong is not timed, and the exit code is 1
usual     64 x 2048: device time under graph replay and wall time, against the eager reference
large     16M tokens: share of the measured copy bandwidth
others    TRL's and Liger's losses, where they can be imported: first that they equal ours, then the times
compile   64 x 2048: torch.compile of the reference
sweep     other block sizes, numbers of warps, and programs that share a row

The report goes to --output ($OUT/gpu.json where OUT is set) after every row.  What is past the budget is left out.
``python benchmarks/plots.py gpu.json`` draws it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

from gpu_common import Row, Run, arguments, said, target, targets_table

# isort: split
import flags
import gpu_others as theirs
import torch
from torch import Tensor

import offcorr
from offcorr.kernels import dispatch, launch
from offcorr.kernels.logprob import logits_logprob
from offcorr.lab.kernels import batch
from offcorr.loss import torch_loss
from offcorr.methods.registry import catalogue, illustration
from offcorr.stages.spans import SPANS

CONSTANTS = ("BLOCK", "WARPS", "REGISTERS", "FILL", "PART", "ALONE")
COMPARED = ("dapo", "gspo", "minpro", "ctpo", "tis", "seq_mis")
"""Timed at 16M tokens and against torch.compile too."""

# -- batches -------------------------------------------------------------------------------------------------


def double(given: offcorr.Batch) -> offcorr.Batch:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "rewards")
    return dataclasses.replace(given, **{name: getattr(given, name).double() for name in names})


def checked_batches(run: Run) -> Iterator[offcorr.Batch]:
    shapes = [(8, 1000), (3, 4097), (300, 513)] if run.gpu else [(2, 33)]
    for rows, width in shapes:
        for packed in (False, True):
            yield batch(run.device, rows, width, packed=packed)
    yield batch(run.device, *shapes[0], dtype=torch.bfloat16)


def usual(device: torch.device) -> offcorr.Batch:
    return batch(device, 64, 2048) if device.type == "cuda" else batch(device, 3, 20)


# -- correctness ---------------------------------------------------------------------------------------------


def disagreement(name: str, given: offcorr.Batch) -> Row:
    """The kernel and the float32 reference, each against float64, and two runs against each other.

    A token on which float32 and float64 fall on different sides of a bound says nothing about the kernel, so tokens
    are counted where the kernel is further off than both rounding and the reference allow.
    """
    loss_fn = illustration(name).with_max_length(32)
    with dispatch.use("reference"):
        exact, single = loss_fn(double(given)), loss_fn(given)
    with dispatch.use("triton"):
        ran_on = dispatch.backend(loss_fn, given)
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
        "method": name,
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


def compile_kernels(name: str) -> None:
    """Leave a method's kernels in Triton's cache on disk: one process a method is sooner done than all in this one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = [usual(device), batch(device, 8, 1000), batch(device, 8, 1000, packed=True)]
    given.append(batch(device, 8, 1000, dtype=torch.bfloat16))
    loss_fn = illustration(name).with_max_length(32)
    with dispatch.use("triton"):
        for one in given if device.type == "cuda" else given[:1]:
            loss_fn(one)


def checks(run: Run) -> None:
    """Every method; those that are wrong are left out of what follows."""
    names = run.options.methods
    workers, ahead = (min(12, os.cpu_count() or 1), names) if run.gpu else (1, names[:1])
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for name, done in [(name, pool.submit(compile_kernels, name)) for name in ahead]:
            if error := done.exception():
                print(f"compiling {name} ahead: {said(error)}")
    for name, given in itertools.product(names, checked_batches(run)):
        try:
            row = disagreement(name, given)
        except Exception as error:
            row = {"ok": False, "method": name, "error": said(error)}
            run.recover()
        run.add("checks", row)
        if not row["ok"]:
            run.wrong(f"{name}: {row}")


def right(run: Run, names: tuple[str, ...] | list[str]) -> list[str]:
    """Those whose checks all passed (or that were not checked)."""
    wrong = {row["method"] for row in run.found.get("checks", []) if not row["ok"]}
    return [name for name in names if name in run.options.methods and name not in wrong]


# -- against the eager reference -----------------------------------------------------------------------------


def compulsory_bytes(given: offcorr.Batch) -> int:
    """Every input read once, the coefficient written once.

    The same for every method: what its stages leave alone, the metrics read.  Per token in float32: 17 bytes, 13
    without ``rollout_logp``; a method of rewards or turns reads no more than its rows' rewards here.
    """
    read = (given.logp, given.old_logp, given.rollout_logp, given.advantages, given.mask)
    return sum(x.nbytes for x in read if x is not None) + 4 * given.logp.numel()


def one_pass(loss_fn: offcorr.Correction) -> bool:
    """Whether a token's coefficient needs nothing of the rest of its row that comes after it."""
    from offcorr.kernels.spans import TURN, TWINS, Reduction

    twins = [TWINS[SPANS[getattr(stage, "span", "token")]] for stage in loss_fn.stages.values()]
    return not any(twin == TURN or isinstance(twin, Reduction) for twin in twins)


def copy_bandwidth(run: Run) -> float:
    """Bytes a second, read plus written, of a 1 GiB copy."""
    if "copy_bandwidth" not in run.found:
        source = torch.empty(2**28 if run.gpu else 2**10, device=run.device)
        other = torch.empty_like(source)
        copy = (run.replay_seconds if run.gpu else run.seconds)(lambda: other.copy_(source), 20)
        run.found["copy_bandwidth"] = 2 * source.nbytes / copy
    return run.found["copy_bandwidth"]


class Timed:
    """One method on one batch: what is to be timed.

    A controller's statistics are another pass, taken before; the denominator is given, as a trainer does.
    """

    def __init__(self, name: str, given: offcorr.Batch) -> None:
        loss_fn = illustration(name).with_max_length(32)
        self.loss_fn, self.given = loss_fn.resolve(loss_fn.statistics(given)), given
        self.denominator = float(given.logp.numel())

    def forward(self, choice: str) -> Callable[[], Any]:
        def call() -> Any:
            with dispatch.use(choice), torch.no_grad():
                return self.loss_fn(self.given, denominator=self.denominator)

        return call

    def both_ways(self, choice: str) -> Callable[[], Any]:
        def call() -> Any:
            logp = self.given.logp.detach().requires_grad_()
            with dispatch.use(choice):
                self.loss_fn(dataclasses.replace(self.given, logp=logp), denominator=self.denominator).loss.backward()

        return call

    def compiled(self, **options: Any) -> Callable[[], Any]:
        given = self.loss_fn.prepared(self.given)
        plan = self.loss_fn.plan(given)
        optimised = torch.compile(lambda: torch_loss(plan, given, self.denominator), **options)

        def call() -> Any:
            with torch.no_grad():
                return optimised()

        return call

    def about(self, name: str) -> Row:
        given = self.given
        return {
            "method": name,
            "one_pass": one_pass(self.loss_fn),
            "rows": given.sequences,
            "tokens": given.logp.numel(),
            "dtype": str(given.logp.dtype)[6:],
            "packed": given.cu_seqlens is not None,
            "rollout_logp": given.rollout_logp is not None,
            "compulsory_bytes": compulsory_bytes(given),
        }


def time_kernel(run: Run, name: str, given: offcorr.Batch) -> Row:
    timed = Timed(name, given)
    row = timed.about(name)
    row["kernel_replay"], row["kernel_not_captured"] = run.attempt(lambda: run.replay_seconds(timed.forward("triton")))
    row["kernel_wall"], row["kernel_failed"] = run.attempt(lambda: run.seconds(timed.forward("triton")))
    row["kernel_both_ways_wall"], _ = run.attempt(lambda: run.seconds(timed.both_ways("triton")))
    row["eager_replay"], row["eager_not_captured"] = run.attempt(
        lambda: run.replay_seconds(timed.forward("reference"), 10)
    )
    row["eager_wall"], row["eager_failed"] = run.attempt(lambda: run.seconds(timed.forward("reference"), 5))
    kernel, eager = row["kernel_replay"] or row["kernel_wall"], row["eager_replay"] or row["eager_wall"]
    if kernel:
        row["share_of_copy_bandwidth"] = row["compulsory_bytes"] / kernel / copy_bandwidth(run)
    if kernel and eager:
        row["eager_over_kernel"] = eager / kernel
    return {name: value for name, value in row.items() if value != ""}


def usual_times(run: Run) -> None:
    given = usual(run.device)
    for name in right(run, run.options.methods):
        if run.left() < 0:
            return
        run.add("usual", time_kernel(run, name, given))
    for bare in right(run, ("dapo",)):  # nobody reported log-probs: less to read
        run.add("usual", time_kernel(run, bare, dataclasses.replace(given, rollout_logp=None)))


def large_times(run: Run) -> None:
    shapes = ((8192, 2048), (16, 2**20)) if run.gpu else ((4, 12), (1, 40))
    for shape, packed in itertools.product(shapes, (False, True)):
        given = batch(run.device, *shape, packed=packed)
        for name in right(run, COMPARED):
            if run.left() < 0:
                return
            run.add("large", time_kernel(run, name, given))
        del given
        run.recover()


# -- against others ------------------------------------------------------------------------------------------


def ours_from_logits(name: str, logits: Tensor, ids: Tensor, given: offcorr.Batch) -> Tensor:
    """As the others: ``logits`` [B, T + 1, V], the last position unused."""
    used, targets = (torch.nn.functional.pad(x, (0, 1)) for x in (given.mask, ids))
    logp = logits_logprob(logits, targets, mask=used).logp[:, :-1]
    return offcorr.get(name)(dataclasses.replace(given, logp=logp)).loss


def from_logits(run: Run, rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
    """Logits, targets, and a batch whose old log-probs lie near the logits' own."""
    draw = torch.Generator(device=run.device).manual_seed(0)
    logits = torch.empty(rows, width + 1, vocabulary, device=run.device, dtype=dtype).normal_(generator=draw)
    ids = torch.randint(vocabulary, (rows, width), generator=draw, device=run.device)
    given = dataclasses.replace(batch(run.device, rows, width), rollout_logp=None)
    logp = logits_logprob(logits, torch.nn.functional.pad(ids, (0, 1))).logp[:, :-1]
    return logits, ids, dataclasses.replace(given, logp=logp, old_logp=logp + 0.2 * given.logp / given.logp.std())


def others(run: Run) -> None:
    """Forward and backward, wall time (TRL's metrics go to the host, and no graph can hold that)."""
    check = from_logits(run, *((4, 129, 1000) if run.gpu else (3, 9, 40)), torch.float32)
    given = dataclasses.replace(usual(run.device), rollout_logp=None)
    size = (16, 2048, 32768, torch.bfloat16) if run.gpu else (2, 9, 40, torch.bfloat16)
    logits, ids, of_logits = from_logits(run, *size)
    with dispatch.use("triton"):
        for name in right(run, tuple(theirs.SETTINGS)):
            setting, loss_fn = theirs.SETTINGS[name], offcorr.get(name)
            starts: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None, Tensor]] = {}
            starts["offcorr, log-probs"] = (
                lambda x, loss_fn=loss_fn: loss_fn(dataclasses.replace(given, logp=x)).loss,
                None,
                given.logp,
            )
            starts["TRL, log-probs"] = (
                lambda x, setting=setting: theirs.trl_loss(setting, x, given),
                lambda x, setting=setting: theirs.trl_loss_from_logits(setting, x, *check[1:]),
                given.logp,
            )
            starts["offcorr, logits"] = (lambda x, name=name: ours_from_logits(name, x, ids, of_logits), None, logits)
            starts["TRL, logits"] = (
                lambda x, setting=setting: theirs.trl_loss_from_logits(setting, x, ids, of_logits),
                lambda x, setting=setting: theirs.trl_loss_from_logits(setting, x, *check[1:]),
                logits,
            )
            starts["Liger, logits"] = (
                lambda x, setting=setting: theirs.liger_loss_from_logits(setting, x, ids, of_logits),
                lambda x, setting=setting: theirs.liger_loss_from_logits(setting, x, *check[1:], inplace=False),
                logits,
            )
            for who, (function, twin, start) in starts.items():
                if run.left() < 0:
                    return
                row: Row = {"who": who, "method": name, "shape": list(start.shape), "dtype": str(start.dtype)[6:]}
                run.add("others", row | time_other(run, name, function, twin, check, start))


def time_other(run: Run, name: str, function: Any, twin: Any, check: Any, start: Tensor) -> Row:
    """How far from ours on the batch of the check (relative, loss and gradient), then seconds and GiB."""
    row: Row = {}
    try:
        if twin is not None:
            ends = []
            for one in (lambda x: ours_from_logits(name, x, *check[1:]), twin):
                logits = check[0].clone().requires_grad_()
                loss = one(logits)
                (gradient,) = torch.autograd.grad(loss, logits)
                ends.append((loss.double(), gradient.double()))
            (mine, my_gradient), (other, other_gradient) = ends
            row["loss_differs"] = (abs(mine - other) / abs(mine)).item()
            row["gradient_differs"] = ((my_gradient - other_gradient).norm() / my_gradient.norm()).item()

        leaf = start.detach().clone().requires_grad_()  # Liger overwrites it

        def both_ways() -> None:
            leaf.grad = None
            function(leaf).backward()

        both_ways()
        row["peak_gib"] = run.peak_gib(both_ways)
        row["wall"] = run.seconds(both_ways, 10)
    except Exception as error:  # absent, or out of memory: a result, not an end
        row["failed"] = said(error)
    run.recover()
    return row


def compile_times(run: Run) -> None:
    given = usual(run.device)
    for name in right(run, COMPARED):
        if run.left() < 0:
            return
        timed = Timed(name, given)
        torch._dynamo.reset()
        call = timed.compiled(**({} if run.gpu else {"backend": "eager"}))
        row = timed.about(name)
        row["compile_wall"], row["compile_failed"] = run.attempt(lambda call=call: run.seconds(call, 10))
        if not row["compile_failed"]:
            row["compile_replay"], row["compile_not_captured"] = run.attempt(
                lambda call=call: run.replay_seconds(call, 20)
            )
        run.add("compiled", {name: value for name, value in row.items() if value != ""})
    torch._dynamo.reset()


# -- block sizes ---------------------------------------------------------------------------------------------


def sweep(run: Run) -> None:
    """Blocks and warps; for a few long rows, how many programs share one."""
    names = right(run, ("dapo", "minpro", "gspo"))
    if run.gpu:
        tried = ((4, 168), (4, 128), (2, 255), (8, 128))  # warps, and registers that allow as many programs and more
        wide = [
            {"BLOCK": block, "WARPS": warps, "REGISTERS": registers}
            for block in (512, 256, 1024, 2048)
            for warps, registers in tried
        ]
        settings = [((64, 2048), one) for one in wide] + [((8192, 2048), one) for one in wide]
        shared = [{"FILL": fill, "PART": part} for fill in (512, 256, 1024) for part in (4096, 2048, 16384)]
        shared += [{"WARPS": warps, "REGISTERS": registers} for warps, registers in tried]
        settings += [((16, 2**20), one) for one in shared]
        settings += [((512, 512), {"ALONE": alone}) for alone in (256, 64, 512)]
    else:
        settings = [((2, 20), {"BLOCK": 16}), ((2, 20), {"BLOCK": 32, "WARPS": 2}), ((1, 99), {"PART": 16})]
    for (shape, setting), name in itertools.product(settings, names):
        if run.left() < 0:
            return
        timed = Timed(name, batch(run.device, *shape))
        before = {constant: getattr(launch, constant) for constant in setting}
        vars(launch).update(setting)
        try:
            seconds, why = run.attempt(
                lambda timed=timed: (run.replay_seconds if run.gpu else run.seconds)(timed.forward("triton"), 20)
            )
        finally:
            vars(launch).update(before)
        row = {"setting": setting, **timed.about(name), "kernel_replay": seconds}
        run.add("sweep", row | ({"failed": why} if why else {}))


# -- the report ----------------------------------------------------------------------------------------------


def judge(run: Run) -> None:
    """The figures of this kernel's targets."""
    found = run.found
    timed = [row for row in found.get("usual", []) if row.get("kernel_replay")]
    if timed and run.gpu:
        slowest = max(timed, key=lambda row: row["kernel_replay"])
        what = f"64 x 2048, slowest method ({slowest['method']}), microseconds under graph replay"
        target(found, what, 1e6 * slowest["kernel_replay"], "<= 15", slowest["kernel_replay"] <= 15e-6)
        least = min((row for row in timed if "eager_over_kernel" in row), key=lambda row: row["eager_over_kernel"])
        what = f"64 x 2048, least gain ({least['method']}), times faster than eager"
        target(found, what, least["eager_over_kernel"], ">= 15", least["eager_over_kernel"] >= 15)
    wide = [r for r in found.get("large", []) if r["one_pass"] and r["rows"] > 1000 and "share_of_copy_bandwidth" in r]
    if wide and run.gpu:
        least = min(wide, key=lambda row: row["share_of_copy_bandwidth"])
        what = f"16M tokens, one pass, least ({least['method']}), share of copy bandwidth"
        target(found, what, least["share_of_copy_bandwidth"], ">= 0.7", least["share_of_copy_bandwidth"] >= 0.7)
    run.flush()


def table(found: dict[str, Any]) -> str:
    """One line a timing: microseconds, and how it compares."""
    lines = [f"{'method':<16}{'tokens':>10}{'':>8}{'kernel us':>11}{'eager us':>10}{'x':>7}{'of copy':>9}"]
    for row in found.get("usual", []) + found.get("large", []):
        name = row["method"] + ("" if row["rollout_logp"] else ", no engine")
        kernel, eager = row.get("kernel_replay") or row["kernel_wall"], row.get("eager_replay") or row["eager_wall"]
        if kernel is None:
            continue
        cells = [f"{1e6 * eager:.1f}", f"{eager / kernel:.1f}"] if eager else ["-", "-"]
        lines.append(
            f"{name:<16}{row['tokens']:>10}{'packed' if row['packed'] else 'padded':>8}{kernel * 1e6:>11.1f}"
            f"{cells[0]:>10}{cells[1]:>7}{row['share_of_copy_bandwidth']:>9.0%}"
        )
    for row in found.get("compiled", []):
        wall = f"{1e6 * row['compile_wall']:.1f} us" if row["compile_wall"] else row["compile_failed"]
        lines.append(f"{row['method']:<16}torch.compile, wall: {wall}")
    for row in found.get("others", []):
        wall = f"{1e6 * row['wall']:.1f} us" if "wall" in row else row["failed"]
        if "gradient_differs" in row:
            wall += f"; its gradient is {row['gradient_differs']:.1e} off ours"
        lines.append(f"{row['method']:<16}{row['who']}, forward and backward, wall: {wall}")
    return "\n".join([*lines, targets_table(found)])


SECTIONS: dict[str, Callable[[Run], None]] = {
    "checks": checks,
    "usual": usual_times,
    "large": large_times,
    "others": others,
    "compile": compile_times,
    "sweep": sweep,
}


def main() -> None:
    parser = arguments(__doc__, "gpu", list(SECTIONS))
    parser.add_argument("--methods", nargs="+", type=flags.method, help="all by default")
    options: argparse.Namespace = parser.parse_args()
    every = [method.name for method in catalogue()]
    options.methods = options.methods or (list(COMPARED[:3]) if options.smoke else every)
    run = Run(options)
    run.found["constants"] = {name: getattr(launch, name) for name in CONSTANTS}
    run.sections(SECTIONS)
    judge(run)
    run.finish(table(run.found))


if __name__ == "__main__":
    main()
