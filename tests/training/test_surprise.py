"""How often the surprise of a healthy sampler is an alarm, over thousands of steps of exact distributions."""

from __future__ import annotations

import json

import pytest
import torch

import offcorr
from offcorr.training import Monitor, Step, make_anchor
from offcorr.training.field_metrics import FIELD, LEFT_OUT, SKIPPED, field_metrics
from offcorr.training.series import SURPRISE


def batches(seed, steps, *, tokens=96, symbols=16, sharpest=2.0, ramp=100, temperature=1.0, fault=0):
    """Per step logp and entropy of tokens drawn from the policy, which begins uniform and becomes sharper.

    fault: the step from which on the tokens are drawn at ``temperature``.
    """
    draw = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        scale = (0.1 + (sharpest - 0.1) * min(step / ramp, 1)) * (0.3 + 1.4 * torch.rand(tokens, 1, generator=draw))
        logp = (scale * torch.randn(tokens, symbols, generator=draw)).log_softmax(-1)
        drawn_from = (logp / (temperature if fault and step >= fault else 1.0)).softmax(-1)
        drawn = torch.multinomial(drawn_from, 1, generator=draw)
        yield step, logp.gather(1, drawn).view(8, -1), -(logp.exp() * logp).sum(-1).view(8, -1)


def alarms(seed, steps, **settings):
    monitor = Monitor(warning="log", critical="log", self_test="off")
    for step, logp, entropy in batches(seed, steps, **settings):
        mask = torch.ones_like(logp).bool()
        batch = offcorr.Batch(logp=logp, old_logp=logp, advantages=torch.ones(8), mask=mask, entropy=entropy)
        monitor.end(step, field_metrics(batch, contains_rollout=False).compute())
    return [alarm.step for alarm in monitor.alarms]


@pytest.mark.parametrize("sharpest", [2.0, 12.0])
def test_a_policy_that_becomes_sharper_is_no_alarm(sharpest):
    """Five runs of 300 steps that begin nearly uniform, while the spread of -logp - entropy grows twenty-fold."""
    assert [alarms(seed, 300, sharpest=sharpest) for seed in range(5)] == [[]] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("sharpest", "ramp"), [(2.0, 100), (8.0, 300), (20.0, 600), (4.0, 1)])
def test_no_false_alarm_in_ten_thousand_steps(sharpest, ramp):
    """Ten runs of 1,000 steps in each setting."""
    assert [alarms(seed, 1000, sharpest=sharpest, ramp=ramp) for seed in range(10)] == [[]] * 10


def test_another_temperature_is_an_alarm():
    """From step 150 on, in a policy that has become sharp; with the tokens of a realistic batch."""
    for seed in range(3):
        found = alarms(seed, 170, tokens=512, sharpest=4.0, temperature=0.6, fault=150)
        assert len(found) == 1 and 152 <= found[0] <= 160


def test_the_standard_error_is_that_of_the_sample():
    """Merged over micro-batches, it is the spread of the mean over repeated samples."""
    runs = list(batches(0, 400, ramp=1, sharpest=4.0))
    means, errors = [], []
    for _, logp, entropy in runs:
        batch = offcorr.Batch(logp=logp, advantages=torch.ones(8), mask=torch.ones_like(logp).bool(), entropy=entropy)
        rows = torch.arange(8) < 4
        parts = [field_metrics(batch.rows(part), contains_rollout=False) for part in (rows, ~rows)]
        found = parts[0].merge(parts[1]).compute()
        assert found[FIELD + "surprise_error"] == pytest.approx(
            field_metrics(batch, contains_rollout=False).compute()[FIELD + "surprise_error"]
        )
        means.append(found[SURPRISE])
        errors.append(found[FIELD + "surprise_error"])
    spread, error = torch.tensor(means).std().item(), sum(errors) / len(errors)
    assert 0.7 * error < spread < 1.1 * error


