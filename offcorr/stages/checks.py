"""Checks for ``__post_init__`` of a stage: each error names the class, the field, what came and what was wanted."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, get_args

import torch
from torch import Tensor

from offcorr.shapes import Mismatch

NEAR = 0.6
"""Similarity, from 0 to 1, from which a word may be meant by another: the default of ``difflib``."""


BETWEEN = ("offcorr", "torch", "trl", "transformers", "accelerate", "contextlib", "dataclasses", "functools")
"""Packages whose frames lie between a user's line and a warning of this library: trainers, loops and decorators."""


def nearest(word: str, words: Any, end: str = "") -> str:
    """ ", did you mean ...?" for an error message, with every word that is as near as the nearest; else ``end``.

    Capital and small letters count as equal, and the beginning of a word, of three letters or more, as the word.

    >>> nearest("MinPRO", ["minpro", "ppo"])
    ", did you mean 'minpro'?"
    >>> nearest("adv", ["advantage", "mean_advantage"])
    ", did you mean 'advantage'?"
    """
    nearness = {str(known): _similarity(str(word).lower(), str(known).lower()) for known in words}
    most = max(nearness.values(), default=0.0)
    best = [repr(known) for known, share in nearness.items() if share >= NEAR and share > most - 0.02]
    return f", did you mean {' or '.join(sorted(best))}?" if best else end


def _similarity(word: str, known: str) -> float:
    """From 0 to 1."""
    if len(word) >= 3 and known.startswith(word):
        return 1.0
    return difflib.SequenceMatcher(None, word, known).ratio()


def one_of(word: Any, words: Any) -> str:
    """ ", expected one of ..." for an error message, after the nearest word where one is near."""
    close = nearest(word, words)
    return f"{close} Expected one of {list(words)}" if close else f", expected one of {list(words)}"


@cache
def of_library(function: Any) -> bool:
    """Whether a function or class is the library's own, which needs no checks."""
    return (getattr(function, "__module__", None) or "").startswith("offcorr.")


def outside() -> int:
    """The ``stacklevel`` of the first caller outside this library, for a warning of the function that asks.

    Frames of ``BETWEEN`` are passed over as well; where there is no other, it is that of the outermost frame.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    return level


def warn_once(message: str) -> None:
    """Warns with this message at the first caller outside this library, the first time that this line leads here.

    A loop is warned once, and another line, or cell of a notebook, that makes the mistake again is warned again.
    """
    warn_first(message, message)


_WARNED: set[tuple[str, str, int]] = set()


def warn_first(subject: str, message: str) -> None:
    """Warns as ``warn_once``, once per subject: for a message with a number that changes from call to call."""
    caller = sys._getframe(outside() - 1)
    key = (subject, caller.f_code.co_filename, caller.f_lineno)
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=outside())


def warn_again() -> None:
    """Forget which warnings were given."""
    _WARNED.clear()


@contextmanager
def quietly() -> Iterator[None]:
    """Suppresses the warnings of a made-up batch, and no later ones: each is given where it is due."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        finally:
            warn_again()


def same_definition(one: Any, other: Any) -> bool:
    """Whether two functions or classes are one definition: of one name, and of one file, which may be loaded twice."""

    def origin(defined: Any) -> tuple[str, str]:
        module = sys.modules.get(defined.__module__)
        return getattr(module, "__file__", None) or defined.__module__, defined.__qualname__

    return origin(one) == origin(other)


def check_number(
    owner: Any,
    field: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    optional: bool = False,
) -> None:
    """``owner.field`` is a finite number from ``low`` (above ``low`` with ``above``) to ``high``, or ``optional`` None.

    The value of a 0-dim tensor is not looked at, since reading it would synchronise with the device.
    """
    check_value(type(owner).__name__, field, getattr(owner, field), low=low, high=high, above=above, optional=optional)


def check_value(
    owner: str,
    field: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    optional: bool = False,
) -> None:
    """As ``check_number``, of a value that is no field."""
    if optional and value is None:
        return
    wanted = "a finite number" + ("" if low == -math.inf else f" {'>' if above else '>='} {low:g}")
    if high < math.inf:
        wanted += f" and <= {high:g}"
    wanted += " or None" if optional else ""
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(f"{owner}: {field} has shape {tuple(value.shape)}, expected {wanted}, or a 0-dim tensor")
        if value.dtype == torch.bool or value.is_complex():
            raise ValueError(f"{owner}: {field} has dtype {value.dtype}, expected {wanted}")
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        raise ValueError(f"{owner}: {field} is {value!r}, expected {wanted}")


def check_order(owner: Any, low: str, high: str) -> None:
    """``owner.low`` <= ``owner.high``; the values of tensors are not looked at."""
    if any(isinstance(getattr(owner, field), Tensor) for field in (low, high)):
        return
    if getattr(owner, low) > getattr(owner, high):
        raise ValueError(
            f"{type(owner).__name__}: {low} = {getattr(owner, low)!r} is above {high} = {getattr(owner, high)!r}, "
            f"expected {low} <= {high}"
        )


