"""The comparison with TRL's own tests sees a difference, and where TRL's source is here there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trl

from tests.trl.conformance import run

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(os.environ.get("OFFCORR_TRL_SOURCE", ROOT / ".trl-source"))
FETCH = f"git clone --depth 1 --branch v{trl.__version__} https://github.com/huggingface/trl .trl-source"


def source(folder: Path, version: str = trl.__version__, test: str = "") -> Path:
    """A folder like one with TRL's source, with one test."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_grpo_trainer.py").write_text(test)
    (folder / "VERSION").write_text(f"{version}\n")
    return folder


def test_another_version_is_refused(tmp_path, capsys):
    assert run.main([str(source(tmp_path / "trl", "0.1"))]) == 2
    assert f"is TRL 0.1, and {trl.__version__} is installed" in capsys.readouterr().out


def test_a_folder_without_the_source_is_refused(tmp_path, capsys):
    assert run.main([str(tmp_path)]) == 2
    assert "has no tests/test_grpo_trainer.py" in (said := capsys.readouterr().out) and FETCH in said


def test_differences(monkeypatch):
    same, broken = {"t.py::C::test_a[x]": ["passed", ""]}, {"t.py::C::test_a[x]": ["failed", "AssertionError"]}
    assert run.compare({"stock": same, "offcorr": same, "corrected": same}) == []
    (found,) = run.compare({"stock": same, "offcorr": same, "corrected": broken})
    assert found == ("corrected", "t.py::C::test_a[x]", "passed", "failed", "AssertionError", "")
    monkeypatch.setitem(run.EXPECTED, ("corrected", "test_a"), "because")
    (found,) = run.compare({"stock": same, "offcorr": same, "corrected": broken})
    assert found.expected == "because"
    (found,) = run.compare({"stock": same, "offcorr": {}})  # a test that was not run
    assert found.here == "absent"


@pytest.mark.slow
def test_the_trainers_are_swapped_and_a_difference_fails(tmp_path):
    """The test inside passes with TRL's classes, and names those that it got."""
    test = """
from trl import GRPOConfig, GRPOTrainer


def test_a():
    got = (GRPOTrainer.__module__, GRPOConfig("out", use_cpu=True, bf16=False).loss_type)
    if got != ("trl.trainer.grpo_trainer", "dapo"):
        raise AssertionError(f"{got}")


def test_b():
    pass
"""
    output = tmp_path / "results.json"
    folder = source(tmp_path / "trl", test=test)
    assert run.main([str(folder), "--offline", "--output", str(output)]) == 1
    record = json.loads(output.read_text())
    assert record["counts"]["stock"] == {"passed": 2} and record["versions"]["trl"] == trl.__version__
    reasons = {found["variant"]: found["reason"] for found in record["differences"]}
    assert "('offcorr.trl.trainer', 'dapo')" in reasons["offcorr"]
    assert "('offcorr.trl.trainer', 'offcorr:dapo')" in reasons["corrected"]
    assert record["tests"]["test_grpo_trainer.py::test_b"] == "passed passed passed"


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE.exists(), reason=f"TRL's source is not here: {FETCH}")
def test_trls_own_tests_end_as_with_trls_own_trainer():
    assert run.main([str(SOURCE), "--offline"]) == 0
