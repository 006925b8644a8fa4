"""Calls of the functions that stages are made of; an error begins with the class and the attribute of the stage."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.shapes import Mismatch
from offcorr.stages.base import Controller, Number, Stage
from offcorr.stages.checks import nearest, of_library, warn_first, warn_once
from offcorr.stages.definition import checked_params

_WRONG = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""The errors of a function that cannot work, beside torch's; others (a lack of memory, say) are passed on."""

_NUMBER = "ops takes a tensor first; a plain number is computed in params, by math, or stands second"

_MENDS = {
    "argument 'input' (position 1) must be Tensor": _NUMBER,
    "object has no attribute 'clamp'": _NUMBER,
    "Boolean value of Tensor": "`if`, `and`, `or` and `not` see one value only: use ops.where, &, | and ~",
    "only one element tensors": "use offcorr.ops, which takes tensors, in the place of math and float()",
    "cannot be converted to Scalar": "use offcorr.ops, which takes tensors, in the place of math and float()",
}
"""The mend, by a part of torch's message."""


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
        raise TypeError(f"{what}: {error}{mend}{_meant(error)}") from error


def _meant(error: Exception) -> str:
    """The numbers of a NamedTuple, ``p`` of a pointwise function, that was asked for one that it does not have."""
    known = getattr(getattr(error, "obj", None), "_fields", None)
    if not isinstance(error, AttributeError) or known is None:
        return ""
    return f"{nearest(str(error.name), known, ',')} it has {list(known)}"


@contextlib.contextmanager
def unchanged(what: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Raise TypeError where a function changed an input in place, which other functions and metrics see, too.

    ``torch.compile`` and inference mode keep no count of the changes.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        yield
        return
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and not x.is_inference()}
    before = {name: x._version for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        if x._version != before[name]:
            own = name if name.isidentifier() else "x"
            raise TypeError(
                f"{what} changes {name} in place, which others see, too: write {own} = {own} + 1 in the place of "
                f"{own} += 1, and no method that ends in _"
            )


def held_by(given: Any) -> dict[str, Any]:
    """The values that the argument of a stage's method holds, by name; for ``Tokens`` batch and log-ratios as well."""
    held = dict(getattr(given, "__dict__", {}))
    if not isinstance(given, Tokens):
        return held
    held |= {f"batch.{name}": value for name, value in vars(given.batch).items()}
    pairs: tuple[Mismatch, ...] = ("staleness",) if given.batch.rollout_logp is None else get_args(Mismatch)
    for pair in pairs:  # computed once, for the loss as well
        held |= {f"log_ratio({pair!r}).{name}": value for name, value in given.log_ratio(pair)._asdict().items()}
    return held


def check_values(what: str, values: Any, gives: Sequence[str], like: Tensor) -> None:
    """Raise TypeError unless ``values`` are those that ``gives`` names, each of the shape and dtype of ``like``.

    One value stands by itself, two in a tuple, whose second may be a plain number; "kept" is bool, or True.
    """
    if len(gives) > 1 and (type(values) is not tuple or len(values) != len(gives)):
        came = f"{len(values)} values" if type(values) is tuple else f"a {type(values).__name__}"
        raise TypeError(f"{what} returned {came}, expected a tuple of two values: {' and '.join(gives)}")
    for name, value in zip(gives, values if len(gives) > 1 else (values,), strict=True):
        if name != gives[0] and isinstance(value, bool if name == "kept" else int | float):
            continue  # the same for every token
        dtype = torch.bool if name == "kept" else like.dtype
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} returned {value!r} as {name}, expected "
                + ("a bool tensor, or True" if name == "kept" else "a tensor; ops.zeros_like(x) + 1 is a constant one")
            )
        if value.shape != like.shape or value.dtype != dtype:
            raise TypeError(
                f"{what} returned {name} with shape {tuple(value.shape)} and {value.dtype}, expected "
                f"{tuple(like.shape)} and {dtype}"
            )


