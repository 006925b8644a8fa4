"""The vocabulary of pointwise functions, bound to torch.

A pointwise function is written once, over these names, with its numbers in a NamedTuple.  The torch reference calls it
as it stands; the kernel takes the same code object and binds ``ops`` to ``offcorr.kernels.ops``, which has the same
names for Triton.  So a pointwise function may use these, arithmetic, comparisons, ``&`` and ``|``, and nothing else.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

exp = torch.exp
log = torch.log
abs = torch.abs
sqrt = torch.sqrt
sigmoid = torch.sigmoid
zeros_like = torch.zeros_like

UNBOUNDED = 1e30
"""Stands for "no bound" in parameters: finite, so that a product with a zero advantage is 0."""

LARGEST_EXPONENT = 700.0
"""exp(700) is still finite in float64; the kernel has 80, for float32."""

_NAMES = "abs, clamp, exp, expm1_minus, log, maximum, minimum, sigmoid, sqrt, where, zeros_like"


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"offcorr.ops has no {name!r}; a pointwise function may use {_NAMES}")


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The smaller of two; NaN where either is."""
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The larger of two; NaN where either is."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def clamp(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """``x`` within [low, high]; NaN stays NaN."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return minimum(maximum(x, low), high)
    return x.clamp(low, high)


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """``a`` where the condition holds, else ``b``; one of them is a tensor."""
    if getattr(a, "ndim", -1) < condition.ndim and getattr(b, "ndim", -1) < condition.ndim:
        # torch would answer in float32, or in the numbers' own precision, whatever the inputs'
        raise TypeError("ops.where of two plain numbers has no dtype; write ops.zeros_like(x) + number for one of them")
    return torch.where(condition, a, b)


def expm1_minus(x: Tensor) -> Tensor:
    """e^x - 1 - x, which is never negative."""
    return torch.expm1(x) - x
