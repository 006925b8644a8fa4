"""The stage that made a number which is not finite, found by computing it stage by stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from offcorr.batch import Tokens
from offcorr.shapes import PerToken
from offcorr.stages import reference
from offcorr.stages.base import GateSpec, Plan, Spec


def maker_of_nonfinite(plan: Plan, tokens: Tokens, row: int, place: int, controllers: Sequence[str] = ()) -> str:
    """The first stage whose result at a token is NaN or infinite, in words; the token's fields are finite.

    Args:
        row, place: of the token.
        controllers: for each stage in the order ratio, gate, weights, rejections, the class of the controller that
            resolved to it, or "".
    """
    of_ratio: list[Spec | GateSpec] = [] if plan.ratio is None else [plan.ratio]
    by = dict(zip(map(id, [*of_ratio, plan.gate, *plan.factors]), controllers, strict=False))
    for spec in [*of_ratio, *plan.factors, plan.gate]:
        for what, value in _values(plan, spec, tokens):
            number = float(value[row, place])
            if not math.isfinite(number):
                return f"{what} gave {number:g}{_numbers(spec, by.get(id(spec), ''))}"
    if tokens.weight is not None and not tokens.weight[row, place].isfinite():
        return f"Batch.weight is {float(tokens.weight[row, place]):g}"
    return "the product of weights and surrogate is too large, or the denominator too small"


def _values(plan: Plan, spec: Spec | GateSpec, tokens: Tokens) -> Iterator[tuple[str, PerToken]]:
    """(name, [B, T]) of what a stage computes, in its order."""
    if isinstance(spec, GateSpec):
        terms = reference.gated(plan.ratio, spec, tokens)
        yield f"{spec.owner}.surrogate", terms.surrogate
        yield f"the derivative of {spec.owner}.surrogate", terms.derivative
        return
    measured = torch.where(tokens.mask, reference.call(spec, "measure", reference.MEASURED, tokens), 0)
    yield f"{spec.owner}.measure", measured
    value = reference.carried(spec, tokens)
    yield f"span {spec.span!r} of {spec.owner}", value
    if spec is plan.ratio:
        log_ratio, slope = reference.call(spec, "rule", reference.OF_RATIO, tokens, value=value)
        yield f"{spec.owner}.rule", log_ratio
        yield f"the slope of {spec.owner}.rule", slope
    else:
        value = value.clamp(-spec.limit, spec.limit)
        factor, kept = reference.call(spec, "rule", reference.OF_FACTOR, tokens, value=value)
        yield f"{spec.owner}.rule", torch.where(kept, factor, 0)


def _numbers(spec: Spec | GateSpec, controller: str) -> str:
    """The number of the stage that is itself not finite, and the controller that computed it."""
    names = getattr(spec.params, "_fields", ())
    odd = [name for name, number in zip(names, spec.params, strict=True) if not math.isfinite(float(number))]
    if not odd:
        return ""
    by = f", which {controller}.resolve computed" if controller else ""
    return f": its number {odd[0]} is {float(getattr(spec.params, odd[0])):g}{by}"
