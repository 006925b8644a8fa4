"""Result files of the lab: what is in each, how they are written, and the statistics that every world uses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offcorr.folders import check_file, check_writable

__all__ = ["Difference", "about", "bootstrap", "check_picture", "difference", "free", "processor", "rounded", "save"]

PACKAGES = ("torch", "triton", "transformers", "trl", "offcorr")


def about(command: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a result file: the command that repeats it, its setting, the machine and the versions."""
    return {
        "command": command,
        "setting": dict(setting),
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def processor() -> str:
    """The name of this machine's processor."""
    for line in open("/proc/cpuinfo") if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def free(path: Path, overwrite: bool, option: str = "--output") -> Path:
    """The path, its folder made, if a result may be written there.

    Args:
        option: where the path was given, for the messages.

    Raises:
        ValueError: the file exists and ``overwrite`` is False, or it or its folder cannot be written.
    """
    if path.exists() and not path.is_dir() and not overwrite:
        raise ValueError(f"{path} exists; choose another {option}, or allow it with --overwrite")
    check_file(option, path)
    check_writable(option, path.parent)  # where ``save`` writes before it gives the file its name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_overwrite(overwrite: bool, **files: Path | None) -> None:
    """Raises ``ValueError`` where ``--overwrite`` is given without a file that it may replace.

    >>> check_overwrite(True, output=None, picture=None)
    Traceback (most recent call last):
    ValueError: --overwrite is given without --output or --picture, whose file it replaces
    """
    if overwrite and not any(files.values()):
        named = " or ".join(f"--{name}" for name in files)
        raise ValueError(f"--overwrite is given without {named}, whose file it replaces")


def check_picture(option: str, path: Path | None) -> None:
    """Raises ``ValueError`` where no picture can be drawn to the path that was given for ``option``."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{option} is {str(path)!r}, expected a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, but there is no folder {str(path.parent)!r}")
    check_file(option, path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} draws with matplotlib, which is not installed: pip install matplotlib, or leave {option} out "
            "(all else does without)"
        )


def save(data: Any, path: Path) -> Path:
    """Writes JSON, a list of numbers on one line, so that the file is whole at every moment; NaN becomes null."""
    text = json.dumps(_finite(data), indent=1, allow_nan=False)
    numbers = re.compile(r"\[\n[^][{}\"]*\]")  # a line break is never part of a string
    text = numbers.sub(lambda found: re.sub(r"\s*\n\s*", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text + "\n")
    partial.replace(path)
    return path


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def rounded(data: Any) -> Any:
    """The same with four digits of every float.

    >>> rounded({"auc": [0.123456, 2]})
    {'auc': [0.1235, 2]}
    """
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.fmean,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic; repeatable by ``seed``.  One value gives no width.

    >>> bootstrap([0.5])
    (0.5, 0.5)
    """
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(draws))
    tail = int((1 - level) / 2 * draws)
    return found[tail], found[draws - 1 - tail]


class Difference(NamedTuple):
    """The mean of paired differences and its standard error, which is NaN for a single pair."""

    mean: float
    error: float


def difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """Of runs paired by seed: the mean of ``values - others`` and its standard error.

    >>> difference([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    Difference(mean=1.0, error=0.5773502691896258)
    """
    pairs = [value - other for value, other in zip(values, others, strict=True)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return Difference(statistics.fmean(pairs), error)
