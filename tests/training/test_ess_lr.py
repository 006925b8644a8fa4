"""Tests of ESSLearningRate: the rate of each step, and that only that step uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

import offcorr
from offcorr.stages.checks import warn_again
from offcorr.training.ess_lr import ESSLearningRate
from tests.training.ess_worker import LENGTH, LOSS, SEQUENCES, STEPS, batch_of, build, reference

WORKER = Path(__file__).with_name("ess_worker.py")


def batch_with(log_weights, dtype=torch.float32):
    """Returns a batch of one-token trajectories with given total log-ratios."""
    rollout = torch.full((len(log_weights), 1), -1.0, dtype=dtype)
    return offcorr.Batch(
        logp=rollout + torch.tensor(log_weights, dtype=dtype)[:, None],
        rollout_logp=rollout,
        advantages=torch.ones(len(log_weights), dtype=dtype),
        mask=rollout < 0,
    )


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


# -- the ESS -------------------------------------------------------------------------------------------------------


def test_the_ess_is_its_formula(optimizer):
    log_weights = [0.3, -1.2, 0.9, 0.0]
    weight = torch.tensor(log_weights, dtype=torch.float64).exp()
    ess = (weight.sum() ** 2 / (4 * weight.square().sum())).item()
    for rule, power in (("sqrt", 0.5), ("linear", 1.0)):
        for base in (1.0, 0.55):
            ess_lr = ESSLearningRate(optimizer, base=base, rule=rule)
            ess_lr.add(batch_with(log_weights, torch.float64))
            assert ess_lr.ess() == pytest.approx(ess)
            assert ess_lr.scale() == pytest.approx(min(1, ess / base) ** power)


def test_on_policy_the_rate_is_the_optimizers_own(optimizer):
    ess_lr = ESSLearningRate(optimizer)
    ess_lr.add(batch_with([0.0] * 5))
    assert ess_lr.scale() == 1.0


@pytest.mark.parametrize("shift", [0.0, 900.0, -900.0])
def test_weights_are_never_clamped(optimizer, shift):
    """If one trajectory has all the weight, the ESS is 1 / B, however large the ratios are."""
    ess_lr = ESSLearningRate(optimizer)
    ess_lr.add(batch_with([shift + 60.0, shift, shift, shift], torch.float64))
    assert ess_lr.ess() == pytest.approx(1 / 4)


def test_the_split_into_micro_batches_and_ranks_changes_nothing(optimizer):
    log_weights = torch.randn(64, generator=torch.Generator().manual_seed(0)).tolist()

    def seen(rows):
        ess_lr = ESSLearningRate(optimizer)
        for part in rows:
            ess_lr.add(batch_with(part))
        return ess_lr

    def split(size, of=log_weights):
        return [of[i : i + size] for i in range(0, len(of), size)]

    whole = seen([log_weights]).ess()
    assert 0.1 < whole < 0.9
    for size in (16, 4, 1):
        assert seen(split(size)).ess() == pytest.approx(whole, rel=1e-6)
    first, second = seen(split(4, log_weights[:32])), seen(split(4, log_weights[32:]))
    together = first.ess(lambda vector: torch.stack([vector, second._seen.vector]))
    assert together == pytest.approx(whole, rel=1e-6)
    assert first.ess() != pytest.approx(whole, rel=1e-3)


def test_masked_empty_and_unscored(optimizer):
    """Garbage under the mask, a sequence without a valid token, and a token that the engine could not score."""
    nan = torch.nan
    batch = offcorr.Batch(
        logp=torch.tensor([[-1.0, nan], [-1.0, -1.0], [nan, nan], [-1.0, -0.5]]),
        old_logp=torch.tensor([[-1.0, nan], [-1.0, -1.0], [nan, nan], [-1.0, -1.5]]),
        rollout_logp=torch.tensor([[-2.0, 7.0], [-1.0, -1.0], [nan, nan], [-1.0, nan]]),
        advantages=torch.ones(4),
        mask=torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1]]).bool(),
    )
    ess_lr = ESSLearningRate(optimizer)
    ess_lr.add(batch)
    weight = torch.tensor([1.0, 0.0, 1.0]).exp()  # the last: the staleness ratio, as in every weight
    assert ess_lr.ess() == pytest.approx((weight.sum() ** 2 / (3 * weight.square().sum())).item())
    with ess_lr.applied():
        pass
    ess_lr.add(batch.rows(slice(2, 3)))
    assert ess_lr.scale() == 1.0  # no valid token, so the rate is not reduced


# -- the step ------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "constant": lambda opt: lr_scheduler.ConstantLR(opt, factor=1.0),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=8),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=8),
    "warm-up": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, gamma=0.8)],
        milestones=[3],
    ),
}


def rates_of(schedule, scale_rates, steps=8, inside=False):
    """Returns (rates applied, measured by the length of the SGD step; rates logged; scales)."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = SCHEDULES[schedule](optimizer)
    ess_lr = ESSLearningRate(optimizer)
    applied, logged, scales = [], [], []
    for step in range(steps):
        before = weight.item()
        weight.grad = torch.ones_like(weight)
        if scale_rates:
            ess_lr.add(batch_with([0.0, 0.3 * step]))
            with ess_lr.applied() as scale:
                optimizer.step()
                if inside:
                    scheduler.step()  # as DeepSpeed's engine does
        else:
            scale = 1.0
            optimizer.step()
        applied.append(before - weight.item())
        if not inside:
            logged.append(scheduler.get_last_lr()[0])
            assert optimizer.param_groups[0]["lr"] == logged[-1]
            scheduler.step()
        scales.append(scale)
    return applied, logged, scales


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_warm_up_are_undisturbed(schedule):
    """A recursive scheduler reads the rate back, so a scaled rate would compound."""
    own, logged, _ = rates_of(schedule, scale_rates=False)
    applied, logged_scaled, scales = rates_of(schedule, scale_rates=True)
    assert logged_scaled == logged
    assert scales[0] == 1.0 and all(a > b for a, b in zip(scales, scales[1:], strict=False))
    assert applied == pytest.approx([rate * scale for rate, scale in zip(own, scales, strict=True)])
    assert rates_of(schedule, scale_rates=True, inside=True)[0] == pytest.approx(applied)


