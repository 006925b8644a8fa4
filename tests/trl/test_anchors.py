"""Anchors that are more than a column of the batch: EWMA of the weights, and A-3PO's log-linear mixture."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser, TrainerCallback
from trl import TrlParser

from offcorr.rollout import OffPolicy
from offcorr.training.anchors import EWMA
from offcorr.trl import GRPOConfig, GRPOTrainer

STALE = ("old_logp", "rollout_version")
NARROW = {"eps_low": 1e-3, "eps_high": 1e-3}  # what has moved is clipped
CLIP = dict(loss_type="offcorr:dapo", loss_kwargs=NARROW, num_iterations=2, max_steps=5, learning_rate=2e-3)


class Recording(GRPOTrainer):
    """Keeps what each training micro-batch was made of, and its dL/dlogp."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _batch(self, inputs, forward):
        batch = super()._batch(inputs, forward)
        if self.model.training:
            self.seen.append((self.state.global_step, dict(inputs), batch))
        return batch


class Weights(TrainerCallback):
    """Copies of the model before the first optimizer step and after each."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = [copy.deepcopy(model.state_dict())]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(copy.deepcopy(model.state_dict()))


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def log_probs(model, inputs):
    """[B, T] of the completion's tokens, written out; the prompts here need no padding."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    logits = model(input_ids=ids).logits[:, inputs["prompt_ids"].size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]


def active_share(correction, batches):
    """Of the tokens with an advantage, those that learned."""
    learned = total = 0
    for batch in batches:
        could = batch.mask & (batch.advantages[:, None] != 0)
        learned += int(((correction(batch).coefficient != 0) & could).sum())
        total += int(could.sum())
    return learned / total


# EWMA


@pytest.mark.parametrize("reset_below", [None, 0.97, 0.01])
def test_ewma_is_the_one_stepped_by_hand(make_trainer, replay, series, model_folder, reset_below):
    """Every micro-batch of every step, with the resets that its own metric says."""
    weights = Weights()
    trainer = make_trainer(
        Recording,
        rollout_func=replay(),
        callbacks=[weights],
        anchor="ewma",
        anchor_kwargs={"window": 2, "reset_below": reset_below},
        **CLIP,
    )
    trainer.train()
    model = copy.deepcopy(trainer.model).eval()
    model.load_state_dict(weights.seen[0])
    by_hand = EWMA(model, window=2, reset_below=reset_below)
    shares, resets, moved = [], [], 0.0
    for step in range(5):
        batches = [(inputs, batch) for at, inputs, batch in trainer.seen if at == step]
        assert len(batches) == 2
        for inputs, batch in batches:
            mean = by_hand.old_logp(batch, lambda module, inputs=inputs: log_probs(module, inputs))
            torch.testing.assert_close(batch.old_logp[batch.mask], mean[batch.mask], rtol=0, atol=2e-6)
            moved = max(moved, (batch.old_logp - batch.logp.detach())[batch.mask].abs().max().item())
        shares.append(active_share(trainer.correction, [batch for _, batch in batches]))
        model.load_state_dict(weights.seen[step + 1])
        by_hand.step(step + 1, shares[-1])
        resets.append(by_hand.resets)
    assert moved > 0.01
    if reset_below is None:
        assert not series(trainer, "offcorr/anchor/active")
    else:
        assert series(trainer, "offcorr/anchor/active") == pytest.approx(shares)
        assert series(trainer, "offcorr/anchor/resets") == resets
        assert min(shares) < 0.9 and (resets[-1] > 0) == (reset_below == 0.97)


def test_the_split_changes_nothing(make_trainer, replay, series):
    ends, shares = [], []
    for accumulation in (1, 2, 4):
        trainer = make_trainer(
            rollout_func=replay(),
            anchor="ewma",
            anchor_kwargs={"window": 4, "reset_below": 0.8},
            optim="sgd",
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            **{**CLIP, "learning_rate": 0.05, "loss_kwargs": {"eps_low": 0.02, "eps_high": 0.02}},
        )
        trainer.train()
        ends.append(parameters(trainer))
        shares.append(series(trainer, "offcorr/anchor/active"))
    assert min(shares[0]) < 0.9
    assert shares[1] == shares[2] == shares[0]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=2e-6)


def test_a_prompt_that_teaches_nothing_resets_nothing(make_trainer, replay, series):
    """Groups without an advantage have no gradient wherever the anchor is."""

    def reward(prompts, completion_ids, **_):
        return [float(len(ids)) if prompt < "4" else 1.0 for prompt, ids in zip(prompts, completion_ids, strict=True)]

    trainer = make_trainer(
        rollout_func=replay(),
        reward_funcs=reward,
        loss_type="offcorr:dapo",
        anchor="ewma",
        anchor_kwargs={"window": 4},
        learning_rate=1e-5,
        max_steps=6,
    )
    trainer.train()
    assert max(series(trainer, "offcorr/loss/coefficient_zero")) > 0.3
    assert series(trainer, "offcorr/anchor/active") == [1.0] * 6
    assert series(trainer, "offcorr/anchor/resets") == [0] * 6


