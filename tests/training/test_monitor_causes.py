"""The cause of an alarm: none, one that changes while the alarm is on, and one that the configuration tells."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import offcorr
from offcorr.diagnose import Finding, diagnose
from offcorr.diagnose.diagnosis import OF_OTHER_CHANGES
from offcorr.training import Monitor, Step
from offcorr.training.last_batches import NothingToCompare
from offcorr.training.monitor import PREFIX
from offcorr.training.named_cause import named_cause
from tests.diagnose.simulated import noise, world
from tests.training.test_monitor import FAULTY, batch_of, quiet

pytestmark = pytest.mark.filterwarnings("ignore:step")


def run(monitor, gaps):
    for step, gap in enumerate(gaps, 1):
        monitor.observe(batch_of(gap, seed=step), step=step)
        monitor.end(step)
    return monitor.alarms


def named(*verdicts):
    """Name these causes, one after the other, and the last one from then on."""
    left = list(verdicts)

    def name_cause(records):
        verdict = left.pop(0) if len(left) > 1 else left[0]
        return SimpleNamespace(verdict=verdict, confidence=1.0, causes=[])

    return name_cause


@pytest.mark.parametrize("action", ["mask", "stop", "dump"])
def test_an_alarm_without_a_cause_does_not_contradict_itself(action, tmp_path):
    """Its text says what to look at, and nothing is masked or stopped; a file is written."""
    monitor = quiet(warning=action, folder=tmp_path, name_cause=named("clean"))
    (alarm,) = run(monitor, FAULTY)
    assert "cause: clean" not in str(alarm) and "confidence" not in str(alarm)
    assert "the last sequences show no cause (offcorr diagnose calls them clean)" in str(alarm)
    assert "What to look at: score the same tokens" in str(alarm)
    assert not monitor.stopped and monitor.masked(batch_of(0.5)).weight is None
    assert alarm.actions == (("dump",) if action == "dump" else ("warn",)) and (alarm.dump is None) == (
        action != "dump"
    )


@pytest.mark.parametrize(("others", "acts"), [([1.0, 1.0], False), ([1.0, -1.0], True), ([1.0, 0.0], False)])
def test_what_is_held_back_is_decided_by_all_ranks(others, acts):
    """Another rank has found a cause, where its flag is -1."""
    monitor = quiet(warning=["log", "stop"], name_cause=named("clean"))
    monitor.raises, monitor.gather = False, lambda vector: vector[None] if len(vector) > 1 else torch.tensor([others]).T
    run(monitor, FAULTY)
    assert monitor.stopped == acts


def test_a_cause_that_is_found_later_acts():
    monitor = quiet(warning=["log", "stop"], name_cause=named("clean", "stale_weights"))
    monitor.raises = False
    first, second = run(monitor, [0.003] * 25 + [0.05] * 25)
    assert first.actions == ("log",) and second.actions == ("log", "stop") and monitor.stopped
    assert (first.cause, second.cause, second.revises) == ("clean", "stale_weights", "clean")


def test_the_cause_is_looked_at_again_after_20_steps_and_said_if_it_changed():
    same = run(quiet(name_cause=named("precision")), [0.003] * 25 + [0.03] * 70)
    assert [alarm.step for alarm in same] == [28]
    changed = run(quiet(name_cause=named("precision", "precision", "dropout")), [0.003] * 25 + [0.03] * 70)
    assert [(alarm.step, alarm.cause, alarm.revises) for alarm in changed] == [
        (28, "precision", ""),
        (68, "dropout", "precision"),
    ]
    assert "cause: dropout (confidence 1.00 among the known causes; 'precision' was named before)" in str(changed[1])


def test_the_cause_is_looked_at_again_when_the_gap_has_grown():
    found = run(quiet(name_cause=named("precision", "dropout")), [0.003] * 25 + [0.03] * 5 + [0.09] * 3)
    assert [(alarm.step, alarm.cause) for alarm in found] == [(28, "precision"), (31, "dropout")]
    assert "times that at the alarm of step 28" in found[1].evidence[0]


@pytest.mark.parametrize(("sure", "causes"), [(0.65, ["stale_weights"]), (0.9, ["stale_weights", "temperature"])])
def test_older_weights_that_come_to_look_like_a_temperature_stay_older_weights(sure, causes):
    """Updates that the sampler does not get sharpen the policy; a fit that leaves nothing else is a temperature."""
    verdicts = iter([("stale_weights", 0.7)])

    def name_cause(records):
        verdict, confidence = next(verdicts, ("temperature", sure))
        return SimpleNamespace(verdict=verdict, confidence=confidence, causes=[])

    found = run(quiet(name_cause=name_cause), [0.003] * 25 + [0.03] * 5 + [0.09] * 45)
    assert [alarm.cause for alarm in found] == causes


def test_an_alarm_names_the_temperature_that_its_evidence_speaks_of():
    cold = [
        Finding("stale_weights", 0.5, 1, 0, 1, 0.6, "older", f"d is large{OF_OTHER_CHANGES}", "sync"),
        Finding("temperature", 0.65, 1, 0, 1, 0.4, "a temperature", "a fit", "set it"),
    ]

    def name_cause(records):
        return SimpleNamespace(verdict="stale_weights", confidence=0.5, causes=cold)

    alarm = run(quiet(name_cause=name_cause), [0.003] * 25 + [0.03] * 5)[0]
    assert "the temperature is a second cause, temperature, of confidence 0.65" in str(alarm)


@pytest.mark.parametrize(
    ("gaps", "sure", "cause"),
    [
        ([0.0] * 25 + [0.02, 0.06, 0.12], 0.65, "adapter_not_synced"),  # updates that sharpen the trainer's policy
        ([0.0] * 25 + [0.02, 0.06, 0.12], 0.99, "temperature"),  # a fit that leaves nothing
        ([0.0] * 25 + [0.12] * 3, 0.65, "temperature"),  # one gap from its first step on
        ([0.01] * 25 + [0.1, 0.2, 0.4], 0.65, "temperature"),  # a gap that was there before
    ],
)
def test_what_looks_like_a_temperature_and_keeps_growing_is_updates_that_do_not_arrive(gaps, sure, cause):
    def name_cause(records):
        return SimpleNamespace(verdict="temperature", confidence=sure, causes=[])

    alarm = run(quiet(name_cause=name_cause), gaps)[0]
    assert (alarm.step, alarm.cause) == (28, cause)
    assert ("the log-probs alone would be taken for 'temperature'" in str(alarm)) == (cause == "adapter_not_synced")


@pytest.mark.parametrize("beside", [0.0, 0.01])
def test_a_temperature_that_leaves_nothing_stays_one_as_its_gap_grows(beside):
    """A policy that becomes sharper makes the gap of a temperature grow, and no older weights are one factor."""
    made = world("temperature", sequences=64)
    made.trainer = noise(beside)
    report = diagnose(made.records())
    assert report.verdict == "temperature"
    unsure = dataclasses.replace(report, confidence=0.5)
    alarm = run(quiet(name_cause=lambda records: unsure), [0.0] * 25 + [0.02, 0.06, 0.12])[0]
    assert alarm.cause == ("adapter_not_synced" if beside else "temperature")


@pytest.mark.parametrize("setting", ["top_p", "top_k", "logit_mask"])
def test_a_truncation_whose_gap_grows_is_no_update(setting):
    """It moves all tokens to one side, and the mean ratio below 1, as no weights do."""

    def name_cause(records):
        return SimpleNamespace(verdict=setting, confidence=0.5, causes=[])

    assert run(quiet(name_cause=name_cause), [0.0] * 25 + [0.02, 0.06, 0.12])[0].cause == setting


@pytest.mark.parametrize("setting", ["repetition_penalty", "raw_logprobs", "logit_bias"])
def test_what_looks_like_a_setting_and_keeps_growing_is_updates_that_do_not_arrive(setting):
    def name_cause(records):
        return SimpleNamespace(verdict=setting, confidence=0.6, causes=[])

    for growing in (True, False):
        after = [0.02, 0.06, 0.12] if growing else [0.12] * 3
        alarm = run(quiet(name_cause=name_cause), [0.0] * 25 + after)[0]
        assert alarm.cause == ("adapter_not_synced" if growing else setting)


@pytest.mark.parametrize(
    ("gaps", "cause"),
    [
        ([0.0, 0.05, 0.1, 0.15, 0.2, 0.25], "adapter_not_synced"),  # a copy of the model that gets no updates
        ([0.0] * 25 + [0.12] * 3, "chat_template"),  # a gap that begins at once, as with another engine
        ([0.2] * 6, "chat_template"),  # and from the first step on
        ([0.1, 0.15, 0.2, 0.25, 0.3], "chat_template"),
    ],
)
def test_what_looks_like_another_prompt_and_grows_from_nothing_is_updates_that_do_not_arrive(gaps, cause):
    def name_cause(records):
        return SimpleNamespace(verdict="chat_template", confidence=0.5, causes=[])

    alarm = run(quiet(name_cause=name_cause), gaps)[0]
    assert alarm.cause == cause
    grown = cause != "chat_template"
    assert ("as where updates do not reach the sampler" in str(alarm)) == grown and alarm.confidence == 0.5
    assert ("what changed in the course of the run, such as the prompt" in str(alarm)) == grown


def test_an_alarm_says_what_else_the_data_may_be():
    monitor, direction = quiet(), torch.randn(16, generator=torch.Generator().manual_seed(1))
    for step in range(1, 40):
        batch, ids = drifting(step, 20 * direction)
        monitor.observe(batch, step=step, prompt_ids=[[1]] * 8, completion_ids=ids)
        monitor.end(step)
    unsure = [alarm for alarm in monitor.alarms if alarm.confidence <= 0.65]
    assert unsure and all("logged data do not tell it from" in str(alarm) for alarm in unsure)


def test_another_series_of_the_same_fault_has_the_same_cause():
    """Older weights in the engine's gap, and the tokens' surprise some steps later."""
    names = iter([("stale_weights", 0.7)])

    def name_cause(records):
        verdict, sure = next(names, ("temperature", 0.65))
        return SimpleNamespace(verdict=verdict, confidence=sure, causes=[])

    monitor = quiet(name_cause=name_cause)
    for step in range(1, 40):
        monitor.observe(batch_of(0.003 if step <= 25 else 0.05, seed=step), step=step)
        surprise = {"field/surprise": 0.0 if step <= 30 else 0.5, "field/surprise_error": 0.02}
        monitor.end(step, {"offcorr/engine/k3": 4e-6 if step <= 25 else 1e-3} | surprise)
    assert [(alarm.series, alarm.cause) for alarm in monitor.alarms] == [
        ("engine", "stale_weights"),
        ("surprise", "stale_weights"),
    ]


@pytest.mark.parametrize(
    ("gap", "verdicts", "causes"),
    [
        (0.01, ["top_k", "precision"], ["temperature"]),  # each look finds another
        (0.01, ["top_k", "temperature", "top_k", "temperature"], ["temperature"]),
        (0.01, ["top_k"], ["temperature", "top_k"]),  # two looks in a row
        (0.03, ["top_k", "precision"], ["temperature", "top_k", "precision"]),  # the gap is as it was
    ],
)
def test_a_weaker_gap_needs_more_evidence_for_another_cause(gap, verdicts, causes):
    """An alarm at a k3 of 4.5e-4; the looks after 20 and 40 steps are at this gap."""
    found = run(quiet(name_cause=named("temperature", *verdicts)), [0.003] * 25 + [0.03] * 5 + [gap] * 40)
    assert [alarm.cause for alarm in found] == causes


def test_less_confidence_in_a_weaker_gap_is_not_more_evidence():
    def unsure(records):
        return SimpleNamespace(**vars(first(records)) | {"confidence": next(sure)})

    first, sure = named("temperature", "top_k"), iter([0.9, 0.6, 0.6, 0.6])
    found = run(quiet(name_cause=unsure), [0.003] * 25 + [0.03] * 5 + [0.01] * 60)
    assert [alarm.cause for alarm in found] == ["temperature"]


def drifting(step, direction):
    """Log-probs of eight sequences of 64 tokens over 16 ids, the trainer's further off with each step after 20."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 16, (8, 64), generator=draw)
    rollout = -1.5 - torch.rand(8, 64, generator=draw)
    old = rollout + (0.0008 + 0.0004 * max(step - 20, 0)) * direction[ids]
    batch = offcorr.Batch(
        logp=old, old_logp=old, rollout_logp=rollout, advantages=torch.ones(8), mask=torch.ones(8, 64).bool()
    )
    return batch, ids.tolist()


