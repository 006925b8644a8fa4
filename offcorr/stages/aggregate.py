"""Aggregations: from per-token terms to one number, the denominator explicit.

    loss = - (1 / Z) sum_i row_weight_i sum_t term_it

Z is ``denominator`` where it is given: tokens for token-mean, sequences for the seq-means, over the global batch; 1 for
"sum", for hosts that normalise themselves.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offcorr.shapes import IntScalar, PerSequence, Scalar
from offcorr.stages.checks import one_of, outside, warn_first

__all__ = ["AGGREGATIONS", "Aggregation"]


class Aggregation(NamedTuple):
    """The weight of a sequence's sum of terms, and the unit of Z.

    unit: "tokens", "sequences" or "none" (Z is 1).
    divides_by_count: whether a sequence's sum is divided by its number of valid tokens.
    constant_length: whether it is divided by a constant, ``max_length``.
    """

    unit: Literal["tokens", "sequences", "none"]
    divides_by_count: bool = False
    constant_length: bool = False


AGGREGATIONS = {
    "token-mean": Aggregation("tokens"),
    "seq-mean-token-mean": Aggregation("sequences", divides_by_count=True),
    "seq-mean-token-sum": Aggregation("sequences"),
    "sum": Aggregation("none"),
    "seq-mean-token-sum-norm": Aggregation("sequences", constant_length=True),
}
"""The aggregations, by the name that ``aggregate=`` takes."""


def check_aggregate(name: str, max_length: int | None) -> None:
    """Raise ValueError for an unknown aggregation, or a ``max_length`` that it has no use for."""
    if not isinstance(name, str) or name not in AGGREGATIONS:
        raise ValueError(f"aggregate is {name!r}{one_of(name, AGGREGATIONS)}")
    if max_length is not None and (not _is_count(max_length)):
        raise ValueError(f"max_length is {max_length!r}, expected a positive number of tokens or None")
    if max_length is not None and not AGGREGATIONS[name].constant_length:
        raise ValueError(
            f"max_length is {max_length}, but aggregate {name!r} divides by no constant length; leave it out"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def row_constant(name: str, max_length: int | None, width: int) -> float:
    """The weight of a sequence's sum before any division by its count: 1, or 1 over the constant length."""
    if not AGGREGATIONS[name].constant_length:
        return 1.0
    if max_length is None:
        warnings.warn(
            f"{name} without max_length divides by the padded width, {width} here, which differs from batch to "
            "batch; pass max_length=, the longest completion allowed",
            stacklevel=outside(),
        )
    return 1.0 / (max_length or max(width, 1))


def check_lengths(name: str, max_length: int, count: PerSequence) -> None:
    """Warn once of a sequence with more valid tokens than ``max_length``; on a CPU, as this reads a value."""
    if count.device.type != "cpu" or torch.compiler.is_compiling() or not len(count):
        return
    if (longest := int(count.max())) > max_length:
        warn_first(
            f"max_length {max_length}",
            f"max_length is {max_length}, and a sequence has {longest} valid tokens: {name} divides by max_length, "
            "which is to be the longest completion allowed",
        )


def tokens_on_host(mask: Tensor) -> int | None:
    """The valid tokens of a mask on a CPU; None on a device, where reading them would synchronise."""
    return int(mask.bool().numpy().sum()) if mask.device.type == "cpu" else None


def warn_of_small_denominator(denominator: float | Tensor, mask: Tensor) -> None:
    """Warn once of a batch with more than twice the tokens that the denominator counts; on a CPU, as this reads values.

    A batch of one rank may have more tokens than the mean over ranks, by which it is divided where gradients are
    averaged, but rarely twice as many.  1 stands for a sum.
    """
    own = tokens_on_host(mask)
    if own is None or (isinstance(denominator, Tensor) and denominator.device.type != "cpu"):
        return
    if float(denominator) != 1 and own > 2 * float(denominator):
        warn_first(
            "denominator below the batch's own count",
            f"denominator is {float(denominator):g}, and this batch alone has {own} tokens: aggregate 'token-mean' "
            "divides by the tokens of all micro-batches and ranks (docs/math.md, Aggregation); was the number of "
            "sequences passed?",
        )


def warn_of_tokens(aggregate: str, denominator: float | Tensor, mask: Tensor, sequences: int) -> None:
    """Warn once where sequences are to be counted and the denominator is the batch's own tokens; on a CPU, as this
    reads values.  1 stands for a sum.
    """
    own = tokens_on_host(mask)
    if own is None or (isinstance(denominator, Tensor) and denominator.device.type != "cpu"):
        return
    if own == float(denominator) not in (1, sequences):
        warn_first(
            "denominator of tokens",
            f"denominator is {own}, as many as this batch has tokens, and it has {sequences} sequences: aggregate "
            f"{aggregate!r} divides by the sequences of all micro-batches and ranks (docs/math.md, Aggregation); was "
            "the number of tokens passed?",
        )


def own_total(name: str, count: PerSequence, sequences: Scalar | IntScalar | int) -> Scalar | IntScalar | float:
    """Z of a batch by itself, at least 1."""
    unit = AGGREGATIONS[name].unit
    if unit == "none":
        return 1.0
    if unit == "tokens":
        return count.sum().clamp(min=1)
    return sequences.clamp(min=1) if isinstance(sequences, Tensor) else float(max(sequences, 1))


def checked_denominator(denominator: float | Tensor) -> float | Tensor:
    """The denominator; a tensor of one number as one without dimensions, which decides neither shape nor dtype.

    The value of a tensor on a GPU is not looked at, since reading it would synchronise.

    Raises:
        ValueError: it is no positive number.
    """
    wanted = "expected a positive number of tokens or sequences"
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(f"denominator has shape {tuple(denominator.shape)}, expected one number")
        if denominator.dtype == torch.bool or denominator.is_complex():
            raise ValueError(f"denominator has dtype {denominator.dtype}, {wanted}")
        if denominator.ndim:
            denominator = denominator.reshape(())
        if denominator.is_cuda:
            return denominator
    elif not isinstance(denominator, int | float) or isinstance(denominator, bool):
        raise ValueError(f"denominator is {denominator!r}, {wanted}")
    if not 0 < float(denominator) < float("inf"):
        raise ValueError(f"denominator is {denominator!r}, {wanted}")
    return denominator
