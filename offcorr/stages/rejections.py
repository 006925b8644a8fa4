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
from offcorr.stages.checks import (
    check_choice,
    check_flag,
    check_mismatch,
    check_number,
    check_order,
    warn_of_bounds,
    warn_of_differences,
    warn_of_unused,
)

__all__ = [
    "BinaryKL",
    "CPPO",
    "DPPO",
    "ESTR",
    "Geometric",
    "K1",
    "K2",
    "K3",
    "OPSM",
    "Rejection",
    "SquareBound",
    "SuffixVeto",
    "VACO",
    "Veto",
]

Level = Literal["token", "seq-sum", "seq-mean", "seq-max"]
_SPAN_OF_LEVEL = {
    "token": "token",
    "seq-sum": "sequence",
    "seq-mean": "geometric",
    "seq-max": "sequence_max",
}


class Rejection(Stage, kind="rejection"):
    """Base class.  ``rule`` gives (1, kept); a factor other than 1 is refused where it runs."""

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
        warn_of_bounds(type(self).__name__, "are dropped", low=self.low, high=self.high)
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
        warn_of_bounds(type(self).__name__, "are dropped", low=self.low, high=self.high)
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
        warn_of_bounds("Veto", "are dropped with their sequences", distances=False, threshold=self.threshold)
        check_mismatch(self)

    @cached_property
    def params(self) -> Threshold:
        return Threshold(_log(self.threshold))


