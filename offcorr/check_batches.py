"""The batches that the checks of ``offcorr.testing`` run on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import Batch

PER_TOKEN = ("logp", "old_logp", "rollout_logp", "entropy", "mask")
PER_SEQUENCE = ("advantages", "rewards", "group_ids")
"""The fields of ``example``."""


def example(
    seed: int = 0, sequences: int = 7, width: int = 12, spread: float = 0.3, dtype: torch.dtype = torch.float64
) -> Batch:
    """A batch with everything in it: tool spans in the middle, an empty sequence, unscored tokens.

    Args:
        spread: standard deviation of the log-ratios (nats).
        dtype: of the log-probs and other numbers; float32 for ``offcorr.backend``: the kernel takes no float64.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    logp = -normal(sequences, width).abs() - 0.05
    mask = torch.rand((sequences, width), generator=draw) > 0.3
    mask[:, 0] = True
    mask[1] = False
    old_logp = (logp + spread * normal(sequences, width)).clamp(max=-0.01)
    rollout_logp = (old_logp + spread * normal(sequences, width)).clamp(max=-0.01)
    rollout_logp[2, ::5] = math.nan
    batch = Batch(
        logp=logp,
        old_logp=old_logp,
        rollout_logp=rollout_logp,
        advantages=normal(sequences),
        mask=mask,
        rewards=(2 * normal(sequences)).round() / 2,  # of both signs, and 0
        group_ids=torch.arange(sequences) % 3,
        entropy=normal(sequences, width).abs(),
    )
    return batch if dtype == torch.float64 else moved(batch, dtype, "cpu")


def one_sided(batch: Batch) -> Batch:
    """The batch with, by turns, a row as it is, one of log-ratios above 0 and one below, both without a masked token.

    In such a row a masked token, whose log-ratio counts as 0, would be the smallest or the largest of all.
    """
    turn = torch.arange(batch.sequences)[:, None] % 3
    sign = torch.where(turn == 1, 1.0, -1.0)
    logp, old_logp, rollout_logp = batch.logp, batch.old_logp, batch.rollout_logp
    assert old_logp is not None and rollout_logp is not None
    older = (logp - sign * (logp - old_logp).abs()).clamp(max=-0.01)
    engine = (older - sign * (old_logp - rollout_logp).nan_to_num(0.1).abs()).clamp(max=-0.01)
    return dataclasses.replace(
        batch,
        old_logp=torch.where(turn == 0, old_logp, older),
        rollout_logp=torch.where(turn == 0, rollout_logp, engine),
        mask=batch.mask | (turn > 0),
    )


class Layouts(NamedTuple):
    """The same sequences in both layouts."""

    padded: Batch
    packed: Batch
    inside: Tensor  # [B, T] bool: the positions of the padded batch that the packed one holds


def layouts(batch: Batch, lengths: Sequence[int]) -> Layouts:
    """The first ``lengths`` [B] positions of the rows of an ``example``, padded and packed.

    >>> padded, packed, _ = layouts(example(sequences=3, width=5), lengths=[5, 0, 2])
    >>> padded.logp.shape, packed.logp.shape, packed.cu_seqlens.tolist()
    (torch.Size([3, 5]), torch.Size([7]), [0, 5, 5, 7])
    """
    ends = torch.tensor([0, *lengths])
    inside = torch.arange(batch.logp.shape[1]) < ends[1:, None]
    per_token = {name: getattr(batch, name)[inside] for name in PER_TOKEN}
    per_sequence = {name: getattr(batch, name) for name in PER_SEQUENCE}
    packed = Batch.packed(cu_seqlens=ends.cumsum(0), **per_token, **per_sequence)
    return Layouts(dataclasses.replace(batch, mask=batch.mask & inside), packed, inside)


def moved(batch: Batch, dtype: torch.dtype, device: torch.device | str) -> Batch:
    """The batch on a device, with its floating-point fields in this dtype."""

    def to(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return Batch(**{field.name: to(getattr(batch, field.name)) for field in dataclasses.fields(batch)})
