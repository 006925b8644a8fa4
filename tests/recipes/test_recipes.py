"""Tests of the recipes, started as by a user and run to the end: held-out accuracy must end above its start."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcorr import toy

ROOT = Path(__file__).resolve().parents[2]
EVALUATED = 256


def launch(folder, *flags, recipe="grpo.py", config=None, steps=12):
    """Runs `accelerate launch recipes/...` and returns the logged history."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{config or 'one_process'}.yaml")]
    fixed = ["--output_dir", str(folder), "--disable_tqdm", "true"]
    fixed += ["--max_steps", str(steps), "--eval_steps", str(steps)]
    run = subprocess.run(
        [*launcher, str(ROOT / "recipes" / recipe), *fixed, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert (folder / "history.png").stat().st_size > 10_000
    assert "held-out sampled accuracy, end" in run.stdout
    return json.loads((folder / "history.json").read_text())


def assert_improved(history):
    """Asserts that accuracy ended at least two standard errors above its start."""
    accuracy = [entry["eval_reward"] for entry in history if "eval_reward" in entry]
    start, end = accuracy[0], accuracy[-1]
    error = math.sqrt((start * (1 - start) + end * (1 - end)) / EVALUATED)
    assert end > start + 2 * error, f"held-out sampled accuracy {start:.3f} -> {end:.3f}, standard error {error:.3f}"


@pytest.fixture(scope="session", autouse=True)
def warm_start():
    toy.model_path(progress=False)


def test_a_configuration_file_and_flags(tmp_path):
    """recipes/configs/minpro.yaml, with a flag that overrides the file."""
    history = launch(tmp_path, "--config", str(ROOT / "recipes/configs/minpro.yaml"), "--lag", "2")
    assert_improved(history)
    trained = [entry for entry in history if "offcorr/staleness/lag_max" in entry]
    assert max(entry["offcorr/staleness/lag_max"] for entry in trained) == 2 + 3  # four updates per generation
    assert all(entry["offcorr/engine/abs_mean"] > 0 for entry in trained)


@pytest.mark.parametrize("config", ["two_cpu_processes", "deepspeed_zero2_cpu"])
def test_two_processes(tmp_path, config):
    """Each of two processes has half the batch, so an update has the same number of samples."""
    flags = ("--loss_type", "ctpo", "--per_device_train_batch_size", "32", "--per_device_eval_batch_size", "128")
    assert_improved(launch(tmp_path, *flags, config=config))


@pytest.mark.slow
def test_zero3(tmp_path):
    flags = ("--loss_type", "ctpo", "--per_device_train_batch_size", "32", "--per_device_eval_batch_size", "128")
    assert_improved(launch(tmp_path, *flags, config="deepspeed_zero3_cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_learning(tmp_path, seed):
    """At lag 0 the toy task gains at least .20 held-out sampled accuracy."""
    history = launch(tmp_path, "--seed", str(seed), steps=40)
    accuracy = [entry["eval_reward"] for entry in history if "eval_reward" in entry]
    assert accuracy[-1] >= accuracy[0] + 0.20, accuracy


def test_questions_of_a_file(tmp_path):
    """A .jsonl file with question and answer, a local model folder, and answers checked with math-verify."""
    rows = [{"question": f"{a}+{b}=", "answer": f"Add.\n#### {a + b}"} for a in range(1, 9) for b in range(1, 9)]
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    model = toy.model_path(progress=False)
    history = launch(tmp_path / "out", "--task", str(file), "--model", model, "--eval_size", "16", steps=2)
    assert all(0 <= entry["eval_reward"] <= 1 for entry in history if "eval_reward" in entry)


def test_a_reasoning_gym_task(tmp_path):
    history = launch(tmp_path, "--task", "basic_arithmetic", "--train_size", "64", "--eval_size", "16", steps=2)
    assert any("eval_reward" in entry for entry in history)


def test_answers_are_checked_not_compared():
    sys.path.insert(0, str(ROOT / "recipes"))
    import grpo

    rows = grpo.datasets.Dataset.from_list([{"question": "?", "answer": "Half.\n#### 1/2"}])
    args = grpo.Arguments("unused", train_size=1, eval_size=1)
    task = grpo.math_task(rows, rows, args, lambda question: question)
    said = ["so it is \\boxed{0.5}", [{"role": "assistant", "content": "The answer is 0.50"}], "2", ""]
    assert task.reward(said, [task.test[0]["answer"]] * 4) == [1.0, 1.0, 0.0, 0.0]
