"""Tests of OPOB against an enumerated variance, and of its proxy against the formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import offcorr
from offcorr import Batch, gates, rejections, weights
from offcorr.methods.registry import illustration
from offcorr.training.baselines import OPOB, check_proportional, token_baseline

FEATURES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5], [0.3, -1.2]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([4, 3, 2, 1])  # samples per action out of 10: the sums below are expectations
REWARD = torch.tensor([1.0, 0.2, -0.5, 2.0], dtype=torch.float64)


@pytest.fixture
def theta():
    return torch.nn.Parameter(torch.tensor([0.4, -0.7], dtype=torch.float64))


def log_prob(theta):
    """Log-probs of four trajectories of one action each, with two parameters."""
    return (FEATURES @ theta).log_softmax(0)


def variance(theta, baseline):
    """Trace of the covariance of one sample's estimate w (R - b) g, enumerated over the four trajectories."""
    chance = BEHAVIOUR / BEHAVIOUR.sum()
    scores = torch.autograd.functional.jacobian(log_prob, theta.detach())
    values = (log_prob(theta).exp().detach() / chance * (REWARD - baseline))[:, None] * scores
    mean = (chance[:, None] * values).sum(0)
    return (chance[:, None] * (values - mean).square()).sum().item()


def feed(theta, opob):
    """Passes every trajectory as often as the behaviour policy samples it."""
    chance = BEHAVIOUR / BEHAVIOUR.sum()
    for action, times in enumerate(BEHAVIOUR.tolist()):
        for _ in range(times):
            logp = log_prob(theta)[action]
            opob.add(logp, REWARD[action], (logp.exp() / chance[action]).detach())
    return opob.end_group()


def test_the_exact_baseline_minimises_the_enumerated_variance(theta):
    found = feed(theta, OPOB([theta], denominator=10))
    least = variance(theta, found)
    for away in (1e-4, 1e-2, 0.3):
        assert variance(theta, found - away) > least < variance(theta, found + away)
    mean_reward = (BEHAVIOUR / 10 * REWARD).sum().item()
    assert least < 0.99 * variance(theta, mean_reward)  # and it differs from the ordinary baseline
    plain = OPOB([theta], denominator=10)
    for action, times in enumerate(BEHAVIOUR.tolist()):
        for _ in range(times):
            plain.add(log_prob(theta)[action], REWARD[action])  # w = 1
    assert plain.end_group() != pytest.approx(found, abs=1e-2)


def test_the_gradient_is_the_baselined_one(theta):
    """It is -sum w (R - b*) g / Z, added to p.grad; every group has its own baseline and its own sums."""
    theta.grad = torch.ones_like(theta)
    scores = torch.autograd.functional.jacobian(log_prob, theta.detach())
    weight = torch.tensor([0.7, 1.3, 2.0, 0.1], dtype=torch.float64)
    opob, wanted = OPOB([theta], denominator=4), torch.ones(2, dtype=torch.float64)
    for group in ([0, 1, 2], [3, 1]):
        for action in group:
            opob.add(log_prob(theta)[action], REWARD[action], weight[action])
        energy = (weight.square() * scores.square().sum(1))[group]
        baseline = (energy * REWARD[group]).sum() / energy.sum()
        assert opob.end_group() == pytest.approx(baseline.item())
        wanted -= (weight * (REWARD - baseline))[group] @ scores[group] / 4
    torch.testing.assert_close(theta.grad, wanted)


def test_parameters_that_a_trajectory_does_not_reach(theta):
    other, frozen = torch.nn.Parameter(torch.ones(3)), torch.zeros(2)
    opob = OPOB([theta, other, frozen], denominator=1)
    opob.add(log_prob(theta)[0], 1.0)
    assert opob.end_group() == 1.0
    assert other.grad.tolist() == [0, 0, 0] and frozen.grad is None


