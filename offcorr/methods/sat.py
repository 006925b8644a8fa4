"""SAT: PPO's clip, narrower on the tokens whose log-ratio is in the tail of the batch.

    dL/dlogp_t = -c_t A_t / Z
    c_t = R_t, unless R_t > 1 + eps_high n_t for A_t > 0, or R_t < 1 - eps_low n_t for A_t < 0: then 0
    n_t = 1 / (1 + (|D_t| / q)^power) where |D_t| > q > 0, otherwise 1

D_t = logp_t - rollout_logp_t is the token's total log-ratio, unclamped in |D_t| and q, and R_t = exp(D_t); q is the
quantile of |D| over the valid tokens of the global batch, the order statistic number ceil(quantile n), without
interpolation; A_t is the advantage and Z the denominator of the aggregation. On a token in the tail the clip range is
less than half as wide.

With ``level="geometric"``, the paper's GSPO form, the sequence's geometric ratio takes the place of R_t and its
logarithm that of D_t: the mean of the valid tokens' log-ratios, each clamped to +-20.  Every valid token counts once in
the quantile, so that a long sequence weighs more.  Here the tail begins at (1 + 1e-6) q: two ways of adding up a mean
may differ in the last bit, which would gate the whole sequence at the quantile.

Source: 2607.18722, equations 3.1 to 3.6, as its authors' page gives them; the code could not be read. The page takes
the quantile per micro-batch, this method over the global batch. Older versions of the page say SATR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from offcorr.batch import Tokens
from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ops, ratios, spans
from offcorr.stages.base import Number, Pointwise
from offcorr.stages.checks import check_choice, check_mismatch, check_number, warn_of_distances
from offcorr.stages.controllers import Controller, Joined
from offcorr.stages.gates import clipped


class TailBounds(NamedTuple):
    eps_low: Number
    eps_high: Number
    tail: Number
    power: Number
    dual: Number


def narrowed(log_ratio: Any, advantage: Any, distance: Any, in_tail: Any, p: Any) -> Any:
    """PPO's clip, narrower on the tokens ``in_tail``, whose ``distance`` is beyond ``p.tail``."""
    share = 1 / (1 + ops.exp(p.power * ops.log(distance / p.tail)))
    share = ops.where(in_tail & (ops.minimum(distance, p.tail) > 0), share, 1.0)
    # On either side of 1 only one of the two bounds can be reached, so both may be narrowed.
    low, high = 1 - p.eps_low * share, 1 + p.eps_high * share
    return clipped(ops.exp(log_ratio), advantage, low, high, p.dual)


def narrowing_clip(log_ratio: Any, raw_log_ratio: Any, advantage: Any, p: Any) -> Any:
    distance = ops.abs(raw_log_ratio)
    return narrowed(log_ratio, advantage, distance, distance > p.tail, p)


def narrowing_clip_of_means(log_ratio: Any, value: Any, advantage: Any, p: Any) -> Any:
    distance = ops.abs(value)
    # ``p.tail`` is such a mean, too, but of another pass over the row, whose last bit may differ.
    return narrowed(log_ratio, advantage, distance, distance > p.tail * (1 + 1e-6), p)


@dataclass(frozen=True)
class NarrowingClip(gates.Gate):
    """Clip that narrows on tokens with |log ratio| > ``tail``.

    There both distances from 1 are multiplied by 1 / (1 + (|log ratio| / tail)^power), which is below 1/2.

    Args:
        eps_low, eps_high: distances from 1, outside the tail.
        tail: nats; 0: no token is in the tail.
        power: how fast the clip narrows.
        level: "token": the token's own log-ratio, not clamped, decides; "geometric": that of the geometric ratio which
            the gate stands behind, and the tail begins at (1 + 1e-6) ``tail``, for the rounding of a mean.
    """

    eps_low: Number
    eps_high: Number
    tail: Number
    power: Number
    level: Literal["token", "geometric"] = "token"

    @property
    def surrogate(self) -> Pointwise:
        return narrowing_clip if self.level == "token" else narrowing_clip_of_means

    def __post_init__(self) -> None:
        check_number(self, "eps_low", low=0, high=1)
        check_number(self, "eps_high", low=0)
        warn_of_distances(type(self).__name__, eps_low=self.eps_low, eps_high=self.eps_high)
        check_number(self, "tail", low=0)
        check_number(self, "power", low=0, above=True)
        check_choice(self, "level", ("token", "geometric"))

    @property
    def params(self) -> TailBounds:
        return TailBounds(self.eps_low, self.eps_high, self.tail, self.power, ops.UNBOUNDED)


