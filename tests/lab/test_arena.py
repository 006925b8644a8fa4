"""Tests of ``offcorr bench arena``: its numbers by hand, its processes with a small recipe, and real runs."""

import dataclasses
import hashlib
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import offcorr
from offcorr.cli import main
from offcorr.lab import arena, arena_report, results
from tests.lab.signals import heard

ROOT = Path(__file__).resolve().parents[2]


def record(method="minpro", seed=0, values=(0.4, 0.6), metrics=None, lag=16, exit_code=0, **more):
    """A run's record with an evaluation every 10 updates."""
    steps = [10 * i for i in range(len(values))]
    setting = {"method": method, "lag": lag, "precision": "int8", "learning_rate": 5e-4, "seed": seed, **more}
    series = {name: {"step": [4 * i for i in range(1, 1 + len(v))], "value": v} for name, v in (metrics or {}).items()}
    held_out = {"step": steps, "value": list(values)}
    error = "it broke" if exit_code else None
    return {"setting": setting, "exit_code": exit_code, "error": error, "held_out": held_out, "metrics": series}


# -- the numbers, by hand


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ((0.4, 0.9, 0.44, 0.39), 30),  # 0.44 is below half of the peak, not below the start
        ((0.4, 0.6, 0.35, 0.31), None),  # below the start, not below half of the peak
        ((0.4, 0.9, 0.1, 0.9), 20),  # a collapse from which it recovers
        ((0.4, 0.19), 10),  # the start is a peak
        ((0.4, 0.5, 0.9), None),
    ],
)
def test_a_collapse_is_below_half_of_the_peak_and_below_the_start(accuracy, expected):
    assert arena_report.collapse([0, 10, 20, 30], accuracy + (0.9,) * (4 - len(accuracy))) == expected


def test_a_curve_by_hand():
    curve = arena_report.Curve.of({"held_out": {"step": [0, 10, 30], "value": [0.2, 0.8, 0.4]}})
    assert curve.auc == pytest.approx((10 * 0.5 + 20 * 0.6) / 30)
    assert (curve.final, curve.peak, curve.collapse) == (0.4, 0.8, None)
    assert curve.fall == pytest.approx(0.4)


def test_rows_are_means_and_differences_paired_by_seed():
    records = [record("a", seed, values=(v, v)) for seed, v in ((0, 0.5), (2, 0.7))]
    records += [record("b", seed, values=(v, v)) for seed, v in ((2, 0.5), (1, 0.9), (0, 0.4))]
    records += [record("b", 3, exit_code=1), record("c", 0, exit_code=-9)]
    first, second, third = arena_report.rows(records)
    assert [row["method"] for row in (first, second, third)] == ["a", "b", "c"]
    assert first["auc"]["mean"] == second["auc"]["mean"] == pytest.approx(0.6)  # the first that is best stays first
    assert (first["auc"]["low"], first["auc"]["high"]) == (0.5, 0.7)
    assert first["difference"] is None
    # Seeds 0 and 2 alone: -0.1 and -0.2, whose standard deviation is 0.1 / sqrt(2).
    assert second["difference"] == {"mean": pytest.approx(-0.15), "error": pytest.approx(0.05), "seeds": 2}
    assert second["seeds"] == [0, 1, 2] and second["auc_of_seeds"] == pytest.approx([0.4, 0.9, 0.5])
    assert [(row["runs"], row["failed"]) for row in (first, second, third)] == [(2, 0), (3, 1), (0, 1)]
    assert third["auc"] is None and third["difference"] is None


def test_the_number_of_seeds_follows_from_the_paired_deviation():
    records = [record("a", seed, values=(v, v)) for seed, v in enumerate((0.5, 0.6))]
    records += [record("b", seed, values=(v, v)) for seed, v in enumerate((0.5, 0.5))]
    (row,) = arena_report.seeds_needed(records)
    assert row["pairs"] == 1 and row["sd"] == pytest.approx(0.1 / math.sqrt(2))
    # (1.960 + 0.842)^2 0.005 / 0.05^2 = 15.7, and / 0.03^2 = 43.6
    assert row["seeds"] == {"0.05": 16, "0.03": 44}