def test_no_score_gives_baseline_0_not_nan():
    alone = torch.nn.Parameter(torch.zeros(1))
    opob = OPOB([alone], denominator=1)
    opob.add(alone.log_softmax(0)[0], 1.0)  # there is one action: log pi is 0 for every parameter
    assert opob.end_group() == 0.0
    assert alone.grad.item() == 0.0


def test_opob_says_what_it_wants(theta):
    with pytest.raises(ValueError, match=r"log_prob has shape \(4,\), expected a scalar"):
        OPOB([theta], denominator=1).add(log_prob(theta), 1.0)
    with pytest.raises(ValueError, match="denominator is 0"):
        OPOB([theta], denominator=0)
    with pytest.raises(ValueError, match="parameters holds none that requires grad"):
        OPOB([torch.zeros(2)], denominator=1)


REFUSED = ("m2po", "ppo", "sapo", "ctpo", "gmpo", "opsm", "dppo", "rec", "bapo", "vespo", "asymre", "kimi")


@pytest.mark.parametrize("name", [*offcorr.available(), "m2po?tokens=all"])
def test_what_has_an_optimal_baseline_is_proportional_to_the_advantage(name):
    """Coefficients at A, -A and 0.5 A, on log-ratios that clips and budgets act on."""
    loss_fn = illustration(name, **({"max_length": 6} if name == "dppo" else {}))
    try:
        check_proportional(loss_fn)
    except ValueError as refused:
        assert name not in ("vcpo", "reinforce", "cispo", "minpro") and repr(loss_fn.method) in str(refused)
        return
    assert name not in REFUSED
    torch.manual_seed(0)
    logp = -2 + torch.randn(32, 6, dtype=torch.float64)
    batch = Batch(
        logp=logp,
        old_logp=logp + 0.3 * torch.randn(32, 6).double(),
        rollout_logp=logp + 0.3 * torch.randn(32, 6).double(),
        advantages=torch.ones(32).double(),
        mask=torch.rand(32, 6) < 0.9,
        rewards=(torch.rand(32) < 0.5).double(),
        group_ids=torch.arange(32) // 8,
    )
    unit = loss_fn(batch).coefficient
    assert (unit != 0).any()
    for scale in (-1.0, 0.5, 0.0):
        scaled = dataclasses.replace(batch, advantages=scale * batch.advantages)
        torch.testing.assert_close(loss_fn(scaled).coefficient, scale * unit)


def test_a_stage_that_depends_on_the_advantage_is_named():
    with pytest.raises(ValueError, match="OPSM.* of 'reinforce' may treat advantages of one sign otherwise"):
        check_proportional(offcorr.get("reinforce", reject=rejections.OPSM()))
    check_proportional(offcorr.get("reinforce", weight=weights.SelfNormalise(weights.Truncate(8.0))))

    class _OneSided(gates.ScoreFunction):
        surrogate = staticmethod(lambda logp, advantage: (advantage.relu() * logp, advantage.relu()))

    with pytest.raises(ValueError, match="_OneSided"):
        check_proportional(offcorr.Correction(ratio=None, gate=_OneSided()))


# -- the proxy -----------------------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    """Samples of two prompts, shuffled, with gaps and garbage under the mask."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(6, 5, 7, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    chosen = logp.amax(-1)
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 1],
            [1, 0, 0, 1, 1],  # tool tokens in the middle
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0],
        ]
    ).bool()
    garbage = torch.where(mask, 0.0, torch.nan).double()
    return Batch(
        logp=chosen + garbage,
        rollout_logp=chosen + 0.3 * torch.randn(6, 5, dtype=torch.float64) + garbage,
        sum_sq_probs=logp.exp().square().sum(-1) + garbage,
        advantages=torch.zeros(6, dtype=torch.float64),
        mask=mask,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([9, 4, 9, 4, 4, 9]),
    )


