"""Tests of OffPolicy in TRL's trainer: versions, exactness, evaluation, checkpoints, adapters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from offcorr.rollout import OffPolicy, decode, score
from offcorr.training import Precision, Replica
from tests.rollout.rollout_models import fresh_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

PROMPTS = ["a3b1=", "c2=", "b7a3c9=", "a1b2c3a4="]


def reward(completions, **kwargs):
    return [len(set(text)) / (1 + len(text)) for text in map(str, completions)]


class Watch(TrainerCallback):
    """Callback that keeps the weights of every version, to compare them with the sampler's."""

    def __init__(self, model):
        self.weights = {0: self.copy(model)}

    @staticmethod
    def copy(model):
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = self.copy(model)


class Recording(OffPolicy):
    """OffPolicy that records its return values, their steps, and the trainer's log-probs of the same
    tokens at the time."""

    def __post_init__(self):
        super().__post_init__()
        self.train, self.eval = [], []

    def __call__(self, prompts, trainer):
        out = super().__call__(prompts, trainer)
        (self.train if trainer.model.training else self.eval).append(
            {"step": trainer.state.global_step, "current": trainers_own_logp(trainer, out), **out}
        )
        return out


@torch.no_grad()
def trainers_own_logp(trainer, out):
    """The log-probs that TRL computes for these sequences, by the call of its loss."""
    width, longest = max(map(len, out["prompt_ids"])), max(map(len, out["completion_ids"]))
    pairs = list(zip(out["prompt_ids"], out["completion_ids"], strict=True))
    ids = [[0] * (width - len(p)) + p + c + [0] * (longest - len(c)) for p, c in pairs]
    real = [[0] * (width - len(p)) + [1] * len(p + c) + [0] * (longest - len(c)) for p, c in pairs]
    logp = trainer._get_per_token_logps_and_entropies(
        trainer.model_wrapped, torch.tensor(ids), torch.tensor(real), longest, batch_size=8
    )[0].tolist()
    return [row[: len(c)] for row, (_, c) in zip(logp, pairs, strict=True)]


def trainer_of(sampler, folder, model=None, prompts=PROMPTS, callbacks=(), peft=None, **options):
    settings = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 6,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return GRPOTrainer(
        model=fresh_model() if model is None else model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **{**settings, **options}),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts] * 16),
        eval_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=tokenizer(),
        rollout_func=sampler,
        callbacks=list(callbacks),
        peft_config=peft,
    )


def flat(rows):
    return torch.tensor([x for row in rows for x in row])


def gap(a, b):
    """Returns the largest absolute difference between two ragged lists of log-probs (nats)."""
    return float((flat(a) - flat(b)).abs().max())


def scored(weights, call, precision="fp32", temperature=1.0):
    """Returns the log-probs of the call's tokens under given weights, from a new model and a full forward."""
    model = fresh_model(seed=99)
    sampler = Replica(model, "cpu").load(weights, Precision.named(precision))
    return score(sampler, call["prompt_ids"], call["completion_ids"], temperature=temperature)


def run(folder, lag=0, precision="fp32", **options):
    """Trains with a Recording sampler and returns (sampler, watch, trainer)."""
    model = fresh_model()
    sampler, watch = Recording(lag=lag, precision=precision), Watch(model)
    trainer = trainer_of(sampler, folder, model, callbacks=[watch], **options)
    trainer.train()
    return sampler, watch, trainer


def test_lag_k_samples_with_the_weights_of_k_updates_ago(tmp_path):
    sampler, watch, _ = run(tmp_path, lag=2, precision="int8")
    assert [call["step"] for call in sampler.train] == list(range(6))
    for call in sampler.train:
        version = max(0, call["step"] - 2)
        assert call["rollout_version"] == [version] * 8
        # these weights exactly, in the trainer's precision and in the sampler's ...
        assert gap(call["old_logp"], scored(watch.weights[version], call)) < 1e-5
        assert gap(call["logprobs"], scored(watch.weights[version], call, "int8")) < 1e-5
        # ... and not those of a neighbouring version
        for other in (version - 1, version + 1):
            if other in watch.weights:
                assert gap(call["old_logp"], scored(watch.weights[other], call)) > 1e-2
        assert 1e-3 < gap(call["old_logp"], call["logprobs"])
    assert gap(sampler.train[-1]["old_logp"], sampler.train[-1]["current"]) > 1e-2


def test_a_copy_of_the_model_that_computes_with_its_weights_is_refused(tmp_path):
    """TRL replaces the model's forward by a function that a copy shares; without it the copy is a model of its own."""
    seen = []

    def sample(prompts, trainer):
        model = trainer.accelerator.unwrap_model(trainer.model)
        ids = trainer.processing_class(prompts)["input_ids"]
        options = {"max_new_tokens": 4, "eos_token_ids": [1]}
        copied = copy.deepcopy(model)
        with pytest.raises(ValueError, match="computes with that model's weights: `del copy.forward`"):
            decode(copied, ids, **options)
        del copied.forward
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        seen.append(decode(copied, ids, **options).logp)
        drawn = decode(model, ids, **options)
        return {"prompt_ids": ids, "completion_ids": drawn.completion_ids, "logprobs": drawn.logp}

    trainer = trainer_of(sample, tmp_path, max_steps=1)
    trainer.train()
    even = -math.log(trainer.model.config.vocab_size)
    assert all(logp == pytest.approx(even) for row in seen[0] for logp in row)