@dataclass(frozen=True)
class TailClip(Controller):
    """``NarrowingClip`` whose tail begins at a quantile of |log ratio| over the global batch (SAT, 2607.18722).

    The quantile is the order statistic number ceil(quantile n) over the n valid tokens, without interpolation.
    Statistics are 4 bytes a position (8 in float64), masked or not.

    Args:
        eps_low, eps_high: distances from 1, outside the tail.
        quantile: above 0, at most 1.
        power: how fast the clip narrows.
        level: the ratio's. "geometric": the log-ratio is the mean of the sequence, which every valid token counts once.
        mismatch: the pair of policies that is compared; the ratio's.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    quantile: float = 0.9
    power: float = 2.0
    level: Literal["token", "geometric"] = "token"
    mismatch: Mismatch = "total"

    becomes, couples = "gate", "batch"

    def __post_init__(self) -> None:
        check_number(self, "eps_low", low=0, high=1)
        check_number(self, "eps_high", low=0)
        warn_of_distances(type(self).__name__, eps_low=self.eps_low, eps_high=self.eps_high)
        check_number(self, "quantile", low=0, high=1, above=True)
        check_number(self, "power", low=0, above=True)
        check_choice(self, "level", ("token", "geometric"))
        check_mismatch(self)

    def statistics(self, tokens: Tokens) -> Joined:
        log_ratio = tokens.log_ratio(self.mismatch)
        own = log_ratio.raw if self.level == "token" else spans.geometric(log_ratio.clamped, tokens.rows)
        return Joined.of(own.abs(), tokens.trainable)

    def resolve(self, statistics: Joined) -> NarrowingClip:
        """The clip with the quantile known, a 0-dim tensor."""
        ordered = torch.nn.functional.pad(statistics.values.sort().values, (0, 1), value=math.inf)  # never empty
        number = (self.quantile * ordered.isfinite().sum().double() - 1e-9).ceil().long()
        tail = ordered.index_select(0, (number - 1).clamp(min=0)[None])[0]
        tail = torch.where(tail.isfinite(), tail, 0)
        return NarrowingClip(self.eps_low, self.eps_high, tail, self.power, self.level)

    def logged(self, resolved: NarrowingClip) -> dict[str, Number]:
        """Where the tail begins, in nats."""
        return {"tail": resolved.tail}


@register(
    "sat",
    multiplier="R; 0 where clipped, with eps_low and eps_high multiplied by 1 / (1 + (|log R| / q)^power) where "
    "|log R| > q, the global batch's quantile (its number ceil(quantile n), not interpolated)",
    paper="2607.18722",
    provenance="authors' page",
    notes="level='geometric' is its GSPO form, with s for R; the page takes the quantile per micro-batch, this method "
    "over the global batch; SATR in older versions; the code was not read",
)
def sat(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    quantile: float = 0.9,
    power: float = 2.0,
    level: Literal["token", "geometric"] = "token",
) -> Correction:
    """Surrogate min(R A, clip(R) A), with a clip that narrows in the tail of |log R|.

    Args:
        eps_low, eps_high: distances from 1, outside the tail.
        quantile: of |log R| over the global batch, where the tail begins.
        power: how fast the clip narrows in the tail.
        level: "token", or "geometric" for the ratio of GSPO, whose own bounds are much narrower.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.15, -0.5, 0.1])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("sat", quantile=0.3)(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 1.1052]])
    """
    return Correction(
        ratio=(ratios.Token if level == "token" else ratios.Geometric)(mismatch="total"),
        gate=TailClip(eps_low, eps_high, quantile, power, level),
        aggregate="seq-mean-token-mean",
    )
