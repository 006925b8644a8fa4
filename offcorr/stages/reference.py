"""The torch reference: interprets ``Spec`` and ``GateSpec`` over the padded view of a batch.

With the kernel (``kernels/correction.py``) it shares the stages' functions and ``pointwise``; the spans are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Batch, Tokens
from offcorr.shapes import PerToken, TokenMask
from offcorr.stages import pointwise, spans
from offcorr.stages.base import GateSpec, Plan, Pointwise, Spec, arguments, spec_of
from offcorr.stages.calls import called, check_drops_only, check_values, trusted, unchanged
from offcorr.stages.checks import of_library


class Factors(NamedTuple):
    """The effect of weights and rejections on the tokens, each [B, T]."""

    weight: PerToken  # their product, 0 where not kept
    kept: TokenMask
    truncated: TokenMask  # kept, but with another factor than the ratio itself
    vetoed: TokenMask


class Gated(NamedTuple):
    """The values of ratio and gate, each [B, T]."""

    surrogate: PerToken
    derivative: PerToken  # of the surrogate with respect to the token's own log-prob
    held_back: PerToken  # share of the unclipped gradient that the gate removes


MEASURED, OF_RATIO, OF_FACTOR = ("a measure",), ("a log-ratio", "a slope"), ("a factor", "kept")
"""The values of a measure, of a ratio's rule, and of a weight's or a rejection's, as errors name them."""


def carried(spec: Spec, tokens: Tokens) -> PerToken:
    """A stage's measure carried over its span, [B, T]."""
    measured = torch.where(tokens.mask, call(spec, "measure", MEASURED, tokens), 0)
    span = spans.SPANS[spec.span]
    inputs = [measured, tokens.rows, spec.params] if "p" in arguments(span) else [measured, tokens.rows]
    if of_library(span):
        return span(*inputs)
    what = f"span {spec.span!r} of {spec.owner}"
    rows = tokens.rows
    changeable = {"x": measured, "rows.mask": rows.mask, "rows.position": rows.position, "rows.count": rows.count}
    with unchanged(what, changeable):
        value: PerToken = called(what, span, inputs)
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} returned a {type(value).__name__}, expected a tensor like its measure")
    if value.shape != measured.shape:
        raise ValueError(f"{what} returned {tuple(value.shape)}, expected {tuple(measured.shape)}")
    if value.dtype != measured.dtype:
        raise TypeError(f"{what} returned {value.dtype}, expected {measured.dtype}, that of its measure")
    return value


def factors(specs: Iterable[Spec], tokens: Tokens) -> Factors:
    """The weights and rejections, in their order."""
    kept, none = tokens.mask, torch.zeros_like(tokens.mask)
    weight, truncated, vetoed = torch.ones_like(tokens.old_logp), none, none
    for spec in specs:
        value = carried(spec, tokens).clamp(-spec.limit, spec.limit)
        factor, inside = call(spec, "rule", OF_FACTOR, tokens, value=value)
        keeps = inside & tokens.mask
        if spec.kind == "rejection":
            check_drops_only(f"{spec.owner}.rule", spec.rule, factor, keeps)
        weight = weight * pointwise.dropped_to_zero(factor, keeps)
        kept = kept & keeps
        if spec.counts_as == "truncated":
            truncated = truncated | pointwise.truncated(factor, value, keeps)
        if spec.counts_as == "vetoed":
            vetoed = vetoed | (tokens.mask & ~keeps)
    return Factors(weight, kept, truncated, vetoed)


def check_rejections(plan: Plan, batch: Batch) -> None:
    """Raise TypeError where a user's rejection that has not run yet multiplies: the kernel would not notice."""
    new = [spec for spec in plan.factors if spec.kind == "rejection" and not trusted(spec.rule)]
    if new:
        factors(new, batch.tokens)


def gated(ratio: Spec | None, gate: GateSpec, tokens: Tokens) -> Gated:
    """Ratio and gate.  With grad enabled the surrogate is differentiable in ``logp``, its clamps straight-through."""
    value, slope = torch.zeros_like(tokens.old_logp), torch.ones_like(tokens.old_logp)
    if ratio is not None:
        with torch.no_grad():
            value, ratio_slope = call(ratio, "rule", OF_RATIO, tokens, value=carried(ratio, tokens))
            value = value.clamp(-LOG_LIMIT, gate.log_limit)
            slope = slope if gate.detached else ratio_slope
    log_ratio = value
    if torch.is_grad_enabled() and not gate.detached:
        log_ratio = value + slope * (tokens.logp - tokens.logp.detach())
    # For a gate ``value`` is the log-ratio as a constant, and ``logp`` the policy that is trained.
    given = {"log_ratio": log_ratio, "value": value, "logp": tokens.logp}
    surrogate, derivative = call(gate, "surrogate", ("a surrogate", "a derivative"), tokens, **given)
    derivative = derivative * slope
    return Gated(surrogate, derivative, pointwise.held_back(derivative, value, slope, tokens.advantages))


def call(spec: Spec | GateSpec, part: str, gives: Sequence[str], tokens: Tokens, **given: Any) -> Any:
    """The values of a stage's function, of the inputs that its arguments name; ``given`` ones come first.

    Raises:
        TypeError: a user's function raised an error, changed an input in place, or returned something else than
            ``gives`` names, each [B, T].
    """
    function: Pointwise = getattr(spec, part)
    inputs = []
    for name in arguments(function):
        known = spec.params if name == "p" else given.get(name)
        inputs.append(tokens.input(name, spec.mismatch) if known is None else known)
    if of_library(function):
        return function(*inputs)
    what = f"{spec.owner}.{part}"
    with unchanged(what, dict(zip(arguments(function), inputs, strict=True))):
        values = called(what, function, inputs)
    check_values(what, values, gives, tokens.old_logp)
    return values


def weight_of(stage: Any, tokens: Tokens) -> Factors:
    """One weight or rejection by itself."""
    return factors([spec_of(stage, tokens.batch.rollout_logp is not None)], tokens)
