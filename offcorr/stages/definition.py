"""Checks of a stage's class when it is defined: every mistake is named then, not in the middle of a run."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
from functools import cache, cached_property
from numbers import Real
from typing import Any, get_args

from torch import Tensor

from offcorr.shapes import Mismatch
from offcorr.stages import spans
from offcorr.stages.checks import nearest, one_of
from offcorr.stages.methods import SIGNATURES, check_fields, check_init, check_methods, number_as_field

INPUTS = {
    "log_ratio": "log-ratio of the stage's two policies at this token (nats), clamped to +-20",
    "raw_log_ratio": "the same, not clamped",
    "value": "the measure carried over the span; for a gate, the ratio's logarithm as a constant",
    "logp": "log-prob under the first policy of the pair; for a gate always under the policy being trained",
    "anchor_logp": "log-prob under the second policy of the pair",
    "advantage": "advantage of the token",
    "position": "1-based count of valid tokens",
    "length": "number of valid tokens of the sequence",
    "mean_advantage": "mean of the advantage over the sequence's valid tokens",
    "reward": "reward of the sequence",
    "entropy": "``Batch.entropy`` of the token (nats)",
}
"""The inputs of a pointwise function, chosen by the names of its arguments; ``p`` is the stage's ``params``."""

KINDS: dict[str, Any] = {}
"""The base class of each kind of stage, by its name."""

_NOT_CALLED = ("__call__", "spec", "truncated", "kept")


def check(cls: Any) -> None:
    """Raise TypeError where a stage's class cannot work, ValueError where its span is unknown; the message names the
    class and the attribute.
    """
    name = cls.__name__
    for method in _NOT_CALLED:
        if method in vars(cls):
            raise TypeError(
                f"{name} defines {method}, which nothing calls: a stage states what it does in "
                f"{_listed(cls.PARTS) or 'statistics and resolve'}"
            )
    check_init(cls)
    _check_attributes(cls)
    check_methods(cls)
    if hasattr(cls, "resolve"):
        _check_controller(cls)
        return
    params = vars(cls).get("params", property())
    if not isinstance(params, property | cached_property):
        raise TypeError(f"{name}.params is {params!r}, expected a property that gives a NamedTuple of numbers")
    for part, values in cls.PARTS.items():
        given = inspect.getattr_static(cls, part, None)
        if getattr(given, "__isabstractmethod__", False):
            wanted = "two values" if values == 2 else "one value"
            raise TypeError(f"{name} has no {part}, expected staticmethod(a function that returns {wanted})")
        if isinstance(given, property):
            continue  # it depends on the fields: ``check_computed``
        if isinstance(given, types.FunctionType):
            raise TypeError(
                f"{name}.{part} is a plain function, which Python would make a method of {name}: "
                f"expected staticmethod({given.__name__})"
            )
        if not isinstance(given, staticmethod):
            raise TypeError(f"{name}.{part} is {given!r}, expected staticmethod(a function)")
        _check_part(cls, part, given.__func__)

    if isinstance(span := vars(cls).get("span"), str) and "measure" in cls.PARTS:
        spans.check(span, name)
    if cls.KIND == "gate":
        uses_ratio, surrogate = (inspect.getattr_static(cls, attribute) for attribute in ("uses_ratio", "surrogate"))
        if isinstance(surrogate, staticmethod):
            check_uses_ratio(name, uses_ratio, surrogate.__func__)


def check_computed(stage: Any) -> None:
    """Raise TypeError where a function that a user's class computes from the fields of a stage cannot be called.

    A correction is built for every micro-batch where it has controllers, so each function is looked at once.
    """
    cls: Any = type(stage)
    for part in _computed_parts(cls):
        function = getattr(stage, part)
        if not callable(function):
            raise TypeError(f"{cls.__name__}.{part} is {function!r}, expected a function")
        _check_part(cls, part, function)


@cache
def _computed_parts(cls: Any) -> tuple[str, ...]:
    """The pointwise functions that are properties of a class; none of the library's, whose tests call them all."""
    if cls.__module__.startswith("offcorr."):
        return ()
    return tuple(part for part in cls.PARTS if isinstance(inspect.getattr_static(cls, part, None), property))


@cache
def _check_part(cls: Any, part: str, function: Any) -> None:
    """Raise TypeError for a pointwise function of a class that cannot be called; the message names both."""
    name = cls.__name__
    check_pointwise(f"{name}.{part}", function, cls.PARTS[part])
    asked = inspect.signature(function).parameters
    if part == "measure" and "value" in asked:
        raise TypeError(f"{name}.measure asks for 'value', which is what the span makes of the measure")
    has_params = any("params" in vars(base) for base in cls.__mro__ if base.__name__ != "Stage")
    if "p" in asked and not has_params:
        raise TypeError(
            f"{name}.{part} asks for p, but {name} has no params: expected a property params that gives a "
            "NamedTuple of numbers"
        )


