"""Weights: importance weights that correct the trainer/engine mismatch.

They are detached: a weight scales the gradient of a token and receives none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Batch, Tokens
from offcorr.shapes import Mismatch, PerSequence
from offcorr.stages import ops
from offcorr.stages.base import Controller, Number, Pointwise, Stage, own, plain, register_form
from offcorr.stages.checks import (
    check_choice,
    check_mismatch,
    check_number,
    check_order,
    check_value,
    check_word,
    uncalled,
    warn_of_bounds,
)
from offcorr.stages.reference import weight_of

__all__ = ["Bound", "Mask", "SelfNormalise", "Truncate", "Weight"]

Level = Literal["token", "turn", "prefix", "geometric", "sequence"]


class Bounds(NamedTuple):
    low: Number
    high: Number


def clamped(value: Any, p: Any) -> Any:
    return ops.clamp(ops.exp(value), p.low, p.high), value == value


def masked(value: Any, p: Any) -> Any:
    ratio = ops.exp(value)
    return ratio, (ratio >= p.low) & (ratio <= p.high)


class Weight(Stage, kind="weight"):
    """Base class.  ``rule`` gives (factor, kept): a detached factor, and whether the token is kept at all."""

    PARTS: ClassVar[Mapping[str, int]] = {"measure": 1, "rule": 2}
    counts_as: str = "truncated"
    """The metric it feeds: "truncated", tokens kept with another factor than exp(value), or "vetoed", dropped ones."""
    limit: float = LOG_LIMIT
    """The span's value is clamped to +-``limit`` (nats) before the rule."""

    @property
    def mismatch(self) -> Mismatch | None:
        """The pair of policies that is compared."""
        return "engine"

    @property
    def measure(self) -> Pointwise:
        """One number per token, carried over the span."""
        return own

    @property
    def span(self) -> str:
        """A name of ``offcorr.spans``."""
        return "token"

    @property
    @abstractmethod
    def rule(self) -> Pointwise:
        """The function that gives (factor, kept)."""


@dataclass(frozen=True, repr=False)
class Bound(Weight):
    """The ratio, clamped to [low, high], or masked (0) outside.

    Args:
        low, high: absolute bounds on the ratio; None: no bound.
        outside: "clamp", or "mask", which drops the token.
        level: the span of the ratio: token, sequence (product), geometric (its T-th root), turn (geometric over the
            turn) or prefix (running product).
        mismatch: the pair of policies that is compared, by default ``old_logp`` with the engine's ``rollout_logp``.

    Warns where 1, the ratio of on-policy tokens, is outside.

    Raises:
        ValueError: a lower bound below 0, an upper bound of 0 or less, low > high, or an unknown level or pair.

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
        check_number(self, "high", low=0, above=True, optional=True)
        if self.low is not None and self.high is not None:
            check_order(self, "low", "high")
        check_choice(self, "outside", ("clamp", "mask"))
        check_choice(self, "level", get_args(Level))
        check_mismatch(self)
        name, options = self._form
        upper = "cap" if "cap" in options else "high"
        outside = "are multiplied by it" if self.outside == "clamp" else "are dropped"
        bounds: dict[str, Any] = {"low": self.low, upper: self.high}
        warn_of_bounds(name, outside, upper, **bounds)

    @property
    def span(self) -> str:
        return self.level

    @property
    def rule(self) -> Pointwise:
        return clamped if self.outside == "clamp" else masked

    @property
    def params(self) -> Bounds:
        return Bounds(0.0 if self.low is None else self.low, ops.UNBOUNDED if self.high is None else self.high)

    @property
    def _form(self) -> tuple[str, dict[str, Any]]:
        """Its shortest name and options: ``Truncate`` or ``Mask`` where it is one."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.outside == "mask":
            del options["outside"]
            return "Mask", options
        if self.low is None:
            return "Truncate", {"cap": self.high, "level": self.level, "mismatch": self.mismatch}
        return "Bound", options

    def to_config(self) -> dict[str, Any]:
        """Plain data that makes the same weight, under its shortest name."""
        name, options = self._form
        return {"name": name.lower()} | {option: plain(value) for option, value in options.items()}

    def __repr__(self) -> str:
        name, options = self._form
        return f"{name}({', '.join(f'{option}={value!r}' for option, value in options.items())})"


def Truncate(cap: Number | None = 2.0, level: Level = "token", mismatch: Mismatch = "engine") -> Bound:  # noqa: N802
    """min(ratio, cap): the truncated importance weight, a ``Bound`` with an upper bound alone.

    Args:
        cap: absolute upper bound on the ratio; None: the bare ratio.
        level, mismatch: as in ``Bound``.

    >>> Truncate(2.0) == Bound(high=2.0)
    True
    """
    check_value("Truncate", "cap", cap, low=0, above=True, optional=True)
    check_word("Truncate", "level", level, get_args(Level))
    check_word("Truncate", "mismatch", mismatch, get_args(Mismatch))
    return Bound(high=cap, level=level, mismatch=mismatch)


