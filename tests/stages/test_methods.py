"""Tests of the methods of a user's stage: named when the class is defined, with what to write instead."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest

import offcorr
from offcorr import controllers, gates, ops, ratios, rejections, weights


class Numbers(NamedTuple):
    eps: float


def surrogate(log_ratio, advantage, p):
    value = ops.exp(log_ratio) * p.eps * advantage
    return value, value


def scaled(**attributes: Any) -> type:
    """A gate with these attributes."""
    given = {"surrogate": staticmethod(surrogate), "params": property(lambda self: Numbers(self.eps))}
    return type("Mine", (gates.Gate,), {"__module__": __name__, **given, **attributes})


class Setting:
    """A base that no dataclass wrote."""

    def __init__(self, eps, cap: float = 2.0):
        object.__setattr__(self, "eps", eps)


@pytest.mark.parametrize(
    "define",
    [
        lambda: scaled(__init__=Setting.__init__),
        lambda: type("Mine", (Setting, gates.Gate), {"surrogate": staticmethod(surrogate)}),
        lambda: dataclass(frozen=True)(scaled(__init__=Setting.__init__, __annotations__={"eps": "float"})),
        lambda: type("Mine", (ratios.Token,), {"__init__": Setting.__init__}),
        lambda: type("Mine", (controllers.Controller,), {"becomes": "gate", "__init__": Setting.__init__}),
    ],
)
def test_an_init_of_its_own_is_refused_with_the_fields_to_write(define):
    message = (
        r"Mine has an __init__ of its own.*, whose numbers are not in comparisons, repr and configurations: expected "
        r"@dataclass\(frozen=True\) above class Mine and fields in it, eps: float; cap: float = 2.0, with checks"
    )
    with pytest.raises(TypeError, match=message):
        define()


@dataclass(frozen=True, slots=True)
class Slotted(rejections.Rejection):
    limit_at: float = 1.0
    rule = staticmethod(lambda value: (ops.zeros_like(value) + 1, value < 1))


def test_what_a_dataclass_writes_passes():
    assert Slotted(2.0) != Slotted(1.0) and Slotted(2.0).to_config()["limit_at"] == 2.0

    @dataclass(frozen=True)
    class Wider(gates.Clip):
        more: float = 1.0

    assert Wider(more=2.0) != Wider()


@pytest.mark.parametrize(
    ("eps", "message"),
    [
        (
            field(default=0.2, init=False),
            "Mine.eps is a field with init=False, .* expected a property that computes it",
        ),
        (
            field(default=0.2, compare=False),
            "Mine.eps is a field with compare=False: stages with other values would be",
        ),
        (InitVar, "Mine.eps is an InitVar, which is in no configuration, expected a field: eps: float"),
    ],
)
def test_a_field_that_a_configuration_would_lose_is_refused(eps, message):
    kind = InitVar[float] if eps is InitVar else float
    given = {} if eps is InitVar else {"eps": eps}
    made = dataclass(frozen=True)(scaled(__annotations__={"eps": kind}, **given))
    with pytest.raises(TypeError, match=message):
        made() if given else made(0.2)


CONTROLLER: dict[str, Any] = {
    "becomes": "gate",
    "statistics": lambda self, tokens: None,
    "resolve": lambda self, statistics: None,
}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"statistics": lambda self: None}, r"Mine.statistics takes \(self\), expected statistics\(self, tokens\)$"),
        (
            {"resolve": lambda self, s, metrics: None},
            r"Mine.resolve takes \(self, s, metrics\), expected resolve\(self, statistics\): a controller",
        ),
        ({"logged": lambda self: {}}, r"Mine.logged takes \(self\), expected logged\(self, resolved\)$"),
        ({"resolve": staticmethod(lambda: None)}, r"Mine.resolve takes \(\), expected resolve\(self, statistics\)"),
        ({"resolve": lambda self, *, statistics: None}, r"Mine.resolve takes \(self, \*, statistics\), expected"),
        ({"couples": lambda self: "group"}, "Mine.couples is a method, .*: expected @property above def couples"),
        ({"needs": lambda self: frozenset()}, "Mine.needs is a method, and the library reads a value there"),
    ],
)
def test_a_controllers_methods_take_what_the_library_gives_them(attributes, message):
    with pytest.raises(TypeError, match=message):
        type("Mine", (controllers.Controller,), CONTROLLER | attributes)


@pytest.mark.parametrize(
    "method", [lambda self, s, scale=1.0: None, lambda self, *given: None, staticmethod(lambda statistics: None)]
)
def test_another_name_and_a_default_are_no_mistake(method):
    type("Mine", (controllers.Controller,), CONTROLLER | {"resolve": method})


def test_prepare_takes_a_batch():
    with pytest.raises(TypeError, match=r"Mine.prepare takes \(self\), expected prepare\(self, batch\)"):
        type("Mine", (offcorr.advantages.Advantages,), {"prepare": lambda self: None})


@pytest.mark.parametrize("name", ["detached", "uses_ratio", "scales_with_advantage", "log_limit"])
def test_a_method_in_the_place_of_a_value_is_refused(name):
    """It would be true, whatever it returns."""
    with pytest.raises(TypeError, match=f"Mine.{name} is a method, .* expected @property above def {name}"):
        scaled(**{name: lambda self: False})
    scaled(**{name: property(lambda self: False)})


def test_a_number_that_a_function_asks_for_is_a_field():
    def with_default(value, eps=0.2):
        return ops.exp(value), value < eps

    def without(value, width):
        return ops.exp(value), value < width

    message = (
        r"Mine.rule asks for 'eps', which is no input. A number is a field of the class, named in params: in Mine "
        r"`eps: float = 0.2` and `params = property\(lambda self: Numbers\(self.eps\)\)`, with .* reads p.eps. It may"
    )
    with pytest.raises(TypeError, match=message):
        type("Mine", (weights.Weight,), {"rule": staticmethod(with_default)})
    with pytest.raises(TypeError, match="asks for 'width', which is no input.*in Mine `width: float` and"):
        type("Mine", (weights.Weight,), {"rule": staticmethod(without)})
