"""``records_of``: the records of a ``Batch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offcorr.batch import ORIGINS, Batch
from offcorr.diagnose.record import Record

__all__ = ["records_of"]

SAME = 1e-3
"""Mean difference (nats) of two log-probs up to which, without versions, their weights are taken for the same."""

Ids = Tensor | Sequence[Sequence[int]]


def records_of(
    batch: Batch,
    *,
    prompt_ids: Ids,
    completion_ids: Ids,
    prompt_mask: Tensor | None = None,
    completion_mask: Tensor | None = None,
    places: Sequence[Sequence[int]] | None = None,
    step: int | None = None,
    where: str = "",
) -> list[Record]:
    """The records of a batch's sequences, on the host; a sequence without a token is left out.

    Of a batch on a GPU every field is copied to the host, which waits for the device.  The batch may be padded or
    packed.  Without ``old_logp`` the record's is ``logp``, as in the batch; without ``rollout_logp`` every token is
    unscored (NaN).  Versions are one number where all valid tokens of the sequence have the same.

    A batch's entropy is that of ``logp``'s distributions, and a record's that of ``old_logp``'s: a sequence keeps it
    where the two have the same weights, by the versions, or where there are none by ``logp`` and ``old_logp``.

    Args:
        batch: ``old_logp`` is the trainer's under the weights that it takes for the sampler's, not another anchor's.
        prompt_ids: [B, P] with ``prompt_mask``, or B lists.
        completion_ids: [B, T] with ``completion_mask``, or B lists.  A token that is not in the batch's mask, as of a
            tool's output, stands in the record with a mask of False.
        prompt_mask, completion_mask: of tensors, 0 on padding; None: nothing is padding.
        places: of each sequence the places in its completion that its tokens in ``batch`` have, where the batch leaves
            out some; log-probs at the others are NaN.  None: the first ones.
        step: the optimizer step at which the batch is trained on.
        where: for messages.

    Raises:
        ValueError: another number of prompts, completions or places than of sequences, or a completion longer than its
            sequence in the batch.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> batch = Batch(logp=torch.full((2, 2), -0.5), advantages=torch.tensor([1.0, -1.0]), mask=mask,
    ...               rollout_logp=torch.full((2, 2), -0.25))
    >>> records = records_of(batch, prompt_ids=[[1], [1, 2]], completion_ids=torch.tensor([[3, 4], [5, 0]]),
    ...                      completion_mask=mask, step=7)
    >>> records[0].rollout_logp.tolist(), records[1].completion_ids.tolist(), records[1].advantage, records[1].step
    ([-0.25, -0.25], [5], -1.0, 7)
    """
    padded = batch.padded()
    prompts, completions = _kept(prompt_ids, prompt_mask), _kept(completion_ids, completion_mask)
    counts = {"prompt_ids": len(prompts), "completion_ids": len(completions)}
    counts |= {} if places is None else {"places": len(places)}
    for name, count in counts.items():
        if count != padded.sequences:
            raise ValueError(f"{name} has {count} sequences, expected {padded.sequences}, those of the batch")
    columns = {
        "rollout_logp": padded.rollout_logp,
        "old_logp": padded.logp if padded.old_logp is None else padded.old_logp,
        "logp": padded.logp,
        "entropy": padded.entropy,
        "mask": padded.mask.bool(),
        "turn_ids": padded.turn_ids,
        "advantage": padded.advantages,
        "reward": padded.rewards,
        "group_id": padded.group_ids,
        "rollout_version": padded.rollout_version,
        "origin": padded.origin,
    }
    host = {name: _on_host(value) for name, value in columns.items() if value is not None}
    records = []
    for i, ((prompt, _), (completion, chosen)) in enumerate(zip(prompts, completions, strict=True)):
        tokens = len(completion)
        if not tokens:
            continue
        at = None if places is None else np.asarray(places[i], dtype=np.int64)
        width = tokens if at is None else len(at)
        if width > padded.logp.shape[1]:
            raise ValueError(
                f"completion {i} has {width} tokens, expected at most {padded.logp.shape[1]}, those of logp"
            )
        row: dict[str, Any] = {}
        for name, values in host.items():
            if values.ndim == 1:
                row[name] = values[i].item()
            else:
                row[name] = values[i, chosen].copy() if at is None else _spread(values[i, :width], at, tokens)
        row.setdefault("rollout_logp", np.full(tokens, np.nan))
        if "origin" in row:
            row["origin"] = ORIGINS[row["origin"]]
        if "rollout_version" in row:
            known = row["rollout_version"][row["mask"]]
            if len(known) and (known == known[0]).all():
                row["rollout_version"] = int(known[0])
        if not _same_weights(padded, row):
            row.pop("entropy", None)
        records.append(
            Record(
                prompt_ids=np.asarray(prompt, dtype=np.int64),
                completion_ids=np.asarray(completion, dtype=np.int64),
                trainer_version=padded.trainer_version,
                step=step,
                where=where,
                **row,
            )
        )
    return records


def _same_weights(batch: Batch, row: dict[str, Any]) -> bool:
    """Whether a sequence's ``logp`` and ``old_logp`` have the same weights."""
    if batch.old_logp is None:
        return True
    if "rollout_version" in row and batch.trainer_version is not None:
        return bool(
            (np.broadcast_to(row["rollout_version"], row["mask"].shape) == batch.trainer_version)[row["mask"]].all()
        )
    moved = np.abs(row["logp"] - row["old_logp"])[row["mask"]]
    return not len(moved) or bool(moved.mean() < SAME)


def _kept(ids: Ids, mask: Tensor | None) -> list[tuple[Any, Any]]:
    """The ids of each sequence without padding, and their columns."""
    if not isinstance(ids, Tensor):
        return [(row, slice(0, len(row))) for row in ids]
    rows = ids.detach().cpu().numpy()
    kept = np.ones(rows.shape, bool) if mask is None else mask.detach().bool().cpu().numpy()
    return [(row[of_row], of_row.nonzero()[0]) for row, of_row in zip(rows, kept, strict=True)]


def _on_host(value: Tensor) -> NDArray[Any]:
    value = value.detach()
    if value.is_floating_point():
        value = value.double()
    return value.cpu().numpy()


def _spread(values: NDArray[Any], places: NDArray[np.int64], tokens: int) -> NDArray[Any]:
    """[T]: the values at their places; NaN, 0 or False elsewhere.  A copy."""
    fill = np.nan if values.dtype.kind == "f" else 0
    spread = np.full(tokens, fill, dtype=values.dtype)
    spread[places] = values
    return spread
