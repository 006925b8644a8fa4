"""The contract of ``offcorr.testing.check`` at the command line: what a method fails, in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offcorr.methods.registry import file_of, illustration
from offcorr.testing import check

__all__ = ["Outcome", "marked", "notes_of", "outcome", "warn_of_failures"]


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


def warn_of_failures(specs: Sequence[str]) -> dict[str, str]:
    """Prints a line on stderr for each method of a user's file that fails the contract; about 0.2 s per method.

    The methods of the library pass it in the test suite.

    Returns:
        what each of them fails, in one line.
    """
    failing = {}
    for spec in specs:
        if file_of(spec) and (told := outcome(spec).error):
            failing[spec] = told.splitlines()[0]
            print(f"{spec} fails offcorr.testing.check: {failing[spec]}", file=sys.stderr, flush=True)
    return failing


def marked(row: Mapping[str, Any]) -> str:
    """The method of a row of results, with a mark where it fails the contract.

    >>> marked({"method": "ppo"}), marked({"method": "mine.py:a", "fails_check": "a wrong slope"})
    ('ppo', 'mine.py:a !')
    """
    return row["method"] + (" !" if row.get("fails_check") else "")


def notes_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A note below a table for each method that it marks."""
    return [
        f"! {row['method']} fails offcorr.testing.check, so its numbers need not be those of its loss: "
        f"{row['fails_check']}"
        for row in rows
        if row.get("fails_check")
    ]