def test_groups_keep_their_own_rates_and_tensors_stay_themselves():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:], "lr": rate}], lr=1e-3, foreach=False)
    ess_lr, read = ESSLearningRate(optimizer), []
    optimizer.register_step_pre_hook(lambda opt, *_: read.extend(float(group["lr"]) for group in opt.param_groups))
    ess_lr.add(batch_with([0.0, 2.0]))
    for weight in weights:
        weight.grad = torch.ones(1)
    with ess_lr.applied() as scale:
        optimizer.step()
    assert scale < 0.9 and read == pytest.approx([1e-3 * scale, 0.25 * scale])
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[1]["lr"] is rate and rate == 0.25


def test_only_that_step_is_scaled(optimizer):
    weight = optimizer.param_groups[0]["params"][0]
    ess_lr = ESSLearningRate(optimizer)
    ess_lr.add(batch_with([0.0, 3.0]))
    with ess_lr.applied() as scale:
        pass  # a step that was skipped, for instance on an overflow
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -1.0 and ess_lr.lr_scale == scale < 1
    with pytest.raises(ValueError, match="no batch was added since the last step"):
        ess_lr.scale()


def test_a_step_that_fails_leaves_the_rate_as_it_was(optimizer):
    ess_lr = ESSLearningRate(optimizer)
    ess_lr.add(batch_with([0.0, 3.0]))

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), ess_lr.applied():
        optimizer.step(fails)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_calibration_takes_the_mean_on_policy(optimizer):
    ess_lr = ESSLearningRate(optimizer)
    found = []
    for spread in (0.5, 0.7, 0.6):
        ess_lr.add(batch_with([0.0, spread]))
        found.append(ess_lr.calibrate())
    assert ess_lr.base == pytest.approx(sum(found) / 3) and ess_lr.base < 1
    ess_lr.add(batch_with([0.0, 0.5]))
    assert ess_lr.scale() == 1.0
    ess_lr.add(batch_with([0.0, 4.0]))
    assert ess_lr.scale() == pytest.approx((ess_lr.ess() / ess_lr.base) ** 0.5)


