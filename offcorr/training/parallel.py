"""Sequences that are split over ranks, and gathering over a process group (torch.distributed)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offcorr.batch import Batch
from offcorr.metrics import Gather

__all__ = ["gather_over", "gather_sequences"]


def gather_over(group: dist.ProcessGroup | None = None) -> Gather:
    """The ``gather`` of ``Step`` over the ranks of a process group, one collective per call.

    With context, tensor or pipeline parallelism pass the data-parallel group, in which every sequence is seen once: a
    gather over all ranks would count it once per rank that shares it.

    Args:
        group: None: every rank.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> gather_over()(torch.ones(2))
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """

    def gather(vector: Tensor) -> Tensor:
        parts = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, vector.contiguous(), group=group)
        return torch.stack(parts)

    return gather


def gather_sequences(
    batch: Batch,
    group: dist.ProcessGroup | None = None,
    *,
    positions: Tensor | None = None,
    widths: Sequence[int] | None = None,
) -> Batch:
    """The whole sequences of a batch that is split along them (context parallelism), the same on every rank.

    Ratios, weights and rejections over a prefix, a turn or a sequence need whole rows.  Every rank computes the
    correction of the batch that this returns, and so has the loss and the metrics of the whole; ``backward`` gives each
    rank the gradient of its own ``logp``, a slice of ``out.coefficient``.  Anchors that run a module come before
    (``Step.place``).  One collective, and one more without ``widths``; none in the backward pass.

    Fields with one number per sequence (``advantages`` [B], ``rewards``, ``group_ids``) have to be the same on every
    rank of the group.

    Args:
        batch: padded: this rank's positions of every sequence, [B, t]; t may differ between ranks.
        group: the context-parallel ranks; None: every rank.
        positions: [t] int, the place of each of this rank's positions in the whole row, for layouts such as zig-zag and
            striped; every place from 0 on belongs to one rank.  None: contiguous slices in the order of the ranks.
        widths: t of every rank, where it is known; without it one more collective finds it, which is a host
            synchronisation.

    Raises:
        ValueError: the batch is packed, ``positions`` or ``widths`` do not fit it, or (without ``widths``) the ranks
            have different sequences or different fields.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    >>> striped = Batch(logp=logp, advantages=torch.ones(1), mask=torch.ones(1, 3).bool())
    >>> whole = gather_sequences(striped, positions=torch.tensor([2, 0, 1]))
    >>> whole.logp.tolist()
    [[-2.0, -3.0, -1.0]]
    >>> whole.logp[0, 0].backward()
    >>> logp.grad.tolist()
    [[0.0, 1.0, 0.0]]
    >>> dist.destroy_process_group()
    """
    if batch.cu_seqlens is not None:
        raise ValueError("cu_seqlens is given, expected a padded batch: pass batch.padded()")
    rows, width = batch.logp.shape
    if positions is not None and (positions.shape != (width,) or positions.is_floating_point()):
        raise ValueError(
            f"positions is {positions.dtype} of shape {tuple(positions.shape)}, expected integers of shape ({width},) "
            f"to go with logp {tuple(batch.logp.shape)}"
        )
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    local: dict[str, Tensor] = {n: v.detach() for n, v in fields.items() if isinstance(v, Tensor) and v.ndim == 2}
    if positions is not None:
        local["positions"] = positions.long()[None]
    if widths is None:
        widths = _widths(batch, local, group)
    rank = dist.get_rank(group)
    if len(widths) != dist.get_world_size(group) or widths[rank] != width:
        raise ValueError(f"widths is {list(widths)}, expected one per rank, with {width} for this one (rank {rank})")

    whole: dict[str, Any] = {n: torch.cat(parts, 1) for n, parts in _all_gathered(local, widths, group).items()}
    place = whole.pop("positions", None)
    if place is None:
        start = list(accumulate(widths, initial=0))[rank]
        own = torch.arange(start, start + width, device=batch.logp.device)
    else:
        source = place[0].argsort()
        if not place.is_cuda and not torch.equal(place[0][source], torch.arange(sum(widths))):
            raise ValueError(f"positions of all ranks are {place[0].tolist()}, expected each of 0 to {sum(widths) - 1}")
        whole = {name: value[:, source] for name, value in whole.items()}
        own = local["positions"][0]
    whole["logp"] = whole["logp"].index_copy(1, own, batch.logp)  # the same values, with this rank's graph
    return dataclasses.replace(batch, **whole)


def _widths(batch: Batch, local: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[int]:
    """The width of every rank's slice; one collective."""
    known = [*batch.logp.shape, sum(value.element_size() for value in local.values()), len(local)]
    ranks = gather_over(group)(torch.tensor(known, device=batch.logp.device)).tolist()
    for other, (rows, _, size, fields) in enumerate(ranks):
        if rows != known[0]:
            raise ValueError(
                f"logp has {known[0]} sequences here and {rows} on rank {other} of the group, expected the same ones"
            )
        if [size, fields] != known[2:]:
            raise ValueError(
                f"{', '.join(local)} are given here, {known[2]} bytes per position, and on rank {other} of the group "
                f"{fields} fields of {size} bytes: expected the same fields and dtypes"
            )
    return [width for _, width, _, _ in ranks]


def _all_gathered(
    local: dict[str, Tensor], widths: Sequence[int], group: dist.ProcessGroup | None
) -> dict[str, list[Tensor]]:
    """Every rank's slice of each field.  All fields travel as bytes in one collective, so that no dtype is changed."""
    packed = torch.cat([value.reshape(-1).view(torch.uint8) for value in local.values()])
    per_position = sum(len(value) * value.element_size() for value in local.values())
    padded = torch.nn.functional.pad(packed, (0, max(widths) * per_position - len(packed)))
    gathered: dict[str, list[Tensor]] = {name: [] for name in local}
    for width, of_rank in zip(widths, gather_over(group)(padded), strict=True):
        sizes = [len(value) * width * value.element_size() for value in local.values()]
        parts = of_rank[: sum(sizes)].split(sizes)
        for (name, value), part in zip(local.items(), parts, strict=True):
            gathered[name].append(part.clone().view(value.dtype).view(len(value), width))
    return gathered
