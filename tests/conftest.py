"""One suite for every install, in one process.

What needs a package that is not installed is skipped and says so: whole folders by ``NEEDS``, single tests by
``pytest.importorskip``.  With ``--nothing-missing``, which continuous integration gives, such a skip fails the run.
Kernels run under Triton's interpreter where there is no GPU.  Shapes are checked at run time where jaxtyping and
beartype are installed (``tests/shape_checks.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import shape_checks

HERE = Path(__file__).parent

# Triton reads it once, when it is imported.  For other tests it changes nothing: without being asked to, no correction
# runs its kernel on a CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Read once, too.  No test needs the hub, whose client would ask for a file again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

SHAPES_ARE_CHECKED = shape_checks.install()

TRAINER = ("transformers", "trl", "accelerate", "datasets", "peft", "tokenizers")
NEEDS = {
    "kernels": ("triton",),
    "recipes": (*TRAINER, "matplotlib", "reasoning_gym", "rich", "yaml"),
    "engine": TRAINER,
    "lab/test_mismatch.py": (*TRAINER, "reasoning_gym", "rich"),
    "data": TRAINER,
    "rollout": TRAINER,
    "toy": ("transformers", "tokenizers", "datasets", "reasoning_gym", "rich"),
    "test_tokens.py": ("transformers", "trl", "tokenizers"),
    "trl": TRAINER,
}
"""The packages that the tests of a folder (or file) import, beyond those of a core install.

A conftest.py in such a folder is imported even so, and must not import them then.
"""


def missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def missing_at(path: Path) -> list[str]:
    """The packages that are not installed and without which ``path`` cannot be imported."""
    if not path.is_relative_to(HERE):
        return []
    places = [path.relative_to(HERE), *path.relative_to(HERE).parents]
    return missing(tuple(name for place in places for name in NEEDS.get(place.as_posix(), ())))


class Unavailable(pytest.Module):
    """A file of tests that cannot be imported in this install."""

    def collect(self) -> Iterator[pytest.Item]:
        place, names = self.path.parent.relative_to(HERE.parent), ", ".join(missing_at(self.path))
        pytest.skip(f"could not import {place}: not installed: {names}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Unavailable.from_parent(parent, path=module_path) if missing_at(module_path) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nothing-missing", action="store_true", help="fail if a test's package is not installed")
    parser.addoption("--draws", type=int, default=60, help="random cases of a test that draws many")


@pytest.fixture
def draws(request: pytest.FixtureRequest) -> int:
    """How many random cases a test draws that draws many."""
    return request.config.getoption("--draws")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--nothing-missing"):
        return
    skipped = sorted({str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])})
    if absent := [reason for reason in skipped if "could not import" in reason]:
        reporter.write_sep("=", "skipped under --nothing-missing", red=True)
        reporter.write_line("\n".join(absent))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header() -> str:
    kernels = "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "on the GPU"
    if missing(("triton",)):
        kernels = "not run (triton is not installed)"
    absent = missing(shape_checks.TOOLS)
    return f"offcorr: kernels {kernels}, shapes {'checked' if SHAPES_ARE_CHECKED else f'not checked ({absent})'}"
