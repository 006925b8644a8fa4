"""Softmax statistics and gradients of one tile of the head's products, in torch.

``offcorr.kernels.logprob.fold`` has the same functions in Triton.  A tile is [R, C]: R tokens by C vocabulary entries,
starting at entry ``first``.  A product is ``hidden . weight_v``; ``Transform`` turns it into a logit.  Every sum over a
tile omits the target's column, and ``finish`` adds the target in closed form, so that log-probabilities keep their
relative precision where p is near 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STATE = ("maximum", "total", "shifted", "squares", "rescale")
"""Rows of the running state [5, R]: m = max z, sum e^(z - m), sum e^(z - m) (z - m), sum e^2(z - m), and the factor by
which the last tile rescaled earlier sums of e^(z - m)."""

ROWS = ("lse", "entropy", "d_logp", "d_entropy", "d_target")
"""Rows of the per-token inputs of ``grad_tile`` [5, R]; ``d_target`` is dL/d(target's product)."""

NEGLIGIBLE = -1e4
"""Lower bound on shifted logits x = z - m: e^x x is 0 there, and no longer NaN where x is -inf."""


class Transform(NamedTuple):
    """Map from product to logit: ``soft_cap * tanh((product + bias) * scale / soft_cap) / temperature``."""

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __call__(self, product: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Returns (logit, d logit / d product); overwrites ``product``."""
        if bias is not None:
            product.add_(bias)
        if self.soft_cap is None:
            factor = self.scale / self.temperature
            return _multiply(product, factor), factor
        bounded = product.mul_(self.scale / self.soft_cap).tanh_()
        slope = (1 - bounded * bounded) * (self.scale / self.temperature)
        return bounded.mul_(self.soft_cap / self.temperature), slope


def start(tokens: int, like: Tensor) -> Tensor:
    """The state before the first tile.

    The maximum starts at the lowest finite number, so that a difference of two maxima is never NaN.
    """
    state = like.new_zeros(len(STATE), tokens)
    state[0].fill_(torch.finfo(like.dtype).min)
    return state


def fold_tile(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    state: Tensor,
    transform: Transform,
    first: int,
    weights: Tensor | None = None,
    *,
    kept: Tensor | None = None,
    entropy: bool = False,
    squares: bool = False,
) -> None:
    """Adds a tile of products to ``state``; overwrites the tile.

    ``weights`` [R, C], which may be the tile itself, receives e^(z - m) d logit / d product, with 0 in the target's
    column.  ``kept`` [R, C], bool: the support; the probability of every other entry is 0.
    """
    maximum, total, shifted, square, rescale = state
    z, slope = transform(tile, bias)
    if kept is not None:
        z.masked_fill_(~kept, -torch.inf)
    tokens, columns = _targets_inside(z, target, first)
    z[tokens, columns] = -torch.inf
    highest = torch.maximum(maximum, z.amax(1))
    moved = maximum - highest
    rescale.copy_(moved.exp())
    z.sub_(highest[:, None])
    if entropy:
        z.clamp_(min=NEGLIGIBLE)
        e = z.exp()
        shifted.add_(total * moved).mul_(rescale).add_(torch.linalg.vecdot(e, z))
    else:
        e = z.exp_()
    if squares:
        square.mul_(rescale * rescale).add_(torch.linalg.vecdot(e, e))
    total.mul_(rescale).add_(e.sum(1))
    maximum.copy_(highest)
    if weights is not None:
        _multiply(e, slope)
        if weights is not e:
            weights.copy_(e)


def merge(states: Tensor) -> Tensor:
    """The state [5, R] of a vocabulary, from the first four rows of its parts' states [parts, 4, R]."""
    maximum, total, shifted, squares = states.unbind(1)
    highest = maximum.amax(0)
    moved = maximum - highest
    factor = moved.exp()
    return torch.stack(
        [
            highest,
            (factor * total).sum(0),
            (factor * (shifted + total * moved)).sum(0),
            (factor * factor * squares).sum(0),
            torch.ones_like(highest),
        ]
    )


class Finished(NamedTuple):
    """Results per token: log p(target), log-sum-exp of all logits, entropy and sum of squared probabilities."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    sum_sq_probs: Tensor


def finish(state: Tensor, target_logit: Tensor) -> Finished:
    """Adds the target to the state and returns the results.

    With p = p(target) and q = 1 - p: logp = -log(1 + e^(lse_others - z_target)), and by the grouping property the
    entropy is H = -p log p - q log q + q H_others.
    """
    maximum, total, shifted, square, _ = state
    others = maximum + total.log()
    logp = -torch.logaddexp(torch.zeros_like(others), others - target_logit)
    p, q = logp.exp(), -torch.expm1(logp)
    some = total > 0  # False where every other logit is -inf, or the vocabulary has one entry
    total = torch.where(some, total, 1)
    within = torch.where(some, total.log() - shifted / total, 0)
    entropy = q * within - torch.xlogy(q, q) - torch.where(p > 0, p * logp, 0)
    return Finished(
        logp, torch.logaddexp(others, target_logit), entropy, p * p + q * q * torch.where(some, square / total**2, 0)
    )


def grad_tile(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows: Tensor,
    transform: Transform,
    first: int,
    out: Tensor,
    *,
    kept: Tensor | None = None,
    entropy: bool = False,
) -> None:
    """Writes dL/d(product) of a tile to ``out``, which may be the tile itself; overwrites the tile.

    dL/d(product_v) = d_logp (1[v = target] - p_v) - d_entropy p_v (log p_v + H), times d logit / d product; ``kept`` is
    that of ``fold_tile``.
    """
    lse, mean, d_logp, d_entropy, d_target = rows
    z, slope = transform(tile, bias)
    if kept is not None:
        z.masked_fill_(~kept, -torch.inf)
    z.sub_(lse[:, None])
    if entropy:
        z.clamp_(min=NEGLIGIBLE)
        grad = z.exp().mul_(z.mul_(-d_entropy[:, None]).sub_((d_logp + d_entropy * mean)[:, None]))
    else:
        grad = z.exp_().mul_(-d_logp[:, None])
    _multiply(grad, slope)
    tokens, columns = _targets_inside(z, target, first)
    grad[tokens, columns] = d_target[tokens]
    if out is not grad:
        out.copy_(grad)


def _multiply(x: Tensor, factor: Tensor | float) -> Tensor:
    """Multiplies ``x`` in place; does nothing if the factor is the number 1."""
    return x.mul_(factor) if isinstance(factor, Tensor) or factor != 1 else x


def _targets_inside(tile: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Indices (tokens, columns) of the targets that lie in the tile."""
    column = target - first
    tokens = ((column >= 0) & (column < tile.shape[1])).nonzero().squeeze(1)
    return tokens, column[tokens]
