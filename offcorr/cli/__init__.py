"""The command ``offcorr``: training, the demo, comparisons, the cause of a mismatch, and what is to be looked up."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import offcorr
from offcorr.cli import check, docs, methods, metrics, train
from offcorr.cli.output import PAGES, Refusal
from offcorr.diagnose import command as diagnose
from offcorr.flags import Parser
from offcorr.lab import bench, compare
from offcorr.lab.text import HelpFormatter, for_a_shell

__all__ = ["main"]

COMMANDS = (train, compare, bench, diagnose, methods, check, metrics, docs)
"""The modules of the commands; each adds its own with ``add_parser``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = _parser()
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if given[0] == "train" and not {"-h", "--help"} & set(given[1:]):  # its flags are those of the recipe
        options = argparse.Namespace(run=train.run_train, flags=given[1:])
    elif given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        parser.unrecognized(given[:1])  # argparse would ask for a command
    else:
        options = parser.parse_args(given)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # `offcorr methods | head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(" ".join(("offcorr", given[0], getattr(options, "world", ""))).rstrip() + ": stopped", file=sys.stderr)
        return 130
    except Refusal as refusal:
        print(f"offcorr {given[0]}: {for_a_shell(str(refusal))}", file=sys.stderr)
        return 2
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="offcorr",
        description="Off-policy correction for reinforcement learning of language models.",
        formatter_class=HelpFormatter,
        epilog="New here? `offcorr demo` shows what a correction does, `offcorr train` trains with one, and "
        f"`offcorr docs` lists the pages to read.\n`offcorr COMMAND --help` explains a command.\n{PAGES}",
    )
    parser.add_argument("--version", action="version", version=f"offcorr {offcorr.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
