"""A run resumed from a checkpoint at a generation boundary is the run that was never interrupted."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from transformers import TrainingArguments

from offcorr.rollout import OffPolicy
from offcorr.trl.resume import _learning_rate

SETTINGS = dict(
    loss_type="minpro",
    max_steps=6,
    num_iterations=2,
    save_strategy="steps",
    save_steps=4,
    learning_rate=5e-3,
    lr_scheduler_type="linear",
)


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.fixture
def uninterrupted(make_trainer, tmp_path):
    trainer = make_trainer(
        rollout_func=OffPolicy(lag=3, precision="int8"), output_dir=str(tmp_path / "whole"), **SETTINGS
    )
    trainer.train()
    return trainer


def test_resume(make_trainer, uninterrupted, series, tmp_path):
    # Moved, so that the sampler's part is found through the checkpoint and not by the output folder.
    checkpoint = tmp_path / "moved" / "checkpoint-4"
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", checkpoint)
    resumed = make_trainer(
        rollout_func=OffPolicy(lag=3, precision="int8"), output_dir=str(tmp_path / "again"), **SETTINGS
    )
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(parameters(resumed), parameters(uninterrupted))
    for name in (
        "reward",
        "offcorr/staleness/abs_mean",
        "offcorr/engine/k3",
        "offcorr/staleness/lag",
    ):
        assert series(resumed, name) == series(uninterrupted, name)
    assert series(resumed, "offcorr/staleness/lag")[-2:] == [3, 4]


@pytest.mark.parametrize("missing", ["the ring", "a larger lag", "no OffPolicy"])
def test_resume_without_weights_of_that_age_says_so(make_trainer, uninterrupted, series, tmp_path, missing):
    """It samples with the oldest weights that it holds, as a fresh run does."""
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    if missing != "a larger lag":
        (checkpoint / "offcorr_rollout.pt").unlink()
    sampler = OffPolicy(lag=9 if missing == "a larger lag" else 3, precision="int8")
    oldest = 1 if missing == "a larger lag" else 4
    resumed = make_trainer(rollout_func=sampler, output_dir=str(tmp_path / "again"), **SETTINGS)
    with pytest.warns(UserWarning, match="the oldest held") as caught:
        resumed.train(resume_from_checkpoint=str(checkpoint))
    (said,) = (str(w.message) for w in caught if "the oldest held" in str(w.message))
    assert f"(lag={sampler.lag})" in said and f"none from before version {oldest}" in said
    assert series(resumed, "offcorr/staleness/lag")[-2:] == [4 - oldest, 5 - oldest]


def test_a_resumed_run_says_what_it_does_otherwise(make_trainer, uninterrupted, replay, tmp_path):
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    changed = SETTINGS | {"loss_type": "ppo", "anchor": "rollout", "max_steps": 5}
    resumed = make_trainer(rollout_func=replay("old_logp"), output_dir=str(tmp_path / "again"), **changed)
    with pytest.warns(UserWarning, match="not the one that saved it") as caught:
        resumed.train(resume_from_checkpoint=checkpoint)
    (said,) = (str(w.message) for w in caught if "not the one that saved it" in str(w.message))
    assert "loss was 'minpro', and is 'ppo'; " in said and "Correction(" not in said and "in short" not in said
    assert "anchor was None, and is 'rollout'" in said
    assert "rollout_func was OffPolicy(lag=3, precision='int8'" in said and "replay.<locals>" in said
    assert "ess_lr" not in said


def test_another_option_of_the_loss_is_named_without_the_others(make_trainer, uninterrupted, tmp_path):
    changed = SETTINGS | {"loss_kwargs": {"eps_high": 0.3}, "max_steps": 5}
    sampler = OffPolicy(lag=3, precision="int8")
    resumed = make_trainer(rollout_func=sampler, output_dir=str(tmp_path / "again"), **changed)
    said = r"saved it: loss was 'minpro', and is 'minpro' {'eps_high': 0.3}; lr_scheduler_type was [^;]*$"
    with pytest.warns(UserWarning, match=said):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(epsilon_high=0.28), "epsilon_high was None, and is 0.28"),
        (dict(importance_sampling_level="sequence"), "importance_sampling_level was 'token', and is 'sequence'"),
        (dict(entropy_coef=0.05), "entropy_coef was 0.0, and is 0.05"),
        (dict(reward_weights=[2.0]), r"reward_weights was None, and is \[2.0\]"),
        (dict(seed=7), "seed was 3, and is 7"),
        (dict(max_grad_norm=0.5), "max_grad_norm was 1.0, and is 0.5"),
        (
            dict(reward_funcs=lambda completion_ids, **_: [0.5 * len(ids) for ids in completion_ids]),
            "reward_funcs was .*",
        ),
        (dict(per_device_train_batch_size=8), "per_device_train_batch_size was 4, and is 8"),
    ],
)
def test_another_option_of_trls_own_loss_is_named_at_resume(make_trainer, tmp_path, changed, said):
    settings = dict(loss_type="dapo", output_dir=str(tmp_path / "trl"), save_strategy="steps", save_steps=2)
    make_trainer(**settings, max_steps=2).train()
    with pytest.warns(UserWarning, match=f"is not the one that saved it: {said}$"):
        make_trainer(**settings, **changed, max_steps=2).train(resume_from_checkpoint=True)


def test_a_checkpoint_within_a_generation_is_named_at_resume(make_trainer, tmp_path):
    settings = SETTINGS | {"save_steps": 3, "max_steps": 4}
    make_trainer(output_dir=str(tmp_path / "whole"), **settings).train()
    resumed = make_trainer(output_dir=str(tmp_path / "again"), **settings)
    with pytest.warns(UserWarning, match="in the middle of a generation.* multiple of 2 for checkpoints"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


@pytest.mark.parametrize("more", [0, 1])
def test_a_checkpoint_that_has_all_updates_is_named_at_resume(make_trainer, uninterrupted, tmp_path, more):
    """``max_steps`` counts those before the checkpoint, too."""
    settings = SETTINGS | {"max_steps": 4 + more}
    resumed = make_trainer(rollout_func=OffPolicy(lag=3, precision="int8"), output_dir=str(tmp_path / "x"), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    said = [str(one.message) for one in caught if "nothing is left to train" in str(one.message)]
    assert len(said) == (not more) and all("max_steps=4 counts the updates in all" in one for one in said)
    assert resumed.state.global_step == 5  # which transformers makes in either case


def test_another_length_of_a_generation_is_named_at_resume(make_trainer, uninterrupted, tmp_path):
    """The checkpoint of step 4 lies between two generations of the run that saved it, whatever the resumed run has."""
    settings = SETTINGS | {"num_iterations": 3, "max_steps": 5}
    resumed = make_trainer(rollout_func=OffPolicy(lag=3, precision="int8"), output_dir=str(tmp_path / "x"), **settings)
    with pytest.warns(UserWarning, match="saved it: .*num_iterations was 2, and is 3") as caught:
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert not any("middle of a generation" in str(w.message) for w in caught)


def test_the_same_run_resumes_without_a_word(make_trainer, uninterrupted, tmp_path):
    sampler = OffPolicy(lag=3, precision="int8")
    resumed = make_trainer(rollout_func=sampler, output_dir=str(tmp_path / "again"), **SETTINGS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(not the one that saved it|middle of a generation)")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))


def test_another_course_of_a_schedule_is_named_at_resume(make_trainer, tmp_path):
    """Its start is the same, so the loss is, too."""

    def scheduled(folder, end, **options):
        kwargs = {"loss_type": "ppo", "loss_kwargs": {"eps_high": {"start": 0.5, "end": end}}}
        return make_trainer(output_dir=str(tmp_path / folder), **{**SETTINGS, **kwargs, **options})

    scheduled("first", 0.1, max_steps=2, save_steps=2).train()
    again = scheduled("second", 0.9, max_steps=3)
    with pytest.warns(
        UserWarning, match=r"schedules was .*'end': 0\.1.* over 2 updates, and is .*'end': 0\.9.* over 3"
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))


def test_another_length_moves_the_learning_rate_and_is_named_at_resume(make_trainer, uninterrupted, tmp_path):
    """TRL's schedule of the learning rate runs to max_steps; a constant one does not."""
    checkpoint, sampler = str(tmp_path / "whole" / "checkpoint-4"), OffPolicy(lag=3, precision="int8")
    longer = SETTINGS | {"max_steps": 5}
    resumed = make_trainer(rollout_func=sampler, output_dir=str(tmp_path / "x"), **longer)
    said = "saved it: lr_scheduler_type was 'linear' over 6 updates, and is 'linear' over 5 updates$"
    with pytest.warns(UserWarning, match=said):
        resumed.train(resume_from_checkpoint=checkpoint)


