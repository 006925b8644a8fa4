"""Tests of user-defined stages: every mistake is named when the class is defined, or else when it is instantiated."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import offcorr
from offcorr import gates, ops, ratios, rejections, weights
from offcorr.stages import base, checks


class Width(NamedTuple):
    eps: float


def clipped(log_ratio, advantage, p):
    ratio = ops.clamp(ops.exp(log_ratio), 1 - p.eps, 1 + p.eps)
    return ratio * advantage, ratio * advantage


def without_params(log_ratio, advantage):
    surrogate = ops.exp(log_ratio) * advantage
    return surrogate, surrogate


def one_value(log_ratio, advantage):
    return ops.exp(log_ratio) * advantage


def one_value_by_name(log_ratio, advantage):
    surrogate = ops.exp(log_ratio) * advantage
    return surrogate


def three_values(log_ratio, advantage):
    return log_ratio, advantage, log_ratio


def misspelt(log_ratio, advantages):
    return log_ratio, log_ratio


def define(base_class: type, name: str = "Mine", **attributes: Any) -> type:
    return type(name, (base_class,), {"__module__": __name__, **attributes})


@pytest.mark.parametrize(
    "base_class, attributes, message",
    [
        (gates.Gate, {}, r"Mine has no surrogate, expected staticmethod\(a function that returns two values\)"),
        (
            gates.Gate,
            {"surrogate": without_params},
            r"Mine.surrogate is a plain.*staticmethod\(without",
        ),
        (gates.Gate, {"surrogate": 3}, r"Mine.surrogate is 3, expected staticmethod\(a function\)"),
        (gates.Gate, {"surrogate": staticmethod(one_value)}, "Mine.surrogate returns 1 value, expected a tuple of two"),
        (gates.Gate, {"surrogate": staticmethod(one_value_by_name)}, "Mine.surrogate returns 1 value, expected"),
        (gates.Gate, {"surrogate": staticmethod(three_values)}, "Mine.surrogate returns 3 values, expected"),
        (gates.Gate, {"surrogate": staticmethod(misspelt)}, "asks for 'advantages', did you mean 'advantage'"),
        (
            gates.Gate,
            {"surrogate": staticmethod(lambda log_ratio, adv: (log_ratio, adv))},
            "asks for 'adv', did you mean 'advantage'",
        ),
        (gates.Gate, {"surrogate": staticmethod(clipped)}, "Mine.surrogate asks for p, but Mine has no params"),
        (gates.Gate, {"surrogate": staticmethod(without_params), "__call__": print}, "Mine defines __call__, which"),
        (rejections.Rejection, {}, "Mine has no rule, expected"),
        (weights.Weight, {"measure": staticmethod(three_values), "rule": staticmethod(three_values)}, "Mine.measure"),
        (ratios.Ratio, {"rule": staticmethod(one_value)}, "Mine.rule returns 1 value"),
        (ratios.Ratio, {"measure": staticmethod(lambda value: value)}, "Mine.measure asks for 'value', which is what"),
        (gates.Gate, {"surrogate": staticmethod(clipped), "params": {"eps": 1}}, "Mine.params is {'eps': 1}, expected"),
        (offcorr.controllers.Controller, {"resolve": print}, "Mine.becomes is None, expected one of"),
        (offcorr.controllers.Controller, {"becomes": "gate", "resolve": print}, "Mine has no statistics, expected"),
    ],
)
def test_what_cannot_work_is_refused_when_the_class_is_defined(base_class, attributes, message):
    with pytest.raises(TypeError, match=message):
        define(base_class, **attributes)


SURROGATE = {"surrogate": staticmethod(without_params)}
RULE = {"rule": staticmethod(lambda value: (ops.exp(value), value == value))}


@pytest.mark.parametrize(
    "base_class, attributes, message",
    [
        (ratios.Ratio, {"mismatch": "total"}, "Mine.mismatch is 'total' without an annotation, which changes nothing"),
        (ratios.Token, {"mismatch": "total"}, "mismatch is a field of Ratio, and every instance gets the field's def"),
        (gates.Clip, {"eps_low": 0.1}, "Expected eps_low: float = 0.1 under @dataclass"),
        (
            gates.Gate,
            {**SURROGATE, "mismatch": "engine"},
            "Mine.mismatch is 'engine', which nothing reads: a gate",
        ),
        (weights.Weight, {**RULE, "mismatch": "totl"}, "Mine.mismatch is 'totl', did you mean 'total'"),
        (weights.Weight, {**RULE, "counts_as": "truncatd"}, "Mine.counts_as is 'truncatd', did you mean 'truncated'"),
        (weights.Weight, {**RULE, "lmit": 2.0}, "Mine.lmit is 2.0, which nothing reads, did you mean 'limit'"),
        (gates.Gate, {**SURROGATE, "log_limt": 5.0}, "Mine.log_limt is 5.0, which nothing reads, did you mean 'log_li"),
        (gates.Gate, {**SURROGATE, "scales_with_advantge": False}, "did you mean 'scales_with_advantage'"),
        (gates.Gate, {**SURROGATE, "use_ratio": property(lambda self: False)}, "did you mean 'uses_ratio'"),
        (
            gates.Gate,
            {**SURROGATE, "detach": True},
            "Mine.detach is True, which nothing reads, did you mean 'detached'",
        ),
        (gates.Gate, {**SURROGATE, "detached": 1}, "Mine.detached is 1, expected True or False"),
        (gates.Gate, {**SURROGATE, "log_limit": -3.0}, "Mine.log_limit is -3.0, expected a number of nats above 0"),
        (gates.Gate, {**SURROGATE, "to_config": {}}, "Mine.to_config is {}, expected a method"),
    ],
)
def test_a_class_attribute_that_would_be_ignored_is_refused(base_class, attributes, message):
    with pytest.raises(TypeError, match=message):
        define(base_class, **attributes)


@pytest.mark.parametrize("argument", ["log_ratio", "raw_log_ratio", "value"])
def test_a_gate_that_asks_for_the_ratio_uses_one(argument):
    code = f"def surrogate({argument}, logp, advantage):\n    return ops.exp({argument}) * logp * advantage, advantage"
    names = {"ops": ops}
    exec(code, names)
    message = f"Mine.uses_ratio is False, but Mine.surrogate asks for '{argument}', which is of the ratio: leave"
    with pytest.raises(TypeError, match=message):
        define(gates.Gate, surrogate=staticmethod(names["surrogate"]), uses_ratio=False)


def test_a_gate_whose_field_chooses_the_surrogate_is_checked_where_it_is_used():
    gate = define(gates.Gate, uses_ratio=False, surrogate=property(lambda self: without_params))()
    with pytest.raises(TypeError, match="Mine.uses_ratio is False, but Mine.surrogate asks for 'log_ratio'"):
        offcorr.Correction(ratio=None, gate=gate)


def controller(**attributes: Any) -> type:
    given = {"becomes": "gate", "statistics": lambda self, tokens: None, "resolve": lambda self, statistics: None}
    return define(offcorr.controllers.Controller, **given, **attributes)


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"log_limit": 5.0}, "Mine.log_limit is 5.0, which nothing reads in a controller; it belongs to the stage"),
        (
            {"detached": True},
            "Mine.detached is True, which nothing reads in a controller; it belongs to the stage that",
        ),
        ({"detatched": True}, "Mine.detatched is True, which nothing reads in a controller, did you mean 'detached'"),
        ({"limt": 3}, "Mine.limt is 3, which nothing reads in a controller, did you mean 'limit'"),
        (SURROGATE, "Mine.surrogate is .* which nothing reads in a controller; it belongs to the stage"),
        ({"loged": lambda self, resolved: {}}, "Mine.loged is .* which nothing reads, did you mean 'logged'"),
    ],
)
def test_a_controllers_attribute_that_would_be_ignored_is_refused(attributes, message):
    with pytest.raises(TypeError, match=message):
        controller(**attributes)


def test_a_controller_has_fields_constants_and_what_it_says_of_its_stage():
    @dataclass(frozen=True)
    class Fine(controller()):
        limit: float = 3.0
        uses_ratio = False
        STEPS = 5

    assert Fine().limit == 3.0


def test_a_ratio_has_another_pair_of_policies_by_an_annotated_default():
    @dataclass(frozen=True)
    class OfTotal(ratios.Ratio):
        mismatch: str = "total"
        TABLE: ClassVar[tuple] = (1, 2)

        @property
        def helper(self):
            return self.TABLE

    loss_fn = offcorr.Correction(ratio=OfTotal())
    assert loss_fn.plan(offcorr.testing.example()).ratio.mismatch == "total"
    with pytest.raises(ValueError, match="OfTotal: mismatch is 'stale', did you mean 'staleness'"):
        OfTotal("stale")


def test_a_stage_that_needs_an_unknown_field():
    gate = define(gates.Gate, **SURROGATE, needs=frozenset({"rollout_log"}))()
    with pytest.raises(ValueError, match="Mine.needs has 'rollout_log', expected a frozenset of names, did you mean"):
        offcorr.Correction(gate=gate)


def test_a_class_with_fields_is_a_frozen_dataclass():
    class NoDataclass(gates.Gate):
        eps: float = 0.2
        surrogate = staticmethod(without_params)

    with pytest.raises(TypeError, match=r"NoDataclass declares eps but is no dataclass: put @dataclass\(frozen=True\)"):
        NoDataclass()

    @dataclass
    class CanChange(gates.Gate):
        eps: float = 0.2
        surrogate = staticmethod(without_params)

    with pytest.raises(TypeError, match=r"CanChange is a dataclass that can change, expected @data"):
        CanChange()


def test_two_values_are_checked_where_the_source_does_not_tell():
    def helper(log_ratio):
        return log_ratio

    def hidden(log_ratio):
        return helper(log_ratio)

    gate = define(gates.Gate, "Hidden", surrogate=staticmethod(hidden))()
    with pytest.raises(TypeError, match="Hidden.surrogate returned a Tensor, expected a tuple of two values"):
        offcorr.Correction(gate=gate)(offcorr.testing.example())


@pytest.mark.parametrize(
    "params, message",
    [
        ((0.2,), r"Mine.params is \(0.2,\), expected a NamedTuple of numbers"),
        (Width("wide"), "Mine.params.eps is 'wide', expected a number"),
        (Width(True), "Mine.params.eps is True, expected a number"),
        (Width(torch.zeros(2)), r"Mine.params.eps has shape \(2,\), expected a 0-dim tensor"),
    ],
)
def test_params_are_numbers_by_name(params, message):
    gate = define(gates.Gate, surrogate=staticmethod(clipped), params=property(lambda self: params))()
    with pytest.raises(TypeError, match=message):
        offcorr.Correction(gate=gate)(offcorr.testing.example())


def test_check_names_params_without_names():
    fields = {"__annotations__": {"eps": "float"}, "eps": 0.2, "params": property(lambda self: (self.eps,))}
    gate = dataclass(frozen=True)(define(gates.Gate, surrogate=staticmethod(clipped), **fields))()
    with pytest.raises(TypeError, match=r"Mine.params is \(0.2,\), expected a NamedTuple of numbers"):
        offcorr.testing.check(offcorr.Correction(gate=gate))


def test_a_stage_with_an_unknown_span():
    """When the class is defined; a span that its fields choose, when a correction is made."""
    rule = staticmethod(lambda value: (value, value == value))
    message = "Mine: span is 'prefx', did you mean 'prefix'.*offcorr.spans.register adds"
    with pytest.raises(ValueError, match=message):
        define(rejections.Rejection, rule=rule, span="prefx")
    stage = define(rejections.Rejection, rule=rule, span=property(lambda self: "prefx"))()
    with pytest.raises(ValueError, match=message):
        offcorr.Correction(reject=stage)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"needs": ["rewards"]},
            r"Mine.needs is \['rewards'\], expected a frozenset of names: frozenset\({'rewards'}\)",
        ),
        ({"needs": "rewards"}, r"Mine.needs is 'rewards', expected a frozenset of names: frozenset\({'rewards'}\)"),
        ({"needs": None}, "Mine.needs is None, expected a frozenset of names$"),
        ({"couples": "all"}, r"Mine.couples is 'all', expected one of \['batch', 'group'\]"),
        ({"couples": "batches"}, "Mine.couples is 'batches', did you mean 'batch'?"),
    ],
)
def test_what_a_class_needs_and_couples_is_checked_when_it_is_defined(attributes, message):
    methods = {"statistics": lambda self, tokens: None, "resolve": lambda self, statistics: None}
    with pytest.raises(TypeError, match=message):
        define(offcorr.controllers.Controller, becomes="gate", **methods, **attributes)


def test_a_misspelt_number_is_named_with_those_there_are():
    gate = define(
        gates.Gate,
        surrogate=staticmethod(lambda log_ratio, p: (log_ratio * p.epsilon, p.epsilon)),
        params=property(lambda self: Width(0.2)),
    )()
    with pytest.raises(
        TypeError, match=r"surrogate: .*has no attribute 'epsilon', did you mean 'eps'\? it has \['eps'\]"
    ):
        offcorr.Correction(gate=gate)(offcorr.testing.example())


def test_two_classes_of_one_name_may_exist():
    """The library's class keeps the short name; a user's class is named by module and name."""
    theirs = define(gates.Gate, "Clip", surrogate=staticmethod(without_params), __qualname__="Clip")
    assert gates.Clip().to_config()["name"] == "clip"
    config = offcorr.Correction(gate=theirs()).to_config()
    assert config["gate"]["name"] == f"{__name__}:Clip"
    assert type(offcorr.from_config(config).gate) is theirs
    with pytest.raises(ValueError, match="module 'nowhere' cannot be imported"):
        base.form("gate", "nowhere:Clip")


# -- configurations ---------------------------------------------------------------------------------------------


def test_a_replaced_field_makes_a_custom_correction():
    named = offcorr.get("ppo", eps_high=0.3)
    assert named.method == "ppo" and named.to_config()["method"] == "ppo"
    changed = dataclasses.replace(named, gate=gates.SoftClip())
    assert changed.method == "custom" and changed.to_config()["method"] == "custom"
    assert offcorr.from_config(changed.to_config()) == changed != named
    assert dataclasses.replace(changed, gate=named.gate).method == "ppo"


def test_a_configuration_spells_out_the_defaults():
    """A saved configuration keeps its meaning when a later version has other defaults."""
    assert offcorr.get("ppo").to_config() == {"method": "ppo", "eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}


def test_a_methods_function_is_the_named_method():
    from offcorr.methods.icepop import icepop
    from offcorr.methods.ppo import ppo

    assert ppo(0.1, eps_high=0.3) == offcorr.get("ppo", eps_low=0.1, eps_high=0.3)
    assert ppo(0.1).to_config() == offcorr.get("ppo", eps_low=0.1).to_config()
    assert icepop(high=3.0, aggregate="sum").method == "icepop"
    with pytest.raises(ValueError, match="ppo has no option 'eps'"):
        ppo(eps=0.1)


def test_named_forms_of_a_bound():
    assert weights.Truncate(3.0, level="turn") == weights.Bound(high=3.0, level="turn")
    assert weights.Mask(0.5, 2.0, mismatch="total") == weights.Bound(0.5, 2.0, "mask", mismatch="total")
    assert offcorr.from_config({"method": "ppo", "weight": "truncate"}).weight == weights.Truncate()
    assert weights.Truncate(3.0).to_config() == {"name": "truncate", "cap": 3.0, "level": "token", "mismatch": "engine"}
    assert weights.Mask().to_config()["name"] == "mask" and weights.Bound(0.5).to_config()["name"] == "bound"
    for weight in (weights.Truncate(3.0), weights.Mask(0.1, 9.0), weights.Bound(0.5, 2.0)):
        assert (
            eval(repr(weight), {"Truncate": weights.Truncate, "Mask": weights.Mask, "Bound": weights.Bound}) == weight
        )
        assert base.stage_from_config("weight", weight.to_config()) == weight


@pytest.mark.parametrize(
    "spec, options, message",
    [
        ("minpro?eps_hi=0.3", {}, "minpro has no option 'eps_hi', did you mean 'eps_high'"),
        (
            "cispo?eps_high=5",
            {},
            "cispo has no option 'eps_high': its upper bound is cap, of the ratio itself, 1 \\+ e",
        ),
        ("minpro?cap=5", {}, "minpro has no option 'cap': its upper bound is eps_high, the distance from 1, cap - 1"),
        ("minpro?eps_high", {}, "holds 'eps_high', expected name=value once for each option"),
        ("holderpo?power=1e400", {}, "power is 1e400, which is too large for a float, expected a finite number"),
        ("ppo?weight={'name': 'truncate', 'cap': 1e999}", {}, "weight is .*'cap': 1e999}, which is too large for a"),
        ("minpro?eps_high=1&eps_high=2", {}, "holds 'eps_high=2', expected name=value once"),
        ("minpro?eps_high=0.3", {"eps_high": 0.3}, "eps_high is 0.3, but 'minpro.eps_high=0.3' holds it too"),
        (None, {}, "method is None, expected a name"),
        (
            "mine.py:mix",
            {},
            r"unknown method 'mine.py:mix': it names a file, which offcorr.resolve\(",
        ),
        ("mine.py", {}, "method 'mine.py' names a file, expected mine.py:NAME, where NAME is a function in it"),
        ("ppo?eps_low=1.5", {}, "Clip: eps_low is 1.5, expected a finite number >= 0 and <= 1"),
        ("minpro?eps_low=3", {}, "minpro: eps_low is 3, expected a finite number >= 0 and <= 1"),
        ("glm5?eps_low=2", {}, "eps_low is 2, expected a finite number > 0 and <= 1"),
        ("sat?eps_low=2", {}, "eps_low is 2, expected a finite number >= 0 and <= 1"),
    ],
)
def test_spec_strings_that_are_refused(spec, options, message):
    with pytest.raises(ValueError, match=message):
        offcorr.get(spec, **options)


def test_spec_strings():
    spec = "minpro?eps_high=0.28&aggregate=seq-mean-token-mean&reject=None&weight=truncate"
    wanted = offcorr.get(
        "minpro", eps_high=0.28, aggregate="seq-mean-token-mean", reject=None, weight=weights.Truncate()
    )
    assert offcorr.get(spec) == offcorr.resolve("offcorr:" + spec) == wanted
    assert offcorr.from_config({"method": spec}) == wanted
    assert offcorr.get("icepop?high=3", low=0.1) == offcorr.get("icepop", low=0.1, high=3)


def test_an_instance_is_wanted():
    with pytest.raises(ValueError, match=r"gate: Clip is a class; write Clip\(...\)"):
        offcorr.Correction(gate=gates.Clip)


@pytest.mark.parametrize(
    ("slot", "value", "said"),
    [
        ("ratio", ratios.Prefix, "Prefix is a class; write Prefix(...)"),
        ("weight", weights.Truncate, "Truncate is a function; write Truncate(...)"),
        ("weight", (weights.SelfNormalise,), "SelfNormalise is a class; write SelfNormalise(...)"),
        ("reject", rejections.Veto, "Veto is a class; write Veto(...)"),
        ("advantages", offcorr.advantages.Advantages, "Advantages is a class; write Advantages(...)"),
    ],
)
def test_what_makes_a_stage_is_no_stage(slot, value, said):
    with pytest.raises(ValueError, match=f"^{slot}: {re.escape(said)}$"):
        offcorr.Correction(**{slot: value})
    if slot != "ratio":  # which is the method's own
        with pytest.raises(ValueError, match=f": {re.escape(said)}$"):
            offcorr.get("ppo", **{slot: value})
    if slot == "weight":
        with pytest.raises(ValueError, match="SelfNormalise: inner: Truncate is a function"):
            weights.SelfNormalise(inner=weights.Truncate)


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("ppo?eps_high=1.28", "0.28"),
        ("dapo?eps_high=28", "0.28"),
        ("gspo?eps_high=1.0004", "0.0004"),
        ("minpro?eps_high=1.28", "0.28"),
        ("glm5?eps_high=28", "0.28"),
        ("sat?eps_high=20", "0.2"),
        ("sat?eps_high=20&quantile=0.9", "0.2"),
        ("dgpo?eps_high=1.2", "0.2"),
        ("rec?eps_low=20", "0.2"),
        ("rec?mode=ring&eps_high_prime=20", "0.2"),
        ("m2po?mode=clip&floor_high=1.2", "0.2"),
        ("gmpo?eps_high=40", "0.4"),
        ("gmpo?eps_low=1.5", "0.405"),
        ("ctpo?log_low=0.8&log_high=1.2", "0.182"),
    ],
)
def test_a_distance_that_looks_like_a_bound_or_a_percentage(spec, meant):
    checks._WARNED.clear()
    with pytest.warns(RuntimeWarning, match=f"a distance from .* is meant as (1 . eps|a percentage), pass {meant}$"):
        offcorr.get(spec)


@pytest.mark.parametrize("spec", ["ppo?eps_high=4", "mu_grpo", "ppo?eps_low=1.0", "cispo?cap=5", "ppo?eps_high=1e6"])
def test_a_large_cap_may_be_meant(spec):
    checks._WARNED.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offcorr.get(spec)


def test_a_pair_of_policies_that_does_not_exist():
    with pytest.raises(ValueError, match="mismatch is 'stale', did you mean 'staleness'"):
        offcorr.testing.example().tokens.log_ratio("stale")


def test_a_stage_without_fields_is_shown_by_its_class():
    class Plainest(gates.Gate):
        surrogate = staticmethod(lambda log_ratio: (log_ratio, 1.0))

    assert repr(Plainest()) == "Plainest()" and repr(gates.Clip(0.1, 0.2)).startswith("Clip(eps_low=0.1")


def test_an_option_of_a_stage_that_is_replaced_is_refused():
    for spec, options in (("tis?cap=3", {"weight": "truncate"}), ("geo_rs?low=0.9&high=1.1", {"reject": "veto"})):
        with pytest.raises(ValueError, match="an option of a stage that (weight|reject)= replaces, so that it has no"):
            offcorr.get(spec, **options)
    assert offcorr.get("tis?eps_high=0.3", weight="truncate").gate.eps_high == 0.3


def test_bounds_that_drop_on_policy_tokens_or_never_act_are_told():
    with pytest.warns(RuntimeWarning, match="Veto: threshold is 10000.0, so that on-policy tokens"):
        offcorr.rejections.Veto(1e4)
    with pytest.warns(RuntimeWarning, match="DPPO: high is 1.2, and bounds a difference of probabilities, which is at"):
        offcorr.get("dppo", low=0.8, high=1.2)
    with pytest.raises(ValueError, match="delta"):
        offcorr.get("opsm", delta=-0.5)


def test_bounds_above_one_on_a_difference_of_probabilities_are_told():
    for owner, option, method, options in (
        ("DPPO", "low", "dppo", {"low": 1.5}),
        ("ProbabilityRegion", "threshold", "ipo", {"threshold": 1.5}),
        ("VACO", "bound", "vaco", {"bound": 1.5, "divergence": "tv"}),
    ):
        with pytest.warns(RuntimeWarning, match=f"{owner}: {option} is 1.5, and bounds a difference of probabilities"):
            offcorr.get(method, **options)
    with pytest.warns(RuntimeWarning, match="SuffixVeto: threshold is 10000.0, so that on-policy tokens"):
        offcorr.get("mu_grpo", threshold=1e4)


def test_a_bound_of_a_ratio_or_of_a_budget_may_be_above_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offcorr.get("vaco", bound=1.5)
        offcorr.get("cppo", delta=1.5)  # the tokens before may have spent more than it
