"""Folders in the user's cache, built once, complete or not at all, and verified before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

WAIT = 600.0
"""Seconds for which a process waits for another one that builds the same folder."""

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
    A process that begins while another one builds it waits for the result, and says so on stderr; after ``WAIT``
    seconds it builds its own, and the folder that was there first stays.
    """
    root = cache_root()
    target = root / name
    if is_intact(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _turn(root, name):
        if not is_intact(target):
            _build(root, name, build)
    return target


@contextlib.contextmanager
def _turn(root: Path, name: str) -> Iterator[None]:
    """Runs while no other process builds the folder, or beside one that has not finished within ``WAIT`` seconds."""
    lock = FileLock(root / f".{name}.lock")  # released by the system where its process is killed
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is making {root / name}: waiting for it", file=sys.stderr, flush=True)
        try:
            lock.acquire(timeout=WAIT)
        except Timeout:
            print(f"{root / name} is not there after {WAIT:g} s: making it here", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()


def _build(root: Path, name: str, build: Callable[[Path], None]) -> None:
    """Fills a new folder and gives it its name, unless an intact one has come to have it."""
    target = root / name
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


def is_intact(folder: Path) -> bool:
    """Returns whether the folder holds every file of its manifest, unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not manifest:
            return False
        return all(_digest(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digests = {path.name: _digest(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
