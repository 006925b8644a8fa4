"""``linear_logprob`` on one GPU: correctness first, then times against the floor of its matrix products.

    python benchmarks/gpu_logprob.py [--output gpu_logprob.json] [--budget 270] [--sections checks main ...]
    python benchmarks/gpu_logprob.py --smoke                             where there is no GPU

checks    against float64, masks, batch invariance, no host synchronisation, more than 2^31 logits
accuracy  errors of log-probs and of the gradient of the hidden states against float64, ours and others'
main      N=16384 H=4096 V=151936 bf16: kept fractions, frozen head, others where they can be imported, peak memory
losses    hidden states to a GRPO-like loss and back: ours, TRL's, Liger's chunked one
tiles     other tile sizes
shapes    other N, H, V and dtypes

Needs torch, triton, numpy and einops.  A floor is a number of matrix products at the rate measured here for a large
one; ratios to it are what matters.  The report goes to --output ($OUT/gpu_logprob.json where OUT is set) after every
row; what is past the budget is left out.  ``python benchmarks/plots.py gpu_logprob.json`` draws it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from gpu_common import Row, Run, arguments, said, target, targets_table

# isort: split
import gpu_others as theirs
import torch
from torch import Tensor

import offcorr
from offcorr.kernels.dispatch import use
from offcorr.kernels.logprob import linear as logprob
from offcorr.kernels.logprob import linear_logprob, logits_logprob, naive_logprob, out_of_support, out_of_vocabulary
from offcorr.lab.kernels import KEPT, Problem


def chunk(run: Run) -> int | None:
    return None if run.gpu else 4  # the interpreter runs rows one by one, padding included


def problem(run: Run, tokens: int, size: int, vocabulary: int, dtype: torch.dtype, scale: float = 2.0) -> Problem:
    return Problem.of(run.device, tokens, size, vocabulary, dtype, scale)


# -- correctness ---------------------------------------------------------------------------------------------


def relative(mine: Tensor, true: Tensor) -> float:
    return ((mine.double() - true).norm() / true.norm().clamp(min=1e-30)).item()


def check_against_float64(run: Run) -> Any:
    """Every combination of dtype, frozen head, soft cap and entropy gradient, at odd sizes."""
    sizes = [(1, 64, 257), (1000, 192, 33001)] if run.gpu else [(5, 8, 65)]
    limit = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    worst: dict[str, float] = {}
    torch.backends.cuda.matmul.allow_tf32 = False
    for size, dtype, frozen, soft_cap, entropy in itertools.product(
        sizes, limit, (False, True), (None, 20.0), (False, True)
    ):
        hidden, weight, target, d = problem(run, *size, dtype)
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
            chunk=chunk(run),
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
    return worst


def check_masks_and_targets(run: Run) -> Any:
    hidden, weight, target, d = problem(run, *((777, 128, 5001) if run.gpu else (9, 8, 70)), torch.bfloat16)
    mask = torch.rand(len(target), device=run.device) < 0.6
    mask[1] = True
    with torch.no_grad():
        hidden[~mask] = torch.nan
    target = torch.where(mask, target, -100)
    target[1] = len(weight)
    out_of_vocabulary(reset=True)
    for frozen in (False, True):
        found = linear_logprob(hidden, weight, target, mask=mask, frozen_head=frozen, entropy=True, chunk=chunk(run))
        fine = mask.clone()
        fine[1] = False
        assert found.logp[1].isnan() and (found.logp[~mask] == 0).all() and found.logp[fine].isfinite().all()
        (gradient,) = torch.autograd.grad(torch.where(fine, found.logp * d, 0).sum(), hidden)
        assert gradient.isfinite().all() and (gradient[~fine] == 0).all() and (gradient[fine] != 0).any()
    assert out_of_vocabulary(reset=True) == 2
    return "NaN under the mask, a target outside the vocabulary"


def check_support(run: Run) -> Any:
    """Kept tokens as ids and as a mask against the definition in float64; a target outside them is NaN and counted."""
    hidden, weight, target, d = problem(run, *((777, 128, 33001) if run.gpu else (9, 8, 70)), torch.bfloat16)
    ids = torch.randint(len(weight), (len(target), 20), device=run.device)
    ids[:, 0], ids[1:, 15:], ids[2] = target, -1, -1
    mask = torch.zeros(len(target), len(weight) + 1, dtype=torch.bool, device=run.device)
    mask = mask.scatter_(1, torch.where(ids < 0, len(weight), ids), True)[:, :-1]
    mask[2] = True
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = naive_logprob(*exact, target, support=mask)
    want_grads = torch.autograd.grad(((want.logp + want.entropy) * d).sum(), exact)
    worst = 0.0
    for support in (ids, mask):
        got = linear_logprob(hidden, weight, target, support=support, entropy=True, sum_sq_probs=True, chunk=chunk(run))
        worst = max(worst, *((mine - true).abs().max().item() for mine, true in zip(got, want, strict=True)))
        grads = torch.autograd.grad(((got.logp + got.entropy) * d).sum(), [hidden, weight])
        errors = [relative(mine, true) for mine, true in zip(grads, want_grads, strict=True)]
        assert worst < 1e-4 and max(errors) < 2**-7, f"results {worst} off, gradients {errors}"
    out_of_support(reset=True)
    ids[0] = (target[0] + 1) % len(weight)
    found = linear_logprob(hidden, weight, target, support=ids, chunk=chunk(run)).logp
    assert found[0].isnan() and found[1:].isfinite().all() and out_of_support(reset=True) == 1
    return f"within {worst:.1e} of float64"


def check_batch_invariance(run: Run) -> Any:
    """Bit for bit, in small tiles and in those that are used; gradients the same twice."""
    sizes = [(3000, 512, 33001, 1024), (9000, 1024, 40000, None)] if run.gpu else [(10, 8, 70, 4)]
    for *size, rows in sizes:
        hidden, weight, target, d = problem(run, *size, torch.bfloat16)
        options: dict[str, Any] = {"entropy": True, "batch_invariant": True, "chunk": rows}
        whole = linear_logprob(hidden, weight, target, **options)
        differs = 0
        for tokens in (1, 7, len(target) // 2):
            chosen = torch.randperm(len(target), device=run.device)[:tokens]
            part = linear_logprob(hidden[chosen], weight, target[chosen], **options)
            differs += sum((a != b[chosen]).sum().item() for a, b in zip(part[:2], whole[:2], strict=True))
        # One token in all places; of an odd size, so that rows are padded to begin at aligned addresses.
        odd = hidden[:1, :-1].detach().expand(size[0], -1)
        found = linear_logprob(odd, weight[:, :-1].detach(), target[:1].expand(size[0]), **options)
        differs += sum((x != x[0]).sum().item() for x in found[:2])
        assert not differs, f"{differs} results depend on the batch"
    grads = [
        torch.autograd.grad((linear_logprob(hidden, weight, target, chunk=chunk(run)).logp * d).sum(), [hidden, weight])
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "two runs differ"
    return "batch-invariant to the bit; the same gradient bits twice"


def check_no_synchronisation(run: Run) -> Any:
    """A forward pass never waits for the device, a frozen head's backward pass neither; any other's waits once."""
    if not run.gpu:
        return "a CPU does not synchronise"
    hidden, weight, target, _ = problem(run, 700, 128, 5001, torch.bfloat16)
    mask = torch.rand(700, device=run.device) < 0.6
    linear_logprob(hidden, weight, target, mask=mask, entropy=True).logp.sum().backward()
    kept = target[:, None].repeat(1, 3)
    linear_logprob(hidden, weight, target, support=kept)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = linear_logprob(hidden, weight, target, mask=mask, entropy=True, sum_sq_probs=True)
        logits_logprob((hidden @ weight.T).detach(), target, mask=mask, entropy=True)
        linear_logprob(hidden, weight, target, frozen_head=True, support=kept).logp.sum().backward()
        loss = found.logp.sum()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said_by_torch:
            warnings.simplefilter("always")
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(warning.message) for warning in said_by_torch)
    assert waits <= 1, f"a backward pass waited {waits} times"
    return f"no host synchronisation in forward, {waits} in backward"


def check_past_int32(run: Run) -> Any:
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
    return f"{logits.numel()} logits"


def checks(run: Run) -> None:
    for check in CHECKS:
        row: Row = {"check": check.__name__.removeprefix("check_"), "ok": True}
        try:
            with use("triton"):
                row["found"] = check(run)
        except Exception as error:
            row |= {"ok": False, "found": said(error)}
            run.wrong(f"{row['check']}: {row['found']}")
        run.recover()
        run.add("checks", row)


def accuracy(run: Run) -> None:
    """Bfloat16 inputs, logits of standard deviation 6; errors of log-probs in nats, of the gradient relative."""
    tokens, size, vocabulary = (512, 4096, 151936) if run.gpu else (8, 64, 500)
    hidden, weight, target_ids, d = problem(run, tokens, size, vocabulary, torch.bfloat16, 6.0)
    exact, wide = [], weight.detach().double()
    for h, t, g in zip(hidden.split(64), target_ids.split(64), d.split(64), strict=True):
        leaf = h.detach().double().requires_grad_()
        logp = naive_logprob(leaf, wide, t).logp
        exact.append((logp.detach(), torch.autograd.grad(logp @ g.double(), leaf)[0]))
    want, want_gradient = (torch.cat(parts) for parts in zip(*exact, strict=True))
    del exact, wide
    for name, function in {"linear_logprob": ours(chunk=chunk(run)), **theirs.LOGPROBS}.items():
        row: Row = {"name": name}
        try:
            with use("triton"):
                mine = function(hidden, weight, target_ids)
            if len(mine) == tokens:
                (gradient,) = torch.autograd.grad(mine.float() @ d, hidden)
                row["gradient"] = relative(gradient, want_gradient)
                off = (mine - want).abs()
            else:  # one scalar: the mean
                off = (mine - want.mean()).abs()
            row |= {"largest": off.max().item(), "mean": off.mean().item(), "scalar": len(mine) != tokens}
        except Exception as error:
            row["failed"] = said(error)
        run.recover()
        run.add("accuracy", row)


# -- times ---------------------------------------------------------------------------------------------------


def rates(run: Run) -> dict[str, float]:
    """The ceilings: bf16 products to bf16 and to float32, a copy."""
    if "rates" not in run.found:
        m, k, n = (16384, 4096, 16384) if run.gpu else (64, 64, 64)
        a = torch.randn(m, k, device=run.device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=run.device, dtype=torch.bfloat16)
        narrow, wide, other = (
            torch.empty(m, n, device=run.device, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float32, torch.float32)
        )
        run.found["rates"] = {
            "bf16 TFLOP/s": 2e-12 * m * k * n / run.seconds(lambda: torch.mm(a, b.T, out=narrow), 10),
            "bf16 to fp32 TFLOP/s": 2e-12 * m * k * n / run.seconds(lambda: logprob._product(a, b.T, wide), 10),
            "copy TB/s, read + write": 2e-12 * wide.nbytes / run.seconds(lambda: other.copy_(wide), 10),
        }
        run.flush()
    return run.found["rates"]


def ours(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
        return linear_logprob(hidden, weight, target_ids, **options).logp

    return call


def case(run: Run, name: str, function: Callable[..., Tensor], given: Problem, **about: Any) -> None:
    """Forward, and forward with backward, of one implementation; products: how many the floor has."""
    if run.left() < 0:
        return
    hidden, weight, target_ids, d = given
    products, kept = about.pop("products"), about.pop("kept", 1.0)
    weight = weight.detach() if about.get("frozen") else weight
    if kept < 1:
        d = torch.where(torch.arange(len(d), device=d.device) % 100 < 100 * kept, d, 0)

    def forward() -> None:
        function(hidden, weight, target_ids)

    def both() -> None:
        hidden.grad = weight.grad = None
        logp = function(hidden, weight, target_ids)
        logp.backward(d[: len(logp)].to(logp.dtype))

    row = {"name": name, "N": len(hidden), "H": hidden.shape[1], "V": len(weight), "dtype": str(hidden.dtype)[6:]}
    row |= {"kept": kept, **about}
    try:
        with use("triton"):
            both()
            row["peak_gib"] = run.peak_gib(both)
            row["forward_ms"] = 1e3 * run.seconds(forward, 5)
            row["total_ms"] = 1e3 * run.seconds(both, 5)
        row["backward_ms"] = row["total_ms"] - row["forward_ms"]
        product = 2e-9 * len(hidden) * hidden.shape[1] * len(weight) / rates(run)["bf16 TFLOP/s"]
        row |= {"floor_ms": products * product, "four_products_ms": 4 * product}
        row["total_to_floor"] = row["total_ms"] / row["floor_ms"]
    except Exception as error:  # absent, or out of memory: a result, not an end
        row["failed"] = said(error)
        if name.startswith("linear_logprob"):
            run.wrong(f"{name}: {row['failed']}")
    hidden.grad = weight.grad = None
    run.recover()
    run.add("cases", row)


def three(run: Run, given: Problem) -> None:
    """What the targets speak of."""
    case(run, "linear_logprob", ours(chunk=chunk(run)), given, products=4)
    case(run, "linear_logprob", ours(chunk=chunk(run)), given, products=1 + 3 * KEPT, kept=KEPT)
    case(run, "linear_logprob", ours(chunk=chunk(run)), given, products=2, frozen=True)


def main_shape(run: Run) -> tuple[int, int, int, torch.dtype]:
    return (16384, 4096, 151936, torch.bfloat16) if run.gpu else (8, 16, 200, torch.bfloat16)


def main_times(run: Run) -> None:
    given = problem(run, *main_shape(run))
    three(run, given)
    for name, function in theirs.LOGPROBS.items():
        case(run, name, function, given, products=3 if name == "naive" else 4)
    for name, function in theirs.LOGPROBS.items():
        case(run, name, function, given, products=2, frozen=True)
    for kept in (0.1, 0.7):
        case(run, "linear_logprob", ours(chunk=chunk(run)), given, products=1 + 3 * kept, kept=kept)
    for name, options in {"recomputing": {"frozen_head": False}}.items():
        case(run, f"linear_logprob, {name}", ours(chunk=chunk(run), **options), given, products=3, frozen=True)
    for name, options in {"batch-invariant": {"batch_invariant": True}, "entropy": {"entropy": True}}.items():
        case(run, f"linear_logprob, {name}", ours(chunk=chunk(run), **options), given, products=4)


def losses(run: Run) -> None:
    """One step of a head and a loss: the log-probs' contestants with each one's own loss around them."""
    tokens, size, vocabulary, dtype = main_shape(run)
    hidden, weight, ids, _ = problem(run, tokens, size, vocabulary, dtype)
    rows = 8 if run.gpu else 2
    hidden = hidden.detach().view(rows, -1, size).requires_grad_()
    ids = ids.view(rows, -1)
    with torch.no_grad(), use("triton"):
        logp = linear_logprob(hidden, weight, ids, chunk=chunk(run)).logp
    draw = torch.Generator(run.device).manual_seed(1)
    noise = 0.2 * torch.randn(logp.shape, generator=draw, device=run.device)
    advantages = torch.randn(rows, generator=draw, device=run.device)
    given = offcorr.Batch(logp=logp, old_logp=logp + noise, advantages=advantages, mask=torch.ones_like(ids).bool())

    def mine(name: str) -> Tensor:
        found = linear_logprob(hidden, weight, ids, chunk=chunk(run)).logp
        return offcorr.get(name)(dataclasses.replace(given, logp=found)).loss

    for name in ("dapo", "gspo"):
        setting = theirs.SETTINGS[name]
        contestants: dict[str, Callable[[], Tensor]] = {
            "offcorr": lambda name=name: mine(name),
            "TRL": lambda setting=setting: theirs.trl_loss_from_hidden(setting, hidden, weight, ids, given),
            "Liger, chunked": lambda setting=setting: theirs.liger_loss_from_hidden(
                setting, hidden, weight, ids, given, compiled=run.gpu
            ),
        }
        first: tuple[float, Tensor] | None = None
        for who, contestant in contestants.items():
            if run.left() < 0:
                return

            def both(contestant: Callable[[], Tensor] = contestant) -> float:
                hidden.grad = weight.grad = None
                loss = contestant()
                loss.backward()
                return loss.detach()

            row: Row = {"who": who, "method": name, "shape": [*ids.shape, size, vocabulary]}
            try:
                with use("triton"):
                    loss = both()
                    now = loss.item(), hidden.grad.double()
                    first = first or now
                    row["loss_differs"] = abs(now[0] - first[0]) / max(abs(first[0]), 1e-30)
                    row["gradient_differs"] = relative(now[1], first[1])
                    row["peak_gib"] = run.peak_gib(both)
                    row["wall"] = run.seconds(both, 5)
            except Exception as error:
                row["failed"] = said(error)
            hidden.grad = weight.grad = None
            run.recover()
            run.add("losses", row)


def tiles(run: Run) -> None:
    """Which tile is best: tokens by vocabulary entries."""
    usual = logprob._tiles_for
    sizes = ((2048, 4096, 8192), (8192, 16384, 32768)) if run.gpu else ((4,), (64, 128))
    hidden, weight, target_ids, d = problem(run, *main_shape(run))
    for rows, width in itertools.product(*sizes):
        if run.left() < 0:
            return
        logprob._tiles_for = lambda *given, width=width: usual(*given) | {"columns": width}

        def both(rows: int = rows) -> None:
            hidden.grad = weight.grad = None
            linear_logprob(hidden, weight, target_ids, chunk=rows).logp.backward(d)

        try:
            with use("triton"):
                seconds, why = run.attempt(lambda both=both: run.seconds(both, 3))
        finally:
            logprob._tiles_for = usual
        row: Row = {"chunk": rows, "columns": width, "total_ms": 1e3 * seconds if seconds else None}
        run.add("tiles", row | ({"failed": why} if why else {}))


def shapes(run: Run) -> None:
    sizes = (
        [
            (16384, 4096, 151936, torch.float16),
            (4096, 4096, 151936, torch.bfloat16),
            (16384, 2048, 32000, torch.bfloat16),
            (65536, 1024, 151936, torch.bfloat16),
        ]
        if run.gpu
        else [(5, 16, 100, torch.float16)]
    )
    for size in sizes:
        if run.left() < 0:
            return
        given = problem(run, *size)
        three(run, given)
        for name, function in theirs.LOGPROBS.items():
            case(run, name, function, given, products=3 if name == "naive" else 4)
        del given
        run.recover()


# -- the report ----------------------------------------------------------------------------------------------


def judge(run: Run) -> None:
    """The figures of this kernel's targets."""
    found = run.found
    errors = {row["name"]: row for row in found.get("accuracy", []) if "failed" not in row}
    if {"linear_logprob", "naive"} <= errors.keys():
        gain = errors["naive"]["largest"] / errors["linear_logprob"]["largest"]
        target(found, "largest error with logits rounded to bf16 / ours", gain, ">= 5", gain >= 5)
        if gain < 5:
            run.wrong(f"only {gain:.2f} times more accurate than bf16 logits")
    size = dict(zip("NHV", main_shape(run)[:3], strict=True))
    rows = [r for r in found.get("cases", []) if "total_ms" in r and all(r[x] == n for x, n in size.items())]
    rows = [row for row in rows if row["dtype"] == "bfloat16"] if run.gpu else []

    def one(name: str, kept: float = 1.0, frozen: bool = False) -> Row | None:
        of = [r for r in rows if (r["name"], r["kept"], r.get("frozen", False)) == (name, kept, frozen)]
        return of[0] if of else None

    whole, part, frozen = one("linear_logprob"), one("linear_logprob", KEPT), one("linear_logprob", frozen=True)
    if whole:
        ratio = whole["total_to_floor"]
        target(found, "all rows kept, total / floor of 4 products", ratio, "<= 1.25", ratio <= 1.25)
        for name in theirs.LOGPROBS:
            if other := one(name):
                gain = other["total_ms"] / whole["total_ms"]
                target(found, f"{name}'s time / ours", gain, "> 1", gain > 1)
    if whole and part:
        ratio = part["backward_ms"] / whole["backward_ms"]
        target(found, f"backward with {KEPT:.0%} kept / whole", ratio, "<= 0.5", ratio <= 0.5)
    if frozen:
        ratio = frozen["total_to_floor"]
        target(found, "frozen head, total / floor of 2 products", ratio, "<= 1.3", ratio <= 1.3)
    run.flush()


