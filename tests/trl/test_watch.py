"""What a trainer knows of its sampler without being told: the age of the samples, and settings that distort them."""

from __future__ import annotations

import math
import warnings

import pytest
from transformers import Qwen3ForCausalLM, TrainerCallback

from offcorr.rollout import OffPolicy, Sampling, decode
from offcorr.training import MismatchError

SETTINGS = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=6, learning_rate=1e-4)

pytestmark = pytest.mark.filterwarnings("ignore:every staleness ratio")


def without_versions(sampler):
    def rollout(prompts, trainer):
        output = sampler(prompts, trainer)
        return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    rollout.attach = sampler.attach
    return rollout


@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])
@pytest.mark.parametrize("sampler", [None, "a rollout_func"])
def test_the_lag_of_samples_without_versions(make_trainer, series, loss_type, sampler):
    """Of a generation that is used for three steps: 0, 1 and 2."""
    rollout = {} if sampler is None else {"rollout_func": without_versions(OffPolicy())}
    trainer = make_trainer(loss_type=loss_type, steps_per_generation=3, log_metrics="short", **SETTINGS, **rollout)
    trainer.train()
    assert series(trainer, "offcorr/staleness/lag") == [0, 1, 2, 0, 1, 2]


def test_the_lag_of_several_iterations(make_trainer, series):
    trainer = make_trainer(loss_type="minpro", num_iterations=2, log_metrics="short", **SETTINGS)
    trainer.train()
    assert series(trainer, "offcorr/staleness/lag") == [0, 1] * 3


DISTORTED = {
    "TRL's own, top_p": ({"top_p": 0.9}, None, r"top_p=0\.9: .*surprise alone can show it: set top_p=1\.0"),
    "TRL's own loss": ({"top_k": 5, "loss_type": "dapo"}, None, "top_k=5: "),
    "TRL's own, two": ({"min_p": 0.1, "repetition_penalty": 1.2}, None, r"min_p=0\.1, repetition_penalty=1\.2: "),
    "generation_kwargs": ({"generation_kwargs": {"top_p": 0.8}}, None, r"top_p=0\.8: "),
    "generation_kwargs, temperature": (
        {"generation_kwargs": {"temperature": 0.5}, "temperature": 0.9},
        None,
        r"^temperature=0\.5: .*: give the temperature as temperature=, which the trainer scores at",
    ),
    "generation_kwargs, others": (
        {"generation_kwargs": {"do_sample": False, "no_repeat_ngram_size": 2, "top_p": 0.5}},
        None,
        r"top_p=0\.5, do_sample=False, no_repeat_ngram_size=2: .*: set top_p=1\.0.*; leave do_sample and "
        "no_repeat_ngram_size out of generation_kwargs",
    ),
    "OffPolicy": ({"top_k": 3}, OffPolicy(), "top_k=3: .*no correction mends it: set top_p"),
    "OffPolicy's own": ({}, OffPolicy(top_p=0.5), r"top_p=0\.5: "),
}


@pytest.mark.parametrize("case", DISTORTED)
def test_settings_that_distort_are_said_at_construction(make_trainer, case):
    settings, sampler, message = DISTORTED[case]
    rollout = {} if sampler is None else {"rollout_func": sampler}
    with pytest.warns(UserWarning, match=message):
        make_trainer(**{"loss_type": "minpro", **SETTINGS, **settings, **rollout})


@pytest.mark.parametrize(
    ("settings", "sampler"),
    [
        ({}, None),
        ({"top_k": 0, "temperature": 0.7}, OffPolicy()),
        ({"top_p": 0.5}, OffPolicy(top_p=1.0)),
        ({"temperature": 0.7, "generation_kwargs": {"temperature": 0.7, "typical_p": 1.0, "use_cache": True}}, None),
    ],
)
def test_nothing_is_said_of_settings_that_are_off(make_trainer, settings, sampler):
    rollout = {} if sampler is None else {"rollout_func": sampler}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*distribution than the trainer scores")
        make_trainer(**{"loss_type": "minpro", **SETTINGS, **settings, **rollout})


@pytest.mark.filterwarnings("ignore:.*distribution than the trainer scores")
@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": 3}, {"top_k": 1}])
def test_the_stronger_truncation_is_not_judged_more_mildly(make_trainer, settings):
    settings = {**SETTINGS, "per_device_train_batch_size": 32, "loss_type": "tis", "monitor": "warn", **settings}
    trainer = make_trainer(rollout_func=OffPolicy(), **settings)
    with pytest.raises(MismatchError, match="not begun"):
        trainer.train()


def engine(change):
    """A ``rollout_func`` whose reported log-probs are changed."""
    sampler = OffPolicy()

    def rollout(prompts, trainer):
        output = sampler(prompts, trainer)
        names = ("prompt_ids", "completion_ids")
        return {name: output[name] for name in names} | {
            "logprobs": [[change(i, value) for i, value in enumerate(row)] for row in output["logprobs"]]
        }

    rollout.attach = sampler.attach
    return rollout


