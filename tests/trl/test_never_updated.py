"""A sampler that is a copy of the model and never gets new weights: the monitor says so in a sentence."""

from __future__ import annotations

import copy

import pytest

from offcorr.rollout import OffPolicy

SENTENCE = "it looks as if the sampler was never updated"


class Copied(OffPolicy):
    """``copy.deepcopy(model)`` as one's own sampler, made when it is first called; it reports what an engine does."""

    updated = False
    copied = None

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    def _weights(self, trainer, version):
        if self.copied is None or self.updated:
            self.copied = copy.deepcopy(super()._weights(trainer, version))
        return self.copied


class Updated(Copied):
    """The same with new weights before every generation, in int8."""

    updated = True


SETTINGS = dict(
    loss_type="tis",
    per_device_train_batch_size=16,
    gradient_accumulation_steps=1,
    max_completion_length=16,
    learning_rate=3e-3,
    monitor={"warning": "warn", "critical": "warn", "warmup": 4},
)


def test_a_copy_of_the_model_is_noticed(make_trainer):
    trainer = make_trainer(rollout_func=Copied(), max_steps=12, **SETTINGS)
    with pytest.warns(UserWarning, match=f"; cause: (stale_weights|adapter_not_synced) .*{SENTENCE}") as caught:
        trainer.train()
    assert any(SENTENCE in str(one.message) and one.filename == __file__ for one in caught)
    assert any(SENTENCE in str(alarm) for alarm in trainer.correction_step.monitor.alarms)


@pytest.mark.parametrize("sampler", [lambda: OffPolicy(lag=3), lambda: Updated(precision="int4")])
def test_an_old_or_coarse_sampler_is_none(make_trainer, sampler):
    trainer = make_trainer(rollout_func=sampler(), max_steps=12, **SETTINGS)
    trainer.train()
    assert not any(SENTENCE in str(alarm) for alarm in trainer.correction_step.monitor.alarms)
    assert not any(one.never_fell for one in trainer.correction_step.monitor._series.values() if one.name == "engine")
