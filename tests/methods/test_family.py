"""What each method says of itself: masks, tails, kernels and schedules at points worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.training.schedules import Annealed, Linear
from tests.fresh import python


def moved(ratios, advantages, **fields):
    """One sequence whose tokens have these ratios; in float64."""
    delta = torch.tensor([ratios], dtype=torch.float64).log()
    old = torch.full_like(delta, -3.0)
    advantages = torch.tensor([advantages], dtype=torch.float64).expand_as(delta)
    return Batch(logp=old + delta, old_logp=old, advantages=advantages, mask=torch.ones_like(delta).bool(), **fields)


def multipliers(name, batch, **options):
    """c_t of a method under token-mean."""
    out = offcorr.get(name, **options, aggregate="token-mean")(batch)
    return (-out.coefficient * batch.mask.sum() / batch.advantages)[0].tolist()


# -- REC -----------------------------------------------------------------------------------------------------

RATIOS = [0.3, 0.5, 0.9, 1.1, 1.5, 3.5]
KEPT = {
    ("one-side", 1): [1, 1, 1, 1, 0, 0],
    ("one-side", -1): [0, 0, 1, 1, 1, 1],
    ("two-side", 1): [0, 0, 1, 1, 0, 0],
    ("two-side", -1): [0, 0, 1, 1, 0, 0],
    ("ring", 1): [1, 0, 1, 1, 0, 0],  # back in at r <= 1 - .6
    ("ring", -1): [0, 0, 1, 1, 0, 1],  # and at r >= 1 + 2
}


@pytest.mark.parametrize("mode, sign", KEPT)
def test_rec_masks(mode, sign):
    kept = KEPT[mode, sign]
    batch = moved(RATIOS, float(sign))
    assert multipliers("rec", batch, mode=mode, weighted=False) == pytest.approx(kept)
    weighted = [r * k for r, k in zip(RATIOS, kept, strict=True)]
    assert multipliers("rec", batch, mode=mode) == pytest.approx(weighted)


def test_rec_one_side_weighted_has_the_gradient_of_ppo():
    for sign in (1.0, -1.0):
        batch = moved(RATIOS, sign)
        assert multipliers("rec", batch) == pytest.approx(multipliers("ppo", batch))


def test_rec_bounds_are_options():
    batch = moved(RATIOS, 1.0)
    assert multipliers("rec", batch, mode="ring", weighted=False, eps_low_prime=0.8) == [0, 0, 1, 1, 0, 0]
    assert multipliers("rec", batch, mode="two-side", weighted=False, eps_low=0.6, eps_high=2.0) == [0, 1, 1, 1, 1, 0]


# -- DGPO ----------------------------------------------------------------------------------------------------


def test_dgpo_decays_outside_and_is_continuous_at_the_bounds():
    low, high, n, m = 0.8, 1.28, 2.0, 3.0
    options = {"eps_low": 0.2, "eps_high": 0.28, "n": n, "m": m}
    blamed = moved([0.4, low * (1 - 1e-9), low, 1.0, 2.0], -1.0)
    assert multipliers("dgpo", blamed, **options) == pytest.approx([0.4**3 / low**2, low, low, 1.0, 2.0])
    praised = moved([0.4, 1.0, high, high * (1 + 1e-9), 2.0], 1.0)
    wanted = [0.4, 1.0, high, high, 2 ** (1 - 1 / m) * high ** (1 / m)]
    assert multipliers("dgpo", praised, **options) == pytest.approx(wanted)


def test_dgpo_reports_the_value_whose_gradient_it_hands_back():
    """Loss -mean(c A) and gradient -c A / Z: the tail is a constant to the gradient."""
    batch = moved([0.4, 2.0], -1.0)
    out = offcorr.get("dgpo")(batch)
    assert out.loss.item() == pytest.approx(out.coefficient.sum().item())
    assert out.coefficient[0, 0].item() == pytest.approx(0.4**2 / 0.8 / 2)


def test_dgpo_tails_take_the_ratio_that_they_are_given():
    gate = offcorr.get("dgpo").gate
    batch = moved([0.5, 0.5], -1.0)
    out = offcorr.Correction(ratio=offcorr.ratios.Sequence(), gate=gate)(batch)
    assert (2 * out.coefficient[0]).tolist() == pytest.approx([0.25**2 / 0.8] * 2)


# -- VESPO, DISPO, OPMD, Kimi --------------------------------------------------------------------------------


@pytest.mark.parametrize("sign, peak, height", [(1.0, 2 / 3, 1.208), (-1.0, 1.5, 1.242)])
def test_vespo_kernel(sign, peak, height):
    def phi(ratio):
        return multipliers("vespo", moved([ratio], sign))[0]

    assert phi(1.0) == pytest.approx(1.0)
    assert phi(peak) == pytest.approx(height, abs=1e-3)
    assert phi(peak) > max(phi(peak * 0.99), phi(peak * 1.01))
    assert phi(1e-6) < 1e-9 and phi(1e3) < 1e-9


def test_vespo_takes_the_product_over_the_sequence():
    assert multipliers("vespo", moved([2.0, 3.0], 1.0)) == pytest.approx([6**2 * math.exp(3 - 18)] * 2)


def test_dispo_bounds_by_sign():
    assert multipliers("dispo", moved([0.1, 1.0, 50.0], 1.0)) == pytest.approx([0.8, 1.0, 11.0])
    assert multipliers("dispo", moved([0.1, 1.0, 50.0, 500.0], -1.0)) == pytest.approx([0.1, 1.0, 50.0, 101.0])


def test_opmd_and_kimi():
    assert multipliers("opmd", moved([0.1, 9.0], 1.0), tau=3.0) == pytest.approx([0.25, 0.25])
    assert multipliers("kimi", moved([math.e, 1.0], 2.0), tau=0.5) == pytest.approx([1 - 0.25, 1.0])
    assert offcorr.get("dro", tau=0.5) == offcorr.get("kimi", tau=0.5)


# -- TOPR, AsymRE --------------------------------------------------------------------------------------------


def test_topr_is_keyed_on_the_reward_not_the_advantage():
    for advantage in (1.0, -1.0):
        batch = moved([0.5, 0.5], advantage, rewards=torch.tensor([1.0]))
        assert multipliers("topr", batch) == pytest.approx([1.0, 1.0])
        batch = dataclasses.replace(batch, rewards=torch.tensor([0.0]))
        assert multipliers("topr", batch) == pytest.approx([0.25, 0.25])
        assert multipliers("topr", batch, level="token") == pytest.approx([0.5, 0.5])
    above = moved([3.0, 1.0], 1.0, rewards=torch.tensor([-1.0]))
    assert multipliers("topr", above) == pytest.approx([1.0, 1.0])


def test_asymre_shifts_each_groups_mean():
    logp = torch.zeros(5, 2, dtype=torch.float64) - 1
    batch = Batch(
        logp=logp,
        advantages=torch.full((5,), 7.0),
        mask=logp < 0,
        rewards=torch.tensor([1.0, 0.0, 4.0, 0.0, 2.0]),
        group_ids=torch.tensor([3, 3, -1, -1, -1]),
    )
    pull = -10 * offcorr.get("asymre", delta_v=-0.25)(batch).coefficient[:, 0]
    assert pull.tolist() == pytest.approx([0.75, -0.25, 2.25, -1.75, 0.25])


@pytest.mark.parametrize(
    "name, missing", [("topr", "rewards"), ("asymre", "rewards"), ("asymre", "group_ids"), ("vcpo", "rollout_logp")]
)
def test_what_is_missing_is_named(name, missing):
    fields = {"rewards": torch.ones(1), "group_ids": torch.zeros(1).long()}
    fields.pop(missing, None)
    assert missing in offcorr.get(name).needs
    with pytest.raises(ValueError, match=f"{missing} is None, but .* of '{name}' needs it"):
        offcorr.get(name)(moved([1.0], 1.0, **fields))


# -- turns, power means, lengths -----------------------------------------------------------------------------


def test_turn_ppo_skips_tool_output():
    batch = moved([1.1, 1.0, 99.0, 0.9, 0.9], 1.0)
    mask = torch.tensor([[True, True, False, True, True]])
    batch = dataclasses.replace(batch, mask=mask)
    assert multipliers("turn_ppo", batch) == pytest.approx([1.1**0.5] * 2 + [0.0] + [0.9] * 2)
    named = dataclasses.replace(batch, turn_ids=torch.tensor([[0, 1, 5, 1, 1]]))
    assert multipliers("turn_ppo", named) == pytest.approx([1.1] + [0.81 ** (1 / 3)] + [0.0] + [0.81 ** (1 / 3)] * 2)


def test_holderpo_power_mean():
    ratios = [0.9, 1.2]
    for power in (2.0, 1.0, -1.0):
        s = (sum(r**power for r in ratios) / 2) ** (1 / power)
        wanted = [s ** (1 - power) * r**power for r in ratios]
        assert multipliers("holderpo", moved(ratios, 1.0), power=power) == pytest.approx(wanted)
    s = (0.9 * 1.2) ** 0.5
    assert multipliers("holderpo", moved(ratios, 1.0), power=0.0) == pytest.approx([s, s])


def test_holderpo_schedule():
    options = {"power": Linear(3.0, 1.0), "eps_high": 0.5, "aggregate": "token-mean"}
    annealed = Annealed(functools.partial(offcorr.get, "holderpo"), options)
    assert [annealed.at(done).ratio.power for done in (0.0, 0.25, 1.0)] == [3.0, 2.5, 1.0]
    loss_fn = annealed.at(0.25)
    assert loss_fn == offcorr.get("holderpo", power=2.5, eps_high=0.5, aggregate="token-mean")
    assert offcorr.from_config(loss_fn.to_config()) == loss_fn
    with pytest.raises(ValueError, match="done is 1.5, expected the share of the training that is done"):
        annealed.at(1.5)
    with pytest.raises(ValueError, match="Linear: end is nan"):
        Linear(2.0, math.nan)
    with pytest.raises(ValueError, match="Clip: eps_low is -0.1"):  # at the door, not in the middle of a run
        Annealed(functools.partial(offcorr.get, "ppo"), {"eps_low": Linear(0.2, -0.1)})
    assert offcorr.get("holderpo").ratio.power == 2.0  # without a trainer nothing moves


def test_luspo_is_gspo_times_the_length():
    logp = torch.zeros(2, 4, dtype=torch.float64) - 1
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]]).bool()
    batch = Batch(logp=logp + 1e-4, old_logp=logp, advantages=torch.ones(2), mask=mask)
    ratio = offcorr.get("luspo")(batch).coefficient / offcorr.get("gspo")(batch).coefficient
    assert ratio[mask].tolist() == pytest.approx([4.0] * 4 + [2.0] * 2)


# -- options -------------------------------------------------------------------------------------------------


# -- bounds and penalties of the methods that compare with the sampler ----------------------------------------


def sampled(ratios, advantages, rollout=-3.0):
    """As ``moved``, with the same ratios to the sampler's log-probs, which ``old_logp`` is far from."""
    delta = torch.tensor([ratios], dtype=torch.float64).log()
    engine = torch.full_like(delta, rollout)
    advantages = torch.tensor(advantages, dtype=torch.float64).expand_as(delta)
    return Batch(
        logp=engine + delta, old_logp=engine - 1, rollout_logp=engine, advantages=advantages, mask=delta < math.inf
    )


