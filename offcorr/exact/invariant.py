"""A context in which the result of a row does not depend on the batch around it.

Kernels choose how they add by the shape of a batch: a product of one row runs as another routine than one of many, a
long sum is split over as many threads or blocks as there is room for, and the last few numbers of an array are
computed by other code than full vectors.  Floating-point sums depend on that order.  The functions here always compute
the same way: rows in blocks of one size, sums in one order.  They replace operators of torch below autograd, so that
gradients are those of torch.  The approach is that of Thinking Machines' batch_invariant_ops ("Defeating Nondeterminism
in LLM Inference"), which vLLM's VLLM_BATCH_INVARIANT and SGLang's deterministic mode share; here on a CPU, too.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, library

from offcorr.exact.attention import attention
from offcorr.kernels import dispatch
from offcorr.optional import require

ROWS, COLUMNS, TERMS = 16, 16, 32
"""Sizes of a tile of a matrix product on a CPU: rows and columns are padded to multiples, terms are added tile by tile
where their number varies with the batch."""
VECTOR, SERIAL = 64, 16384
"""A multiple of the numbers that torch computes at once, and how many it computes on one thread (it shares more than
32767 between them)."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The precisions of products in tiles."""

_lock = threading.Lock()
_open: list[Any] = []
"""The registration of the replacements, once per context that is open."""


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context in which no row's result depends on the size of its batch, its padding, or its place in it.

    The same then holds of a token that is computed in one forward pass over its sequence or, with a KV cache, alone.
    It covers matrix products, attention by ``scaled_dot_product_attention`` ("sdpa") and by the model's own products
    ("eager", without padding on the left), softmax, log-softmax, RMSNorm and means, and on a CPU the activations that
    torch rounds differently at the end of an array.  Gradients are right; they are batch-invariant only as far as they
    consist of the same operators.  A CPU runs fixed tiles in torch, a GPU Triton kernels of fixed tiles.

    Not covered: models under ``torch.compile``, kernels of other libraries (flash_attention_2), packed rows and sliding
    windows (an error), reductions over the batch itself, and sums over ranks.  ``offcorr.exact.check`` measures whether
    anything is left.  The operators are replaced in the whole process, in every thread; contexts may be nested.

    Raises:
        ModuleNotFoundError: there is a GPU but no Triton.

    >>> x, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with batch_invariant():
    ...     torch.equal((x @ weight.T)[:1], x[:1] @ weight.T)
    True
    """
    with _lock:
        _open.append(_open[0] if _open else _replace())
    try:
        yield
    finally:
        with _lock:
            replaced = _open.pop()
            if not _open:
                replaced._destroy()


def _replace() -> library.Library:
    replaced = library.Library("aten", "IMPL")
    tables = {"CPU": on_cpu()}
    if dispatch.chosen() == "triton":  # under its interpreter; a CPU has no backward of the fused RMSNorm
        tables = {"CPU": {name: function for name, function in on_gpu().items() if name != "_fused_rms_norm"}}
    if torch.cuda.is_available():
        require("offcorr.exact.batch_invariant on a GPU", ["triton>=3.6"], extra="triton")
        tables["CUDA"] = on_gpu()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        replaced.impl("scaled_dot_product_attention", attention, "CompositeImplicitAutograd")
        for key, table in tables.items():
            for name, function in table.items():
                replaced.impl(name, function, key)
    return replaced


# -- CPU -----------------------------------------------------------------------------------------------------


def on_cpu() -> dict[str, Callable[..., Tensor]]:
    """Replacements of torch's operators for tensors on a CPU, by operator."""
    aten = torch.ops.aten
    names = ("silu", "sigmoid", "gelu", "softplus", "mish", "elu", "exp2", "rsqrt")
    single = {name: partial(_elementwise, getattr(aten, name).out) for name in names}
    return {
        "mm": _mm,
        "bmm": _bmm,
        "addmm": partial(_plus_product, _mm),
        "baddbmm": partial(_plus_product, _bmm),
        "mv": lambda matrix, vector: _mm(matrix, vector[:, None])[:, 0],
        "_softmax": _softmax,
        **_where_known({"_grouped_mm": partial(_grouped, _product)}),
        **single,
        **_where_known({f"{name}_": partial(_in_place, function) for name, function in single.items()}),
    }


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b) if a.dim() == 2 else _bmm(a, b)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] x [K, N]: every block of rows is a product of the same shape, of one stack."""
    if not _tiled(a, b):
        return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    wide = _wide(a)
    blocks = math.ceil(a.shape[0] / ROWS)
    rows = _padded(a.to(wide), ROWS, dim=0).view(blocks, ROWS, a.shape[1])
    # A product with fewer columns than a vector is another routine, which depends on the number of blocks.
    weight = b.to(wide) if b.shape[1] >= COLUMNS else _padded(b.to(wide), COLUMNS, dim=1)
    out = rows.new_empty(blocks, ROWS, weight.shape[1])
    torch.bmm(rows, weight.expand(blocks, *weight.shape), out=out)  # the overload with out= is torch's own
    return out.view(-1, weight.shape[1])[: a.shape[0], : b.shape[1]].to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] x [B, K, N], in tiles: the numbers of queries and of keys may differ from pass to pass."""
    if not _tiled(a, b):
        return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))
    wide = _wide(a)
    left = _padded(_padded(a.to(wide), ROWS, dim=1), TERMS, dim=2)
    right = _padded(_padded(b.to(wide), TERMS, dim=1), COLUMNS, dim=2)
    parts = []
    for rows in left.split(ROWS, dim=1):
        total = None
        for x, y in zip(rows.split(TERMS, dim=2), right.split(TERMS, dim=1), strict=True):
            product = torch.bmm(x, y, out=x.new_empty(x.shape[0], ROWS, y.shape[2]))
            total = product if total is None else total.add_(product)
        assert total is not None
        parts.append(total)
    return torch.cat(parts, dim=1)[:, : a.shape[1], : b.shape[2]].to(a.dtype)


