"""Runs linear_logprob with its head split over the ranks, in every case; each rank writes what it got.

torchrun --nproc-per-node 2 parallel_worker.py FOLDER

``run`` with no group is the same in one process, with the whole head.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from offcorr.kernels.dispatch import use
from offcorr.kernels.logprob import linear_logprob, out_of_vocabulary

TOKENS, SIZE, VOCABULARY = 23, 6, 150
SPLITS = {"uneven": 101, "one token": 1, "even": 75}
"""The first token of the second rank's slice."""

CASES = {
    " ".join([dtype, choice, split, "frozen" if frozen else "trainable", support]): {
        "dtype": dtype,
        "split": split,
        "frozen": frozen,
        "choice": choice,
        "support": support,
    }
    for dtype, choice, splits, supports in (
        ("float64", "reference", SPLITS, ("all", "ids", "ragged", "mask")),
        ("float32", "reference", ("uneven",), ("all", "ids")),
        ("float32", "triton", ("uneven",), ("all", "ids")),
        ("bfloat16", "triton", ("uneven",), ("all", "ids")),
    )
    for split in splits
    for frozen in (False, True)
    for support in supports
}


def problem(dtype):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, SIZE, generator=draw, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, SIZE, generator=draw, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    target[:4] = torch.tensor([0, 149, 149, 4])
    kept = torch.rand(TOKENS, VOCABULARY, generator=draw) < 0.1
    kept[2, :110] = False  # only tokens of the second rank
    kept[3, 75:] = False  # none of the second rank's, except where the first has one token
    kept[torch.arange(TOKENS), target] = True
    kept[5] = True
    mask = torch.rand(TOKENS, generator=draw) < 0.8
    mask[7] = False
    target[7] = -100
    d = torch.randn(2, TOKENS, generator=draw, dtype=torch.float64)
    d[:, ::4] = 0
    return *(x.to(dtype) for x in (hidden, weight, bias)), target, mask, kept, d


def support_of(kept, form):
    if form in ("all", "mask"):
        return None if form == "all" else kept
    ids = [row.nonzero()[:, 0] for row in kept]
    if form == "ids":
        return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
    return torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0)


def run(case, group=None, rank=0):
    """Results and gradients, of the whole head or of a rank's slice of it."""
    hidden, weight, bias, target, mask, kept, d = problem(getattr(torch, case["dtype"]))
    first = SPLITS[case["split"]]
    part = slice(None) if group is None else (slice(0, first), slice(first, None))[rank]
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[part], bias[part])]
    options = {} if group is None else {"group": group, "vocabulary_start": part.start}
    found, out = [], {}
    with use(case["choice"]):
        for with_entropy in (False, True):
            result = linear_logprob(
                *(leaves[0], leaves[1], target),
                bias=leaves[2],
                mask=mask,
                support=support_of(kept, case["support"]),
                temperature=0.9,
                soft_cap=4.0,
                entropy=True,
                sum_sq_probs=True,
                frozen_head=case["frozen"],
                chunk=8,
                **options,
            )
            loss = (result.logp * d[0]).sum() + ((result.entropy * d[1]).sum() if with_entropy else 0)
            found.append(torch.autograd.grad(loss, leaves[:1] if case["frozen"] else leaves))
    out |= {name: value.detach() for name, value in result._asdict().items()}
    for name, gradients in zip(("logp", "entropy"), found, strict=True):
        out |= {f"{name} to {leaf}": g for leaf, g in zip(("hidden", "weight", "bias"), gradients, strict=False)}
    return out


def collectives(group, rank, frozen):
    """Collectives of a forward and of a backward pass, each with its number of elements."""
    seen: list[Counter[str]] = []

    def counted(name, function):
        def call(*args, **kwargs):
            tensor = args[1] if name == "all_gather" else args[0]
            seen[-1][f"{name} {tensor.numel()} {tensor.dtype}"] += 1
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}
    hidden, weight, _, target, *_ = problem(torch.float32)
    first = SPLITS["uneven"]
    part = (slice(0, first), slice(first, None))[rank]
    for name, function in originals.items():
        setattr(dist, name, counted(name, function))
    try:
        seen.append(Counter())
        leaf = hidden.requires_grad_()
        result = linear_logprob(
            leaf, weight[part], target.clamp(0), group=group, vocabulary_start=part.start, frozen_head=frozen
        )
        seen.append(Counter())
        result.logp.sum().backward()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return [dict(count) for count in seen]


def unowned(group, rank):
    """A target that no rank has, and one that two have: results, and the number that is counted."""
    hidden, weight, *_ = problem(torch.float32)
    weight = weight[:90] if rank == 0 else weight[80:]
    target = torch.zeros(TOKENS, dtype=torch.long)
    target[[2, 5]] = torch.tensor([VOCABULARY, 85])
    out_of_vocabulary(reset=True)
    found = linear_logprob(hidden, weight, target, group=group, vocabulary_start=80 * rank, entropy=True)
    return {"nan": found.logp.isnan(), "nan entropy": found.entropy.isnan(), "counted": out_of_vocabulary(reset=True)}


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    found = {name: run(case, group, rank) for name, case in CASES.items()}
    found["collectives"] = [collectives(group, rank, frozen) for frozen in (False, True)]
    found["unowned"] = unowned(group, rank)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run when the interpreter exits