OF_RATIO = ("log_ratio", "raw_log_ratio", "value")
"""The inputs that a gate may ask for only if it uses a ratio."""


def check_uses_ratio(name: str, uses_ratio: Any, surrogate: Any) -> None:
    """Raise TypeError for a gate, the class ``name``, that asks for the ratio and says that it uses none."""
    asked = [argument for argument in inspect.signature(surrogate).parameters if argument in OF_RATIO]
    if uses_ratio is False and asked:
        raise TypeError(
            f"{name}.uses_ratio is False, but {name}.surrogate asks for {asked[0]!r}, which is of the ratio: leave "
            "uses_ratio out, or ask for none of " + _listed(OF_RATIO)
        )


METRICS_FED = ("", "truncated", "vetoed")
"""The values of ``counts_as``."""

COUPLES = ("batch", "group")
"""The values of ``couples``."""

_WORDS = {"mismatch": (*get_args(Mismatch), None), "counts_as": METRICS_FED, "couples": COUPLES}
_FLAGS = ("detached", "uses_ratio", "scales_with_advantage")
_LIMITS = ("limit", "log_limit")


def _check_attributes(cls: Any) -> None:
    """Raise TypeError for a class attribute that would be ignored, or whose value the library does not know."""
    annotated = vars(cls).get("__annotations__", {})
    fields = {name: base for base in cls.__mro__[:0:-1] for name in vars(base).get("__dataclass_fields__", {})}
    for name, value in vars(cls).items():
        what = f"{cls.__name__}.{name}"
        if name.startswith("_"):
            continue
        if name in fields and name not in annotated and not _computed(value):
            raise TypeError(
                f"{what} is {value!r} without an annotation, which changes nothing: {name} is a field of "
                f"{fields[name].__name__}, and every instance gets the field's default. Expected "
                f"{name}: {type(value).__name__} = {value!r} under @dataclass(frozen=True)"
            )
        if name == "mismatch" and cls.KIND == "gate" and not hasattr(cls, "resolve"):
            raise TypeError(f"{what} is {value!r}, which nothing reads: a gate compares the policies of its ratio")
        known = _public_names(cls.__mro__[1:-1])
        if name not in known and hasattr(cls, "resolve"):
            _check_of_resolved(cls, name)
        if name not in known:
            _check_unknown(cls, name, known)
        elif not _computed(value):
            if isinstance(inspect.getattr_static(cls.__mro__[1], name, None), classmethod | types.FunctionType):
                raise TypeError(f"{what} is {value!r}, expected a method")
            _check_known(what, name, value)