def warn_of_bounds(owner: str, outside: str, upper: str = "high", *, distances: bool = True, **bounds: Any) -> None:
    """Warns of bounds on a ratio with 1 outside, the ratio of on-policy tokens; those of tensors are not looked at.

    Args:
        outside: what happens to tokens outside, "are dropped".
        upper: the name of the upper bound; the other one is a lower bound.
        distances: whether a distance from 1, as other libraries have it, may have been meant.
        bounds: the bounds by name; None: no bound.
    """
    for name, bound in bounds.items():
        is_upper = name == upper
        if isinstance(bound, int | float) and (bound < 1 if is_upper else bound > 1):
            epsilon = "epsilon_high" if is_upper else "epsilon_low"
            written = f"1 {'+' if is_upper else '-'} {epsilon}"
            meant = f"; where a distance from 1 is meant, as {epsilon} of a clipped loss is, pass {written}"
            warn_once(
                f"{owner}: {name} is {bound!r}, so that on-policy tokens, whose ratio is 1, {outside}: {name} bounds "
                f"the ratio itself{meant if distances else ''}"
            )


def warn_of_distances(owner: str, *, log: bool = False, **distances: Any) -> None:
    """Warns of a bound's distance from 1 that looks like 1 + eps or a percentage.

    Values of tensors are not looked at.  A distance from 2 to below 10 may be a large cap (Mu-GRPO clips at 5), and
    one above 100 stands for no bound.

    Args:
        log: the distances are from 0, of the log-ratio (nats).
        distances: by name, which holds "low" or "high"; None: no bound.
    """
    for name, eps in distances.items():
        if not isinstance(eps, int | float) or not (1 < eps < 2 or 10 <= eps <= 100):
            continue
        far = eps if "high" in name else -eps
        bound, of = (math.exp(far), "0, of the log-ratio") if log else (1 + far, "1")
        meant, why = (eps / 100, "a percentage") if eps >= 10 else (math.log(eps) if log else eps - 1, "1 + eps")
        warn_first(
            f"{owner}: {name}",
            f"{owner}: {name} is {eps!r}, a distance from {of}, so that the bound on the ratio is {bound:.3g}; where "
            f"{eps!r} is meant as {why}, pass {meant:.3g}",
        )


def warn_of_differences(owner: str, **bounds: Any) -> None:
    """Warns of upper bounds above 1 on a difference of probabilities; those of tensors are not looked at."""
    for name, bound in bounds.items():
        if isinstance(bound, int | float) and bound > 1:
            warn_once(
                f"{owner}: {name} is {bound!r}, and bounds a difference of probabilities, which is at most 1: it never "
                "acts"
            )


def uncalled(value: Any) -> str:
    """ "Veto is a class; write Veto(...)" for a class, or function of ours, in the place of what it makes; else "".

    >>> uncalled(dict), uncalled({})
    ('dict is a class; write dict(...)', '')
    """
    maker = isinstance(value, FunctionType) and value.__module__.startswith("offcorr.stages")
    if not maker and not isinstance(value, type):
        return ""
    kind = "class" if isinstance(value, type) else "function"
    return f"{value.__name__} is a {kind}; write {value.__name__}(...)"


def check_choice(owner: Any, field: str, choices: Any) -> None:
    """``owner.field`` is one of ``choices``."""
    check_word(type(owner).__name__, field, getattr(owner, field), choices)


def check_word(owner: str, field: str, value: Any, choices: Any) -> None:
    """As ``check_choice``, of a value that is no field."""
    if value not in tuple(choices):
        raise ValueError(f"{owner}: {field} is {value!r}{one_of(value, choices)}")


def check_flag(owner: Any, field: str) -> None:
    """``owner.field`` is True or False; 1, 0 and words are not."""
    if not isinstance(getattr(owner, field), bool):
        raise ValueError(f"{type(owner).__name__}: {field} is {getattr(owner, field)!r}, expected True or False")


def warn_of_unused(owner: Any, chosen: str, fields: Iterable[str]) -> None:
    """Warns of each of ``owner.fields`` that has another value than its default, as the chosen one has no use for it.

    The values of tensors are not looked at.
    """
    for field in fields:
        default, value = type(owner).__dataclass_fields__[field].default, getattr(owner, field)
        if not isinstance(value, Tensor) and value != default:
            warn_once(f"{type(owner).__name__}: {field} has no effect with {chosen} {getattr(owner, chosen)!r}")


def check_mismatch(owner: Any, *, optional: bool = False) -> None:
    """``owner.mismatch`` names a pair of policies; None passes if ``optional``."""
    if not (optional and owner.mismatch is None):
        check_choice(owner, "mismatch", get_args(Mismatch))
