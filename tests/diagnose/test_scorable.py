"""The sequences that `offcorr diagnose --model` scores again."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

from offcorr.diagnose import Record
from offcorr.diagnose.diagnosis import diagnose
from offcorr.diagnose.informed import informed
from offcorr.diagnose.rescore import described, rescore, rollout_versions
from offcorr.diagnose.scorable import STEPS, of_the_model, scorable, spread
from tests.diagnose.test_variants import dump
from tests.rollout.rollout_models import fresh_model


@pytest.fixture(scope="module")
def models():
    """Weights of four generations, each a little further."""
    found = []
    for age in range(4):
        model = fresh_model(0).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                generator = torch.Generator().manual_seed(1)
                parameter.add_(0.02 * age * torch.randn(parameter.shape, generator=generator))
        found.append(model)
    return found


def steps_of(records):
    return sorted({record.step for record in records})


@pytest.fixture(scope="module")
def training(models):
    """Eight optimizer steps, two per generation."""
    return [
        dataclasses.replace(record, step=2 * age + 1 + row % 2)
        for age, model in enumerate(models)
        for row, record in enumerate(dump(model, sequences=6, seed=age))
    ]


def test_they_are_of_the_steps_whose_weights_the_model_has(models, training):
    for age, model in enumerate(models):
        assert steps_of(of_the_model(training, model)) == [2 * age + 1, 2 * age + 2]


def test_between_the_steps_that_are_tried_first(models, training):
    many = [dataclasses.replace(one, step=200 + row) for row, one in enumerate(dump(models[0], sequences=2 * STEPS))]
    many[9:11] = [dataclasses.replace(one, step=209 + row) for row, one in enumerate(dump(models[2], sequences=2))]
    assert steps_of(of_the_model(many, models[2])) == [209, 210]


def test_of_the_last_step_where_the_model_fits_none(training):
    other = fresh_model(3).eval()
    chosen = of_the_model(training, other)
    assert steps_of(chosen) == [8]
    rescored = rescore(chosen, other)
    report = diagnose(training)
    assert rescored.other_model and informed(report, rescored) is report
    said = described(rescored)
    assert len(said) == 2 and "give the weights that old_logp is of" in said[1]


def test_the_versions_that_the_records_hold_are_said_where_the_model_is_another(training):
    """A sampler that lags by 2 updates and supplies old_logp: no trainer's checkpoint of the last step fits."""
    lagging = [
        dataclasses.replace(one, rollout_version=max(0, one.step - 2), trainer_version=one.step) for one in training
    ]
    other = fresh_model(3).eval()
    rescored = rescore(of_the_model(lagging, other), other)
    said = described(rescored, rollout_versions(lagging))
    assert rescored.other_model and "as OffPolicy(lag=...) does, they are the weights that sampled" in said[1]
    assert said[2].startswith("the records were sampled by versions 0 to 6 (rollout_version")
    assert said[2].endswith("TRL's checkpoint-6)") and rescored.versions == [6]


def test_all_without_steps_and_none_without_prompt():
    rows = [
        {"prompt_ids": [1] * (row % 5), "completion_ids": [2], "rollout_logp": [-1], "logp": [-1]} for row in range(20)
    ]
    records = scorable([Record.of(row, f"{place}") for place, row in enumerate(rows)])
    assert len(records) == 16 and of_the_model(records, torch.nn.Identity()) == records
    assert [one.where for one in spread(records, 3)] == ["1", "9", "19"]
