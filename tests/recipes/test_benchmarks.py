"""Tests of benchmarks/baselines.py without its training runs, which these replace."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
HISTORY = [{"step": 4 * i, "eval_reward": 0.1 * i} for i in range(4)]


@pytest.fixture
def script(monkeypatch):
    """The benchmark's module; it may train nothing unless a test says what comes out."""

    def trained(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("baselines")
    monkeypatch.setattr(module.toy, "model_path", lambda seed: None)
    monkeypatch.setattr(module, "run", trained)
    return module


def called(module, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, flags)])
    return module.main()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--baselines", "opbo"), "invalid choice: 'opbo'"),
        (("--output", Path(__file__) / "report.json"), "cannot make the folder of"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_runs(script, flags, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_code:
        called(script, monkeypatch, *flags)
    assert exit_code.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("rounds", ["1", "0", "-2", "two"])
def test_quartiles_need_two_rounds(rounds, monkeypatch, capsys):
    """Said before anything is timed."""
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("trl_step")
    monkeypatch.setattr(module, "measure", None)
    with pytest.raises(SystemExit) as exit_code:
        called(module, monkeypatch, f"--rounds={rounds}")
    assert exit_code.value.code == 2
    assert f"argument --rounds: is {rounds!r}, expected 2 or more" in capsys.readouterr().err


def test_committed_results_stay_and_the_table_has_every_seed(script, tmp_path, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    monkeypatch.chdir(BENCHMARKS.parent)
    monkeypatch.setattr(script, "run", lambda name, seed, *_: script.record(name, seed, HISTORY) | {"seconds": 1.0})
    flags = ("--baselines", "group", "--seeds", *range(12), "--runs", tmp_path / "runs")
    assert called(script, monkeypatch, *flags) == 0
    printed = capsys.readouterr().out
    assert "0.300" in printed and "0 of 12" in printed
    (row,) = json.loads((tmp_path / "runs" / "report.json").read_text())["rows"]
    assert row["final_of_seeds"] == [pytest.approx(0.3)] * 12
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before
    chosen = tmp_path / "new" / "chosen.json"
    called(script, monkeypatch, *flags, "--output", chosen)
    assert len(json.loads(chosen.read_text())["seconds"]) == 12 and chosen.with_suffix(".png").exists()