def table(found: dict[str, Any]) -> str:
    lines = ["| case | N, H, V | dtype | kept | forward ms | total ms | floor ms | total / floor | peak GiB |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in found.get("cases", []):
        name = row["name"] + (", frozen head" if row.get("frozen") else "")
        place = f"| {name} | {row['N']}, {row['H']}, {row['V']} | {row['dtype']} | {row['kept']} |"
        if "failed" in row:
            lines.append(f"{place} {row['failed'][:60]} |||||")
            continue
        cells = [f"{row[key]:.2f}" for key in ("forward_ms", "total_ms", "floor_ms", "total_to_floor")]
        cells.append(f"{row['peak_gib']:.2f}" if row["peak_gib"] is not None else "")
        lines.append(f"{place} {' | '.join(cells)} |")
    for row in found.get("losses", []):
        wall = f"{1e3 * row['wall']:.1f} ms" if "wall" in row else row["failed"]
        off = f", gradient {row['gradient_differs']:.1e} off ours" if "gradient_differs" in row else ""
        lines.append(f"{row['method']} from hidden states, {row['who']}: {wall}{off}")
    return "\n".join([*lines, targets_table(found)])


CHECKS = (
    check_against_float64,
    check_masks_and_targets,
    check_support,
    check_batch_invariance,
    check_no_synchronisation,
    check_past_int32,
)
SECTIONS: dict[str, Callable[[Run], None]] = {
    "checks": checks,
    "accuracy": accuracy,
    "main": main_times,
    "losses": losses,
    "tiles": tiles,
    "shapes": shapes,
}


def main() -> None:
    options: argparse.Namespace = arguments(__doc__, "gpu_logprob", list(SECTIONS)).parse_args()
    run = Run(options)
    run.sections(SECTIONS)
    judge(run)
    run.finish(table(run.found))


if __name__ == "__main__":
    main()