def test_the_length_of_a_constant_learning_rate_is_not_named(tmp_path):
    def asked(**options):
        return _learning_rate(TrainingArguments(str(tmp_path), use_cpu=True, **options))

    for name in ("constant", "constant_with_warmup"):
        assert asked(lr_scheduler_type=name, max_steps=3, warmup_steps=2) == repr(name)
    assert asked(lr_scheduler_type="constant_with_warmup", max_steps=3, warmup_steps=0.5).endswith("' over 3 updates")
    assert asked(lr_scheduler_type="cosine", num_train_epochs=2) == "'cosine' over 2 epochs"


def test_another_learning_rate_is_not_taken_and_that_is_said(make_trainer, uninterrupted, tmp_path):
    """The checkpoint's schedule and optimizer hold theirs."""
    sampler = OffPolicy(lag=3, precision="int8")
    changed = SETTINGS | {"learning_rate": 0.5, "max_steps": 5}
    resumed = make_trainer(rollout_func=sampler, output_dir=str(tmp_path / "again"), **changed)
    with pytest.warns(UserWarning, match="learning_rate is 0.5 and stays [0-9e.-]+, which the checkpoint's optimizer"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert max(entry.get("learning_rate", 0) for entry in resumed.state.log_history) < 0.1


def test_a_second_resume_knows_what_the_first_kept(make_trainer, uninterrupted, tmp_path):
    """The checkpoint of the run that was asked for another weight decay holds the one in force."""

    def resumed(folder, checkpoint, **changed):
        trainer = make_trainer(
            rollout_func=OffPolicy(lag=3, precision="int8"), output_dir=str(tmp_path / folder), **SETTINGS | changed
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=str(tmp_path / checkpoint))
        assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}
        return " ".join(str(one.message) for one in caught)

    changed = {"weight_decay": 0.1, "save_steps": 1}
    said = "weight_decay is 0.1 and stays 0.0, which the checkpoint's optimizer holds"
    assert said in resumed("again", "whole/checkpoint-4", max_steps=5, **changed)
    assert said in resumed("third", "again/checkpoint-5", max_steps=6, **changed)
    assert "weight_decay" not in resumed("back", "again/checkpoint-5", max_steps=6)
