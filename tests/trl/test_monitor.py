"""The monitor in a trainer: real runs whose sampler is in order, or develops a fault at a known step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import trl
from transformers import HfArgumentParser
from trl import TrlParser

import offcorr
from offcorr.diagnose import Record, diagnose, read
from offcorr.rollout import OffPolicy
from offcorr.training import MismatchError, Precision
from offcorr.training.monitor import PREFIX
from offcorr.training.monitor_option import monitor_options
from offcorr.trl import GRPOConfig

FAULT = 9
"""Number of optimizer steps after which the faults begin."""

QUIET = {"warmup": 8, "warning": "log", "critical": "log"}

SETTINGS = dict(
    loss_type="tis",
    per_device_train_batch_size=32,
    gradient_accumulation_steps=1,
    max_completion_length=16,
    max_steps=14,
    learning_rate=1e-3,
    monitor=QUIET,
)

pytestmark = pytest.mark.filterwarnings("ignore:every staleness ratio")


class Sampler(OffPolicy):
    """``OffPolicy``, which from the step ``FAULT`` on is changed by ``fault(sampler, trainer)``.

    Args:
        keys: of its output; without ``old_logp`` it reports what an engine does.
    """

    def __init__(self, fault=None, keys=("prompt_ids", "completion_ids", "logprobs"), **options):
        super().__init__(**options)
        self.fault, self.keys = fault, keys

    def __call__(self, prompts, trainer):
        if self.fault is not None and trainer.state.global_step >= FAULT:
            self.fault(self, trainer)
        output = super().__call__(prompts, trainer)
        return {name: output[name] for name in self.keys}


def stops_syncing(sampler, trainer):
    """Goes on with the weights of now, and reports the version of the weights that it should have."""
    if "_weights" not in vars(sampler):
        kept = {name: value.clone() for name, value in sampler._weights(trainer, trainer.state.global_step).items()}
        sampler._weights = lambda trainer, version: kept


def changes_temperature(sampler, trainer):
    sampler.temperature = 0.7


def changes_precision(sampler, trainer):
    sampler._precision = Precision.named("int4")


FAULTS = {"weights": stops_syncing, "temperature": changes_temperature, "precision": changes_precision}
CAUSES = {"weights": "stale_weights", "temperature": "temperature", "precision": "precision"}
SCORED = ("prompt_ids", "completion_ids", "logprobs", "old_logp", "rollout_version")


def run(make_trainer, sampler, **settings):
    trainer = make_trainer(rollout_func=sampler, **{**SETTINGS, **settings})
    trainer.train()
    return trainer, trainer.correction_step.monitor.alarms


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


HEALTHY = {
    "an engine": Sampler,
    "an int8 engine": lambda: Sampler(precision="int8"),
    "a lag of four": lambda: OffPolicy(lag=4, precision="bf16"),
}


@pytest.mark.parametrize("sampler", HEALTHY)
@pytest.mark.parametrize("loss_type", ["tis", "dapo"])
def test_a_healthy_run_has_no_event(make_trainer, series, sampler, loss_type):
    """Learning, with the default baseline of 20 steps where the run is long enough for a verdict after it."""
    settings = dict(max_steps=20, loss_type=loss_type, log_metrics="short")
    trainer, alarms = run(make_trainer, HEALTHY[sampler](), **settings)
    assert alarms == [] and not any(key.startswith(PREFIX) for entry in trainer.state.log_history for key in entry)
    charts = trainer.correction_step.monitor._series
    assert charts["engine"].charts["above"].ready
    assert len(series(trainer, "offcorr/engine/abs_mean")) == 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine(make_trainer, series, fault):
    """The first generation with the fault is that of the step FAULT + 1; without a sync its weights are still right."""
    trainer, alarms = run(make_trainer, Sampler(FAULTS[fault]))
    first = FAULT + 1 + (fault == "weights")
    engine = next(alarm for alarm in alarms if alarm.series == "engine")
    assert first + 2 <= engine.step <= first + 3
    assert {alarm.series for alarm in alarms} == {"engine"} | ({"surprise"} if fault == "temperature" else set())
    assert (engine.severity == "critical") == (fault == "temperature")
    assert {alarm.cause for alarm in alarms} == {CAUSES[fault]}
    logged = [entry["step"] for entry in trainer.state.log_history if PREFIX + "engine" in entry]
    assert logged == list(range(engine.step, 15))
    assert series(trainer, PREFIX + "alarms")[-1] == len(alarms)


def test_old_weights_whose_log_probs_are_right_are_staleness(make_trainer):
    """The sampler scores with the weights that it has, so engine and trainer agree, and the policy moves away."""
    _, alarms = run(make_trainer, Sampler(stops_syncing, SCORED), max_steps=16, learning_rate=3e-3)
    assert [alarm.series for alarm in alarms] == ["staleness"]
    assert alarms[0].cause in ("stale_weights", "adapter_not_synced")  # which look alike
    assert 12 <= alarms[0].step <= 15 and "whether the sampler still receives new weights" in alarms[0].advice


def test_an_anchor_that_contains_the_engine(make_trainer):
    """Staleness holds the engine's mismatch then, and the cause is named from the trainer's own log-probs."""
    settings = {"anchor": "rollout", "loss_type": "minpro", "max_steps": 13}
    _, alarms = run(make_trainer, Sampler(changes_temperature), **settings)
    assert {(alarm.series, alarm.cause) for alarm in alarms} == {("staleness", "temperature")}
    assert "same temperature=" in alarms[0].advice


def test_a_temperature_in_neither_log_prob(make_trainer):
    """Both sides log the distribution at 1, and from a step on the tokens are drawn at .5."""

    def raw(prompts, trainer):
        output = sampler(prompts, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        for row, (prompt, ids) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            output["logprobs"][row] = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return output

    sampler = Sampler(lambda inner, trainer: setattr(inner, "temperature", 0.5))
    raw.attach = sampler.attach
    _, alarms = run(make_trainer, raw)
    assert [alarm.series for alarm in alarms] == ["surprise"]
    # This model has learned nothing: its distributions are so flat that they end by themselves, as a truncation does.
    assert alarms[0].cause in ("temperature_silent", "top_p_silent")
    assert 12 <= alarms[0].step <= 13


# The self-test


def wrong_temperature():
    return Sampler(temperature=0.5)


@pytest.mark.parametrize("loss_type", ["tis", "dapo"])
def test_training_does_not_begin(make_trainer, loss_type):
    """Under a correction and under TRL's own loss: no weight has changed."""
    trainer = make_trainer(rollout_func=wrong_temperature(), **{**SETTINGS, "monitor": "warn", "loss_type": loss_type})
    before = parameters(trainer)
    with pytest.raises(
        MismatchError, match=r'not begun: .* about 0\.5.*set the same temperature=.*"self_test": "warn"'
    ):
        trainer.train()
    assert torch.equal(parameters(trainer), before) and trainer.state.global_step == 0