def coefficients(name, batch, **options):
    """-dL/dlogp times Z, under token-mean."""
    out = offcorr.get(name, **options, aggregate="token-mean")(batch)
    return (-out.coefficient * batch.mask.sum())[0].tolist()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_glm5_drops_what_lies_on_a_bound_whatever_the_sign(sign):
    batch = sampled([0.5, 1.0, 2.0, 1.5], sign, rollout=0.0)
    assert coefficients("glm5", batch, eps_low=0.5, eps_high=1.0) == pytest.approx([0, sign, 0, 1.5 * sign])
    wider = coefficients("glm5", batch, eps_low=0.5 + 1e-9, eps_high=1.0 + 1e-9)
    assert wider == pytest.approx([0.5 * sign, sign, 2.0 * sign, 1.5 * sign])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ipo_keeps_what_lies_on_the_bound_on_either_side(sign):
    """mu = 1/4; the probabilities are 1/4, 1/2 (on the bound), 9/16, 1/8."""
    batch = sampled([1.0, 2.0, 2.25, 0.5], sign, rollout=-math.log(4))
    moved_by = (batch.logp.exp() - batch.rollout_logp.exp()).abs()
    bound = moved_by[0, 1].item()
    assert coefficients("ipo", batch, threshold=bound) == pytest.approx([sign, 2 * sign, 0, 0.5 * sign])
    assert coefficients("ipo", batch, threshold=math.nextafter(bound, 0))[1] == 0
    down = coefficients("ipo", batch, threshold=0.125 - 1e-9)
    assert down == pytest.approx([sign, 0, 0, 0])


