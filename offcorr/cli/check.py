"""``offcorr check``: the contract of ``offcorr.testing.check`` on methods, a user's own included."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from offcorr.cli.output import Refusal
from offcorr.lab.contract import outcome
from offcorr.lab.text import HelpFormatter, examples
from offcorr.methods.registry import illustration
from offcorr.optional import require
from offcorr.testing import OnReference, check_kernel, untested_options


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``check``."""
    parser = commands.add_parser(
        "check",
        help="test a method of your own: gradient, masks, micro-batches, extreme ratios",
        description="Runs the contract that every method of the library is held to (offcorr.testing.check) and prints "
        "one line per method: how many checks passed, or which failed, with the numbers and the stage. The exit code "
        "is 1 if one failed. docs/extending.md says what is checked. A method takes about 0.2 s on an idle machine; "
        "with --kernel and no GPU ten seconds to a minute more, under Triton's interpreter.",
        formatter_class=HelpFormatter,
        epilog=examples("offcorr check mine.py:my_method", "offcorr check 'mine.py:my_method?cap=3' minpro --kernel"),
    )
    parser.add_argument(
        "methods", nargs="+", metavar="METHOD", help="a name with or without options, or file.py:method"
    )
    parser.add_argument(
        "--kernel",
        action="store_true",
        help="also compare the fused kernel with the reference (needs triton; without a GPU under its "
        "interpreter, for which the command sets TRITON_INTERPRET=1 itself); a method that has no kernel is no failure",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code: 1 if a check failed."""
    if options.kernel:
        try:
            require("offcorr check --kernel", ["triton"], extra="triton")
        except ImportError as error:
            raise Refusal(str(error)) from None
    for spec in options.methods:
        try:
            illustration(spec)
        except Exception as error:  # a user's file may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise Refusal(f"METHOD {spec!r}: {kind}{error}") from error
    return int(any([_fails(spec, options.kernel) for spec in options.methods]))


def _fails(spec: str, kernel: bool) -> bool:
    """Prints the line of a method; returns whether a check failed."""
    passed, failure = outcome(spec)
    if failure:
        print(f"{spec} fails: {failure}", flush=True)
        return True
    try:
        compared = f"; {_in_kernel(spec)}" if kernel else ""
    except AssertionError as error:
        told = str(error).removeprefix(f"{illustration(spec).method}: ")
        print(f"{spec} fails in the kernel: {told}", flush=True)
        return True
    untested = "".join(
        f"; whether the option {name} does anything was not looked at, as it is no number and no Literal"
        for name in untested_options(spec)
    )
    print(f"{spec}: {len(passed)} checks passed{compared}{untested}", flush=True)
    return False


def _in_kernel(spec: str) -> str:
    """The comparison in words, on a GPU if there is one, else under Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
    try:
        return f"kernel and reference differ by {check_kernel(spec, device):.1g} at most"
    except OnReference as reason:
        return str(reason)