def test_a_gap_that_keeps_growing_is_no_precision():
    """A sampler that gets no weights: at first d is as small as that of a lower precision."""
    monitor, direction = quiet(), torch.randn(16, generator=torch.Generator().manual_seed(1))
    for step in range(1, 60):
        batch, ids = drifting(step, direction)
        monitor.observe(batch, step=step, prompt_ids=[[1]] * 8, completion_ids=ids)
        monitor.end(step)
    causes = [alarm.cause for alarm in monitor.alarms]
    assert causes[-1] == "adapter_not_synced" and len(causes) == len(set(causes)) <= 2


def test_what_the_configuration_says_is_the_cause():
    monitor = quiet(name_cause=named("unnormalised"))
    monitor.sampling = {"top_p": 0.5}
    (alarm,) = run(monitor, FAULTY)
    assert alarm.cause == "top_p" and "the configuration sets top_p=0.5" in str(alarm)
    assert "'unnormalised'" in str(alarm) and "top_p=1.0" in alarm.advice
    monitor = quiet(name_cause=named("stale_weights"))
    monitor.sampling = {"top_p": 0.5}
    assert run(monitor, FAULTY)[0].cause == "stale_weights"


def test_a_fault_from_the_first_step_on_has_not_moved_anything():
    """It is beyond a fixed limit, by a number that the log says."""
    step = Step(offcorr.get("tis"), monitor=Monitor(warning="log", critical="log", self_test="off"))
    for version in range(1, 6):
        step.begin(tokens=512)
        step.loss(step.place(batch_of(0.5, seed=version)))
        step.end(version)
        logged = step.metrics()
    alarm = step.monitor.alarms[0]
    assert alarm.step == 3 and "the engine's log-probs are far from the trainer's (critical)" in str(alarm)
    assert "moved" not in str(alarm)
    assert logged[PREFIX + "engine"] == pytest.approx(logged["offcorr/engine/k3"] / 0.015)


