"""``offcorr.ops`` for Triton, under the same names.

The smaller and the larger of a number and NaN are NaN, as in torch; Triton's own would be the number.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from offcorr.stages import ops

UNBOUNDED: tl.constexpr = tl.constexpr(ops.UNBOUNDED)
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(80.0)
"""exp of it is still a float32."""


def __getattr__(name: str) -> Any:
    """Everything else is Triton's, looked up when it is used: the interpreter puts its own in the place of it."""
    return getattr(tl, name)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp(x, low, high):
    return minimum(maximum(x, low), high)


@triton.jit
def expm1_minus(x):
    """e^x - 1 - x, by its series near 0, where the difference would cancel."""
    series = 1 + x * (1 / 6) * (1 + x * (1 / 7) * (1 + x * (1 / 8)))
    series = x * x * 0.5 * (1 + x * (1 / 3) * (1 + x * (1 / 4) * (1 + x * (1 / 5) * series)))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1 - x)
