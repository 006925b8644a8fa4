"""``offcorr bench kernels``: time per token of the correction and of the LM head's log-probabilities on this machine.

All variants of a kind are timed in turn, in one process, and a ratio is the median over rounds of the ratio within a
round, since absolute times on a shared machine mean little.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.kernels import dispatch
from offcorr.kernels.logprob import linear_logprob
from offcorr.lab import compare, comparison, results
from offcorr.lab.text import HelpFormatter, Progress, examples

__all__ = ["Problem", "add_parser", "bare_ppo", "batch", "both_ways", "in_turn", "naive_head", "ratio", "run"]

METHODS = ("ppo", "dapo", "minpro", "gspo", "seq_tis")
"""Timed by default: a method for each kind of span."""
SHAPE = (64, 2048)
"""Sequences and tokens of the batch on which corrections are timed."""
KEPT = 0.4
"""Fraction of tokens with a gradient, in the variant of the head that is named after it."""

Work = Callable[[], Any]


# -- what is timed -------------------------------------------------------------------------------------------


def batch(
    device: torch.device | str, rows: int, width: int, dtype: torch.dtype = torch.float32, packed: bool = False
) -> Batch:
    """Three policies some distance apart, a fifth of the tokens masked, groups of eight.

    >>> batch("cpu", 8, 5).logp.shape
    torch.Size([8, 5])
    """
    draw = torch.Generator(device=device).manual_seed(rows + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    logp = -normal(rows, width).abs() - 1
    old_logp = logp + 0.1 * normal(rows, width)
    per_token: dict[str, Any] = {
        "logp": logp,
        "old_logp": old_logp,
        "rollout_logp": old_logp + 0.02 * normal(rows, width),
        "entropy": -logp,
    }
    per_token = {name: value.to(dtype) for name, value in per_token.items()}
    per_token["mask"] = torch.rand(rows, width, generator=draw, device=device) > 0.2
    rest: dict[str, Any] = {
        "advantages": normal(rows),
        "rewards": normal(rows).sign(),
        "group_ids": torch.arange(rows, device=device) // 8,
    }
    if not packed:
        return Batch(**per_token, **rest)
    ends = torch.arange(rows + 1, device=device) * width
    return Batch.packed(**{n: v.flatten() for n, v in per_token.items()}, **rest, cu_seqlens=ends)


def bare_ppo(given: Batch) -> Tensor:
    """PPO's token-mean loss and nothing else: no metric, no check."""
    assert given.old_logp is not None
    ratio, advantages = (given.logp - given.old_logp).exp(), given.advantages[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * given.mask).sum() / given.mask.sum()


def both_ways(loss: Callable[[Batch], Tensor], given: Batch) -> Work:
    """A call of loss and gradient on a new batch each time, since a batch keeps the view of it that stages use."""
    logp = given.logp.detach().clone().requires_grad_()

    def call() -> None:
        logp.grad = None
        loss(dataclasses.replace(given, logp=logp)).backward()

    return call


class Problem(NamedTuple):
    """Hidden states and the weight of the LM head, both with a gradient, the targets, and the gradient of logp."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    d: Tensor

    @classmethod
    def of(
        cls,
        device: torch.device | str,
        tokens: int,
        size: int,
        vocabulary: int,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
    ) -> Problem:
        """Of N tokens, hidden size H and vocabulary V; the logits have the standard deviation ``scale``."""
        draw = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=device)

        hidden = (scale * normal(tokens, size)).to(dtype).requires_grad_()
        weight = (normal(vocabulary, size) / size**0.5).to(dtype).requires_grad_()
        target = torch.randint(vocabulary, (tokens,), generator=draw, device=device)
        return cls(hidden, weight, target, normal(tokens))

    def some(self, kept: float) -> Tensor:
        """``d``, 0 but for a fraction of the tokens."""
        draw = torch.Generator(self.d.device).manual_seed(1)
        return torch.where(torch.rand(len(self.d), generator=draw, device=self.d.device) < kept, self.d, 0)


def naive_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of the targets with all logits in memory, in float32."""
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, target[..., None])[..., 0]


# -- timing --------------------------------------------------------------------------------------------------


