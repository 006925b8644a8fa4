"""Variants of near_overlap, to see which part of it matters and whether another does better; for ``offcorr bench``.

    offcorr bench loop near_overlap benchmarks/near_variants.py:root benchmarks/near_variants.py:gated ...

``docs/lab.md`` has their results.  None of them is a method of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr import Correction, controllers, gates, ops, ratios, rejections, weights
from offcorr.batch import Tokens

NEAR = ratios.Nearby(0.8)


class Floors(NamedTuple):
    positive: float


def floored(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    c = 2 * ops.sigmoid(log_ratio)
    gradient = ops.where(advantage > 0, p.positive + (1 - p.positive) * c, c) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class Floored(gates.Gate):
    """The overlap, with a weight of at least ``positive`` where A > 0."""

    positive: float = 0.5

    surrogate = staticmethod(floored)
    detached = True

    @property
    def params(self) -> Floors:
        return Floors(self.positive)


class Share(NamedTuple):
    policy: float


def in_mixture(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(log_ratio)
    gradient = ratio / (p.policy * ratio + 1 - p.policy) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class InMixture(gates.Gate):
    """The ratio to a mixture of both policies with another share of the policy than 1/2; the bound is 1 / share."""

    policy: float = 0.5

    surrogate = staticmethod(in_mixture)
    detached = True

    @property
    def params(self) -> Share:
        return Share(self.policy)


def square_root(log_ratio: Any, logp: Any, advantage: Any) -> Any:
    gradient = ops.exp(log_ratio / 2) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class SquareRoot(gates.Gate):
    """sqrt(w): near w = 1 the same as the overlap, without its bound."""

    surrogate = staticmethod(square_root)
    detached = True


@dataclass(frozen=True, eq=False)
class Autocorrelation:
    """Sums over neighbouring valid tokens of d_t d_(t+1), and of d_t^2; merges by adding."""

    sums: Tensor

    def merge(self, other: Autocorrelation) -> Autocorrelation:
        return Autocorrelation(self.sums + other.sums)


class Lam(NamedTuple):
    lam: Any


def overlap(value: Any) -> Any:
    return 2 * ops.sigmoid(value), value == value


@dataclass(frozen=True, eq=False)
class NearWeight(weights.Weight):
    """The overlap as a weight, with lam as a number on the device."""

    lam: Any

    mismatch = None
    span = "nearby"
    counts_as = ""
    rule = staticmethod(overlap)

    @property
    def params(self) -> Lam:
        return Lam(self.lam)


@dataclass(frozen=True)
class MeasuredLam(controllers.Controller):
    """near_overlap with lam the correlation of the log-ratios of neighbouring tokens in this batch, from 0 to .98."""

    becomes, couples = "weight", "batch"

    def statistics(self, tokens: Tokens) -> Autocorrelation:
        pair = "staleness" if tokens.batch.rollout_logp is None else "total"
        d = torch.where(tokens.mask, tokens.log_ratio(pair).clamped, 0)
        pairs = torch.stack([(d[:, 1:] * d[:, :-1]).sum(dtype=torch.float64), d.square().sum(dtype=torch.float64)])
        return Autocorrelation(pairs)

    def resolve(self, statistics: Autocorrelation) -> NearWeight:
        joint, own = statistics.sums
        return NearWeight((joint / own.clamp(min=1e-12)).clamp(0, 0.98))


def of(gate: Any, **options: Any) -> Correction:
    return Correction(ratio=NEAR, gate=gate, aggregate="token-mean", **options)


gated = of(gates.Overlap(), reject=rejections.DPPO(low=0.2, high=0.2, mismatch="staleness"))
"""A trust region on top: tokens whose probability has moved by more than .2 outwards are dropped."""
capped = of(gates.DetachedClip(cap=1.0))
"""min(w, 1) in place of the smooth bound."""
capped_at_2 = of(gates.DetachedClip(cap=2.0))
"""min(w, 2): the same bound, without the harmonic mean."""
unbounded = of(gates.DetachedRatio())
"""w itself."""
root = of(SquareRoot())
"""sqrt(w)."""
quarter = of(InMixture(0.25))
"""A mixture with a quarter of the policy: the bound is 4."""
three_quarters = of(InMixture(0.75))
"""A mixture with three quarters of the policy: the bound is 4/3."""
positives = of(Floored(1.0))
"""Weight 1 where A > 0, the overlap where A < 0."""
half_positives = of(Floored(0.5))
"""Halfway between the two where A > 0."""
measured = Correction(ratio=None, gate=gates.ScoreFunction(), weight=MeasuredLam(), aggregate="token-mean")
"""lam from the batch: see ``MeasuredLam``."""
