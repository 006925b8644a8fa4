"""A station's pointwise part for Triton: the same code object, with ``ops`` bound to ``triton.language``."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
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
        {**pointwise.__globals__, **dict.fromkeys(_annotations(pointwise), tl.tensor), "ops": tl},
        pointwise.__name__,
        pointwise.__defaults__,
    )
    rebound.__module__, rebound.__qualname__ = pointwise.__module__, pointwise.__qualname__
    rebound.__annotations__ = {}
    return triton.jit(rebound)


def _annotations(pointwise: Callable[..., Any]) -> set[str]:
    """The names in its annotations: Triton looks them up when it reads the source, and would refuse ``Any``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(pointwise)))
    written = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation]
    return {node.id for annotation in written for node in ast.walk(annotation) if isinstance(node, ast.Name)}
