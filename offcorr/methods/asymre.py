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
from typing import Any, ClassVar, NamedTuple

import torch
from einops import repeat

from offcorr.batch import Tokens
from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates
from offcorr.stages.base import Number, check_number
from offcorr.stages.weights import GroupSums


class Shift(NamedTuple):
    delta_v: Number


def shifted(logp: Any, reward: Any, p: Any) -> Any:
    gradient = reward - p.delta_v
    return gradient * logp, gradient


class _Rewarded(gates.Gate):
    """Surrogate (reward - delta_v) log pi, where the reward may have a baseline subtracted."""

    delta_v: Number

    surrogate: ClassVar[Any] = staticmethod(shifted)
    detached: ClassVar = True
    uses_ratio: ClassVar = False
    scales_with_advantage: ClassVar = False

    @property
    def asks_for(self) -> frozenset[str]:
        return super().asks_for | {"group_ids"}

    @property
    def params(self) -> Shift:
        return Shift(self.delta_v)


@dataclass(frozen=True)
class Asymmetric(_Rewarded):
    """Surrogate (R - V - delta_v) log pi, with V the mean reward of the prompt group (AsymRE, 2506.20520).

    Needs ``Batch.rewards`` and ``Batch.group_ids``.

    Args:
        delta_v: shift of the baseline, in units of the reward; negative: downwards.
    """

    delta_v: Number = -0.1

    def __post_init__(self) -> None:
        check_number(self, "delta_v")

    def statistics(self, tokens: Tokens) -> GroupSums:
        batch = tokens.batch
        assert batch.group_ids is not None and batch.rewards is not None  # asks_for said so
        rewards = batch.rewards.detach().to(tokens.dtype)
        return GroupSums(batch.group_ids, rewards, torch.ones_like(rewards))

    def resolve(self, statistics: GroupSums) -> gates.Gate:
        """Returns the gate with the mean reward of every group."""
        return _Centred(self.delta_v, statistics)


@dataclass(frozen=True)
class _Centred(_Rewarded):
    """Asymmetric with the mean rewards of the global batch."""

    delta_v: Number
    sums: GroupSums = field(repr=False)

    def inputs(self, tokens: Tokens, inputs: dict[str, Any]) -> dict[str, Any]:
        assert tokens.batch.group_ids is not None  # asks_for said so
        baseline = repeat(self.sums.mean(tokens.batch.group_ids), "b -> b 1")
        return inputs | {"reward": inputs["reward"] - baseline}


@register(
    "asymre",
    multiplier="(R - V - delta_v) / A",
    paper="2506.20520",
    provenance="framework code (Trinity-RFT)",
    on_policy=False,
    notes="needs rewards and group_ids and does not use advantages; delta_v = -.1 is Trinity-RFT's default",
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