_SEEN: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The rules of users' rejections whose factor has been looked at."""


def trusted(rule: Callable[..., Any]) -> bool:
    """Whether a rejection's rule is the library's own, or a user's whose factor has been looked at."""
    return of_library(rule) or rule in _SEEN


def check_drops_only(what: str, rule: Callable[..., Any], factor: Tensor, kept: Tensor) -> None:
    """Raise TypeError where a rejection's rule multiplies a kept token by another factor than 1.

    On a device the factor is looked at once for each rule, since reading it synchronises; on a CPU every time.
    """
    if of_library(rule) or (trusted(rule) and factor.device.type != "cpu"):
        return
    _SEEN.add(rule)
    wrong = kept & (factor != 1)
    if wrong.any():
        raise TypeError(
            f"{what} returned a factor of {float(factor[wrong][0]):g} for a token that it keeps, expected 1: a "
            "rejection only drops tokens. Return ops.zeros_like(value) + 1, or subclass offcorr.weights.Weight"
        )


# -- methods of a stage ---------------------------------------------------------------------------------------


def statistics_of(controller: Controller, tokens: Tokens) -> Any:
    """Its statistics of a micro-batch; an error names class and method."""
    return _by_method(controller, "statistics", tokens)


def resolved(controller: Controller, statistics: Any) -> Stage:
    """The stage that a controller resolves to.

    Raises:
        TypeError: its method raised an error, returned something else, or a stage whose numbers are none; the message
            names class and method.
    """
    stage: Stage = _by_method(controller, "resolve", statistics)
    if not isinstance(stage, Stage) or isinstance(stage, Controller) or stage.KIND != controller.KIND:
        kind = controller.KIND.removesuffix("s")
        raise TypeError(f"{type(controller).__name__}.resolve returned {stage!r}, expected one of offcorr.{kind}s")
    if not of_library(type(controller).resolve):
        _check_numbers(f"{type(controller).__name__}.resolve", stage)
    return stage


def _check_numbers(what: str, stage: Stage) -> None:
    """Raise TypeError where a number of a stage that a user's controller resolved to is none; no value is read."""
    try:
        params = checked_params(stage)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    for name, number in zip(getattr(params, "_fields", ()), params, strict=True):
        if isinstance(number, Tensor) and (number.is_complex() or number.dtype == torch.bool):
            raise TypeError(f"{what}: {type(stage).__name__}.params.{name} is {number.dtype}, expected a number")


def check_resolved(
    controllers: Mapping[str, Controller], stages: Mapping[str, Stage], batch: Batch, strict: bool
) -> None:
    """Warn of a number that is NaN or out of range, of the stages that users' controllers resolved to.

    On a CPU; with ``strict`` on every device, as an error where it is out of range.  On other devices reading
    a number would be a host synchronisation: there ``offcorr/loss/nonfinite`` counts the tokens that NaN leaves without
    a gradient, and ``offcorr.testing.check`` finds a number that is out of range.

    Raises:
        ValueError: with ``strict``, a number is out of range; the message names class, method, stage and field.
    """
    on_host = batch.logp.device.type == "cpu" and not torch.compiler.is_compiling()
    of_users = [place for place, controller in controllers.items() if not of_library(type(controller).resolve)]
    if not of_users or not (strict or on_host) or not batch.mask.any():
        return
    for place in of_users:
        controller = controllers[place]
        what, stage = f"{type(controller).__name__}.resolve", stages[place]
        if wrong := _out_of_range(stage):
            if strict:
                raise ValueError(f"{what}: {wrong}")
            warn_first(
                f"{what}: {type(stage).__name__}",
                f"{what}: {wrong}. A plain number of this size is refused; strict=True refuses a tensor, too",
            )
        _warn_of_nan(what, stage)


