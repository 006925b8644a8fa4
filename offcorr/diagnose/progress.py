"""``Reading``: how far a long dump is read, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from offcorr.diagnose.record import Record

EVERY = 5.0
"""Seconds between two lines without a terminal; a terminal's line changes more often."""


class Reading:
    """Shows on stderr how far the command is: a line that changes, or without a terminal a line every few seconds.

    Nothing is shown of work that takes less than a second, or without a terminal less than five.
    """

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.began = self.said = time.monotonic()
        self.share, self.shown = 0.0, False

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        if self.live and self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def bytes(self, done: int, total: int) -> None:
        """Takes the bytes that were read, and those of all files."""
        self.share = done / max(total, 1)

    def of(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, counted."""
        count = tokens = 0
        for record in records:
            count, tokens = count + 1, tokens + len(record)
            yield record
            if self._due():
                self._say(f"{self.share:.0%} read: {count:,} sequences, {tokens:,} tokens", self.share)
        if self.shown or tokens > 1_000_000:
            self._say(f"{count:,} sequences, {tokens:,} tokens read; looking for causes", 1.0)

    def scored(self, words: str, done: int, total: int) -> None:
        """Takes the number of sequences that were scored again under a hypothesis, and their total."""
        if self._due():
            self._say(f"scored {done} of {total} sequences again: {words}", done / total)

    def _due(self) -> bool:
        wait = EVERY if not self.live else 0.2 if self.shown else 1.0
        return time.monotonic() - self.said > wait

    def _say(self, text: str, share: float) -> None:
        self.said, self.shown = time.monotonic(), True
        line = f"{text} ({self.said - self.began:.0f} s)"
        shown = f"\r\033[K[{'#' * round(20 * share):.<20}] {line}" if self.live else f"{line}\n"
        print(shown, end="", file=sys.stderr, flush=True)