def test_with_statistics_of_the_window_and_a_kl(make_trainer, replay, series):
    """The window is read ahead and TRL's own terms reuse the forward; the anchor's own is in neither's way."""
    trainer = make_trainer(
        Recording,
        rollout_func=replay(),
        loss_type="m2po",
        anchor="ewma",
        anchor_kwargs={"window": 8, "reset_below": None},
        beta=0.1,
        max_steps=3,
    )
    trainer.train()
    last = [batch for at, _, batch in trainer.seen if at == 2]
    assert len(last) == 4  # each twice: ahead and trained
    assert all((batch.old_logp - batch.logp.detach())[batch.mask].abs().max() > 0.01 for batch in last)
    assert series(trainer, "kl")[-1] > 0
    assert not series(trainer, "offcorr/loss/nonfinite")[-1]


def test_evaluation_before_training(make_trainer, replay, dataset):
    trainer = make_trainer(
        rollout_func=replay(),
        eval_dataset=dataset.select(range(4)),
        anchor="ewma",
        anchor_kwargs={"window": 2},
        per_device_eval_batch_size=4,
        **CLIP,
    )
    assert not [name for name in trainer.evaluate() if "staleness" in name]  # the mean is the policy itself: all 0
    trainer.train()
    assert trainer.evaluate()["eval_offcorr/staleness/abs_max"] > 0.01


