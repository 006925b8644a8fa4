"""Types of command-line flags that every benchmark shares: what is wrong with a value is said before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from offcorr.methods.registry import illustration


def method(name: str) -> str:
    """The name of a method that this library has, with or without options."""
    try:
        illustration(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def rounds(text: str) -> int:
    """A number of rounds whose spread can be said: 2 or more."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected 2 or more: the quartiles are over the rounds")
    return int(text)


def output(text: str | Path) -> Path:
    """A file to write to, whose folder is made where it does not exist."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder of {text}: {error}") from error
    return path
