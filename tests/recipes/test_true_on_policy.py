"""Tests of recipes/true_on_policy.py, and of the numbers that docs/exact.md takes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from offcorr import toy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import true_on_policy  # noqa: E402

DIFFERENCE = "train_rollout_logprob_abs_diff"


def test_the_difference_goes_to_exactly_zero(tmp_path):
    """As a user starts it: three stages, two updates each."""
    toy.model_path(progress=False)
    output = tmp_path / "sub" / "found.json"
    command = [sys.executable, ROOT / "recipes" / "true_on_policy.py", "--output", output, "--device", "cpu"]
    options = ["--updates", "2", "--prompts", "4", "--samples", "4", "--stages", "mixed", "heads", "invariant"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["stages"]
    assert found["mixed"][DIFFERENCE] > found["heads"][DIFFERENCE] > 0
    assert found["mixed"]["first_difference"] == "output of model.embed_tokens"
    last = found["invariant"]
    assert last["exact"] and [update[f"{DIFFERENCE}_max"] for update in last["updates"]] == [0, 0]
    assert last["first_difference"] is None and last["tokens"] > 500
    assert all(0 < update["reward"] < 1 for update in last["updates"])
    assert true_on_policy.table(found) in done.stdout


def test_an_update_changes_both_sides():
    import torch

    master = torch.nn.Linear(3, 3)
    models = {
        name: true_on_policy.copied(master, dtype)
        for name, dtype in (("sampler", torch.bfloat16), ("trainer", torch.float32))
    }
    before = master.weight.detach().clone()
    models["trainer"](torch.ones(1, 3)).sum().backward()
    true_on_policy.apply_gradients(master, models, torch.optim.SGD(master.parameters(), lr=0.1))
    assert (master.weight != before).all()
    assert torch.equal(models["trainer"].weight, master.weight)
    assert torch.equal(models["sampler"].weight, master.weight.bfloat16())
    assert all(weight.grad is None for weight in models["trainer"].parameters())


def test_the_page_shows_the_kept_run():
    kept = json.loads((ROOT / "benchmarks" / "results" / "true_on_policy.json").read_text())
    page = (ROOT / "docs" / "exact.md").read_text()
    assert page.partition("<!-- true_on_policy -->\n")[2].partition("\n<!-- end -->")[0] == true_on_policy.table(
        kept["stages"]
    )
    assert list(kept["stages"]) == list(true_on_policy.STAGES)
    assert f"{kept['updates']} updates of {kept['prompts']} prompts x {kept['samples']} samples" in page
    assert f"torch {kept['torch']}" in page
