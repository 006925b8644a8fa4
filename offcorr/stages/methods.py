"""Checks of the methods of a stage's class when it is defined: each can be called, and none takes the place of data."""

from __future__ import annotations

import inspect
import types
from typing import Any

SIGNATURES = {
    "statistics": "statistics(self, tokens)",
    "resolve": "resolve(self, statistics)",
    "logged": "logged(self, resolved)",
    "prepare": "prepare(self, batch)",
}
"""The methods of a stage that the library calls, each with one argument."""


def check_init(cls: Any) -> None:
    """Raise TypeError for a class with an ``__init__`` that no dataclass wrote, its own or a base's.

    What such a method sets is no field: instances with different values would be equal, and a configuration would lose
    them.
    """
    for base in cls.__mro__[:-1]:
        if "__init__" not in vars(base) or "__dataclass_params__" in vars(base) or base.__module__ == "typing":
            continue
        whose = "" if base is cls else f" of {base.__name__}"
        raise TypeError(
            f"{cls.__name__} has an __init__ of its own{whose}, whose numbers are not in comparisons, repr and "
            f"configurations: expected @dataclass(frozen=True) above class {cls.__name__} and fields in it, "
            f"{_as_fields(base.__init__)}, with checks of them in __post_init__(self)"
        )


def _as_fields(init: Any) -> str:
    """The arguments of an ``__init__`` as fields of a dataclass.

    >>> def init(self, eps, cap=2.0): ...
    >>> _as_fields(init)
    'eps: float; cap: float = 2.0'
    """
    arguments = [one for one in _parameters(init)[1:] if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return "; ".join(map(_as_field, arguments)) or "for instance eps: float = 0.2"


def _as_field(argument: inspect.Parameter) -> str:
    given = argument.default is not argument.empty
    kind = type(argument.default).__name__ if given and argument.default is not None else "float"
    if argument.annotation is not argument.empty:
        kind = inspect.formatannotation(argument.annotation).strip("'")
    return f"{argument.name}: {kind}" + (f" = {argument.default!r}" if given else "")


def check_fields(cls: Any) -> None:
    """Raise TypeError for a dataclass with a field that its configuration would lose, or that makes no difference."""
    for name, field in cls.__dataclass_fields__.items():
        what = f"{cls.__name__}.{name}"
        if "InitVar" in str(field.type):
            raise TypeError(f"{what} is an InitVar, which is in no configuration, expected a field: {name}: float")
        if not field.init:
            raise TypeError(
                f"{what} is a field with init=False, with which no configuration can make the stage again, expected a "
                "property that computes it of the other fields"
            )
        if not field.compare and cls.__dataclass_params__.eq:
            raise TypeError(f"{what} is a field with compare=False: stages with other values would be equal")


def check_methods(cls: Any) -> None:
    """Raise TypeError for a method that cannot be called as the library calls it, or that stands in for a value."""
    for name, value in vars(cls).items():
        if name in SIGNATURES and not _takes_one(cls, name):
            takes = inspect.signature(getattr(cls, name))
            raise TypeError(f"{cls.__name__}.{name} takes {takes}, expected {SIGNATURES[name]}{_instead(name)}")
        if isinstance(value, types.FunctionType) and name not in cls.PARTS and _is_value(cls, name):
            raise TypeError(
                f"{cls.__name__}.{name} is a method, and the library reads a value there: expected @property above "
                f"def {name}(self)"
            )


def _takes_one(cls: Any, name: str) -> bool:
    """Whether a method of an instance can be called with one argument, by its place."""
    method = getattr(cls, name)
    if not callable(method):
        return True  # which another check refuses
    bound = not isinstance(inspect.getattr_static(cls, name), types.FunctionType)
    try:
        inspect.signature(method).bind(*[None] * (1 if bound else 2))
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    return True


def _instead(name: str) -> str:
    """The mend for a ``resolve`` that asks for more than the statistics of its step; "" for other methods."""
    if name != "resolve":
        return ""
    return (
        ": a controller sees the statistics of its own optimizer step and nothing else; what is known only after a "
        "step, such as its metrics, is an option of the next one"
    )


def _is_value(cls: Any, name: str) -> bool:
    """Whether the nearest base that knows a public name has a value or a property there."""
    if name.startswith("_") or name in SIGNATURES:
        return False
    for base in cls.__mro__[1:-1]:
        if name in vars(base):
            return not isinstance(vars(base)[name], types.FunctionType | classmethod | staticmethod)
    return False


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in, without a signature
        return []


def number_as_field(cls: str, argument: str, default: Any) -> str:
    """The end of an error about a pointwise function that asks for a number of its own.

    >>> number_as_field("Mine", "eps", 0.2)
    'A number is a field of the class, named in params: in Mine `eps: float = 0.2` and `params = property(lambda self: \
Numbers(self.eps))`, with `class Numbers(NamedTuple): eps: float` before it; the function asks for p and reads p.eps'
    """
    known = default is not inspect.Parameter.empty
    return (
        f"A number is a field of the class, named in params: in {cls} `{argument}: float"
        + (f" = {default!r}" if known else "")
        + f"` and `params = property(lambda self: Numbers(self.{argument}))`, with "
        f"`class Numbers(NamedTuple): {argument}: float` before it; the function asks for p and reads p.{argument}"
    )
