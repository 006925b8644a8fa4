"""The functions of ``offcorr.kernels.logprob.tiles`` in Triton, under the same names.

``fold_tile`` starts one program per row of the tile, ``grad_tile`` one per block of a row.  Matrix products are left to
torch.  Sums over a row run in a fixed order, so the same tile always gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from offcorr.kernels.logprob.tiles import Transform
from offcorr.kernels.spans import expm1

BLOCK, WARPS = 2048, 8
"""Columns per block, and warps per program."""


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
    """Adds a tile of products to ``state``, as ``tiles.fold_tile``; overwrites the tile only if it is ``weights``."""
    rows, columns = tile.shape
    scale, soft_cap, inverse_temperature = _numbers(transform)
    fold_kernel[(rows,)](
        tile,
        tile.stride(0),
        bias,
        target,
        state,
        state.stride(0),
        weights,
        weights.stride(0) if weights is not None else 0,
        kept,
        kept.stride(0) if kept is not None else 0,
        first,
        columns,
        scale,
        soft_cap,
        inverse_temperature,
        CAPPED=transform.soft_cap is not None,
        ENTROPY=entropy,
        SQUARES=squares,
        BLOCK=_block(columns),
        num_warps=WARPS,
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
    """Writes dL/d(product) of a tile to ``out``, as ``tiles.grad_tile``.

    The tile is not read where a token has no incoming gradient; the gradient is 0 there.
    """
    columns, block = tile.shape[1], _block(tile.shape[1])
    scale, soft_cap, inverse_temperature = _numbers(transform)
    grad_kernel[(tile.shape[0], triton.cdiv(columns, block))](
        tile,
        tile.stride(0),
        bias,
        target,
        rows,
        rows.stride(0),
        out,
        out.stride(0),
        kept,
        kept.stride(0) if kept is not None else 0,
        first,
        columns,
        scale,
        soft_cap,
        inverse_temperature,
        CAPPED=transform.soft_cap is not None,
        ENTROPY=entropy,
        BLOCK=block,
        num_warps=WARPS,
    )


def _numbers(transform: Transform) -> tuple[float, float, float]:
    return float(transform.scale), float(transform.soft_cap or 1.0), 1.0 / transform.temperature


def _block(columns: int) -> int:
    return min(BLOCK, max(16, triton.next_power_of_2(columns)))


@triton.jit
def _logit(product, scale, soft_cap, inverse_temperature, CAPPED: tl.constexpr):
    """Returns (logit, d logit / d product)."""
    x = product * scale
    slope = tl.zeros_like(x) + scale * inverse_temperature
    if CAPPED:
        # tanh(|x|) = -expm1(-2|x|) / (1 + e^(-2|x|)) is accurate for small and for large x.
        x = x / soft_cap
        e = tl.exp(-2 * tl.abs(x))
        bounded = -expm1(-2 * tl.abs(x)) / (1 + e)
        slope = slope * (4 * e / ((1 + e) * (1 + e)))
        x = soft_cap * tl.where(x < 0, -bounded, bounded)
    return x * inverse_temperature, slope


@triton.jit
def _load(row_ptr, bias_ptr, kept_ptr, columns_at, inside, scale, soft_cap, inverse_temperature, CAPPED: tl.constexpr):
    """Returns (logit, d logit / d product); the logit is -inf outside the support."""
    product = tl.load(row_ptr + columns_at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        product += tl.load(bias_ptr + columns_at, mask=inside, other=0.0).to(tl.float32)
    z, slope = _logit(product, scale, soft_cap, inverse_temperature, CAPPED)
    if kept_ptr is not None:
        z = tl.where(tl.load(kept_ptr + columns_at, mask=inside, other=0) != 0, z, -float("inf"))
    return z, slope


@triton.jit(do_not_specialize=["first", "state_stride"])
def fold_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    target_ptr,
    state_ptr,
    state_stride,
    weights_ptr,
    weights_stride,
    kept_ptr,
    kept_stride,
    first,
    columns,
    scale,
    soft_cap,
    inverse_temperature,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = tile_ptr + row * tile_stride
    if kept_ptr is not None:
        kept_ptr += row * kept_stride
    stride = state_stride.to(tl.int64)
    target = tl.load(target_ptr + row) - first
    lanes = tl.arange(0, BLOCK)
    before = tl.load(state_ptr + row)
    maximum = before
    total = tl.load(state_ptr + stride + row)
    shifted = 0.0
    square = 0.0
    if ENTROPY:
        shifted = tl.load(state_ptr + 2 * stride + row)
    if SQUARES:
        square = tl.load(state_ptr + 3 * stride + row)

    if weights_ptr is not None:  # the weights are relative to the maximum after this tile, which is computed first
        for start in range(0, columns, BLOCK):
            at = start + lanes
            inside = at < columns
            z, slope = _load(row_ptr, bias_ptr, kept_ptr, at, inside, scale, soft_cap, inverse_temperature, CAPPED)
            others = inside & (at != target)
            maximum = tl.maximum(maximum, tl.max(tl.where(others, z, -float("inf")), 0))
        moved = before - maximum
        factor = tl.exp(moved)
        shifted = factor * (shifted + total * moved)
        square = factor * factor * square
        total = factor * total

    for start in range(0, columns, BLOCK):
        at = start + lanes
        inside = at < columns
        z, slope = _load(row_ptr, bias_ptr, kept_ptr, at, inside, scale, soft_cap, inverse_temperature, CAPPED)
        z = tl.where(inside & (at != target), z, -float("inf"))
        highest = tl.maximum(maximum, tl.max(z, 0))
        moved = maximum - highest
        factor = tl.exp(moved)
        z = z - highest
        e = tl.exp(z)
        if ENTROPY:
            shifted = factor * (shifted + total * moved) + tl.sum(tl.where(e > 0, e * z, 0.0), 0)
        if SQUARES:
            square = factor * factor * square + tl.sum(e * e, 0)
        total = factor * total + tl.sum(e, 0)
        maximum = highest
        if weights_ptr is not None:
            to_ptr = weights_ptr + row * weights_stride + at
            tl.store(to_ptr, (e * slope).to(weights_ptr.dtype.element_ty), mask=inside)

    tl.store(state_ptr + row, maximum)
    tl.store(state_ptr + stride + row, total)
    if ENTROPY:
        tl.store(state_ptr + 2 * stride + row, shifted)
    if SQUARES:
        tl.store(state_ptr + 3 * stride + row, square)
    tl.store(state_ptr + 4 * stride + row, tl.exp(before - maximum))


@triton.jit(do_not_specialize=["first", "rows_stride"])
def grad_kernel(
    tile_ptr,
    tile_stride,
    bias_ptr,
    target_ptr,
    rows_ptr,
    rows_stride,
    out_ptr,
    out_stride,
    kept_ptr,
    kept_stride,
    first,
    columns,
    scale,
    soft_cap,
    inverse_temperature,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stride = rows_stride.to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    lse = tl.load(rows_ptr + row)
    d_logp = tl.load(rows_ptr + 2 * stride + row) + tl.zeros([BLOCK], tl.float32)
    d_target = tl.load(rows_ptr + 4 * stride + row)
    active = d_logp != 0
    if ENTROPY:
        mean = tl.load(rows_ptr + stride + row)
        d_entropy = tl.load(rows_ptr + 3 * stride + row) + tl.zeros([BLOCK], tl.float32)
        active = active | (d_entropy != 0)
    row_ptr = tile_ptr + row * tile_stride
    if kept_ptr is not None:
        kept_ptr += row * kept_stride
    z, slope = _load(row_ptr, bias_ptr, kept_ptr, at, inside & active, scale, soft_cap, inverse_temperature, CAPPED)
    log_p = z - lse
    p = tl.exp(log_p)
    grad = -d_logp * p
    if ENTROPY:
        grad -= tl.where(p > 0, d_entropy * p * (log_p + mean), 0.0)
    grad = tl.where(at == tl.load(target_ptr + row) - first, d_target, grad * slope)
    grad = tl.where(active, grad, 0.0)
    tl.store(out_ptr + row * out_stride + at, grad.to(out_ptr.dtype.element_ty), mask=inside)
