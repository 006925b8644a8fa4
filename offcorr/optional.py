"""Optional parts of the library: imported on first use, with an error that names the package to install."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["RECIPE_NEEDS", "configuration", "configuration_keys", "configurations", "recipes", "require"]

RECIPE_NEEDS = ("trl>=1.9.2", "transformers", "accelerate", "datasets", "rich", "matplotlib", "reasoning-gym")
"""The packages that recipes/grpo.py imports on the toy task."""


def recipes() -> Path:
    """The folder of recipes: inside the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def configurations(folder: str) -> list[str]:
    """The names of the YAML files in a folder of the recipes.

    >>> configurations("accelerate")[:1]
    ['ddp']
    """
    return sorted(file.stem for file in (recipes() / folder).glob("*.yaml"))


def configuration(flag: str, given: str, folder: str) -> Path:
    """A YAML file of the user's, or one of a folder of the recipes, by its name.

    Raises:
        ValueError: there is neither; the message names ``flag``.
    """
    own = recipes() / folder / f"{given.removesuffix('.yaml')}.yaml"
    for file in (Path(given), *([own] if "/" not in given else [])):
        if file.is_file():
            return file
    known = configurations(folder)
    meant = "".join(f", did you mean {one!r}?" for one in difflib.get_close_matches(given, known, n=1))
    raise ValueError(f"{flag} is {given!r}, which is not a file; expected one, or one of {', '.join(known)}{meant}")


def configuration_keys(file: Path) -> list[str]:
    """The keys of a YAML file, read without TRL; needs PyYAML.

    Raises:
        ValueError: the file cannot be read, is no YAML, is no mapping, or has a key twice, of which YAML would take the
            last without a word.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "run.yaml")
    ...     _ = file.write_text("lag: 4\\nloss_kwargs: {cap: 2}\\n")
    ...     configuration_keys(file)
    ['lag', 'loss_kwargs']
    """
    import yaml  # type: ignore[import-untyped]

    try:
        document = yaml.compose(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if document is None:
        return []
    if not isinstance(document, yaml.MappingNode):
        raise ValueError(f"{file} is no mapping, expected lines of flag: value")
    if twice := _repeated(document):
        raise ValueError(f"{file} has the key {twice!r} twice")
    return [key.value for key, _ in document.value]


def _repeated(node: Any) -> str | None:
    """A key that a mapping of a YAML document has twice, at any depth."""
    if not isinstance(node.value, list):
        return None
    pairs = [part for part in node.value if isinstance(part, tuple)]
    keys = [key.value for key, _ in pairs]
    own = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    inside = [value for _, value in pairs] or node.value
    return own or next(filter(None, map(_repeated, inside)), None)


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
