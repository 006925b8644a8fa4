"""Matrix products and row reductions in Triton whose results do not depend on the batch.

A tile has the same size in every launch, and a program adds its terms in a fixed order: neither the number of rows nor
their place in the batch changes the rounding of a row.  Zeros behind a row, and -inf behind a row of logits, change
nothing either.  The same design as in Thinking Machines' batch_invariant_ops and vLLM's VLLM_BATCH_INVARIANT.
``offcorr.exact.batch_invariant`` puts these functions in the place of torch's on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = {2: (64, 128, 64), 4: (64, 64, 32)}
"""BLOCK_M, BLOCK_N and BLOCK_K by the bytes of an element."""
WARPS, STAGES = 4, 3
COLUMNS = 1024
"""Numbers of a row that a program reduces together."""


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_bz,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    rows = (tile % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptr += batch * M * K + rows[:, None] * K + inner[None, :]
    b_ptr += batch * stride_bz + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr, mask=(rows[:, None] < M) & (inner[None, :] < K - start), other=0.0)
        b = tl.load(b_ptr, mask=(inner[:, None] < K - start) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptr += BLOCK_K
        b_ptr += BLOCK_K * stride_bk
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    c_ptr += batch * M * N + rows[:, None] * N + columns[None, :]
    tl.store(c_ptr, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, columns, divisor, SQUARED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        total += x * x if SQUARED else x
    tl.store(out_ptr + row, (tl.sum(total, 0) / divisor).to(out_ptr.dtype.element_ty))


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, LOG: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    out_ptr += row * columns
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        highest = tl.maximum(highest, tl.load(x_ptr + at, mask=at < columns, other=-float("inf")).to(tl.float32))
    maximum = tl.max(highest, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - maximum)
    normaliser = tl.sum(total, 0)
    for start in range(0, columns, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32) - maximum
        y = x - tl.log(normaliser) if LOG else tl.exp(x) / normaliser
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < columns)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias [N]), [M, K] x [K, N] or [B, M, K] x [B, K, N], added in float32; float32 or half precision."""
    stacked = a.dim() == 3
    left, right = (a, b) if stacked else (a[None], b[None])
    batch, m, k = left.shape
    n = right.shape[-1]
    out = left.new_empty(batch, m, n)
    block_m, block_n, block_k = TILES[left.element_size()]
    programs = batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    if programs:
        with _on(a.device):
            matmul_kernel[(programs,)](
                left.contiguous(),
                right,
                bias,
                out,
                m,
                n,
                k,
                *right.stride(),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_K=block_k,
                **options(left.element_size()),
            )
    return out if stacked else out[0]


def options(itemsize: int) -> dict[str, int]:
    """The compiler's options of a matrix product; AMD's shared memory holds two stages."""
    return {"num_warps": WARPS, "num_stages": 2 if torch.version.hip else STAGES}


def row_sum(x: Tensor, *, divisor: float = 1.0, squared: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Sum of x (or x^2) over the last dimension, divided by ``divisor``, added in float32; [..., N] -> [...]."""
    flat = x.contiguous()
    out = x.new_empty(x.shape[:-1], dtype=dtype or x.dtype)
    if out.numel():
        with _on(x.device):
            row_sum_kernel[(out.numel(),)](
                flat, out, x.shape[-1], float(divisor), SQUARED=squared, BLOCK=COLUMNS, num_warps=WARPS
            )
    return out


def softmax(x: Tensor, *, log: bool, dtype: torch.dtype | None = None) -> Tensor:
    """(Log-)softmax over the last dimension, in float32."""
    flat = x.contiguous()
    out = torch.empty_like(flat, dtype=dtype or x.dtype)
    if out.numel():
        with _on(x.device):
            softmax_kernel[(out.numel() // x.shape[-1],)](
                flat, out, x.shape[-1], LOG=log, BLOCK=COLUMNS, num_warps=WARPS
            )
    return out


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
