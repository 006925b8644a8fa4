"""The contract of ``offcorr.testing.check`` at the command line: what a method fails, in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from offcorr.methods.registry import file_of, illustration
from offcorr.testing import check

__all__ = ["Outcome", "outcome", "warn_of_failures"]


class Outcome(NamedTuple):
    """The checks that a method passed; and the error of the one that failed, "" where every check passed."""

    passed: list[str]
    error: str


def outcome(spec: str) -> Outcome:
    """Runs ``offcorr.testing.check``; the error is without the method's name.

    Args:
        spec: a method, as ``offcorr.resolve`` takes it.

    >>> outcome("ppo").error
    ''
    """
    try:
        return Outcome(check(spec), "")
    except (AssertionError, TypeError, ValueError) as error:
        return Outcome([], str(error).removeprefix(f"{illustration(spec).method}: "))
    except Exception as error:  # a user's file may raise anything
        return Outcome([], f"{type(error).__name__}: {error}")


def warn_of_failures(specs: Sequence[str]) -> None:
    """Prints a line on stderr for each method of a user's file that fails the contract; about 0.2 s per method.

    The methods of the library pass it in the test suite.
    """
    for spec in specs:
        if file_of(spec) and (told := outcome(spec).error):
            print(f"{spec} fails offcorr.testing.check: {told.splitlines()[0]}", file=sys.stderr, flush=True)
