"""Options that change over training: what is in force at each optimizer step, and what is refused before the first."""

from __future__ import annotations

import pytest
import torch
from transformers import HfArgumentParser
from trl import TrlParser

import offcorr
from offcorr.rollout import OffPolicy
from offcorr.trl import GRPOConfig, GRPOTrainer


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Recording(GRPOTrainer):
    """Keeps the correction that each optimizer step was made with."""

    def __init__(self, *args, **kwargs):
        self.in_force = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.model.training and len(self.in_force) == self.state.global_step:
            self.in_force.append(self.correction)
        return loss


def test_holderpo_anneals_by_itself(make_trainer, replay, series):
    trainer = make_trainer(Recording, rollout_func=replay("old_logp"), loss_type="holderpo", max_steps=6)
    trainer.train()
    powers = [2.0, 1.4, 0.8, 0.2, -0.4, -1.0]  # step / 5 of the way from 2 to -1, which the last of six reaches
    assert series(trainer, "offcorr/schedule/power") == pytest.approx(powers)
    assert [correction.ratio.power for correction in trainer.in_force] == pytest.approx(powers)
    # Each is a step of its own: the run is not the one at a constant exponent, which a number asks for.
    held = make_trainer(
        Recording, rollout_func=replay("old_logp"), loss_type="holderpo", loss_kwargs={"power": 2.0}, max_steps=6
    )
    held.train()
    assert not series(held, "offcorr/schedule/power")
    assert {correction.ratio.power for correction in held.in_force} == {2.0}
    assert not torch.equal(parameters(held), parameters(trainer))
    constant = {"power": {"start": 2.0, "end": 2.0}}
    same = make_trainer(rollout_func=replay("old_logp"), loss_type="holderpo", loss_kwargs=constant, max_steps=6)
    same.train()
    assert torch.equal(parameters(same), parameters(held))


def test_any_numeric_option_of_any_method(make_trainer, replay, series):
    """Also of a weight, in a list of them."""
    trainer = make_trainer(
        Recording,
        rollout_func=replay("old_logp"),
        loss_type="offcorr:dapo",
        loss_kwargs={
            "eps_high": {"start": 0.4, "end": 0.2},
            "weight": [{"name": "truncate", "cap": {"start": 3, "end": 1}}],
        },
        max_steps=4,
    )
    trainer.train()
    assert series(trainer, "offcorr/schedule/eps_high") == pytest.approx([0.4, 1 / 3, 0.8 / 3, 0.2])
    assert series(trainer, "offcorr/schedule/weight.0.cap") == pytest.approx([3.0, 7 / 3, 5 / 3, 1.0])
    last = trainer.in_force[-1]
    assert (last.gate.eps_high, last.weight[0].high) == pytest.approx((0.2, 1.0))


def test_a_registered_schedule_of_ones_own(make_trainer, replay, series, tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(
        "import offcorr\n"
        "@offcorr.register('narrowing', multiplier='as ppo', schedules={'eps': {'start': 0.3, 'end': 0.1}})\n"
        "def narrowing(eps: float = 0.2) -> offcorr.Correction:\n"
        "    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))\n"
    )
    trainer = make_trainer(rollout_func=replay("old_logp"), loss_type=f"{file}:narrowing", max_steps=2)
    trainer.train()
    assert series(trainer, "offcorr/schedule/eps") == pytest.approx([0.3, 0.1])
    offcorr.unregister("narrowing")


def test_one_step_has_one_correction(make_trainer, replay, series):
    """Split into micro-batches, and logged every other step: the last value in force."""
    ends = []
    for accumulation in (1, 4):
        trainer = make_trainer(
            rollout_func=replay("old_logp"),
            loss_type="holderpo",
            optim="sgd",
            learning_rate=0.05,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            num_iterations=2,
            logging_steps=2,
        )
        trainer.train()
        ends.append(parameters(trainer))
        assert series(trainer, "offcorr/schedule/power") == pytest.approx([1.0, -1.0])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-6)


def test_a_constant_length_and_a_schedule(make_trainer, replay):
    kwargs = {"cap": {"start": 20.0, "end": 10.0}}  # dppo divides by the longest completion
    trainer = make_trainer(Recording, rollout_func=replay(), loss_type="dppo", loss_kwargs=kwargs, max_steps=2)
    trainer.train()
    assert [correction.max_length for correction in trainer.in_force] == [8, 8]
    assert trainer.in_force[1].gate.cap == 10.0


def test_resume_gives_the_same_run(make_trainer, series, tmp_path):
    settings = dict(loss_type="holderpo", max_steps=6, num_iterations=2, save_strategy="steps", save_steps=4)
    whole = make_trainer(rollout_func=OffPolicy(lag=2), output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    resumed = make_trainer(rollout_func=OffPolicy(lag=2), output_dir=str(tmp_path / "again"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(parameters(resumed), parameters(whole))
    assert series(resumed, "offcorr/schedule/power") == series(whole, "offcorr/schedule/power")


def test_evaluation_is_under_the_correction_in_force(make_trainer, replay, dataset):
    trainer = make_trainer(
        rollout_func=replay("old_logp"),
        loss_type="holderpo",
        eval_dataset=dataset.select(range(4)),
        per_device_eval_batch_size=4,
        max_steps=2,
    )
    trainer.evaluate()
    assert trainer.correction.ratio.power == 2.0  # nothing is done yet
    trainer.train()
    trainer.evaluate()
    assert trainer.correction.ratio.power == -1.0


def test_command_line_and_yaml(tmp_path):
    base = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true", "--report_to", "none"]
    wanted = {"power": {"start": 2.0, "end": -1.0}}
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        [*base, "--loss_type", "holderpo", "--loss_kwargs", '{"power": {"start": 2.0, "end": -1.0}}']
    )
    assert args.loss_kwargs == wanted
    config = tmp_path / "config.yaml"
    config.write_text("loss_type: holderpo\nloss_kwargs:\n  power: {start: 2.0, end: -1.0}\n")
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(config), *base])
    assert args.loss_kwargs == wanted


@pytest.mark.parametrize(
    ("loss_type", "options", "message"),
    [
        ("tis", {"cap": {"start": 2.0, "end": -1.0}}, "at the end of the schedule, where cap is -1: .* is -1.0, exp"),
        ("tis", {"cap": {"start": -1.0, "end": 2.0}}, "at the start of the schedule, where cap is -1: .* is -1.0, "),
        ("tis", {"cap": {"start": "2", "end": 1.0}}, "Linear: start is '2', expected a finite number"),
        ("tis", {"cap": {"start": 2.0}}, "is {.start.: 2.0}, expected"),
        ("tis", {"cpa": {"start": 2.0, "end": 1.0}}, "no option 'cpa', did you mean 'cap'"),
        ("icepop", {"low": {"start": 0.5, "end": 6.0}}, "low = 6.0 is above high = 5.0"),
    ],
)
def test_refused_before_the_model_is_loaded(make_trainer, tmp_path, loss_type, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model=str(tmp_path / "no model here"), loss_type=loss_type, loss_kwargs=options)
