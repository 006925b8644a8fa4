"""Gates: how the surrogate limits the update.

A gate's function returns the surrogate and its derivative with respect to the log-ratio.  The slope of the ratio turns
that into the derivative with respect to the token's log-prob.  A *detached* gate takes the ratio as a constant and lets
the gradient through ``logp`` alone: it returns the derivative with respect to ``logp``, and the slope is 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from offcorr.batch import LOG_LIMIT
from offcorr.stages import ops
from offcorr.stages.base import Number, Pointwise, Stage
from offcorr.stages.checks import check_number, check_order, warn_of_bounds, warn_of_distances

__all__ = [
    "Clip",
    "DetachedClip",
    "DetachedRatio",
    "Gate",
    "Overlap",
    "PositionClip",
    "ScoreFunction",
    "SoftClip",
    "Unclipped",
]


class Gate(Stage, kind="gate"):
    """Base class: a frozen dataclass with a pointwise ``surrogate``."""

    PARTS: ClassVar[Mapping[str, int]] = {"surrogate": 2}

    @property
    @abstractmethod
    def surrogate(self) -> Pointwise:
        """The function that returns (surrogate, its derivative in the log-ratio; in ``logp`` if ``detached``)."""

    detached: bool = False
    """Whether the ratio is a constant to the gradient."""
    log_limit: float = LOG_LIMIT
    """Upper limit of the log-ratio (nats) before ``exp``, straight-through."""
    uses_ratio: bool = True
    """Whether the surrogate depends on the ratio."""

    @property
    def scales_with_advantage(self) -> bool:
        """Whether advantage 0 means coefficient 0."""
        return True


def score_function(logp: Any, advantage: Any) -> Any:
    return advantage * logp, advantage


@dataclass(frozen=True)
class ScoreFunction(Gate):
    """A log pi: no ratio, multiplier 1."""

    surrogate = staticmethod(score_function)
    detached = True
    uses_ratio = False


def detached_ratio(log_ratio: Any, logp: Any, advantage: Any) -> Any:
    gradient = ops.exp(log_ratio) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class DetachedRatio(Gate):
    """sg(ratio) A log pi: multiplier ratio."""

    surrogate = staticmethod(detached_ratio)
    detached = True


def overlap(log_ratio: Any, logp: Any, advantage: Any) -> Any:
    gradient = 2 * ops.sigmoid(log_ratio) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class Overlap(Gate):
    """sg(2 ratio / (1 + ratio)) A log pi: multiplier the harmonic mean of 1 and the ratio, at most 2.

    It is the ratio of the policy to the even mixture of both policies.
    """

    surrogate = staticmethod(overlap)
    detached = True


def unclipped(log_ratio: Any, advantage: Any) -> Any:
    surrogate = ops.exp(log_ratio) * advantage
    return surrogate, surrogate


@dataclass(frozen=True)
class Unclipped(Gate):
    """ratio A, with the gradient through the ratio: multiplier ratio * slope."""

    surrogate = staticmethod(unclipped)


class ClipBounds(NamedTuple):
    low: Number
    high: Number
    dual: Number


def clipped(ratio: Any, advantage: Any, low: Any, high: Any, dual: Any) -> Any:
    """PPO's clipped surrogate, and its derivative in the log-ratio."""
    inside = ops.clamp(ratio, low, high)
    surrogate = ops.minimum(ratio * advantage, inside * advantage)
    surrogate = ops.where(advantage < 0, ops.maximum(surrogate, dual * advantage), surrogate)
    blocked = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & ((ratio < low) | (ratio > dual)))
    return surrogate, ops.where(blocked, 0.0, ratio * advantage)


def clip(log_ratio: Any, advantage: Any, p: Any) -> Any:
    return clipped(ops.exp(log_ratio), advantage, p.low, p.high, p.dual)


@dataclass(frozen=True)
class Clip(Gate):
    """min(ratio A, clip(ratio) A): PPO's clipped surrogate (1707.06347).

    The multiplier is the ratio, unless the ratio is outside [1 - eps_low, 1 + eps_high] on the side that the advantage
    pushes towards: then it is 0.

    Args:
        eps_low, eps_high: distances from 1.
        dual_clip: for A < 0 the loss is at most ``-dual_clip * A``, and the multiplier is 0 beyond; None: off.
    """

    eps_low: Number = 0.2
    eps_high: Number = 0.2
    dual_clip: Number | None = None

    surrogate = staticmethod(clip)

    def __post_init__(self) -> None:
        check_number(self, "eps_low", low=0, high=1)
        check_number(self, "eps_high", low=0)
        check_number(self, "dual_clip", low=1, optional=True)
        warn_of_distances("Clip", eps_low=self.eps_low, eps_high=self.eps_high)

    @cached_property  # 1 - eps of a tensor is a launch
    def params(self) -> ClipBounds:
        dual = ops.UNBOUNDED if self.dual_clip is None else self.dual_clip
        return ClipBounds(1 - self.eps_low, 1 + self.eps_high, dual)