def test_a_refused_batch_is_written(make_trainer):
    """With its tokens and entropies, so that ``offcorr diagnose`` can say more; a second run overwrites nothing."""
    for name in ("first_batch.jsonl", "first_batch_2.jsonl"):
        trainer = make_trainer(rollout_func=wrong_temperature(), **{**SETTINGS, "monitor": "warn"})
        with pytest.raises(MismatchError) as refused:
            trainer.train()
        path = Path(trainer.args.output_dir, "mismatch", name)
        assert str(refused.value).endswith(f". The batch was written to {path}: offcorr diagnose {path}")
        report = diagnose(read([path], warn=lambda said: None))
        assert report.verdict == "temperature" and report.evidence.entropy is not None
        assert any(record.prompt_ids.any() and record.completion_ids.any() for record in report.evidence.records)


def test_the_self_test_can_be_overridden(make_trainer):
    settings = {**SETTINGS, "max_steps": 2}
    with pytest.warns(UserWarning, match="in the first batch the engine's log-probs carry a temperature"):
        run(make_trainer, wrong_temperature(), **{**settings, "monitor": {"self_test": "warn"}})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="in the first batch")
        run(make_trainer, wrong_temperature(), **{**settings, "monitor": {"self_test": "off"}})


def test_sequences_that_are_skipped_do_not_stop_the_training(make_trainer, caplog):
    """Before the forward pass they have placeholders in place of log-probs and entropies, which are not tested."""
    settings = {**SETTINGS, "loss_type": "offcorr:dapo", "skip_dead_sequences": True, "max_steps": 1}
    make_trainer(rollout_func=OffPolicy(), **{**settings, "monitor": "warn"}).train()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert "the engine's log-probs agree with the trainer's" in line


