"""Weights: what the engine's mismatch costs.  Detached, never part of the gradient's path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Batch, Tokens
from offcorr.shapes import Mismatch, PerSequence, PerToken, TokenMask
from offcorr.stages import ops
from offcorr.stages.base import Number, check_choice, check_number, check_order, check_pair
from offcorr.stages.multipliers import Multiplier

Level = Literal["token", "turn", "prefix", "geometric", "sequence"]


class Bounds(NamedTuple):
    low: Number
    high: Number


def clamp(value: Any, p: Any) -> Any:
    return ops.minimum(ops.maximum(ops.exp(value), p.low), p.high), value == value


def band(value: Any, p: Any) -> Any:
    ratio = ops.exp(value)
    return ratio, (ratio >= p.low) & (ratio <= p.high)


class Weight(Multiplier, kind="weight"):
    """A detached factor on the token's gradient."""


class _Bounded(Weight):
    """A ratio at some level, bounded; every form of it is a ``Bound`` under another name."""

    value_limit: ClassVar[float] = LOG_LIMIT
    level: Level

    @property
    def bound(self) -> Bound:
        raise TypeError(f"{type(self).__name__} says no bound")

    @property
    def span(self) -> str:  # type: ignore[override]
        return self.level

    @property
    def rule(self) -> Any:  # type: ignore[override]
        return clamp if self.bound.outside == "clamp" else band

    @property
    def params(self) -> Bounds:
        low, high = self.bound.low, self.bound.high
        return Bounds(0.0 if low is None else low, ops.UNBOUNDED if high is None else high)

    def truncated(self, weight: PerToken, kept: TokenMask, value: PerToken) -> TokenMask:
        return kept & (weight != value.exp())


@dataclass(frozen=True)
class Bound(_Bounded):
    """The ratio, clamped to [low, high] or zeroed outside.

    Args:
        low, high: absolute bounds on the ratio; None: no bound.
        outside: "clamp", or "mask", which drops the token.
        level: token, sequence (product), geometric (its T-th root), turn (geometric over the turn) or
            prefix (running product).
        of: which two policies.

    Raises:
        ValueError: a bound below 0, low > high, or an unknown level or pair.

    >>> Bound(0.5, 5.0, outside="mask").level
    'token'
    """

    low: Number | None = None
    high: Number | None = None
    outside: Literal["clamp", "mask"] = "clamp"
    level: Level = "token"
    mismatch: Mismatch = "engine"

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, optional=True)
        check_number(self, "high", low=0, optional=True)
        if self.low is not None and self.high is not None:
            check_order(self, "low", "high")
        check_choice(self, "outside", ("clamp", "mask"))
        check_choice(self, "level", get_args(Level))
        check_pair(self)

    @property
    def bound(self) -> Bound:
        return self


@dataclass(frozen=True)
class Truncate(_Bounded):
    """min(ratio, cap): truncated importance sampling.  ``cap`` None: the bare ratio.  Levels as in ``Bound``."""

    cap: Number | None = 2.0
    level: Level = "token"
    mismatch: Mismatch = "engine"

    def __post_init__(self) -> None:
        check_number(self, "cap", low=0, optional=True)
        self.bound  # noqa: B018  (checks level and of)

    @property
    def bound(self) -> Bound:
        return Bound(high=self.cap, level=self.level, mismatch=self.mismatch)


@dataclass(frozen=True)
class Mask(_Bounded):
    """The ratio where low <= ratio <= high, else 0: masked importance sampling.  Levels as in ``Bound``."""

    low: Number | None = 0.5
    high: Number | None = 5.0
    level: Level = "token"
    mismatch: Mismatch = "engine"

    def __post_init__(self) -> None:
        self.bound  # noqa: B018  (checks every field)

    @property
    def bound(self) -> Bound:
        return Bound(self.low, self.high, "mask", self.level, self.mismatch)


