"""The monitor in loops of plain torch: baselines, verdicts, actions, the self-test, checkpoints."""

from __future__ import annotations

import json
import math
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

import offcorr
from offcorr.diagnose import Record
from offcorr.training import LIMITS, Cusum, MismatchError, Monitor, Step
from offcorr.training.alarms import ACTIONS
from offcorr.training.monitor import PREFIX
from offcorr.training.self_test import NOISY
from offcorr.training.series import LAG, SMALLEST_K3
from tests.training.test_semantics import FAULTS, sampled

# The chart


def charted(draw, *, steps, **options):
    """The steps of the verdicts of a chart; it starts again after each."""
    chart, verdicts = Cusum(**options), []
    for step in range(steps):
        if chart.add(draw()):
            verdicts.append(step)
            chart = Cusum(**options)
    return verdicts


def test_false_alarms_are_tens_of_thousands_of_steps_apart(draws):
    """Healthy series of 1,000 steps, each with a baseline of its own: about one in fifty is expected."""
    chance, series = random.Random(0), 5 * draws
    false = sum(bool(charted(lambda: chance.gauss(-9, 0.4), steps=1000)) for _ in range(series))
    assert false <= 0.05 * series
    hasty = sum(bool(charted(lambda: chance.gauss(-9, 0.4), steps=1000, threshold=2.0)) for _ in range(30))
    assert hasty >= 15  # the test can fail


def test_false_alarms_with_heavy_tails(draws):
    """The same of log k3 whose noise has the tails of Student's t with four degrees of freedom."""
    chance, series = random.Random(1), 5 * draws

    def draw():
        return chance.gauss(0, 1) / math.sqrt(chance.gammavariate(2, 1) / 2)

    assert sum(bool(charted(draw, steps=1000)) for _ in range(series)) <= 0.075 * series


@pytest.mark.parametrize(("shift", "within"), [(2.0, 40), (4.0, 6), (50.0, 3)])
def test_a_lasting_shift_is_found(shift, within):
    """The shift is in standard deviations; the last of three steps in a row is the earliest."""
    for seed in range(20):
        chance = random.Random(seed)
        chart = Cusum()
        for _ in range(40):
            assert not chart.add(chance.gauss(0, 1))
        delay = next(step for step in range(1, 1000) if chart.add(chance.gauss(shift, 1)))
        assert 3 <= delay <= within


def test_noisy_steps_are_no_verdict():
    """One step in three is a thousand standard deviations off: never ``persistence`` in a row."""
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(20)] + [1000.0 if step % 3 == 0 else 0.0 for step in range(300)]
    chart = Cusum()
    assert not any(chart.add(value) for value in values)
    hasty = Cusum(persistence=1, threshold=2.0)
    assert any(hasty.add(value) for value in values)


def test_the_smallest_standard_deviation():
    chart = Cusum(warmup=4, smallest=0.35)
    for _ in range(4):
        chart.add(-16.0)
    assert not any(chart.add(-15.7) for _ in range(100)) and any(chart.add(-14.0) for _ in range(4))


def test_the_baseline_waits_until_the_lag_is_there():
    """A queue that fills for 16 steps, as of a sampler 16 updates behind, and then stays."""
    chart = Cusum(warmup=8, smallest=0.1)
    for step in range(100):
        assert not chart.add(-8.0 + 0.2 * min(step, 16), (min(step, 16), 1e-5))
    assert chart.ready and chart.mean == pytest.approx(-8.0 + 0.2 * 16, abs=0.05) and chart.score == 0
    fixed = Cusum(warmup=8, smallest=0.1)
    assert any(fixed.add(-8.0 + 0.2 * min(step, 16)) for step in range(100))
    stuck = Cusum(warmup=5)
    for step in range(20):
        stuck.add(0.0, (step**3, 1e-5))
    assert stuck.ready  # it waits for 3 * warmup steps at most


# The monitor