def in_turn(works: Mapping[str, Work], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of every work in each round, the works in turn; a first round warms up.

    With one thread on a CPU they are CPU seconds of the process, which other load on the machine hardly changes.

    >>> {name: len(taken) for name, taken in in_turn({"nothing": lambda: None}, rounds=3).items()}
    {'nothing': 3}
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            spent = seconds(work, device)
            if number:
                taken[name].append(spent)
    return taken


def seconds(work: Work, device: str = "cpu") -> float:
    """Seconds of one call, the device waited for."""
    on_cpu = device == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    if not on_cpu:
        torch.cuda.synchronize()
    began = clock()
    work()
    if not on_cpu:
        torch.cuda.synchronize()
    return clock() - began


def ratio(taken: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round.

    >>> ratio([2.0, 9.0, 3.0], [1.0, 1.0, 3.0])
    2.0
    """
    return statistics.median(own / other for own, other in zip(taken, base, strict=True))


def _row(name: str, taken: Mapping[str, Sequence[float]], tokens: int) -> dict[str, Any]:
    """Nanoseconds per token of every variant, and its ratio to the first one."""
    base = next(iter(taken))
    return {
        "name": name,
        "nanoseconds_per_token": {one: 1e9 * statistics.median(spent) / tokens for one, spent in taken.items()},
        f"ratio to {base}": {one: ratio(spent, taken[base]) for one, spent in taken.items() if one != base},
    }


def correction(name: str, loss_fn: Correction, device: str, rounds: int) -> dict[str, Any]:
    """Loss and gradient of a correction beside a bare PPO loss; on a GPU by the reference and by the kernel."""
    given = batch(device, *SHAPE)
    loss_fn = loss_fn.with_max_length(SHAPE[1])

    def on(choice: dispatch.Choice) -> Work:
        work = both_ways(lambda fresh: loss_fn(fresh).loss, given)

        def call() -> None:
            with dispatch.use(choice):
                work()

        return call

    works = {"bare PPO loss": both_ways(bare_ppo, given), "reference": on("reference")}
    if device != "cpu":
        works["kernel"] = on("triton")
    taken = in_turn(works, rounds, device)
    row = _row(name, taken, given.logp.numel())
    if "kernel" in taken:
        row["ratio of kernel to reference"] = ratio(taken["kernel"], taken["reference"])
    return row


def head(size: Sequence[int], device: str, rounds: int) -> dict[str, Any]:
    """Log-probabilities and their gradient by ``linear_logprob`` beside the naive head."""
    tokens, hidden_size, vocabulary = size
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    problem = Problem.of(device, tokens, hidden_size, vocabulary, dtype)

    def step(logprob: Callable[[Tensor, Tensor, Tensor], Tensor], d: Tensor) -> Work:
        def call() -> None:
            problem.hidden.grad = problem.weight.grad = None
            logp = logprob(problem.hidden, problem.weight, problem.target)
            logp.backward(d.to(logp.dtype))

        return call

    def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_logprob(hidden, weight, target).logp

    works = {
        "naive": step(naive_head, problem.d),
        "linear_logprob": step(ours, problem.d),
        f"linear_logprob, {KEPT:.0%} of the tokens kept": step(ours, problem.some(KEPT)),
    }
    name = f"N={tokens}, H={hidden_size}, V={vocabulary}, {str(dtype)[6:]}"
    return _row(name, in_turn(works, rounds, device), tokens)


# -- the command ---------------------------------------------------------------------------------------------


def table(data: dict[str, Any]) -> str:
    """Times per token and ratios, one line per variant."""
    blocks = [(f"loss and gradient, {row['name']}", row) for row in data["correction"]]
    blocks.append((f"LM head, {data['head']['name']}", data["head"]))
    lines = []
    for title, row in blocks:
        spent = row["nanoseconds_per_token"]
        base = next(iter(spent))
        lines.append(f"{title:<50}{'ns/token':>12}{'/ ' + base:>18}")
        for variant, ratios in ({base: 1.0} | row[f"ratio to {base}"]).items():
            lines.append(f"  {variant:<48}{spent[variant]:>12.1f}{ratios:>18.2f}")
    about = f"{data['device']}, {data['threads']} thread(s), torch {data['versions']['torch']}, load {data['load']}."
    return "\n".join([*lines, "", *data.get("illustrated", []), about])


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``kernels``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "kernels",
        help="time per token of corrections, and of the LM head (linear_logprob), on this machine",
        description="Times loss and gradient of corrections against a bare PPO loss, and linear_logprob against a head "
        "that holds all logits; on a GPU also the kernel against the reference. About a minute.",
        formatter_class=HelpFormatter,
        epilog=examples(
            "offcorr bench kernels",
            "offcorr bench kernels minpro mine.py:my_method --head 4096 1024 32000 --output kernels.json",
        ),
    )
    add = parser.add_argument
    add("methods", nargs="*", metavar="METHOD", help=f"a method, or file.py:method (default: {' '.join(METHODS)})")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--head", nargs=3, type=int, metavar=("N", "H", "V"), help="size of the LM head: tokens, hidden, vocabulary")
    add("--rounds", type=int, default=7, metavar="N", help="rounds of which the median is taken (default %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="threads of torch on a CPU (default %(default)s)")
    add("--output", type=Path, metavar="FILE.json", help="write the numbers as JSON")
    add("--overwrite", action="store_true", help="replace a file that exists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    try:
        data = _measured(options)
    except ValueError as error:
        print(f"offcorr bench kernels: error: {error}", file=sys.stderr)
        return 2
    if options.output is not None:
        results.save(data, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    print(table(data))
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', but torch finds no GPU; leave it out, or give cpu")
    size = options.head or ((1024, 256, 32000) if device == "cpu" else (8192, 4096, 128000))
    positive = {"--rounds": options.rounds, "--threads": options.threads} | dict(zip("NHV", size, strict=True))
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name if name[0] == '-' else '--head ' + name} is {value}, expected at least 1")
    methods = compare.named_methods(options.methods or METHODS)
    results.check_overwrite(options.overwrite, output=options.output)
    if options.output is not None:
        results.free(options.output, options.overwrite)
    setting = {"device": device, "head": list(size), "rounds": options.rounds, "threads": options.threads}
    flags = [word for name, value in setting.items() for word in (f"--{name}", *str(value).strip("[]").split(", "))]
    command = shlex.join(["offcorr", "bench", "kernels", *options.methods, *flags])
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        plan = f"offcorr bench kernels: methods: {len(methods)}, on {device}; about a minute"
        with Progress(len(methods) + 1, plan) as progress:
            rows = []
            for done, (name, loss_fn) in enumerate(methods):
                progress(done, name)
                rows.append(correction(name, loss_fn, device, options.rounds))
            progress(len(methods), "linear_logprob")
            heads = head(size, device, options.rounds)
    finally:
        torch.set_num_threads(threads)
    return results.about(command, setting) | {
        "device": results.processor() if device == "cpu" else torch.cuda.get_device_name(),
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "correction": rows,
        "illustrated": comparison.illustrated(name for name, _ in methods),
        "head": heads,
    }
