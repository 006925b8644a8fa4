"""Dumps whose optimizer steps are of two kinds: some in which trainer and sampler agree, and others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offcorr.diagnose import Evidence, diagnose
from offcorr.diagnose.causes.over_steps import growth
from offcorr.diagnose.steps import differing_steps
from tests.diagnose import simulated
from tests.diagnose.simulated import World, noise


def tempered(logits, world):
    return logits / 0.7


def exact(logits, world):
    return logits


ROUNDED = noise(0.005)


def steps_of(*samplers, first=1):
    """Eight sequences of each sampler, in an optimizer step of their own."""
    return [
        dataclasses.replace(record, step=step, group_id=f"{step}/{record.group_id}")
        for step, sampler in enumerate(samplers, first)
        for record in World(seed=step, sequences=8, sampler=sampler).records()
    ]


@pytest.mark.parametrize("good", [exact, ROUNDED])
@pytest.mark.parametrize(("before", "bad", "after"), [(8, 8, 0), (0, 8, 8), (12, 4, 0), (4, 12, 0), (4, 4, 4)])
def test_a_temperature_in_some_of_the_steps(good, before, bad, after):
    report = diagnose(steps_of(*[good] * before, *[tempered] * bad, *[good] * after))
    assert [finding.cause for finding in report.causes] == ["temperature"]
    evidence = report.causes[0].evidence
    assert evidence.endswith(
        f"; this is of {bad} of the {before + bad + after} optimizer steps, {before + 1} to {before + bad}: in the "
        "others the log-probs agree"
    )
    assert report.numbers["sequences"] == 8 * (before + bad + after)


@pytest.mark.parametrize("sampler", [simulated.top_k, noise(0.3, shared=True)])
def test_a_change_at_one_step_is_no_growth(sampler):
    causes = {finding.cause for finding in diagnose(steps_of(*[exact] * 8, *[sampler] * 8)).causes}
    assert causes == ({"top_k"} if sampler is simulated.top_k else {"stale_weights"})


@pytest.mark.parametrize("after", [(0.3, 0.31, 0.305), (0.3, 0.302), (0.3,)])
def test_a_few_steps_that_differ_are_no_growth(after):
    """Steps that agree come before them, as in the sequences that an alarm of the monitor is of."""
    samplers = [*[noise(1e-6 * (step + 1)) for step in range(6)], *[noise(size, shared=True) for size in after]]
    assert growth(Evidence.of(steps_of(*samplers))) is None
    rising = [*samplers[:6], *[noise(size, shared=True) for size in (0.1, 0.2, 0.3)]]
    assert growth(Evidence.of(steps_of(*rising))) is not None


@pytest.mark.parametrize("silent", [0, 8])
@pytest.mark.parametrize("power", [1, 2])
def test_updates_that_are_lost_grow_from_the_first_steps_on(silent, power):
    """Steps that agree, at the beginning, belong to it."""
    growing = [noise(0.4 * (step / 8) ** power, shared=True) for step in range(9)]
    records = steps_of(*[exact] * silent, *growing)
    assert diagnose(records).verdict == "adapter_not_synced"
    assert differing_steps(Evidence.of(records))[1] == ""


@pytest.mark.parametrize("agree", [0, 1])
@pytest.mark.parametrize("steps", [3, 4, 8])
def test_a_small_gap_that_grows_is_no_precision(agree, steps):
    """As the monitor's alarm says of the same sequences."""
    growing = [noise(0.03 * (step + 1) / steps, shared=True) for step in range(steps)]
    report = diagnose(steps_of(*[exact] * agree, *growing))
    assert report.verdict == "adapter_not_synced" and report.confidence < 0.7
    assert "no more than rounding makes" in report.causes[0].evidence
    assert "but it grows over the optimizer steps" in report.causes[0].evidence
    said = " ".join(report.cannot_tell)
    assert "whether the cause is adapter_not_synced or a lower precision whose effect grows" in said
    assert "or older weights (no rollout_version is logged). To find out, log rollout_version and trainer_v" in said
    aged = [
        dataclasses.replace(record, rollout_version=np.zeros(len(record)), trainer_version=record.step)
        for record in steps_of(*growing)
    ]
    assert diagnose(aged).verdict == "stale_weights"
    # Where logp is further from old_logp, as under a snapshot, the age is in that difference.
    report = diagnose([dataclasses.replace(record, logp=record.old_logp - 0.5) for record in aged])
    (found,) = (one for one in report.causes if one.cause != "policy_updates")
    assert (found.cause, found.confidence) == ("precision", 0.5) and "weights does that grow" in found.evidence
    assert any("precision or an update that did not reach the sampler" in one for one in report.cannot_tell)


@pytest.mark.parametrize(
    "sizes",
    [(0.01, 0.01, 0.01), (0, 0, 0.01, 0.011), (0.004, 0.012, 0.014), (0.01, 0.013, 0.016), (0.01, 0.02), (0.02, 0.01)],
)
def test_a_small_gap_that_jumps_or_stays_is_precision(sizes):
    records = steps_of(*(noise(size, shared=True) if size else exact for size in sizes))
    assert diagnose(records).verdict == "precision"


def test_sequences_of_both_kinds_in_one_step_are_looked_at_together():
    """Where whole sequences agree within a step, which ones do tells the cause."""
    records = steps_of(*[exact] * 4, *[tempered] * 4)
    mixed = [dataclasses.replace(record, step=1 + at % 2) for at, record in enumerate(records)]
    unknown = [dataclasses.replace(record, step=None) for record in records]
    for kept in (mixed, unknown, steps_of(*[tempered] * 4), steps_of(*[exact] * 4)):
        evidence = Evidence.of(kept)
        found, said = differing_steps(evidence)
        assert found is evidence and said == ""


def test_the_steps_in_words():
    samplers = [tempered if step in (2, 5, 6, 9, 11, 13) else exact for step in range(14)]
    found, said = differing_steps(Evidence.of(steps_of(*samplers, first=0)))
    assert "6 of the 14 optimizer steps, 2, 5 to 6, ... 13:" in said
    assert np.unique([record.step for record in found.records]).tolist() == [2, 5, 6, 9, 11, 13]