def by_the_formula(batch, cap):
    """b_t = sum G_t W_t / sum W_t over the prompt's trajectories with a t-th valid token, if there are several."""
    result = torch.zeros_like(batch.logp)
    for group in batch.group_ids.unique():
        rows = [i for i in range(len(batch.mask)) if batch.group_ids[i] == group]
        energy, place = {}, {}
        for i in rows:
            log_ratio = (batch.logp - batch.rollout_logp)[i][batch.mask[i]].sum()
            weight = min(log_ratio.exp().item(), cap)
            place[i] = batch.mask[i].nonzero().flatten().tolist()
            sofar = 0.0
            for t, where in enumerate(place[i]):
                sofar += weight**2 * (1 - 2 * batch.logp[i, where].exp() + batch.sum_sq_probs[i, where]).item()
                energy[i, t] = sofar
        for t in range(5):
            there = [i for i in rows if t < len(place[i])]
            total = sum(energy[i, t] for i in there)
            for i in there:
                if len(there) > 1:
                    result[i, place[i][t]] = sum(batch.rewards[j] * energy[j, t] for j in there) / total
    return result


@pytest.mark.parametrize("cap", [1.1, 8.0])
def test_the_proxy_is_its_formula(batch, cap):
    weight = weights.Truncate(cap, level="sequence", mismatch="total")
    found = token_baseline(batch, weight=weight)
    torch.testing.assert_close(found, by_the_formula(batch, cap))
    assert found[0, 4] == 0  # the only trajectory of its group with a fifth token
    assert found[1, 3] != 0  # its second valid token, which others have too


def test_the_proxy_does_not_depend_on_order_or_layout(batch):
    found = token_baseline(batch)
    order = torch.tensor([3, 5, 0, 4, 1, 2])
    torch.testing.assert_close(token_baseline(batch.rows(order)), found[order])
    mask = batch.mask
    packed = {name: getattr(batch, name)[mask] for name in ("logp", "rollout_logp", "sum_sq_probs")}
    packed = Batch.packed(
        **packed,
        mask=torch.ones(int(mask.sum())).bool(),
        advantages=batch.advantages,
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        cu_seqlens=torch.cat([torch.zeros(1).long(), mask.sum(1).cumsum(0)]),
    )
    torch.testing.assert_close(token_baseline(packed), found[mask])
    per_token = batch.rewards[:, None].expand_as(mask)
    torch.testing.assert_close(token_baseline(packed, returns=per_token[mask]), found[mask])
    torch.testing.assert_close(token_baseline(batch, returns=per_token), found)


def test_the_squared_score_is_the_gradient_over_logits():
    """The proxy rests on |grad log p|^2 over the logits = 1 - 2 p + sum p^2."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    (score,) = torch.autograd.grad(logp[2], logits)
    probabilities = logp.detach().exp()
    two = Batch(
        logp=logp.detach()[2].expand(2, 1),
        sum_sq_probs=probabilities.square().sum().expand(2, 1),
        advantages=torch.zeros(2).double(),
        mask=torch.ones(2, 1).bool(),
        rewards=torch.tensor([1.0, 0.0]).double(),
        group_ids=torch.tensor([0, 0]),
    )
    # Next to a token of squared score 1 (p -> 0 in a huge vocabulary), b = E / (E + 1), E the other's squared score.
    logp = two.logp.clone()
    logp[1], sum_sq = -1e3, two.sum_sq_probs.clone()
    sum_sq[1] = 0.0
    found = token_baseline(dataclasses.replace(two, logp=logp, sum_sq_probs=sum_sq), weight=None)[0, 0]
    energy = score.square().sum()
    torch.testing.assert_close(found, energy / (energy + 1))


@pytest.mark.parametrize("name", ["sum_sq_probs", "group_ids", "rewards", "rollout_logp"])
def test_the_proxy_says_what_to_pass(batch, name):
    with pytest.raises(ValueError, match=f"{name} is None.*pass"):
        token_baseline(dataclasses.replace(batch, **{name: None}))
