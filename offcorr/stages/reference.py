"""The torch reference: interprets ``Spec`` and ``GateSpec`` over the padded view of a batch.

With the kernel (``kernels/correction.py``) it shares the stages' functions and ``pointwise``; the spans are its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT, Tokens
from offcorr.shapes import PerToken, TokenMask
from offcorr.stages import pointwise, spans
from offcorr.stages.base import GateSpec, Pointwise, Spec, arguments, spec_of


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


def carried(spec: Spec, tokens: Tokens) -> PerToken:
    """A stage's measure carried over its span, [B, T]."""
    measured = torch.where(tokens.mask, call(spec.measure, tokens, spec), 0)
    span = spans.SPANS[spec.span]
    value = span(measured, tokens.rows, spec.params) if "p" in arguments(span) else span(measured, tokens.rows)
    if not isinstance(value, Tensor):
        raise TypeError(f"span {spec.span!r} returned a {type(value).__name__}, expected a tensor like its measure")
    if value.shape != measured.shape:
        raise ValueError(f"span {spec.span!r} returned {tuple(value.shape)}, expected {tuple(measured.shape)}")
    return value


def factors(specs: Iterable[Spec], tokens: Tokens) -> Factors:
    """The weights and rejections, in their order."""
    kept, none = tokens.mask, torch.zeros_like(tokens.mask)
    weight, truncated, vetoed = torch.ones_like(tokens.old_logp), none, none
    for spec in specs:
        value = carried(spec, tokens).clamp(-spec.limit, spec.limit)
        factor, inside = call(spec.rule, tokens, spec, pair=True, value=value)
        keeps = inside & tokens.mask
        weight = weight * pointwise.dropped_to_zero(factor, keeps)
        kept = kept & keeps
        if spec.counts_as == "truncated":
            truncated = truncated | pointwise.truncated(factor, value, keeps)
        if spec.counts_as == "vetoed":
            vetoed = vetoed | (tokens.mask & ~keeps)
    return Factors(weight, kept, truncated, vetoed)


def gated(ratio: Spec | None, gate: GateSpec, tokens: Tokens) -> Gated:
    """Ratio and gate.  With grad enabled the surrogate is differentiable in ``logp``, its clamps straight-through."""
    value, slope = torch.zeros_like(tokens.old_logp), torch.ones_like(tokens.old_logp)
    if ratio is not None:
        with torch.no_grad():
            value, ratio_slope = call(ratio.rule, tokens, ratio, pair=True, value=carried(ratio, tokens))
            value = value.clamp(-LOG_LIMIT, gate.log_limit)
            slope = slope if gate.detached else ratio_slope
    log_ratio = value
    if torch.is_grad_enabled() and not gate.detached:
        log_ratio = value + slope * (tokens.logp - tokens.logp.detach())
    # For a gate ``value`` is the log-ratio as a constant, and ``logp`` the policy that is trained.
    surrogate, derivative = call(
        gate.surrogate, tokens, gate, pair=True, log_ratio=log_ratio, value=value, logp=tokens.logp
    )
    derivative = derivative * slope
    return Gated(surrogate, derivative, pointwise.held_back(derivative, value, slope, tokens.advantages))


def call(function: Pointwise, tokens: Tokens, spec: Spec | GateSpec, pair: bool = False, **given: Any) -> Any:
    """Call a stage's function with the inputs that its arguments name; ``given`` ones come first.

    Raises:
        TypeError: a rule or a surrogate (``pair``) returned something else than two values.
    """
    inputs = []
    for name in arguments(function):
        known = spec.params if name == "p" else given.get(name)
        inputs.append(tokens.input(name, spec.mismatch) if known is None else known)
    values = function(*inputs)
    if pair and (type(values) is not tuple or len(values) != 2):
        raise TypeError(f"{function.__qualname__} returned a {type(values).__name__}, expected a tuple of two values")
    return values


def weight_of(stage: Any, tokens: Tokens) -> Factors:
    """One weight or rejection by itself."""
    return factors([spec_of(stage, tokens.batch.rollout_logp is not None)], tokens)
