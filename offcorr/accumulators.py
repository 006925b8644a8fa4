"""Accumulators: float64 vectors of a known kind, which says how two of them merge and how one is read.

Nothing is averaged before it is read.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Accumulator")

_NONE = -1e300
"""The largest of no values: finite, because infinity - infinity would be NaN."""


def _finite_exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def _share_of(total: float, squares: float, n: float) -> float | None:
    """Effective sample size of n values over n, by their sum and sum of squares; None of one value, always 1."""
    if n < 2:
        return None
    return total * total / (n * squares) if squares else 0.0


@dataclass(frozen=True, eq=False)
class Accumulator:
    """Base class: ``vector`` is float64 [size] (or [..., size] while several series are measured together).

    ``outputs``: the names of its values, where it has several, or one of another name; see ``Metrics.compute``.
    """

    vector: Tensor
    outputs: tuple[str, ...] = ()

    size: ClassVar[int]

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The vector of ``values[where]``; dimensions from ``start`` on are reduced, those before stay."""
        raise NotImplementedError("an Accumulator needs a staticmethod of(values, where, start=0), its vector")

    @staticmethod
    def merged(a: Tensor, b: Tensor) -> Tensor:
        """Two vectors [..., size] as one, as if their values had been measured together."""
        return a + b

    @staticmethod
    def values(numbers: list[float]) -> tuple[float | None, ...] | None:
        """The numbers that a vector on the host stands for; None where nothing was measured.

        One of several is None where it says nothing, as an effective sample size of fewer than two values does.
        """
        return (numbers[0],)

    @classmethod
    def mean(cls, numbers: list[float]) -> tuple[float, float] | None:
        """(its first value, the weight of that in a mean over micro-batches); None where a mean of it is wrong."""
        return None

    def merge(self: Self, other: Self) -> Self:
        """Both together."""
        return dataclasses.replace(self, vector=self.merged(self.vector, other.vector))

    def read(self) -> tuple[float | None, ...] | None:
        """Its numbers, by one transfer to the host; None where nothing was measured."""
        return self.values(self.vector.tolist())


class Count(Accumulator):
    """A number of tokens."""

    size = 1


class Mean(Accumulator):
    """(sum, number of values)."""

    size = 2

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The sum of ``values[where]``, and how many they are."""
        values, where = values.flatten(start), where.flatten(start)
        total = torch.where(where, values, 0).sum(-1, dtype=torch.float64)
        return torch.stack([total, where.sum(-1, dtype=torch.float64)], -1)

    @staticmethod
    def values(numbers: list[float]) -> tuple[float, ...] | None:
        """Their mean."""
        return (numbers[0] / numbers[1],) if numbers[1] else None

    @classmethod
    def mean(cls, numbers: list[float]) -> tuple[float, float] | None:
        """(their mean, their number)."""
        return (numbers[0] / numbers[1], numbers[1]) if numbers[1] else None


class Share(Mean):
    """(number of values that are true, number of values), left out where none is true."""

    @staticmethod
    def values(numbers: list[float]) -> tuple[float, ...] | None:
        """Their share."""
        return (numbers[0] / numbers[1],) if numbers[0] else None


class Moments(Accumulator):
    """(sum, sum of squares, number of values) of values >= 0."""

    size = 3

    @staticmethod
    def values(numbers: list[float]) -> tuple[float | None, ...] | None:
        """(their mean, their effective sample size over n, which is 0 where they are all 0 and None of one value)."""
        total, squares, n = numbers
        if not n:
            return None
        return total / n, _share_of(total, squares, n)

    @classmethod
    def mean(cls, numbers: list[float]) -> tuple[float, float] | None:
        """(their mean, their number)."""
        return (numbers[0] / numbers[2], numbers[2]) if numbers[2] else None


class Max(Accumulator):
    """The largest of values >= 0."""

    size = 1

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The largest of ``values[where]``, 0 where there are none."""
        values, where = values.flatten(start), where.flatten(start)
        if not values.shape[-1]:
            return values.new_zeros((*values.shape[:-1], 1), dtype=torch.float64)
        return torch.where(where, values, 0).amax(-1, keepdim=True).double()

    @staticmethod
    def merged(a: Tensor, b: Tensor) -> Tensor:
        """The larger."""
        return torch.maximum(a, b)


