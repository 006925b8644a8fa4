"""The monitor in trainers whose sampler is in order and whose own updates are too large, or that freezes in the run."""

from __future__ import annotations

import pytest

from offcorr.data import Replay
from offcorr.rollout import OffPolicy, VLLMServer
from offcorr.trl.sampling import lags
from tests.trl.test_never_updated import Copied, Updated

SETTINGS = dict(
    loss_type="minpro",
    per_device_train_batch_size=16,
    gradient_accumulation_steps=1,
    max_completion_length=16,
    lr_scheduler_type="constant",
    monitor={"warning": "log", "critical": "log", "warmup": 6},
)

pytestmark = pytest.mark.filterwarnings("ignore:every staleness ratio")


def staleness(make_trainer, sampler, **settings):
    trainer = make_trainer(rollout_func=sampler, **SETTINGS | settings)
    trainer.train()
    return [alarm for alarm in trainer.correction_step.monitor.alarms if alarm.series == "staleness"]


@pytest.mark.parametrize("logging_steps", [1, 4])
def test_a_healthy_sampler_is_not_blamed_for_a_learning_rate(make_trainer, logging_steps):
    """It has new weights for every generation, of which there are four updates."""
    monitor = {**SETTINGS["monitor"], "persistence": 2}
    settings = {"steps_per_generation": 4, "learning_rate": 0.2, "logging_steps": logging_steps, "monitor": monitor}
    found = staleness(make_trainer, Updated(), max_steps=8, **settings, loss_type="offcorr:dapo")
    assert found and {alarm.cause for alarm in found} == {"policy_updates"}
    assert found[0].advice.startswith("lower the learning rate")


def test_a_lag_that_is_meant_is_not_blamed_on_the_sync(make_trainer):
    """The versions move: syncs arrive, and the updates are too large for their lag."""
    found = staleness(make_trainer, OffPolicy(lag=3), max_steps=10, learning_rate=2e-2)
    assert found and {alarm.cause for alarm in found} == {"policy_updates"}
    assert "receives new weights (version" in str(found[0])


class Freezes(Updated):
    """Gets no new weights after the twelfth update."""

    def __call__(self, prompts, trainer):
        self.updated = trainer.state.global_step <= 12
        return super().__call__(prompts, trainer)


def test_a_sampler_that_freezes_does_not_begin_to_round(make_trainer):
    """The first alarm comes while d is as small as rounding makes it."""
    found = staleness(make_trainer, Freezes(), max_steps=18, learning_rate=1e-4, anchor="rollout")
    assert found and {alarm.cause for alarm in found} <= {"adapter_not_synced", "stale_weights"}
    assert found[0].step <= 16 and found[0].severity == "warning"


def test_a_copy_of_the_model_is_an_alarm_before_the_samples_are_useless(make_trainer):
    """Of a small learning rate: the effective sample size of the tokens is still above its limit."""
    settings = {"learning_rate": 2e-3, "anchor": "rollout", "log_metrics": "full"}
    (alarm, *_) = staleness(
        make_trainer, Copied(), max_steps=14, **settings | {"monitor": {**SETTINGS["monitor"], "warmup": 20}}
    )
    assert alarm.severity == "warning" and alarm.cause == "adapter_not_synced" and alarm.step >= 8
    assert "the sampler was never updated" in str(alarm) and "score one known sequence" in alarm.advice


@pytest.mark.slow
def test_a_long_run_with_a_lag_and_a_coarse_engine_is_quiet(make_trainer):
    settings = {"learning_rate": 1e-4, "max_steps": 60, "monitor": {"warning": "log", "critical": "log"}}
    trainer = make_trainer(rollout_func=OffPolicy(lag=8, precision="int8"), **SETTINGS | settings)
    trainer.train()
    assert trainer.correction_step.monitor.alarms == []


def test_only_a_sampler_that_can_lag_is_said_to_put_the_lag_into_engine(make_trainer, caplog):
    """With lag 0 the engine series is the same under both anchors."""
    expected = {OffPolicy(): False, OffPolicy(lag=2): True, Replay(OffPolicy()): False}
    expected |= {VLLMServer(url="127.0.0.1:9", sync_every=every): every > 1 for every in (1, 4)}
    assert [lags(sampler) for sampler in expected] == list(expected.values())
    assert lags(lambda prompts, trainer: {}) is lags(None) is None
    for lag in (0, 2):
        caplog.clear()
        make_trainer(rollout_func=OffPolicy(lag=lag), **SETTINGS, anchor="recomputed", max_steps=1).train()
        said = " ".join(record.getMessage() for record in caplog.records if record.name == "offcorr")
        assert ("offcorr/engine holds the lag as well (anchor='snapshot' keeps the two apart)" in said) == (lag > 0)
        assert "anchor 'recomputed'" in said and "if the sampler lags" not in said