def test_a_step_that_is_calibrated_on_is_not_scaled(optimizer):
    """The scale of the step before does not apply either."""
    weight = optimizer.param_groups[0]["params"][0]
    ess_lr = ESSLearningRate(optimizer)
    moved = []
    for calibrate in (False, True, False):
        ess_lr.add(batch_with([0.0, 4.0]))
        _ = ess_lr.calibrate() if calibrate else ess_lr.begin()
        before, weight.grad = weight.item(), torch.ones(1)
        optimizer.step()
        moved.append((before - weight.item(), ess_lr.lr_scale))
    scale = moved[0][1]
    assert 0 < scale < 0.8
    assert moved == [pytest.approx(pair) for pair in ((scale, scale), (1, 1), (1, 1))]  # the base is now this ESS


def test_it_says_what_it_wants(optimizer):
    for wrong, message in (
        ({"rule": "cubic"}, r"rule is 'cubic', expected one of \['sqrt', 'linear'\]"),
        ({"base": 0.0}, r"base is 0.0, expected .* in \(0, 1\]"),
        ({"base": 55}, "base is 55, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            ESSLearningRate(optimizer, **wrong)
    with pytest.raises(TypeError, match="optimizer is a object, expected a torch.optim.Optimizer"):
        ESSLearningRate(object())
    zeros = torch.zeros(1, 1)
    alone = offcorr.Batch(logp=zeros, advantages=torch.ones(1), mask=zeros == 0)
    with pytest.raises(ValueError, match="rollout_logp and old_logp are None.*pass rollout_logp"):
        ESSLearningRate(optimizer).add(alone)


# -- runs ----------------------------------------------------------------------------------------------------------


def run(model, optimizer, scheduler, ess_lr, steps):
    for step in steps:
        optimizer.zero_grad()
        for rows in (slice(0, 4), slice(4, 8)):
            batch = batch_of(model, step, rows)
            ess_lr.add(batch)
            LOSS(batch, denominator=SEQUENCES * LENGTH).loss.backward()
        if step == 0:
            ess_lr.calibrate()
            optimizer.step()
        else:
            with ess_lr.applied():
                optimizer.step()
        scheduler.step()


def start():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS), ESSLearningRate(optimizer)


def test_resume_gives_the_same_run(tmp_path):
    whole = start()
    run(*whole, range(STEPS))
    half = start()
    run(*half, range(3))
    torch.save([part.state_dict() for part in half], tmp_path / "checkpoint.pt")

    resumed = start()
    for part, state in zip(resumed, torch.load(tmp_path / "checkpoint.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    assert resumed[3].base < 1  # calibrated before
    run(*resumed, range(3, STEPS))
    for ours, theirs in zip(resumed[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed[3].lr_scale == whole[3].lr_scale < 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", "fsdp2"])
def test_the_applied_rate_is_the_computed_one_on_two_processes(backend, tmp_path):
    """The rate is read inside the optimizer's step, computed in one process, and checked in the final weights."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    settings["PYTHONPATH"] = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    if backend.startswith("zero"):
        pytest.importorskip("deepspeed")
        settings["ACCELERATE_USE_DEEPSPEED"] = "true"
    pytest.importorskip("accelerate")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(WORKER), backend, str(tmp_path)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rates, weights = reference()
    assert len(set(rates)) == STEPS
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["computed"] == pytest.approx(rates, rel=1e-5)
        for read, computed in zip(found["read"], found["computed"], strict=True):
            assert read and set(read) == {computed}
        torch.testing.assert_close(found["weights"], weights, rtol=0, atol=1e-5)


def test_an_ess_without_the_engines_log_probs_warns_once():
    """The total ratio is then the staleness alone."""
    old_logp = -torch.ones(4, 1)
    columns = dict(logp=old_logp + torch.randn(4, 1), advantages=torch.ones(4), mask=torch.ones(4, 1).bool())
    warn_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            ESSLearningRate(optimizer).add(offcorr.Batch(old_logp=old_logp, **columns))
            ESSLearningRate(optimizer).add(offcorr.Batch(old_logp=old_logp, rollout_logp=old_logp, **columns))
            ESSLearningRate(optimizer, own_samples=True).add(offcorr.Batch(old_logp=old_logp, **columns))
        offcorr.get("dapo")(offcorr.Batch(old_logp=old_logp, **columns))  # asks for no total ratio
        offcorr.get("opsm")(offcorr.Batch(old_logp=old_logp, **columns))  # the total ratio only where there is one
    (said,) = [w for w in caught if "rollout_logp" in str(w.message)]
    assert "counts the staleness alone: the sampler reports no log-probs" in str(said.message)
    assert said.filename == __file__  # the caller, not torch's no_grad around the library
    warn_again()