def batch_of(gap, *, seed=0, rows=8, stale=0.0, **fields):
    """Log-probs of ``rows`` sequences of 64 tokens, those of the engine off by noise of this standard deviation."""
    draw = torch.Generator().manual_seed(seed)
    rollout = -1.5 - torch.rand(rows, 64, generator=draw)
    old = rollout + gap * torch.randn(rows, 64, generator=draw)
    return offcorr.Batch(
        logp=old + stale * torch.randn(rows, 64, generator=draw),
        old_logp=old,
        rollout_logp=rollout,
        advantages=torch.linspace(-1, 1, rows),
        mask=torch.ones(rows, 64).bool(),
        **fields,
    )


def quiet(**options):
    return Monitor(**{"warning": "log", "critical": "log", "self_test": "off", **options})


def alarms_of(monitor, gaps, first=1):
    for step, gap in enumerate(gaps, first):
        monitor.observe(batch_of(gap, seed=step))
        monitor.end(step)
    return [(alarm.step, alarm.series, alarm.severity) for alarm in monitor.alarms]


def test_a_healthy_run_has_no_event():
    assert alarms_of(quiet(), [0.02] * 200) == []
    assert alarms_of(quiet(), [0.0] * 100) == []


def test_one_alarm_for_one_fault_and_another_for_the_next():
    monitor = quiet(warmup=10)
    gaps = [0.003] * 20 + [0.03] * 20 + [0.003] * 10 + [0.03] * 5
    assert alarms_of(monitor, gaps) == [(23, "engine", "warning"), (53, "engine", "warning")]
    assert "times that of the first logged steps (3 logged steps in a row; CUSUM" in monitor.alarms[0].evidence[0]


def test_one_noisy_step_is_no_event():
    assert alarms_of(quiet(), [0.003 if step % 10 else 3.0 for step in range(1, 200)]) == []


def test_a_warning_that_becomes_critical_is_said_again():
    monitor = quiet()
    alarms_of(monitor, [0.003] * 25 + [0.03] * 5 + [0.5] * 5)
    new = [(alarm.step, alarm.series, alarm.severity) for alarm in monitor.alarms if not alarm.revises]
    assert new == [(28, "engine", "warning"), (33, "engine", "critical")]


def test_staleness_is_a_series_of_its_own():
    monitor = quiet()
    for step in range(1, 41):
        monitor.observe(batch_of(0.003, seed=step, stale=0.01 if step < 30 else 0.1))
        monitor.end(step)
    assert [(alarm.step, alarm.series) for alarm in monitor.alarms] == [(32, "staleness")]


@pytest.mark.parametrize("reported", [0.7, 1.3])
def test_a_transform_in_neither_log_prob_is_a_surprise(reported):
    """From step 30 on both sides log T = 1, and the tokens are drawn at another temperature."""
    monitor = quiet()
    for step in range(1, 36):
        settings = {"temperature": reported, "reported": "raw"} if step >= 30 else {}
        logp, rollout_logp, mask, entropy = sampled(step, **settings)
        fields = {"logp": logp, "rollout_logp": rollout_logp.float(), "mask": mask, "entropy": entropy}
        monitor.observe(offcorr.Batch(advantages=torch.ones(len(logp)), **fields))
        monitor.end(step)
    (alarm,) = monitor.alarms
    assert alarm.series == "surprise" and 32 <= alarm.step <= 33 and "-logp - entropy" in alarm.evidence[0]


CROSSED = {
    "field/mult_error": (1.06, "warning"),
    "offcorr/engine/k3": (0.02, "warning"),
    "offcorr/engine/ess_token": (0.2, "critical"),
    "offcorr/engine/ratio_mean": (0.4, "critical"),
    "offcorr/staleness/ess_token": (0.29, "critical"),
    "offcorr/staleness/ratio_mean": (2.1, "critical"),
}


@pytest.mark.parametrize("metric", CROSSED)
def test_fixed_limits(metric):
    """Each, in the third step in a row, long before there is a baseline."""
    assert CROSSED.keys() == {limit.metric for limit in LIMITS}
    number, severity = CROSSED[metric]
    healthy = {"offcorr/engine/k3": 1e-5, "offcorr/staleness/k3": 1e-5}
    crossed = {**healthy, metric: number}
    monitor = quiet()
    for step, metrics in enumerate([crossed, crossed, healthy, crossed, crossed], 1):
        assert monitor.end(step, metrics) == []
    (alarm,) = monitor.end(6, crossed)
    assert alarm.severity == severity and f"{number:g}" in alarm.evidence[0] and "limit" not in alarm.evidence[0]
    assert not any(monitor.end(step, crossed) for step in range(7, 12))


