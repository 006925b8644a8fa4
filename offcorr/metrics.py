"""Metrics: named accumulators that merge across micro-batches and ranks, and travel as one vector; what is measured.

Nothing is averaged before it is read, and reading costs one transfer to the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from offcorr.accumulators import (
    Accumulator,
    Count,
    Extremes,
    Histogram,
    LogSumExp,
    Max,
    Mean,
    Moments,
    Share,
)
from offcorr.batch import LOG_LIMIT, Batch, Tokens, check_batch
from offcorr.shapes import PerToken, TokenMask
from offcorr.stages import pointwise
from offcorr.stages.checks import outside

__all__ = [
    "Accumulator",
    "Count",
    "Extremes",
    "Gather",
    "Histogram",
    "LogSumExp",
    "Max",
    "Mean",
    "Metrics",
    "Moments",
    "Share",
    "measure",
]

Gather = Callable[[Tensor], Tensor]
"""[K] of this rank to [ranks, K]: ``lambda vector: accelerator.gather(vector[None])``."""


class Metric(NamedTuple):
    """One accumulator of a series; ``outputs`` names its values where they have other names than ``name``."""

    name: str
    formula: str
    kind: type[Accumulator]
    outputs: tuple[str, ...] = ()


MISMATCH = (
    Metric("abs_mean", "mean |d|", Mean),
    Metric("extremes", "max |d|, min e^d, max e^d", Extremes, ("abs_max", "ratio_min", "ratio_max")),
    Metric("abs_histogram", "99th percentile of |d|, within its bin", Histogram, ("abs_p99",)),
    Metric("k1", "mean -d: KL(second || first policy), unbiased", Mean),
    Metric("k3", "mean e^d - 1 - d: KL(second || first policy), never negative", Mean),
    Metric(
        "token",
        "of e^d: mean, mean square - 1 (at least 0), ESS / n",
        LogSumExp,
        ("ratio_mean", "chi2_token", "ess_token"),
    ),
    Metric(
        "seq",
        "of e^(sum d): mean, mean square - 1 (at least 0), ESS / n",
        LogSumExp,
        ("ratio_mean_seq", "chi2_seq", "ess_seq"),
    ),
    Metric("ppl_ratio", "mean over sequences of e^(-mean d): the first policy's perplexity over the second's", Mean),
    Metric("first_token", "mean |d| at each sequence's first valid token, where both log-probs are known", Mean),
)
"""d is the unclamped log-ratio (nats) of the first policy to the second, over tokens where both log-probs are
finite, before any weight, gate or rejection.  ESS / n is left out of one value, of which it is always 1."""

LOSS = (
    Metric("clipped", "mean over valid tokens of the share of ratio * A that the gate removed", Mean),
    Metric(
        "truncated",
        "share of valid tokens whose weight is another number than the ratio, such as its bound; not those that the "
        "weight drops, and also those that a rejection drops (both are in rejected)",
        Mean,
    ),
    Metric("rejected", "share of valid tokens dropped by a weight or a rejection", Mean),
    Metric("vetoed", "share of valid tokens dropped by a veto", Mean),
    Metric("kept", "share of valid tokens that no weight or rejection dropped", Mean),
    Metric("weight_mean", "mean applied weight over valid tokens, 0 where dropped", Mean),
    Metric("coefficient_zero", "share of valid tokens with dL/dlogp = 0", Mean),
    Metric(
        "no_advantage",
        "share of valid tokens with A = 0 (top_entropy_quantile makes some), or with a number that is not finite",
        Mean,
    ),
    Metric("dropped", "share of tokens with an advantage and c = 0", Mean),
    Metric("damped", "share of tokens with an advantage and 0 < |c| < .99 r", Mean),
    Metric("amplified", "share of tokens with an advantage and |c| > 1.01 r", Mean),
    Metric("after", "of |c| over tokens with an advantage: mean, ESS / n", Moments, ("multiplier", "ess_after")),
    Metric("before", "of r over tokens with an advantage: mean, ESS / n", Moments, ("ratio", "ess_before")),
    Metric("multiplier_vs_ratio", "sum |c| / sum r over tokens with an advantage", Mean),
    Metric("unscored", "number of valid tokens the engine could not score", Count),
    Metric("nonfinite", "number of valid tokens that gave no finite number to train on", Count),
    Metric("skipped", "share of sequences left out of the forward pass", Mean),
)
"""c is the factor on a token's advantage A in the gradient, weight included: dL/dlogp = -c A / Z, but for the
weight of the row.  r = e^(logp - old_logp), limited to e^(+-20), is the plain ratio."""

NONFINITE, UNSCORED, OVER_VALID = "offcorr/loss/nonfinite", "offcorr/loss/unscored", "offcorr/loss/coefficient_zero"
"""Two counts of tokens, and a mean over all valid ones."""

NONE_SCORED = (
    "rollout_logp is NaN or infinite on all {tokens:.0f} valid tokens, expected the engine's log-probs: tokens without "
    "one count as if engine and trainer agreed, so corrections of that mismatch do nothing, and its metrics are absent"
)

CONTROL = "offcorr/control/"
"""Prefix of the numbers of resolved controllers, which are named by ``Controller.logged``."""


@dataclass(frozen=True)
class Metrics:
    """Named accumulators, on the device.

    >>> import torch
    >>> a = Metrics({"offcorr/loss/kept": Mean(torch.tensor([3.0, 4.0]))})
    >>> b = Metrics({"offcorr/loss/kept": Mean(torch.tensor([1.0, 4.0]))})
    >>> a.merge(b).compute()
    {'offcorr/loss/kept': 0.5}
    """

    data: Mapping[str, Accumulator] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """Both together, as if they had been measured as one batch.

        Raises:
            TypeError: the two have accumulators of different kinds under one name.
        """
        if self._layout == other._layout:
            return self.unpack(_merged_packed(self._layout, self.pack(), other.pack()))
        merged = dict(self.data)
        for name, value in other.data.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(value):
                raise TypeError(f"{name} is a {type(known).__name__} and a {type(value).__name__}, expected one kind")
            merged[name] = value if known is None else known.merge(value)
        return Metrics(merged)

    def pack(self) -> Tensor:
        """[K], every accumulator end to end, in float64."""
        vectors = [accumulator.vector.double() for accumulator in self.data.values()]
        return torch.cat(vectors) if vectors else torch.zeros(0)

    def unpack(self, packed: Tensor) -> Metrics:
        """A vector of this layout, as Metrics."""
        parts = packed.split([accumulator.size for accumulator in self.data.values()])
        known = zip(self.data.items(), parts, strict=True)
        return Metrics({name: type(kind)(part, kind.outputs) for (name, kind), part in known})

    def all_reduce(self, gather: Gather) -> Metrics:
        """Merged over ranks, which must have the same metrics; ``gather`` takes [K] to [ranks, K]."""
        if not self.data:
            return self
        ranks = gather(self.pack())
        while len(ranks) > 1:  # pairs of ranks, all at once
            half = len(ranks) // 2
            pairs = _merged_packed(self._layout, ranks[:half], ranks[half : 2 * half])
            ranks = torch.cat([pairs, ranks[2 * half :]])
        return self.unpack(ranks[0])

    def compute(self, *, none_scored: Literal["warn", "pass"] = "warn") -> dict[str, float]:
        """Plain floats, by one transfer to the host; a metric that measured nothing is left out.

        So is the effective sample size of a single value, which is 1 whatever the value.  Warns of tokens that gave no
        finite number to train on.

        Args:
            none_scored: "warn" where the engine's log-probs are not one of them a finite number; "pass" says nothing.

        Raises:
            ValueError: no valid token gave a finite number to train on.
        """
        result: dict[str, float] = {}
        numbers_of: dict[str, list[float]] = {}
        for name, accumulator, numbers in self._split(self.pack().tolist()):
            numbers_of[name] = numbers
            values = accumulator.values(numbers)
            if values is not None:
                prefix = name[: name.rfind("/") + 1]
                names = [prefix + output for output in accumulator.outputs] or [name]
                known = zip(names, values, strict=True)
                result.update({name: value for name, value in known if value is not None})
        for name in [name for name in result if name.endswith("abs_p99")]:
            # Inside a bin a histogram only estimates a quantile, which may then lie above the largest value.
            largest = result.get(name.removesuffix("p99") + "max", math.inf)
            result[name] = min(result[name], largest)
        valid, nonfinite, unscored = _valid_tokens(numbers_of), result.get(NONFINITE, 0.0), result.get(UNSCORED, 0.0)
        _check_nonfinite(nonfinite, valid)
        if none_scored == "warn" and unscored and unscored + nonfinite == valid:
            warnings.warn(NONE_SCORED.format(tokens=unscored), RuntimeWarning, stacklevel=outside())
        return result

    def means(self) -> dict[str, tuple[float, float]]:
        """(value, weight) of each metric that is a mean, by one transfer to the host: for trainers that average.

        The mean of the values over micro-batches and ranks, by their weights, is the value of the whole; without the
        weights it is so where every part has as many tokens.  Extremes, percentiles, effective sample sizes,
        chi-squares and counts are left out, because a mean of them is another number.

        >>> import torch
        >>> Metrics({"offcorr/loss/kept": Mean(torch.tensor([3.0, 4.0])), "top": Max(torch.tensor([3.0]))}).means()
        {'offcorr/loss/kept': (0.75, 4.0)}
        """
        result: dict[str, tuple[float, float]] = {}
        numbers_of: dict[str, list[float]] = {}
        for name, accumulator, numbers in self._split(self.pack().tolist()):
            numbers_of[name] = numbers
            if known := accumulator.mean(numbers):
                prefix = name[: name.rfind("/") + 1]
                result[prefix + accumulator.outputs[0] if accumulator.outputs else name] = known
        _check_nonfinite(numbers_of.get(NONFINITE, [0.0])[0], _valid_tokens(numbers_of))
        return result

    @property
    def _layout(self) -> tuple[tuple[str, type[Accumulator]], ...]:
        return tuple((name, type(accumulator)) for name, accumulator in self.data.items())

    def _split(self, host: list[float]) -> Iterator[tuple[str, Accumulator, list[float]]]:
        start = 0
        for name, accumulator in self.data.items():
            yield name, accumulator, host[start : start + accumulator.size]
            start += accumulator.size


def _valid_tokens(numbers_of: Mapping[str, list[float]]) -> float:
    """The number of valid tokens, of a metric that is a mean over them; NaN where the loss has not measured it."""
    return numbers_of.get(OVER_VALID, [math.nan, math.nan])[1]


def _check_nonfinite(tokens: float, valid: float) -> None:
    """Raise where no valid token gave a finite number to train on, and warn where some did not."""
    if 0 < tokens == valid:
        raise ValueError(
            f"not one of {tokens:.0f} valid tokens gave a finite number to train on: logp, old_logp, advantages, "
            "weight or rewards is NaN or infinite on all of them, or a stage makes them so (as exp of raw_log_ratio, "
            "which is not clamped), expected finite numbers; strict=True says which, at the call"
        )
    if tokens:
        warnings.warn(
            f"{tokens:.0f} valid tokens gave no finite number to train on (NaN or infinity in logp, old_logp, "
            "advantages or rewards, or made by a stage); their loss and gradient were set to 0. strict=True raises and "
            "says which",
            RuntimeWarning,
            stacklevel=outside(),
        )


def _merged_packed(layout: tuple[tuple[str, type[Accumulator]], ...], a: Tensor, b: Tensor) -> Tensor:
    """Packed vectors [..., K] of one layout: added, then each kind that does not merge by adding, all of it at once."""
    merged = a + b
    for kind, places in _merged_otherwise(layout, a.device):
        merged[..., places] = kind.merged(a[..., places], b[..., places])
    return merged


@cache
def _merged_otherwise(
    layout: tuple[tuple[str, type[Accumulator]], ...], device: torch.device
) -> list[tuple[type[Accumulator], Tensor]]:
    """Each kind that does not merge by adding, and where its accumulators lie in the packed vector [k, size]."""
    places: dict[type[Accumulator], list[list[int]]] = {}
    start = 0
    for _, kind in layout:
        if kind.merged is not Accumulator.merged:
            places.setdefault(kind, []).append(list(range(start, start + kind.size)))
        start += kind.size
    return [(kind, torch.tensor(where, device=device)) for kind, where in places.items()]


def measure(batch: Batch) -> Metrics:
    """The mismatch series of a batch, whatever the loss.

    >>> import torch
    >>> zeros = torch.zeros(2, 3)
    >>> batch = Batch(logp=zeros, rollout_logp=zeros - 0.1, advantages=torch.ones(2), mask=torch.ones(2, 3).bool())
    >>> round(measure(batch).compute()["offcorr/engine/k1"], 4)
    -0.1
    """
    check_batch(batch)
    return Metrics(mismatch(batch.tokens))


@torch.no_grad()
def mismatch(tokens: Tokens) -> dict[str, Accumulator]:
    """The mismatch series that the batch has the log-probs for, measured together."""
    known = {"engine": tokens.batch.rollout_logp, "staleness": tokens.batch.old_logp}
    measured: list[Any] = [of for of, logp in known.items() if logp is not None]
    if not measured:
        return {}
    pairs = [tokens.log_ratio(of) for of in measured]
    first = tokens.rows.position == 1
    d = torch.stack([pair.raw for pair in pairs]).double()  # [series, B, T], 0 where it does not count
    seen = torch.stack([pair.compared for pair in pairs])
    size, count = d.abs(), seen.sum(2)
    present, total = count > 0, d.sum(2)
    n = count.sum(1, dtype=torch.float64)
    vectors = {
        "abs_mean": torch.stack([size.sum((1, 2)), n], 1),
        "extremes": Extremes.of(d, seen, 1),
        "abs_histogram": Histogram.of(size, seen, 1),
        "k1": torch.stack([-total.sum(1), n], 1),
        "k3": torch.stack([pointwise.nonnegative_kl(d).sum((1, 2)), n], 1),
        "token": LogSumExp.of(d, seen, 1),
        "seq": LogSumExp.of(total, present, 1),
        "ppl_ratio": Mean.of((-total / count.clamp(min=1)).clamp(max=700).exp(), present, 1),
        # position stays 1 under the mask that follows the first token; ``seen`` leaves that out
        "first_token": Mean.of(size, seen & first, 1),
    }
    return {
        f"offcorr/{of}/{metric.name}": metric.kind(vectors[metric.name][i], metric.outputs)
        for i, of in enumerate(measured)
        for metric in MISMATCH
    }


def loss_metrics(
    tokens: Tokens,
    *,
    derivative: PerToken,
    held_back: PerToken,
    weight: PerToken,
    kept: TokenMask,
    vetoed: TokenMask,
    truncated: TokenMask,
    coefficient: PerToken,
    nonfinite: TokenMask,
) -> dict[str, Accumulator]:
    """The ``offcorr/loss/`` series: what the correction did.  Masks are False under the mask; ``kept`` too."""
    mask = tokens.mask
    n = mask.sum(dtype=torch.float64)
    # Non-finite values are counted in ``nonfinite`` and left out of every other sum.
    sums = [torch.where(mask, value, 0).nansum(dtype=torch.float64) for value in (held_back, weight)]
    counts = [x.sum(dtype=torch.float64) for x in (truncated, kept, vetoed, mask & (coefficient == 0), nonfinite)]
    shares = {
        "clipped": sums[0],
        "truncated": counts[0],
        "rejected": n - counts[1],
        "vetoed": counts[2],
        "kept": counts[1],
        "weight_mean": sums[1],
        "coefficient_zero": counts[3],
    }

    # What the correction made of the plain ratio, over the tokens that have an advantage.
    advantaged = tokens.advantages != 0
    derivative = torch.where(advantaged & ~nonfinite, weight * derivative, 0)
    staleness = (tokens.logp.detach() - tokens.old_logp).clamp(-LOG_LIMIT, LOG_LIMIT)
    r = torch.where(advantaged, staleness.exp(), 0)
    c, damped, amplified = pointwise.changed(derivative, tokens.advantages, r)
    changes = (advantaged, advantaged & (c == 0), damped, amplified, c, c * c, r, r * r)
    number, dropped, damped, amplified, cs, squared_cs, rs, squared_rs = (x.sum(dtype=torch.float64) for x in changes)

    vectors = {name: torch.stack([total, n]) for name, total in (shares | {"no_advantage": n - number}).items()}
    vectors |= {
        "dropped": torch.stack([dropped, number]),
        "damped": torch.stack([damped, number]),
        "amplified": torch.stack([amplified, number]),
        "after": torch.stack([cs, squared_cs, number]),
        "before": torch.stack([rs, squared_rs, number]),
        "multiplier_vs_ratio": torch.stack([cs, rs]),
        "unscored": tokens.unscored.sum(dtype=torch.float64).reshape(1),
        "nonfinite": counts[4].reshape(1),
        "skipped": torch.stack([torch.zeros_like(n), n.new_full((), len(mask))]),
    }
    return {f"offcorr/loss/{metric.name}": metric.kind(vectors[metric.name], metric.outputs) for metric in LOSS}