class RatioBounds(NamedTuple):
    low: Number
    high: Number


def detached_clip(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    gradient = ops.clamp(ops.exp(log_ratio), p.low, p.high) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class DetachedClip(Gate):
    """sg(clip(ratio, low, cap)) A log pi: multiplier the clipped ratio, never 0 at ``low`` > 0 (CISPO, 2506.13585).

    Warns where 1, the ratio of on-policy tokens, is outside.

    Args:
        cap: absolute upper bound on the ratio; None: none.
        low: absolute lower bound.
    """

    cap: Number | None = 5.0
    low: Number = 0.0

    surrogate = staticmethod(detached_clip)
    detached = True

    def __post_init__(self) -> None:
        check_number(self, "cap", low=0, above=True, optional=True)
        check_number(self, "low", low=0)
        if self.cap is not None:
            check_order(self, "low", "cap")
        warn_of_bounds("DetachedClip", "are multiplied by it", "cap", low=self.low, cap=self.cap)

    @property
    def params(self) -> RatioBounds:
        return RatioBounds(self.low, ops.UNBOUNDED if self.cap is None else self.cap)


class Temperatures(NamedTuple):
    positive: Number
    negative: Number


def soft_clip(log_ratio: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    tau = ops.where(advantage > 0, ops.zeros_like(ratio) + p.positive, p.negative)
    above, below = ops.sigmoid(tau * (ratio - 1)), ops.sigmoid(tau * (1 - ratio))
    return 4 / tau * above * advantage, 4 * above * below * ratio * advantage


@dataclass(frozen=True)
class SoftClip(Gate):
    """(4 / tau) sigmoid(tau (ratio - 1)) A: multiplier ratio * sech^2(tau (ratio - 1) / 2) (SAPO, 2511.20347).

    Args:
        tau_pos, tau_neg: temperature for A > 0 and A <= 0.
    """

    tau_pos: Number = 1.0
    tau_neg: Number = 1.05

    surrogate = staticmethod(soft_clip)

    def __post_init__(self) -> None:
        check_number(self, "tau_pos", low=0, above=True)
        check_number(self, "tau_neg", low=0, above=True)

    @property
    def params(self) -> Temperatures:
        return Temperatures(self.tau_pos, self.tau_neg)


class PositionBounds(NamedTuple):
    low: Number
    high: Number
    dual: Number
    power: Number


def position_clip(log_ratio: Any, advantage: Any, position: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    width = ops.exp(p.power * ops.log(ops.maximum(position, 1.0)))
    low, high, dual = ops.exp(-p.low * width), ops.exp(p.high * width), ops.exp(p.dual * width)
    return clipped(ratio, advantage, low, high, dual)


@dataclass(frozen=True)
class PositionClip(Gate):
    """Clip whose log-bounds change with position: [-log_low t^power, log_high t^power] (CTPO, 2605.07331).

    t is the 1-based count of valid tokens.  The log-ratio is capped at 10 nats before ``exp``, from above alone.

    Args:
        log_low, log_high: nats at t = 1.
        power: of t: above 0 the bounds widen with the position, below 0 they narrow.
        log_dual: for A < 0 the loss is at most -exp(log_dual t^power) A; None: ``log_high``.
    """

    log_low: Number = 0.025
    log_high: Number = 0.05
    power: Number = 0.5
    log_dual: Number | None = None

    surrogate = staticmethod(position_clip)
    log_limit = 10.0

    def __post_init__(self) -> None:
        for field in ("log_low", "log_high"):
            check_number(self, field, low=0)
        check_number(self, "power")
        check_number(self, "log_dual", low=0, optional=True)
        warn_of_distances("PositionClip", log=True, log_low=self.log_low, log_high=self.log_high)

    @property
    def params(self) -> PositionBounds:
        dual = self.log_high if self.log_dual is None else self.log_dual
        return PositionBounds(self.log_low, self.log_high, dual, self.power)