def test_ipos_pull_acts_on_dropped_tokens_and_without_an_advantage():
    batch = sampled([2.0, 4.0, 0.5], [[0.0, 1.0, -1.0]])
    kept = [0.0, 0.0, -0.5]
    pull = [-2 * 0.3 * math.log(ratio) for ratio in (2.0, 4.0, 0.5)]
    found = coefficients("ipo", batch, threshold=0.1, kl_tau=0.3)
    assert found == pytest.approx([a + b for a, b in zip(kept, pull, strict=True)])
    far = offcorr.rejections.K1(0.1, 3.0, level="token", mismatch="total")
    rejected = coefficients("ipo", batch, threshold=0.1, kl_tau=0.3, reject=far)
    assert rejected == pytest.approx([found[0], 0.0, found[2]])
    assert not offcorr.get("ipo", kl_tau=0.3).gate.scales_with_advantage
    assert offcorr.get("ipo").gate.scales_with_advantage and not any(coefficients("ipo", sampled([2.0, 4.0], 0.0)))


def test_drpo_is_importance_sampling_with_hardly_a_bound_by_default():
    ratios = [0.3, 1.0, 3.0, 9.9]
    batch = sampled(ratios, 1.0, rollout=-math.log(10))
    assert multipliers("drpo", batch) == pytest.approx(ratios, rel=0.08)
    near = multipliers("drpo", batch, delta=0.2)  # mu (R - 1) is -.07, 0, .2 and .89
    assert near == pytest.approx([0.3 * 1.35, 1.0, 0.0, 9.9 * (1 - 4.45)])
    assert multipliers("drpo", batch, delta=2.0, divergence="chi2") == pytest.approx([0.3 * 1.35, 1.0, 0.0, -34.155])
    flipped = dataclasses.replace(batch, advantages=-batch.advantages)
    assert multipliers("drpo", flipped, delta=0.2) == pytest.approx([0.3 * 0.65, 1.0, 6.0, 9.9 * 5.45])