def test_the_ring_sees_steps_between_generations(tmp_path):
    sampler, watch, _ = run(tmp_path, lag=3, max_steps=9, steps_per_generation=4, gradient_accumulation_steps=1)
    assert [call["step"] for call in sampler.train] == [0, 4, 8]
    assert [call["rollout_version"][0] for call in sampler.train] == [0, 1, 5]
    for call in sampler.train:
        version = call["rollout_version"][0]
        assert gap(call["old_logp"], scored(watch.weights[version], call)) < 1e-5
    assert sampler.ring.versions == [6, 7, 8, 9]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_fp32_has_no_mismatch(tmp_path, temperature):
    sampler, _, _ = run(tmp_path, max_steps=3, temperature=temperature)
    assert not sampler.ring.versions  # lag 0 needs no copies
    for call in sampler.train:
        assert gap(call["old_logp"], call["logprobs"]) < 1e-5
        assert call["old_logp"] == call["current"]  # bit for bit, because it is the trainer's function


def test_old_logp_is_the_trainers_own_under_mixed_precision(tmp_path):
    sampler, _, _ = run(tmp_path, max_steps=3, bf16=True)
    for call in sampler.train:
        assert call["old_logp"] == call["current"]
        assert 1e-4 < gap(call["old_logp"], call["logprobs"]) < 0.3  # bf16 trainer, fp32 sampler


def test_top_p_logprobs_are_the_engines_renormalised_ones(tmp_path):
    sampler, _, _ = run(tmp_path, max_steps=2, top_p=0.8)
    for call in sampler.train:
        kept = flat(call["old_logp"]) - flat(call["logprobs"])  # log of the probability mass that is kept
        assert (kept < 1e-5).all() and (kept > torch.log(torch.tensor(0.8)) - 1e-5).all()
        assert kept.mean() < -1e-2


def test_own_settings_override_the_trainers(tmp_path):
    sampler = Recording(top_k=1)
    trainer_of(sampler, tmp_path, max_steps=1).train()
    assert set(flat(sampler.train[0]["logprobs"]).tolist()) == {0.0}


def test_logprobs_reach_the_loss_and_versions_the_reward(tmp_path):
    seen = {"versions": [], "inputs": []}

    def spy(completions, rollout_version, old_logp, **kwargs):
        seen["versions"].append(rollout_version)
        return reward(completions)

    class Spying(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen["inputs"].append(inputs["sampling_per_token_logps"])
            return super()._compute_loss(model, inputs)

    sampler = Recording(lag=1)
    plain = trainer_of(sampler, tmp_path, max_steps=2)
    trainer = Spying(
        model=fresh_model(),
        reward_funcs=spy,
        args=plain.args,
        train_dataset=plain.train_dataset,
        processing_class=tokenizer(),
        rollout_func=sampler,
    )
    trainer.train()
    assert seen["versions"] == [[0] * 8, [0] * 8]
    for call, sampling in zip(sampler.train, seen["inputs"], strict=True):
        reported = flat(call["logprobs"]).sort().values
        torch.testing.assert_close(sampling[sampling != 0].sort().values, reported)


def test_evaluation_asks_about_the_current_weights_and_disturbs_nothing(tmp_path):
    quiet, _, _ = run(tmp_path / "a", lag=2, precision="int8")
    loud, watch, _ = run(tmp_path / "b", lag=2, precision="int8", eval_strategy="steps", eval_steps=2)
    assert [c["completion_ids"] for c in quiet.train] == [c["completion_ids"] for c in loud.train]
    assert sorted({call["step"] for call in loud.eval}) == [2, 4, 6]
    for call in loud.eval:
        assert call["rollout_version"] == [call["step"]] * len(call["prompt_ids"])
        assert gap(call["logprobs"], scored(watch.weights[call["step"]], call)) < 1e-5
    texts = [call["completion_ids"] for call in loud.eval if call["step"] == 2]
    assert len({str(t) for t in texts}) == len(texts)  # the batches of one evaluation differ


def test_messages_go_through_the_chat_template(tmp_path):
    messages = [[{"role": "user", "content": "a3b1"}], [{"role": "user", "content": "c2"}]]
    sampler = OffPolicy()
    trainer = trainer_of(sampler, tmp_path, prompts=messages, max_steps=1)
    trainer.train()
    out = sampler(messages, trainer)
    assert [tokenizer().decode(ids) for ids in out["prompt_ids"]] == ["a3b1=", "c2="]
    picture = [[{"role": "user", "content": [{"type": "image", "image": None}]}]]
    with pytest.raises(ValueError, match="a prompt holds an image"):
        sampler(picture, trainer)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([3, 4], "prompt 0 of 2 is 3, expected text or a list of messages"),
        (["a3b1=", None], "prompt 1 of 2 is None, expected text or a list of messages"),
        (["a3b1=", [{"role": "user", "content": "c2"}]], r"prompt 1 of 2 is \[{'role'.*, expected text or a list"),
        (["a3b1=", ""], "prompt 1 of 2 is '', of which the tokenizer makes no token, expected at least one"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_from_is_named(tmp_path, prompts, message):
    sampler = OffPolicy()
    trainer = trainer_of(sampler, tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=message):
        sampler(prompts, trainer)


def test_a_tokenizer_without_an_end_is_named_when_the_sampler_is_attached(tmp_path):
    trainer = trainer_of(OffPolicy(), tmp_path, max_steps=1)
    trainer.eos_token_ids, trainer.processing_class.eos_token = [None], None
    with pytest.raises(ValueError, match="the tokenizer's eos_token is None, expected the token that ends a completi"):
        OffPolicy().attach(trainer)


def test_attach_is_idempotent_and_a_second_run_starts_over(tmp_path):
    sampler = Recording(lag=2)
    trainer = trainer_of(sampler, tmp_path, max_steps=3)
    before = len(trainer.callback_handler.callbacks)
    for _ in range(3):
        sampler.attach(trainer)
    assert len(trainer.callback_handler.callbacks) == before + 1
    trainer.train()
    assert sampler.ring.versions == [1, 2, 3]
    first = [call["rollout_version"][0] for call in sampler.train]
    trainer.train()
    assert [call["rollout_version"][0] for call in sampler.train] == first * 2


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"generation_kwargs": {"top_k": 3}}])
def test_settings_it_would_ignore_are_refused(tmp_path, option):
    sampler = OffPolicy()
    with pytest.raises(ValueError, match=f"does not apply {next(iter(option))}"):
        sampler.attach(trainer_of(sampler, tmp_path, **option))