@pytest.mark.parametrize("change", [lambda i, value: 0.5 * value, lambda i, value: 0.0 if i % 2 else value])
def test_log_probs_that_are_none_are_refused(make_trainer, change):
    """Half of each, and a placeholder for every other one; no correction is recommended."""
    settings = {**SETTINGS, "per_device_train_batch_size": 32, "loss_type": "tis", "monitor": "warn"}
    trainer = make_trainer(rollout_func=engine(change), **settings)
    with pytest.raises(MismatchError, match="not begun") as refused:
        trainer.train()
    assert "icepop" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_an_alarm_agrees_with_the_configuration(make_trainer):
    """Every cause that is named of a sampler with top_p is top_p."""
    monitor = {"self_test": "warn", "warning": "log", "critical": "log"}
    settings = {**SETTINGS, "per_device_train_batch_size": 32, "loss_type": "tis", "monitor": monitor, "top_p": 0.5}
    trainer = make_trainer(rollout_func=OffPolicy(), **settings)
    trainer.train()
    alarms = trainer.correction_step.monitor.alarms
    assert alarms and {alarm.cause for alarm in alarms} == {"top_p"}


def test_a_generation_of_completions_that_are_all_masked_is_noticed(make_trainer):
    """Nobody ends in two tokens here, so each generation is cut off as a whole."""
    never = {"max_completion_length": 2, "mask_truncated_completions": True, "max_steps": 3}
    trainer = make_trainer(loss_type="minpro", **SETTINGS | never)
    trainer.eos_token_ids = [-1]
    trainer.eos_token_id = -1
    with pytest.warns(UserWarning, match="step 1: all 8 completions .* max_completion_length=2, and mask_tr") as caught:
        trainer.train()
    assert len([1 for w in caught if "mask_truncated" in str(w.message)]) == 1


@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])
def test_a_step_whose_completions_are_all_masked_is_noticed(make_trainer, loss_type):
    """One of the sixteen completions of a generation ends, so three of its four steps have no token."""

    def unfinished(prompts, trainer):
        ids = [[2, 3, 4 + i % 3, 1 if i == 0 else 5] for i in range(len(prompts))]
        return {"prompt_ids": [[2, 3, 4]] * len(ids), "completion_ids": ids, "logprobs": None}

    masked = {"mask_truncated_completions": True, "max_steps": 4, "gradient_accumulation_steps": 1}
    settings = SETTINGS | masked | {"per_device_train_batch_size": 4, "steps_per_generation": 4, "monitor": "off"}
    trainer = make_trainer(loss_type=loss_type, rollout_func=unfinished, **settings)
    said = r"step [12]: all completions trained on since the last log were cut off"
    with pytest.warns(UserWarning, match=said) as caught:
        trainer.train()
    assert len([1 for w in caught if "mask_truncated" in str(w.message)]) == 1
    first = min(e["step"] for e in trainer.state.log_history if "loss" in e and "offcorr/staleness/lag" not in e)
    assert any(f"step {first}: all" in str(w.message) for w in caught)


REPLY = [7, 8, 7, 8, 7, 8]


def first_batch(make_trainer, sampler, **settings):
    """What a run of one update warns of its first batch, with that sampler's output changed by ``sampler``."""
    trainer = make_trainer(
        loss_type="minpro", rollout_func=sampler, **SETTINGS | {"max_steps": 1, "max_completion_length": 16} | settings
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(one.message) for one in caught if "of the first batch" in str(one.message)]


