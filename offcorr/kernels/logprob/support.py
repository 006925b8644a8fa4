"""The support of truncated sampling: which tokens top-p, top-k or min-p kept at each position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 64
"""Rows of a mask start at multiples of this many bytes."""


class Support(NamedTuple):
    """The kept tokens of N positions, as token ids or as a mask of the vocabulary."""

    kept: Tensor
    """Token ids [N, K] (numbers outside the vocabulary are padding), or bool [N, V]."""
    whole: Tensor | None
    """bool [N]: positions without an id, where nothing was cut off; None for a mask."""

    def contains(self, target: Tensor) -> Tensor:
        """Whether each target [N] is kept."""
        if self.whole is not None:
            return self.whole | ((self.kept == target[:, None]) & (target >= 0)[:, None]).any(1)
        inside = (target >= 0) & (target < self.kept.shape[1])
        return inside & self.kept.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]

    def tile(self, positions: slice | Tensor, rows: int, first: int, columns: int) -> Tensor:
        """Mask [rows, columns] of the vocabulary entries from ``first`` on; rows beyond ``positions`` keep nothing."""
        kept = (self.kept[:, first : first + columns] if self.whole is None else self.kept)[positions]
        # One more column takes the ids of other tiles.
        mask = kept.new_zeros(rows, -(-(columns + 1) // ALIGNED) * ALIGNED, dtype=torch.bool)
        if self.whole is None:
            mask[: len(kept), :columns] = kept
        else:
            mask[: len(kept)] = self.whole[positions][:, None]
            column = kept.long() - first
            inside = (column >= 0) & (column < columns)
            mask[: len(kept)].scatter_(1, torch.where(inside, column, columns), True)
        return mask[:, :columns]


def support_of(
    given: Tensor | tuple[Tensor, Tensor], shape: torch.Size, device: torch.device, end: int, split: bool = False
) -> Support:
    """The checked argument ``support`` for targets of ``shape``.

    ``end`` is the end of the head's vocabulary, beyond which a mask goes on only if the head is ``split`` over ranks.

    Raises:
        ValueError: wrong shape or device, or offsets that do not divide the ids.
        TypeError: neither bool nor integers.
    """
    if isinstance(given, tuple):
        return _ragged(*given, shape, device)
    _check(given, "support", device)
    if given.shape[:-1] != shape or given.ndim != len(shape) + 1:
        raise ValueError(
            f"support has shape {tuple(given.shape)}, expected {tuple(shape)} and one dimension more, of token ids or "
            "bool, to go with target"
        )
    if given.dtype != torch.bool:
        return _of_ids(given.reshape(shape.numel(), given.shape[-1]))
    if given.shape[-1] < end or (given.shape[-1] > end and not split):
        wanted = f"{'at least ' if split else ''}{end}"
        raise ValueError(
            f"support has {given.shape[-1]} columns, expected {wanted}: one for each token of the vocabulary"
        )
    return Support(given.reshape(shape.numel(), given.shape[-1]), None)


def _ragged(ids: Tensor, offsets: Tensor, shape: torch.Size, device: torch.device) -> Support:
    """The pair (token ids, offsets) as rows of equal length."""
    _check(ids, "support[0] (token ids)", device, masks=False)
    _check(offsets, "support[1] (offsets)", offsets.device, masks=False)
    count = shape.numel()
    if ids.ndim != 1 or offsets.shape != (count + 1,):
        raise ValueError(
            f"support has token ids {tuple(ids.shape)} and offsets {tuple(offsets.shape)}, expected shapes (M,) and "
            f"({count + 1},) to go with {count} targets"
        )
    offsets = offsets.cpu()  # from a GPU, a host synchronisation
    lengths = offsets.diff()
    if offsets[0] != 0 or offsets[-1] != len(ids) or (lengths < 0).any():
        raise ValueError(
            f"support's offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {len(ids)}, the number "
            "of token ids, without a step back"
        )
    width = int(lengths.max()) if count else 0
    filled = torch.arange(width, device=device) < lengths.to(device)[:, None]
    return _of_ids(ids.new_full((count, width), -1).masked_scatter(filled, ids))


def _of_ids(ids: Tensor) -> Support:
    return Support(ids, (ids < 0).all(1))


def _check(x: Tensor, name: str, device: torch.device, masks: bool = True) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected {device}, where target is")
    if x.dtype.is_floating_point or x.dtype.is_complex or (x.dtype == torch.bool and not masks):
        raise TypeError(f"{name} is {x.dtype}, expected integers{' or bool' if masks else ''}")