def _plus_product(product: Callable[..., Tensor], bias: Tensor, a: Tensor, b: Tensor, **factors: float) -> Tensor:
    alpha, beta = factors.get("alpha", 1), factors.get("beta", 1)
    wide = _wide(a) if a.is_floating_point() else a.dtype
    out = product(a.to(wide), b.to(wide))
    out = out if alpha == 1 else out * alpha
    return (out if beta == 0 else out + (bias if beta == 1 else beta * bias)).to(a.dtype)


def _grouped(
    product: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups of rows (a mixture's experts) or of columns, which end at ``offs``, one by one."""
    if offs is None:
        return product(a, b)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim() == 2:
        return torch.stack([product(a[:, group], b[group]) for group in groups])
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for index, group in enumerate(groups):
        if a.dim() == 2:
            out[group] = product(a[group], b[index])
        else:
            out[:, group] = product(a[index], b[:, group])
    return out


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    if dim % max(x.dim(), 1) != x.dim() - 1 or not x.numel():
        return torch.ops.aten._softmax.out(x, dim, half_to_float, out=torch.empty_like(x))
    wide = x.to(_wide(x))
    e = (wide - wide.amax(-1, keepdim=True)).exp()
    sums = _padded(e, VECTOR, dim=-1).unflatten(-1, (-1, VECTOR)).sum(-1)
    total = sums[..., 0]
    for tile in sums.unbind(-1)[1:]:  # tiles of zeros, behind the last key, change nothing
        total = total + tile
    return (e / total[..., None]).to(x.dtype)


def _elementwise(operator: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """The operator on full vectors, on one thread: torch computes the last few numbers of an array by other code."""
    wide = x.to(_wide(x)).reshape(-1)
    flat = _padded(wide, VECTOR, dim=0)
    out = torch.empty_like(flat)
    for part, to in zip(flat.split(SERIAL), out.split(SERIAL), strict=True):
        operator(part, *args, **options, out=to)
    return out[: x.numel()].view(x.shape).to(x.dtype)


def _in_place(function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.copy_(function(x, *args, **options))


def _tiled(a: Tensor, b: Tensor) -> bool:
    """Whether the operands are for tiles; torch itself does the others, or says what is wrong with them."""
    alike = a.dtype == b.dtype and a.shape[-1] == b.shape[-2]
    return alike and a.dtype in FLOATS and min(a.numel(), b.numel()) > 0


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _padded(x: Tensor, multiple: int, dim: int) -> Tensor:
    """Zeros behind, up to a multiple of a size."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


# -- GPU -----------------------------------------------------------------------------------------------------


def on_gpu() -> dict[str, Callable[..., Any]]:
    """Replacements of torch's operators for tensors on a GPU, by operator."""
    from offcorr.kernels import invariant as kernels

    def product(a: Tensor, b: Tensor) -> Tensor:
        if not _tiled(a, b) or a.dtype == torch.float64:
            operator = torch.mm if a.dim() == 2 else torch.bmm
            return operator(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))
        return kernels.matmul(a, b)

    def plus_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if alpha == beta == 1 and bias.shape == b.shape[-1:] and _tiled(a, b) and a.dtype != torch.float64:
            return kernels.matmul(a, b, bias.contiguous())
        out = alpha * product(a, b)
        return out if beta == 0 else out + beta * bias

    def reduce(x: Tensor, dims: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None, mean: bool) -> Tensor:
        if dtype is not None:
            x = x.to(dtype)
        axes = sorted({d % x.dim() for d in dims}) if dims else list(range(x.dim()))
        size = math.prod(x.shape[d] for d in axes)
        others = [d for d in range(x.dim()) if d not in axes]
        rows = x.permute(*others, *axes).reshape(*(x.shape[d] for d in others), size)
        out = kernels.row_sum(rows, divisor=size if mean else 1.0)
        return out.view([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdim else out

    def reduction(name: str, mean: bool) -> Callable[..., Tensor]:
        native = getattr(torch.ops.aten, name)

        def run(
            x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
        ) -> Tensor:
            kind = dtype or x.dtype
            if not kind.is_floating_point or kind == torch.float64 or not x.numel() or not x.dim():
                kind = kind if mean or kind.is_floating_point or dtype else torch.int64
                wanted = torch.empty(0, dtype=kind, device=x.device)
                return (native.out if mean else native.IntList_out)(x, dim, keepdim, dtype=dtype, out=wanted)
            return reduce(x, dim, keepdim, dtype, mean)

        return run

    def softmax(log: bool) -> Callable[..., Tensor]:
        native = torch.ops.aten._log_softmax.out if log else torch.ops.aten._softmax.out

        def run(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
            dtype = torch.float32 if half_to_float else x.dtype
            if x.dtype == torch.float64 or not x.numel() or dim % max(x.dim(), 1) != x.dim() - 1:
                return native(x, dim, half_to_float, out=torch.empty_like(x, dtype=dtype))
            return kernels.softmax(x, log=log, dtype=dtype)

        return run

    def rms_norm(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        size = math.prod(normalized_shape)
        rows = x.reshape(*x.shape[: x.dim() - len(normalized_shape)], size)
        mean = kernels.row_sum(rows, divisor=size, squared=True, dtype=torch.float32)
        scale = (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
        scale = scale.view(*rows.shape[:-1], *(1,) * len(normalized_shape))
        out = x.float() * scale
        return (out if weight is None else out * weight.float()).to(x.dtype), scale

    return {
        "mm": product,
        "bmm": product,
        "addmm": plus_product,
        "baddbmm": plus_product,
        "mv": lambda matrix, vector: product(matrix, vector[:, None])[:, 0],
        "mean.dim": reduction("mean", mean=True),
        "sum.dim_IntList": reduction("sum", mean=False),
        "_softmax": softmax(log=False),
        "_log_softmax": softmax(log=True),
        **_where_known({"_grouped_mm": partial(_grouped, product), "_fused_rms_norm": rms_norm}),
    }


def _where_known(table: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The operators that this version of torch has."""
    return {name: function for name, function in table.items() if hasattr(torch.ops.aten, name)}
