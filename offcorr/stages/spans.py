"""Spans: how a per-token quantity is carried over a turn, a prefix or a sequence.

Every span takes ``x`` [B, T], already 0 where the mask is, and a ``Rows``, and gives [B, T].  Masked tokens
are skipped: they enter no sum, no extremum and no count.  What a span writes under the mask is of no consequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import repeat
from torch import Tensor

from offcorr.batch import Rows
from offcorr.shapes import PerSequence, PerToken


def over_row(per_sequence: PerSequence, rows: Rows) -> PerToken:
    return repeat(per_sequence, "b -> b t", t=rows.mask.shape[1])


def token(x: PerToken, rows: Rows) -> PerToken:
    """The token's own."""
    return x


def sequence(x: PerToken, rows: Rows) -> PerToken:
    """Sum over the sequence: the logarithm of a product."""
    return over_row(x.sum(1), rows)


def geometric(x: PerToken, rows: Rows) -> PerToken:
    """Mean over the sequence: the logarithm of a product's T-th root."""
    return over_row(x.sum(1) / rows.count.clamp(min=1), rows)


def turn(x: PerToken, rows: Rows) -> PerToken:
    """Mean over the turn."""
    ids = rows.turn.flatten()
    turns = x.new_zeros(x.numel() + 1)
    total = turns.index_add(0, ids, x.flatten())
    count = turns.index_add(0, ids, rows.mask.flatten().to(x.dtype))
    return (total / count.clamp(min=1))[ids].view_as(x)


def prefix(x: PerToken, rows: Rows) -> PerToken:
    """Running sum, the token included."""
    return x.cumsum(1)


def prefix_geometric(x: PerToken, rows: Rows) -> PerToken:
    """Running mean, the token included."""
    return x.cumsum(1) / rows.position.clamp(min=1)


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


SPANS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    f.__name__: f
    for f in (
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
    )
}