def test_a_monitor_that_is_off(make_trainer):
    trainer = make_trainer(rollout_func=wrong_temperature(), **{**SETTINGS, "monitor": "off", "max_steps": 1})
    with pytest.warns(UserWarning, match="in the first batch the engine's log-probs carry a temperature"):
        trainer.train()
    assert trainer.correction_step.monitor is None


def test_it_is_installed_by_default():
    assert monitor_options(GRPOConfig("out", bf16=False, use_cpu=True).monitor) == {
        "warning": "warn",
        "critical": "warn",
    }


# Actions


def test_warn_and_dump(make_trainer, tmp_path):
    """The records of the step of the alarm, in the run's folder."""
    settings = {"monitor": {"warmup": 8, "critical": "dump"}}
    with pytest.warns(UserWarning, match=r"step 12: the engine's log-probs .*The batch was written to .*jsonl"):
        trainer, alarms = run(make_trainer, Sampler(changes_temperature), **settings)
    (path,) = Path(trainer.args.output_dir, "mismatch").iterdir()
    assert path == alarms[0].dump
    records = [Record.of(json.loads(line)) for line in path.read_text().splitlines()]
    assert len(records) == 64 and [record.step for record in records] == [11] * 32 + [12] * 32
    last = records[-1]
    text = trainer.processing_class.decode(last.prompt_ids)
    assert text.replace(" ", "") in trainer.train_dataset["prompt"]
    assert len(last) == len(last.rollout_logp) == len(last.entropy) <= 16 and last.completion_ids.min() >= 0
    d = torch.cat([torch.from_numpy(record.old_logp - record.rollout_logp) for record in records[-32:]])
    (entry,) = [entry for entry in trainer.state.log_history if entry.get("step") == 12 and "loss" in entry]
    assert d.abs().mean().item() == pytest.approx(entry["offcorr/engine/abs_mean"], rel=1e-4)


def test_a_folder_that_nothing_is_written_to_is_said_once(make_trainer, tmp_path):
    mine = {"folder": str(tmp_path / "mine")}
    with pytest.warns(UserWarning, match="mine' of the monitor does nothing without the action 'dump'") as caught:
        make_trainer(rollout_func=Sampler(), **{**SETTINGS, "monitor": mine})
    assert sum("does nothing without" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="folder=")
        for monitor in ("warn", mine | {"critical": "dump"}):
            trainer = make_trainer(rollout_func=Sampler(), **{**SETTINGS, "monitor": monitor})
            folder = trainer.correction_step.monitor.folder
            assert folder.name == ("mismatch" if monitor == "warn" else "mine")


def test_mask(make_trainer, series):
    """From the step after the alarm on, nothing of a sampler at another temperature is trained on."""
    trainer, alarms = run(make_trainer, Sampler(changes_temperature), monitor={**QUIET, "critical": ["log", "mask"]})
    assert alarms[0].step == 12
    masked = {
        entry["step"]: entry[PREFIX + "masked"] for entry in trainer.state.log_history if PREFIX + "masked" in entry
    }
    assert list(masked) == [13, 14] and min(masked.values()) > 0.9
    norms = series(trainer, "grad_norm")
    assert max(norms[12:]) < 0.3 * min(norms[9:12])


def test_mask_needs_a_correction(make_trainer):
    with pytest.raises(ValueError, match="monitor='mask' masks sequences, and TRL's own loss .* 'offcorr:dapo'"):
        make_trainer(loss_type="dapo", monitor="mask")


def test_stop(make_trainer, tmp_path):
    """After the step of the alarm, with a checkpoint, although none was asked for."""
    trainer, alarms = run(make_trainer, Sampler(changes_temperature), monitor={**QUIET, "critical": ["log", "stop"]})
    assert trainer.state.global_step == alarms[0].step == 12
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-12"]
    assert trainer.state.log_history[-1]["train_runtime"] > 0


def test_a_run_is_the_same_with_a_monitor_and_without(make_trainer):
    ends = [
        parameters(run(make_trainer, OffPolicy(precision="int8"), max_steps=4, monitor=monitor)[0])
        for monitor in ("warn", {"warning": "stop", "critical": "mask"})
    ]
    trainer = make_trainer(rollout_func=OffPolicy(precision="int8"), **{**SETTINGS, "max_steps": 4, "monitor": "off"})
    trainer.train()
    assert torch.equal(ends[0], parameters(trainer)) and torch.equal(ends[1], ends[0])


# Checkpoints, ranks, configuration


