"""Metrics: accumulators that merge across micro-batches and ranks, and travel as one vector.

An accumulator is a short float64 vector.  It knows how to merge with another of its kind and how to read itself out;
nothing is averaged before it is read, and reading costs one transfer to the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.shapes import Mismatch, PerToken, TokenMask


class Accumulator:
    """``merge(a, b)`` of two vectors [..., size]; ``read(v)`` of a host vector, None where nothing was seen.

    ``of(values, where, start)`` makes one of the values picked by ``where``: all dimensions from ``start`` on are
    reduced, those before stay, so that several series are measured at once.
    """

    size: int

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def read(self, v: list[float]) -> dict[str, float] | None:
        return {"": v[0]}


class Count(Accumulator):
    """How many."""

    size = 1


class Mean(Accumulator):
    """(sum, n)."""

    size = 2

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        values, where = values.flatten(start), where.flatten(start)
        total = torch.where(where, values, 0).sum(-1, dtype=torch.float64)
        return torch.stack([total, where.sum(-1, dtype=torch.float64)], -1)

    def read(self, v: list[float]) -> dict[str, float] | None:
        return {"": v[0] / v[1]} if v[1] else None


class Max(Accumulator):
    """Largest of values >= 0."""

    size = 1

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        values, where = values.flatten(start), where.flatten(start)
        if not values.shape[-1]:
            return values.new_zeros((*values.shape[:-1], 1), dtype=torch.float64)
        return torch.where(where, values, 0).amax(-1, keepdim=True).double()

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)


class LogSumExp(Accumulator):
    """(max, sum e^(x - max), sum e^(2 (x - max)), n): moments and ESS of e^x, unclamped."""

    size = 4

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        values, where = values.flatten(start), where.flatten(start)
        if not values.shape[-1]:
            return values.new_zeros((*values.shape[:-1], 4), dtype=torch.float64)
        x = torch.where(where, values.double(), -torch.inf)
        largest = x.amax(-1, keepdim=True).clamp(min=-1e300)
        scaled = (x - largest).exp()
        return torch.stack(
            [largest[..., 0], scaled.sum(-1), scaled.square().sum(-1), where.sum(-1, dtype=torch.float64)], -1
        )

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        # An accumulator that has seen nothing has n = 0 and must not set the maximum.
        top = torch.maximum(
            torch.where(a[..., 3] > 0, a[..., 0], -1e300), torch.where(b[..., 3] > 0, b[..., 0], -1e300)
        )
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

    def read(self, v: list[float]) -> dict[str, float] | None:
        largest, first, second, n = v
        if not n:
            return None

        def finite_exp(x: float) -> float:
            return math.exp(min(x, 700.0))

        return {
            "ratio_mean": finite_exp(largest + math.log(first / n)),
            "chi2": finite_exp(2 * largest + math.log(second / n)) - 1,
            "ess": first * first / (n * second),
        }


class Histogram(Accumulator):
    """64 bins of values >= 0, log-spaced over nine decades; a quantile is exact to a bin (its upper edge)."""

    size = 64
    low, high = -6.0, 3.0

    @classmethod
    @cache
    def edges(cls) -> tuple[float, ...]:
        """The 63 edges between the bins."""
        step = (cls.high - cls.low) / (cls.size - 2)
        return tuple(10 ** (cls.low + i * step) for i in range(cls.size - 1))

    @classmethod
    def of(cls, values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        values, where = values.flatten(start), where.flatten(start)
        bins = torch.bucketize(values, _edges_on(values.device, values.dtype))
        empty = torch.zeros((*values.shape[:-1], cls.size), dtype=torch.float64, device=values.device)
        return empty.scatter_add_(-1, bins, where.double())

    def read(self, v: list[float]) -> dict[str, float] | None:
        seen, wanted = 0.0, 0.99 * sum(v)
        if not wanted:
            return None
        for upper, n in zip([*self.edges(), math.inf], v, strict=True):
            seen += n
            if seen >= wanted:
                return {"abs_p99": min(upper, 10**self.high)}
        return None


@cache
def _edges_on(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Kept on the device: making it anew would wait for the host every time."""
    return torch.tensor(Histogram.edges(), dtype=dtype, device=device)


@dataclass(frozen=True)
class Metric:
    """One accumulator of a series: what it is called, what it holds, and how it is made from the tokens' view."""

    name: str
    formula: str
    kind: Accumulator
    outputs: tuple[str, ...] = ()
    """Names of the accumulator's readings, in its order; () where it has the one reading ``name``."""


