"""AsymRE: REINFORCE with a baseline shifted below the mean reward, so that praise outweighs blame.

dL/dlogp_t = -(R - V - delta_v) / Z; R is the sequence's reward, V the mean reward of its prompt group, delta_v < 0.
``advantages`` are not looked at.  V is over the global batch: where a group is split over micro-batches or ranks,
merge ``loss_fn.statistics(batch)`` first.  In a group of one V is the reward itself (Trinity-RFT takes a baseline of 0
there).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from offcorr.batch import Batch, Tokens
from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates
from offcorr.stages.base import Controller, Number
from offcorr.stages.checks import check_number
from offcorr.stages.weights import GroupSums


class Shift(NamedTuple):
    delta_v: Number


def shifted(logp: Any, reward: Any, p: Any) -> Any:
    gradient = reward - p.delta_v
    return gradient * logp, gradient


@dataclass(frozen=True)
class Asymmetric(Controller):
    """(R - V - delta_v) log pi, V the prompt group's mean reward; needs ``Batch.rewards`` and ``Batch.group_ids``.

    Args:
        delta_v: how far the baseline is moved; below 0 it is moved down.
    """

    delta_v: Number = -0.1

    becomes, couples = "gate", "group"
    needs = frozenset({"rewards", "group_ids"})
    uses_ratio = False
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "delta_v")

    def statistics(self, tokens: Tokens) -> GroupSums:
        """The reward that each sequence adds to its group's mean."""
        batch = tokens.batch
        assert batch.group_ids is not None and batch.rewards is not None  # ``needs`` asks for them
        rewards = batch.rewards.detach().to(tokens.dtype)
        return GroupSums(batch.group_ids, rewards, torch.ones_like(rewards))

    def resolve(self, statistics: GroupSums) -> gates.Gate:
        """The gate with every group's mean reward known."""
        return _Centred(self.delta_v, statistics)


@dataclass(frozen=True, eq=False)
class _Centred(gates.Gate):
    """(reward - delta_v) log pi, the reward less its group's mean."""

    delta_v: Number
    sums: GroupSums = field(repr=False)

    needs = frozenset({"group_ids"})
    surrogate = staticmethod(shifted)
    detached = True
    uses_ratio = False
    scales_with_advantage = False

    @property
    def params(self) -> Shift:
        return Shift(self.delta_v)

    def prepare(self, batch: Batch) -> Batch:
        assert batch.group_ids is not None and batch.rewards is not None
        rewards = batch.rewards.detach().to(self.sums.total.dtype)
        return replace(batch, rewards=rewards - self.sums.mean(batch.group_ids))


@register(
    "asymre",
    multiplier="(R - V - delta_v) / A",
    paper="2506.20520",
    provenance="Trinity-RFT's code",
    on_policy=False,
    notes="needs rewards and group_ids, does not look at advantages; delta_v = -.1 is Trinity-RFT's",
)
def asymre(delta_v: float = -0.1) -> Correction:
    """(R - V - delta_v) log pi.

    >>> import torch, offcorr
    >>> logp = torch.full((2, 3), -2.0)
    >>> batch = offcorr.Batch(
    ...     logp=logp, advantages=torch.ones(2), mask=logp < 0,
    ...     rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([7, 7]),
    ... )
    >>> -6 * offcorr.get("asymre")(batch).coefficient  # R - V - delta_v
    tensor([[ 0.6000,  0.6000,  0.6000],
            [-0.4000, -0.4000, -0.4000]])
    """
    return Correction(ratio=None, gate=Asymmetric(delta_v), aggregate="token-mean")
