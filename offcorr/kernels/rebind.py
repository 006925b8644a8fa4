"""A stage's pointwise part for Triton: the same code object, with ``ops`` bound to ``kernel_ops``."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from offcorr.stages import ops


@functools.cache
def for_triton(pointwise: Callable[..., Any]) -> Any:
    """``pointwise`` as a Triton function.  Nothing is written twice: source, names and arithmetic are the reference's.

    Functions that it calls by name are rebound like it; numbers in CAPITALS are constants.

    Raises:
        OSError: the function has no source file (Triton reads the source); it runs on the reference instead.
        ValueError: its source is not what runs, or holds what Triton does not know.
    """
    import triton
    import triton.language as tl

    from offcorr.kernels import kernel_ops

    if not isinstance(pointwise, types.FunctionType):
        raise ValueError("it is no plain function")
    if pointwise.__code__.co_freevars:
        raise ValueError(f"it takes {', '.join(pointwise.__code__.co_freevars)} from the function around it")
    written = _as_written(pointwise)
    scope = pointwise.__globals__ | dict.fromkeys(_annotations(written), tl.tensor)
    scope |= {"ops": kernel_ops, "tl": tl}  # the interpreter looks for triton.language
    names = {node.id for node in ast.walk(written) if isinstance(node, ast.Name)}
    for name in names.intersection(pointwise.__code__.co_names):  # no local ones, no attributes
        value = scope.get(name)
        if value is ops:
            scope[name] = kernel_ops
        elif isinstance(value, types.FunctionType) and value is not pointwise:
            scope[name] = for_triton(value)
        elif isinstance(value, int | float) and name.isupper():
            scope[name] = tl.constexpr(value)
    rebound = types.FunctionType(pointwise.__code__, scope, pointwise.__name__, pointwise.__defaults__)
    rebound.__module__, rebound.__qualname__ = pointwise.__module__, pointwise.__qualname__
    rebound.__annotations__ = {}
    made = triton.jit(rebound)
    try:
        getattr(made, "cache_key", None)  # looks up every name, which a launch would do too late
    except (RuntimeError, AssertionError) as error:
        raise ValueError(str(error)) from error
    return made


def _as_written(pointwise: types.FunctionType) -> ast.FunctionDef:
    """The source that Triton will read, which has to be the source of what runs."""
    lines, _ = inspect.findsource(pointwise)
    if pointwise.__code__ not in _codes(compile("".join(lines), "", "exec", dont_inherit=True)):
        raise ValueError("its source has changed since it was imported, or is not what runs")
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(pointwise))).body
    if not isinstance(written, ast.FunctionDef):
        raise ValueError("it is no def of its own")
    return written


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and every code object within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _annotations(written: ast.FunctionDef) -> set[str]:
    """The names in its annotations: Triton looks them up when it reads the source, and would refuse ``Any``."""
    found = [getattr(node, "annotation", None) or getattr(node, "returns", None) for node in ast.walk(written)]
    modules = {node.value for part in found if part for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    return {
        node.id
        for annotation in found
        if annotation
        for node in ast.walk(annotation)
        if isinstance(node, ast.Name) and node not in modules
    }
