"""Errors of a user's stage while it runs: each begins with the class and the attribute."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import offcorr
from offcorr import controllers, gates, ops, ratios, rejections, spans, weights

BATCH = offcorr.testing.example()


class Numbers(NamedTuple):
    x: float


def lacking(value, p):
    return value * p.y, value > 0


def kept_as_number(value):
    return value, ops.where(value > 0, ops.zeros_like(value) + 1, 0.0)


def one_per_row(value):
    return value.sum(1), value.sum(1) > 0


def branching(value):
    if value > 0:
        return value, value > 0
    return -value, value > 0


def by_math(value):
    return ops.zeros_like(value) + math.exp(value), value > 0


def exponent_of_a_number(value):
    return ops.zeros_like(value) + ops.exp(0.5), value > 0


def number_first(value):
    return ops.minimum(2.0, ops.exp(value)), value > 0


def two_numbers(value):
    return ops.exp(value) * ops.maximum(2, 0.5), value > 0


def plain_number(value):
    return 1.0, value > 0


def kept_as_one(value):
    return ops.exp(value), 1.0


def half(log_ratio, advantage):
    return (log_ratio * advantage).half(), advantage


def truth(log_ratio, advantage):
    return log_ratio * advantage, advantage > 0


def weight(rule: Any, **attributes: Any) -> offcorr.Correction:
    cls = type("Mine", (weights.Weight,), {"rule": staticmethod(rule), "__module__": __name__, **attributes})
    return offcorr.Correction(weight=cls())


def gate(surrogate: Any, strict: bool = False) -> offcorr.Correction:
    cls = type("Mine", (gates.Gate,), {"surrogate": staticmethod(surrogate), "__module__": __name__})
    return offcorr.Correction(gate=cls(), strict=strict)


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (
            weight(lacking, params=property(lambda self: Numbers(1.0))),
            "Mine.rule: 'Numbers' object has no",
        ),
        (weight(kept_as_number), r"Mine.rule returned kept with shape \(7, 12\) and torch.float64, .* torch.bool"),
        (weight(kept_as_one), "Mine.rule returned 1.0 as kept, expected a bool tensor, or True"),
        (weight(one_per_row), r"Mine.rule returned a factor with shape \(7,\) .*, expected \(7, 12\)"),
        (weight(branching), "Mine.rule: Boolean value of Tensor .*use ops.where"),
        (weight(by_math), "Mine.rule: only one element .*use offcorr.ops"),
        (weight(exponent_of_a_number), r"Mine.rule: exp\(\): .*ops takes a tensor first; a plain number is computed"),
        (weight(number_first), r"Mine.rule: minimum\(\): .*ops takes a tensor first"),
        (weight(two_numbers), r"Mine.rule: 'int' object .*ops takes a tensor first"),
        (weight(plain_number), "Mine.rule returned 1.0 as a factor, expected a tensor"),
        (gate(half), "Mine.surrogate returned a surrogate .* torch.float16, expected .*torch.float64"),
        (gate(truth), "Mine.surrogate returned a derivative .* torch.bool, expected .*torch.float64"),
    ],
)
def test_an_error_of_a_stage_begins_with_class_and_attribute(loss_fn, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        loss_fn(BATCH)


def test_a_slope_a_derivative_and_kept_may_be_plain_numbers():
    """The same for every token."""

    def linear(log_ratio, advantage):
        return log_ratio * advantage, 1.0

    def spread(log_ratio, advantage):
        return log_ratio * advantage, ops.zeros_like(log_ratio) + 1

    def factor(value):
        return ops.exp(value), True

    torch.testing.assert_close(gate(linear)(BATCH).coefficient, gate(spread)(BATCH).coefficient)
    assert weight(factor)(BATCH).loss.isfinite()


def test_an_error_that_is_not_the_functions_is_passed_on():
    def interrupted(value):
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError, match="^none left"):
        weight(interrupted)(BATCH)


def of_span(function: Any, strict: bool = False) -> offcorr.Correction:
    spans.register("test_mine")(function)
    ratio = type("Mine", (ratios.Ratio,), {"span": "test_mine", "__module__": __name__})()
    return offcorr.Correction(ratio=ratio, gate=gates.Unclipped(), strict=strict)


@pytest.fixture
def _unregistered():
    yield
    spans.unregister("test_mine")


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x, rows: x.long(), "span 'test_mine' of Mine returned torch.int64, expected torch.float64"),
        (lambda x, rows: x.float(), "span 'test_mine' of Mine returned torch.float32, expected torch.float64"),
        (lambda x, rows: x @ x, "span 'test_mine' of Mine: .*mat1 and mat2"),
    ],
)
def test_an_error_of_a_span_names_the_stage(function, message):
    with pytest.raises(TypeError, match=message):
        of_span(function)(BATCH)


# -- NaN that a stage made ------------------------------------------------------------------------------------


def logarithm(log_ratio, advantage):
    return ops.log(log_ratio) * advantage, advantage


def test_a_gate_that_makes_nan_is_named():
    out = gate(logarithm)(BATCH)
    with pytest.warns(RuntimeWarning, match="24 valid tokens .*or made by a stage"):
        out.metrics.compute()
    with pytest.raises(ValueError, match="Mine.surrogate gave nan, at sequence 0, position 0, the first of 24 valid"):
        gate(logarithm, strict=True)(BATCH)


@pytest.mark.usefixtures("_unregistered")
def test_a_span_that_makes_nan_is_named():
    with pytest.raises(ValueError, match="span 'test_mine' of Mine gave nan, at sequence 0, position"):
        of_span(lambda x, rows: torch.where(x > 0, x, math.nan), strict=True)(BATCH)


@dataclass(frozen=True)
class Count:
    tokens: torch.Tensor

    def merge(self, other: Count) -> Count:
        return Count(self.tokens + other.tokens)


@dataclass(frozen=True)
class Unbounded(controllers.Controller):
    becomes, couples = "gate", "batch"

    def statistics(self, tokens):
        return Count(tokens.mask.sum())

    def resolve(self, statistics):
        return gates.Clip(torch.tensor(math.nan), torch.tensor(0.2))


def test_a_controller_whose_bound_is_nan_is_named_without_strict():
    """Once; not of a batch without a valid token, of which a mean may well be NaN."""
    loss_fn = offcorr.Correction(gate=Unbounded())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(BATCH.replaced(mask=torch.zeros_like(BATCH.mask)))
    with pytest.warns(RuntimeWarning, match=r"Unbounded.resolve: Clip.params.low is nan, .* \(offcorr/loss/nonfinite"):
        loss_fn(BATCH)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (torch.zeros(2), r"Mine.resolve: Far.params.eps has shape \(2,\), expected a 0-dim tensor"),
        (torch.tensor(True), "Mine.resolve: Far.params.eps is torch.bool, expected a number"),
        (torch.tensor(1j), "Mine.resolve: Far.params.eps is torch.complex64, expected a number"),
    ],
)
def test_a_tensor_that_is_no_number_names_the_controller(number, message):
    with pytest.raises(TypeError, match=message):
        controller(resolve=lambda self, statistics: Far(number))(BATCH)


class Eps(NamedTuple):
    eps: Any


def far(log_ratio, advantage, p):
    return advantage * log_ratio * p.eps, advantage * p.eps


@dataclass(frozen=True)
class Far(gates.Gate):
    eps: Any
    surrogate = staticmethod(far)

    @property
    def params(self):
        return Eps(self.eps)


@pytest.mark.filterwarnings("ignore:Unbounded.resolve")
def test_a_controller_whose_bound_is_nan_is_named():
    message = "Clip.surrogate gave nan: its number low is nan, which Unbounded.resolve computed, at sequence 0"
    with pytest.raises(ValueError, match=message):
        offcorr.Correction(gate=Unbounded(), strict=True)(BATCH)


def test_a_weight_from_outside_is_named():
    batch = BATCH.replaced(weight=torch.full((7,), math.inf, dtype=torch.float64))
    with pytest.raises(ValueError, match="Batch.weight is inf, at sequence 0"):
        offcorr.get("ppo", strict=True)(batch)


# -- rejections, and inputs that are changed ------------------------------------------------------------------


def rejecting(rule: Any) -> rejections.Rejection:
    cls = type("Mine", (rejections.Rejection,), {"rule": staticmethod(rule), "__module__": __name__})
    return cls()


@pytest.mark.parametrize(
    "run", [lambda loss_fn: loss_fn(BATCH), offcorr.testing.check, lambda loss_fn: loss_fn.plan(BATCH)]
)
def test_a_rejection_that_multiplies_is_refused(run):
    def multiplying(value):
        return ops.exp(value), value == value

    loss_fn = offcorr.Correction(weight=weights.Truncate(), reject=rejecting(multiplying))
    with pytest.raises(
        TypeError, match="^Mine.rule returned a factor of .* for a token that it keeps, expected 1: a rej"
    ):
        run(loss_fn)


def test_the_factor_of_a_dropped_token_may_be_anything():
    def dropping(value):
        return ops.where(value > 0, ops.exp(value), 1.0), value <= 0

    assert offcorr.Correction(reject=rejecting(dropping))(BATCH).loss.isfinite()


# -- methods of controllers and advantages ----------------------------------------------------------------------


def controller(**methods: Any) -> offcorr.Correction:
    given = {
        "becomes": "gate",
        "statistics": lambda self, tokens: Count(tokens.mask.sum()),
        "resolve": lambda self, statistics: gates.Clip(0.2, 0.2),
    }
    cls = type("Mine", (controllers.Controller,), {**given, "__module__": __name__, **methods})
    return offcorr.Correction(gate=cls())


def advantages(prepare: Any) -> offcorr.Correction:
    cls = type("Mine", (offcorr.advantages.Advantages,), {"prepare": prepare, "__module__": __name__})
    return offcorr.Correction(advantages=cls())


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (controller(statistics=lambda self, tokens: tokens.nothing), "Mine.statistics: 'Tokens' object has no attribu"),
        (controller(resolve=lambda self, statistics: 0.2), "Mine.resolve returned 0.2, expected one of offcorr.gates"),
        (controller(resolve=lambda self, statistics: None), "Mine.resolve returned None, expected one of offcorr.gat"),
        (
            controller(resolve=lambda self, statistics: self),
            r"Mine.resolve returned Mine.., expected one of offcorr.gate",
        ),
        (
            controller(resolve=lambda self, statistics: weights.Truncate()),
            r"Mine.resolve returned Truncate\(.*\), expected one of offcorr.gates",
        ),
        (
            controller(resolve=lambda self, statistics: statistics.n),
            "Mine.resolve: 'Count' object has no attribute 'n'",
        ),
        (
            controller(logged=lambda self, stage: {"c": stage.eps_hi}),
            "Mine.logged: 'Clip' object has no attribute 'eps",
        ),
        (controller(logged=lambda self, stage: None), "Mine.logged returned None, expected a dict of numbers by name"),
        (
            controller(logged=lambda self, stage: {"c": torch.ones(3)}),
            r"Mine.logged: c has shape \(3,\), expected a num",
        ),
        (controller(logged=lambda self, stage: {"c": "x"}), "Mine.logged: c is 'x', expected a number or a 0-dim ten"),
        (advantages(lambda self, batch: None), "Mine.prepare returned None, expected a Batch, for instance batch.rep"),
        (advantages(lambda self, batch: batch.advantages), "Mine.prepare returned a Tensor, expected a Batch"),
        (advantages(lambda self, batch: batch.nothing), "Mine.prepare: 'Batch' object has no attribute 'nothing'"),
        (
            advantages(lambda self, batch: batch.replaced(rewards=[1.0])),
            "Mine.prepare: rewards is a list, expected a torch.Tensor",
        ),
        (
            advantages(lambda self, batch: batch.replaced(advantage=batch.advantages)),
            "Mine.prepare: Batch has no field 'advantage', did you mean 'advantages'",
        ),
    ],
)
def test_an_error_of_a_method_begins_with_class_and_method(loss_fn, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        loss_fn(BATCH)
    with pytest.raises(TypeError, match=f"^{message}"):
        offcorr.testing.check(loss_fn)


@pytest.mark.parametrize(
    "fields, message",
    [
        (lambda b: {"advantages": b.advantages[:1]}, r"advantages has shape \(1,\), expected \(7,\) or \(7, 12\)"),
        (lambda b: {"advantages": b.advantages[:, None]}, r"advantages has shape \(7, 1\), expected \(7,\) or"),
        (lambda b: {"weight": b.logp[0]}, r"weight has shape \(12,\), expected \(7,\) or \(7, 12\)"),
        (lambda b: {"rewards": b.logp}, r"rewards has shape \(7, 12\), expected \(7,\)"),
        (lambda b: {"mask": b.mask[:1]}, r"mask has shape \(1, 12\), expected \(7, 12\)"),
    ],
)
def test_a_shape_that_would_only_broadcast_is_refused_of_prepare_too(fields, message):
    with pytest.raises(ValueError, match=f"^Mine.prepare: {message}"):
        advantages(lambda self, batch: batch.replaced(**fields(batch)))(BATCH)


def test_prepare_keeps_the_log_probs_that_the_gradient_is_of():
    """It runs without a graph: a loss of another ``logp`` would train nothing."""
    with pytest.raises(ValueError, match=r"^Mine.prepare returned another logp, expected that of the batch it was giv"):
        advantages(lambda self, batch: batch.replaced(logp=batch.logp * 1))(BATCH)


def test_what_prepare_may_give():
    halves = advantages(lambda self, batch: batch.replaced(advantages=batch.advantages[:, None] * batch.mask / 2))
    torch.testing.assert_close(halves(BATCH).coefficient, offcorr.Correction()(BATCH).coefficient / 2)


def test_a_wrong_number_of_a_resolved_stage_names_the_controller():
    loss_fn = controller(resolve=lambda self, statistics: gates.Clip(-1.0, 0.2))
    with pytest.raises(ValueError, match="^Mine.resolve: Clip: eps_low is -1.0, expected a finite number >= 0"):
        loss_fn(BATCH)


def test_a_detached_gate_through_which_no_gradient_passes_is_found():
    cls = type("Mine", (gates.Gate,), {"surrogate": staticmethod(ratio_times_advantage), "detached": True})
    message = "Mine.surrogate does not use logp, through which alone the gradient of a gate with detached = True passes"
    with pytest.raises(AssertionError, match=message):
        offcorr.testing.check(offcorr.Correction(gate=cls()))


def ratio_times_advantage(log_ratio, advantage):
    surrogate = ops.exp(log_ratio) * advantage
    return surrogate, surrogate


@pytest.mark.parametrize("function", [weights.Truncate, weights.Mask])
def test_a_named_form_of_a_weight_is_no_base_class(function):
    with pytest.raises(TypeError, match="Mask are functions that return a weights.Bound, .* subclass weights.Weight"):

        class Mine(function):
            pass


def in_place(log_ratio, advantage):
    log_ratio += 1
    ratio = ops.exp(log_ratio - 1)
    return ratio * advantage, ratio * advantage


@pytest.mark.parametrize("run", [lambda loss_fn: loss_fn(BATCH), offcorr.testing.check])
def test_a_function_that_changes_its_input_is_refused(run):
    with pytest.raises(TypeError, match="^Mine.surrogate changes log_ratio in place, .* write log_ratio = log_ratio"):
        run(gate(in_place))


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("name", ["x", "rows.mask", "rows.position", "rows.count"])
def test_a_span_that_changes_its_input_is_refused(name):
    def changing(x, rows):
        {"x": x, "rows.mask": rows.mask, "rows.position": rows.position, "rows.count": rows.count}[name].zero_()
        return x

    with pytest.raises(TypeError, match=f"span 'test_mine' of Mine changes {name} in place, which others see, too"):
        of_span(changing)(offcorr.testing.example())


def first_masked(self, tokens):
    tokens.mask[:, 0] = False
    return Count(tokens.mask.sum())


def doubled(self, tokens):
    """The log-ratios of the loss are these."""
    return Count(tokens.log_ratio("staleness").clamped.mul_(2).sum())


def halved(self, statistics):
    statistics.tokens.div_(2)
    return gates.Clip(0.2, 0.2)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda: controller(statistics=first_masked), "Mine.statistics changes .*mask in place"),
        (
            lambda: controller(statistics=doubled),
            r"Mine.statistics changes log_ratio\('staleness'\).clamped .* x = x . 1",
        ),
        (
            lambda: controller(statistics=lambda self, tokens: Count(tokens.mask.sum() * 1.0), resolve=halved),
            "Mine.resolve changes tokens in place",
        ),
        (
            lambda: advantages(lambda self, batch: batch.replaced(advantages=batch.advantages.sub_(1))),
            "Mine.prepare changes advantages in place",
        ),
    ],
)
def test_a_method_that_changes_what_it_is_given_is_refused(loss_fn, message):
    with pytest.raises(TypeError, match=message):
        loss_fn()(offcorr.testing.example())


# -- numbers of resolved stages that are out of range -----------------------------------------------------------


def bound(eps: float, stage: Any = gates.Clip) -> offcorr.Correction:
    """A controller's, as tensors, which the stage itself does not read."""
    return controller(resolve=lambda self, statistics: stage(torch.tensor(eps), torch.tensor(eps)))