@pytest.mark.parametrize(
    ("lag", "gap", "anchor", "watched"),
    [
        (16, 0.06, "recomputed", False),
        (0, 0.06, "recomputed", True),  # the weights of now
        (16, 0.001, "recomputed", True),  # they have hardly moved
        (16, 0.06, "snapshot", True),  # the engine's gap holds no lag
    ],
)
def test_surprise_is_not_watched_while_the_engines_gap_holds_the_lag(lag, gap, anchor, watched):
    """Tokens of older weights are surprising, and no series of staleness says so where ``old_logp`` is recomputed."""
    monitor = Monitor(warning="log", critical="log", self_test="off")
    step = Step(offcorr.get("tis"), anchor=make_anchor(anchor), monitor=monitor)
    for version, logp, entropy in batches(0, 30, tokens=512, ramp=1):
        batch = offcorr.Batch(
            logp=logp,
            old_logp=logp if anchor == "snapshot" else None,
            rollout_logp=logp - gap,
            advantages=torch.ones(8),
            mask=torch.ones_like(logp).bool(),
            entropy=entropy if version <= 25 else entropy + 0.5,
            rollout_version=torch.full(logp.shape, version - 1 - lag),
            trainer_version=version - 1,
        )
        step.begin(tokens=512)
        step.loss(step.place(batch))
        step.end(version)
        step.metrics()
    assert any(alarm.series == "surprise" for alarm in monitor.alarms) == watched


@pytest.mark.parametrize("fault", [1, 8, 15, 18])
def test_a_fault_within_the_warm_up_is_an_alarm(fault):
    """The baseline would hold it, and what the first batch's test stops would pass in silence some steps later."""
    for seed in range(2):
        (found,) = alarms(seed, 60, tokens=512, ramp=1, sharpest=4.0, temperature=0.6, fault=fault)
        assert 21 <= found <= 28


def test_a_warm_up_whose_sequences_are_selected_is_a_baseline():
    """The mean of -logp - entropy of what is left need not be 0, as of completions with an end."""
    for left_out, skipped, expected in ((0.0, 0.0, [23]), (0.25, 0.0, []), (0.0, 0.25, [])):
        monitor = Monitor(warning="log", critical="log", self_test="off")
        for step in range(1, 60):
            chosen = {LEFT_OUT: left_out if step == 5 else 0.0, SKIPPED: skipped if step == 5 else 0.0}
            monitor.end(step, {SURPRISE: -0.3, FIELD + "surprise_error": 0.05, **chosen})
        assert [alarm.step for alarm in monitor.alarms] == expected
    monitor.load_state_dict(json.loads(json.dumps(monitor.state_dict())))


@pytest.mark.parametrize(("engine", "found"), [(0.0, [29]), (0.1, [])])
def test_what_the_engines_own_gap_explains_is_a_baseline(engine, found):
    monitor = Monitor(warning="log", critical="log", self_test="off")
    for step in range(1, 60):
        monitor.end(step, {SURPRISE: 0.1, FIELD + "surprise_error": 0.05, "offcorr/engine/abs_mean": engine})
    assert [alarm.step for alarm in monitor.alarms] == found


def test_an_alarm_of_the_warm_up_says_that_it_is_no_baseline():
    monitor = Monitor(warning="log", critical="log", self_test="off")
    for step in range(1, 40):
        monitor.end(step, {SURPRISE: 0.0 if step < 8 else -0.46, FIELD + "surprise_error": 0.08})
    (alarm,) = monitor.alarms
    assert "standard errors from 0; the first logged steps are off by -0.299" in str(alarm)
    assert "the tokens do not follow the trainer's distribution" in str(alarm)


def test_the_share_of_sequences_without_a_token():
    logp, mask = torch.full((4, 8), -1.0), torch.ones(4, 8).bool()
    mask[0] = False
    batch = offcorr.Batch(logp=logp, advantages=torch.ones(4), mask=mask, entropy=-logp)
    assert field_metrics(batch, contains_rollout=False).compute()[LEFT_OUT] == 0.25