def test_ewma_of_adapters(make_trainer, replay, series):
    """Under PEFT the mean is of what is trained, and the base is shared."""
    trainer = make_trainer(
        rollout_func=replay(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        anchor="ewma",
        anchor_kwargs={"window": 4, "reset_below": None},
        **{**CLIP, "learning_rate": 0.05},
    )
    trainer.train()
    held = trainer.correction_step.anchor.weights()
    assert held and all("lora_" in name for name in held)
    staleness = series(trainer, "offcorr/staleness/abs_mean")
    assert staleness[0] < 1e-6 and staleness[-1] > 1e-3


RESUMED = dict(
    loss_type="offcorr:dapo",
    loss_kwargs={"eps_low": 0.02, "eps_high": 0.02},
    anchor="ewma",
    anchor_kwargs={"window": 4, "reset_below": 0.87},
    max_steps=7,
    learning_rate=2e-3,
    save_strategy="steps",
    save_steps=4,
)


def test_resume_gives_the_same_run(make_trainer, series, tmp_path):
    whole = make_trainer(rollout_func=OffPolicy(lag=1), output_dir=str(tmp_path / "whole"), **RESUMED)
    whole.train()
    resets = series(whole, "offcorr/anchor/resets")
    assert 0 < resets[2] == resets[3] < resets[-1]  # before the checkpoint and after it, but not at it
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    resumed = make_trainer(rollout_func=OffPolicy(lag=1), output_dir=str(tmp_path / "again"), **RESUMED)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the checkpoint .* has no state of")
        resumed.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(parameters(resumed), parameters(whole))
    for name in ("offcorr/anchor/resets", "offcorr/anchor/active", "offcorr/staleness/abs_mean"):
        assert series(resumed, name) == series(whole, name)

    (tmp_path / "whole" / "checkpoint-4" / "offcorr_trainer.pt").unlink()
    anew = make_trainer(rollout_func=OffPolicy(lag=1), output_dir=str(tmp_path / "anew"), **RESUMED)
    with pytest.warns(UserWarning, match=r"the checkpoint .* has no state of EWMA\(window=4"):
        anew.train(resume_from_checkpoint=checkpoint)
    assert not torch.equal(parameters(anew), parameters(whole))


# Log-linear


@pytest.fixture
def versioned(replay):
    """A version for each token: of the first step, but the last token's of the second, once there has been one."""
    inner = replay()

    def rollout_func(prompts, trainer):
        output = inner(prompts, trainer)
        newest = min(1, trainer.state.global_step)
        output["rollout_version"] = [[0] * (len(ids) - 1) + [newest] for ids in output["completion_ids"]]
        return output

    return rollout_func


@pytest.mark.parametrize("proximal_lag", [0, 1, 2])
def test_log_linear_is_its_formula(make_trainer, versioned, proximal_lag):
    trainer = make_trainer(
        Recording,
        rollout_func=versioned,
        anchor="log_linear",
        anchor_kwargs={"proximal_lag": proximal_lag},
        **{**CLIP, "num_iterations": 4},
    )
    trainer.train()
    alphas = set()
    for step, inputs, batch in trainer.seen:
        rollout, logp = inputs["sampling_per_token_logps"], batch.logp.detach()
        for row, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
            for t in range(length):
                behind = step - (min(1, int(inputs["generated_at"][row])) if t == length - 1 else 0)
                alpha = min(max((behind - proximal_lag) / behind, 0), 1) if behind > 0 else float(proximal_lag == 0)
                alphas.add(alpha)
                wanted = rollout[row, t] + alpha * (logp[row, t] - rollout[row, t])
                assert batch.old_logp[row, t].item() == pytest.approx(wanted.item(), abs=1e-6)
    assert alphas == {0: {1.0}, 1: {0.0, 1 / 2, 2 / 3, 3 / 4}, 2: {0.0, 1 / 3, 1 / 2}}[proximal_lag]


def test_log_linear_logs_the_raw_gap(make_trainer, versioned, series):
    """Its own ratio is a part of the gap to the engine; what is logged is all of it."""
    settings = dict(rollout_func=versioned, loss_type="offcorr:dapo", max_steps=1, learning_rate=0.0)
    settings["log_metrics"] = "aliases"
    mixed = make_trainer(anchor="log_linear", anchor_kwargs={"proximal_lag": 0}, **settings)  # old_logp is logp
    rollout = make_trainer(anchor="rollout", **settings)
    mixed.train()
    rollout.train()
    assert not series(mixed, "offcorr/engine/k3")
    for name in ("mismatch_kl", "offcorr/staleness/abs_mean", "token_mult_prob_error"):
        assert series(mixed, name) == pytest.approx(series(rollout, name)) and series(mixed, name)[0] > 1e-4


# Configurations and refusals


def test_command_line_and_yaml(tmp_path):
    base = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true", "--report_to", "none"]
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        [*base, "--anchor", "ewma", "--anchor_kwargs", '{"window": 16, "reset_below": null}']
    )
    assert (args.anchor, args.anchor_kwargs) == ("ewma", {"window": 16, "reset_below": None})
    config = tmp_path / "config.yaml"
    config.write_text("anchor: log_linear\nanchor_kwargs: {proximal_lag: 2}\n")
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(config), *base])
    assert (args.anchor, args.anchor_kwargs) == ("log_linear", {"proximal_lag": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(anchor="ewma"), "anchor 'ewma' needs window; its options are"),
        (dict(anchor="ewma", anchor_kwargs={"windw": 4}), "no option 'windw', did you mean 'window'"),
        (
            dict(anchor="ewma", anchor_kwargs={"window": -1}),
            "window is -1, expected a number of optimizer steps above 0",
        ),
        (
            dict(anchor="ewma", anchor_kwargs={"window": "16"}),
            "window is '16', expected a number of optimizer steps above 0",
        ),
        (dict(anchor="ewma", anchor_kwargs={"window": 0}), "window is 0, .* so every ratio would be 1"),
        (
            dict(anchor="ewma", anchor_kwargs={"window": 4, "device": "cpux"}),
            "anchor_kwargs: device is 'cpux', expected",
        ),
        (dict(anchor="ewma", anchor_kwargs={"window": 4, "reset_below": 90}), "reset_below is 90, expected a share"),
        (dict(anchor="log_linear", anchor_kwargs={"window": 4}), "anchor 'log_linear' has no option 'window'"),
        (dict(anchor="snapshot", anchor_kwargs={"window": 4}), "anchor 'snapshot' has no option 'window'"),
        (dict(anchor_kwargs={"window": 4}), "anchor_kwargs={'window': 4} goes with an anchor"),
        (dict(anchor="ewma", anchor_kwargs="window=4"), "anchor_kwargs is 'window=4', expected a mapping or a JSON"),
        (dict(anchor="emwa"), "anchor is 'emwa', did you mean 'ewma'"),
        (dict(anchor="log_linear", loss_type="dapo"), "anchor='log_linear' goes with a correction"),
        (dict(anchor="rollout", loss_type="icepop"), r"'icepop': the anchor Rollout\(\) puts .* that \w+\("),
        (
            dict(anchor="ewma", anchor_kwargs={"window": 4}, skip_dead_sequences=True),
            "skip_dead_sequences=True .* anchor='ewma'",
        ),
    ],
)
def test_refused_before_the_model_is_loaded(make_trainer, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model=str(tmp_path / "no model here"), **{"loss_type": "ppo", **settings})


def test_log_linear_says_what_to_pass(make_trainer, replay):
    trainer = make_trainer(loss_type="ppo", anchor="log_linear", rollout_func=replay())
    with pytest.raises(ValueError, match="rollout_version is None.*anchor 'log_linear'.*returns 'rollout_version'"):
        trainer.train()
