"""Calls of the functions that stages are made of; an error begins with the class and the attribute of the stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_WRONG = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""The errors of a function that cannot work, beside torch's; others (a lack of memory, say) are passed on."""

_MENDS = {
    "Boolean value of Tensor": "`if`, `and`, `or` and `not` see one value only: use ops.where, &, | and ~",
    "only one element tensors": "use offcorr.ops, which takes tensors, in the place of math and float()",
    "cannot be converted to Scalar": "use offcorr.ops, which takes tensors, in the place of math and float()",
}
"""The mend, by a part of torch's message."""


@cache
def of_library(function: Callable[..., Any]) -> bool:
    """Whether a function is the library's own, whose calls need no checks."""
    return (getattr(function, "__module__", None) or "").startswith("offcorr.")


def called(what: str, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The function's result.

    Raises:
        TypeError: the function raised an error; the message begins with ``what``.
    """
    try:
        return function(*inputs)
    except Exception as error:
        if not isinstance(error, _WRONG) and type(error) not in (RuntimeError, NotImplementedError):
            raise
        mend = next((f" ({mend})" for part, mend in _MENDS.items() if part in str(error)), "")
        raise TypeError(f"{what}: {error}{mend}") from error


def check_values(what: str, values: Any, gives: Sequence[str], like: Tensor) -> None:
    """Raise TypeError unless ``values`` are those that ``gives`` names, each of the shape and dtype of ``like``.

    One value stands by itself, two in a tuple, whose second may be a plain number; "kept" is bool.
    """
    if len(gives) > 1 and (type(values) is not tuple or len(values) != len(gives)):
        came = f"{len(values)} values" if type(values) is tuple else f"a {type(values).__name__}"
        raise TypeError(f"{what} returned {came}, expected a tuple of two values: {' and '.join(gives)}")
    for name, value in zip(gives, values if len(gives) > 1 else (values,), strict=True):
        if name != gives[0] and isinstance(value, int | float):
            continue  # the same for every token
        dtype = torch.bool if name == "kept" else like.dtype
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} returned {value!r} as {name}, expected a tensor; ops.zeros_like(x) + 1 is a constant one"
            )
        if value.shape != like.shape or value.dtype != dtype:
            raise TypeError(
                f"{what} returned {name} with shape {tuple(value.shape)} and {value.dtype}, expected "
                f"{tuple(like.shape)} and {dtype}"
            )


_SEEN: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The rules of users' rejections whose factor has been looked at."""


def seen(rule: Callable[..., Any]) -> bool:
    """Whether ``check_drops_only`` has looked at a factor of this rule."""
    return rule in _SEEN


def check_drops_only(what: str, rule: Callable[..., Any], factor: Tensor, kept: Tensor) -> None:
    """Raise TypeError where a rejection's rule multiplies a kept token by another factor than 1.

    On a device the factor is looked at once for each rule, since reading it synchronises; on a CPU every time.
    """
    if seen(rule) and factor.device.type != "cpu":
        return
    _SEEN.add(rule)
    wrong = kept & (factor != 1)
    if wrong.any():
        raise TypeError(
            f"{what} returned a factor of {float(factor[wrong][0]):g} for a token that it keeps, expected 1: a "
            "rejection only drops tokens. Return ops.zeros_like(value) + 1, or subclass offcorr.weights.Weight"
        )