def positive_or_before(value: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (advantage >= 0) | (value >= p.bound)


@dataclass(frozen=True)
class SuffixVeto(Rejection):
    """Drop the tokens with A < 0 that follow one whose unclamped ratio is below ``threshold`` (mu-GRPO, 2605.17570).

    That token itself and everything before it are kept, and so is every token with A >= 0.

    Args:
        threshold: absolute bound on the ratio.
        mismatch: the pair of policies that is compared.

    >>> SuffixVeto(1e-4)
    SuffixVeto(threshold=0.0001, mismatch='total')
    """

    threshold: Number = 1e-4
    mismatch: Mismatch = "total"

    span = "min_before"
    measure = staticmethod(raw)
    rule = staticmethod(positive_or_before)
    counts_as = "vetoed"

    def __post_init__(self) -> None:
        check_number(self, "threshold", low=0, above=True)
        warn_of_bounds("SuffixVeto", "veto what follows them", distances=False, threshold=self.threshold)
        check_mismatch(self)

    @cached_property
    def params(self) -> Threshold:
        return Threshold(_log(self.threshold))


def negative_and_far(value: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (advantage >= 0) | (-value <= p.bound)


def negative_on_average_and_far(value: Any, mean_advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (mean_advantage >= 0) | (-value <= p.bound)


@dataclass(frozen=True)
class OPSM(Rejection):
    """Keep where A >= 0, or the sequence's mean log-ratio has fallen by at most ``delta`` (DeepSeek-V3.2).

    Args:
        delta: nats; unpublished, .5 is a guess in use.
        level: what A is: "token", the token's own advantage; "sequence", the mean over the sequence, so that it is
            kept or dropped as a whole. With one advantage per sequence both are the same.
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.
    """

    delta: Number = 0.5
    mismatch: Mismatch | None = None
    level: Literal["token", "sequence"] = "token"

    span = "geometric"

    def __post_init__(self) -> None:
        check_number(self, "delta", low=0)
        check_choice(self, "level", ("token", "sequence"))
        check_mismatch(self, optional=True)

    @property
    def rule(self) -> Pointwise:
        return negative_and_far if self.level == "token" else negative_on_average_and_far

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
        low, high: differences of probabilities, for "tv".
        delta: nats, for "kl".

    Raises:
        ValueError: an option is no number >= 0.
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
        warn_of_unused(self, "divergence", {"tv": ("delta",), "kl": ("low", "high")}[self.divergence])
        if self.divergence == "tv":
            warn_of_differences("DPPO", low=self.low, high=self.high)
        check_mismatch(self)

    @property
    def rule(self) -> Pointwise:
        return probability_shift if self.divergence == "tv" else bernoulli_kl_outward

    @property
    def params(self) -> Shift:
        return Shift(self.low, self.high, self.delta)


def distance_from_one(log_ratio: Any) -> Any:
    return ops.abs(ops.exp(log_ratio) - 1)


def outward(log_ratio: Any, advantage: Any) -> Any:
    """Tokens whose probability has moved in the direction that the advantage pushes."""
    return ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))


def within_or_inward(value: Any, log_ratio: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (value <= p.bound) | ~outward(log_ratio, advantage)


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
        if self.divergence == "tv":
            warn_of_differences("VACO", bound=self.bound)
        check_flag(self, "increase_only")
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


class Budget(NamedTuple):
    delta: Number
    w_min: Number
    budget_low: Number
    budget_high: Number
    quantile: Number


def within_budget_or_inward(value: Any, log_ratio: Any, advantage: Any) -> Any:
    return ops.zeros_like(value) + 1, (value >= 0) | ~outward(log_ratio, advantage)


@dataclass(frozen=True)
class CPPO(Rejection):
    """Drop the outward tokens (A * log ratio > 0) that exceed what their sequence has left to drift (2606.10968).

    The shift G_t is the distance of the token's two probabilities, and its weight w_t falls linearly from 1 at the
    first valid token to ``w_min`` at the last.  A token is kept where w_t G_t <= C_t, with
    C_t = min(delta, delta + sum over s < t of w_s (b - G_s)), which may be negative: every valid token before it has
    spent its shift, dropped ones too.  b is the quantile of the sequence's own shifts, clamped to
    [budget_low, budget_high].  On a GPU the thresholds are computed by torch (the quantile needs a sort of each row),
    and the kernel does the rest.

    Args:
        delta: largest weighted shift of one token, a difference of probabilities.
        w_min: weight of the last token, from 0 to 1.
        budget_low, budget_high: bounds on the mean shift b that a sequence may spend per token.
        quantile: from 0 to 1, linear between order statistics.
        mismatch: the pair of policies that is compared.

    >>> CPPO(budget_low=0.015, budget_high=0.015).delta  # a constant budget
    0.2
    """

    delta: Number = 0.2
    w_min: Number = 0.8
    budget_low: Number = 0.02
    budget_high: Number = 0.04
    quantile: Number = 0.9
    mismatch: Mismatch = "total"

    span = "budget_margin"
    measure = staticmethod(probability_distance)
    rule = staticmethod(within_budget_or_inward)

    def __post_init__(self) -> None:
        for field in ("delta", "budget_low", "budget_high"):
            check_number(self, field, low=0)
        check_order(self, "budget_low", "budget_high")
        for field in ("w_min", "quantile"):
            check_number(self, field, low=0, high=1)
        check_mismatch(self)

    @property
    def params(self) -> Budget:
        return Budget(self.delta, self.w_min, self.budget_low, self.budget_high, self.quantile)


class PerEntropy(NamedTuple):
    tau: Number
    floor: Number


def square_within_entropy(value: Any, entropy: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value * value <= p.tau * (entropy + p.floor)


@dataclass(frozen=True)
class ESTR(Rejection):
    """Keep where log^2(ratio) <= tau (H + floor), with H the entropy of the token's distribution (2607.22186).

    The ratio is not clamped.  The paper's H is the sampler's; ``Batch.entropy`` is the trainer's, an approximation
    unless the caller puts the sampler's there.  A batch without it is refused, and a token whose entropy is NaN is
    dropped.

    Args:
        tau: nats; no default, because no value has been published where it could be read.
        floor: nats, so that a token without a choice may move at all.
        mismatch: the pair of policies that is compared.

    >>> ESTR(tau=0.1).floor
    0.01
    """

    tau: Number
    floor: Number = 0.01
    mismatch: Mismatch = "total"

    span = "token"
    measure = staticmethod(raw)
    rule = staticmethod(square_within_entropy)

    def __post_init__(self) -> None:
        check_number(self, "tau", low=0)
        check_number(self, "floor", low=0)
        check_mismatch(self)

    @property
    def params(self) -> PerEntropy:
        return PerEntropy(self.tau, self.floor)


def square_within(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, value * value <= p.bound


def square_within_or_inward(value: Any, advantage: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, (value * value <= p.bound) | ~outward(value, advantage)


@dataclass(frozen=True)
class SquareBound(Rejection):
    """Keep where log^2(ratio) <= bound, of a ratio that is not clamped (M2PO's mask with its threshold known).

    Args:
        bound: nats^2.
        tokens: "outward" keeps every token with A * log ratio <= 0, too; "all" does not.
        mismatch: the pair of policies that is compared.
    """

    bound: Number
    tokens: Literal["outward", "all"] = "outward"
    mismatch: Mismatch = "staleness"

    span = "token"
    measure = staticmethod(raw)

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0)
        check_choice(self, "tokens", ("outward", "all"))
        check_mismatch(self)

    @property
    def rule(self) -> Pointwise:
        return square_within_or_inward if self.tokens == "outward" else square_within

    @property
    def params(self) -> Threshold:
        return Threshold(self.bound)
