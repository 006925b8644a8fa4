"""Checks of single stages for ``offcorr.testing``, and the stage because of which a check fails."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.check_batches import example
from offcorr.correction import OPTIONAL, Correction, needed_by
from offcorr.stages import definition, gates, ratios, reference
from offcorr.stages.base import Controller, Plan, Stage, own
from offcorr.stages.calls import resolved, statistics_of
from offcorr.stages.checks import warn_again
from offcorr.stages.reference import Gated


def check_controllers(loss_fn: Correction, batch: Batch) -> None:
    """Raise AssertionError for a controller with a state of its own, or with fields that its ``needs`` do not name."""
    for controller in loss_fn.controllers.values():
        name = type(controller).__name__
        first, second = (statistics_of(controller, batch.tokens) for _ in range(2))
        assert _equal(first, second), (
            f"{name}.statistics gave two answers for one batch; a controller has no state, and what it counts comes "
            "from the batch alone"
        )
        for read in _undeclared(controller, first, batch):
            raise AssertionError(
                f"{name}.statistics reads {read} of the batch, and its needs are {sorted(controller.needs)}, expected "
                f"{read!r} among them: a batch without it would be trained on, in silence, as if there were nothing to "
                "correct"
            )
        answers = [resolved(controller, first) for _ in range(2)]
        assert _equal(*answers) and _equal(*[answer.params for answer in answers]), (
            f"{name}.resolve gave two answers for equal statistics, {answers[0]!r} and {answers[1]!r}; a controller "
            "has no state between steps, and what varies over training is an option with a schedule"
        )


def _undeclared(controller: Controller, known: Any, batch: Batch) -> list[str]:
    """The optional fields that its statistics, ``known`` for ``batch``, depend on and that it does not declare.

    Without ``old_logp`` every staleness ratio is 1, which is right on-policy, so that no controller needs to name it.
    A ``mismatch`` of its own that is None declares ``rollout_logp``: the pair is total where it is given, else
    staleness.  The None that every controller inherits declares nothing.
    """
    declared = needed_by(controller) | {"old_logp"}
    if controller.mismatch is None and type(controller).mismatch is not Stage.mismatch:
        declared |= {"rollout_logp"}
    given = [name for name in OPTIONAL if name not in declared and getattr(batch, name) is not None]
    return [name for name in given if not _same_without(name, controller, known, batch)]


def _same_without(name: str, controller: Controller, known: Any, batch: Batch) -> bool:
    without: dict[str, Any] = {name: None}
    try:
        return _equal(known, statistics_of(controller, dataclasses.replace(batch, **without).tokens))
    except Exception:  # of any kind: it cannot do without
        return False


def check_fields(loss_fn: Correction) -> None:
    """Raise AssertionError for a number among the fields of a stage that the stage hands to none of its functions, or
    that the function to which it is handed in ``params`` does not read.

    A controller's methods and ``prepare`` read the fields themselves, and a limit that an example does not reach has
    no effect on it: those are not checked.
    """
    for place, stage in loss_fn.stages.items():
        if isinstance(stage, Controller) or stage.prepare is not None or not dataclasses.is_dataclass(stage):
            continue
        definition.checked_params(stage)
        given = _given(stage)
        for field in dataclasses.fields(stage):
            value = getattr(stage, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            for other in others(value):
                try:
                    changed = dataclasses.replace(stage, **{field.name: other})
                except (TypeError, ValueError):  # out of the field's range
                    continue
                now_given = _given(changed)
                assert now_given != given, (
                    f"{type(stage).__name__}: the field {field.name} changes nothing: with {field.name}={other!r} its "
                    f"functions are given the same as with {field.name}={value!r}; hand it over in params, or leave "
                    "it out"
                )
                of_params = {name for name in given if now_given[name] != given[name]} == {"params"}
                if of_params and not _warned_of(stage, field.name, other):
                    numbers = [
                        name
                        for name, one, two in zip(stage.params._fields, stage.params, changed.params, strict=True)
                        if one != two
                    ]
                    assert read_by(loss_fn, place).intersection(numbers), (
                        f"{type(stage).__name__}: the field {field.name} changes nothing: no function of the stage "
                        f"reads {' or '.join(f'p.{name}' for name in numbers)}, which has it"
                    )
                break


def _warned_of(stage: Any, field: str, value: Any) -> bool:
    """Whether the stage itself says that the field has no effect beside its others."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_again()
        dataclasses.replace(stage, **{field: value})
    return any("has no effect" in str(one.message) for one in said)