class Extremes(Accumulator):
    """(largest x, largest -x): both tails of x and of e^x."""

    size = 2

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """Both extremes of ``values[where]``; -1e300 twice where there are none."""
        values, where = values.flatten(start).double(), where.flatten(start)
        if not values.shape[-1]:
            return values.new_full((*values.shape[:-1], 2), _NONE)
        tails = [torch.where(where, x, _NONE).amax(-1) for x in (values, -values)]
        return torch.stack(tails, -1)

    @staticmethod
    def merged(a: Tensor, b: Tensor) -> Tensor:
        """The larger of each."""
        return torch.maximum(a, b)

    @staticmethod
    def values(numbers: list[float]) -> tuple[float, ...] | None:
        """(largest |x|, smallest e^x, largest e^x)."""
        largest, smallest = numbers[0], -numbers[1]
        if largest < smallest:  # none were seen
            return None
        return max(largest, -smallest), _finite_exp(smallest), _finite_exp(largest)


class LogSumExp(Accumulator):
    """(largest x, sum e^(x - largest), sum e^(2 (x - largest)), number): moments and ESS of e^x, never clamped."""

    size = 4

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The moments of e^x for the x in ``values[where]``."""
        values, where = values.flatten(start), where.flatten(start)
        if not values.shape[-1]:
            return values.new_zeros((*values.shape[:-1], 4), dtype=torch.float64)
        x = torch.where(where, values.double(), -torch.inf)
        largest = x.amax(-1, keepdim=True).clamp(min=_NONE)
        scaled = (x - largest).exp()
        return torch.stack(
            [largest[..., 0], scaled.sum(-1), scaled.square().sum(-1), where.sum(-1, dtype=torch.float64)], -1
        )

    @staticmethod
    def merged(a: Tensor, b: Tensor) -> Tensor:
        """Both, scaled by the larger of the two maxima."""
        # An accumulator that has seen nothing has n = 0 and must not set the maximum.
        top = torch.maximum(torch.where(a[..., 3] > 0, a[..., 0], _NONE), torch.where(b[..., 3] > 0, b[..., 0], _NONE))
        shift_a, shift_b = ((v[..., 0] - top).clamp(max=0).exp() * (v[..., 3] > 0) for v in (a, b))
        return torch.stack(
            [
                top,
                a[..., 1] * shift_a + b[..., 1] * shift_b,
                a[..., 2] * shift_a**2 + b[..., 2] * shift_b**2,
                a[..., 3] + b[..., 3],
            ],
            -1,
        )

    @staticmethod
    def values(numbers: list[float]) -> tuple[float | None, ...] | None:
        """(mean of e^x, mean square - 1 but at least 0, effective sample size over n, which is None of one value)."""
        largest, first, second, n = numbers
        if not n:
            return None
        return (
            _finite_exp(largest + math.log(first / n)),
            max(_finite_exp(2 * largest + math.log(second / n)) - 1, 0.0),  # a sample's may be below
            _share_of(first, second, n),
        )

    @classmethod
    def mean(cls, numbers: list[float]) -> tuple[float, float] | None:
        """(mean of e^x, number of x)."""
        largest, first, _, n = numbers
        return (_finite_exp(largest + math.log(first / n)), n) if n else None


class Histogram(Accumulator):
    """64 bins of values >= 0, log-spaced over nine decades, so that a bin ends 40 % above where it begins.

    A quantile is interpolated inside its bin, in the logarithm and by count.  It lies in the bin of the true one, so it
    is never 40 % off; over thousands of normal values it is up to 10 % too high.
    """

    size = 64
    low: ClassVar[float] = -6.0
    high: ClassVar[float] = 3.0

    @classmethod
    def edges(cls) -> tuple[float, ...]:
        """The 63 edges between the bins."""
        step = (cls.high - cls.low) / (cls.size - 2)
        return tuple(10 ** (cls.low + i * step) for i in range(cls.size - 1))

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The number of ``values[where]`` in each bin."""
        values, where = values.flatten(start), where.flatten(start)
        bins = torch.bucketize(values, _edges_on(values.device, values.dtype))
        empty = torch.zeros((*values.shape[:-1], Histogram.size), dtype=torch.float64, device=values.device)
        return empty.scatter_add_(-1, bins, where.double())

    @staticmethod
    def values(numbers: list[float]) -> tuple[float, ...] | None:
        """The 99th percentile; below the first edge that edge, above the last one the last."""
        edges = Histogram.edges()
        seen, wanted = 0.0, 0.99 * sum(numbers)
        if not wanted:
            return None
        for lower, upper, n in zip([edges[0], *edges], [*edges, edges[-1]], numbers, strict=True):
            if seen + n >= wanted:
                return (lower * (upper / lower) ** ((wanted - seen) / n),)
            seen += n
        return None


@cache
def _edges_on(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cached on the device: a new copy from the host would synchronise every time."""
    return torch.tensor(Histogram.edges(), dtype=dtype, device=device)
