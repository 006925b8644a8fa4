"""Tests of benchmarks/methods.py and benchmarks/baselines.py without their training runs, which these replace."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
HISTORY = [{"step": 4 * i, "eval_reward": 0.1 * i, "offcorr/staleness/abs_mean": 0.25} for i in range(4)]


@pytest.fixture
def script(request, monkeypatch):
    """A benchmark's module; it may train nothing unless a test says what comes out."""

    def trained(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module(request.param)
    monkeypatch.setattr(module.toy, "model_path", lambda seed: None)
    monkeypatch.setattr(module, {"methods": "train_all", "baselines": "run"}[request.param], trained)
    return module


def called(module, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, flags)])
    return module.main()


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("methods", ("--methods", "dapo", "mnipro"), "unknown method 'mnipro', did you mean 'minpro'?"),
        ("baselines", ("--baselines", "opbo"), "invalid choice: 'opbo'"),
        ("methods", ("--output", Path(__file__) / "report.json"), "cannot make the folder of"),
    ],
    indirect=["script"],
)
def test_a_wrong_flag_is_named_before_anything_runs(script, flags, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_code:
        called(script, monkeypatch, *flags)
    assert exit_code.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("script", ["methods", "baselines"], indirect=True)
def test_committed_results_stay_and_a_piped_table_is_whole(script, tmp_path, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    monkeypatch.chdir(BENCHMARKS.parent)
    monkeypatch.setenv("COLUMNS", "40")
    if script.__name__ == "methods":
        monkeypatch.setattr(script, "train_all", lambda runs, *_: dict.fromkeys(runs, HISTORY))
        flags = ("--methods", "minpro")
    else:
        monkeypatch.setattr(script, "run", lambda name, seed, *_: script.row_of(name, seed, HISTORY))
        flags = ("--baselines", "group")
    seeds = ("--seeds", *range(12))  # one column shows every seed
    assert called(script, monkeypatch, *flags, *seeds, "--runs", tmp_path / "runs") == 0
    printed = capsys.readouterr().out
    assert " ".join(["0.300"] * 12) in printed and "staleness |d|" in printed and "…" not in printed
    assert len(json.loads((tmp_path / "runs" / "report.json").read_text())["runs"]) == 12
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before
    chosen = tmp_path / "new" / "chosen.json"
    called(script, monkeypatch, *flags, "--seeds", 0, "--runs", tmp_path / "runs", "--output", chosen)
    assert len(json.loads(chosen.read_text())["runs"]) == 1 and chosen.with_suffix(".png").exists()
