"""Optional parts of the library: imported on first use, with an error that names the package to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable

__all__ = ["require"]


def require(purpose: str, packages: Iterable[str], *, extra: str = "", install: str = "") -> None:
    """Checks that ``packages`` are installed; each is a distribution's name, or a name and a version: "trl>=1.9.2".

    Args:
        purpose: what needs them, the subject of the error's sentence.
        extra: the extra of offcorr that installs them.
        install: the command that installs them, where no extra does.

    Raises:
        ModuleNotFoundError: a package is missing.
        ImportError: a package is older than the version.

    >>> require("this example", ["torch>=2.6"], extra="trl")
    >>> require("this example", ["torch", "no-such-package"], extra="trl")
    Traceback (most recent call last):
    ModuleNotFoundError: this example needs no-such-package, not installed here: pip install "offcorr[trl]"
    """
    missing, old = [], []
    for package in packages:
        name, _, wanted = package.partition(">=")
        module = name.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            missing.append((name, module))
        elif wanted and (found := _version(name)) and _numbers(found) < _numbers(wanted):
            old.append((package, f"{name} {wanted} or later, but {name} {found} is installed"))
    install = install or f'pip install "offcorr[{extra}]"'
    if missing:
        names = ", ".join(name for name, _ in missing)
        raise ModuleNotFoundError(f"{purpose} needs {names}, not installed here: {install}", name=missing[0][1])
    if old:
        install = f"pip install {' '.join(json.dumps(package) for package, _ in old)}"
        raise ImportError(f"{purpose} needs {'; '.join(text for _, text in old)}: {install}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a folder on the path, for instance
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, for comparison: "1.9.2.dev0" gives (1, 9, 2)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
