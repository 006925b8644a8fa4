"""Spans: how a per-token quantity is carried over a turn, a prefix or a sequence.

Every span takes ``x`` [B, T], 0 under the mask, and a ``Rows``, and gives [B, T].  Masked tokens enter no sum, no
extremum and no count.  The values that a span gives under the mask are never used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from einops import repeat

from offcorr.batch import Rows
from offcorr.shapes import PerSequence, PerToken
from offcorr.stages.checks import one_of

__all__ = [
    "SPANS",
    "bounded_min_prefix",
    "geometric",
    "log_mean_exp",
    "min_prefix",
    "prefix",
    "prefix_geometric",
    "register",
    "sequence",
    "sequence_max",
    "sequence_min",
    "token",
    "turn",
    "unregister",
]


def over_row(per_sequence: PerSequence, rows: Rows) -> PerToken:
    return repeat(per_sequence, "b -> b t", t=rows.mask.shape[1])


def token(x: PerToken, rows: Rows) -> PerToken:
    """The measure itself."""
    return x


def sequence(x: PerToken, rows: Rows) -> PerToken:
    """Sum over the sequence: the logarithm of a product."""
    return over_row(_total(x), rows)


def geometric(x: PerToken, rows: Rows) -> PerToken:
    """Mean over the sequence: the logarithm of a product's T-th root."""
    return over_row(_total(x) / rows.count.clamp(min=1), rows)


def _total(x: PerToken) -> PerSequence:
    """Sum over the row, in float64 on the way: in float32 a sum that goes far and returns keeps the rounding."""
    return x.sum(1, dtype=torch.float64).to(x.dtype)


def _running_total(x: PerToken) -> PerToken:
    """Running sum, added up in float64, which torch does by itself on a CPU."""
    return x.cumsum(1, dtype=torch.float64).to(x.dtype) if x.is_cuda else x.cumsum(1)


def turn(x: PerToken, rows: Rows) -> PerToken:
    """Mean over the turn."""
    ids = rows.turn.flatten()
    turns = x.new_zeros(x.numel() + 1)
    total = turns.index_add(0, ids, x.flatten())
    count = turns.index_add(0, ids, rows.mask.flatten().to(x.dtype))
    return (total / count.clamp(min=1))[ids].view_as(x)


def prefix(x: PerToken, rows: Rows) -> PerToken:
    """Running sum, the token included."""
    return _running_total(x)


def prefix_geometric(x: PerToken, rows: Rows) -> PerToken:
    """Running mean, the token included."""
    return _running_total(x) / rows.position.clamp(min=1)


def min_prefix(x: PerToken, rows: Rows) -> PerToken:
    """Smallest of the tokens before (0 for the first), plus the token's own."""
    return _minimum_before(x, rows) + x


def bounded_min_prefix(x: PerToken, rows: Rows) -> PerToken:
    """As ``min_prefix``, with the minimum never above 0."""
    return _minimum_before(x, rows).clamp(max=0) + x


def sequence_max(x: PerToken, rows: Rows) -> PerToken:
    """Largest over the sequence; 0 for a sequence with no valid token."""
    if not x.shape[1]:
        return x
    largest = torch.where(rows.mask, x, -torch.inf).amax(1)
    return over_row(torch.where(rows.count > 0, largest, 0), rows)


def sequence_min(x: PerToken, rows: Rows) -> PerToken:
    """Smallest over the sequence; 0 for a sequence with no valid token."""
    return -sequence_max(-x, rows)


def log_mean_exp(x: PerToken, rows: Rows) -> PerToken:
    """Logarithm of the mean of exp(x), accurate for tiny x and safe for large."""
    largest = sequence_max(x, rows)
    below = torch.where(rows.mask, torch.expm1(x - largest), 0).sum(1) / rows.count.clamp(min=1)
    return largest + over_row(torch.log1p(below), rows)


def _minimum_before(x: PerToken, rows: Rows) -> PerToken:
    if not x.shape[1]:
        return x
    seen = torch.where(rows.mask, x, torch.inf).cummin(1).values
    before = torch.cat([torch.full_like(x[:, :1], torch.inf), seen[:, :-1]], 1)
    return torch.where(before.isinf(), 0, before)


PRODUCTS = ("sequence", "prefix")
"""The spans that multiply the ratios of many tokens, so that the rounding of every log-prob adds up."""

SPANS: dict[str, Callable[..., PerToken]] = {}
"""The torch function of each span, by name."""


def register(name: str) -> Callable[[Any], Any]:
    """Make a span known by ``name``, for a stage's ``span``.

    Decorates a torch function ``(x, rows)`` or ``(x, rows, p)`` from [B, T] to [B, T]: ``x`` is the stage's measure, 0
    under the mask; ``rows`` holds ``mask``, ``position`` and ``count``; ``p`` is the stage's ``params``.  A correction
    with this span runs on the torch reference, and warns once, until a Triton twin is registered under the same name in
    ``offcorr.kernels.spans``.

    Raises:
        TypeError: the function takes other arguments.
        ValueError: the name exists already.

    >>> import offcorr, torch
    >>> @offcorr.spans.register("suffix")
    ... def suffix(x, rows):
    ...     return x.flip(1).cumsum(1).flip(1)
    >>> suffix(torch.ones(1, 3), None)
    tensor([[3., 2., 1.]])
    >>> offcorr.spans.unregister("suffix")
    """

    def decorate(span: Callable[..., PerToken]) -> Callable[..., PerToken]:
        asked = tuple(inspect.signature(span).parameters)
        if asked not in (("x", "rows"), ("x", "rows", "p")):
            raise TypeError(f"span {name!r} takes {asked}, expected (x, rows) or (x, rows, p)")
        known = SPANS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (span.__module__, span.__qualname__):
            raise ValueError(f"a span named {name!r} exists already: {known.__module__}.{known.__qualname__}")
        SPANS[name] = span
        return span

    return decorate


def unregister(name: str) -> None:
    """Forget a span."""
    check(name, "offcorr.spans")
    del SPANS[name]


def check(name: str, owner: str) -> None:
    """Raise ValueError, in the name of ``owner``, for a span that is not known."""
    if name not in SPANS:
        raise ValueError(f"{owner}: span is {name!r}{one_of(name, sorted(SPANS))}")


for _span in (
    token,
    sequence,
    geometric,
    turn,
    prefix,
    prefix_geometric,
    min_prefix,
    bounded_min_prefix,
    sequence_max,
    sequence_min,
    log_mean_exp,
):
    register(_span.__name__)(_span)
