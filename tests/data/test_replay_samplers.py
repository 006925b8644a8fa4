"""``Replay`` around other samplers, in trainers that suit it and in those that are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import trl

from offcorr.data import Around, Demonstrations, Replay, Traces
from offcorr.data.sources import check_rows, check_trainer
from offcorr.rollout import OffPolicy
from offcorr.stages.checks import warn_again
from offcorr.trl import GRPOTrainer
from tests.data.replaying import groups_of, parameters


class Passing(Around):
    """Adds nothing."""

    def __call__(self, prompts, trainer):
        self.attach(trainer)
        return self.sampler(prompts, trainer)


def without(*names):
    sampler = OffPolicy()

    def rollout_func(prompts, trainer):
        return {name: rows for name, rows in sampler(prompts, trainer).items() if name not in names}

    return rollout_func


def test_samplers_combine(trained):
    plain, nested = trained(Replay(OffPolicy(), 0.5)), trained(Replay(Passing(Passing(OffPolicy())), 0.5))
    outside = trained(Passing(Replay(OffPolicy(), 0.5)))
    assert torch.equal(parameters(plain), parameters(nested)) and torch.equal(parameters(plain), parameters(outside))
    assert nested._sampler_name == "Replay(Passing(Passing(OffPolicy)))"


def test_evaluation_is_not_touched(trained, dataset):
    replay = Replay(OffPolicy(), 0.5)
    marked = dataset.add_column("marks", list(range(len(dataset))))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = trained(replay, eval_dataset=marked.select(range(2)), max_steps=3, **settings)
    other = trained(Replay(OffPolicy(), 0.5), max_steps=3)
    assert groups_of(trainer.generations[0]) == groups_of(other.generations[0])
    assert len(replay.store) == len(other._sampler.store) == 4
    assert len(trainer.calls) == len(other.calls) + 3 and all(
        "eval_loss" not in entry or "offcorr/origin/replay/share" not in entry for entry in trainer.state.log_history
    )


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        (without("old_logp", "rollout_version"), {"anchor": "rollout", "loss_type": "minpro"}),
        (without("old_logp", "rollout_version"), {"loss_type": "minpro"}),
        (without("old_logp"), {"anchor": "recomputed", "loss_type": "tis"}),
    ],
)
def test_samplers_that_report_engine_log_probs_alone(trained, sampler, settings):
    trainer = trained(Replay(sampler, 0.5), **settings, max_steps=3)
    assert [int((generation["origin"] == 1).sum()) for generation in trainer.generations] == [0, 4, 4]


@pytest.mark.parametrize("anchor", ["recomputed", "ewma"])
def test_an_anchor_that_reads_no_recorded_log_probs_is_refused_when_the_trainer_is_made(make_trainer, anchor):
    settings = {"anchor_kwargs": {"window": 2}} if anchor == "ewma" else {}
    with pytest.raises(ValueError, match=f"Replay.* and anchor='{anchor}' does not read them: every ratio of a repl"):
        make_trainer(rollout_func=Replay(OffPolicy(), 0.5), loss_type="minpro", anchor=anchor, **settings)
    make_trainer(rollout_func=Replay(OffPolicy(), 0.0), loss_type="minpro", anchor=anchor, **settings)


@pytest.mark.parametrize(
    ("sampler", "settings", "message"),
    [
        (without("old_logp"), {"anchor": "snapshot"}, "='snapshot' .*'minpro' read old_logp, .* returns logprobs:"),
        (without("logprobs"), {"anchor": "rollout"}, "='rollout' .*'minpro' read logprobs, .* returns old_logp:"),
    ],
)
def test_log_probs_that_nothing_reads_are_refused(trained, sampler, settings, message):
    with pytest.raises(ValueError, match=message):
        trained(Replay(sampler, 0.5), **settings)


def test_trls_own_loss_is_warned_of(trained):
    with pytest.warns(RuntimeWarning, match="TRL's own loss reads no recorded log-probs"):
        trained(Replay(OffPolicy(), 0.5), loss_type="dapo", max_steps=2)


def test_trls_own_trainer_is_refused(make_trainer):
    trainer = make_trainer(trl.GRPOTrainer, trl.GRPOConfig, rollout_func=Replay(OffPolicy(), 0.5))
    with pytest.raises(TypeError, match="needs the rows of the dataset, which GRPOTrainer does not hand over"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, "share"),
        ({"share": "half"}, "share"),
        ({"max_groups": 0}, "max_groups is 0, expected a whole number, 1 or more"),
        ({"max_age": -1}, "max_age is -1, expected a whole number, 0 or more"),
        ({"min_ess": 2.0}, "min_ess"),
        ({"advantages": "old"}, "advantages is 'old'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Replay(OffPolicy(), **options)


def test_a_class_is_refused():
    with pytest.raises(TypeError, match=r"sampler is the class OffPolicy, expected an instance: OffPolicy\(...\)"):
        Replay(OffPolicy)
    with pytest.raises(TypeError, match=r"sampler is <lambda>\(prompts\), expected a function of two arguments"):
        Replay(lambda prompts: {})


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"loss_type": "reinforce"}, True),
        ({"loss_type": "reinforce", "loss_kwargs": {"weight": {"name": "truncate", "cap": 2.0}}}, True),  # the engine's
        ({"loss_type": "reinforce", "loss_kwargs": {"reject": {"name": "opsm"}}}, False),
        ({"loss_type": "near_overlap"}, False),
        ({"loss_type": "minpro"}, False),
    ],
)
def test_a_loss_that_does_not_see_the_age_of_a_sequence_is_named(trained, settings, warns):
    """It trains on replayed sequences as a loss of TRL's own does."""
    warn_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(Replay(OffPolicy(), 0.5), max_steps=1, **settings)
    said = [str(w.message) for w in caught if "as if they were fresh" in str(w.message)]
    assert len(said) == warns
    assert not said or said[0].startswith("loss 'reinforce' takes no ratio to the weights that sampled")


