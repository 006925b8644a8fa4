"""``PromptGroup``: the completions of a prompt with everything that was recorded when they were sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offcorr.training import ORIGINS, origin_ids

RECORDED = {
    "prompt_ids": torch.int32,
    "completion_ids": torch.int32,
    "logprobs": torch.float32,
    "old_logp": torch.float32,
    "env_mask": torch.int32,
    "rollout_version": torch.int64,
    "origin": torch.int64,
}
"""The keys of a ``rollout_func`` that are stored; others reach the reward functions, which are not called again."""

FRESH, REPLAY, DEMONSTRATION = origin_ids(["fresh", "replay", "demonstration"])

Values = list[int | Tensor]


@dataclass(eq=False)
class PromptGroup:
    """A prompt's G sequences.

    Args:
        rows: the dataset's row of each sequence.
        columns: by the keys of ``RECORDED``, for each sequence a number or a tensor with one value per token.
        rewards: [G, functions] of the reward functions, unweighted; NaN: not scored by this one.
        advantages: [G] as they were when the group was sampled; NaN: not recorded.
    """

    rows: list[dict[str, Any]]
    columns: dict[str, Values]
    rewards: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def version(self, now: int) -> int:
        """Of the oldest weights that sampled one of its tokens; ``now`` where the sampler reported none."""
        versions = [version for version in self.columns.get("rollout_version", []) if not _is_empty(version)]
        return min((int(torch.as_tensor(version).min()) for version in versions), default=now)

    def column(self, name: str) -> list[Any]:
        """The values of a key, as a ``rollout_func`` returns them for replayed sequences.

        Raises:
            ValueError: it was not recorded.
        """
        if name == "origin":
            return [DEMONSTRATION if origin == DEMONSTRATION else REPLAY for origin in self.columns["origin"]]
        if name == "recorded_rewards":
            return [[None if math.isnan(reward) else reward for reward in row] for row in self.rewards.tolist()]
        if name in self.columns:
            return [value.tolist() if isinstance(value, Tensor) else value for value in self.columns[name]]
        if name == "env_mask":
            return [[1] * len(ids) for ids in self.columns["completion_ids"]]  # type: ignore[arg-type]
        if name in RECORDED:
            raise ValueError(
                f"the sampler returns {name}, and a stored group has none, but {', '.join(self.columns)}: the two "
                "cannot be mixed in a batch. Load rollouts that have it, or take another sampler"
            )
        return [None] * len(self)


def columns_of(rollout: Mapping[str, Any], start: int, stop: int) -> dict[str, Values]:
    """The columns of a group, rows ``start`` to ``stop`` of a rollout."""
    return {
        name: [_stored(value, dtype) for value in rollout[name][start:stop]]
        for name, dtype in RECORDED.items()
        if rollout.get(name) is not None
    }


def mixed(fresh: Mapping[str, Any] | None, groups: Sequence[PromptGroup]) -> dict[str, Any]:
    """The rollout of the fresh sequences, if any, and of the replayed groups after them."""
    if not groups:
        return dict(fresh or {})
    if fresh is None:
        names = {name for name in RECORDED if all(name in group.columns for group in groups)}
        names |= {"env_mask"} if any("env_mask" in group.columns for group in groups) else set()
        replayed = {name: _together([], groups, name) for name in (*names, "recorded_rewards")}
        return {"logprobs": None, **replayed}
    size = len(fresh["completion_ids"])
    rollout = dict(fresh)
    rollout.setdefault("recorded_rewards", [None] * size)
    if rollout.get("env_mask") is None and any("env_mask" in group.columns for group in groups):
        rollout["env_mask"] = [[1] * len(ids) for ids in fresh["completion_ids"]]
    for name, values in rollout.items():
        if isinstance(values, list) or (name in RECORDED and values is not None):
            rollout[name] = _together(list(values), groups, name)
    lengths = [len(ids) for ids in rollout["completion_ids"]]
    if "rollout_version" in rollout:
        rollout["rollout_version"] = _alike(rollout["rollout_version"], lengths)
    return rollout


def group_of_records(
    records: Sequence[Any], row: dict[str, Any], functions: int, first: tuple[int, float]
) -> PromptGroup:
    """The group of a dump's records of one prompt, of which only the weighted sum of the rewards is known.

    Args:
        row: the dataset's row, or what is known of it.
        functions: number of reward functions.
        first: the function that stands for the sum, and its weight; the others are NaN.
    """
    columns: dict[str, Values] = {
        "prompt_ids": [torch.as_tensor(record.prompt_ids, dtype=torch.int32) for record in records],
        "completion_ids": [torch.as_tensor(record.completion_ids, dtype=torch.int32) for record in records],
        "logprobs": [torch.as_tensor(record.rollout_logp, dtype=torch.float32) for record in records],
        "old_logp": [torch.as_tensor(record.old_logp, dtype=torch.float32) for record in records],
        "rollout_version": [0 for _ in records],
        "origin": [ORIGINS.index(record.origin or "fresh") for record in records],
    }
    if any(record.mask is not None and not record.mask.all() for record in records):
        columns["env_mask"] = [
            torch.as_tensor([1] * len(record) if record.mask is None else record.mask, dtype=torch.int32)
            for record in records
        ]
    rewards = torch.full((len(records), functions), torch.nan)
    rewards[:, first[0]] = torch.tensor([record.reward / first[1] for record in records])
    known = all(isinstance(record.advantage, float) for record in records)
    advantages = [record.advantage if known else torch.nan for record in records]
    return PromptGroup([dict(row) for _ in records], columns, rewards, torch.tensor(advantages, dtype=torch.float32))


def _together(values: list[Any], groups: Iterable[PromptGroup], name: str) -> list[Any]:
    return [*values, *(value for group in groups for value in group.column(name))]


def _alike(versions: list[Any], lengths: Sequence[int]) -> list[Any]:
    """One version per sequence for all, or one per token for all."""
    if not any(hasattr(version, "__len__") for version in versions):
        return versions
    return [
        version if hasattr(version, "__len__") else [version] * tokens
        for version, tokens in zip(versions, lengths, strict=True)
    ]


def _stored(value: Any, dtype: torch.dtype) -> int | Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", dtype) if value.ndim else int(value)
    if not hasattr(value, "__len__"):
        return int(value)
    return torch.tensor([torch.nan if one is None else one for one in value], dtype=dtype)


def _is_empty(version: int | Tensor) -> bool:
    return isinstance(version, Tensor) and not version.numel()