def _public_names(classes: Any) -> set[str]:
    """The names that classes give a value or an annotation."""
    named = {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", {}))}
    return {name for name in named if not name.startswith("_")}


def _check_unknown(cls: Any, name: str, known: set[str]) -> None:
    """Fields, functions and constants are a stage's own, unless they look like a misspelt name of a base class."""
    value, annotation = vars(cls)[name], vars(cls).get("__annotations__", {}).get(name)
    if annotation is not None and "ClassVar" not in str(annotation):
        return
    if difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        raise TypeError(f"{cls.__name__}.{name} is {value!r}, which nothing reads{nearest(name, known)}")


def _check_of_resolved(cls: Any, name: str) -> None:
    """Raise TypeError for a controller's attribute that is read of the stage that it resolves to, or is meant to be."""
    if name in vars(cls).get("__annotations__", {}):
        return  # a field
    known = _public_names(base for kind, base in KINDS.items() if kind in _BECOMES)
    if name in known or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        meant = "; it" if name in known else f"{nearest(name, known)} It"
        raise TypeError(
            f"{cls.__name__}.{name} is {vars(cls)[name]!r}, which nothing reads in a controller{meant} belongs to the "
            "stage that resolve returns"
        )


def _check_known(what: str, name: str, value: Any) -> None:
    value = getattr(value, "default", value)  # of a dataclasses.field
    if value is dataclasses.MISSING:
        return
    if name in _WORDS and value not in _WORDS[name]:
        raise TypeError(f"{what} is {value!r}{one_of(value, _WORDS[name])}")
    if name == "needs" and not isinstance(value, frozenset | set):
        raise TypeError(f"{what} is {value!r}, {needs_wanted(value)}")
    if name in _FLAGS and not isinstance(value, bool):
        raise TypeError(f"{what} is {value!r}, expected True or False")
    if name in _LIMITS and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise TypeError(f"{what} is {value!r}, expected a number of nats above 0")


def needs_wanted(given: Any) -> str:
    """The end of an error about ``needs``, with what was meant where that can be seen.

    >>> needs_wanted(["rewards"])
    "expected a frozenset of names: frozenset({'rewards'})"
    """
    names = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    return "expected a frozenset of names" + (f": frozenset({{{_listed(map(repr, names))}}})" if names else "")


def _computed(value: Any) -> bool:
    """Whether a class attribute is code rather than a value."""
    return callable(value) or isinstance(value, property | cached_property | classmethod | types.MemberDescriptorType)


def _check_controller(cls: Any) -> None:
    if cls.KIND not in _BECOMES:
        raise TypeError(f"{cls.__name__}.becomes is {getattr(cls, 'becomes', None)!r}, expected one of {_BECOMES}")
    for method in ("statistics", "resolve"):
        if getattr(cls, method).__qualname__ == f"Controller.{method}":
            raise TypeError(f"{cls.__name__} has no {method}, expected a method {SIGNATURES[method]}")


def check_pointwise(label: str, function: Any, values: int) -> None:
    """``function`` can be called by the names of its arguments and returns ``values`` values, as far as is visible."""
    if not callable(function):
        raise TypeError(f"{label} is {function!r}, expected a function")
    for argument in inspect.signature(function).parameters.values():
        _check_input(label, argument)
    returned = _values_returned(function)
    if returned is not None and returned != values:
        wanted = "a tuple of two values" if values == 2 else "one value"
        raise TypeError(f"{label} returns {returned} value{'s' if returned > 1 else ''}, expected {wanted}")


def _check_input(label: str, argument: inspect.Parameter) -> None:
    """Raise TypeError for an argument of a pointwise function that is no input: misspelt, or a number of its own."""
    known, name = [*INPUTS, "p"], argument.name
    if name in known:
        return
    near = nearest(name, known) if argument.default is argument.empty else ""
    number = "" if near else " " + number_as_field(label.partition(".")[0], name, argument.default) + "."
    raise TypeError(f"{label} asks for {name!r}{near or ', which is no input.'}{number} It may ask for {known}")


@cache
def check_dataclass(cls: Any) -> None:
    """Raise TypeError for a class that declares fields but is not a frozen dataclass, or whose fields it would lose."""
    annotations = vars(cls).get("__annotations__", {})
    declared = [name for name, annotation in annotations.items() if "ClassVar" not in str(annotation)]
    is_dataclass = "__dataclass_params__" in vars(cls)
    if declared and not is_dataclass:
        raise TypeError(
            f"{cls.__name__} declares {_listed(declared)} but is no dataclass: put @dataclass(frozen=True) above it"
        )
    if is_dataclass and not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} is a dataclass that can change, expected @dataclass(frozen=True)")
    if is_dataclass:
        check_fields(cls)


def checked_params(stage: Any) -> tuple[Any, ...]:
    """``stage.params``, a NamedTuple of numbers or ().

    Raises:
        TypeError: it is something else.
    """
    params = stage.params
    if params == ():
        return ()
    if not isinstance(params, tuple) or not hasattr(params, "_fields"):
        raise TypeError(f"{type(stage).__name__}.params is {params!r}, expected a NamedTuple of numbers")
    for name, value in zip(params._fields, params, strict=True):
        if isinstance(value, Tensor):
            if value.ndim:
                raise TypeError(
                    f"{type(stage).__name__}.params.{name} has shape {tuple(value.shape)}, expected a 0-dim tensor"
                )
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{type(stage).__name__}.params.{name} is {value!r}, expected a number")
    return params


_BECOMES = ["gate", "weight", "rejection", "advantages"]


def _listed(names: Any) -> str:
    return ", ".join(names)


def _values_returned(function: Any) -> int | None:
    """The number of values that a function returns, read from its source; None where that does not show it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    (written, *others) = tree.body
    if others or not isinstance(written, ast.FunctionDef):
        return None
    assigned = {
        target.id: node.value
        for node in ast.walk(written)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    counts = {_values_of(node.value, assigned) for node in ast.walk(written) if isinstance(node, ast.Return)}
    return counts.pop() if len(counts) == 1 else None


def _values_of(expression: ast.expr | None, assigned: dict[str, ast.expr]) -> int | None:
    if isinstance(expression, ast.Name) and expression.id in assigned:
        others = {name: value for name, value in assigned.items() if name != expression.id}
        return _values_of(assigned[expression.id], others)
    if isinstance(expression, ast.Tuple):
        return len(expression.elts)
    if isinstance(expression, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Constant):
        return 1
    called = expression.func if isinstance(expression, ast.Call) else None
    over_ops = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "ops"
    return 1 if over_ops else None
