"""``no_progress_bar``: weights are read and written without a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hides the progress bar that transformers shows while it reads or writes weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
