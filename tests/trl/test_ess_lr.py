"""ess_lr in TRL: the rate each step is taken at, and the rate everything else sees."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import HfArgumentParser, TrainerCallback
from trl import TrlParser

from offcorr.rollout import OffPolicy
from offcorr.stages.checks import warn_again
from offcorr.trl import GRPOConfig, GRPOTrainer

STALE = ("old_logp", "rollout_version")


class Rates(TrainerCallback):
    """The rates that the optimizer reads inside each of its steps, by a hook registered after all others."""

    def __init__(self):
        self.read = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if state.global_step == 1:  # by then the first step's hooks stand before this one
            optimizer.register_step_pre_hook(lambda opt, *_: self.read.append(opt.param_groups[0]["lr"]))


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("loss_type", ["vcpo", "gspo", "dapo"])  # dapo: TRL's own loss
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_compounding(make_trainer, replay, series, loss_type, schedule):
    settings = dict(loss_type=loss_type, lr_scheduler_type=schedule, warmup_steps=2, max_steps=6, num_iterations=2)
    rates = Rates()
    own = make_trainer(rollout_func=replay(*STALE), **settings)
    scaled = make_trainer(rollout_func=replay(*STALE), callbacks=[rates], ess_lr="sqrt", **settings)
    own.train()
    scaled.train()
    own_rates, scales = series(own, "learning_rate"), series(scaled, "lr_scale")
    assert series(scaled, "learning_rate") == own_rates
    assert len(scales) == 6 and all(0 < scale < 0.999 for scale in scales)
    wanted = [rate * scale for rate, scale in zip(own_rates, scales, strict=True)]
    assert rates.read == pytest.approx(wanted[1:])
    assert not torch.allclose(parameters(scaled), parameters(own))
    assert "lr_scale" not in own.state.log_history[0]


def test_the_window_is_the_whole_step(make_trainer, replay, series):
    """8 x 1, 4 x 2 and 2 x 4 are the same eight samples, and the same scale."""
    scales, ends = [], []
    for accumulation in (1, 2, 4):
        trainer = make_trainer(
            rollout_func=replay(*STALE),
            loss_type="vcpo",
            ess_lr="linear",
            optim="sgd",
            learning_rate=0.3,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        scales.append(series(trainer, "lr_scale"))
        ends.append(parameters(trainer))
    assert scales[0][-1] < 0.99
    for other, end in zip(scales[1:], ends[1:], strict=True):
        assert other == pytest.approx(scales[0], rel=1e-4)
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-5)


def test_the_base(make_trainer, replay, series):
    trainer = make_trainer(rollout_func=replay(*STALE), loss_type="vcpo", ess_lr="linear", ess_base=0.001)
    trainer.train()
    assert series(trainer, "lr_scale") == [1.0] * 4


@pytest.mark.parametrize("same", [True, False])
def test_train_again(make_trainer, replay, same):
    """With the optimizer that there is, or a new one: one step, one scale."""
    rates = Rates()
    trainer = make_trainer(rollout_func=replay(*STALE), loss_type="vcpo", ess_lr="linear", callbacks=[rates])
    trainer.train()
    if not same:
        trainer.optimizer = trainer.lr_scheduler = None
    rates.read.clear()
    trainer.train()
    scales = [entry["lr_scale"] for entry in trainer.state.log_history if "lr_scale" in entry]
    assert scales[-1] < 0.999 and rates.read[-1] == pytest.approx(1e-2 * scales[-1])


def test_resume_gives_the_same_run(make_trainer, series, tmp_path):
    settings = dict(
        loss_type="vcpo",
        ess_lr="sqrt",
        max_steps=6,
        num_iterations=2,
        save_strategy="steps",
        save_steps=4,
        lr_scheduler_type="linear",
    )
    sampler = dict(lag=3, precision="int8")
    whole = make_trainer(rollout_func=OffPolicy(**sampler), output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    resumed = make_trainer(rollout_func=OffPolicy(**sampler), output_dir=str(tmp_path / "again"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(parameters(resumed), parameters(whole))
    for name in ("lr_scale", "learning_rate"):
        assert series(resumed, name) == series(whole, name)
    assert min(series(whole, "lr_scale")) < 0.99


# ess_base="auto"


class Recording(GRPOTrainer):
    """Keeps the sums of log-ratios of each optimizer step's trajectories."""

    def __init__(self, *args, **kwargs):
        self.log_weights = {}
        super().__init__(*args, **kwargs)

    def _batch(self, inputs, forward):
        batch = super()._batch(inputs, forward)
        log_ratio = torch.where(batch.mask, batch.logp.detach() - batch.rollout_logp, 0).double()
        self.log_weights.setdefault(self.state.global_step, []).extend(log_ratio.sum(1).tolist())
        return batch

    def ess(self, step):
        weight = torch.tensor(self.log_weights[step], dtype=torch.float64).exp()
        return (weight.sum() ** 2 / (len(weight) * weight.square().sum())).item()


AUTO = dict(loss_type="vcpo", ess_lr="linear", ess_base="auto", max_steps=6)


@pytest.fixture
def fresh_then_stale(replay):
    """A sampler that says which weights it sampled with: at even steps those of now, at odd ones older."""
    inner = replay()

    def rollout_func(prompts, trainer):
        now = trainer.state.global_step
        return {**inner(prompts, trainer), "rollout_version": [now if now % 2 == 0 else now - 1] * len(prompts)}

    return rollout_func


