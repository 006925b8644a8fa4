"""AsymRE: REINFORCE with a baseline below the mean reward, so that positive terms outweigh negative ones.

    dL/dlogp_t = -(R - V - delta_v) / Z

R is the sequence's reward, V the mean reward of its prompt group, delta_v < 0 the shift of the baseline and Z the
denominator of the aggregation. ``Batch.advantages`` is not used. V is the mean over the global batch: where a group is
split over micro-batches or ranks, merge ``loss_fn.statistics(batch)`` first.

Source: Trinity-RFT's code; paper 2506.20520. Frameworks differ: in a group of one, V is the reward itself here, and
Trinity-RFT's baseline is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """Surrogate (R - V - delta_v) log pi, with V the mean reward of the prompt group (AsymRE, 2506.20520).

    Needs ``Batch.rewards`` and ``Batch.group_ids``.

    Args:
        delta_v: shift of the baseline, in units of the reward; negative: downwards.
    """

    delta_v: Number = -0.1

    becomes, couples = "gate", "group"
    needs = frozenset({"rewards", "group_ids"})
    uses_ratio = False
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "delta_v")

    def statistics(self, tokens: Tokens) -> GroupSums:
        """Returns the reward and the count that each sequence adds to its group.

        A reward that is not finite, of a sequence without valid tokens, is left out.
        """
        batch = tokens.batch
        assert batch.group_ids is not None and batch.rewards is not None  # ``needs`` asks for them
        rewards = batch.rewards.detach().to(tokens.dtype)
        counted = rewards.isfinite() | (tokens.rows.count > 0)
        return GroupSums(batch.group_ids, torch.where(counted, rewards, 0), counted.to(rewards.dtype))

    def resolve(self, statistics: GroupSums) -> gates.Gate:
        """Returns the gate with the mean reward of every group."""
        return _Centred(self.delta_v, statistics)


@dataclass(frozen=True, eq=False)
class _Centred(gates.Gate):
    """Surrogate (reward - delta_v) log pi, with the mean reward of its group subtracted from the reward."""

    delta_v: Number
    sums: GroupSums = field(repr=False)

    needs = frozenset({"group_ids"})
    surrogate = staticmethod(shifted)
    detached = True
    uses_ratio = False
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "delta_v")

    @property
    def params(self) -> Shift:
        return Shift(self.delta_v)

    def prepare(self, batch: Batch) -> Batch:
        assert batch.group_ids is not None and batch.rewards is not None
        rewards = batch.rewards.detach().to(self.sums.total.dtype)
        return batch.replaced(rewards=rewards - self.sums.mean(batch.group_ids))


@register(
    "asymre",
    multiplier="(reward - V - delta_v) / A, V the mean reward of its group",
    paper="2506.20520",
    provenance="framework code (Trinity-RFT)",
    on_policy=False,
    notes="needs rewards and group_ids and does not use advantages, so that c is not 1 on-policy; delta_v = -.1 is "
    "Trinity-RFT's default",
)
def asymre(delta_v: float = -0.1) -> Correction:
    """Surrogate (R - V - delta_v) log pi; needs ``Batch.rewards`` and ``Batch.group_ids``.

    Args:
        delta_v: shift of the baseline, in units of the reward; negative: downwards.

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
