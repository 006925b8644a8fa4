"""What is done to one tile of the head's products, in torch; ``logprob_triton`` has the same names for a GPU.

A tile is [R, C]: R tokens by C vocabulary entries, of which the first is number ``first``.  A product is
``hidden . weight_v``; a logit is what ``Transform`` makes of it.  The target's column is left out of every sum over
a tile and put back by ``finish`` in closed form: log-probabilities keep their relative precision where p is near 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STATE = ("maximum", "total", "shifted", "squares", "rescale")
"""Rows of the running state [5, R]: m = max z, sum e^(z - m), sum e^(z - m) (z - m), sum e^2(z - m), and what the
last tile multiplied earlier sums of e^(z - m) by."""

ROWS = ("lse", "entropy", "d_logp", "d_entropy", "d_target")
"""Rows of what ``grad_tile`` needs of each token [5, R]; ``d_target`` is dL/d(target's product)."""

NEGLIGIBLE = -1e4
"""A shifted logit below which e^x x is 0, also where x is -inf."""


class Transform(NamedTuple):
    """product -> logit: ``soft_cap * tanh((product + bias) * scale / soft_cap) / temperature``."""

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __call__(self, product: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(logit, d logit / d product); overwrites ``product``."""
        if bias is not None:
            product.add_(bias)
        if self.soft_cap is None:
            factor = self.scale / self.temperature
            return _multiply(product, factor), factor
        bounded = product.mul_(self.scale / self.soft_cap).tanh_()
        slope = (1 - bounded * bounded) * (self.scale / self.temperature)
        return bounded.mul_(self.soft_cap / self.temperature), slope


def start(tokens: int, like: Tensor) -> Tensor:
    """The state before the first tile.  The maximum starts finite, so that no difference of two is NaN."""
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
    entropy: bool = False,
    squares: bool = False,
) -> None:
    """Fold a tile of products into ``state``; overwrites the tile.

    ``weights`` [R, C], which may be the tile, gets e^(z - m) d logit / d product, 0 in the target's column.
    """
    maximum, total, shifted, square, rescale = state
    z, slope = transform(tile, bias)
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


class Finished(NamedTuple):
    """Per token: log p(target), log-sum-exp of all logits, entropy and sum of squared probabilities."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    sum_sq_probs: Tensor


def finish(state: Tensor, target_logit: Tensor) -> Finished:
    """Put the target back.  With q = 1 - p(target): logp = -log(1 + e^(lse_others - z_target)), and entropy by
    grouping, H = -p log p - q log q + q H_others."""
    maximum, total, shifted, square, _ = state
    others = maximum + total.log()
    logp = -torch.logaddexp(torch.zeros_like(others), others - target_logit)
    p, q = logp.exp(), -torch.expm1(logp)
    some = total > 0  # false: every other logit is -inf, or there is none
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
    entropy: bool = False,
) -> None:
    """dL/d(product) of a tile of products, to ``out``, which may be the tile; overwrites the tile.

    d_logp (1[v = target] - p_v) - d_entropy p_v (log p_v + H), times d logit / d product.
    """
    lse, mean, d_logp, d_entropy, d_target = rows
    z, slope = transform(tile, bias)
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
    """``x * factor`` in place; no pass over ``x`` where the factor is 1."""
    return x.mul_(factor) if isinstance(factor, Tensor) or factor != 1 else x


def _targets_inside(tile: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(tokens, columns) of the targets that lie in the tile."""
    column = target - first
    tokens = ((column >= 0) & (column < tile.shape[1])).nonzero().squeeze(1)
    return tokens, column[tokens]
