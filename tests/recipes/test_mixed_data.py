"""recipes/mixed_data.py: every flag acts, two processes train, and the page has the tables of the committed result."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import mixed_data  # noqa: E402

from offcorr import toy  # noqa: E402

SMALL = {
    "train_size": 64,
    "eval_size": 16,
    "max_steps": 4,
    "eval_steps": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "warm_start": 40,
    "picture": False,
    "disable_tqdm": True,
    "loss_type": "ppo",
}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """``trained(**flags)``: the history of a short run, in this process."""

    def run(**flags):
        flags = {**SMALL, "output_dir": tmp_path, **flags}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr(sys, "argv", ["mixed_data.py", *words])
        mixed_data.main()
        return json.loads((tmp_path / "history.json").read_text())

    return run


def series(history, name):
    return [entry[name] for entry in history if name in entry]


def test_replay(trained, tmp_path):
    """Half of the groups of each generation after the first were sampled for an earlier one."""
    history = trained(replay_share=0.5, steps_per_generation=1, dump_rollouts=tmp_path / "rollouts")
    shares = series(history, "offcorr/origin/replay/share")
    assert shares and max(shares) == pytest.approx(0.5, abs=0.01)
    assert max(series(history, "offcorr/origin/replay/lag")) >= 1
    again = trained(replay_share=1.0, replay_from=tmp_path / "rollouts", output_dir=tmp_path, max_steps=1, eval_steps=1)
    assert series(again, "offcorr/origin/replay/share")[0] > 0.4, "the earlier run's groups fill the first generation"


def test_demonstrations(trained):
    """One of four completions is a right working, so a group has an advantage though the model solves nothing."""
    history = trained(demonstrations="toy", without_logp="ratio_one")
    assert series(history, "offcorr/origin/demonstration/share")[0] == pytest.approx(0.25)
    assert series(history, "offcorr/origin/demonstration/reward")[0] == 1.0


def test_a_supervised_term_teaches(trained):
    plain = trained(learning_rate=5e-3, seed=3)
    learnt = trained(learning_rate=5e-3, seed=3, demonstrations="toy", chord_mu=0.9)
    assert series(plain, "loss")[0] != series(learnt, "loss")[0]
    assert not series(learnt, "offcorr/origin/demonstration/share")


def test_prefixes_of_unsolved_prompts(trained, capsys):
    history = trained(prefixes="toy", prefix_length="0.8", unsolved=2)
    kept = [int(number) for number in re.findall(r"unsolved in 2 samples: (\d+) of", capsys.readouterr().out)]
    assert len(kept) == 2 and 0 < kept[0] <= 64 and 0 < kept[1] <= 16
    assert series(history, "offcorr/origin/prefix/share")[0] == 1.0


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"chord_mu": 0.1}, "chord_mu is 0.1, which learns from demonstrations"),
        ({"replay_from": "runs"}, "replay_share is 0: choose a share"),
        ({"prefix_length": "half"}, "prefix_length is 'half', expected a number, or curriculum"),
        ({"model": "Qwen/Qwen3-0.6B"}, "warm_start is 40, which goes with the toy model"),
    ],
)
def test_flags_that_cannot_be(trained, capsys, flags, said):
    with pytest.raises(SystemExit):
        trained(**flags)
    assert said in capsys.readouterr().err


def test_a_demonstration_is_right():
    rows = toy.dataset(32, seed=1)
    assert toy.reward([toy.demonstration(prompt) for prompt in rows["prompt"]], rows["answer"]) == [1.0] * 32
    with pytest.raises(ValueError, match="expected one of the toy task"):
        toy.demonstration("2+2=")


# -- the benchmark -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("mixed_data_benchmark", ROOT / "benchmarks" / "mixed_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_committed_result(benchmark):
    data = json.loads(benchmark.RESULT.read_text())
    assert benchmark.PAGE.read_text() == benchmark.page(data), "python benchmarks/mixed_data.py --page"
    assert [match[2] for match in benchmark.BLOCK.finditer(benchmark.PAGE.read_text())] == [*data["runs"]]


def test_aggregation_by_hand(benchmark):
    def one(*accuracy):
        return {"step": [0, 20, 40, 60], "accuracy": [*accuracy], "means": {"offcorr/staleness/lag": 2.0}}

    first, second = (
        [one(0.0, 0.4, 0.2, 0.6), one(0.0, 0.2, 0.2, 0.2)],
        [one(0.1, 0.5, 0.3, 0.7), one(0.0, 0.4, 0.4, 0.4)],
    )
    plain, row = benchmark.table({"plain": first, "other": second})
    assert plain["AUC"] == f"{statistics.fmean([0.3, 0.15]):.3f}" and plain["AUC, to the first"] == ""
    assert row["AUC, to the first"] == f"+0.125 ± {0.05 / math.sqrt(2) / math.sqrt(2):.3f}"
    assert row["end"] == f"{statistics.fmean([0.5, 0.4]):.3f}" and row["largest fall"] == "0.10" and row["lag"] == "2.0"
