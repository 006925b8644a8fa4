"""``check_writable``: a folder for results is looked at before a run, rather than when the first of them is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_writable(option: str, folder: str | os.PathLike[str]) -> None:
    """Raises ``ValueError`` where ``folder`` cannot be made, or nothing can be written to it.

    It is tried, for the root user passes any permission.

    Args:
        option: its name, for the message.
        folder: the path of a folder that exists, or that is to be made.

    >>> check_writable("dump_rollouts", Path(__file__, "dump"))
    Traceback (most recent call last):
    ValueError: cannot write to '.../folders.py/dump' (.../folders.py is a file); choose another dump_rollouts
    """
    path = there = Path(folder).absolute()
    try:
        there = next(place for place in (path, *path.parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".offcorr-"):
            pass
    except OSError as error:
        reason = f"{there} is a file" if there.is_file() else f"in {there}: {error.strerror}"
        raise ValueError(f"cannot write to {str(folder)!r} ({reason}); choose another {option}") from error