def read_by(loss_fn: Correction, place: str) -> set[str]:
    """The names among a stage's ``params`` that its functions read."""
    batch, read = example(), set[str]()
    resolved = loss_fn.resolve(loss_fn.statistics(batch))
    batch = resolved.prepared(batch)
    plan, tokens = resolved.plan(batch), batch.tokens
    if place == "gate":
        reference.gated(plan.ratio, plan.gate._replace(params=_noting(plan.gate.params, read)), tokens)
    elif place == "ratio" and plan.ratio is not None:
        reference.gated(plan.ratio._replace(params=_noting(plan.ratio.params, read)), plan.gate, tokens)
    else:
        spec = plan.factors[[one for one in resolved.stages if one not in ("ratio", "gate", "advantages")].index(place)]
        reference.factors([spec._replace(params=_noting(spec.params, read))], tokens)
    return read


def _noting(params: Any, read: set[str]) -> Any:
    """The same numbers, which note in ``read`` the names of those that are read."""
    kind: Any = type(params)

    class Noting(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

        def __getitem__(self, index: Any) -> Any:
            read.update(kind._fields)
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            read.update(kind._fields)
            return super().__iter__()

    Noting.__name__ = kind.__name__  # which an error of the user's code names
    return Noting(*params)


def _given(stage: Any) -> dict[str, Any]:
    """The values that the library reads of a stage: attributes that its kind has, and properties of its own."""
    kind, of = definition.KINDS[stage.KIND], type(stage)
    public = [name for name in dir(of) if not name.startswith("_")]
    read = [name for name in public if hasattr(kind, name) or isinstance(getattr(of, name), property)]
    return {name: getattr(stage, name) for name in read if name in stage.PARTS or not callable(getattr(stage, name))}


def others(value: float) -> tuple[float, ...]:
    """Other values for a number, one of which is hopefully in its range."""
    return (not value,) if isinstance(value, bool) else (value + 1, 1.5 * value + 0.1, 0.7 * value + 0.01, 0.03 * value)


def check_finite(loss_fn: Correction, batch: Batch) -> None:
    """Raise AssertionError where a stage makes NaN or infinity of an ordinary batch."""
    try:
        dataclasses.replace(loss_fn, strict=True)(batch)
    except ValueError as error:
        raise AssertionError(str(error)) from error


def check_gradient_passes(plan: Plan, terms: Gated) -> None:
    """Raise AssertionError where no gradient passes through a gate's surrogate, computed with gradient enabled."""
    gate = plan.gate
    through = (
        "logp, through which alone the gradient of a gate with detached = True passes"
        if gate.detached
        else ("log_ratio or logp, through which the gradient passes")
    )
    assert terms.surrogate.requires_grad, f"{gate.owner}.surrogate does not use {through}"


STEP, ROUNDED = 1e-5, 1e-5
"""Nats by which a log-prob is moved for a numeric derivative, and the error that it may have."""


def check_slope(plan: Plan, batch: Batch) -> None:
    """Raise AssertionError where the slope that a ratio's rule states is not the derivative of its log-ratio, or where
    this is 0 everywhere.

    It is that with respect to the token's own log-prob, over what the span alone makes of a token's measure (1/T for a
    mean over T tokens, which belongs to the aggregation).  Of a span over several tokens a slope of 1 is the token form
    and no derivative.
    """
    ratio = plan.ratio
    if ratio is None or ratio.mismatch == "engine":
        return

    def rule(logp: Tensor) -> tuple[Tensor, Tensor]:
        tokens = Tokens(dataclasses.replace(batch, logp=logp))
        log_ratio, slope = reference.call(
            ratio, "rule", reference.OF_RATIO, tokens, value=reference.carried(ratio, tokens)
        )
        return log_ratio, torch.as_tensor(slope, dtype=log_ratio.dtype).expand_as(log_ratio)

    def carried(measured: Tensor) -> Tensor:
        return reference.carried(ratio._replace(measure=lambda log_ratio: measured), batch.tokens)

    mask, logp = batch.tokens.mask, batch.logp.detach()
    log_ratio, slope = rule(logp)
    if not log_ratio[mask].any():
        raise AssertionError(
            f"the log-ratio of {ratio.owner} is 0 at every token, however far logp is from old_logp: write ratio=None"
        )
    if ratio.rule is ratios.token_form and (ratio.span != "token" or ratio.measure is own):
        return
    if ratio.span != "token" and (slope[mask] == 1).all():
        return
    of_span = _derivative(carried, torch.zeros_like(logp))
    wanted = _derivative(lambda moved: rule(moved)[0], logp) / of_span
    wrong = mask & wanted.isfinite() & ~torch.isclose(slope, wanted, rtol=ROUNDED, atol=ROUNDED)
    if wrong.any():
        row, place = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"the slope of {ratio.owner}.rule{' (the default)' * (ratio.rule is ratios.token_form)} is "
            f"{float(slope[row, place]):.6g} at token {place} of sequence {row}, "
            f"where the numeric derivative of its log-ratio is {float(wanted[row, place]):.6g}; {int(wrong.sum())} of "
            f"{int(mask.sum())} tokens differ"
        )