@pytest.mark.parametrize(
    ("same_weights", "precision", "cause"),
    [(False, None, "stale_weights"), (True, "int4", "precision"), (True, "fp32", "unknown"), (True, None, "unknown")],
)
def test_the_age_of_weights_explains_no_gap_between_two_of_the_same(same_weights, precision, cause):
    """With anchor="snapshot" both log-probs are of the weights that sampled, whatever the lag."""
    monitor = quiet(name_cause=named("stale_weights"))
    monitor.same_weights, monitor.precision = same_weights, precision
    (alarm,) = run(monitor, FAULTY)
    assert alarm.cause == cause
    assert ("old_logp is of" in str(alarm)) == same_weights


def test_a_diagnosis_without_log_probs_of_the_engine_is_a_sentence():
    monitor = quiet()
    for step in range(1, 6):
        batch = batch_of(0.0, seed=step)
        unscored = batch.replaced(rollout_logp=torch.full_like(batch.logp, torch.nan), old_logp=0.5 * batch.logp)
        monitor.observe(unscored, step=step)
        monitor.end(step)
    (alarm, *_) = [alarm for alarm in monitor.alarms if alarm.series == "staleness"]
    assert "the sampler reports no log-probs" in str(alarm) and "ValueError" not in str(alarm)


@pytest.mark.parametrize(
    ("ages", "gaps", "cause"),
    [
        ([8], [0.003] * 2 + [0.3] * 4, "stale_weights"),
        ([0], [0.003] * 2 + [0.3] * 4, "temperature"),  # the same weights
        ([8, 0], [0.003] * 2 + [0.3] * 4, "temperature"),  # half of the samples have no age, and differ as much
        ([8], [0.2] * 2 + [0.3] * 4, "temperature"),  # from the first step on
        ([8], [0.003] * 25 + [0.1] * 4, "temperature"),  # a change within the run, at an age that stays
    ],
)
def test_a_reported_age_is_named_before_a_setting_that_the_first_steps_do_not_show(ages, gaps, cause):
    """Updates that sharpen the policy look like a temperature; a setting would have made its gap from the start."""
    records = [SimpleNamespace(rollout_version=1, trainer_version=1 + age, step=None) for age in ages]
    evidence = SimpleNamespace(records=records, sequence=np.arange(len(ages)), size=np.ones(len(ages)), ageless=False)

    def name_cause(records):
        return SimpleNamespace(verdict="temperature", confidence=0.9, causes=[], evidence=evidence)

    alarm = run(quiet(name_cause=name_cause), gaps)[0]
    assert alarm.cause == cause
    assert ("the log-probs alone would be taken for 'temperature'" in str(alarm)) == (cause == "stale_weights")