def test_pspo_is_importance_sampling_with_a_smaller_step():
    batch = moved([0.5, 1.0, 4.0], -1.0)
    plain = offcorr.get("token_is", aggregate="token-mean")(batch)
    out = offcorr.get("pspo", alpha=0.25, aggregate="token-mean")(batch)
    torch.testing.assert_close(out.coefficient, 0.75 * plain.coefficient)
    assert -out.loss.item() == pytest.approx(-(0.75 * 5.5 / 3 + 0.25))


# -- geometric prefixes and means ----------------------------------------------------------------------------


def test_pnpos_interval_narrows_to_its_base_at_the_last_valid_token():
    """Every w_t is 1.3 and T = 4, so that h = 2, 2^.5, (4/3)^.5, 1 on the valid tokens."""
    batch = moved([1.3] * 6, 1.0)
    batch = dataclasses.replace(batch, mask=torch.tensor([[True, False, True, True, False, True]]))
    for high, kept in {1.31: "1111", 1.29: "1110", 1.25: "1100", 1.2: "1000", 1.13: "0000"}.items():
        found = offcorr.get("pnpo", low=0.5, high=high)(batch).metrics.compute()["offcorr/loss/kept"]
        assert found == pytest.approx(kept.count("1") / 4), high
        c = coefficients("pnpo", batch, low=0.5, high=high)
        assert [round(c[t], 9) for t in (0, 2, 3, 5)] == [1.3 * int(keep) for keep in kept]
    fixed = coefficients("pnpo", batch, low=0.5, high=1.29, length_power=0.0)
    assert not any(fixed)
    mirrored = dataclasses.replace(batch, logp=2 * batch.old_logp - batch.logp)  # w = 1/1.3
    c = coefficients("pnpo", mirrored, low=1 / 1.25, high=2.0)
    assert [round(c[t], 9) for t in (0, 2, 3, 5)] == [round(1 / 1.3, 9)] * 2 + [0, 0]