def _derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """[B, T]: of each of the function's values with respect to the argument at its own place, by differences."""
    found = torch.zeros_like(at)
    for place in range(at.shape[1]):
        moved = torch.zeros_like(at)
        moved[:, place] = STEP
        found[:, place] = ((function(at + moved) - function(at - moved)) / (2 * STEP))[:, place]
    return found


def failure(run: Callable[[Correction], None], loss_fn: Correction, error: AssertionError) -> str:
    """The message of a check that failed.

    It begins with the method; for a custom correction with the class of the stage at fault, where a single one is.
    """
    place = culprit(run, loss_fn)
    stage = type(loss_fn.stages[place]).__name__ if place else ""
    without = f" Without {place} {stage} the check passes." if stage else ""
    return f"{subject(loss_fn, stage)}: {run.__name__}: {error}. Expected: {run.__doc__}{without}"


def subject(loss_fn: Correction, stage: str = "") -> str:
    """The name that an error about a correction begins with: its method's, else the class of the stage at fault."""
    return loss_fn.method if loss_fn.method != "custom" else stage or "Correction"


def culprit(run: Callable[[Correction], None], loss_fn: Correction) -> str:
    """The place of the stage without which a check that fails passes; "" where no single one is."""
    for place in loss_fn.stages:
        try:
            without = _without(loss_fn, place)
            if without == loss_fn:
                continue
            run(without)
        except Exception:  # noqa: S112 - of any kind: then this stage is not the only one
            continue
        return place
    return ""


def _without(loss_fn: Correction, place: str) -> Correction:
    """The correction with a stage removed, or, of ratio and gate, with the plainest one in its place."""
    if place == "ratio":
        assert loss_fn.ratio is not None
        pair = loss_fn.ratio.mismatch or "staleness"
        return dataclasses.replace(loss_fn, ratio=ratios.Token(mismatch=pair))
    if place == "gate":
        return dataclasses.replace(loss_fn, gate=gates.ScoreFunction() if loss_fn.ratio is None else gates.Unclipped())
    if place == "advantages":
        return dataclasses.replace(loss_fn, advantages=None)
    slot = place.partition(".")[0]
    rest = tuple(stage for at, stage in loss_fn.stages.items() if at.startswith(f"{slot}.") and at != place)
    fields: dict[str, Any] = {slot: rest}
    return dataclasses.replace(loss_fn, **fields)


def _equal(first: Any, second: Any) -> bool:
    """Whether two answers are equal, tensors by their values."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
    if type(first) is not type(second):
        return False
    if dataclasses.is_dataclass(first):
        fields = [field.name for field in dataclasses.fields(first)]
        return all(_equal(getattr(first, name), getattr(second, name)) for name in fields)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
