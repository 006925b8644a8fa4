"""``check_writable``, ``check_file``: where results go is looked at before a run, not when the first is written."""

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
    _refuse(option, folder, _obstacle(Path(folder).absolute()))


def check_file(option: str, file: str | os.PathLike[str]) -> None:
    """Raises ``ValueError`` where ``file`` can be neither made nor replaced, as ``check_writable`` does of a folder.

    A file that exists is not changed.

    >>> check_file("--html", Path(__file__, "report.html"))
    Traceback (most recent call last):
    ValueError: cannot write to '.../folders.py/report.html' (.../folders.py is a file); choose another --html
    """
    path = Path(file).absolute()
    if not os.path.exists(path):
        _refuse(option, file, _obstacle(path.parent))
        return
    try:
        path.open("ab").close()
    except OSError as error:
        _refuse(option, file, error.strerror)


def _obstacle(folder: Path) -> str | None:
    """The reason why nothing can be made in a folder, which may have to be made first; None: it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".offcorr-"):
            return None
    except OSError as error:
        return f"in {there}: {error.strerror}"


def _refuse(option: str, place: str | os.PathLike[str], reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"cannot write to {str(place)!r} ({reason}); choose another {option}")