def test_geo_mis_tests_the_root_and_weighs_by_the_product():
    batch = sampled([1.5] * 20, 1.0)
    assert coefficients("geo_mis", batch, low=0.5, high=1.6) == pytest.approx([1.5**20] * 20)
    assert not any(coefficients("geo_mis", batch, low=0.5, high=1.4))
    assert not any(coefficients("geo_mis", batch, low=1.6, high=2.0))


def test_ctpos_geometric_prefix_has_the_gradient_of_a_token():
    """The multiplier is the root s itself, not s / t; a negative power narrows the bounds."""
    batch = moved([1.2, 1.2, 1.2], 1.0)
    options = {"level": "prefix_geometric", "power": -0.5, "log_low": 1.0}
    assert multipliers("ctpo", batch, log_high=0.4, **options) == pytest.approx([1.2, 1.2, 1.2])
    assert multipliers("ctpo", batch, log_high=0.3, **options) == pytest.approx(
        [1.2, 1.2, 0]
    )  # .3, .21, .17; log 1.2 = .18
    assert multipliers("ctpo", batch, log_high=0.3) == pytest.approx([1.2, 1.44, 0])  # prefix, power .5: .3, .42, .52


def test_opsm_decides_per_sequence_where_it_is_asked_to():
    """Advantages -3, 1, 1 with a mean below 0, and 3, -1, -1 with one above; both sequences fell by one nat a token."""
    old = torch.full((3, 3), -3.0, dtype=torch.float64)
    advantages = torch.tensor([[-3.0, 1, 1], [3, -1, -1], [1, -1, 0]], dtype=torch.float64)
    batch = Batch(logp=old - 1, old_logp=old, advantages=advantages, mask=old < 0)
    gate = {"eps_low": 1.0, "aggregate": "sum"}
    by_token = offcorr.get("opsm", delta=0.5, **gate)(batch).coefficient != 0
    by_sequence = offcorr.get("opsm", delta=0.5, level="sequence", **gate)(batch).coefficient != 0
    assert torch.equal(by_token, advantages > 0)
    assert by_sequence.tolist() == [[False] * 3, [True] * 3, [True, True, False]]  # a mean of 0 is kept
    near = dataclasses.replace(batch, logp=old - 0.4)
    assert torch.equal(offcorr.get("opsm", delta=0.5, level="sequence", **gate)(near).coefficient != 0, advantages != 0)
    one = dataclasses.replace(batch, advantages=torch.tensor([-1.0, 1, -1], dtype=torch.float64))
    same = [offcorr.get("opsm", level=level)(one).coefficient for level in ("token", "sequence")]
    assert torch.equal(*same) and not same[0][0].any()


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("topr", {"level": "turn"}, "topr: level is 'turn', expected 'sequence' or 'token'"),
        ("rec", {"mode": "one-sided"}, "REC: mode is 'one-sided', did you mean 'one-side'?"),
        ("dgpo", {"eps_low": 1.0}, "eps_low is 1.0, expected a number < 1"),
        ("dgpo", {"m": 0}, "m is 0, expected a finite number > 0"),
        ("vespo", {"lam_pos": 0.0}, "lam_pos is 0.0, expected a finite number > 0"),
        ("dispo", {"pos_low": 12.0}, "pos_low = 12.0 is above pos_high = 11.0"),
        ("opmd", {"tau": -1.0}, "tau is -1.0, expected a finite number >= 0"),
        ("kimi", {"tau": math.nan}, "tau is nan, expected a finite number >= 0"),
        ("m2po", {"tau": -0.1}, "tau is -0.1, expected a finite number >= 0"),
        ("asymre", {"delta_v": "low"}, "delta_v is 'low', expected a finite number"),
        ("dppo", {"divergence": "js"}, "divergence is 'js', expected one of"),
        ("aipo", {"weight": {"name": "truncate"}}, "both count the engine ratio"),
        ("ipo", {"threshold": -0.1}, "threshold is -0.1, expected a finite number >= 0"),
        ("glm5", {"eps_low": 0.0}, "eps_low is 0.0, expected a finite number > 0"),
        ("drpo", {"divergence": "kl"}, "divergence is 'kl', expected one of"),
        ("drpo", {"delta": 0.0}, "delta is 0.0, expected a finite number > 0"),
        ("pspo", {"alpha": 1.0}, "alpha is 1.0, expected a number < 1"),
        ("pnpo", {}, "pnpo requires low and high, without a default: pass a value, for instance low=0.8, high=1.25"),
        ("pnpo", {"low": 1.2, "high": 1.1}, "low = 1.2 is above high = 1.1"),
        ("geo_mis", {"low": 0.5}, "geo_mis requires high, without a default"),
        ("opsm", {"level": "turn"}, "level is 'turn', expected one of"),
        ("ctpo", {"level": "sequence"}, "ctpo: level is 'sequence', expected one of"),
    ],
)
def test_refused(name, options, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        offcorr.get(name, **options)


def test_cppos_budget_is_a_quantile_between_order_statistics():
    """Of .1, .3 and .4 the .75-quantile is .35: the second token has .25 left, the third all of delta."""
    numbers = offcorr.rejections.CPPO(0.3, w_min=1.0, budget_low=0.0, budget_high=1.0, quantile=0.75).params
    shifts = torch.tensor([[0.4, 9.0, 0.3, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True]])
    rows = Batch(logp=-shifts, advantages=torch.ones(1), mask=mask).tokens.rows
    margin = offcorr.spans.budget_margin(torch.where(mask, shifts, 0), rows, numbers)
    torch.testing.assert_close(margin[mask], torch.tensor([-0.1, -0.05, 0.2], dtype=torch.float64))


def test_estr_lets_a_token_without_a_choice_move_by_the_floor():
    """Entropy 0: log^2 R is at most tau floor = .001."""
    old = torch.full((1, 2), -2.0)
    moved = old + torch.tensor([[0.03, 0.04]])
    fields = {"rollout_logp": old, "entropy": torch.zeros(1, 2), "advantages": torch.ones(1), "mask": old < 0}
    out = offcorr.get("estr", tau=0.1, floor=0.01)(Batch(logp=moved, **fields))
    assert (out.coefficient != 0).tolist() == [[True, False]]
    fields["entropy"] = None
    with pytest.raises(ValueError, match="entropy is None, but ESTR"):
        offcorr.get("estr", tau=0.1)(Batch(logp=moved, **fields))


def test_a_methods_own_station_is_known_to_a_fresh_process():
    """A free correction that borrows a gate from a method's file comes back from its configuration."""
    loss_fn = offcorr.Correction(ratio=offcorr.ratios.Prefix(), gate=offcorr.get("dgpo").gate)
    code = f"import offcorr; print(offcorr.from_config({loss_fn.to_config()!r}).gate)"
    run = python(code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == repr(loss_fn.gate)