def _out_of_range(stage: Stage) -> str:
    """The error of a stage whose tensors are plain numbers, "" if there is none; NaN is another matter.

    A stage checks its numbers in ``__post_init__``, which does not read the value of a tensor.
    """
    if not dataclasses.is_dataclass(stage):
        return ""
    given = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    numbers = {name: value.item() for name, value in given.items() if isinstance(value, Tensor) and not value.ndim}
    if not numbers or any(math.isnan(number) for number in numbers.values()):
        return ""
    try:
        dataclasses.replace(stage, **numbers)
    except ValueError as error:
        return str(error)
    except Exception:  # of any kind: a user's stage may take tensors alone
        return ""
    return ""


def _warn_of_nan(what: str, stage: Stage) -> None:
    """Warn of a number of a stage that is NaN."""
    for name, number in zip(getattr(stage.params, "_fields", ()), stage.params, strict=True):
        if math.isnan(number):
            warn_once(
                f"{what}: {type(stage).__name__}.params.{name} is nan, expected a number: tokens that it reaches get "
                "no gradient (offcorr/loss/nonfinite counts them; strict=True makes it an error)"
            )


def numbers_logged(controller: Controller, stage: Stage) -> Mapping[str, Number]:
    """The numbers that a controller logs of the stage it resolved to.

    Raises:
        TypeError: its method raised an error or returned something else; the message names class and method.
    """
    what = f"{type(controller).__name__}.logged"
    numbers: Mapping[str, Number] = _by_method(controller, "logged", stage)
    if not isinstance(numbers, Mapping):
        raise TypeError(f"{what} returned {numbers!r}, expected a dict of numbers by name")
    for name, number in numbers.items():
        if isinstance(number, Tensor) and number.ndim:
            raise TypeError(f"{what}: {name} has shape {tuple(number.shape)}, expected a number or a 0-dim tensor")
        if not isinstance(number, Tensor | int | float):
            raise TypeError(f"{what}: {name} is {number!r}, expected a number or a 0-dim tensor")
    return numbers


def prepared(stage: Stage, batch: Batch) -> Batch:
    """The batch with the fields that a stage replaces; as it came, for a stage that replaces none.

    Raises:
        TypeError: its method raised an error, returned no batch, or a field of another type or dtype; the message names
            class and method.
        ValueError: a field has a shape that does not go with ``logp``, or ``logp`` itself is another.
    """
    if stage.prepare is None:
        return batch
    given = _by_method(stage, "prepare", batch)
    if not isinstance(given, Batch):
        came = "None" if given is None else f"a {type(given).__name__}"
        raise TypeError(
            f"{type(stage).__name__}.prepare returned {came}, expected a Batch, for instance "
            "batch.replaced(advantages=...)"
        )
    if not of_library(type(stage).prepare):
        _check_prepared(f"{type(stage).__name__}.prepare", given, batch)
    return given


def _check_prepared(what: str, given: Batch, batch: Batch) -> None:
    """Raise where a user's ``prepare`` gave fields that do not go together; no value is read."""
    if given.logp is not batch.logp:
        raise ValueError(
            f"{what} returned another logp, expected that of the batch it was given, which the gradient is of; "
            "batch.replaced(advantages=..., rewards=..., weight=...) replaces what it is multiplied by"
        )
    try:
        given.check_kinds()
        given.check_shapes()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from error


def _by_method(stage: Stage, name: str, given: Any) -> Any:
    """The result of a stage's method; the error of a user's begins with class and method, and ValueErrors stay so.

    A tensor of ``given`` that a user's method changes in place is an error: the next call would see the change.
    """
    method, what = getattr(stage, name), f"{type(stage).__name__}.{name}"
    if of_library(getattr(type(stage), name)):
        return method(given)
    try:
        with unchanged(what, held_by(given)):
            return called(what, method, [given])
    except TypeError as error:
        if isinstance(error.__cause__, ValueError):
            raise ValueError(str(error)) from error.__cause__
        raise
