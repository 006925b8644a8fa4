"""Text that the commands of the lab print: tables, captions, times and progress."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["HelpFormatter", "Progress", "aligned", "duration", "entries", "examples", "folded", "for_a_shell", "listed"]


def folded(name: str, width: int) -> list[str]:
    """A name in lines of at most ``width`` characters, broken after "/", ":", "?" and "&" where it can be.

    >>> folded("minpro?eps_high=0.3", 14)
    ['minpro?', 'eps_high=0.3']
    """
    lines = [""]
    for part in re.findall(r"[^/:?&]*[/:?&]?", name):
        while len(lines[-1] + part) > width:
            room = 0 if lines[-1] else width
            lines[-1], part = lines[-1] + part[:room], part[room:]
            lines.append("")
        lines[-1] += part
    return lines


def for_a_shell(message: str) -> str:
    """An error of the library with the command in place of the Python call that lists the methods.

    >>> for_a_shell("unknown method 'x'. offcorr.available() lists them; your own are known once they are imported")
    "unknown method 'x'. `offcorr methods` lists them; FILE.py:NAME is one of your own"
    """
    message = message.replace("offcorr.available() lists", "`offcorr methods` lists")
    return re.sub(r"; your own are known [^;]* imported", "; FILE.py:NAME is one of your own", message)


def entries(given: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Heads and texts in two columns, the texts wrapped.

    >>> entries([("bias", "its distance from the truth"), ("var", "its spread")], 26)
    ['bias  its distance from', '      the truth', 'var   its spread']
    """
    head = max(len(head) for head, _ in given) if given else 0
    indent = " " * (head + 2 if head else 0)
    lines = []
    for name, text in given:
        first = name.ljust(len(indent))
        lines += textwrap.wrap(
            text, min(width, 110), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )
    return lines


def listed(parts: Iterable[str]) -> str:
    """Text as "a", "a and b" or "a, b and c".

    >>> listed(["ppo", "gspo", "ctpo"])
    'ppo, gspo and ctpo'
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def aligned(lines: Sequence[Mapping[str, str]]) -> str:
    """A table of columns under their names: the first to the left, the others to the right.

    >>> print(aligned([{"method": "ppo", "AUC": "0.5"}, {"method": "minpro", "AUC": "0.75"}]))
    method   AUC
    ppo      0.5
    minpro  0.75
    """
    words = [list(lines[0]), *(list(line.values()) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(w.rjust(n) for w, n in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in words
    )


def duration(seconds: float) -> str:
    """A time in seconds, or from 90 s on in minutes.

    >>> duration(12.3), duration(300)
    ('12 s', '5 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a command's description and epilog, and leaves lines that begin with two spaces."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            kept = line.startswith("  ") or not line
            lines += [line] if kept else textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines)


def examples(*commands: str) -> str:
    """The epilog of a command's help: one example per line, to be copied into a shell as it stands.

    >>> print(examples("offcorr compare ppo minpro", "offcorr compare --gap 0.8"))
    examples:
      offcorr compare ppo minpro
      offcorr compare --gap 0.8
    """
    return "\n  ".join(("examples:", *commands))


class Progress:
    """Shows on stderr how far a command is: one line that changes, or without a terminal a line now and then.

    Args:
        total: number of steps of the work.
        plan: the first line.
    """

    def __init__(self, total: int, plan: str) -> None:
        self.total, self.plan = total, plan
        self.live = sys.stderr.isatty()
        self.said = time.monotonic()

    def __enter__(self) -> Progress:
        self._say(self.plan, keep=not self.live)
        return self

    def __call__(self, done: int, text: str) -> None:
        """Reports that ``done`` steps are finished; without a terminal at most every 5 s."""
        if self.live or time.monotonic() - self.said > 5:
            self.said = time.monotonic()
            self._say(f"{done}/{self.total} {text}", keep=not self.live)

    def note(self, text: str) -> None:
        """Prints a line that stays, whenever the last one was."""
        if self.live:
            self._say("", keep=False)
        self._say(text, keep=True)

    def __exit__(self, *error: object) -> None:
        if self.live:
            self._say("", keep=False)

    def _say(self, text: str, keep: bool) -> None:
        print(text if keep else f"\r\033[K{text}", end="\n" if keep else "", file=sys.stderr, flush=True)
