"""The exact lab: its truth against autograd and brute force, and the anchors that theory gives."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import offcorr
from offcorr.lab import exact
from offcorr.lab.exact import Accuracy, Setting, World, couples, measure
from offcorr.methods.registry import catalogue

SMALL = Setting(vocabulary=3, length=4)
POLICIES, REGIMES, ADVANTAGES = ("tabular", "tied"), ("stale", "noise", "drift", "early"), ("grpo", "per-token")
CELLS = [
    dataclasses.replace(SMALL, policy=policy, regime=regime, gap=gap, advantages=advantages)
    for policy, regime, gap, advantages in itertools.product(POLICIES, REGIMES, (0.1, 0.5, 0.85), ADVANTAGES)
]


def named(setting: Setting) -> str:
    return f"{setting.policy}-{setting.regime}-{setting.gap}-{setting.advantages}"


def bias(world: World, name: str, **options: object) -> float:
    return measure(world, offcorr.get(name, **options)).accuracy[64].bias


# -- the truth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_the_true_gradient_is_the_derivative_of_the_expected_reward(policy, advantages):
    world = World.of(dataclasses.replace(SMALL, policy=policy, advantages=advantages))
    tree = world.tree
    if world.features is None:
        parameters = world.trainer.clone().requires_grad_()
        logits = parameters
    else:  # the trainer's logits, but for a constant of each prefix that the softmax takes out
        parameters = torch.zeros(world.features.shape[2], dtype=torch.float64, requires_grad=True)
        logits = world.trainer + world.features @ parameters
    chances = tree.of_tokens(logits.log_softmax(1)).sum(1).exp()
    (wanted,) = torch.autograd.grad((chances * world.rewards).sum(), parameters)
    sampled = (world.chances * world.rewards).sum()
    sd = (sampled * (1 - sampled)).sqrt()  # of a reward of 0 or 1
    torch.testing.assert_close(world.gradient * sd, wanted.flatten(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_and_their_squares_are_those_of_autograd(policy):
    world = World.of(dataclasses.replace(SMALL, policy=policy))
    draw = torch.Generator().manual_seed(3)
    factors = torch.randn(world.tree.symbols.shape, generator=draw, dtype=torch.float64)
    parameters = torch.zeros_like(world.gradient, requires_grad=True)
    moved = (
        parameters.view_as(world.trainer)
        if world.features is None
        else (world.features.flatten(0, 1) @ parameters).view_as(world.trainer)
    )
    logp = world.tree.of_tokens((world.trainer + moved).log_softmax(1))
    for row in (0, 5, 80):
        (wanted,) = torch.autograd.grad((factors[row] * logp[row]).sum(), parameters, retain_graph=True)
        rows = torch.tensor([row])
        torch.testing.assert_close(world.scores.sum(factors[rows], rows), wanted)
        torch.testing.assert_close(world.scores.squares(factors)[row], wanted.square().sum())


def test_moments_agree_with_brute_force():
    """token_is with a cap of 1.2, written out: every batch of 2 sequences, each with its probability."""
    world = World.of(Setting(vocabulary=2, length=2, gap=0.3, regime="noise", seed=4))
    trainer, old, tree = world.trainer, world.old, world.tree
    contributions = []
    for y, (first, second) in enumerate(itertools.product((0, 1), repeat=2)):
        gradient = torch.zeros_like(trainer)
        for prefix, symbol in ((0, first), (1 + first, second)):
            ratio = float((trainer[prefix, symbol] - old[prefix, symbol]).exp())
            score = -trainer[prefix].exp()
            score[symbol] += 1
            gradient[prefix] += min(ratio, 1.2) * world.advantages[y, 0] * score
        contributions.append((float((old[0, first] + old[1 + first, second]).exp()), gradient.flatten()))
    assert sum(chance for chance, _ in contributions) == pytest.approx(1)

    pairs = list(itertools.product(contributions, repeat=2))
    mean = sum(p * q * (a + b) / 2 for (p, a), (q, b) in pairs)
    square = float(sum(p * q * ((a + b) / 2).square().sum() for (p, a), (q, b) in pairs))
    g = world.gradient
    found = measure(world, offcorr.get("token_is", cap=1.2), sizes=(2,)).accuracy[2]
    assert found.bias == pytest.approx(float((mean - g).norm() / g.norm()))
    assert found.variance == pytest.approx((square - float(mean.square().sum())) / float(g.square().sum()))
    assert found.direction == pytest.approx(float(mean @ g) / (math.sqrt(square) * float(g.norm())))
    assert tree.sequences == 4


# -- anchors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", CELLS, ids=named)
def test_the_sequence_ratio_is_unbiased(setting):
    assert bias(World.of(setting), "sequence_is") < 1e-12


@pytest.mark.parametrize("setting", CELLS, ids=named)
def test_the_prefix_ratio_is_unbiased_with_advantages_per_token_alone(setting):
    found = bias(World.of(setting), "prefix_is")
    assert found < 1e-12 if setting.advantages == "per-token" else found > 1e-3


def test_the_total_ratio_is_unbiased_whatever_the_engine_does():
    for regime in ("noise", "quantised", "sharper", "flatter"):
        world = World.of(dataclasses.replace(SMALL, engine_regime=regime, engine_gap=0.1))
        assert bias(world, "vcpo", cap=1e9) < 1e-12
        assert bias(world, "sequence_is") > 1e-3  # which knows nothing of the engine


@pytest.mark.parametrize("advantages", ADVANTAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_on_policy_every_method_is_reinforce_but_the_declared_exceptions(policy, advantages):
    world = World.of(dataclasses.replace(SMALL, policy=policy, gap=0.0, advantages=advantages))
    assert torch.equal(world.trainer, world.old) and torch.equal(world.old, world.engine)
    rows = torch.multinomial(world.chances, 64, replacement=True, generator=torch.Generator().manual_seed(0))
    reinforce = exact.applied_to(world, offcorr.get("reinforce"), rows)
    assert bias(world, "reinforce") < 1e-12
    for method in catalogue():
        found = exact.applied_to(world, method(**method.example), rows)
        same = torch.allclose(found, reinforce, rtol=1e-10, atol=1e-13)
        assert same == method.on_policy, f"{method.name}: REINFORCE's on-policy: {same}, declared: {method.on_policy}"
        if not couples(method(**method.example)):
            assert (bias(world, method.name, **method.example) < 1e-12) == method.on_policy, method.name


@pytest.mark.parametrize("name", ["minpro", "ppo", "sequence_is"])
def test_drawn_moments_agree_with_exact_ones(name):
    world = World.of(dataclasses.replace(SMALL, regime="noise", gap=0.3))
    loss_fn = offcorr.get(name)
    wanted, found = exact.exact(world, loss_fn, (64,)), exact.drawn(world, loss_fn, (64,), 1000)
    assert found.drawn == 1000 and wanted.drawn == 0
    a, b = wanted.accuracy[64], found.accuracy[64]
    assert b.bias == pytest.approx(a.bias, abs=0.05)
    assert b.variance == pytest.approx(a.variance, rel=0.1)
    assert b.direction == pytest.approx(a.direction, abs=0.02)
    assert found.limit == pytest.approx(wanted.limit, abs=0.03)
    assert (found.kept, found.multiplier) == pytest.approx((wanted.kept, wanted.multiplier), rel=0.02)


def test_few_draws_do_not_bias_the_variance():
    """The mean of a few draws is itself noisy: |E g^|^2 must not count that noise as bias."""
    setting = dataclasses.replace(SMALL, regime="noise", gap=0.3)
    world, loss_fn, found = World.of(setting), offcorr.get("minpro"), []
    for seed in range(80):
        other = dataclasses.replace(world, setting=dataclasses.replace(setting, seed=seed))
        found.append(exact.drawn(other, loss_fn, (16,), 4).accuracy[16].variance)
    wanted = exact.exact(world, loss_fn, (16,)).accuracy[16].variance
    assert sum(found) / len(found) == pytest.approx(wanted, rel=0.12)  # naively it is 3/4 of that


# -- what the measures mean ----------------------------------------------------------------------------------


def test_shrinking_lowers_the_rmse_and_not_the_direction():
    """A gradient of 0 beats the unbiased one by its RMSE; by its direction no factor changes anything."""
    world = World.of(Setting())
    unbiased = measure(world, offcorr.get("sequence_is"))
    plain, shrunk = (measure(world, offcorr.get("opmd", tau=tau)) for tau in (0.0, 1e9))
    assert shrunk.accuracy[64].rmse == pytest.approx(1, abs=1e-6) and unbiased.accuracy[64].rmse > 1.2
    for size in (64, 1024):
        assert shrunk.accuracy[size].direction == pytest.approx(plain.accuracy[size].direction)
    assert shrunk.multiplier == pytest.approx(1e-9) and plain.multiplier == pytest.approx(1)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum"])
@pytest.mark.parametrize("run", [exact.exact, lambda *given: exact.drawn(*given, 20)], ids=["exact", "drawn"])
def test_aggregation_is_divided_out(aggregate, run):
    world = World.of(SMALL)
    wanted = run(world, offcorr.get("minpro"), (64,))
    found = run(world, offcorr.get("minpro", aggregate=aggregate), (64,))
    assert found.accuracy[64] == pytest.approx(wanted.accuracy[64])
    assert found.multiplier == pytest.approx(wanted.multiplier)
    longer = offcorr.get("minpro", aggregate="seq-mean-token-sum-norm", max_length=512)
    assert run(world, longer, (64,)).accuracy[64] == pytest.approx(wanted.accuracy[64])


def test_kept_and_multiplier_are_those_of_the_formula():
    world = World.of(SMALL)
    found = measure(world, offcorr.get("token_is", cap=1.1))
    ratio = world.tree.of_tokens(world.trainer - world.old).exp()
    size = world.chances[:, None] * world.advantages.abs()
    assert found.multiplier == pytest.approx(float((size * ratio.clamp(max=1.1)).sum() / size.sum()))
    assert found.kept == 1
    inside = torch.where(world.advantages > 0, ratio <= 1.2, ratio >= 0.8)
    wanted = float((world.chances[:, None] * inside).sum() / world.tree.length)
    assert wanted < 0.95
    assert measure(world, offcorr.get("ppo")).kept == pytest.approx(wanted)


def test_a_correction_that_couples_sequences_is_run_on_drawn_batches():
    for name in ("bapo", "m2po", "asymre"):
        assert couples(offcorr.get(name))
        assert measure(World.of(SMALL), offcorr.get(name), draws=4).drawn == 4
    kept_only = offcorr.get("icepop", count_rejected=False)
    assert couples(kept_only) and not couples(offcorr.get("icepop"))
    assert measure(World.of(SMALL), kept_only, draws=4).drawn == 4


def test_a_gradient_of_zero_has_no_direction():
    assert Accuracy.of(0.0, 0.0, 0.0, 4.0) == (1.0, 0.0, 0.0)


# -- the world -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", CELLS[::5], ids=named)
def test_the_gap_is_the_share_of_the_samples_that_is_lost(setting):
    world = World.of(dataclasses.replace(setting, engine_gap=0.2))
    total = [world.tree.of_tokens(logp).sum(1) for logp in (world.trainer, world.old, world.engine)]
    for first, second, gap in ((0, 1, setting.gap), (1, 2, 0.2)):
        weights = (total[first] - total[second]).exp()
        chances = total[second].exp()
        assert float(chances.sum()) == pytest.approx(1)
        assert 1 / float((chances * weights.square()).sum()) == pytest.approx(1 - gap, abs=1e-6)
    assert world.distances()["staleness"]["ess"] == pytest.approx(1 - setting.gap, abs=1e-6)
    assert 0 < world.success(world.old) < 1


def test_stale_means_that_the_trainer_has_learnt():
    for policy in POLICIES:
        world = World.of(Setting(policy=policy, regime="stale"))
        assert world.success(world.trainer) > 1.5 * world.success(world.old)


def test_a_seed_is_a_world():
    first, again, other = (World.of(dataclasses.replace(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.trainer, again.trainer) and torch.equal(first.engine, again.engine)
    assert not torch.equal(first.rewards, other.rewards)
    runs = [measure(world, offcorr.get("m2po"), draws=5).accuracy for world in (first, again)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"gap": 1.0}, "gap is 1.0, expected a share of the samples, 0 <= gap < 1"),
        ({"gap": math.nan}, "gap is nan, expected a share"),
        ({"engine_gap": -0.1}, "engine_gap is -0.1, expected a share of the samples, 0 <= engine_gap < 1"),
        (
            {"regime": "stales"},
            "regime is 'stales', did you mean 'stale'? Expected one of ['stale', 'noise', 'drift', 'early']",
        ),
        (
            {"engine_regime": "early"},
            "engine_regime is 'early', expected one of ['noise', 'quantised', 'sharper', 'flatter']",
        ),
        ({"advantages": "gae"}, "advantages is 'gae', expected one of ['grpo', 'per-token']"),
        ({"policy": "linear"}, "policy is 'linear', expected one of ['tabular', 'tied']"),
        ({"length": 0}, "length is 0, expected a whole number >= 1"),
        ({"vocabulary": 1}, "vocabulary is 1, expected a whole number >= 2"),
        ({"length": 9}, "length is 9 with a vocabulary of 4, more than 65,536 sequences to enumerate; expected at mo"),
        ({"vocabulary": 70000, "length": 1}, "vocabulary is 70000, expected at most 65,536"),
        ({"seed": -1}, "seed is -1, expected a whole number >= 0"),
    ],
)
def test_a_setting_is_checked(given, said):
    with pytest.raises(ValueError) as refused:
        Setting(**given)
    assert str(refused.value).startswith(said)


def test_the_longest_length_is_allowed():
    assert Setting(length=8).length == 8 and Setting(vocabulary=2, length=16).length == 16


def test_a_gap_out_of_reach_says_how_far_the_regime_goes():
    with pytest.raises(ValueError, match=r"gap is 0.99, but regime 'stale' reaches at most 0\.\d+ with this length"):
        World.of(Setting(gap=0.99, regime="stale"))
    with pytest.raises(ValueError, match="gap is 0.9999, but regime 'stale' reaches at most"):
        World.of(Setting(length=3, gap=0.9999, regime="stale", policy="tied", seed=0))
