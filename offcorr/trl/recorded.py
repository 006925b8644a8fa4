"""``recorded_rewards`` of a ``rollout_func``: completions whose rewards are known, and not computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import trl.trainer.grpo_trainer as grpo
from torch import Tensor

from offcorr.trl.patch import patched

Recorded = Sequence[Sequence[float | None] | None]


def score_unrecorded(
    score: Callable[..., Tensor], columns: Sequence[Any], recorded: Recorded | None, functions: int, accelerator: Any
) -> Tensor:
    """[global B, functions]: the rewards of all ranks, in their order.

    Args:
        score: TRL's ``_calculate_rewards``, which gathers over the ranks.
        columns: its arguments, lists with one entry for each completion of this rank.
        recorded: for each completion None, or its rewards; None: all are scored.
        functions: number of reward functions.
    """
    if recorded is None:
        return score(*columns)
    rewards = torch.full((len(recorded), functions), torch.nan, device=accelerator.device)
    unscored = [i for i, known in enumerate(recorded) if known is None]
    if unscored:
        # The ranks may have different numbers of these, so they are gathered together with the others.
        with patched(grpo, gather=lambda own: own):
            rewards[unscored] = score(*([column[i] for i in unscored] for column in columns))
    for i, known in enumerate(recorded):
        if known is not None:
            numbers = [torch.nan if reward is None else reward for reward in known]
            rewards[i] = torch.tensor(numbers, dtype=rewards.dtype)
    return accelerator.gather(rewards)
