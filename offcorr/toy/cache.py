"""Folders in the user's cache: built once, whole or not at all, and checked before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MANIFEST = "offcorr_manifest.json"


def cache_root() -> Path:
    """The library's cache folder: `OFFCORR_CACHE`, or `offcorr` in the platform's usual place."""
    if override := os.environ.get("OFFCORR_CACHE"):
        return Path(override).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "offcorr"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "offcorr"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "offcorr"
    return Path.home() / ".cache" / "offcorr"


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder `name`; `build(folder)` fills it if it is missing or damaged.

    The work is done in a temporary folder that is then renamed, so nobody sees half of it; of two
    processes that build at once, the later one takes the earlier one's result.
    """
    root = cache_root()
    target = root / name
    if is_intact(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        built = scratch / "new"
        built.mkdir()
        build(built)
        _write_manifest(built)
        while not is_intact(target):
            # A damaged folder goes out of the way first: a rename replaces no folder with files.
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(tempfile.mkdtemp(prefix="damaged-", dir=scratch)) / name)
            try:
                built.rename(target)
                break
            except OSError:
                if not target.exists():  # else another process was quicker: look at its result
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_intact(folder: Path) -> bool:
    """Whether the folder holds every file that was written, with the bytes that were written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest) and all(_digest(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digests = {path.name: _digest(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
