"""Rejections: tokens or sequences that are dropped because they are too far off-policy.

They are detached factors of 0 or 1 and combine by AND.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from offcorr.shapes import Mismatch
from offcorr.stages import ops
from offcorr.stages.base import Number, Pointwise, Stage, own
from offcorr.stages.checks import check_choice, check_mismatch, check_number, check_order

__all__ = ["BinaryKL", "DPPO", "Geometric", "K1", "K2", "K3", "OPSM", "Rejection", "VACO", "Veto"]

Level = Literal["token", "seq-sum", "seq-mean", "seq-max"]
_SPAN_OF_LEVEL = {
    "token": "token",
    "seq-sum": "sequence",
    "seq-mean": "geometric",
    "seq-max": "sequence_max",
}


class Rejection(Stage, kind="rejection"):
    """Base class.  ``rule`` gives (1, kept)."""

    PARTS: ClassVar[Mapping[str, int]] = {"measure": 1, "rule": 2}
    counts_as: str = ""
    """"vetoed": the tokens it drops count as vetoed too."""
    limit: float = math.inf
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
        """The function that gives (1, kept)."""


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

    span = "geometric"
    rule = staticmethod(within)

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, above=True)
        check_number(self, "high", low=0, above=True)
        check_order(self, "low", "high")
        check_mismatch(self)

    @cached_property
    def params(self) -> Interval:
        return Interval(_log(self.low), _log(self.high))


class K1Bounds(NamedTuple):
    low: Number
    high: Number
    middle: Number
    half: Number


def k1_distance(log_ratio: Any, p: Any) -> Any:
    return ops.abs(log_ratio - p.middle)


def k1_within_half(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value <= p.half


@dataclass(frozen=True)
class K1(Rejection):
    """Keep where log low <= k <= log high, with k a log-ratio (nats).

    Args:
        low, high: absolute bounds on the ratio (verl's bound its inverse).
        level: what k is: "token", the token's log-ratio; "seq-sum", their sum over the sequence; "seq-mean", their
            mean; "seq-max", each of them, all of which must lie inside.
    """

    low: Number
    high: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    def __post_init__(self) -> None:
        check_number(self, "low", low=0, above=True)
        check_number(self, "high", low=0, above=True)
        check_order(self, "low", "high")
        check_choice(self, "level", _SPAN_OF_LEVEL)
        check_mismatch(self)

    @property
    def span(self) -> str:
        return _SPAN_OF_LEVEL[self.level]

    @property
    def measure(self) -> Pointwise:
        return k1_distance if self.level == "seq-max" else own

    @property
    def rule(self) -> Pointwise:
        return k1_within_half if self.level == "seq-max" else within

    @cached_property
    def params(self) -> K1Bounds:
        low, high = _log(self.low), _log(self.high)
        return K1Bounds(low, high, (low + high) / 2, (high - low) / 2)


def k2(log_ratio: Any) -> Any:
    return log_ratio * log_ratio / 2


def k3(log_ratio: Any) -> Any:
    return ops.exp(log_ratio) - 1 - log_ratio


@dataclass(frozen=True)
class K2(Rejection):
    """Keep where log^2(ratio) / 2 <= bound, at a level (see ``K1``).

    Args:
        bound: nats^2.
        level, mismatch: as in ``K1``.
    """

    bound: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    measure = staticmethod(k2)
    rule = staticmethod(at_most)

    def __post_init__(self) -> None:
        _check_divergence(self)

    @property
    def span(self) -> str:
        return _SPAN_OF_LEVEL[self.level]

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)


@dataclass(frozen=True)
class K3(Rejection):
    """Keep where ratio - 1 - log ratio <= bound, at a level (see ``K1``); seq-max is TRM (2512.23075).

    Args:
        bound: nats.
        level, mismatch: as in ``K1``.
    """

    bound: Number
    level: Level = "seq-mean"
    mismatch: Mismatch = "engine"

    measure = staticmethod(k3)
    rule = staticmethod(at_most)

    def __post_init__(self) -> None:
        _check_divergence(self)

    @property
    def span(self) -> str:
        return _SPAN_OF_LEVEL[self.level]

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)


def _check_divergence(owner: K2 | K3) -> None:
    check_number(owner, "bound", low=0)
    check_choice(owner, "level", _SPAN_OF_LEVEL)
    check_mismatch(owner)


def raw(raw_log_ratio: Any) -> Any:
    return raw_log_ratio


@dataclass(frozen=True)
class Veto(Rejection):
    """Drop a sequence that has a valid token whose unclamped ratio is below ``threshold`` (slime, verl).

    Args:
        threshold: absolute bound on the ratio.
        mismatch: the pair of policies that is compared.
    """

    threshold: Number = 1e-4
    mismatch: Mismatch = "engine"

    span = "sequence_min"
    measure = staticmethod(raw)
    rule = staticmethod(at_least)
    counts_as = "vetoed"

    def __post_init__(self) -> None:
        check_number(self, "threshold", low=0, above=True)
        check_mismatch(self)

    @cached_property
    def params(self) -> Threshold:
        return Threshold(_log(self.threshold))


def negative_and_far(value: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (advantage >= 0) | (-value <= p.bound)


@dataclass(frozen=True)
class OPSM(Rejection):
    """Keep where A >= 0, or the sequence's mean log-ratio has fallen by at most ``delta`` (DeepSeek-V3.2).

    Args:
        delta: nats; unpublished, .5 is a guess in use.
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.
    """

    delta: Number = 0.5
    mismatch: Mismatch | None = None

    span = "geometric"
    rule = staticmethod(negative_and_far)

    def __post_init__(self) -> None:
        check_number(self, "delta")
        check_mismatch(self, optional=True)

    @property
    def params(self) -> Threshold:
        return Threshold(self.delta)


def bernoulli_kl(logp: Any, anchor_logp: Any) -> Any:
    """KL divergence (nats) of sampling this token or another, from the second policy to the first."""
    first, second = ops.exp(logp), ops.exp(anchor_logp)
    # The floor keeps the logarithm finite where a probability is 1.
    first_rest, second_rest = ops.maximum(1 - first, 1e-12), ops.maximum(1 - second, 1e-12)
    return second * (anchor_logp - logp) + second_rest * (ops.log(second_rest) - ops.log(first_rest))


def both_bernoulli_kls(value: Any, logp: Any, anchor_logp: Any, p: Any) -> Any:
    forward, backward = bernoulli_kl(anchor_logp, logp), bernoulli_kl(logp, anchor_logp)
    return ops.zeros_like(value) + 1, (forward <= p.bound) & (backward <= p.bound)


@dataclass(frozen=True)
class BinaryKL(Rejection):
    """Keep tokens whose two Bernoulli KL divergences are both <= ``bound`` (AReaL's KPop).

    The Bernoulli distribution is that of sampling this token or another; the divergence is taken in both directions.

    Args:
        bound: nats.
        mismatch: the pair of policies that is compared.
    """

    bound: Number
    mismatch: Mismatch = "engine"

    span = "token"
    rule = staticmethod(both_bernoulli_kls)

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        check_mismatch(self)

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
    outward = ((advantage > 0) & (logp > anchor_logp)) | ((advantage <= 0) & (logp < anchor_logp))
    return ops.zeros_like(value) + 1, (bernoulli_kl(logp, anchor_logp) <= p.delta) | ~outward


@dataclass(frozen=True)
class DPPO(Rejection):
    """Drop tokens whose probability moved too far in the direction that the advantage pushes (2602.04879).

    Args:
        divergence: "tv": drop where the probability rose by more than ``high`` (A > 0), or fell by more than ``low``
            (A <= 0); "kl": drop where the Bernoulli KL of the first policy from the second is above ``delta`` and the
            token has moved in the direction that the advantage pushes.
        low, high: differences of probabilities. delta: nats.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: Number = 0.2
    high: Number = 0.2
    delta: Number = 0.05
    mismatch: Mismatch = "total"

    span = "token"

    def __post_init__(self) -> None:
        check_choice(self, "divergence", ("tv", "kl"))
        for field in ("low", "high", "delta"):
            check_number(self, field, low=0)
        check_mismatch(self)

    @property
    def rule(self) -> Pointwise:
        return probability_shift if self.divergence == "tv" else bernoulli_kl_outward

    @property
    def params(self) -> Shift:
        return Shift(self.low, self.high, self.delta)


def distance_from_one(log_ratio: Any) -> Any:
    return ops.abs(ops.exp(log_ratio) - 1)


def within_or_inward(value: Any, log_ratio: Any, advantage: Any, p: Any) -> Any:
    outward = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    return ops.zeros_like(value) + 1, (value <= p.bound) | ~outward


def probability_distance(logp: Any, anchor_logp: Any) -> Any:
    return ops.abs(ops.exp(logp) - ops.exp(anchor_logp))


_DIVERGENCES: dict[str, Pointwise] = {"ratio": distance_from_one, "tv": probability_distance, "kl": bernoulli_kl}


@dataclass(frozen=True)
class VACO(Rejection):
    """Drop the outward tokens (A * log ratio > 0) of sequences whose mean divergence is above ``bound`` (2603.01365).

    Args:
        bound: on the mean of the divergence over the sequence's valid tokens.
        divergence: of a token: "ratio", |ratio - 1|; "tv", the distance of its two probabilities; "kl", the Bernoulli
            KL divergence (nats) of sampling it or another, of the second policy from the first.
        increase_only: False drops every token of such a sequence, not only the outward ones.
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.
    """

    bound: Number = 0.2
    divergence: Literal["ratio", "tv", "kl"] = "ratio"
    increase_only: bool = True
    mismatch: Mismatch | None = None

    span = "geometric"

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        check_choice(self, "divergence", _DIVERGENCES)
        check_choice(self, "increase_only", (True, False))
        check_mismatch(self, optional=True)

    @property
    def measure(self) -> Pointwise:
        return _DIVERGENCES[self.divergence]

    @property
    def rule(self) -> Pointwise:
        return within_or_inward if self.increase_only else at_most

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)
