"""Tests of recipes/vcpo.py, started as by a user: held-out accuracy must end above its start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from offcorr import toy
from tests.recipes.test_recipes import assert_improved, launch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import grpo  # noqa: E402
import vcpo  # noqa: E402


@pytest.mark.slow
def test_sixteen_updates_behind(tmp_path):
    toy.model_path(progress=False)
    flags = ("--config", str(ROOT / "recipes/configs/vcpo.yaml"), "--eval_steps", "20")
    history = launch(tmp_path, *flags, recipe="vcpo.py", steps=40)
    assert_improved(history)
    assert max(entry.get("offcorr/staleness/lag_max", 0) for entry in history) == 16 + 3
    scales = [entry["lr_scale"] for entry in history if "lr_scale" in entry]
    assert len(scales) == 10 and 0.1 < min(scales) < 0.95


def test_its_probabilities_are_the_trainers(tmp_path):
    """logp equals TRL's, the sum of squares that of a plain softmax, and there is one advantage per token."""
    path = toy.model_path(progress=False)
    tokenizer = grpo.AutoTokenizer.from_pretrained(path)
    args = vcpo.Arguments(
        str(tmp_path), loss_type="vcpo", train_size=64, eval_size=16, temperature=0.7, max_steps=1, eval_on_start=False
    )
    task = grpo.load_task(args, tokenizer)
    trainer = vcpo.VCPOTrainer(
        model=path,
        args=args,
        reward_funcs=task.reward,
        train_dataset=task.train,
        eval_dataset=task.test,
        processing_class=tokenizer,
        rollout_func=grpo.OffPolicy(precision="int8"),
    )
    rows = [task.train[i // 8] for i in range(256)]
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows)
    mask = output["completion_mask"].bool()
    parts = (output[name] for name in ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask"))
    with torch.no_grad():
        logp, sum_sq_probs = trainer.probabilities(*parts)
        wanted = trainer._forward(trainer.model, output).logp
    torch.testing.assert_close(logp[mask], wanted[mask], rtol=1e-4, atol=1e-4)
    ids, attended = (torch.cat([output[f"prompt_{x}"], output[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attended).logits[:, -mask.shape[1] - 1 : -1]
    squares = (logits / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(sum_sq_probs[mask], squares[mask], rtol=1e-4, atol=1e-5)
    advantages = output["advantages"]
    assert advantages.shape == mask.shape
    correct = output["rewards"] == 1
    assert (advantages[correct][mask[correct]] >= 0).all() and (advantages[~correct][mask[~correct]] <= 0).all()
    assert (advantages.abs()[mask] > 0).any(0)


def test_a_group_on_two_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(vcpo.Arguments, "world_size", 2)
    with pytest.raises(ValueError, match="12\\) must be divisible by num_generations \\(8\\); the 12 are 6 x 1 x 2"):
        vcpo.Arguments("out", per_device_train_batch_size=6, steps_per_generation=2)
