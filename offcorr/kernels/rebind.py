"""A station's pointwise part for Triton: the same code object, with ``ops`` bound to ``triton.language``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


@functools.cache
def for_triton(pointwise: Callable[..., Any]) -> Any:
    """``pointwise`` as a Triton function.  Nothing is written twice: source, names and arithmetic are the reference's.

    Raises:
        OSError: the function has no source file (Triton reads the source); it runs on the reference instead.
    """
    import triton
    import triton.language as tl

    rebound = types.FunctionType(
        pointwise.__code__,
        {**pointwise.__globals__, "ops": tl},
        pointwise.__name__,
        pointwise.__defaults__,
    )
    rebound.__module__, rebound.__qualname__ = pointwise.__module__, pointwise.__qualname__
    # Annotations speak of torch types, which Triton would try to read.
    rebound.__annotations__ = {}
    return triton.jit(rebound)
