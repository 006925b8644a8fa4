"""Tests of the anchors, which choose the policy that supplies old_logp."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import offcorr
from offcorr import Batch
from offcorr.stages.checks import warn_again
from offcorr.training import Step
from offcorr.training.anchors import EWMA, LogLinear, Recomputed, Rollout, Snapshots

VOCABULARY, B, T = 7, 4, 5


class Bigram(nn.Module):
    """A bigram language model, with a buffer that training changes too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, ids):
        return (self.head(self.embed(ids)) + self.shift * torch.arange(VOCABULARY)).log_softmax(-1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Bigram()


@pytest.fixture
def ids():
    return torch.randint(VOCABULARY, (B, T + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def score(ids):
    return lambda module: module(ids[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.fixture
def batch(model, score):
    logp = score(model)
    noise = torch.randn(B, T, generator=torch.Generator().manual_seed(2))
    return Batch(
        logp=logp,
        rollout_logp=logp.detach() + 0.1 * noise,
        advantages=torch.ones(B),
        mask=torch.ones(B, T).bool(),
        rollout_version=torch.zeros(B, T).long(),
        trainer_version=0,
    )


def train(model, steps=1):
    """Changes every weight by a different amount per step; returns the weights after each step."""
    seen = []
    for step in range(steps):
        with torch.no_grad():
            for weight in [*model.parameters(), *model.buffers()]:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 + step))
        seen.append(copy.deepcopy(model.state_dict()))
    return seen


# -- recomputed, rollout -------------------------------------------------------------------------------------------


def test_recomputed_is_the_models_own(model, score, batch):
    anchor = Recomputed(model)
    before = score(model).detach()
    placed = anchor.place(batch, score)
    assert torch.equal(placed.old_logp, before) and not placed.old_logp.requires_grad
    train(model)
    assert not torch.allclose(anchor.old_logp(batch, score), before)
    with pytest.raises(ValueError, match="score is None, but Recomputed.. needs it: pass a function"):
        anchor.old_logp(batch)
    with pytest.raises(ValueError, match=r"score returned shape \(4, 4\), expected \(4, 5\)"):
        anchor.old_logp(batch, lambda module: score(module)[:, 1:])


def test_rollout_is_the_engines_and_ratio_1_where_it_has_none(batch):
    reported = batch.rollout_logp.clone()
    reported[1, 2] = torch.nan
    old = Rollout().old_logp(dataclasses.replace(batch, rollout_logp=reported))
    assert old[1, 2] == batch.logp[1, 2]
    old[1, 2] = reported[1, 2]
    torch.testing.assert_close(old, reported, equal_nan=True)
    with pytest.raises(ValueError, match="rollout_logp is None, but anchor 'rollout' needs it: pass"):
        Rollout().old_logp(dataclasses.replace(batch, rollout_logp=None))


def test_rollout_refuses_to_count_the_engine_twice():
    with pytest.raises(ValueError, match=r"Rollout\(\) puts .* Truncate\(cap=2\.0"):
        Rollout().check(offcorr.get("ppo", weight=offcorr.weights.Truncate(2.0)))
    with pytest.raises(ValueError, match=r"Rollout\(\) puts .* Geometric\("):
        Rollout().check(offcorr.get("geo_rs"))
    Rollout().check(offcorr.get("ppo"))
    LogLinear().check(offcorr.get("decoupled_ppo"))  # splits the total ratio into two factors


# -- A-3PO ---------------------------------------------------------------------------------------------------------


def test_log_linear_between_its_ends(batch):
    versions = torch.tensor([[0, 4, 6, 7, 8]]).expand(B, T)
    stale = dataclasses.replace(batch, rollout_version=versions, trainer_version=8)
    wanted = torch.tensor([7 / 8, 3 / 4, 1 / 2, 0.0, 0.0])
    torch.testing.assert_close(LogLinear().alpha(stale)[0], wanted)
    logp, rollout = batch.logp.detach(), batch.rollout_logp
    torch.testing.assert_close(LogLinear().old_logp(stale), rollout + wanted * (logp - rollout))
    assert not LogLinear().old_logp(stale).requires_grad
    # Sampled by weights newer than the proximal policy: alpha is clipped to 0.
    torch.testing.assert_close(LogLinear(3).alpha(stale)[0], torch.tensor([5 / 8, 1 / 4, 0.0, 0.0, 0.0]))


def test_log_linear_ends_in_rollout_and_recomputed(model, score, batch):
    """alpha = 0 if the proximal policy sampled; alpha = 1 if the proximal policy is the current one."""
    train(model, 2)
    batch = dataclasses.replace(batch, logp=score(model), trainer_version=1)
    assert torch.equal(LogLinear().old_logp(batch), Rollout().old_logp(batch))
    torch.testing.assert_close(LogLinear(proximal_lag=0).old_logp(batch), Recomputed(model).old_logp(batch, score))
    fresh = dataclasses.replace(batch, trainer_version=0)  # 0 / 0
    torch.testing.assert_close(LogLinear(proximal_lag=0).old_logp(fresh), Recomputed(model).old_logp(fresh, score))


def test_log_linear_says_what_to_pass(batch):
    for name in ("rollout_version", "trainer_version", "rollout_logp"):
        with pytest.raises(ValueError, match=rf"{name} is None, but anchor 'log_linear' .* needs it: pass"):
            LogLinear().old_logp(dataclasses.replace(batch, **{name: None}))
    with pytest.raises(ValueError, match="proximal_lag is -1"):
        LogLinear(-1)
    warn_again()
    with pytest.warns(RuntimeWarning, match="proximal_lag is 0: .* every ratio is 1 and the loss corrects nothing"):
        LogLinear(0)


# -- EWMA ----------------------------------------------------------------------------------------------------------


def test_ewma_is_the_closed_form(model):
    window, start = 3.0, copy.deepcopy(model.state_dict())
    anchor = EWMA(model, window)
    history = [start]
    for version in range(1, 6):
        history += train(model)
        anchor.step(version, active=1.0)
    beta = window / (window + 2)
    shares = torch.tensor([beta ** (5 - j) for j in range(6)])
    shares /= shares.sum()
    assert set(anchor.weights()) == set(start)
    for name, mean in anchor.weights().items():
        wanted = sum(share * weights[name] for share, weights in zip(shares, history, strict=True))
        torch.testing.assert_close(mean, wanted)
    assert anchor.resets == 0


def test_ewma_scores_with_the_mean(model, score, batch):
    anchor = EWMA(model, window=2)
    first = copy.deepcopy(model)
    train(model)
    anchor.step(1, active=0.95)
    mean = copy.deepcopy(first)
    mean.load_state_dict({name: weight.clone() for name, weight in anchor.weights().items()})
    live = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(anchor.old_logp(batch, score), score(mean).detach())
    assert all(torch.equal(weight, live[name]) for name, weight in model.state_dict().items())
    assert not torch.allclose(score(mean), score(first)) and not torch.allclose(score(mean), score(model))


@pytest.mark.parametrize(("active", "resets"), [(0.9, False), (0.8999, True), (0.0, True)])
def test_ewma_resets_when_fewer_than_90_percent_stay_active(model, active, resets):
    anchor = EWMA(model, window=2)
    train(model, 2)
    anchor.step(1, active=active)
    same = all(torch.equal(mean, model.state_dict()[name]) for name, mean in anchor.weights().items())
    assert same == resets == bool(anchor.resets)
    before = copy.deepcopy(model.state_dict())
    train(model)
    anchor.step(2, active=1.0)
    if resets:  # weights from before the reset have no share in the mean
        for name, mean in anchor.weights().items():
            torch.testing.assert_close(mean, (0.5 * before[name] + model.state_dict()[name]) / 1.5)


def test_ewma_in_float32_over_bfloat16_weights(model, score, batch):
    anchor = EWMA(model.bfloat16(), window=64)
    with torch.no_grad():
        model.head.weight.mul_(1.01)
    anchor.step(1, active=1.0)
    assert anchor.weights()["head.weight"].dtype == torch.float32
    assert not torch.equal(anchor.weights()["head.weight"], anchor.weights()["head.weight"].bfloat16().float())
    batch = dataclasses.replace(batch, logp=score(model))
    assert anchor.old_logp(batch, score).dtype == torch.bfloat16


def test_ewma_says_what_to_pass(model):
    with pytest.raises(ValueError, match=r"active is None, but EWMA\(window=2, reset_below=0.9\) resets by it: pass"):
        EWMA(model, window=2).step(1)
    EWMA(model, window=2, reset_below=None).step(1)
    EWMA(model, window=2.5)
    for wrong, message in (
        ({"window": -1}, "window is -1, expected a number of optimizer steps above 0$"),
        ({"window": 0}, "window is 0, expected .*: the mean over 0 steps is the current weights, so every ratio would"),
        ({"window": 1, "reset_below": 90}, "reset_below is 90, expected"),
        ({"window": 1, "device": "cpux"}, r"device is 'cpux', expected one that torch has here, .* \(Expected one of"),
        ({"window": 1, "device": "cuda:99"}, r"device is 'cuda:99', expected one that torch has here"),
        ({"window": 1, "device": 1.5}, r"device is 1.5, expected one that torch has here"),
    ):
        with pytest.raises(ValueError, match=message):
            EWMA(model, **wrong)


# -- snapshots -----------------------------------------------------------------------------------------------------


def test_snapshots_score_each_token_with_its_own_version(model, score, batch):
    anchor = Snapshots(model, limit=3)
    scores = [score(model).detach()]
    for version in range(1, 4):
        train(model)
        scores.append(score(model).detach())
        anchor.step(version)
    versions = torch.tensor([[0, 0, 1, 3, 3], [2, 2, 2, 2, 2], [1, 1, 1, 1, 0], [99, 0, 0, 0, 0]])
    mask = torch.ones(B, T).bool()
    mask[3, 0] = False  # version 99, under the mask, is never used
    batch = dataclasses.replace(batch, rollout_version=versions, mask=mask)
    calls = []
    old = anchor.old_logp(batch, lambda module: calls.append(1) or score(module))
    wanted = torch.stack(scores).gather(0, versions.clamp(max=3)[None])[0]
    torch.testing.assert_close(old[mask], wanted[mask])
    assert len(calls) == 4
    torch.testing.assert_close(score(model).detach(), scores[3])


def test_snapshots_hold_no_more_than_the_limit_and_what_is_referenced(model):
    anchor = Snapshots(model, limit=2, version=10)
    for version in range(11, 16):
        anchor.step(version)
    assert anchor.versions == [13, 14, 15]
    anchor.keep([13, 7])
    assert anchor.versions == [13, 15]
    anchor.keep([])
    assert anchor.versions == [15]
    held = anchor.state_dict()["held"][15]
    assert {weight.device.type for weight in held.values()} == {"cpu"}
    assert held["head.weight"].data_ptr() != model.head.weight.data_ptr()


def test_snapshots_say_what_is_missing(model, score, batch):
    anchor = Snapshots(model, limit=1)
    anchor.step(1)
    anchor.step(2)
    with pytest.raises(KeyError, match=r"rollout_version is 0, whose weights were dropped .*held: \[1, 2\]\. limit=1"):
        anchor.old_logp(batch, score)
    ahead = dataclasses.replace(batch, rollout_version=batch.rollout_version + 5)
    with pytest.raises(KeyError, match="rollout_version is 5, which was never recorded; the newest is 2: call step"):
        anchor.old_logp(ahead, score)
    with pytest.raises(ValueError, match="rollout_version is None, but Snapshots.limit=1. needs it: pass"):
        anchor.old_logp(dataclasses.replace(batch, rollout_version=None), score)


# -- all of them ---------------------------------------------------------------------------------------------------

ANCHORS = {
    "recomputed": Recomputed,
    "rollout": lambda model: Rollout(),
    "log_linear": lambda model: LogLinear(),
    "ewma": lambda model: EWMA(model, window=2),
    "snapshots": lambda model: Snapshots(model, limit=4),
}


@pytest.mark.parametrize("method", ["ppo", "gspo", "minpro", "ctpo", "sapo"])
@pytest.mark.parametrize("name", ANCHORS)
def test_any_loss_takes_any_anchor(model, score, batch, name, method):
    anchor, loss_fn = ANCHORS[name](model), offcorr.get(method)
    anchor.check(loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = []
    for version in range(3):
        placed = anchor.place(dataclasses.replace(batch, logp=score(model), trainer_version=version), score)
        ratios.append((placed.logp - placed.old_logp).abs().max().item())
        optimizer.zero_grad()
        loss_fn(placed).loss.backward()
        optimizer.step()
        anchor.step(version + 1, active=1.0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert (ratios[-1] > 1e-4) == (name != "recomputed")


@pytest.mark.parametrize("name", ["ewma", "snapshots"])
def test_an_anchor_resumes(model, score, batch, name, tmp_path):
    anchor = ANCHORS[name](model)
    train(model)
    anchor.step(1, active=0.5)
    train(model)
    anchor.step(2, active=1.0)
    torch.save(anchor.state_dict(), tmp_path / "anchor.pt")
    resumed = ANCHORS[name](copy.deepcopy(model))
    resumed.load_state_dict(torch.load(tmp_path / "anchor.pt", weights_only=True))
    assert torch.equal(resumed.old_logp(batch, score), anchor.old_logp(batch, score))
    train(model)
    for one in (anchor, resumed):
        one._model = model
        one.step(3, active=1.0)
    assert torch.equal(resumed.old_logp(batch, score), anchor.old_logp(batch, score))


@pytest.mark.parametrize("limit", [-1, 1.5, "4"])
def test_a_limit_of_snapshots_is_a_whole_number(limit):
    with pytest.raises(ValueError, match=f"limit is {limit!r}, expected a whole number of optimizer updates"):
        Snapshots(torch.nn.Linear(1, 1), limit=limit)


@pytest.mark.parametrize(("anchor", "said"), [(LogLinear(), True), (Rollout(), False)])
def test_it_is_said_where_the_plain_ratio_is_not_that_of_staleness(anchor, said):
    batch = offcorr.testing.example().replaced(
        old_logp=None, rollout_version=torch.zeros(7, 12).long(), trainer_version=2
    )
    step = Step(offcorr.get("ppo"), anchor=anchor)
    assert ("offcorr/loss compares with the ratio to old_logp" in step.describe(step.place(batch))) == said
