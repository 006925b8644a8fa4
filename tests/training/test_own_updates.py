"""The cause of an alarm where the trainer's own updates make the gap, where it grows from rounding, and where the
sampler was never updated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import offcorr
from offcorr.diagnose import Record, diagnose
from offcorr.diagnose.evidence import Evidence
from offcorr.training.alarms import Alarm
from offcorr.training.named_cause import named_cause
from offcorr.training.own_updates import of_own_updates
from offcorr.training.semantics import MENDS
from tests.training.test_monitor import batch_of, quiet
from tests.training.test_monitor_causes import named

LAG, K3 = "offcorr/staleness/lag", "offcorr/staleness/k3"


def staleness(monitor, gaps, lags, *, name="staleness", engine=True, **versions):
    """The alarms of a run whose k3 is half the square of each gap, at each reported lag.

    engine: False: the sampler reports no log-probs.
    """
    for step, (gap, lag) in enumerate(zip(gaps, lags, strict=True), 1):
        logp = batch_of(0.0, seed=step).logp
        noise = gap * torch.randn(logp.shape, generator=torch.Generator().manual_seed(step))
        batch = batch_of(0.0, seed=step, **{key: value(step, lag) for key, value in versions.items()})
        unscored = {} if engine else {"rollout_logp": torch.full_like(logp, torch.nan), "old_logp": logp}
        monitor.observe(batch.replaced(logp=logp + noise, **unscored), step=step)
        k3 = {f"offcorr/{name}/k3": gap**2 / 2, "offcorr/staleness/ess_token": 1.0 if gap < 1 else 0.1}
        monitor.end(step, k3 | {LAG: float(lag), "offcorr/staleness/lag_max": float(lag)})
    return monitor.alarms


def test_updates_within_a_generation_are_the_trainers():
    """No new weights were due: the learning rate comes first in the advice."""
    (alarm,) = staleness(quiet(name_cause=named("stale_weights")), [0.0, 1.0, 1.5, 2.0], [0, 1, 2, 3])
    assert (alarm.step, alarm.cause) == (4, "policy_updates") and alarm.advice.startswith("lower the learning rate")
    assert "are of weights that are up to 3 updates old, and sampler and trainer agreed when these weights" in str(
        alarm
    )
    assert "no new weights were due" in str(alarm) and "still receives" not in str(alarm)


def test_updates_are_seen_without_log_probs_of_the_sampler():
    """As TRL's own generation reports none: old_logp, which the trainer computed as the generation was new, stands for
    them."""
    (alarm,) = staleness(quiet(), [0.0, 1.0, 1.5, 2.0], [0, 1, 2, 3], engine=False)
    assert (alarm.step, alarm.cause) == (4, "policy_updates") and alarm.advice.startswith("lower the learning rate")
    assert "the sampler reports no log-probs" in str(alarm) and "still receives" not in str(alarm)
    first, *_ = staleness(quiet(), [1.0, 1.0, 1.5, 2.0], [0, 1, 2, 3], engine=False)
    assert first.cause == "unknown" and "switch dropout off" in first.advice


@pytest.mark.parametrize("sampled_by", [0, 7])
def test_versions_of_one_generation_say_no_more(sampled_by):
    """All its samples have one, whether or not the sampler ever gets new weights."""
    versions = {
        "rollout_version": lambda step, lag: torch.full((8, 64), sampled_by),
        "trainer_version": lambda step, lag: sampled_by + int(lag),
    }
    (alarm,) = staleness(quiet(name_cause=named("stale_weights")), [0.0, 1.0, 1.5, 2.0], [0, 1, 2, 3], **versions)
    assert (alarm.step, alarm.cause) == (4, "policy_updates")


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(("first", "cause"), [(0.0, "policy_updates"), (0.5, "stale_weights")])
def test_a_generation_of_more_sequences_than_are_kept_began_equal_all_the_same(versions, engine, first, cause):
    """The last sequences are of its last steps alone, and k3 of its first step says how it began."""
    logged = {
        "rollout_version": lambda step, lag: torch.full((64, 64), 0),
        "trainer_version": lambda step, lag: int(lag),
    }
    monitor = quiet(name_cause=named("stale_weights"))
    for step, gap in enumerate([first, 1.0, 1.5, 2.0, 2.5, 3.0], 1):
        batch = batch_of(0.0, seed=step, rows=64)
        given = {name: value(step, step - 1) for name, value in logged.items()} if versions else {}
        unscored = {} if engine else {"rollout_logp": torch.full_like(batch.logp, torch.nan), "old_logp": batch.logp}
        noise = gap * torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(step))
        monitor.observe(batch.replaced(logp=batch.logp + noise, **given, **unscored), step=step)
        k3 = {K3: gap**2 / 2, "offcorr/staleness/ess_token": 1.0 if gap < 1 else 0.1}
        monitor.end(step, k3 | {LAG: step - 1.0, "offcorr/staleness/lag_max": step - 1.0})
    assert monitor.alarms[0].cause == (cause if engine or not first else "unknown")


def test_a_generation_that_begins_far_apart_began_no_equal():
    """As of rows in another order: the updates make the gap seven times larger, and it was there before."""
    alarms = staleness(quiet(name_cause=named("stale_weights")), [0.4, 2.0, 2.5, 3.0], [0, 1, 2, 3])
    assert alarms and {alarm.cause for alarm in alarms} == {"stale_weights"}


def test_a_generation_that_begins_with_a_gap_is_of_old_weights():
    """The sampler never got the weights of the first generation's updates: not said in that one, but in the next."""
    monitor = quiet(name_cause=named("stale_weights"))
    found = staleness(monitor, [0.0, 1.0, 1.5, 2.0, 3.0, 4.1, 4.2], [0, 1, 2, 3, 0, 1, 2])
    assert [(alarm.step, alarm.cause, alarm.revises) for alarm in found] == [
        (4, "policy_updates", ""),
        (6, "stale_weights", "policy_updates"),
    ]


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("every", [1, 4])
def test_a_log_that_averages_over_generations(every, engine):
    """With logging_steps=4 no logged lag is 0; the records of the steps show where a generation began."""
    monitor = quiet(name_cause=named("stale_weights"))
    gaps, lags = [0.0, 1.0, 1.5, 2.0] * 4, [0, 1, 2, 3] * 4
    for step, gap in enumerate(gaps, 1):
        batch = batch_of(0.0, seed=step)
        unscored = {} if engine else {"rollout_logp": torch.full_like(batch.logp, torch.nan), "old_logp": batch.logp}
        monitor.observe(batch.replaced(logp=batch.logp + gap, **unscored), step=step)
        if step % every == 0:
            last = lags[step - every : step]
            mean = {K3: sum(g * g / 2 for g in gaps[step - every : step]) / every, LAG: sum(last) / every}
            monitor.end(step, mean | {"offcorr/staleness/lag_max": max(last), "offcorr/staleness/ess_token": 0.1})
    assert {alarm.cause for alarm in monitor.alarms} == {"policy_updates"}


