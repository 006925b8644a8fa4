"""Ratios: how far apart two policies are, and over which span.

A ratio gives, for every token, the log-ratio that multiplies it and the slope of that log-ratio: its derivative with
respect to the token's own log-prob.  In the *token form* the slope is 1, so that a sequence, turn or prefix ratio
multiplies the token's own gradient.  Only PowerMean and ClippedGeometric have another slope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from offcorr.shapes import Mismatch
from offcorr.stages import ops
from offcorr.stages.base import Number, Pointwise, Stage, own
from offcorr.stages.checks import check_flag, check_mismatch, check_number, warn_of_distances

__all__ = [
    "ClippedGeometric",
    "Geometric",
    "MinPrefix",
    "Nearby",
    "PowerMean",
    "Prefix",
    "PrefixGeometric",
    "Ratio",
    "Sequence",
    "Token",
    "Turn",
]


def token_form(value: Any) -> Any:
    return value, ops.zeros_like(value) + 1


@dataclass(frozen=True)
class Ratio(Stage, kind="ratio"):
    """Base class.  ``rule`` gives (log-ratio, slope); ``span`` carries ``measure`` over the row.

    Args:
        mismatch: the pair of policies that is compared.
    """

    mismatch: Mismatch = field(default="staleness", kw_only=True)

    PARTS: ClassVar[Mapping[str, int]] = {"measure": 1, "rule": 2}

    def __post_init__(self) -> None:
        check_mismatch(self)

    @property
    def measure(self) -> Pointwise:
        """One number per token, carried over the span."""
        return own

    @property
    def span(self) -> str:
        """A name of ``offcorr.spans``."""
        return "token"

    @property
    def rule(self) -> Pointwise:
        """The function that gives (log-ratio, slope)."""
        return token_form


class Token(Ratio):
    """The token's own ratio."""


class Sequence(Ratio):
    """The product over the sequence's valid tokens."""

    span = "sequence"


class Geometric(Ratio):
    """The T-th root of the product: the exponential of the mean log-ratio (GSPO, 2507.18071)."""

    span = "geometric"


class Turn(Ratio):
    """The geometric ratio of the turn that the token is in (2511.20718)."""

    span = "turn"


class Prefix(Ratio):
    """The product over the valid tokens up to and including this one."""

    span = "prefix"


class PrefixGeometric(Ratio):
    """The t-th root of the prefix ratio, t counting valid tokens."""

    span = "prefix_geometric"


@dataclass(frozen=True)
class MinPrefix(Ratio):
    """The token's ratio times the smallest ratio before it (MinPRO, 2601.22718); for the first token its ratio alone.

    Args:
        bounded: the smallest ratio is taken to be at most 1.
    """

    bounded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "bounded")

    @property
    def span(self) -> str:
        return "bounded_min_prefix" if self.bounded else "min_prefix"


class Decay(NamedTuple):
    lam: Number


@dataclass(frozen=True)
class Nearby(Ratio):
    """The product over the sequence of r_u^(lam^n), n the number of valid tokens from u to this one, on either side.

    Args:
        lam: between 0, the token's own ratio, and 1, the ratio of the sequence.
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.
    """

    lam: Number = 0.8
    mismatch: Mismatch | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    span = "nearby"

    def __post_init__(self) -> None:
        check_number(self, "lam", low=0, high=1)
        check_mismatch(self, optional=True)

    @property
    def params(self) -> Decay:
        return Decay(self.lam)


class Power(NamedTuple):
    power: float


def powered(log_ratio: Any, p: Any) -> Any:
    return log_ratio * p.power


def power_mean(log_ratio: Any, value: Any, p: Any) -> Any:
    mean = value / p.power
    return mean, ops.exp(p.power * (log_ratio - mean))


@dataclass(frozen=True)
class PowerMean(Ratio):
    """(mean r_t^power)^(1/power) over the sequence; slope (r_t / s)^power (HolderPO, 2605.12058).

    Args:
        power: 1 is the arithmetic mean, 0 the geometric one (as the limit).
    """

    power: float = 1.0

    measure = staticmethod(powered)
    rule = staticmethod(power_mean)
    span = "log_mean_exp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "power")

    @property
    def params(self) -> Power:
        # At 1e-12 log_mean_exp gives the limit to full precision, so that power 0 needs no branch.
        return Power(self.power if abs(self.power) > 1e-12 else 1e-12)


class LogBounds(NamedTuple):
    low: float
    high: float


def clipped_on_one_side(log_ratio: Any, advantage: Any, p: Any) -> Any:
    return ops.where(advantage > 0, ops.minimum(log_ratio, p.high), ops.maximum(log_ratio, p.low))


def unclipped_tokens_only(value: Any, log_ratio: Any, advantage: Any, p: Any) -> Any:
    clipped = ((advantage > 0) & (log_ratio > p.high)) | ((advantage <= 0) & (log_ratio < p.low))
    return value, ops.where(clipped, 0.0, ops.zeros_like(value) + 1)


@dataclass(frozen=True)
class ClippedGeometric(Ratio):
    """The geometric ratio of token ratios clipped on one side (GMPO, 2507.20673); slope 0 on clipped tokens.

    Args:
        eps_low, eps_high: distances from 0 in log space (nats); A > 0 is clipped above, A <= 0 below.
    """

    eps_low: float = 0.4
    eps_high: float = 0.4

    measure = staticmethod(clipped_on_one_side)
    rule = staticmethod(unclipped_tokens_only)
    span = "geometric"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "eps_low", low=0)
        check_number(self, "eps_high", low=0)
        warn_of_distances("ClippedGeometric", log=True, eps_low=self.eps_low, eps_high=self.eps_high)

    @property
    def params(self) -> LogBounds:
        return LogBounds(-self.eps_low, self.eps_high)
