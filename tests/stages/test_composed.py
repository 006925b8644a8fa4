"""Tests of the stages of a correction, one by one and together: what cannot be meant is refused when it is built."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import offcorr
from offcorr import Correction, advantages, gates, ops, ratios, rejections, weights
from offcorr.methods.registry import catalogue, illustration
from offcorr.stages import checks

BATCH = offcorr.testing.example()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Correction(ratio=(ratios.Token(),)), "ratio is (Token(mismatch='staleness'),), expected one stage or"),
        (lambda: Correction(ratio=[ratios.Token()]), "ratio is (Token(mismatch='staleness'),), expected one stage or"),
        (lambda: Correction(gate=[gates.Clip(), gates.Clip()]), "gate is (Clip("),
        (
            lambda: Correction(advantages=(advantages.Centred(),)),
            "advantages is (Centred(mismatch=None),), expected on",
        ),
        (lambda: Correction(weight=[weights.Truncate(), None]), "weight is None, expected one of offcorr.weights"),
        (lambda: Correction(gate=weights.Truncate(2.0)), "expected one of offcorr.gates; it belongs into weight="),
        (lambda: Correction(weight=rejections.Veto()), "expected one of offcorr.weights; it belongs into reject="),
        (lambda: offcorr.from_config({"method": "custom", "gate": ["clip"]}), "dual_clip=None),), expected one stage"),
        (lambda: offcorr.from_config({"method": "custom", "ratio": []}), "ratio is (), expected one stage or None"),
        (
            lambda: offcorr.get("ppo", advantages=["centred"]),
            "advantages is (Centred(mismatch=None),), expected one st",
        ),
    ],
)
def test_one_stage_where_one_belongs(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_a_list_of_stages_is_a_tuple():
    listed = Correction(weight=[weights.Truncate(2.0)], reject=[rejections.Veto(), rejections.Geometric()])
    assert listed == Correction(weight=(weights.Truncate(2.0),), reject=(rejections.Veto(), rejections.Geometric()))
    assert listed == offcorr.from_config(listed.to_config()) and len({listed, dataclasses.replace(listed)}) == 1


# -- a ratio that no gate uses --------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [ratios.Prefix(), ratios.Token(mismatch="total")])
def test_a_ratio_beside_a_gate_that_uses_none(ratio):
    checks.warn_again()
    with pytest.warns(RuntimeWarning, match=r"has no effect: gate ScoreFunction\(\) uses none; gates.DetachedRatio"):
        Correction(ratio=ratio, gate=gates.ScoreFunction())


def test_the_default_ratio_may_stand_beside_any_gate():
    plain, without = (Correction(ratio=ratio, gate=gates.ScoreFunction())(BATCH) for ratio in (ratios.Token(), None))
    assert plain.loss == without.loss


# -- what a class says of its stages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs, message",
    [
        ("rewards", "Mine.needs is 'rewards', expected a frozenset of names: frozenset({'rewards'})"),
        (None, "Mine.needs is None, expected a frozenset of names"),
        (frozenset({"reward"}), "Mine.needs has 'reward', expected a frozenset of names, did you mean 'rewards'"),
    ],
)
def test_needs_are_a_set_of_names(needs, message):
    cls = type("Mine", (gates.ScoreFunction,), {"needs": property(lambda self: needs), "__module__": __name__})
    with pytest.raises(ValueError, match=re.escape(message)):
        Correction(ratio=None, gate=cls())


def computed(function: Any, part: str = "rule", base: type = rejections.Rejection, **attributes: Any) -> Any:
    """A stage of a user whose property gives a function."""
    return type("Mine", (base,), {part: property(lambda self: function), "__module__": __name__, **attributes})()


def two_values(value):
    return ops.zeros_like(value) + 1, value > 0


def one_value(value):
    return ops.exp(value)


def of_params(value, p):
    return ops.zeros_like(value) + 1, value > p.low


def misspelt(value, adv):
    return ops.zeros_like(value) + 1, adv > value


@pytest.mark.parametrize(
    "stage, message",
    [
        (computed(misspelt), "Mine.rule asks for 'adv', did you mean 'advantage'?"),
        (computed(one_value), "Mine.rule returns 1 value, expected a tuple of two values"),
        (computed(of_params), "Mine.rule asks for p, but Mine has no params"),
        (computed([two_values]), "Mine.rule is [<function two_values"),
        (computed(two_values, "measure", rule=staticmethod(two_values)), "Mine.measure returns 2 values, expected one"),
    ],
)
def test_a_function_that_depends_on_the_fields_is_checked_when_a_correction_is_built(stage, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Correction(reject=stage)


def test_a_function_that_depends_on_the_fields_is_looked_at_once(monkeypatch):
    """A correction with controllers is built anew for every micro-batch."""
    stage = computed(two_values)
    Correction(reject=stage)
    monkeypatch.setattr(offcorr.stages.definition, "check_pointwise", lambda *args: pytest.fail("looked at again"))
    Correction(reject=stage, gate=offcorr.get("bapo").gate)(BATCH)


# -- options that a choice has no use for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("dppo", {"delta": 1e-9}, "DPPO: delta has no effect with divergence 'tv'"),
        ("dppo", {"divergence": "kl", "low": 0.1}, "DPPO: low has no effect with divergence 'kl'"),
        ("dppo", {"divergence": "kl", "high": 0.3}, "DPPO: high has no effect with divergence 'kl'"),
        ("rec", {"eps_low_prime": 0.7}, "REC: eps_low_prime has no effect with mode 'one-side'"),
        ("rec", {"mode": "two-side", "eps_high_prime": 3.0}, "REC: eps_high_prime has no effect with mode 'two-side'"),
    ],
)
def test_an_option_of_another_choice_is_warned_of(method, options, message):
    checks.warn_again()
    with pytest.warns(RuntimeWarning, match=message):
        offcorr.get(method, **options)


@pytest.mark.parametrize(
    "method, options",
    [
        ("dppo", {"divergence": "kl", "delta": 0.1}),
        ("dppo_kl", {"delta": 0.1}),
        ("dppo_tv", {"low": 0.1}),
        ("rec", {"mode": "ring", "eps_low_prime": 0.7}),
    ],
)
def test_an_option_of_the_choice_is_taken_and_kept(method, options):
    loss_fn = offcorr.get(method, **options)
    config = loss_fn.to_config()
    assert offcorr.from_config(config) == loss_fn and options.items() <= config.items()


def test_every_named_method_is_still_built():
    for method in catalogue():
        assert offcorr.from_config(illustration(method.name).to_config()) == illustration(method.name)
