"""Ratios: how far apart two policies are, and over which span.

A ratio gives, for every token, the log-ratio it is multiplied by and that log-ratio's slope: its derivative with
respect to the token's own log-prob.  In the *token form* the slope is 1: a sequence, turn or prefix ratio multiplies
the token's own gradient.  Only PowerMean and ClippedGeometric have another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from offcorr.batch import LOG_LIMIT, Tokens
from offcorr.shapes import Mismatch, PerToken
from offcorr.stages import ops
from offcorr.stages.base import Stage, apply, check_number, check_pair
from offcorr.stages.spans import SPANS


def own(log_ratio: Any) -> Any:
    return log_ratio


def as_is(value: Any) -> Any:
    return value


def one(log_ratio: Any) -> Any:
    return ops.zeros_like(log_ratio) + 1


@dataclass(frozen=True)
class Ratio(Stage, kind="ratio"):
    mismatch: Mismatch = field(default="staleness", kw_only=True)

    POINTWISE: ClassVar[tuple[str, ...]] = ("measure", "read", "slope")
    measure: ClassVar[Any] = staticmethod(own)
    read: ClassVar[Any] = staticmethod(as_is)
    slope: ClassVar[Any] = staticmethod(one)

    def __post_init__(self) -> None:
        check_pair(self)

    @property
    def span(self) -> str:
        """Which of ``kernels.scans.SPANS`` carries the measure."""
        return self.name()

    def __call__(self, tokens: Tokens) -> tuple[PerToken, PerToken]:
        """(log-ratio, slope), each [B, T]; the log-ratio is not yet clamped for ``exp``."""
        inputs = tokens.inputs(self.mismatch)
        measured = torch.where(tokens.mask, apply(self.measure, inputs, self.params), 0)
        inputs["value"] = SPANS[self.span](measured, tokens.rows)
        inputs["value"] = apply(self.read, inputs, self.params).clamp(-LOG_LIMIT, LOG_LIMIT)
        return inputs["value"], apply(self.slope, inputs, self.params)


class Token(Ratio):
    """The token's own ratio."""


class Sequence(Ratio):
    """The product over the sequence's valid tokens."""


class Geometric(Ratio):
    """The T-th root of the product: the exponential of the mean log-ratio (GSPO, 2507.18071)."""


class Turn(Ratio):
    """The geometric ratio of the turn that the token is in (2511.20718)."""


class Prefix(Ratio):
    """The product over the valid tokens up to and including this one."""


class PrefixGeometric(Ratio):
    """The t-th root of the prefix ratio, t counting valid tokens."""


@dataclass(frozen=True)
class MinPrefix(Ratio):
    """The token's ratio times the smallest before it (MinPRO, 2601.22718).

    Args:
        bounded: the smallest is never above 1.
    """

    bounded: bool = False

    @property
    def span(self) -> str:
        return "bounded_min_prefix" if self.bounded else "min_prefix"


class Power(NamedTuple):
    power: float


def powered(log_ratio: Any, p: Any) -> Any:
    return log_ratio * p.power


def rooted(value: Any, p: Any) -> Any:
    return value / p.power


def power_slope(log_ratio: Any, value: Any, p: Any) -> Any:
    return ops.exp(p.power * (log_ratio - value))


@dataclass(frozen=True)
class PowerMean(Ratio):
    """(mean r_t^power)^(1/power) over the sequence; slope (r_t / s)^power (HolderPO, 2605.12058).

    Args:
        power: 1 is the arithmetic mean, 0 the geometric one (as the limit).
    """

    power: float = 1.0

    measure: ClassVar[Any] = staticmethod(powered)
    read: ClassVar[Any] = staticmethod(rooted)
    slope: ClassVar[Any] = staticmethod(power_slope)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "power")

    @property
    def span(self) -> str:
        return "log_mean_exp"

    @property
    def params(self) -> Power:
        # At 1e-12 log_mean_exp gives the limit to full precision, and power 0 needs no branch.
        return Power(self.power if abs(self.power) > 1e-12 else 1e-12)


class LogBand(NamedTuple):
    low: float
    high: float


def one_sided(log_ratio: Any, advantage: Any, p: Any) -> Any:
    return ops.where(advantage > 0, ops.minimum(log_ratio, p.high), ops.maximum(log_ratio, p.low))


def one_sided_slope(log_ratio: Any, advantage: Any, p: Any) -> Any:
    clipped = ((advantage > 0) & (log_ratio > p.high)) | ((advantage <= 0) & (log_ratio < p.low))
    return ops.where(clipped, 0.0, ops.zeros_like(log_ratio) + 1)


@dataclass(frozen=True)
class ClippedGeometric(Ratio):
    """The geometric ratio of one-sidedly clipped token ratios (GMPO, 2507.20673); slope 0 on clipped tokens.

    Args:
        eps_low, eps_high: distances from 0 in log space; A > 0 is clipped above, A <= 0 below.
    """

    eps_low: float = 0.4
    eps_high: float = 0.4

    measure: ClassVar[Any] = staticmethod(one_sided)
    slope: ClassVar[Any] = staticmethod(one_sided_slope)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "eps_low", low=0)
        check_number(self, "eps_high", low=0)

    @property
    def span(self) -> str:
        return "geometric"

    @property
    def params(self) -> LogBand:
        return LogBand(-self.eps_low, self.eps_high)
