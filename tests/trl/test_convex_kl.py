"""``convex_kl``: the reference of the KL penalty is a mixture of two policies, in a resumed run, too."""

from __future__ import annotations

import copy

import pytest
import torch

from offcorr.extras import convex_reference
from offcorr.trl import GRPOConfig

SETTINGS = {"loss_type": "ppo", "beta": 0.1, "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 1}


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_the_reference_model_alone_is_the_plain_penalty(make_trainer, replay):
    """To rounding: log(1 e^b) is b."""
    plain = make_trainer(rollout_func=replay("old_logp"), **SETTINGS)
    shared = make_trainer(rollout_func=replay("old_logp"), convex_kl={"base_share": 1.0, "window": 4}, **SETTINGS)
    half = make_trainer(rollout_func=replay("old_logp"), convex_kl={"base_share": 0.5, "window": 4}, **SETTINGS)
    for trainer in (plain, shared, half):
        trainer.train()
    torch.testing.assert_close(weights(shared), weights(plain), rtol=1e-3, atol=1e-4)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(weights(half), weights(plain), strict=True))


def test_the_mixture_is_of_the_initial_and_the_last_weights(make_trainer, replay, monkeypatch):
    """With a window near 0 the mean of recent weights is that of the last step."""
    options = {"base_share": {"start": 0.75, "end": 0.25}, "window": 1e-6}
    trainer = make_trainer(rollout_func=replay("old_logp"), convex_kl=options, **SETTINGS)
    seen = []
    shared = trainer.convex_kl.shared

    def recording(inputs):
        step, models = trainer.state.global_step, (trainer.ref_model, copy.deepcopy(trainer.model))
        with torch.no_grad():
            base, last = (trainer._score(inputs, model) for model in models)
        outputs = shared(inputs)
        seen.append((step, base, last, inputs["ref_per_token_logps"], outputs["ref_per_token_logps"], inputs))
        return outputs

    monkeypatch.setattr(trainer.convex_kl, "shared", recording)
    trainer.train()
    assert [row[0] for row in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    for step, base, last, theirs, ours, inputs in seen:
        mask = inputs["completion_mask"].bool()
        torch.testing.assert_close(theirs[mask], base[mask])
        wanted = convex_reference(base, last, 0.75 - step / 6)
        torch.testing.assert_close(ours[mask], wanted[mask], rtol=1e-4, atol=1e-4)
    assert (seen[-1][1] - seen[-1][2]).abs().max() > 0.01


def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, replay, tmp_path):
    options = SETTINGS | {"convex_kl": {"base_share": 0.2, "window": 4}, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(rollout_func=replay("old_logp"), **options)
    whole.train()
    resumed = make_trainer(rollout_func=replay("old_logp"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.parametrize(
    "given, beta, said",
    [
        ({"base_share": 1.5}, 0.1, "base_share is 1.5, expected 0 <= base_share <= 1"),
        ({"base_share": {"start": 0.5}}, 0.1, "expected a number, or 'start' and 'end'"),
        ({"window": 0}, 0.1, "window is 0, expected a number of optimizer steps above 0"),
        ({"windows": 1}, 0.1, "convex_kl has the key 'windows'"),
        ({"window": 1}, 0.0, "beta is 0: set beta above 0"),
        ("half", 0.1, "convex_kl is 'half', expected a mapping or a JSON object"),
    ],
)
def test_options_that_cannot_be(given, beta, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        GRPOConfig(str(tmp_path), convex_kl=given, beta=beta, bf16=False, use_cpu=True)


def test_the_command_line_takes_json(tmp_path):
    config = GRPOConfig(str(tmp_path), convex_kl='{"window": 8}', beta=0.1, bf16=False, use_cpu=True)
    assert config.convex_kl == {"window": 8}
