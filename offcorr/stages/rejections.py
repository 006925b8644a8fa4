"""Rejections: what is too far gone to learn from.  Detached 0/1 multipliers, combined by AND."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from offcorr.batch import Tokens
from offcorr.shapes import Mismatch
from offcorr.stages import ops
from offcorr.stages.base import Number, check_choice, check_number, check_order, check_pair
from offcorr.stages.multipliers import Multiplier

Level = Literal["token", "seq-sum", "seq-mean", "seq-max"]
_SPAN_OF_LEVEL = {
    "token": "token",
    "seq-sum": "sequence",
    "seq-mean": "geometric",
    "seq-max": "sequence_max",
}


class Rejection(Multiplier, kind="rejection"):
    """A 0/1 multiplier."""


class Interval(NamedTuple):
    low: Number
    high: Number


class Threshold(NamedTuple):
    bound: Number


def _log(number: Number) -> Number:
    return number.log() if isinstance(number, Tensor) else math.log(number)


def within(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (value >= p.low) & (value <= p.high)


def at_most(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value <= p.bound


def at_least(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value >= p.bound


@dataclass(frozen=True)
class Geometric(Rejection):
    """Keep a sequence whose geometric ratio lies in [low, high] (verl and slime's geometric rejection).

    Args:
        low, high: absolute bounds on the T-th root of the product.
    """

    low: Number = 0.999
    high: Number = 1.001
    mismatch: Mismatch = "engine"

    span: ClassVar[Any] = "geometric"
    rule: ClassVar[Any] = staticmethod(within)

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, above=True)
        check_number(self, "high", low=0, above=True)
        check_order(self, "low", "high")
        check_pair(self)

    @cached_property
    def params(self) -> Interval:
        return Interval(_log(self.low), _log(self.high))


class _Divergence(Rejection):
    """A per-token divergence, at a level."""

    level: Level

    @property
    def span(self) -> str:  # type: ignore[override]
        return _SPAN_OF_LEVEL[self.level]

    def _check_level(self) -> None:
        check_choice(self, "level", _SPAN_OF_LEVEL)
        check_pair(self)


class K1Band(NamedTuple):
    low: Number
    high: Number
    middle: Number
    half: Number


def k1_distance(log_ratio: Any, p: Any) -> Any:
    return ops.abs(log_ratio - p.middle)


def k1_within_half(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value <= p.half


@dataclass(frozen=True)
class K1(_Divergence):
    """Keep where log low <= k <= log high, k the log-ratio: the token's, or the sequence's sum, mean, or every token's.

    Args:
        low, high: absolute bounds on the ratio (verl's sit on its inverse).
        level: "token", "seq-sum", "seq-mean" or "seq-max" (all tokens inside).
    """

    low: Number
    high: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, above=True)
        check_number(self, "high", low=0, above=True)
        check_order(self, "low", "high")
        self._check_level()

    @property
    def measure(self) -> Any:  # type: ignore[override]
        return k1_distance if self.level == "seq-max" else Multiplier.measure

    @property
    def rule(self) -> Any:  # type: ignore[override]
        return k1_within_half if self.level == "seq-max" else within

    @cached_property
    def params(self) -> K1Band:
        low, high = _log(self.low), _log(self.high)
        return K1Band(low, high, (low + high) / 2, (high - low) / 2)


def k2(log_ratio: Any) -> Any:
    return log_ratio * log_ratio / 2


def k3(log_ratio: Any) -> Any:
    return ops.exp(log_ratio) - 1 - log_ratio


class _BoundedDivergence(_Divergence):
    bound: Number
    rule: ClassVar[Any] = staticmethod(at_most)

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        self._check_level()

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)


@dataclass(frozen=True)
class K2(_BoundedDivergence):
    """Keep where log^2(ratio) / 2 <= bound, at a level (see K1)."""

    bound: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    measure: ClassVar[Any] = staticmethod(k2)


@dataclass(frozen=True)
class K3(_BoundedDivergence):
    """Keep where ratio - 1 - log ratio <= bound, at a level (see K1); seq-max is TRM (2512.23075)."""

    bound: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    measure: ClassVar[Any] = staticmethod(k3)


def raw(raw_log_ratio: Any) -> Any:
    return raw_log_ratio


@dataclass(frozen=True)
class Veto(Rejection):
    """Drop a sequence that has a valid token whose unclamped ratio is below ``threshold`` (slime, verl)."""

    threshold: Number = 1e-4
    mismatch: Mismatch = "engine"

    span: ClassVar[Any] = "sequence_min"
    measure: ClassVar[Any] = staticmethod(raw)
    rule: ClassVar[Any] = staticmethod(at_least)
    drops_as: ClassVar = "vetoed"

    def __post_init__(self) -> None:
        check_number(self, "threshold", low=0, above=True)
        check_pair(self)

    @cached_property
    def params(self) -> Threshold:
        return Threshold(_log(self.threshold))


def negative_and_far(value: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (advantage >= 0) | (-value <= p.bound)


class _TotalIfKnown(Rejection):
    """``of`` None: total where ``rollout_logp`` is given, else staleness."""

    mismatch: Mismatch | None  # type: ignore[assignment]

    def pair(self, tokens: Tokens) -> Mismatch:
        return self.mismatch or ("staleness" if tokens.batch.rollout_logp is None else "total")

    def _check_of(self) -> None:
        if self.mismatch is not None:
            check_pair(self)


@dataclass(frozen=True)
class OPSM(_TotalIfKnown):
    """Keep where A >= 0, or the sequence's mean log-ratio has fallen by at most ``delta`` (DeepSeek-V3.2).

    Args:
        delta: nats; unpublished, .5 is a guess in use.
        of: None: total where ``rollout_logp`` is given, else staleness.
    """

    delta: Number = 0.5
    mismatch: Mismatch | None = None

    span: ClassVar[Any] = "geometric"
    rule: ClassVar[Any] = staticmethod(negative_and_far)

    def __post_init__(self) -> None:
        check_number(self, "delta")
        self._check_of()

    @property
    def params(self) -> Threshold:
        return Threshold(self.delta)


def both_bernoulli_kls(value: Any, logp: Any, anchor_logp: Any, p: Any) -> Any:
    ours, theirs = ops.exp(logp), ops.exp(anchor_logp)
    # A floor keeps the logarithm of the other side where a probability is 1.
    our_rest, their_rest = ops.maximum(1 - ours, 1e-12), ops.maximum(1 - theirs, 1e-12)
    gap, rest_gap = logp - anchor_logp, ops.log(our_rest) - ops.log(their_rest)
    forward = ours * gap + our_rest * rest_gap
    backward = -theirs * gap - their_rest * rest_gap
    return ops.zeros_like(value) + 1, (forward <= p.bound) & (backward <= p.bound)


@dataclass(frozen=True)
class BinaryKL(Rejection):
    """Keep tokens whose Bernoulli KLs (this token or another), both ways round, are <= ``bound`` (AReaL's KPop)."""

    bound: Number
    mismatch: Mismatch = "engine"

    span: ClassVar[Any] = "token"
    rule: ClassVar[Any] = staticmethod(both_bernoulli_kls)

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        check_pair(self)

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)


class Shift(NamedTuple):
    low: Number
    high: Number
    delta: Number


def probability_shift(value: Any, logp: Any, anchor_logp: Any, advantage: Any, p: Any) -> Any:
    shift = ops.exp(logp) - ops.exp(anchor_logp)
    gone = ((advantage > 0) & (shift > p.high)) | ((advantage <= 0) & (shift < -p.low))
    return ops.zeros_like(value) + 1, ~gone


def bernoulli_kl_outward(value: Any, logp: Any, anchor_logp: Any, advantage: Any, p: Any) -> Any:
    ours, theirs = ops.exp(logp), ops.exp(anchor_logp)
    our_rest, their_rest = ops.maximum(1 - ours, 1e-12), ops.maximum(1 - theirs, 1e-12)
    kl = theirs * (anchor_logp - logp) + their_rest * (ops.log(their_rest) - ops.log(our_rest))
    outward = ((advantage > 0) & (logp > anchor_logp)) | ((advantage <= 0) & (logp < anchor_logp))
    return ops.zeros_like(value) + 1, (kl <= p.delta) | ~outward


@dataclass(frozen=True)
class DPPO(Rejection):
    """Drop tokens whose probability moved too far in the direction the advantage pushes (2602.04879).

    Args:
        divergence: "tv": p - mu above ``high`` for A > 0, below ``-low`` for A <= 0; "kl": Bernoulli KL(mu, p) above
            ``delta`` while moving on.
        low, high: probability. delta: nats.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: Number = 0.2
    high: Number = 0.2
    delta: Number = 0.05
    mismatch: Mismatch = "total"

    span: ClassVar[Any] = "token"

    def __post_init__(self) -> None:
        check_choice(self, "divergence", ("tv", "kl"))
        for field in ("low", "high", "delta"):
            check_number(self, field, low=0)
        check_pair(self)

    @property
    def rule(self) -> Any:  # type: ignore[override]
        return probability_shift if self.divergence == "tv" else bernoulli_kl_outward

    @property
    def params(self) -> Shift:
        return Shift(self.low, self.high, self.delta)


def distance_from_one(log_ratio: Any) -> Any:
    return ops.abs(ops.exp(log_ratio) - 1)


def in_bounds_or_returning(value: Any, log_ratio: Any, advantage: Any, p: Any) -> Any:
    outward = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    return ops.zeros_like(value) + 1, (value <= p.bound) | ~outward


@dataclass(frozen=True)
class VACO(_TotalIfKnown):
    """Drop tokens moving on (A * log ratio > 0) in sequences whose mean |ratio - 1| is above ``bound`` (2603.01365).

    Args:
        bound: on the sequence's mean |ratio - 1|.
        of: None: total where ``rollout_logp`` is given, else staleness.
    """

    bound: Number = 0.2
    mismatch: Mismatch | None = None

    span: ClassVar[Any] = "geometric"
    measure: ClassVar[Any] = staticmethod(distance_from_one)
    rule: ClassVar[Any] = staticmethod(in_bounds_or_returning)

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        self._check_of()

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)
