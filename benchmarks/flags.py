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


def output(text: str | Path) -> Path:
    """A file to write to, whose folder is made where it does not exist."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder of {text}: {error}") from error
    return path
