"""Folders in the user's cache, built once, complete or not at all, and verified before use."""

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
    """Returns the library's cache folder: `OFFCORR_CACHE`, or `offcorr` in the platform's cache folder."""
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
    """Returns the cached folder `name`; `build(folder)` fills it if it is missing or damaged.

    The folder is built under a temporary name and then renamed, so no process sees an incomplete one.
    If two processes build it at once, the later one uses the earlier one's result.
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
            # A rename cannot replace a folder that holds files, so a damaged one is moved away first.
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(tempfile.mkdtemp(prefix="damaged-", dir=scratch)) / name)
            try:
                built.rename(target)
                break
            except OSError:
                if not target.exists():  # otherwise another process was faster: check its result
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_intact(folder: Path) -> bool:
    """Returns whether the folder holds every file of its manifest, unchanged."""
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