def test_a_bound_out_of_range_is_named():
    wrong = r"Mine.resolve: Clip: eps_low is -5.0, expected a finite number >= 0 and <= 1"
    with pytest.warns(RuntimeWarning, match=wrong) as warned:
        for eps in (-5.0, -4.0):
            bound(eps)(BATCH)
    assert len(warned) == 1, "once, whatever the number"
    with pytest.raises(ValueError, match=f"^{wrong}"):
        dataclasses.replace(bound(-5.0), strict=True)(BATCH)
    with pytest.raises(AssertionError, match=f"^Mine: finite_on_ordinary_batches: {wrong}"):
        offcorr.testing.check(bound(-5.0))


def test_bounds_in_the_wrong_order_are_named():
    def crossed(cap, low):
        return gates.DetachedClip(cap=cap, low=2 * low)

    with pytest.raises(ValueError, match="^Mine.resolve: DetachedClip: low = 1.0 is above cap = 0.5"):
        dataclasses.replace(bound(0.5, crossed), strict=True)(BATCH)


@dataclass(frozen=True)
class TakesTensors(Far):
    def __post_init__(self):
        assert self.eps.ndim == 0


def test_a_stage_that_takes_tensors_alone_is_no_mistake():
    loss_fn = controller(resolve=lambda self, statistics: TakesTensors(torch.tensor(0.5)))
    assert dataclasses.replace(loss_fn, strict=True)(BATCH).loss.isfinite()


def test_a_bound_in_range_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound(0.2)(BATCH)
        bound(-5.0)(BATCH.replaced(mask=torch.zeros_like(BATCH.mask)))
    dataclasses.replace(bound(0.2), strict=True)(BATCH)


def test_inference_mode_counts_no_changes():
    def plain(log_ratio, advantage):
        return ops.exp(log_ratio) * advantage, ops.exp(log_ratio) * advantage

    with torch.inference_mode():
        assert gate(plain)(offcorr.testing.example()).loss.isfinite()
