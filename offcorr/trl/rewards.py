"""Rewards that are no numbers, and reward functions that fail: what is said of them, in both trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

try:
    from trl.trainer.utils import is_async_callable as awaited
except ImportError:  # an older TRL, which awaits functions alone and no objects that can be called
    from inspect import iscoroutinefunction as awaited

UNREWARDED = (
    "a completion has no reward: every reward function returned None or NaN for it. TRL gives it the advantage 0, so "
    "it is not trained on (older TRL takes the reward for 0). Return a number from one function at least"
)

INFINITE = (
    "reward function {} returned an infinite reward: the advantages of its prompt's completions become NaN, for which "
    "0 is put, so none of them is trained on. Return finite numbers"
)


def reward_faults(names: Sequence[str], rewards: Any) -> Iterator[str]:
    """Sentences on rewards that nothing is learnt from.

    Args:
        names: of the reward functions.
        rewards: [B, functions]; NaN where a function scored nothing.

    >>> [said[:40] for said in reward_faults(["length"], np.array([[1.0], [np.inf], [np.nan]]))]
    ['a completion has no reward: every reward', 'reward function length returned an infin']
    """
    if np.isnan(rewards).all(axis=1).any():
        yield UNREWARDED
    for name, of_function in zip(names, rewards.T, strict=True):
        if np.isinf(of_function).any():
            yield INFINITE.format(name)


def function_name(reward_func: Any) -> str:
    """The name of a reward function in messages, as TRL names it."""
    return str(getattr(reward_func, "__name__", type(reward_func).__name__))


def scored(reward_func: Callable[..., Any], completions: Sequence[str], **columns: Any) -> NDArray[np.float64]:
    """[B]: the rewards of the completions; NaN for None.

    Args:
        columns: passed on.

    Raises:
        RuntimeError: the function raised; the message names it.
        ValueError: it returned another number of rewards, or something that is no number.
    """
    name = function_name(reward_func)
    try:
        given = reward_func(completions=completions, **columns)
    except Exception as error:
        raise RuntimeError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    return np.array([np.nan if reward is None else float(reward) for reward in listed(name, given, len(completions))])


def listed(name: str, given: Any, number: int) -> list[Any]:
    """The rewards that the function ``name`` returned, as a list; None, for no reward, stays.

    Raises:
        ValueError: they are not ``number`` numbers.

    >>> listed("length", (1, None), 2)
    [1, None]
    >>> listed("length", 0.5, 2)
    Traceback (most recent call last):
    ValueError: reward function length returned 0.5, expected a list of 2 numbers, one per completion (None: no reward)
    """
    wanted = f"expected a list of {number} numbers, one per completion (None: no reward)"
    try:
        if isinstance(given, str | bytes | Mapping):
            raise TypeError
        rewards = list(given)
    except TypeError:
        raise ValueError(f"reward function {name} returned {_short(given)}, {wanted}") from None
    if len(rewards) != number:
        raise ValueError(f"reward function {name} returned {len(rewards)} rewards, {wanted}")
    for i, reward in enumerate(rewards):
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            None if reward is None else float(reward)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            raise ValueError(f"reward function {name} returned {_short(reward)} for completion {i}, {wanted}") from None
    return rewards


def checked(reward_func: Any) -> Any:
    """A reward function whose result is checked by ``listed``; models, which TRL calls otherwise, are left as they are.

    >>> checked(lambda completions: 0.5)(completions=["4", "5"])
    Traceback (most recent call last):
    ValueError: reward function <lambda> returned 0.5, expected a list of 2 numbers, one per completion ...
    """
    if isinstance(reward_func, nn.Module):
        return reward_func
    name = function_name(reward_func)

    async def later(**columns: Any) -> list[Any]:
        return listed(name, await reward_func(**columns), len(columns["completions"]))

    def now(**columns: Any) -> list[Any]:
        return listed(name, reward_func(**columns), len(columns["completions"]))

    return later if awaited(reward_func) else now  # as TRL, which makes an event loop only for what it awaits


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


EQUAL = 1e-6
"""Distance of a reward from its group's mean, over the group's largest |reward|, up to which float32 rounds it off."""


def without_rounding(advantages: Tensor, rewards: Tensor, size: int, first: int = 0) -> Tensor:
    """[B] advantages, 0 where the reward is the mean of its group but for rounding.

    The mean of eight rewards of .1 is not .1 in float32, and divided by their spread, which is rounding as well, what
    is left is an advantage of about 1e-4.

    Args:
        rewards: [global B], whole groups of ``size``.
        first: the place of the first advantage among them.

    >>> import torch
    >>> equal = torch.full((8,), 0.1)
    >>> without_rounding(equal - equal.mean() + 1e-9, equal, 8).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    groups = rewards.double().view(-1, size)
    off = (groups - groups.mean(1, keepdim=True)).abs()
    rounded = (off <= EQUAL * groups.abs().amax(1, keepdim=True)).flatten()
    return advantages.masked_fill(rounded[first : first + len(advantages)], 0.0)


def group_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """[groups, n]: rewards less their group's mean, over its standard deviation, as TRL's asynchronous worker has them.

    A completion without a reward has the advantage 0 and counts in neither; so have all of a group with an infinite
    reward, and one whose reward is the mean but for rounding.

    >>> group_advantages(np.array([[1.0, 3.0, np.nan], [1.0, np.inf, 2.0]])).round(2).tolist()
    [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    advantages = np.zeros_like(rewards)
    for own, group in zip(advantages, rewards, strict=True):
        known = ~np.isnan(group)
        if known.any() and np.isfinite(group[known]).all():
            own[known] = (group[known] - group[known].mean()) / (group[known].std() + 1e-8)
            own[known] *= np.abs(group[known] - group[known].mean()) > EQUAL * np.abs(group[known]).max()
    return advantages
