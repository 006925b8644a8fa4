"""``offcorr.ops`` for Triton, under the same names.

The smaller and the larger of a number and NaN are NaN, as in torch; Triton's own would be the number.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from offcorr.stages import ops

UNBOUNDED = tl.constexpr(ops.UNBOUNDED)


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
