"""The vocabulary of a stage's pointwise part, bound to torch.

A pointwise part is written once, over these names, with its numbers in a NamedTuple.  The reference calls
it as it stands; the fused kernel takes the same code object and rebinds ``ops`` to ``triton.language``.
So a pointwise part may use these functions, arithmetic, comparisons, ``&`` and ``|``, and nothing else.
"""

from __future__ import annotations

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


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    if not any(isinstance(x, Tensor) and x.ndim >= condition.ndim for x in (a, b)):
        # torch would answer in float32, or in the numbers' own precision, whatever the inputs'
        raise TypeError("ops.where of two plain numbers has no dtype; write ops.zeros_like(x) + number for one of them")
    return torch.where(condition, a, b)