@dataclass(frozen=True, eq=False)
class GroupSums:
    """What each sequence adds to the sum and the number of its group; merges by joining.

    One entry a sequence, however few groups there are: to count groups would be to wait for the device.
    """

    group: Tensor  # [S] ids
    total: PerSequence
    count: PerSequence

    def merge(self, other: GroupSums) -> GroupSums:
        return GroupSums(
            torch.cat([self.group, other.group]),
            torch.cat([self.total, other.total]),
            torch.cat([self.count, other.count]),
        )

    def mean(self, group: Tensor) -> PerSequence:
        """[B], the mean of each ``group``; 0 for a group that nothing was counted in."""
        if not len(self.group):
            return self.total.new_zeros(len(group))
        known = self.group.sort().values  # a group's entries are added up where its first one lies
        here, asked = (torch.searchsorted(known, ids.contiguous()) for ids in (self.group, group))
        total, count = (
            # index_put adds in a fixed order on every device; index_add does not
            torch.zeros_like(x).index_put_((here,), x, accumulate=True)
            for x in (self.total, self.count.to(self.total.dtype))
        )
        asked = asked.clamp(max=len(known) - 1)
        return torch.where(known[asked] == group, total[asked] / count[asked].clamp(min=1), 0)


@dataclass(frozen=True)
class SelfNormalise(Weight):
    """``inner`` divided by its mean over the global batch, or over each prompt group, after bounding.

    The mean is over valid tokens at token, turn and prefix level, over sequences that have a valid token at sequence
    and geometric level; skipped where it is <= 1e-8.  A statistic of the whole batch: under accumulation or on several
    ranks, merge ``loss_fn.statistics(batch)`` first.

    Args:
        inner: the weight to normalise.
        over: "batch" or "group" (needs ``Batch.group_ids``).
    """

    inner: Any = Truncate()
    over: Literal["batch", "group"] = "batch"

    POINTWISE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.inner, _Bounded):
            raise ValueError(f"SelfNormalise: inner is {self.inner!r}, expected a weight such as Truncate(2.0)")
        check_choice(self, "over", ("batch", "group"))

    @property
    def mismatch(self) -> Mismatch:  # type: ignore[override]
        return self.inner.mismatch  # type: ignore[no-any-return]

    @property
    def asks_for(self) -> frozenset[str]:
        return frozenset({"group_ids"} if self.over == "group" else ())

    def statistics(self, tokens: Tokens) -> GroupSums:
        weight = self.inner(tokens).weight
        if self.inner.level in ("sequence", "geometric"):
            present = tokens.rows.count > 0
            last = torch.where(tokens.rows.position == tokens.rows.count[:, None], tokens.mask, False)
            total, count = torch.where(last, weight, 0).sum(1), present.to(weight.dtype)
        else:
            total, count = weight.sum(1), tokens.rows.count
        return GroupSums(self.group(tokens.batch), total, count)

    def resolve(self, statistics: GroupSums) -> Multiplier:
        """The same weight with the mean known."""
        return _Normalised(self, statistics)

    def group(self, batch: Batch) -> Tensor:
        """[B], whose mean it is."""
        if self.over == "batch":
            return torch.zeros(batch.sequences, dtype=torch.long, device=batch.mask.device)
        assert batch.group_ids is not None  # asks_for said so
        return batch.group_ids


class _Normalised(_Bounded):
    """A SelfNormalise whose mean is known: its inner weight, times a factor of each sequence."""

    def __init__(self, weight: SelfNormalise, sums: GroupSums) -> None:
        self.weight, self.sums = weight, sums
        self.mismatch, self.level = weight.mismatch, weight.inner.level

    @property
    def bound(self) -> Bound:
        return self.weight.inner.bound  # type: ignore[no-any-return]

    def row_factor(self, batch: Batch) -> PerSequence:
        mean = self.sums.mean(self.weight.group(batch))
        return torch.where(mean > 1e-8, 1 / mean.clamp(min=1e-8), 1)
