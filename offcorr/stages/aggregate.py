"""Aggregations: from per-token terms to one number, the denominator explicit.

    loss = - (1 / Z) sum_i row_weight_i sum_t term_it

Z is ``denominator`` where it is given: tokens for token-mean, sequences for the seq-means, over the global batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offcorr.shapes import IntScalar, PerSequence, Scalar
from offcorr.stages.base import nearest


@dataclass(frozen=True)
class Aggregation:
    """``row_weight``: of a sequence's valid-token count, and the constant length.  ``unit``: what Z counts."""

    unit: str
    row_weight: Callable[[PerSequence, float], PerSequence]
    constant_length: bool = False


AGGREGATIONS = {
    "token-mean": Aggregation("tokens", lambda count, length: torch.ones_like(count)),
    "seq-mean-token-mean": Aggregation("sequences", lambda count, length: 1 / count.clamp(min=1)),
    "seq-mean-token-sum": Aggregation("sequences", lambda count, length: torch.ones_like(count)),
    "seq-mean-token-sum-norm": Aggregation("sequences", lambda count, length: torch.full_like(count, 1 / length), True),
}


def check_aggregate(name: str, max_length: int | None) -> None:
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregate is {name!r}{nearest(name, AGGREGATIONS)}, expected one of {list(AGGREGATIONS)}")
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise ValueError(f"max_length is {max_length!r}, expected a positive number of tokens or None")
    if max_length is not None and not AGGREGATIONS[name].constant_length:
        raise ValueError(
            f"max_length is {max_length}, but aggregate {name!r} divides by no constant length; leave it out"
        )


def row_weights(name: str, count: PerSequence, max_length: int | None, width: int) -> PerSequence:
    """[B] weight of each sequence's sum."""
    return AGGREGATIONS[name].row_weight(count, constant_length(name, max_length, width))


def constant_length(name: str, max_length: int | None, width: int) -> float:
    """What a sequence's sum is divided by where the aggregation divides by a constant."""
    if AGGREGATIONS[name].constant_length and max_length is None:
        warnings.warn(
            f"{name} without max_length divides by the padded width, {width} here, which differs from batch to "
            "batch; pass max_length=, the longest completion allowed",
            stacklevel=5,
        )
    return float(max_length or max(width, 1))


def total(name: str, count: PerSequence, sequences: IntScalar | Scalar | int) -> Scalar:
    """Z of this batch alone."""
    units = count.sum() if AGGREGATIONS[name].unit == "tokens" else torch.as_tensor(sequences).to(count)
    return units.clamp(min=1)


def check_denominator(denominator: float | Tensor) -> None:
    """A positive number; a tensor on a GPU is taken at its word, as looking costs a synchronisation."""
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(f"denominator has shape {tuple(denominator.shape)}, expected a number")
        if denominator.is_cuda:
            return
    if not float(denominator) > 0 or float(denominator) == float("inf"):
        raise ValueError(f"denominator is {denominator!r}, expected a positive number of tokens or sequences")
