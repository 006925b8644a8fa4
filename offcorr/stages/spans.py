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
from offcorr.shapes import PerSequence, PerToken, TokenMask
from offcorr.stages import ops
from offcorr.stages.checks import one_of, same_definition

__all__ = [
    "SPANS",
    "bounded_min_prefix",
    "budget_margin",
    "geometric",
    "log_mean_exp",
    "min_before",
    "min_prefix",
    "nearby",
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


def min_before(x: PerToken, rows: Rows) -> PerToken:
    """Smallest of the tokens before; infinity for the first."""
    if not x.shape[1]:
        return x
    seen = torch.where(rows.mask, x, torch.inf).cummin(1).values
    return torch.cat([torch.full_like(x[:, :1], torch.inf), seen[:, :-1]], 1)


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


def nearby(x: PerToken, rows: Rows, p: Any) -> PerToken:
    """Sum over the sequence, in which a token ``n`` valid tokens away, before or after, counts p.lam^n."""
    before, after = _decayed(x, rows.mask, p.lam), _decayed(x.flip(1), rows.mask.flip(1), p.lam).flip(1)
    return (before + after - x.double()).to(x.dtype)


def _decayed(x: PerToken, mask: TokenMask, lam: Any) -> PerToken:
    """s_t = x_t + lam s_(t-1) over valid tokens, in float64, by sums over stretches that double in length."""
    total, factor = x.double(), torch.where(mask, torch.as_tensor(lam, dtype=torch.float64, device=x.device), 1)
    width, length = 1, x.shape[1]
    while width < length:
        total = torch.cat([total[:, :width], total[:, width:] + factor[:, width:] * total[:, :-width]], 1)
        factor = torch.cat([factor[:, :width], factor[:, width:] * factor[:, :-width]], 1)
        width *= 2
    return total


def _minimum_before(x: PerToken, rows: Rows) -> PerToken:
    before = min_before(x, rows)
    return torch.where(before.isinf(), 0, before)


def budget_margin(x: PerToken, rows: Rows, p: Any) -> PerToken:
    """CPPO's threshold less the token's weighted measure, C_t - w_t x_t: negative where the token exceeds it.

    Over the T valid tokens of a sequence the weight w_t falls linearly from 1 to ``p.w_min``.  b is the sequence's
    ``p.quantile``-quantile of x, clamped to [p.budget_low, p.budget_high], and
    C_t = min(p.delta, p.delta + sum over s < t of w_s (b - x_s)).
    """
    passed = (rows.position - 1) / over_row((rows.count - 1).clamp(min=1), rows)  # from 0 to 1
    weight = torch.where(rows.mask, 1 - (1 - p.w_min) * passed, 0)
    budget = over_row(ops.clamp(_quantile(x, rows, p.quantile), p.budget_low, p.budget_high), rows)
    spare = budget * _total_before(weight) - _total_before(weight * x)
    return p.delta + spare.clamp(max=0) - weight * x


def _quantile(x: PerToken, rows: Rows, q: Any) -> PerSequence:
    """The ``q``-quantile of each row's valid tokens, linear between order statistics; 0 where there is none."""
    if not x.shape[1]:
        return x.new_zeros(len(x))
    ordered = torch.where(rows.mask, x, torch.inf).sort(1).values
    place = q * (rows.count.double() - 1).clamp(min=0)
    below, above = ordered.gather(1, torch.stack([place.floor(), place.ceil()], 1).long()).unbind(1)
    return torch.where(rows.count > 0, below + (above - below) * place.frac().to(x.dtype), 0)


def _total_before(x: PerToken) -> PerToken:
    """Running sum, the token not included."""
    return _running_total(torch.nn.functional.pad(x, (1, -1))) if x.shape[1] else x


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
        if known is not None and not same_definition(known, span):
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
        raise ValueError(
            f"{owner}: span is {name!r}{one_of(name, sorted(SPANS))}; offcorr.spans.register adds another, and has to "
            "run before"
        )


for _span in (
    token,
    sequence,
    geometric,
    turn,
    prefix,
    prefix_geometric,
    min_before,
    min_prefix,
    bounded_min_prefix,
    sequence_max,
    sequence_min,
    log_mean_exp,
    nearby,
    budget_margin,
):
    register(_span.__name__)(_span)
