"""Open questions name only fields that the dump lacks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offcorr.diagnose import Evidence, Record, diagnose
from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.causes.unlogged import OTHER_ENTROPY
from offcorr.diagnose.questions import open_questions, wanted
from offcorr.diagnose.text import text
from tests.diagnose import simulated
from tests.diagnose.simulated import world

FIELDS = ("entropy", "rollout_version", "trainer_version")
LOGGED = {
    "nothing": (),
    "entropy": ("entropy",),
    "versions": ("rollout_version", "trainer_version"),
    "one version": ("rollout_version",),
    "all": FIELDS,
}


def evidence(fields, repeated=True):
    """Eight sequences with the named fields, whose sampler is three updates behind where versions are logged."""
    row = {"completion_ids": [2] * 9, "rollout_logp": -np.ones(9), "old_logp": -np.ones(9)}
    values = {"entropy": np.ones(9), "rollout_version": 4, "trainer_version": 7}
    row |= {name: values[name] for name in fields}
    return Evidence.of([Record.of(row | {"prompt_ids": [1] if repeated else [1, at]}) for at in range(8)])


@pytest.mark.parametrize("logged", LOGGED)
@pytest.mark.parametrize("repeated", [True, False])
def test_only_what_is_absent_is_asked_for(logged, repeated):
    made = evidence(LOGGED[logged], repeated)
    for said in ("; ".join(open_questions(made, [*CAUSES])), "; ".join(wanted(made))):
        asked = [name for name in FIELDS if f"{name}," in said + "," or f"log {name}" in said or f"{name} and" in said]
        assert not {*asked} & {*LOGGED[logged]}, said
        said = said.replace(OTHER_ENTROPY.words, "")
        assert ("entropy" in said) == ("entropy" not in LOGGED[logged])
        assert "several samples" not in said or not repeated


def test_versions_that_are_logged_answer_the_question():
    cache, prompt, update, _ = diagnose(_with_versions("precision", 0)).cannot_tell  # versions do not decide these
    assert "cached in a lower precision" in cache and "an update that did not reach the sampler" in update
    assert "another prompt" in prompt
    said = " ".join(diagnose(_with_versions("stale_weights", 5)).cannot_tell)
    assert "rollout_version" not in said and "another prompt" in said  # which versions of one age do not exclude
    _, said, *_ = diagnose(_with_versions("precision", 5)).cannot_tell  # the sampler's weights are older
    assert said == "whether the cause is precision or weights that are a little older. To find out, give --model"
    _, said, *_ = diagnose(world("precision").records()).cannot_tell
    assert said.endswith("To find out, log rollout_version and trainer_version, or give --model")


def _with_versions(cause, age):
    made = world(cause)
    made.edits = [simulated.versions(age)]
    return made.records()


def test_a_partly_logged_version_is_asked_for():
    records = _with_versions("precision", 0)
    half = [one if at % 2 else world("precision").records()[at] for at, one in enumerate(records)]
    assert "log rollout_version and trainer_version" in "; ".join(open_questions(Evidence.of(half), ["precision"]))


def test_entropy_of_few_tokens_says_nothing_of_the_others():
    """A sampler that goes wrong where no entropy is logged any more."""
    records = [
        dataclasses.replace(one, entropy=one.entropy if row < 8 else None)
        for row, one in enumerate(world("clean").records())
    ]
    report = diagnose(records)
    assert any(one.startswith("whether the 1,152 of 1,536 tokens without entropy") for one in report.cannot_tell)
    assert "nats over the 384 tokens with entropy" in " ".join(text(report).split())
    whole = diagnose(world("clean").records())
    assert not any("without entropy" in one for one in whole.cannot_tell) and "with entropy" not in text(whole)
