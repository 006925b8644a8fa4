"""A method that no oracle checks cannot pass the suite, however well it keeps the contract."""

import shutil
from pathlib import Path

import pytest

import offcorr
from offcorr import testing
from tests.fresh import pytest_in

ROOT = Path(__file__).parents[2]

METHOD = '''
"""Made up: a gradient that no paper has."""

from dataclasses import dataclass
from typing import Any, ClassVar

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates


def halved(log_ratio: Any, logp: Any, advantage: Any) -> Any:
    gradient = advantage * (1 + log_ratio / 2)
    return gradient * logp, gradient


@dataclass(frozen=True)
class Halved(gates.Gate):
    surrogate: ClassVar[Any] = staticmethod(halved)
    detached: ClassVar = True


@register("dropped_in")
def dropped_in() -> Correction:
    return Correction(gate=Halved(), aggregate="token-mean")
'''


@pytest.fixture(scope="module")
def verdict(tmp_path_factory):
    """The contract and the equalities of the oracle, run on a copy with one more file in offcorr/methods."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("offcorr", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "offcorr" / "methods" / "dropped_in.py").write_text(METHOD)
    files = "tests/test_testing.py", "tests/methods/test_oracle.py"
    words = "test_method and dropped_in or has_an_oracle"
    run = pytest_in(copy, "-q", "-p", "no:cacheprovider", *files, "-k", words)
    return run.stdout + run.stderr


def test_it_keeps_the_contract(verdict):
    """So the contract alone would have let it through."""
    assert f"2 failed, {len(testing.CHECKS) + 3} passed" in verdict, verdict


@pytest.mark.parametrize(
    "said",
    [
        "no oracle checks ['dropped_in']: write the formula of the paper as a @method in tests/methods/oracle.py",
        "FAILED tests/methods/test_oracle.py::test_every_method_has_an_oracle",
        "no oracle checks these stages (gate): ['halved']",
        "FAILED tests/methods/test_oracle.py::test_every_stage_has_an_oracle_and_is_drawn[gate]",
    ],
)
def test_the_suite_refuses_it_and_says_what_to_add(verdict, said):
    assert "dropped_in" not in offcorr.available()
    assert said in verdict, verdict