def test_resume(make_trainer, tmp_path, caplog):
    """The alarm of a resumed run is that of the run that was never interrupted."""
    settings = {"save_strategy": "steps", "save_steps": 10, "num_generations": 32}  # one epoch, which TRL resumes
    whole, alarms = run(make_trainer, Sampler(changes_precision), output_dir=str(tmp_path / "whole"), **settings)
    again = dict(output_dir=str(tmp_path / "again"), **settings)
    resumed = make_trainer(rollout_func=Sampler(changes_precision), **{**SETTINGS, **again})
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    monitor = resumed.correction_step.monitor
    assert [str(alarm) for alarm in monitor.alarms] == [str(alarm) for alarm in alarms] and len(alarms) == 1
    assert monitor.state_dict() == whole.correction_step.monitor.state_dict()

    shutil.copytree(tmp_path / "whole" / "checkpoint-10", tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "offcorr_trainer.pt").unlink()
    caplog.clear()
    anew = make_trainer(rollout_func=Sampler(changes_precision), **{**SETTINGS, **again})
    anew.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert anew.correction_step.monitor.alarms == []
    assert any("has no state of the monitor's baselines, made anew" in r.getMessage() for r in caplog.records)


@pytest.mark.skipif(sys.platform == "win32", reason="gloo and torchrun")
def test_two_ranks_act_alike(tmp_path, model_folder):
    worker = Path(__file__).with_name("monitor_worker.py")
    places = [str(Path(offcorr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(worker), model_folder, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    main, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert main["refused"] == other["refused"] and "temperature of about 0.5" in main["refused"]
    assert main["unchanged"] and other["unchanged"]
    assert main["alarms"] == other["alarms"] == [[12, "engine", "critical"], [12, "surprise", "warning"]]
    assert main["stopped_at"] == other["stopped_at"] == 12
    assert main["masked"] == other["masked"] == []
    assert len(main["dumps"]) == 1 and other["dumps"] == []
    assert done.stderr.count("step 12: the engine's log-probs have moved away") == 1


def test_the_monitor_from_every_source(tmp_path):
    common = dict(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    given = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true"]
    wanted = {"critical": ["dump", "stop"], "warmup": 30}
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([*given, "--monitor", json.dumps(wanted)])
    assert monitor_options(args.monitor) == wanted
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([*given, "--monitor", "off"])
    assert monitor_options(args.monitor) is None
    file = tmp_path / "config.yaml"
    file.write_text("monitor: {critical: [dump, stop], warmup: 30}\n")
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(file), *given])
    assert monitor_options(args.monitor) == wanted
    for wrong, message in (
        ("wran", "monitor is 'wran', did you mean 'warn'"),
        (True, "monitor is True, expected 'off', one of"),
        ('{"warmup": 3', "monitor is .*mapping of options"),
        ({"warm_up": 3}, "monitor has the option 'warm_up', did you mean 'warmup'"),
        ({"critical": "halt"}, "monitor: critical is 'halt'"),
    ):
        with pytest.raises(ValueError, match=message):
            GRPOConfig(monitor=wrong, **common)
    assert not hasattr(trl.GRPOConfig, "monitor")


@pytest.mark.parametrize("anchor", [{"anchor": "ewma", "anchor_kwargs": {"window": 8}}, {"anchor": "log_linear"}])
def test_an_exact_engine_is_not_blamed_for_the_distance_of_the_anchor(make_trainer, anchor):
    """The mean of past weights is far from the engine, which samples with the weights of now."""
    settings = {"loss_type": "minpro", "learning_rate": 1e-2, "monitor": {"warning": "log", "critical": "log"}}
    _, alarms = run(make_trainer, OffPolicy(), max_steps=10, **settings, **anchor)
    assert not [alarm for alarm in alarms if alarm.series == "engine"]


@pytest.mark.parametrize(("anchor", "same"), [("snapshot", True), ("recomputed", False)])
def test_the_monitor_knows_what_the_sampler_says_of_itself(make_trainer, anchor, same):
    """Its precision and lag, and whether ``old_logp`` is of the weights that sampled."""
    trainer, _ = run(make_trainer, OffPolicy(lag=2, precision="int4"), max_steps=1, anchor=anchor)
    monitor = trainer.correction_step.monitor
    assert monitor.precision == "int4" and monitor.lag == 2
    assert monitor.same_weights == same and monitor.holds_lag != same