def test_recorded_rewards_of_the_wrong_length_are_refused(make_trainer):
    def rollout_func(prompts, trainer):
        return {**OffPolicy()(prompts, trainer), "recorded_rewards": [[1.0, 2.0]] * len(prompts)}

    with pytest.raises(ValueError, match=r"recorded_rewards\[0\] of 2 numbers, expected 1: one for each reward"):
        make_trainer(rollout_func=rollout_func, loss_type="minpro").train()


def test_torn_groups_are_refused():
    rows = [{"prompt": prompt} for prompt in "aaab"]
    with pytest.raises(ValueError, match="the group that begins at row 2 is torn"):
        check_rows("Replay", rows, 2)
    with pytest.raises(ValueError, match="the column 'x' holds a object"):
        check_rows("Replay", [{"prompt": "a", "x": object()}], 1)

    class Args:
        per_device_train_batch_size, steps_per_generation = 2, 3

    class Trainer:
        args, num_generations, correction_step = Args, 4, None

    with pytest.raises(ValueError, match="steps_per_generation is 6, expected a multiple of num_generations, 4"):
        check_trainer("Replay", Trainer)


def test_masks_versions_and_gaps_are_replayed(trained):
    """An environment's tokens, a version per token, tokens that the engine could not score, a key for the rewards."""
    sampler = OffPolicy(lag=1)

    def rollout_func(prompts, trainer):
        output = sampler(prompts, trainer)
        output["env_mask"] = [[int(t != 1) for t in range(len(ids))] for ids in output["completion_ids"]]
        output["logprobs"] = [[None, *row[1:]] for row in output["logprobs"]]
        versions = zip(output["rollout_version"], output["completion_ids"], strict=True)
        output["rollout_version"] = [[version] * len(ids) for version, ids in versions]
        return {**output, "note": ["here"] * len(prompts)}

    trainer = trained(Replay(rollout_func, 0.5), max_steps=4, max_completion_length=6)
    kept = {}
    for generation in trainer.generations:
        mask = generation["completion_mask"].bool()
        for row, origin in enumerate(generation["origin"].tolist()):
            own = mask[row]
            names = ("tool_mask", "rollout_version", "sampling_per_token_logps", "completion_ids")
            found = [generation[name][row][own].nan_to_num(7).tolist() for name in names]
            assert found[2][0] == 7 and (len(found[0]) < 2 or found[0][1] == 0)
            key = (*generation["prompt_ids"][row].tolist(), *generation["old_logp"][row][own].tolist())
            assert not origin or found in kept[key]
            kept.setdefault(key, []).append(found)
    assert [int((generation["origin"] == 1).sum()) for generation in trainer.generations] == [0, 4, 4, 4]


def test_a_sampler_without_versions(trained):
    """The age of a group counts from its generation, and its sequences are known not to be of the current weights."""
    replay = Replay(without("rollout_version"), 0.5, max_age=2)
    trainer = trained(replay, max_steps=6)
    generated = [generation["generated_at"].tolist() for generation in trainer.generations]
    for now, (at, generation) in enumerate(zip(generated, trainer.generations, strict=True)):
        for version, origin in zip(at, generation["origin"].tolist(), strict=True):
            assert now - 2 <= version < now if origin else version == now


def test_the_lag_of_replayed_sequences_without_versions(trained, series, caplog):
    """That of their generation, the least that it can be; the first line says that it is no more than that."""
    trainer = trained(Replay(without("rollout_version"), 0.5), max_steps=4)
    ages = [
        [now - int(at) for at, origin in zip(one["generated_at"], one["origin"], strict=True) if origin == 1]
        for now, one in enumerate(trainer.generations)
    ]
    assert min(map(min, ages[1:])) >= 1
    assert min(series(trainer, "offcorr/staleness/lag")[1:]) > 0
    mean = series(trainer, "offcorr/origin/replay/lag")
    assert len(mean) == 3 and all(min(a) <= lag <= max(a) for a, lag in zip(ages[1:], mean, strict=True))
    (line,) = [record.getMessage() for record in caplog.records if "sampled by" in record.getMessage()]
    assert "rollout_version is not returned: lag is a lower bound" in line


def test_shares_and_ages_that_replay_all_or_nothing_are_refused(make_trainer):
    for options, said in (({"share": 1.0}, "share is 1, expected a number below 1"), ({"max_age": 0}, "max_age is 0")):
        with pytest.raises(ValueError, match=said):
            make_trainer(rollout_func=Replay(OffPolicy(), **options), loss_type="minpro")


def test_replay_of_everything_is_refused_before_the_model_is_loaded():
    for options in ({}, {"min_ess": 0.0}):
        with pytest.raises(ValueError, match="share is 1, expected a number below 1"):
            GRPOTrainer("no model here", len, rollout_func=Replay(OffPolicy(), share=1.0, **options))


def test_replay_is_the_outermost_sampler_and_there_is_one(tokenizer):
    traces = Traces([{"prompt": "1+1=", "completion": "2"}], tokenizer)
    for around in (Replay, lambda sampler: Demonstrations(sampler, traces)):
        for inside in (Replay(OffPolicy()), Passing(Replay(OffPolicy()))):
            with pytest.raises(ValueError, match=r"cannot go around: Replay .* is the outermost sampler"):
                around(inside)