MISMATCH = (
    Metric("abs_mean", "mean |d|", Mean()),
    Metric("abs_max", "max |d|", Max()),
    Metric("abs_histogram", "99th percentile of |d|, to a bin", Histogram(), ("abs_p99",)),
    Metric("k1", "mean -d: KL(theirs || ours), unbiased", Mean()),
    Metric("k3", "mean e^d - 1 - d: the same KL, never negative", Mean()),
    Metric(
        "token",
        "of e^d: mean, mean square - 1, ESS / n",
        LogSumExp(),
        ("ratio_mean", "chi2_token", "ess_token"),
    ),
    Metric(
        "seq",
        "of e^(sum d): mean, mean square - 1, ESS / n",
        LogSumExp(),
        ("ratio_mean_seq", "chi2_seq", "ess_seq"),
    ),
    Metric("ppl_ratio", "mean over sequences of e^(-mean d): our perplexity over theirs", Mean()),
    Metric("first_token", "mean |d| at each sequence's first valid token", Mean()),
)
"""d is the unclamped log-ratio (nats), over tokens where both log-probs are numbers: always raw."""

LOSS = (
    Metric("clipped", "mean share of the gradient ratio * A that the gate held back", Mean()),
    Metric("truncated", "share of valid tokens whose weight was bounded", Mean()),
    Metric("rejected", "share of valid tokens dropped by a weight or a rejection", Mean()),
    Metric("vetoed", "share of valid tokens dropped by a veto", Mean()),
    Metric("kept", "share of valid tokens that no weight or rejection dropped", Mean()),
    Metric("weight_mean", "mean applied weight over valid tokens, 0 where dropped", Mean()),
    Metric("coefficient_zero", "share of valid tokens with dL/dlogp = 0", Mean()),
    Metric("unscored", "number of valid tokens the engine could not score", Count()),
    Metric("nonfinite", "number of valid tokens that gave no finite number to train on", Count()),
    Metric("skipped", "share of sequences left out of the forward pass", Mean()),
)

_SERIES: dict[str, tuple[Metric, ...]] = {
    "offcorr/engine/": MISMATCH,
    "offcorr/staleness/": MISMATCH,
    "offcorr/loss/": LOSS,
}

CONTROL = "offcorr/control/"
"""Before the names of what batch-coupled stages found, which are their own (``Stage.found``)."""


class _Kinds(dict[str, Metric]):
    """The metric of each name; those of the control series are means of one number."""

    def __missing__(self, name: str) -> Metric:
        if not name.startswith(CONTROL):
            raise KeyError(name)
        metric = self[name] = Metric(name.removeprefix(CONTROL), "what a batch-coupled stage found", Mean())
        return metric


KINDS: dict[str, Metric] = _Kinds({prefix + m.name: m for prefix, series in _SERIES.items() for m in series})


@dataclass(frozen=True)
class Metrics:
    """Named accumulators, on the device.

    >>> import torch
    >>> a = Metrics({"offcorr/loss/kept": torch.tensor([3.0, 4.0])})
    >>> b = Metrics({"offcorr/loss/kept": torch.tensor([1.0, 4.0])})
    >>> a.merge(b).compute()
    {'offcorr/loss/kept': 0.5}
    """

    data: Mapping[str, Tensor] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """Both together, as if they had been measured as one batch."""
        if tuple(self.data) == tuple(other.data):
            return self.unpack(self._merge_packed(self.pack(), other.pack()))
        merged = dict(self.data)
        for name, value in other.data.items():
            merged[name] = KINDS[name].kind.merge(merged[name], value) if name in merged else value
        return Metrics(merged)

    def pack(self) -> Tensor:
        """[K], every accumulator end to end, in float64."""
        return torch.cat([value.double() for value in self.data.values()]) if self.data else torch.zeros(0)

    def unpack(self, packed: Tensor) -> Metrics:
        """A vector of this layout, as Metrics."""
        parts = packed.split([KINDS[name].kind.size for name in self.data])
        return Metrics(dict(zip(self.data, parts, strict=True)))

    def all_reduce(self, gather: Callable[[Tensor], Tensor]) -> Metrics:
        """Merged over ranks; ``gather`` takes [K] to [ranks, K] (``accelerator.gather`` of ``vector[None]``)."""
        if not self.data:
            return self
        return self.unpack(reduce(self._merge_packed, gather(self.pack())))

    def compute(self) -> dict[str, float]:
        """Plain floats, by one transfer to the host; a metric that saw nothing is left out."""
        host = self.pack().tolist()
        result: dict[str, float] = {}
        for name, value in self._split(host):
            metric = KINDS[name]
            readings = metric.kind.read(value)
            if readings is None:
                continue
            prefix = name.removesuffix(metric.name)
            names = metric.outputs or (metric.name,)
            result.update(zip((prefix + n for n in names), readings.values(), strict=True))
        if result.get("offcorr/loss/nonfinite"):
            warnings.warn(
                f"{result['offcorr/loss/nonfinite']:.0f} valid tokens gave no finite number to train on (NaN or "
                "infinity in logp, old_logp or advantages); their loss and gradient were set to 0. strict=True raises",
                RuntimeWarning,
                stacklevel=2,
            )
        return result

    def _merge_packed(self, a: Tensor, b: Tensor) -> Tensor:
        """Two vectors of this layout: added, but for the kinds that merge another way, each kind in one go."""
        merged = a + b
        for kind, places in _merged_another_way(tuple(self.data), a.device):
            merged[places] = kind.merge(a[places], b[places])
        return merged

    def _split(self, host: list[float]) -> Iterator[tuple[str, list[float]]]:
        start = 0
        for name in self.data:
            size = KINDS[name].kind.size
            yield name, host[start : start + size]
            start += size