def test_a_kl_of_three_hundredths_is_critical():
    monitor = quiet()
    assert [a.severity for step in range(3) for a in monitor.end(step, {"offcorr/engine/k3": 0.04})] == ["critical"]


def test_the_reported_lag_is_part_of_the_evidence():
    monitor = quiet(warmup=5)
    for step in range(1, 40):
        late = max(step - 20, 0)
        metrics = {"offcorr/staleness/k3": 1e-4 * (1 + 10 * late), "offcorr/staleness/lag": 2.0 + late}
        monitor.end(step, metrics)
    (alarm,) = monitor.alarms
    assert "the reported lag is" in alarm.evidence[0] and ", 2 in the first logged steps" in alarm.evidence[0]


def lags_of(monitor, lags, **metrics):
    """The alarms of a run whose gap stays small."""
    for step, lag in enumerate(lags, 1):
        monitor.end(step, {"offcorr/staleness/lag": lag, "offcorr/staleness/k3": 1e-4} | metrics)
    return [(alarm.step, alarm.series, alarm.cause) for alarm in monitor.alarms]


STUCK = [1.0] * 8 + [1.0 + late for late in range(1, 40)]


def test_a_sampler_whose_versions_stand_still_is_an_alarm():
    monitor = quiet()
    assert lags_of(monitor, STUCK) == [(24, "staleness", "stale_weights")]
    said = str(monitor.alarms[0])
    assert "the sampler gets no newer weights" in said and "in the 16 optimizer steps since step 8" in said
    assert "the policy is far" not in said and "at least every 1)" in said


def test_newer_weights_that_come_late_as_before_are_no_alarm():
    assert lags_of(quiet(), [step % 16 for step in range(200)]) == []  # every 16 steps
    assert lags_of(quiet(), [min(step, 16) for step in range(200)]) == []  # a lag of 16
    assert lags_of(quiet(), [float(step % 16) for step in range(64)] + list(range(70))) == [
        (129, "staleness", "stale_weights")
    ]  # 64 steps after those of step 65
    assert lags_of(quiet(), range(70))[0][0] == 65  # none from the first step on
    slow = quiet()
    slow.lag = 40
    assert lags_of(slow, [min(step, 40) for step in range(200)]) == []


def test_the_alarm_of_late_weights_ends_when_they_come_and_is_part_of_a_checkpoint():
    monitor = quiet()
    cut = 20
    lags_of(monitor, STUCK[:cut])
    resumed = quiet()
    resumed.load_state_dict(monitor.state_dict())
    found = [
        resumed.end(step, {"offcorr/staleness/lag": lag, "offcorr/staleness/k3": 1e-4})
        for step, lag in enumerate([*STUCK[cut:30], *[1.0] * 10, *range(2, 200)], cut + 1)
    ]
    assert [cut + 1 + i for i, alarms in enumerate(found) if alarms] == [24, 40 + 4 * 23]


def test_late_weights_are_seen_in_the_engines_series_where_no_old_logp_is_of_them():
    monitor = quiet()
    for step, lag in enumerate(STUCK, 1):
        monitor.end(step, {"offcorr/staleness/lag": lag, "offcorr/engine/k3": 1e-4})
    assert [(alarm.step, alarm.series) for alarm in monitor.alarms] == [(24, "engine")]


# Actions


FAULTY = [0.003] * 25 + [0.05] * 4