@pytest.mark.parametrize(
    ("version", "cause"),
    [
        (lambda step, lag: step - lag, "policy_updates"),  # syncs arrive
        (lambda step, lag: 0 * step, "stale_weights"),  # none does
    ],
)
def test_versions_that_move_say_that_syncs_arrive(version, cause):
    records = []
    for step in range(6, 12):
        one = {"prompt_ids": np.array([1]), "completion_ids": np.arange(4), "rollout_logp": np.full(4, -1.0)}
        trainer = {"trainer_version": step, "rollout_version": version(step, 2 + step % 3)}
        records.append(Record(**one, old_logp=np.full(4, -1.5), step=step, **trainer))
    series = quiet()._series["staleness"]
    said = of_own_updates(series, records)
    assert bool(said) == (cause == "policy_updates")
    if said:
        assert (
            "receives new weights (version 4 to 7 in these sequences)" in said and "are 2 to 4 versions older" in said
        )
        series.aged = True  # the lag has risen since the first steps
        assert of_own_updates(series, records) == ""


@pytest.mark.parametrize(
    ("before", "gaps", "cause"),
    [
        (0.0, [0.01, 0.02, 0.03], "adapter_not_synced"),  # it grows with every update
        (0.0, [0.03, 0.031, 0.029], "precision"),  # it came at once, and stays
        (0.003, [0.011, 0.02, 0.03], "adapter_not_synced"),
        (0.003, [0.02, 0.025, 0.03], "precision"),  # within what noise makes
    ],
)
def test_a_gap_that_begins_in_the_run_and_grows_is_no_rounding(before, gaps, cause):
    monitor = quiet(name_cause=named("precision"))
    (alarm,) = staleness(monitor, [before] * 30 + gaps, [0] * 33)
    assert (alarm.step, alarm.cause) == (33, cause)
    assert ("this gap came at once" in str(alarm)) == (before == 0 and cause == "precision")