def fading(step, lag):
    """Eight sequences whose d is larger in the first tokens, the more the older the weights that sampled."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 16, (8, 64), generator=draw)
    rollout = -1.5 - torch.rand(8, 64, generator=draw)
    by_id = torch.randn(16, generator=torch.Generator().manual_seed(1))
    old = rollout + (0.002 + 0.02 * lag) * (0.3 + 2 * torch.exp(-torch.arange(64) / 12)) * by_id[ids]
    return offcorr.Batch(
        logp=old,
        old_logp=old,
        rollout_logp=rollout,
        advantages=torch.ones(8),
        mask=torch.ones(8, 64).bool(),
        rollout_version=torch.full((8, 64), step - 1 - lag),
        trainer_version=step - 1,
    ), ids.tolist()


@pytest.mark.parametrize(
    ("set_lag", "reported", "cause"),
    [(16, True, "stale_weights"), (None, True, "stale_weights"), (None, False, "stale_prefix_cache")],
)
def test_a_lag_that_is_known_is_named_before_an_old_prefix_cache(set_lag, reported, cause):
    """The sampler falls behind by up to 16 updates, and d is largest at the first tokens of the completions."""
    monitor = quiet()
    monitor.lag = set_lag
    for step in range(1, 21):
        batch, ids = fading(step, min(step - 1, 16))
        if not reported:
            batch = batch.replaced(rollout_version=None, trainer_version=None)
        monitor.observe(batch, step=step, prompt_ids=[[1]] * 8, completion_ids=ids)
        monitor.end(step)
    assert {alarm.cause for alarm in monitor.alarms} == {cause}
    said = str(monitor.alarms[0])
    assert ("this run's own lag of 16" in said and "anchor='snapshot'" in said) == (set_lag == 16)
    assert ("the log-probs alone would be taken for 'stale_prefix_cache'" in said) == reported


@pytest.mark.parametrize("verdict", ["chat_template", "truncated_prompt"])
@pytest.mark.parametrize("precision", ["int4", None])
def test_a_sampler_of_known_precision_reads_no_other_prompt(verdict, precision):
    monitor = quiet(name_cause=named(verdict))
    monitor.precision = precision
    for step in range(1, 6):
        monitor.observe(batch_of(0.3, seed=step), step=step)
        monitor.end(step, {"offcorr/engine/k3": 0.045, "field/mult_error": 1.3, "offcorr/staleness/lag": 0.0})
    assert monitor.alarms[0].cause == ("precision" if precision else verdict)


@pytest.mark.parametrize(("grown", "cause"), [(True, "stale_weights"), (False, "precision")])
def test_a_gap_that_grows_is_not_of_the_known_precision_alone(grown, cause):
    """The sampler reports no version, so that a lag of 0 is the least it can be."""
    monitor = quiet(name_cause=named("stale_weights"))
    monitor.precision = "int8"
    for step in range(1, 6):
        gap = 0.06 * step if grown else 0.3
        monitor.observe(batch_of(gap, seed=step), step=step)
        monitor.end(step, {"offcorr/engine/k3": gap**2 / 2, "field/mult_error": 1 + gap, "offcorr/staleness/lag": 0.0})
    alarm = monitor.alarms[0]
    assert alarm.cause == cause
    assert ("which by itself leaves about the same gap in every step" in str(alarm)) == grown


@pytest.mark.parametrize(
    ("precision", "gaps", "cause", "said"),
    [
        ("int4", [0.3] * 4, "precision", "the sampler's weights are int4, and k3, 0.045, was 0.045 of samples without"),
        ("int4", [0.03] + [0.3] * 4, "stale_weights", "this run's own lag of 4"),
        ("fp32", [0.3] * 4, "stale_weights", "no lag makes this gap"),
        (None, [0.03] + [0.3] * 4, "stale_weights", "this run's own lag of 4"),
    ],
)
def test_a_gap_that_was_there_before_the_lag_is_not_the_lags(precision, gaps, cause, said):
    records = [SimpleNamespace(rollout_version=1, trainer_version=3, step=None)]
    evidence = SimpleNamespace(records=records, sequence=np.zeros(1, int), size=np.ones(1), ageless=False)
    monitor = quiet(
        name_cause=lambda records: SimpleNamespace(
            verdict="stale_weights", confidence=0.73, causes=[], evidence=evidence
        )
    )
    monitor.lag, monitor.precision = 4, precision
    for step, gap in enumerate(gaps, 1):
        monitor.observe(batch_of(gap, seed=step), step=step)
        lagging = {"offcorr/engine/k3": gap**2 / 2, "field/mult_error": 1.0 + gap}
        monitor.end(step, lagging | {"offcorr/staleness/lag": min(step - 1.0, 4.0)})
    alarm = monitor.alarms[0]
    assert alarm.cause == cause and said in str(alarm)
    assert ("no fault to look for" in str(alarm)) == ("own lag" in said)


@pytest.mark.parametrize(
    ("verdict", "ages", "gaps", "first_lag", "cause"),
    [
        ("retokenised", [16], [0.05] + [0.18] * 3, 1.5, "stale_weights"),  # a policy that gave up tokens
        ("temperature", [16], [0.05] + [0.18] * 3, 1.5, "stale_weights"),  # the first logged step shows a part of it
        ("temperature", [16], [0.05] + [0.18] * 3, 0.0, "temperature"),
        ("temperature", [16], [0.17] + [0.18] * 3, 1.5, "temperature"),  # from the first step on
        ("unknown", [16], [0.05] + [0.18] * 3, 1.5, "stale_weights"),
        ("stale_prefix_cache", [16], [0.17] + [0.18] * 3, 1.5, "stale_weights"),
        ("stale_prefix_cache", [0], [0.17] + [0.18] * 3, 1.5, "stale_prefix_cache"),  # the weights of now
        (
            "stale_prefix_cache",
            [16],
            [0.003] * 25 + [0.1] * 4,
            16.0,
            "stale_prefix_cache",
        ),  # on top of a lag that stays
        ("shift", [16], [0.05] + [0.18] * 3, 1.5, "shift"),  # no lag makes it
        ("retokenised, surely", [16], [0.05] + [0.18] * 3, 1.5, "retokenised"),  # the rest agrees
    ],
)
def test_the_runs_own_lag_hides_no_cause_on_top_of_it(verdict, ages, gaps, first_lag, cause):
    verdict, _, surely = verdict.partition(", ")
    sure = 0.8 if surely or verdict != "retokenised" else 0.65
    records = [SimpleNamespace(rollout_version=1, trainer_version=1 + age, step=None) for age in ages]
    evidence = SimpleNamespace(records=records, sequence=np.arange(len(ages)), size=np.ones(len(ages)), ageless=False)
    monitor = quiet(
        name_cause=lambda records: SimpleNamespace(verdict=verdict, confidence=sure, causes=[], evidence=evidence)
    )
    monitor.lag = 16
    for step, gap in enumerate(gaps, 1):
        monitor.observe(batch_of(gap, seed=step), step=step)
        k3 = {"offcorr/engine/k3": gap**2 / 2, "field/mult_error": 1.0 + gap}
        monitor.end(step, k3 | {"offcorr/staleness/lag": first_lag if step == 1 else 16.0})
    assert monitor.alarms[0].cause == cause
    assert ("this run's own lag of 16" in monitor.alarms[0].advice) == (cause == "stale_weights")


def test_an_alarm_of_surprise_without_the_engines_log_probs_names_the_settings():
    nothing = NothingToCompare("the last sequences have no log-probs of the engine")
    surprise = SimpleNamespace(name="surprise", overdue=False)
    named = named_cause(surprise, nothing, {"top_p": 0.6})
    assert named.cause == "top_p" and named.evidence[-1] == "the configuration sets top_p=0.6"
    assert named_cause(surprise, nothing, {}).cause == "unknown"
    assert named_cause(SimpleNamespace(name="staleness", overdue=False), nothing, {"top_p": 0.6}).cause == "unknown"


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("series", ["engine", "staleness"])
def test_the_engines_gap_is_not_put_down_to_the_trainers_updates(series, beside):
    """They move ``logp``, and the engine's gap is between ``old_logp`` and ``rollout_logp``."""
    report = diagnose(world("policy_updates", *["precision"] * beside).records())
    assert report.verdict == "policy_updates" and ("precision" in {one.cause for one in report.causes}) == beside
    alarm = quiet()._series[series]
    cause = named_cause(alarm, report, {}).cause
    assert cause == ("policy_updates" if series == "staleness" else "precision" if beside else "unknown")