def test_log(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alarms_of(quiet(), FAULTY)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert line.startswith("offcorr: step 28: the engine's log-probs have moved away from the trainer's (warning)")


def test_warn(caplog):
    with pytest.warns(UserWarning, match="step 28: the engine's log-probs have moved .*; cause: precision") as caught:
        alarms_of(quiet(warning="warn"), FAULTY)
    assert len(caught) == 1 and caught[0].filename == __file__ and not caplog.records


@pytest.mark.filterwarnings("ignore:step 28")
def test_dump(tmp_path):
    """The last batches, exactly; and no file is ever overwritten."""
    for expected in ("step_000028_engine.jsonl", "step_000028_engine_2.jsonl"):
        monitor = quiet(warning="dump", folder=tmp_path / "dumps")
        for step, gap in enumerate(FAULTY, 1):
            batch = batch_of(gap, seed=step, rewards=torch.arange(8.0), group_ids=torch.arange(8) // 4)
            batch.rollout_logp[0, 5] = torch.nan
            ids = [list(range(40 if row == 2 else 64)) for row in range(8)]
            monitor.observe(batch, step=step, prompt_ids=[[3]] * 8, completion_ids=ids)
            monitor.end(step)
        path = monitor.alarms[0].dump
        assert path is not None and path.name == expected
    records = [Record.of(json.loads(line)) for line in path.read_text().splitlines()]
    assert len(records) == 64 and [len(record) for record in records[-8:]] == [64, 64, 40, *[64] * 5]
    batch = batch_of(FAULTY[27], seed=28)
    last = records[-8]
    assert last.step == 28 and last.prompt_ids.tolist() == [3] and last.completion_ids.tolist() == list(range(64))
    assert math.isnan(last.rollout_logp[5]) and last.old_logp.tolist() == batch.old_logp[0].tolist()
    assert (records[-1].reward, records[-1].group_id, records[-1].advantage) == (7.0, 1, 1.0)


def test_a_folder_without_the_action_dump_is_said():
    with pytest.warns(UserWarning, match="folder='mine' of the monitor does nothing without the action 'dump'"):
        quiet(folder="mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quiet().folder.name == "offcorr_mismatch"
        assert quiet(folder="mine", critical=("dump", "stop")).folder.name == "mine"


@pytest.mark.filterwarnings("ignore:step 28")
def test_a_mask_leaves_out_only_what_is_above_the_limit():
    """An alarm at k3 = .00125 masks nothing: no sequence is above .015."""
    monitor = quiet(warning="mask")
    alarms_of(monitor, FAULTY)
    assert monitor.masked(batch_of(0.05)).weight.tolist() == [1.0] * 8
    assert monitor.masked(batch_of(0.5)).weight.tolist() == [0.0] * 8


@pytest.mark.filterwarnings("ignore:step")
def test_mask_the_sequences_above_the_limit():
    correction, monitor = offcorr.get("tis"), quiet(warning="mask", critical="mask")
    step = Step(correction, monitor=monitor)
    trained, shares = [], []
    for version in range(1, 15):
        good, bad = batch_of(0.003, seed=version, rows=6), batch_of(0.5, seed=100 + version, rows=2)
        off = bad if 4 <= version < 9 else batch_of(0.003, seed=50 + version, rows=2)
        fields = {name: torch.cat([getattr(off, name), getattr(good, name)]) for name in ("old_logp", "rollout_logp")}
        logp = fields["old_logp"].clone().requires_grad_()
        batch = offcorr.Batch(logp=logp, advantages=torch.ones(8), mask=torch.ones(8, 64).bool(), **fields)
        step.begin(tokens=512)
        step.loss(step.place(batch)).loss.backward()
        trained.append((logp.grad != 0).any(1).tolist())
        step.end(version)
        shares.append(step.metrics().get(PREFIX + "masked"))
    assert [alarm.step for alarm in monitor.alarms] == [6]
    assert [version for version, rows in enumerate(trained, 1) if rows != [True] * 8] == [7, 8]
    assert trained[6] == trained[7] == [False, False, *[True] * 6]
    # Of the steps after the fault nothing is masked, and from the third on nothing is in force.
    assert shares == [None] * 6 + [0.25, 0.25, 0.0, 0.0, 0.0] + [None] * 3


@pytest.mark.filterwarnings("ignore:step")
def test_a_mask_over_every_sequence_is_said_once():
    step = Step(offcorr.get("tis"), monitor=quiet(warning="mask", critical="mask"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in range(1, 10):
            step.begin(tokens=512)
            step.loss(step.place(batch_of(0.5, seed=version)))
            step.end(version)
            logged = step.metrics()
    assert logged[PREFIX + "masked"] == logged["offcorr/loss/dropped"] == 1.0
    assert not step.all_dropped  # the monitor did it, and says so
    (said,) = [str(one.message) for one in caught if "masks every sequence" in str(one.message)]
    assert "the run goes on without learning" in said
    assert "'stop' among the actions of this alarm's own severity ends it" in said


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("warning", ["warn", "mask"])
def test_an_alarm_that_becomes_critical_does_not_raise_the_masks_limit(warning):
    """A sampler that is updated no more from step 9 on: the steps of the fault are no baseline for its mask."""
    monitor = quiet(warning=warning, critical="mask")
    gaps = [0.003] * 8 + [0.03 * step for step in range(1, 33)]
    found = alarms_of(monitor, gaps)
    assert ("engine", "critical") in [alarm[1:] for alarm in found]
    series = monitor._series["engine"]
    assert not series.charts["above"].ready and len(series.charts["above"].values) < 12
    assert series.mask_above == 0.015 and monitor.masked(batch_of(0.5)).weight.tolist() == [0.0] * 8


@pytest.mark.filterwarnings("ignore:step")
def test_the_limit_of_a_mask_stays_for_its_alarm():
    """The baseline is completed between the warning and the critical alarm, by steps that are not under an alarm."""
    series = quiet(warmup=5)._series["engine"]
    healthy, moved = {"offcorr/engine/k3": 1e-5}, {"offcorr/engine/k3": 0.02}
    found = [series.add(metrics, (), 3) for metrics in [*[healthy] * 2, *[moved] * 3]]
    assert found == [None] * 4 + ["warning"]
    series.mask()
    series.charts["above"].values = [0.0] * 5  # a baseline at k3 = 1
    assert [series.add({"offcorr/engine/k3": 0.04}, (), 3) for _ in range(3)][-1] == "critical"
    series.mask()
    assert series.mask_above == 0.015


def test_an_alarm_from_the_first_step_on_leaves_the_baseline_for_later():
    monitor = quiet(warmup=5)
    assert alarms_of(monitor, [0.5] * 10 + [0.003] * 8) == [(3, "engine", "critical")]
    chart = monitor._series["engine"].charts["above"]
    assert chart.ready and math.exp(chart.mean) < 1e-5


@pytest.mark.filterwarnings("ignore:step")
def test_a_mask_over_no_sequence_is_said_once():
    """An alarm at k3 = .00125, below the mask's limit of .015."""
    step = Step(offcorr.get("tis"), monitor=quiet(warning="mask", critical="mask"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version, gap in enumerate([*FAULTY, *[0.05] * 10], 1):
            step.begin(tokens=512)
            step.loss(step.place(batch_of(gap, seed=version)))
            step.end(version)
            step.metrics()
    (said,) = [str(one.message) for one in caught if "masked no sequence" in str(one.message)]
    assert "masked no sequence in 3 steps under alarm" in said and "is above 0.015 (engine)" in said
    assert "this alarm's own severity" in said


@pytest.mark.filterwarnings("ignore:step")
def test_stop():
    monitor = quiet(warning=["log", "stop"])
    with pytest.raises(MismatchError, match="step 28: the engine's log-probs have moved away"):
        alarms_of(monitor, FAULTY)
    assert monitor.stopped and monitor.alarms[0].actions == ("log", "stop")


@pytest.mark.filterwarnings("ignore:step")
def test_stop_in_a_loop_with_step():
    step = Step(offcorr.get("tis"), monitor=quiet(critical=["log", "stop"]))
    with pytest.raises(MismatchError, match="critical"):
        for version in range(1, 10):
            step.begin(tokens=512)
            step.loss(step.place(batch_of(0.5, seed=version)))
            step.end(version)
            step.metrics()
    assert version == 3


@pytest.mark.parametrize("action", ACTIONS)
def test_every_rank_decides_alike_and_one_writes(action, tmp_path):
    """With the metrics of all ranks, as ``Step`` hands them over, another rank says and writes nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for main in (True, False):
            caught.clear()
            monitor = quiet(warning=action, name_cause=lambda records: 1 / 0)
            monitor.on_main, monitor.raises, monitor.folder = main, False, tmp_path / str(main)
            assert alarms_of(monitor, FAULTY) == [(28, "engine", "warning")]
            assert len(caught) == (main and action != "log")
            assert (tmp_path / str(main)).exists() == (main and action == "dump")
            assert monitor.stopped == (action == "stop")
            assert (monitor.masked(batch_of(0.5)).weight is not None) == (action == "mask")


# The cause


def test_the_cause_is_named_on_the_batches_at_hand():
    seen, advice = [], {"precision": "no", "stale_weights": "sync"}

    def name_cause(records):
        seen.append([record.step for record in records])
        causes = [
            SimpleNamespace(cause=name, advice=told, evidence=f"{name}!", of_d=True) for name, told in advice.items()
        ]
        return SimpleNamespace(verdict="stale_weights", confidence=0.75, causes=causes)

    monitor = quiet(name_cause=name_cause)
    for version, gap in enumerate(FAULTY, 1):
        for seed in range(10):
            monitor.observe(batch_of(gap, seed=100 * version + seed), step=version)
        monitor.end(version)
    (alarm,) = monitor.alarms
    assert (alarm.cause, alarm.confidence, alarm.advice) == ("stale_weights", 0.75, "sync")
    assert (
        "(warning); cause: stale_weights (confidence 0.75 among the known causes): sync. Evidence (d: the trainer's"
        in str(alarm)
    )
    assert str(alarm).endswith("; stale_weights!.")
    assert seen == [[28] * 64]


def test_a_diagnosis_that_fails_ends_nothing():
    monitor = quiet(name_cause=lambda records: 1 / 0)
    alarms_of(monitor, FAULTY)
    (alarm,) = monitor.alarms
    assert alarm.cause == "unknown" and "the diagnosis failed (ZeroDivisionError" in alarm.evidence[-1] and alarm.advice


# The self-test


def first_batch(packed=False, **settings):
    logp, rollout_logp, mask, entropy = sampled(**settings)
    fields = {"logp": logp, "rollout_logp": rollout_logp.float(), "mask": mask, "entropy": entropy}
    if packed:
        fields = {name: value.flatten() for name, value in fields.items()}
        return offcorr.Batch.packed(
            cu_seqlens=torch.arange(len(logp) + 1) * logp.shape[1], advantages=torch.ones(len(logp)), **fields
        )
    return offcorr.Batch(advantages=torch.ones(len(logp)), **fields)


FATAL = {name: settings for name, (kind, settings) in FAULTS.items() if kind != "differs"}


@pytest.mark.parametrize("fault", FATAL)
def test_the_first_batch_is_refused(fault):
    with pytest.raises(
        MismatchError,
        match=r'not begun: in the first batch the engine.*Another fault may leave the same numbers.*self_test="warn"',
    ):
        Monitor().observe(first_batch(**FATAL[fault]))


@pytest.mark.parametrize("fault", FATAL)
def test_what_the_trainers_dropout_can_look_like_is_no_refusal(fault):
    """Its noise makes the trainer's log-probs smaller, as a truncation or another temperature of the sampler does."""
    monitor = Monitor()
    monitor.dropout = 0.1
    if FAULTS[fault][0] in NOISY:
        with pytest.warns(UserWarning, match=r"the trainer's dropout is on \(up to 0.1\), which alone can make that"):
            monitor.observe(first_batch(**FATAL[fault]))
    else:
        with pytest.raises(MismatchError, match="not begun"):
            monitor.observe(first_batch(**FATAL[fault]))


@pytest.mark.parametrize("packed", [False, True])
def test_a_shift_is_refused_and_can_be_overridden(packed):
    def shifted():
        batch = first_batch(packed)
        return batch.replaced(rollout_logp=batch.rollout_logp.roll(1, -1))

    with pytest.raises(MismatchError, match="those of the previous token.*move one of the two"):
        Monitor().observe(shifted())
    monitor = Monitor(self_test="warn")
    with pytest.warns(UserWarning, match="in the first batch .* previous token.*Another fault may") as caught:
        monitor.observe(shifted())
        monitor.observe(shifted())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Monitor(self_test="off").observe(shifted())


def test_what_a_weight_can_correct_is_a_warning():
    with pytest.warns(UserWarning, match="differ from the trainer's"):
        Monitor().observe(first_batch(noise=0.8))
    with pytest.warns(UserWarning, match=r"0\.99\d* \+- .* of the probability"):
        Monitor().observe(first_batch(top_p=0.995, sizes=(16, 256)))


def test_a_temperature_beside_later_weights_is_a_warning():
    """What trains makes its policy sharper, which looks the same."""
    batch = first_batch(temperature=0.7)
    versions = torch.zeros(batch.mask.shape, dtype=torch.long)
    with pytest.warns(UserWarning, match="training since the tokens were sampled can look like this"):
        Monitor().observe(batch.replaced(rollout_version=versions, trainer_version=3))
    with pytest.raises(MismatchError, match="a temperature"):
        Monitor().observe(batch.replaced(rollout_version=versions, trainer_version=0))


def test_a_temperature_without_entropy_is_a_warning():
    with pytest.warns(UserWarning, match="a lower temperature"):
        Monitor().observe(first_batch(temperature=0.7).replaced(entropy=None))


def test_sequences_that_were_left_out_are_no_surprise():
    """Where whole sequences are masked (those without an end, say), the others need not be balanced."""
    batch = first_batch(temperature=0.7, reported="raw")
    with pytest.raises(MismatchError, match="drawn from a distribution that is more certain"):
        Monitor().observe(batch)
    mask = batch.mask.clone()
    mask[3] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Monitor().observe(batch.replaced(mask=mask))


def test_step_tests_the_first_batch_before_the_first_update():
    parameter = torch.zeros(1, requires_grad=True)
    batch = first_batch(temperature=0.7)
    batch = batch.replaced(logp=batch.logp + parameter)
    step = Step(offcorr.get("tis"), monitor=Monitor())
    step.begin(tokens=512)
    with pytest.raises(MismatchError, match=r"temperature of about 0\.7"):
        step.loss(step.place(batch)).loss.backward()
    assert parameter.grad is None


def test_the_trainers_temperature_is_part_of_the_message():
    batch = first_batch(temperature=0.7, trainer_temperature=0.7, reported="raw")
    with pytest.raises(MismatchError, match=r"about 1\.0\d, the trainer's 0\.70"):
        Monitor(temperature=0.7).observe(batch)


# Metrics, cost and checkpoints


@pytest.mark.parametrize("series", ["staleness", "engine"])
@pytest.mark.parametrize(
    ("sizes", "lag", "expected"),
    [
        ([1e-13] * 8, 0.0, [11]),  # a sampler that was right goes wrong: all before is the baseline
        ([1e-13] * 8, None, [11]),
        ([1e-13] * 8, 1.0, []),  # samples that are older than the weights
        ([1e-13] * 2, 0.0, []),  # updates that never reached the sampler, or a learning rate that begins at 0
        ([1e-13, 1e-13, 1e-13, 1e-6], 0.0, []),  # a gap that grows with the updates
    ],
)
def test_a_gap_that_begins_in_the_warm_up_is_not_its_baseline(series, sizes, lag, expected):
    monitor = Monitor(warning="log", critical="log", self_test="off", limits=())
    for step in range(1, 40):
        size = sizes[step - 1] if step <= len(sizes) else 1e-4
        metrics = {f"offcorr/{series}/k3": size} | ({} if lag is None else {LAG: lag * (step > len(sizes))})
        monitor.end(step, metrics)
    assert [alarm.step for alarm in monitor.alarms] == expected
    monitor.load_state_dict(json.loads(json.dumps(monitor.state_dict())))


def run_with_step(monitor, gaps, first=1, micro_batches=2):
    """The metrics of every step of a loop."""
    step, logged = Step(offcorr.get("tis"), monitor=monitor), []
    for version, gap in enumerate(gaps, first):
        step.begin(tokens=1024)
        for index in range(micro_batches):
            batch = batch_of(gap, seed=10 * version + index)
            step.loss(step.place(batch), last=index == micro_batches - 1)
        step.end(version)
        logged.append(step.metrics())
    return logged


def test_step_measures_once_and_the_log_has_the_numbers():
    """With ``Step`` and without the same events come up, and the log differs under alarm alone."""
    with_step, alone = quiet(), quiet()
    logged, plain = run_with_step(with_step, FAULTY), run_with_step(None, FAULTY)
    for version, gap in enumerate(FAULTY, 1):
        for index in range(2):
            alone.observe(batch_of(gap, seed=10 * version + index))
        alone.end(version)
    assert [(a.step, a.series) for a in with_step.alarms] == [(a.step, a.series) for a in alone.alarms]
    assert with_step.alarms[0].step == 28 and not with_step._measured.data
    assert logged[:27] == plain[:27]
    assert logged[27].keys() - plain[27].keys() == {PREFIX + "engine", PREFIX + "alarms"}
    assert logged[27][PREFIX + "engine"] > 1 and logged[27][PREFIX + "alarms"] == 1


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")


def test_nothing_more_is_read_from_the_device(monkeypatch):
    """A loop with a monitor reads as many tensors as the same loop without one, up to an alarm."""
    reads = []
    for name in READS:
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, f=original, n=name, **kwargs: reads.append(n) or f(*args, **kwargs)
        )
    counts = []
    for monitor in (None, quiet()):
        reads.clear()
        run_with_step(monitor, [0.003] * 24)
        counts.append(sorted(reads))
    assert counts[0] == counts[1] and counts[0]


def test_a_resumed_monitor_is_the_one_that_was_never_interrupted(tmp_path):
    gaps = [0.01] * 26 + [0.05] * 6
    whole, states = quiet(), []
    alarms_of(whole, gaps)
    for cut in (5, 22, 27, 30):
        first = quiet()
        alarms_of(first, gaps[:cut])
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = quiet()
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        alarms_of(second, gaps[cut:], first=cut + 1)
        for state in (second.state_dict(), whole.state_dict()):
            for name in ("cause", "confidence"):  # those of the batches at hand, which no checkpoint has
                state["engine"].pop(name)
            states.append(state)
        assert states.pop() == states.pop()
        assert [a.step for a in first.alarms + second.alarms] == [a.step for a in whole.alarms] == [29]


def test_step_keeps_the_monitors_state():
    step = Step(offcorr.get("tis"), monitor=quiet())
    run_with_step(step.monitor, [0.01] * 5)
    other = Step(offcorr.get("tis"), monitor=quiet())
    assert other.load_state_dict(step.state_dict()) == []
    assert other.monitor.state_dict() == step.monitor.state_dict() != quiet().state_dict()
    assert other.load_state_dict({}) == ["the monitor's baselines"]


def test_metrics_that_are_no_numbers_are_an_alarm():
    monitor = quiet(warmup=5)
    series = [{"offcorr/engine/k3": k3} for k3 in [1e-5] * 8 + [math.nan, math.inf, math.nan]]
    assert [len(monitor.end(step, numbers)) for step, numbers in enumerate(series)] == [0] * 10 + [1]


@pytest.mark.parametrize(("before", "more"), [(1e-14, True), (1e-5, False)])
def test_a_gap_after_none_is_more_than_so_many_times_as_large(before, more):
    monitor = quiet(warmup=5)
    for step in range(12):
        monitor.end(step, {"offcorr/engine/k3": before if step < 8 else 1e-3})
    (alarm,) = monitor.alarms
    assert ("more than 1e+04 times that of the first logged steps" in str(alarm)) == more


def test_a_gap_below_rounding_counts_as_none():
    monitor = quiet(warmup=5)
    metrics = [{"offcorr/engine/k3": 1e-14}] * 10 + [{"offcorr/engine/k3": SMALLEST_K3 / 2}] * 10
    assert not any(monitor.end(step, numbers) for step, numbers in enumerate(metrics))


def test_steps_without_measurements_change_nothing():
    monitor = quiet()
    state = monitor.state_dict()
    assert monitor.end(1) == [] and monitor.end(2, {"train_loss": 1.0}) == [] and monitor.state_dict() == state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warning": "wran"}, "warning is 'wran', did you mean 'warn'"),
        ({"critical": ["warn", "halt"]}, r"critical is \['warn', 'halt'\], expected one of"),
        ({"critical": []}, r"critical is \[\], expected one or several"),
        ({"self_test": True}, "self_test is True, expected one of"),
        ({"warmup": 1}, "warmup is 1, expected a whole number >= 2"),
        ({"persistence": 0.5}, "persistence is 0.5, expected a whole number >= 1"),
        ({"threshold": -1.0}, "threshold"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(**options)
