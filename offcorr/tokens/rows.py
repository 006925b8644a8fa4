"""The rows of trajectories as tensors, as the result of TRL's ``rollout_func``, and counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from offcorr.tokens.compare import REASONS
from offcorr.tokens.trajectory import Row, Trajectory

__all__ = ["collate", "metrics", "rollout_output"]

ACTIONS = ("continued", "repaired", "forked", "masked")


def metrics(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Counts over trajectories, to be summed over ranks: prompts checked, by action and by reason; masked tokens.

    The keys are the same for every input.  A prompt that differs in several ways counts under one reason: the gravest
    of those that were not repaired, or else the gravest.

    >>> {name: count for name, count in metrics([]).items() if "reason" not in name}  # doctest: +NORMALIZE_WHITESPACE
    {'offcorr/tokens/checked': 0, 'offcorr/tokens/continued': 0, 'offcorr/tokens/repaired': 0,
     'offcorr/tokens/forked': 0, 'offcorr/tokens/masked': 0, 'offcorr/tokens/masked_tokens': 0}
    """
    trajectories = list(trajectories)
    checks = [check for trajectory in trajectories for check in trajectory.checks]
    actions, reasons = Counter(check.action for check in checks), Counter(check.reason for check in checks)
    return {
        "offcorr/tokens/checked": len(checks),
        **{f"offcorr/tokens/{action}": actions[action] for action in ACTIONS},
        "offcorr/tokens/masked_tokens": sum(trajectory.masked_tokens for trajectory in trajectories),
        **{f"offcorr/tokens/reason/{reason}": reasons[reason] for reason in REASONS},
    }


def collate(rows: Sequence[Row], pad_id: int = 0) -> dict[str, Tensor]:
    """Rows as tensors: prompts padded on the left to P, completions on the right to T.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` [B, P]; ``completion_ids`` and ``completion_mask`` (False: padding) [B, T];
        and ``mask``, ``rollout_logp`` (NaN where nothing was sampled) and ``turn_ids`` [B, T], which an
        ``offcorr.Batch`` takes by these names.

    Raises:
        ValueError: there are no rows.

    >>> import offcorr
    >>> tensors = collate([Row([1, 2], [3], [True], [-0.5], [0]), Row([1], [3, 4], [True, True], [-1.0, -2.0], [0, 0])])
    >>> tensors["prompt_ids"].tolist(), tensors["completion_ids"].tolist()
    ([[1, 2], [0, 1]], [[3, 0], [3, 4]])
    >>> fields = {name: tensors[name] for name in ("mask", "rollout_logp", "turn_ids")}
    >>> batch = offcorr.Batch(logp=torch.zeros(2, 2), advantages=torch.ones(2), **fields)
    """
    if not rows:
        raise ValueError("rows is empty, expected at least one row")

    def padded(lists: list[list[Any]], value: Any, dtype: torch.dtype, left: bool = False) -> Tensor:
        width = max(map(len, lists))
        gaps = [[value] * (width - len(one)) for one in lists]
        return torch.tensor(
            [gap + one if left else one + gap for one, gap in zip(lists, gaps, strict=True)], dtype=dtype
        )

    prompts, completions = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
    return {
        "prompt_ids": padded(prompts, pad_id, torch.int64, left=True),
        "prompt_mask": padded([[True] * len(ids) for ids in prompts], False, torch.bool, left=True),
        "completion_ids": padded(completions, pad_id, torch.int64),
        "completion_mask": padded([[True] * len(ids) for ids in completions], False, torch.bool),
        "mask": padded([row.mask for row in rows], False, torch.bool),
        "rollout_logp": padded([row.rollout_logp for row in rows], math.nan, torch.float32),
        "turn_ids": padded([row.turn_ids for row in rows], 0, torch.int64),
    }


def rollout_output(trajectories: Iterable[Trajectory]) -> dict[str, list[Any]]:
    """The result of a ``rollout_func`` of TRL's GRPO trainers: one completion per trajectory.

    Returns:
        ``prompt_ids``, ``completion_ids``, ``logprobs`` (0 where nothing was sampled, as TRL has no NaN there) and
        ``env_mask`` (1 where the model sampled), each a list of lists.

    Raises:
        ValueError: a trajectory has no row, or several; TRL expects one completion per prompt.
    """
    rows = []
    for at, trajectory in enumerate(trajectories):
        found = trajectory.rows()
        if len(found) != 1:
            forks = [f"turn {check.turn}, {check.reason}" for check in trajectory.checks if check.action == "forked"]
            why = f"it forked at {'; '.join(forks)}" if len(found) > 1 else "nothing that was sampled is in the loss"
            mend = ': Trajectory(..., otherwise="mask") keeps one' if len(found) > 1 else ""
            raise ValueError(f"trajectory {at} has {len(found)} rows, as {why}; expected one per prompt for TRL{mend}")
        rows += found
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [
            [logp if own else 0.0 for logp, own in zip(row.rollout_logp, row.mask, strict=True)] for row in rows
        ],
        "env_mask": [[int(own) for own in row.mask] for row in rows],
    }