@pytest.mark.parametrize("masked", [True, False])
def test_text_that_the_model_did_not_write_is_noticed_without_log_probs(make_trainer, caplog, masked):
    """A reply after each completion, with None for its log-probs, as the first batch's refusal of 0 advises."""
    inner = OffPolicy()

    def with_reply(prompts, trainer):
        found = inner(prompts, trainer)
        ids, logps = found["completion_ids"], found["logprobs"]
        return {
            "prompt_ids": found["prompt_ids"],
            "completion_ids": [[*one, *REPLY] for one in ids],
            "logprobs": [[*one, *[None] * len(REPLY)] for one in logps],
            "env_mask": [[1] * len(one) + [int(not masked)] * len(REPLY) for one in ids],
        }

    said = first_batch(make_trainer, with_reply, per_device_train_batch_size=32, max_completion_length=8)
    assert len(said) == (not masked)
    assert masked or "return env_mask with 0 for them" in said[0]
    assert ("have no log-prob of the sampler, and were not compared" in caplog.text) != masked


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_another_temperature_is_noticed_without_log_probs(make_trainer, temperature):
    def unlogged(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        model = trainer.accelerator.unwrap_model(trainer.model)
        drawn = decode(model, ids, max_new_tokens=16, eos_token_ids=[1], sampling=Sampling(temperature=temperature))
        return {"prompt_ids": ids, "completion_ids": drawn.completion_ids, "logprobs": None}

    said = first_batch(make_trainer, unlogged, per_device_train_batch_size=64)
    assert len(said) == (temperature != 1)
    assert not said or "have no log-prob of the sampler, and were not drawn from the trainer's distributions" in said[0]


@pytest.mark.parametrize("masked", [True, False])
def test_advantages_that_the_mask_leaves_out_are_not_blamed_on_the_rewards(make_trainer, masked):
    """Half of the prompts: all samples end, and all are right; the others: none ends, and half of them is right."""

    def half_unfinished(prompts, trainer):
        ids = [[2, 3, 4, 5 if i // 4 % 2 else 1] for i in range(len(prompts))]
        return {"prompt_ids": [[2, 3, 4]] * len(ids), "completion_ids": ids, "logprobs": None}

    def right(completion_ids, **_):
        return [float(ids[-1] == 1 or i % 2) for i, ids in enumerate(completion_ids)]

    settings = {"mask_truncated_completions": masked, "max_completion_length": 4, "max_steps": 1, "monitor": "off"}
    settings = SETTINGS | settings | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer = make_trainer(loss_type="minpro", rollout_func=half_unfinished, reward_funcs=right, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if "has an advantage" in str(one.message)]
    by = "by mask_truncated_completions (raise max_completion_length) or env_mask"
    assert not masked or f"the sequences that have an advantage are left out, {by}" in said[0]
    assert len(said) == masked


def test_advantages_in_other_steps_of_a_generation_are_blamed_on_nothing(make_trainer):
    """One prompt of eight has samples with different rewards, and each generation is trained on in eight steps."""

    def rare(completion_ids, prompts, **_):
        return [float(i == 0) for i in range(len(prompts))]

    settings = {"steps_per_generation": 8, "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 8}
    settings = SETTINGS | settings | {"gradient_accumulation_steps": 1, "monitor": "off"}
    trainer = make_trainer(loss_type="minpro", reward_funcs=rare, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (said,) = [str(one.message) for one in caught if "has an advantage" in str(one.message)]
    assert "in other optimizer steps of their generation, of which it has 8, or there is none" in said
    assert "mask" not in said and "env" not in said


def test_the_own_generation_config_of_a_model_is_warned_of_where_trl_leaves_it_in_force(make_trainer, model_folder):
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    model.generation_config.min_p = 0.2
    model.generation_config.no_repeat_ngram_size = 2
    model.generation_config.top_p = 0.5  # TRL sets it itself
    with pytest.warns(UserWarning, match="draws from another distribution than the trainer scores") as caught:
        make_trainer(model=model, loss_type="minpro")
    (said,) = [str(one.message) for one in caught if "draws from another" in str(one.message)]
    assert said.startswith("min_p=0.2 (of the model's generation_config), no_repeat_ngram_size=2 (of the model's")
    assert "set model.generation_config.min_p and model.generation_config.no_repeat_ngram_size to None" in said


def test_an_infinite_reward_is_noticed(make_trainer):
    def overflowing(completion_ids, **_):
        return [float("inf") if i == 0 else float(len(ids) % 3) for i, ids in enumerate(completion_ids)]

    trainer = make_trainer(loss_type="minpro", reward_funcs=overflowing, **SETTINGS | {"max_steps": 2})
    with pytest.warns(UserWarning, match="reward function overflowing returned an infinite reward") as caught:
        trainer.train()
    assert len([1 for w in caught if "infinite reward" in str(w.message)]) == 1


def test_a_completion_without_a_reward_is_noticed(make_trainer):
    """A function that does not apply says None; that is no fault where another one applies."""

    def unsure(completion_ids, **_):
        return [float("nan") if i == 0 else float(len(ids) % 3) for i, ids in enumerate(completion_ids)]

    def other(completion_ids, **_):
        return [None if i == 1 else float(len(ids)) for i, ids in enumerate(completion_ids)]

    short = SETTINGS | {"max_steps": 2}
    with pytest.warns(UserWarning, match="a completion has no reward: every reward function returned None") as caught:
        make_trainer(loss_type="minpro", reward_funcs=unsure, **short).train()
    assert len([1 for w in caught if "has no reward" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a completion has no reward")
        make_trainer(loss_type="minpro", reward_funcs=[unsure, other], **short).train()


class Broken(TrainerCallback):
    """Makes a weight NaN after the second optimizer step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            next(model.parameters()).data[:] = math.nan


@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])
def test_weights_that_are_nan_are_named(make_trainer, loss_type):
    trainer = make_trainer(loss_type=loss_type, callbacks=[Broken()], num_iterations=4, max_steps=4)
    with pytest.raises(ValueError, match="no token has a finite log-prob: the model's weights are NaN .* of step 2: l"):
        trainer.train()


def test_weights_that_are_nan_are_named_where_the_metrics_show_them(make_trainer, monkeypatch):
    """As on a GPU, where no micro-batch is looked at."""
    monkeypatch.setattr("offcorr.trl.trainer.refuse_nan_model", lambda *_: None)
    monkeypatch.setattr("offcorr.Batch._check_numbers", lambda self: None)
    trainer = make_trainer(loss_type="minpro", callbacks=[Broken()], num_iterations=4, max_steps=4)
    with pytest.raises(ValueError, match="weights are NaN or infinite, by step 3 at the latest: not one of"):
        trainer.train()


def test_a_wrong_old_logp_is_named_in_a_trainer(make_trainer):
    """Without versions, at the first step: there are no older weights that could have sampled."""

    def scaled(prompts, trainer):
        output = sampler(prompts, trainer)
        del output["rollout_version"]
        return {**output, "old_logp": [[0.8 * logp for logp in row] for row in output["old_logp"]]}

    sampler = OffPolicy()
    trainer = make_trainer(loss_type="minpro", rollout_func=scaled, **SETTINGS | {"max_steps": 1})
    with pytest.warns(UserWarning, match=r"in the first batch old_logp is not .*, and the engine's agree .*: return"):
        trainer.train()


LONG = {
    "steps": (dict(max_steps=4, steps_per_generation=2, gradient_accumulation_steps=2), 3, "a lag below 3, or more"),
    "generations of two steps": (dict(max_steps=4, steps_per_generation=4, gradient_accumulation_steps=2), 2, "a lag "),
    "one generation": (dict(max_steps=2, steps_per_generation=4, gradient_accumulation_steps=2), 1, "more steps"),
}


@pytest.mark.parametrize("length", LONG)
def test_a_lag_that_no_sample_reaches_is_said_when_the_trainer_is_made(make_trainer, length):
    options, least, advice = LONG[length]
    for lag in (least, least + 1):
        with pytest.warns(UserWarning, match=f"lag={lag} keeps the sampler at the first weights, .* Take {advice}"):
            make_trainer(loss_type="minpro", rollout_func=OffPolicy(lag=lag), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lag=")
        for reached in (0, least - 1):
            make_trainer(loss_type="minpro", rollout_func=OffPolicy(lag=reached), **options)


def test_a_lag_that_no_sample_reaches_in_an_epoch_is_said_when_it_begins(make_trainer):
    epoch = {"max_steps": -1, "num_train_epochs": 0.1}
    said = r"lag=100 keeps the sampler at the first weights, unless the run resumes from older ones: of \d+ optimizer"
    with pytest.warns(UserWarning, match=said) as caught:
        make_trainer(loss_type="minpro", rollout_func=OffPolicy(lag=100), **epoch).train()
    assert sum("keeps the sampler at the first weights" in str(one.message) for one in caught) == 1


@pytest.mark.parametrize("generations", [4, 8])
@pytest.mark.parametrize("skip", [True, False])
def test_equal_rewards_give_no_advantage_whatever_their_mean_is_rounded_to(make_trainer, series, generations, skip):
    """The mean of eight rewards of .1 is not .1 in float32."""

    def equal(completion_ids, **_):
        return [0.1] * len(completion_ids)

    settings = SETTINGS | {"num_generations": generations, "max_steps": 2, "monitor": "off"}
    options = {"skip_dead_sequences": skip, "reward_funcs": equal, "loss_type": "ppo" if skip else "kimi"}
    with pytest.warns(UserWarning, match="no sequence since the last log has an advantage"):
        trainer = make_trainer(**options, **settings)
        trainer.train()
    assert series(trainer, "offcorr/loss/no_advantage") == [1.0, 1.0] and not series(trainer, "offcorr/loss/dropped")
    assert not skip or min(series(trainer, "offcorr/loss/skipped")) > 0.8  # one row is always computed


@pytest.mark.parametrize("loss_type", ["ppo", "dapo"])
def test_a_rollout_func_that_leaves_the_model_in_evaluation_mode_is_told_and_it_is_set_back(make_trainer, loss_type):
    sampler = OffPolicy()

    def careless(prompts, trainer):
        output = sampler(prompts, trainer)
        trainer.model.eval()
        return output

    careless.attach = sampler.attach
    trainer = make_trainer(loss_type=loss_type, rollout_func=careless, **SETTINGS | {"max_steps": 2, "monitor": "off"})
    with pytest.warns(UserWarning, match="rollout_func left the model in another mode"):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "offcorr/staleness/abs_mean" in entry] == [1, 2]