def Mask(  # noqa: N802
    low: Number | None = 0.5, high: Number | None = 5.0, level: Level = "token", mismatch: Mismatch = "engine"
) -> Bound:
    """The ratio where low <= ratio <= high, else 0: the masked importance weight, a ``Bound`` that masks.

    Args:
        low, high: absolute bounds on the ratio; None: no bound.
        level, mismatch: as in ``Bound``.

    >>> Mask(0.5, 5.0) == Bound(0.5, 5.0, outside="mask")
    True
    """
    check_value("Mask", "low", low, low=0, optional=True)
    check_value("Mask", "high", high, low=0, above=True, optional=True)
    check_word("Mask", "level", level, get_args(Level))
    check_word("Mask", "mismatch", mismatch, get_args(Mismatch))
    return Bound(low, high, "mask", level, mismatch)


def _refuse_subclass(bases: Any) -> Any:
    """Python asks for the classes in the place of a base that is none: here the two functions above."""
    raise TypeError(
        "weights.Truncate and weights.Mask are functions that return a weights.Bound, expected a class: subclass "
        "weights.Weight"
    )


for _function in (Truncate, Mask):
    vars(_function)["__mro_entries__"] = _refuse_subclass

register_form("weight", "truncate", Truncate)
register_form("weight", "mask", Mask)


# -- self-normalised weights ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupSums:
    """The sum and the count that each sequence adds to its group; merges by joining.

    One entry per sequence rather than per group, because counting the groups would need a device synchronisation.
    """

    group: Tensor  # [S] ids
    total: PerSequence
    count: PerSequence

    def merge(self, other: GroupSums) -> GroupSums:
        """Both sets of sequences."""
        return GroupSums(
            torch.cat([self.group, other.group]),
            torch.cat([self.total, other.total]),
            torch.cat([self.count, other.count]),
        )

    def mean(self, group: Tensor) -> PerSequence:
        """[B], the mean of each ``group``; 0 for a group in which nothing was counted."""
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
class SelfNormalise(Controller):
    """``inner`` divided by its mean over the global batch, or over each prompt group, after bounding.

    The mean is over valid tokens at token, turn and prefix level, and over sequences that have a valid token at
    sequence and geometric level; a mean <= 1e-8 divides nothing.  It is a statistic of the whole batch: under
    accumulation or on several ranks, merge ``loss_fn.statistics(batch)`` first.

    Args:
        inner: the weight to normalise, a ``Bound``.
        over: "batch", or "group" (needs ``Batch.group_ids``).

    Raises:
        ValueError: ``inner`` is no ``Bound``, or ``over`` is unknown.
    """

    inner: Bound = Bound(high=2.0)
    over: Literal["batch", "group"] = "batch"

    becomes: ClassVar[str] = "weight"

    def __post_init__(self) -> None:
        if told := uncalled(self.inner):
            raise ValueError(f"SelfNormalise: inner: {told}")
        if not isinstance(self.inner, Bound):
            raise ValueError(f"SelfNormalise: inner is {self.inner!r}, expected a weight such as Truncate(2.0)")
        check_choice(self, "over", ("batch", "group"))

    @property
    def mismatch(self) -> Mismatch:
        return self.inner.mismatch

    @property
    def couples(self) -> str:
        return self.over

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"group_ids"} if self.over == "group" else ())

    def statistics(self, tokens: Tokens) -> GroupSums:
        """The sums of the weights that each sequence adds."""
        weight = weight_of(self.inner, tokens).weight
        if self.inner.level in ("sequence", "geometric"):
            last = (tokens.rows.position == tokens.rows.count[:, None]) & tokens.mask
            total, count = torch.where(last, weight, 0).sum(1), (tokens.rows.count > 0).to(weight.dtype)
        else:
            total, count = weight.sum(1), tokens.rows.count
        return GroupSums(groups_of(self.over, tokens.batch), total, count)

    def resolve(self, statistics: GroupSums) -> Weight:
        """The same weight with the means known."""
        return _Normalised(self.inner, self.over, statistics)


@dataclass(frozen=True, eq=False)
class _Normalised(Weight):
    """A bounded weight whose mean is known: each sequence is divided by the mean of its group."""

    inner: Bound
    over: str
    sums: GroupSums

    @property
    def span(self) -> str:
        return self.inner.span

    @property
    def rule(self) -> Pointwise:
        return self.inner.rule

    @property
    def params(self) -> Bounds:
        return self.inner.params

    @property
    def mismatch(self) -> Mismatch:
        return self.inner.mismatch

    def prepare(self, batch: Batch) -> Batch:
        mean = self.sums.mean(groups_of(self.over, batch))
        return batch.weighted(torch.where(mean > 1e-8, 1 / mean.clamp(min=1e-8), 1))


def groups_of(over: str, batch: Batch) -> Tensor:
    """[B], the group of each sequence; one for all where the mean is over the batch."""
    if over == "batch":
        return torch.zeros(batch.sequences, dtype=torch.long, device=batch.mask.device)
    assert batch.group_ids is not None  # ``needs`` asks for them
    return batch.group_ids
