"""A pointwise function for Triton: the same code object, with ``ops`` bound to ``offcorr.kernels.ops``."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offcorr.stages import ops


class NotFused(Exception):
    """A correction that runs on the torch reference; the message says why."""


def for_triton(pointwise: Callable[..., Any]) -> Any:
    """``pointwise`` as a Triton function.  Nothing is written twice: source, names and arithmetic are the reference's.

    Functions that it calls by name are rebound like it.

    Raises:
        NotFused: the function has no source file (Triton reads the source), its source is not what runs, it reads a
            number of its module (which the kernel would keep when it changes), or it holds what Triton does not know.
    """
    try:
        return _rebound(pointwise)
    except Exception as error:  # Triton's reader of sources raises errors of every kind
        called = getattr(pointwise, "__qualname__", pointwise)
        raise NotFused(f"{called} cannot run in Triton ({error})") from None


@functools.cache
def _rebound(pointwise: Callable[..., Any]) -> Any:
    import triton
    import triton.language as tl

    from offcorr.kernels import ops as triton_ops

    if not isinstance(pointwise, types.FunctionType):
        raise ValueError("it is no plain function")
    if pointwise.__code__.co_freevars:
        raise ValueError(f"it takes {', '.join(pointwise.__code__.co_freevars)} from the function around it")
    written = _as_written(pointwise)
    scope = pointwise.__globals__ | dict.fromkeys(_annotations(written), tl.tensor)
    scope |= {"ops": triton_ops, "tl": tl}  # the interpreter looks for triton.language
    _refuse_methods(written, scope)
    names = {node.id for node in ast.walk(written) if isinstance(node, ast.Name)}
    for name in names.intersection(pointwise.__code__.co_names):  # no local ones, no attributes
        value = scope.get(name)
        if isinstance(value, types.ModuleType) and value not in (ops, tl, triton_ops):
            raise ValueError(f"it uses the module {name}, and only offcorr.ops runs in torch and in Triton")
        if value is ops:
            scope[name] = triton_ops
        elif isinstance(value, types.FunctionType) and value is not pointwise:
            scope[name] = _rebound(value)
        elif isinstance(value, int | float):
            raise ValueError(
                f"it reads the number {name} of its module, which the kernel would freeze: put it into params"
            )
    rebound = types.FunctionType(pointwise.__code__, scope, pointwise.__name__, pointwise.__defaults__)
    rebound.__module__, rebound.__qualname__ = pointwise.__module__, pointwise.__qualname__
    rebound.__annotations__ = {}
    made = triton.jit(rebound)
    try:
        return named_by_source(made)  # looks up every name, which a launch would do too late
    except (RuntimeError, AssertionError) as error:
        raise ValueError(str(error)) from error


def _refuse_methods(written: ast.FunctionDef, scope: Mapping[str, Any]) -> None:
    """Raise ValueError where a method of a value is called, as in ``value.exp()``."""
    for node in ast.walk(written):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Attribute):
            continue
        of_module = isinstance(called.value, ast.Name) and isinstance(scope.get(called.value.id), types.ModuleType)
        if not of_module:
            known = f": use ops.{called.attr}" if hasattr(ops, called.attr) else ", and only offcorr.ops runs in both"
            raise ValueError(f"it calls the method {ast.unparse(called)}{known}")


def named_by_source(function: Any) -> Any:
    """Gives a Triton function a name that no other source has.

    Triton tells the functions that a kernel is handed apart by their names alone, within a kernel and in its cache.
    """
    key = getattr(function, "cache_key", None)  # none under the interpreter, which caches nothing
    if key is not None and not function.__qualname__.endswith(key[:12]):
        function.__qualname__ = function.fn.__qualname__ = f"{function.__qualname__}_{key[:12]}"
    return function


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
