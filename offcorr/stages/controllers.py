"""Controllers: stages whose numbers depend on the whole optimizer batch.

A controller stands in the place of a gate, a weight or a rejection (``becomes``) and has two methods:

    statistics(tokens)    what it needs of a micro-batch: a frozen dataclass of tensors with ``merge(other)``
    resolve(statistics)   an ordinary stage whose numbers are computed from the merged statistics

``merge`` adds or joins, so the split into micro-batches and ranks changes nothing but rounding.  Without accumulation
``loss_fn(batch)`` calls both; otherwise the statistics come first, from a pass without gradient over the whole window:

    merged = reduce(Statistics.merge, (loss_fn.statistics(part) for part in parts)).all_reduce(gather)
    for part in parts:
        loss_fn(part, denominator=z, statistics=merged).loss.backward()

Nothing is kept between steps, so there is no state to save.  ``loss_fn.resolve(merged)`` shows the resolved stages; the
numbers that ``logged(resolved)`` names are logged under ``offcorr/control/``.

There is no host synchronisation: the numbers stay on the device as 0-dim tensors and are read only when logged.  (The
tokens of a packed batch are padded first, which reads the longest length.)

A user's own controller is written and used in the same way; ``.tolist()`` or ``if`` in it would work, but would
synchronise:

>>> import torch, offcorr
>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Sum:
...     total: torch.Tensor
...     def merge(self, other):
...         return Sum(self.total + other.total)
>>> @dataclass(frozen=True)
... class ClipTwiceTheMean(offcorr.controllers.Controller):
...     becomes, couples = "gate", "batch"
...     def statistics(self, tokens):
...         moved = tokens.log_ratio("staleness").clamped.abs()
...         return Sum(torch.stack([torch.where(tokens.mask, moved, 0).sum(), tokens.mask.sum()]))
...     def resolve(self, statistics):
...         moved, count = statistics.total
...         eps = 2 * moved / count.clamp(min=1)
...         return offcorr.gates.Clip(eps, eps)
>>> loss_fn = offcorr.Correction(gate=ClipTwiceTheMean())
>>> old = torch.full((2, 2), -2.0)
>>> batch = offcorr.Batch(logp=old + 0.125, old_logp=old, advantages=torch.ones(2), mask=old < 0)
>>> loss_fn.resolve(loss_fn.statistics(batch)).gate.to_config()
{'name': 'clip', 'eps_low': 0.25, 'eps_high': 0.25, 'dual_clip': None}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Tokens
from offcorr.shapes import Mismatch
from offcorr.stages.base import Controller, Number
from offcorr.stages.checks import check_choice, check_mismatch, check_number, check_order, warn_of_distances
from offcorr.stages.gates import Clip
from offcorr.stages.rejections import SquareBound, outward

__all__ = ["BalancedClip", "Controller", "MomentBudget", "MomentClip"]


@dataclass(frozen=True, eq=False)
class Balance:
    """The positive terms under each candidate upper bound, the negative ones under each lower one; merges by adding."""

    positive: Tensor  # [H], sum of min(r, high) A over A >= 0
    negative: Tensor  # [L], sum of max(r, low) |A| over A < 0

    def merge(self, other: Balance) -> Balance:
        """Both batches."""
        return Balance(self.positive + other.positive, self.negative + other.negative)


@dataclass(frozen=True)
class BalancedClip(Controller):
    """Clip whose bounds are raised until positive and negative terms balance over the global batch (BAPO, 2510.18927).

    From [low_start, high_start], first the lower bound and then the upper one is raised by its step to its maximum,
    while  sum of min(r, c_high) A over A >= 0  is below  target * sum of max(r, c_low) |A| over A < 0.
    r is the token's staleness ratio.  A token clipped at c_low still counts, with c_low |A|, so raising c_low never
    lowers the negative sum: where the first bounds miss the target, c_low ends at its maximum.

    Args:
        target: the positive sum over the negative one; the paper's rho_0 is a share, positive / (positive + negative):
            .5 there is 1 here.
        low_start, low_max, low_step: first value, maximum and step of the lower bound, on the ratio itself.
        high_start, high_max, high_step: first value, maximum and step of the upper bound, on the ratio itself.
        dual_clip: as in ``Clip``.
    """

    target: float = 1.0
    low_start: float = 0.6
    low_max: float = 0.8
    low_step: float = 0.05
    high_start: float = 1.2
    high_max: float = 2.0
    high_step: float = 0.05
    dual_clip: float | None = 3.0

    becomes, couples = "gate", "batch"
    mismatch = "staleness"

    def __post_init__(self) -> None:
        for field in ("target", "low_start"):
            check_number(self, field, low=0)
        for field in ("low_step", "high_step"):
            check_number(self, field, low=0, above=True)
        check_number(self, "high_start", low=1)
        check_number(self, "low_max")
        check_number(self, "high_max")
        check_order(self, "low_start", "low_max")
        check_order(self, "high_start", "high_max")
        if self.low_max > 1:
            raise ValueError(f"BalancedClip: low_max is {self.low_max!r}, expected a lower bound on the ratio <= 1")
        check_number(self, "dual_clip", low=1, optional=True)

    @property
    def lows(self) -> list[float]:
        """The lower bounds that are tried, in order."""
        return _steps(self.low_start, self.low_max, self.low_step)

    @property
    def highs(self) -> list[float]:
        """The upper bounds that are tried, in order."""
        return _steps(self.high_start, self.high_max, self.high_step)

    def statistics(self, tokens: Tokens) -> Balance:
        ratio, size = tokens.log_ratio("staleness").clamped.exp(), tokens.advantages.abs()
        raised, lowered = (torch.where(side, size, 0) for side in (tokens.advantages >= 0, tokens.advantages < 0))
        return Balance(
            torch.stack([(ratio.clamp(max=high) * raised).sum(dtype=torch.float64) for high in self.highs]),
            torch.stack([(ratio.clamp(min=low) * lowered).sum(dtype=torch.float64) for low in self.lows]),
        )

    def resolve(self, statistics: Balance) -> Clip:
        """The clip with these bounds, both 0-dim tensors."""
        positive, negative = statistics.positive, self.target * statistics.negative
        # Every pair in the order tried, but for the last, which is taken if none balances.
        balanced = torch.cat([positive[:1] >= negative[:-1], positive[:-1] >= negative[-1:]])
        first = (~balanced).cumprod(0).sum()  # the index of the first pair that does
        eps_low, eps_high = _path(tuple(self.lows), tuple(self.highs), positive.device).index_select(0, first)[0]
        return Clip(eps_low, eps_high, self.dual_clip)

    def logged(self, resolved: Clip) -> dict[str, Number]:
        """The bounds on the ratio."""
        return {"c_low": 1 - resolved.eps_low, "c_high": 1 + resolved.eps_high}


@lru_cache
def _path(lows: tuple[float, ...], highs: tuple[float, ...], device: torch.device) -> Tensor:
    """[L + H - 1, 2], every (eps_low, eps_high) in the order tried: the lower bound is raised first.

    Cached on the device: a new copy from the host would synchronise every time.
    """
    bounds = [(low, highs[0]) for low in lows[:-1]] + [(lows[-1], high) for high in highs]
    return torch.tensor([(1 - low, high - 1) for low, high in bounds], dtype=torch.float64, device=device)


def _steps(start: float, stop: float, step: float) -> list[float]:
    # The small amount keeps 1.2 to 2.0 by .05 at 16 steps, whatever the division rounds to.
    count = max(0, math.ceil((stop - start) / step - 1e-9))
    return [start + k * step for k in range(count)] + [stop]


@dataclass(frozen=True, eq=False)
class Joined:
    """A number of every token; merges by joining, since an exact sort over the global batch needs them all.

    Tokens that do not take part are kept, as infinity, because leaving them out would need their number on the host.
    """

    values: Tensor  # [B T]

    @classmethod
    def of(cls, values: Tensor, takes_part: Tensor) -> Joined:
        """The values of a batch, [B, T], with those that do not take part at infinity."""
        return cls(torch.where(takes_part, values, math.inf).flatten())

    def merge(self, other: Joined) -> Joined:
        """Both batches."""
        return Joined(torch.cat([self.values, other.values]))


def outward_squares(tokens: Tokens, mismatch: Mismatch) -> Joined:
    """The unclamped log^2 ratio of the tokens that moved in the direction that the advantage pushes."""
    # Unscored tokens take part with engine ratio 1, since the resolved stage judges them like that, too.
    d = tokens.log_ratio(mismatch).raw
    return Joined.of(d.square(), tokens.trainable & outward(d, tokens.advantages))


@dataclass(frozen=True)
class MomentBudget(Controller):
    """Drop the tokens of largest log^2 ratio until the mean over the rest of them is <= ``tau`` (M2PO, 2510.01161).

    One threshold for the global batch, by an exact sort; tokens at the threshold are kept.  Statistics are 4 bytes a
    position (8 in float64), masked or not.  The log-ratios are not clamped.

    Args:
        tau: nats^2.
        tokens: "outward": the mean is over the tokens that moved in the direction that the advantage pushes
            (A * log ratio > 0), and the others are always kept; "all": every token counts and may be dropped.
        mismatch: the pair of policies that is compared.
    """

    tau: float = 0.04
    tokens: Literal["outward", "all"] = "outward"
    mismatch: Mismatch = "staleness"

    becomes, couples = "rejection", "batch"

    def __post_init__(self) -> None:
        check_number(self, "tau", low=0)
        check_choice(self, "tokens", ("outward", "all"))
        check_mismatch(self)

    @property
    def inputs(self) -> frozenset[str]:
        """The advantage, where its sign decides: then no baseline of least variance exists."""
        return frozenset({"advantage"} if self.tokens == "outward" else ())

    def statistics(self, tokens: Tokens) -> Joined:
        if self.tokens == "outward":
            return outward_squares(tokens, self.mismatch)
        return Joined.of(tokens.log_ratio(self.mismatch).raw.square(), tokens.trainable)

    def resolve(self, statistics: Joined) -> SquareBound:
        """The rejection with the threshold known: log^2(ratio) <= bound, a 0-dim tensor."""
        squares = statistics.values.sort().values
        count = torch.arange(1, len(squares) + 1, dtype=torch.float64, device=squares.device)
        fits = squares.cumsum(0, dtype=torch.float64) <= self.tau * count
        # Where not even the smallest fits, every square is above 0, and a threshold of 0 keeps none.
        kept = torch.where(fits, squares, 0)
        return SquareBound(kept.amax() if len(kept) else kept.sum(), self.tokens, self.mismatch)

    def logged(self, resolved: SquareBound) -> dict[str, Number]:
        """The largest squared log-ratio that is kept, of the tokens that may be dropped."""
        return {"squared_log_ratio": resolved.bound}


@dataclass(frozen=True)
class MomentClip(Controller):
    """PPO's clip at the bounds that cap the second moment of the log-ratio at ``tau`` (M2PO's released code).

    Over the outward tokens of the global batch (A * log ratio > 0), u solves mean(min(log^2 ratio, u)) = tau, and the
    bounds on the ratio are exp(-sqrt u) and exp(sqrt u).  Where the mean of log^2 ratio is at most tau nothing is
    clipped.  Statistics as in ``MomentBudget``.

    Args:
        tau: nats^2.
        floor_low, floor_high: distances from 1 that are never clipped: the bounds are at most 1 - floor_low and at
            least 1 + floor_high; None: no floor.
        mismatch: the pair of policies that is compared; the ratio's.
    """

    tau: float = 0.04
    floor_low: float | None = None
    floor_high: float | None = None
    mismatch: Mismatch = "staleness"

    becomes, couples = "gate", "batch"

    def __post_init__(self) -> None:
        check_number(self, "tau", low=0)
        check_number(self, "floor_low", low=0, optional=True)
        check_number(self, "floor_high", low=0, optional=True)
        warn_of_distances("MomentClip", floor_low=self.floor_low, floor_high=self.floor_high)
        check_mismatch(self)

    def statistics(self, tokens: Tokens) -> Joined:
        return outward_squares(tokens, self.mismatch)

    def resolve(self, statistics: Joined) -> Clip:
        """The clip with these bounds, both 0-dim tensors."""
        squares = statistics.values.sort().values.double()
        takes_part = squares.isfinite()
        squares = torch.where(takes_part, squares, 0)
        before = squares.cumsum(0) - squares
        count = takes_part.sum(dtype=torch.float64)
        left = (count - torch.arange(len(squares), device=squares.device)).clamp(min=1)
        budget = self.tau * count
        # With u at the k-th square the sum is before + left * square; the first that reaches the budget is capped, and
        # a later one would ask for a smaller u.
        reaches = takes_part & (before + left * squares >= budget)
        caps = torch.where(reaches, (budget - before) / left, 0)
        cap = caps.amax() if len(caps) else caps.sum()
        moderate = squares.sum() <= budget
        width = torch.where(moderate, UNREACHED, cap.sqrt())
        low, high = (-width).exp(), width.exp()
        if self.floor_low is not None:
            low = low.clamp(max=1 - self.floor_low)
        if self.floor_high is not None:
            high = high.clamp(min=1 + self.floor_high)
        return Clip(1 - low, high - 1)

    def logged(self, resolved: Clip) -> dict[str, Number]:
        """The bounds on the ratio."""
        return {"c_low": 1 - resolved.eps_low, "c_high": 1 + resolved.eps_high}


UNREACHED = 2 * LOG_LIMIT
"""Nats; no log-ratio is as large after its clamp."""