def test_lora_snapshots_only_the_adapter(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    sampler = Recording(lag=1)
    trainer = trainer_of(sampler, tmp_path, peft=lora, max_steps=4, learning_rate=0.2)
    watch = Watch(trainer.model)
    trainer.add_callback(watch)
    trainer.train()
    names = sampler.ring[sampler.ring.versions[-1]]
    assert names and all("lora_" in name for name in names)
    for call in sampler.train:
        version = call["rollout_version"][0]
        assert version == max(0, call["step"] - 1)
        assert gap(call["old_logp"], call["logprobs"]) < 1e-5
        lag_gap = gap(call["old_logp"], call["current"])
        assert lag_gap == 0 if version == call["step"] else lag_gap > 1e-3
    for version in sampler.ring.versions:
        held = sampler.ring[version]
        assert all(torch.equal(w, watch.weights[version][n]) for n, w in held.items())


SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}


def test_resuming_reproduces_the_uninterrupted_run(tmp_path):
    whole, watch, _ = run(tmp_path, lag=2, precision="int8", **SAVING)
    folder = tmp_path / "checkpoint-3"
    for attach_first in (False, True):
        sampler, model = Recording(lag=2, precision="int8"), fresh_model(seed=7)
        resumed = trainer_of(sampler, tmp_path, model, **{**SAVING, "save_strategy": "no"})
        if attach_first:  # as a trainer that attaches in its __init__ does
            sampler.attach(resumed)
        resumed.train(resume_from_checkpoint=str(folder))
        assert [c["step"] for c in sampler.train] == [3, 4, 5]
        for a, b in zip(whole.train[3:], sampler.train, strict=True):
            assert a == b
        final = dict(model.named_parameters())
        assert all(torch.equal(w, final[n]) for n, w in watch.weights[6].items())


def test_a_checkpoint_elsewhere_is_restored_by_path_or_missed_by_name(tmp_path):
    run(tmp_path / "first", lag=2, **SAVING)
    folder = tmp_path / "first" / "checkpoint-3"
    sampler = Recording(lag=2)
    resumed = trainer_of(sampler, tmp_path / "second")
    sampler.attach(resumed)
    sampler.restore(folder)
    resumed.train(resume_from_checkpoint=str(folder))
    assert [c["rollout_version"][0] for c in sampler.train] == [1, 2, 3]
    sampler = Recording(lag=2)
    resumed = trainer_of(sampler, tmp_path / "third")
    with pytest.warns(UserWarning, match=r"holds none from before version 3"):
        resumed.train(resume_from_checkpoint=str(folder))
    assert [c["rollout_version"][0] for c in sampler.train] == [3, 3, 3]


def test_state_dict_round_trip_reproduces_the_next_samples(tmp_path):
    sampler, _, trainer = run(tmp_path, lag=2, precision="bf16")
    trainer.model.train()
    sampler(PROMPTS, trainer)  # a second call at the same version draws other samples ...
    state = sampler.state_dict()
    fresh = Recording(lag=2, precision="bf16")
    fresh.attach(trainer)
    fresh.load_state_dict(state)
    again, expected = fresh(PROMPTS, trainer), sampler(PROMPTS, trainer)
    assert again == expected
    assert sampler.train[-2]["completion_ids"] != expected["completion_ids"]