@cache
def _merged_another_way(names: tuple[str, ...], device: torch.device) -> list[tuple[Accumulator, Tensor]]:
    """Each kind that does not merge by adding, and where its accumulators lie in the packed vector [k, size]."""
    places: dict[type[Accumulator], list[list[int]]] = {}
    start = 0
    for name in names:
        kind = KINDS[name].kind
        if type(kind).merge is not Accumulator.merge:
            places.setdefault(type(kind), []).append(list(range(start, start + kind.size)))
        start += kind.size
    return [(kind(), torch.tensor(found, device=device)) for kind, found in places.items()]


def measure(batch: Batch) -> Metrics:
    """The mismatch series of a batch, whatever the loss.

    >>> import torch
    >>> zeros = torch.zeros(2, 3)
    >>> batch = Batch(logp=zeros, rollout_logp=zeros - 0.1, advantages=torch.ones(2), mask=torch.ones(2, 3).bool())
    >>> round(measure(batch).compute()["offcorr/engine/k1"], 4)
    -0.1
    """
    return mismatch(Tokens(batch))


@torch.no_grad()
def mismatch(tokens: Tokens) -> Metrics:
    """The series that the batch has the log-probs for, measured together."""
    series: list[Mismatch] = []
    if tokens.batch.rollout_logp is not None:
        series.append("engine")
    if tokens.batch.old_logp is not None:
        series.append("staleness")
    if not series:
        return Metrics()
    pairs = [tokens.log_ratio(of) for of in series]
    measured = _mismatch_series(
        torch.stack([pair.raw for pair in pairs]).double(),
        torch.stack([pair.compared for pair in pairs]),
        tokens.rows.position == 1,
    )
    return Metrics(
        {f"offcorr/{of}/{name}": value[i] for i, of in enumerate(series) for name, value in measured.items()}
    )


def _mismatch_series(d: Tensor, seen: Tensor, first: TokenMask) -> dict[str, Tensor]:
    """Log-ratios d and where they count, [series, B, T]; accumulators [series, size]."""
    size, count = d.abs(), seen.sum(2)
    present = count > 0
    total = torch.where(seen, d, 0).sum(2)
    limited = d.clamp(max=700)
    return {
        "abs_mean": Mean.of(size, seen, 1),
        "abs_max": Max.of(size, seen, 1),
        "abs_histogram": Histogram.of(size, seen, 1),
        "k1": Mean.of(-d, seen, 1),
        "k3": Mean.of(torch.expm1(limited) - limited, seen, 1),
        "token": LogSumExp.of(d, seen, 1),
        "seq": LogSumExp.of(total, present, 1),
        "ppl_ratio": Mean.of((-total / count.clamp(min=1)).clamp(max=700).exp(), present, 1),
        # position stays 1 under the mask that follows the first token; seen leaves that out
        "first_token": Mean.of(size, seen & first, 1),
    }


def loss_metrics(
    tokens: Tokens,
    *,
    held_back: PerToken,
    weight: PerToken,
    kept: TokenMask,
    vetoed: TokenMask,
    truncated: TokenMask,
    coefficient: PerToken,
    nonfinite: TokenMask,
) -> dict[str, Tensor]:
    """The ``offcorr/loss/`` series: what the correction did."""
    mask = tokens.mask
    unscored = mask & ~tokens.scored & tokens.trainable
    if tokens.batch.rollout_logp is None:
        unscored = torch.zeros_like(mask)
    shares: dict[str, Any] = {
        "clipped": held_back,
        "truncated": truncated,
        "rejected": ~kept,
        "vetoed": vetoed,
        "kept": kept,
        "weight_mean": weight,
        "coefficient_zero": coefficient == 0,
    }
    # What is not a number is counted as nonfinite, and makes no other metric one.
    counted = (torch.where(mask & ~value.isnan(), value.double(), 0) for value in shares.values())
    sums = torch.stack([value.sum() for value in counted])
    n = mask.sum(dtype=torch.float64)
    values = {name: torch.stack([total, n]) for name, total in zip(shares, sums, strict=True)}
    values["unscored"] = unscored.sum(dtype=torch.float64).reshape(1)
    values["nonfinite"] = nonfinite.sum(dtype=torch.float64).reshape(1)
    values["skipped"] = torch.stack([torch.zeros_like(n), n.new_full((), len(mask))])
    return {f"offcorr/loss/{name}": value for name, value in values.items()}
