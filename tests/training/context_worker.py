"""Corrections on sequences that are split over ranks; each rank writes what it computed.

``run("methods", 2, folder)``: every method, in three layouts.  ``run("step", 4, folder)``: two data-parallel ranks of
two context-parallel ones.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import offcorr
from offcorr.methods.registry import illustration
from offcorr.training import ESSLearningRate, Step, gather_over, gather_sequences

WIDTH = 12
LAYOUTS = {
    "uneven": ([*range(7)], [*range(7, WIDTH)]),
    "zig-zag": ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]),
    "one rank has nothing": ([*range(WIDTH)], []),
}
"""The positions of both ranks."""

MICRO_BATCHES = 2


def example(seed=0):
    """A batch with every optional field, and with fields of tokens where there may be one."""
    batch = offcorr.testing.example(seed, width=WIDTH)
    draw = torch.Generator().manual_seed(seed)
    shape = batch.logp.shape
    return dataclasses.replace(
        batch,
        advantages=torch.randn(shape, generator=draw, dtype=torch.float64),
        weight=torch.rand(shape, generator=draw),
        entropy=torch.rand(shape, generator=draw).half(),
        turn_ids=torch.arange(WIDTH).expand(shape) // 4,
        rollout_version=torch.randint(5, shape, generator=draw),
        trainer_version=5,
    )


def slice_of(batch, places):
    """One rank's slice, whose ``logp`` is a leaf."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    split = {n: v[:, places].clone() for n, v in fields.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    split["logp"].requires_grad_()
    return dataclasses.replace(batch, **split)


def correction(name):
    return illustration(name).with_max_length(WIDTH)


def result(loss_fn, batch, leaf):
    """(loss, gradient, metrics)"""
    out = loss_fn(batch)
    out.loss.backward()
    gradient, leaf.grad = leaf.grad, None
    return out.loss.detach(), gradient, out.metrics.compute()


def methods(rank):
    found, collectives = {}, {}
    all_gather = dist.all_gather
    calls = []
    dist.all_gather = lambda *args, **kwargs: (calls.append(1), all_gather(*args, **kwargs))[1]
    for layout, places in LAYOUTS.items():
        batch = offcorr.testing.example(width=WIDTH) if layout == "uneven" else example()
        local = slice_of(batch, places[rank])
        options = {}
        if layout == "zig-zag":
            options = {"positions": torch.tensor(places[rank]), "widths": [len(one) for one in places]}
        for name in offcorr.available():
            whole = gather_sequences(local, **options)
            found[layout, name] = result(correction(name), whole, local.logp)
        collectives[layout] = len(calls) / len(offcorr.available())
        calls.clear()
    return {"found": found, "collectives": collectives, "refused": refused(rank)}


def refused(rank):
    """What is said where the ranks do not fit together."""
    batch = slice_of(offcorr.testing.example(width=WIDTH), LAYOUTS["uneven"][rank])
    wrong = {
        "sequences": (batch.rows(slice(0, 5 + rank)), {}),
        "fields": (dataclasses.replace(batch, rollout_logp=None) if rank else batch, {}),
        "widths": (batch, {"widths": [6, 6]}),
        "positions": (batch, {"positions": torch.arange(batch.logp.shape[1])}),
        "dtype": (batch, {"positions": torch.zeros(batch.logp.shape[1])}),
        "packed": (
            offcorr.Batch.packed(
                logp=torch.zeros(2), advantages=torch.ones(1), mask=torch.ones(2), cu_seqlens=torch.tensor([0, 2])
            ),
            {},
        ),
    }
    said = {}
    for name, (given, options) in wrong.items():
        try:
            gather_sequences(given, **options)
        except ValueError as error:
            said[name] = str(error)
    return said


def share(seed, rank, world):
    """The micro-batches of a data-parallel rank, as rows of the whole batch."""
    rows = torch.arange(7).tensor_split(world * MICRO_BATCHES)
    return [example(seed).rows(index) for index in rows[rank::world]]


def trained(name, micro_batches, places, context, data, ranks):
    """One optimizer step: (losses, gradients, metrics) of ``Step``.

    ranks: those over which a framework would average the gradients.
    """
    step = Step(correction(name), ess_lr=ESSLearningRate(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])))
    if data is not None:
        step = Step(correction(name), ess_lr=step.ess_lr, gather=gather_over(data))
    leaves = [slice_of(batch, places) for batch in micro_batches]

    def whole(batch):
        return gather_sequences(batch, context, positions=torch.tensor(places)) if context else batch

    counts = torch.tensor([sum(b.mask.sum() for b in micro_batches), sum(len(b.mask) for b in micro_batches)])
    tokens, sequences = step.total(counts)
    window = (whole(step.place(leaf)) for leaf in leaves)
    step.begin(window, tokens=tokens, sequences=sequences, averaged_over=ranks)
    losses = []
    for i, leaf in enumerate(leaves):
        out = step.loss(whole(step.place(leaf)), last=i == len(leaves) - 1)
        out.loss.backward()
        losses.append(out.loss.item())
    step.end(1)
    return losses, [leaf.logp.grad for leaf in leaves], step.metrics()


def steps(rank):
    pairs = {"context": [[0, 1], [2, 3]], "data": [[0, 2], [1, 3]]}
    groups = {}
    for kind, members in pairs.items():
        made = [dist.new_group(pair) for pair in members]  # every rank takes part in making every group
        groups[kind] = next(group for group, pair in zip(made, members, strict=True) if rank in pair)
    places = LAYOUTS["zig-zag"][rank % 2]
    return {
        name: trained(name, share(0, rank // 2, 2), places, groups["context"], groups["data"], ranks=4)
        for name in offcorr.available()
    }


def work(rank, task, ranks, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save({"methods": methods, "step": steps}[task](rank), Path(folder, f"{rank}.pt"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run when the interpreter exits


def run(task, ranks, folder):
    """Forks the ranks from a process that has made no thread yet."""
    processes.start_processes(work, (task, ranks, folder), nprocs=ranks, start_method="fork")