def test_warnings_by_hand():
    collapsing, fine = (0.4, 0.9, 0.9, 0.1), (0.4, 0.9, 0.9, 0.9)
    runs = [
        record(values=collapsing, metrics={"entropy": [0.2, 0.2, 0.2, 0.4]}),  # from update 16 on: 14 before
        record(values=collapsing, metrics={"entropy": [0.4, 0.2, 0.2, 0.2]}),  # 26 before
        record(values=collapsing, metrics={"entropy": [0.2] * 7 + [0.4]}),  # at update 32, after the collapse at 30
        record(values=collapsing, metrics={"entropy": [None, 0.2]}),  # not finite, then never
        record(values=fine, metrics={"entropy": [0.2, 0.4]}),  # a false alarm
        record(values=fine, metrics={"entropy": [0.2, 0.2]}),
        record(values=fine),  # not logged
    ]
    rows = {(row["metric"], row["above"], row["threshold"]): row for row in arena_report.warnings(runs)}
    found = rows["entropy", True, 0.3]
    assert (found["warned"], found["collapses"], found["updates_before"]) == (2, 4, statistics.median([14, 26]))
    assert (found["false_alarms"], found["without_collapse"]) == (1, 2)
    assert {metric for metric, _, _ in rows} == {"entropy"}


def test_the_text_shows_failed_runs_and_defines_a_collapse():
    flat = record("a", values=(0.4, 0.5, 0.6))
    runs = [flat, record("a", 1, values=(0.4, 0.9, 0.1), metrics={"entropy": [0.6]}), record("b", exit_code=-9)]
    text = arena_report.text(arena_report.report(runs))
    assert "FAILED with exit code -9: b, lag 16, int8, seed 0: it broke" in text
    assert "1 of 2" in text and arena_report.COLLAPSE in text and "Early warning\n" in text
    assert "entropy  > 0.3" in text and "> 1  " not in text