@pytest.mark.parametrize("versions", [True, False])
def test_calibrated_on_policy(make_trainer, replay, series, fresh_then_stale, versions):
    """Even steps are on-policy: their ESS is the base, and they are not scaled. Odd ones are scaled by it.

    Where no versions are known, the first step on fresh samples counts as on-policy.
    """
    rates = Rates()
    sampling = dict(rollout_func=fresh_then_stale) if versions else dict(rollout_func=replay(), num_iterations=2)
    trainer = make_trainer(Recording, callbacks=[rates], **sampling, **AUTO)
    trainer.train()
    base, bases, scales = 0.0, [], []
    for step in range(6):
        if step % 2 == 0:
            base += (trainer.ess(step) - base) / (step // 2 + 1)
        bases.append(base)
        scales.append(1.0 if step % 2 == 0 else min(1.0, trainer.ess(step) / base))
    assert series(trainer, "ess_base") == pytest.approx(bases, rel=1e-5)
    assert series(trainer, "lr_scale") == pytest.approx(scales, rel=1e-5)
    assert max(bases) < 0.999 and min(scales) < 0.99
    assert rates.read == pytest.approx([1e-2 * scale for scale in scales[1:]], rel=1e-5)


def test_one_stale_token_is_not_on_policy(make_trainer, replay, series):
    """And before any calibration the base is 1."""
    inner = replay()

    def rollout_func(prompts, trainer):
        output, now = inner(prompts, trainer), trainer.state.global_step
        output["rollout_version"] = [[now] * len(ids) for ids in output["completion_ids"]]
        return output

    class Stale(Recording):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["rollout_version"][-1, 0] -= 1  # at the first step, too, where no sampler could say so
            return output

    trainer = make_trainer(Stale, rollout_func=rollout_func, **{**AUTO, "max_steps": 2})
    trainer.train()
    assert series(trainer, "ess_base") == [1.0, 1.0]
    assert series(trainer, "lr_scale") == pytest.approx([trainer.ess(0), trainer.ess(1)], rel=1e-5)


def test_no_step_of_a_lagging_sampler_but_the_first_calibrates(make_trainer, series):
    trainer = make_trainer(rollout_func=OffPolicy(lag=2, precision="int8"), **AUTO)
    trainer.train()
    bases = series(trainer, "ess_base")
    assert len(set(bases)) == 1 and bases[0] < 1
    assert series(trainer, "lr_scale")[0] == 1.0


def test_the_calibration_is_resumed(make_trainer, series, tmp_path):
    settings = dict(save_strategy="steps", save_steps=4, **AUTO)
    sampler = dict(lag=2, precision="int8")
    whole = make_trainer(rollout_func=OffPolicy(**sampler), output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    resumed = make_trainer(rollout_func=OffPolicy(**sampler), output_dir=str(tmp_path / "again"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(parameters(resumed), parameters(whole))
    for name in ("ess_base", "lr_scale"):
        assert series(resumed, name) == series(whole, name)
    assert series(whole, "ess_base")[-1] < 1 and min(series(whole, "lr_scale")) < 0.99
    resumed.train()  # from the beginning: what was calibrated in the run before is none of its own
    assert series(resumed, "ess_base")[0] != series(whole, "ess_base")[0]


def test_the_base_from_command_line_and_yaml(tmp_path):
    base = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true", "--report_to", "none"]
    config = tmp_path / "config.yaml"
    for given, wanted in (("auto", "auto"), ("0.55", 0.55), ("1", 1.0)):
        (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([*base, "--ess_base", given])
        assert args.ess_base == wanted and type(args.ess_base) is type(wanted)
        config.write_text(f"ess_base: {given}\n")
        (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(config), *base])
        assert args.ess_base == wanted and type(args.ess_base) is type(wanted)
    assert HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(base)[0].ess_base == 1.0
    for wrong in ("always", None, "nan", 0):
        with pytest.raises(ValueError, match=f"ess_base is {wrong!r}, expected .* or 'auto'"):
            GRPOConfig("out", bf16=False, use_cpu=True, ess_base=wrong)


def test_it_says_what_it_wants(make_trainer):
    for wrong, message in (
        ({"ess_lr": "cubic"}, "ess_lr is 'cubic', expected one of"),
        ({"ess_lr": "sqrt", "ess_base": 55}, "ess_base is 55, expected"),
        ({"ess_lr": "sqrt", "skip_dead_sequences": True}, "ess_lr='sqrt' looks at all of them"),
    ):
        with pytest.raises(ValueError, match=message):
            GRPOConfig("out", bf16=False, use_cpu=True, **wrong)


@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])  # dapo: TRL's own loss
def test_a_learning_rate_with_nothing_to_compare_is_refused_before_training(make_trainer, loss_type):
    with pytest.raises(ValueError, match=r"ess_lr='sqrt' compares with the sampler's log-probs"):
        make_trainer(loss_type=loss_type, ess_lr="sqrt")
    make_trainer(loss_type=loss_type, ess_lr="sqrt", num_iterations=2)


def test_it_says_that_a_sampler_reports_no_log_probs_where_there_is_one(make_trainer, replay):
    """TRL's own generation is that of the trainer's model: no engine's log-probs are missing."""

    def rollout_func(prompts, trainer):
        return {**replay(*STALE)(prompts, trainer), "logprobs": None}

    warn_again()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(rollout_logp|log_ratio|staleness alone)")
        make_trainer(loss_type="minpro", ess_lr="sqrt", num_iterations=2, max_steps=2).train()
    with pytest.warns(RuntimeWarning, match="counts the staleness alone: the sampler reports no log-probs"):
        make_trainer(loss_type="minpro", ess_lr="sqrt", rollout_func=rollout_func, max_steps=1).train()