GROWS = [0.0] + [0.1 * step for step in range(1, 12)]


@pytest.mark.parametrize(
    ("gaps", "lags", "step"),
    [
        (GROWS, [0] * 12, 8),
        (GROWS, range(12), None),  # a lag that is reported explains it
        ([0.0] + [min(0.03 * step, 0.2) for step in range(1, 12)], [0] * 12, None),  # levels off, and is small
        ([0.01, *GROWS[1:]], [0] * 12, None),  # an engine that never agreed
    ],
)
def test_a_sampler_that_was_never_updated_is_an_alarm_of_its_own(gaps, lags, step):
    """Long before the effective sample size is below its limit."""
    monitor = quiet(name_cause=named("stale_weights"))
    found = [alarm for alarm in staleness(monitor, gaps, lags) if alarm.severity == "warning"]
    assert [alarm.step for alarm in found] == ([] if step is None else [step])
    if found:
        assert found[0].cause == "adapter_not_synced" and "the sampler was never updated" in str(found[0])
        assert monitor.numbers()["offcorr/monitor/staleness"] > 1


def test_an_alarm_on_a_sampler_that_was_never_updated_holds_until_the_gap_falls():
    """Where the gap grows more slowly than its noise no step has the largest k3, and it is as large as ever."""
    gaps = [*(0.05 * step for step in range(8)), *[0.3, 0.33] * 15]
    monitor = quiet(name_cause=named("stale_weights"))
    found = staleness(monitor, gaps, [0] * len(gaps))
    assert len([alarm for alarm in found if not alarm.revises]) == 1
    assert all(alarm.cause == "adapter_not_synced" for alarm in found)
    assert monitor.numbers()["offcorr/monitor/staleness"] > 1
    staleness(monitor, [0.0] * 3, [0] * 3)  # new weights have arrived
    assert "offcorr/monitor/staleness" not in monitor.numbers()


def test_a_noisy_gap_that_stays_is_an_alarm_after_some_steps():
    """It did not grow from step to step, so that no trend says so; the reported lag is 0."""
    gaps = [0.0, 0.9] + [0.4, 0.6] * 12
    (alarm, *_) = staleness(quiet(name_cause=named("stale_weights")), gaps, [0] * len(gaps))
    assert (alarm.step, alarm.cause) == (17, "adapter_not_synced")
    assert "k3 has been above 0.03 in the last 16 steps, although the reported lag is 0" in str(alarm)
    assert staleness(quiet(name_cause=named("stale_weights")), gaps, [4] * len(gaps)) == []


def test_a_sampler_that_was_updated_at_first_is_not_called_never_updated():
    gaps = [0.0] * 8 + [0.1 * step for step in range(1, 30)]
    first, *_, last = staleness(quiet(name_cause=named("stale_weights")), gaps, [0] * len(gaps))
    assert last.cause == first.cause == "stale_weights" and "never updated" not in str(last)
    assert "agreed up to step 8, and k3 has grown since" in str(last)
    assert "updates had not reached the sampler since step 8" in str(last)


