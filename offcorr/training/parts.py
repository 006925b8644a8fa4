"""Parts of a ``Step`` that are given, or made by a function when a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")


def given_or_made(
    name: str, value: Any, kind: type[Part], example: str
) -> tuple[Part | None, Callable[[], Part] | None]:
    """The part, or the function that makes it, whose result is checked at every call; (None, None) for None.

    Args:
        name: of the argument, for the errors.
        kind: class of the part.
        example: an expression that makes one, for the errors.

    Raises:
        TypeError: ``value`` is neither a ``kind`` nor a function; or, from the function that is returned, its result
            is no ``kind``.

    >>> given_or_made("steps", 3, int, "3"), given_or_made("steps", lambda: 4, int, "3")[1]()
    ((3, None), 4)
    """
    wanted = f"expected an offcorr.training.{kind.__name__}, for instance {example}"
    if value is None or isinstance(value, kind):
        return value, None
    if not callable(value):
        raise TypeError(f"{name} is {value!r}, {wanted}, or a function that returns one")

    def make() -> Part:
        made = value()
        if not isinstance(made, kind):
            raise TypeError(f"{name} is a function that returned {made!r}, {wanted}")
        return made

    return None, make