def test_the_pictures_are_drawn_without_the_methods_that_have_no_run(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [record("a"), record("b", lag=4), record("c", exit_code=1)]
    drawn = arena_report.pictures(arena_report.report(runs), tmp_path / "report.json")
    assert [file.name for file in drawn] == ["report.png", "report_curves.png"]
    assert all(file.stat().st_size > 5_000 for file in drawn)
    assert arena_report.pictures(arena_report.report(runs[2:]), tmp_path / "none.json") == []


# -- the command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["mnipro"], "unknown method 'mnipro', did you mean 'minpro'? `offcorr methods` lists them"),
        (["minpro", "minpro"], "METHOD 'minpro' is given twice"),
        (["--lags", "-1"], "--lags is -1, expected 0 or more"),
        (["--processes", "0"], "--processes is 0, expected 1 or more"),
        (["--learning-rates", "0"], "--learning-rates is 0.0, expected numbers above 0"),
        (["--precisions", "int3"], "precision is 'int3', did you mean 'int4' or 'int8'? expected one of fp32"),
        (["--ess-lr", "sqrt", "sqrt"], "--ess-lr 'sqrt' is given twice"),
        (["--quick", "--grid", "gpu"], "leave one out"),
        (["--config", "gsm9k"], "--config is 'gsm9k', which is not a file; expected one, or one of ctpo, gsm8k"),
        (["--output", __file__], "exists; choose another --output, or allow it with --overwrite"),
        (["--overwrite"], "--overwrite is given without --output, whose file it replaces"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_runs(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arena, "train", lambda *_: pytest.fail("a run was started"))
    assert main(["bench", "arena", *flags, "--folder", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arena, "RECIPE_NEEDS", ("no-such-package",))
    assert main(["bench", "arena", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "offcorr bench arena needs no-such-package, not installed here" in said and len(said.splitlines()) == 1


def test_the_default_grid_has_every_lag_and_precision_and_methods_that_exist():
    assert all(offcorr.resolve(method) for grid in arena.GRIDS.values() for method in grid.methods)
    lags, precisions = zip(*arena.GRIDS["default"].cells, strict=True)
    assert set(lags) == {0, 4, 16, 64} and set(precisions) == {"fp32", "int8", "int4"}


@pytest.mark.parametrize("name", arena.GRIDS)
def test_the_recipes_own_parser_takes_the_flags_of_every_grid(name, tmp_path, monkeypatch):
    for package in ("trl", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    recipe, grid = importlib.import_module("grpo"), arena.GRIDS[name]
    one_of_each = {run.method: run for run in grid.runs} | {(run.lag, run.precision): run for run in grid.runs}
    scaled = dataclasses.replace(grid.runs[0], ess_lr="sqrt", learning_rate=1e-5)
    for run in [*one_of_each.values(), scaled]:
        monkeypatch.setattr(sys, "argv", ["grpo.py", *arena._job(run, tmp_path)["argv"]])
        taken = recipe.parse(recipe.Arguments)
        wanted = run.flags | {"config": None}
        assert {flag: getattr(taken, flag, None) for flag in wanted} == wanted
        assert taken.task == ("toy" if run.model == "toy" else "openai/gsm8k")


# -- with the learning rate scaled by the effective sample size


def test_a_run_without_a_rule_of_the_learning_rate_has_the_name_that_it_had_before_there_was_one():
    run = arena.Run("minpro?eps_high=0.3", 16, "int8", seed=3)
    fields = ("method", "lag", "precision", "seed", "updates", "learning_rate", "model", "config")
    setting = {name: getattr(run, name) for name in fields} | {
        "correction": offcorr.get("minpro", eps_high=0.3).to_config(),
        "versions": results.about("", {})["versions"],
    }
    assert run.setting == setting
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:8]
    assert run.name == f"minpro-eps_high=0.3_lag16_int8_seed3_{digest}"
    assert "ess_lr" not in run.flags

    scaled = dataclasses.replace(run, ess_lr="sqrt")
    assert scaled.setting == setting | {"ess_lr": "sqrt"} and scaled.flags["ess_lr"] == "sqrt"
    assert scaled.name.startswith("minpro-eps_high=0.3-ess_lr=sqrt_lag16_int8_seed3_")
    assert str(scaled).startswith("minpro?eps_high=0.3 + ess_lr=sqrt, lag 16")


def test_rules_of_the_learning_rate_have_rows_of_their_own():
    records = [record("a", seed, values=(v, v)) for seed, v in ((0, 0.5), (1, 0.7))]
    records += [record("a", seed, values=(v, v), ess_lr="sqrt") for seed, v in ((0, 0.4), (1, 0.5))]
    report = arena_report.report([*records, record("a", 2, exit_code=1, ess_lr="linear")])
    assert [row["method"] for row in report["rows"]] == ["a", "a + ess_lr=sqrt", "a + ess_lr=linear"]
    assert report["rows"][1]["difference"] == {"mean": pytest.approx(-0.15), "error": pytest.approx(0.05), "seeds": 2}
    assert report["seeds_needed"][0]["pairs"] == 1
    assert "a + ess_lr=linear, lag 16, int8, seed 2: it broke" in arena_report.text(report)


@pytest.mark.parametrize(
    ("flags", "rules"),
    [([], [None]), (["--ess-lr", "linear"], ["linear"]), (["--ess-lr", "none", "sqrt"], [None, "sqrt"])],
)
def test_the_command_trains_every_method_with_every_rule(flags, rules, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    asked = []
    monkeypatch.setattr(arena, "train", lambda runs, *_: asked.extend(runs) or [record()])
    assert (
        main(["bench", "arena", "ppo", "minpro", "--lags", "4", "--seeds", "0", *flags, "--folder", str(tmp_path)]) == 0
    )
    assert [(run.method, run.ess_lr) for run in asked] == [(m, rule) for m in ("ppo", "minpro") for rule in rules]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["command"] == " ".join(["offcorr bench arena ppo minpro --lags 4 --seeds 0", *flags])
    assert written["setting"].get("ess_lr") == (rules if flags else None)


# -- the processes, with a recipe that trains nothing

RECIPE = """
import json, os, sys, time
from pathlib import Path

def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    folder, seed = Path(flags["--output_dir"]), int(flags["--seed"])
    if seed == 1 and not (go := folder.parent / "go").exists():
        (folder.parent / f"pid_{os.getpid()}").touch()
        while not go.exists():
            time.sleep(0.05)
    if flags["--loss_type"] == "offcorr:ppo":
        raise FloatingPointError("the weights overflow")
    if flags["--loss_type"] == "offcorr:gspo":
        os.kill(os.getpid(), 9)
    print("trained", flush=True)
    logs = [{"step": 4 * i, "eval_reward": (i + seed) / 8, "reward": 0.5, "nothing": 1} for i in range(3)]
    (folder / "history.json").write_text(json.dumps(logs))
"""
COMMAND = """
import sys
from pathlib import Path
from offcorr.lab import arena
arena.recipes = lambda: Path(sys.argv[1])
import offcorr
from offcorr.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Makes command lines for the recipe above, on a model that is no toy, which needs no warm start."""
    pytest.importorskip("trl")
    (tmp_path / "grpo.py").write_text(RECIPE)
    (tmp_path / "none.yaml").touch()
    monkeypatch.setattr(arena, "recipes", lambda: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fixed = ["--model", "any", "--config", str(tmp_path / "none.yaml"), "--lags", "16"]
    fixed += ["--folder", str(tmp_path / "runs")]
    return lambda *flags, processes=2: ["bench", "arena", *flags, *fixed, "--processes", str(processes)]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def records_of(folder):
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*_seed*.json")}


@pytest.fixture
def stopped(command, tmp_path):
    """Starts the command, sends it a signal when two of three runs are finished, and returns its exit code."""

    def stop(how):
        words = command("minpro", "--seeds", "0", "1", "2")  # the run of seed 1 waits for the file "go"
        process = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path), *words], preexec_fn=heard)
        runs = tmp_path / "runs"
        (pid,) = wait_for(lambda: [int(file.name[4:]) for file in runs.glob("pid_*")])
        wait_for(lambda: len(records_of(runs)) == 2)
        process.send_signal(how)
        process.wait(timeout=60)
        wait_for(lambda: not alive(pid))
        return process.returncode

    return stop


def test_ctrl_c_ends_the_runs(stopped):
    assert stopped(signal.SIGINT) == 130


def test_a_killed_command_goes_on_from_its_finished_runs_to_the_same_table(stopped, command, tmp_path, capsys):
    assert stopped(signal.SIGKILL) == -9
    runs, words = tmp_path / "runs", command("minpro", "--seeds", "0", "1", "2")
    before = records_of(runs)
    (runs / "go").touch()
    assert main(words) == 0
    printed, said = capsys.readouterr()
    assert "2 of 3 runs are finished already" in said and "1 of 1  minpro" in said
    assert len(records_of(runs)) == 3 and before.items() <= records_of(runs).items()
    for file in runs.glob("*_seed*.json"):
        file.unlink()
    assert main(words) == 0
    assert capsys.readouterr().out == printed and "0 of 3" in printed


def test_a_run_that_fails_or_is_killed_is_reported_and_the_others_go_on(command, tmp_path, capsys):
    assert main(command("ppo", "gspo", "minpro", "--seeds", "0", processes=1)) == 1
    printed, said = capsys.readouterr()
    assert "FAILED with exit code 1: ppo, lag 16, int8, seed 0: FloatingPointError: the weights overflow" in printed
    assert "FAILED with exit code -9: gspo" in printed and "3 of 3" in said
    (finished,) = [json.loads(f.read_text()) for f in (tmp_path / "runs").glob("minpro*.json")]
    assert finished["exit_code"] == 0 and finished["setting"]["correction"]["method"] == "minpro"
    assert finished["held_out"] == {"step": [0, 4, 8], "value": [0.0, 0.125, 0.25]}
    assert finished["metrics"] == {"reward": {"step": [0, 4, 8], "value": [0.5] * 3}}
    (broken,) = [f / "output.txt" for f in (tmp_path / "runs").glob("ppo_*") if f.is_dir()]
    assert "Traceback" in broken.read_text()


def test_the_report_replaces_a_chosen_file_only_when_asked(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(arena, "train", lambda runs, *_: [record(run.method, run.seed) for run in runs])
    words = ["--seeds", "0", "--folder", str(tmp_path), "--output", str(tmp_path / "chosen.json")]
    assert main(["bench", "arena", "minpro", *words]) == 0
    written = (tmp_path / "chosen.json").read_text()
    assert json.loads(written)["command"] == "offcorr bench arena minpro --seeds 0"
    assert main(["bench", "arena", "ctpo", *words]) == 2
    assert (tmp_path / "chosen.json").read_text() == written
    assert main(["bench", "arena", "ctpo", *words, "--overwrite"]) == 0
    assert "ctpo" in (tmp_path / "chosen.json").read_text()


# -- real runs


@pytest.mark.slow
def test_a_run_gives_the_same_numbers_first_or_second_in_its_process(tmp_path):
    pytest.importorskip("trl")
    runs = [arena.Run(method, 2, "int4", seed=0, updates=5) for method in ("minpro", "reinforce")]
    forward = arena.train(runs, tmp_path / "forward", processes=1)
    backward = arena.train(runs[::-1], tmp_path / "backward", processes=1)[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert one.pop("seconds") and other.pop("seconds") and one == other
        assert one["held_out"]["step"] == [0, 4, 5] and one["metrics"]["offcorr/engine/abs_mean"]["value"][0] > 0.01
    assert forward[0]["metrics"]["grad_norm"] != forward[1]["metrics"]["grad_norm"]
    assert not list(tmp_path.rglob("history.png"))