@pytest.mark.parametrize(("engine", "cause"), [(0.001, "stale_weights"), (0.3, "chat_template")])
def test_where_the_sampler_agrees_with_old_logp_no_other_prompt_makes_the_gap(engine, cause):
    """Larger updates at a lag that stays make it, in a policy that differs most at the first tokens."""

    def name_cause(records):
        return dataclasses.replace(diagnose(records), verdict="chat_template", confidence=0.5, causes=())

    monitor = quiet(name_cause=name_cause)
    monitor.lag = 4
    for step in range(1, 35):
        gap = 1e-4 if step < 3 else 0.03 if step < 26 else 0.5
        batch = batch_of(0.0, seed=step)
        versions = {"rollout_version": torch.full(batch.logp.shape, step), "trainer_version": step + 4}
        noise = torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(step))
        moved = batch.replaced(
            logp=batch.logp + gap * noise, rollout_logp=batch.old_logp + engine * noise.flip(0), **versions
        )
        monitor.observe(moved, step=step)
        k3 = {"offcorr/staleness/k3": gap**2 / 2, "offcorr/staleness/ess_token": 1.0}
        monitor.end(step, k3 | {LAG: 4.0, "offcorr/staleness/lag_max": 4.0})
    alarm = next(alarm for alarm in monitor.alarms if alarm.series == "staleness")
    assert alarm.cause == cause and alarm.moved
    assert ("this run's own lag of 4" in str(alarm)) == (cause == "stale_weights")


@pytest.mark.parametrize(("at_lag_0", "cause"), [(0.03, "adapter_not_synced"), (1e-6, "policy_updates")])
def test_versions_that_say_that_weights_arrive_are_refuted_by_the_gap_at_lag_0(at_lag_0, cause):
    """k3 of samples that are reported to be of the newest weights; the first ones had none."""
    records = []
    for step in range(6, 12):
        one = {"prompt_ids": np.array([1]), "completion_ids": np.arange(4), "rollout_logp": np.full(4, -1.0)}
        versions = {"trainer_version": step, "rollout_version": 4 * (step // 4)}
        records.append(Record(**one, old_logp=np.full(4, -1.5), step=step, **versions))
    series = quiet()._series["staleness"]
    series.size, series.new_size = 0.04, at_lag_0
    report = SimpleNamespace(verdict="stale_weights", confidence=0.5, causes=[], evidence=Evidence.of(records))
    found = named_cause(series, report, {}, records=records)
    assert found.cause == cause
    assert ("by the versions new weights arrive, and by d they do not" in " ".join(found.evidence)) == (at_lag_0 > 0.01)


def test_what_to_do_comes_before_the_evidence():
    alarm = Alarm(3, "engine", "warning", "precision", 0.5, ("k3 1", "more"), "keep it.", ("warn",))
    assert str(alarm) == (
        "step 3: the engine's log-probs have moved away from the trainer's (warning); cause: precision (confidence "
        "0.50 among the known causes): keep it. Evidence (d: the trainer's log-prob of a token less the sampler's, in "
        "nats): k3 1; more."
    )
    assert str(dataclasses.replace(alarm, evidence=())).endswith("among the known causes): keep it.")


@pytest.mark.parametrize("option", ["repetition_penalty", "presence_penalty", "top_p", "top_k", "min_p"])
def test_a_difference_of_unknown_origin_names_the_sampling_options(option):
    assert f"{option}=" in MENDS["differs"]


def test_the_state_is_of_plain_numbers_and_an_older_one_is_read():
    monitor = quiet(name_cause=named("stale_weights"))
    staleness(monitor, [0.0, 1.0, 1.5, 2.0], [0, 1, 2, 3])
    state = monitor.state_dict()
    assert state["staleness"]["new_size"] == pytest.approx(1e-7)
    for name in ("new_size", "left_size"):
        del state["staleness"][name]
    quiet().load_state_dict(state)


def test_a_reported_lag_explains_the_first_batch():
    """Where the anchor has no log-probs of the weights that sampled."""
    batch = batch_of(0.2, rollout_version=torch.full((8, 64), 2), trainer_version=5)
    sentence = offcorr.training.Step(offcorr.get("tis")).semantics(batch.replaced(old_logp=None)).sentence
    assert "as those of other weights do" in sentence and "as lag 3 and this anchor make it" in sentence


def test_settings_are_named_where_the_samples_are_always_new():
    """Lag 0: the trainer has made no update since, so a temperature stays one."""
    report = SimpleNamespace(verdict="temperature", confidence=0.9, causes=[])
    found = staleness(quiet(name_cause=lambda records: report), [0.0] + [1.2] * 4, [0] * 5)
    assert {alarm.cause for alarm in found} == {"temperature"}
