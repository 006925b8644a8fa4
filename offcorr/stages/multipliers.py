"""What weights and rejections share: a detached multiplier and a kept flag."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch

from offcorr.batch import Batch, Tokens
from offcorr.shapes import Mismatch, PerSequence, PerToken, TokenMask
from offcorr.stages.base import Stage, apply
from offcorr.stages.ratios import own
from offcorr.stages.spans import SPANS


class Multiplied(NamedTuple):
    """What a weight or a rejection did, each [B, T]."""

    weight: PerToken  # 0 where not kept
    kept: TokenMask
    truncated: TokenMask  # kept, but the rule gave another value than the ratio's own


class Multiplier(Stage, kind="multiplier"):
    """Measure of a token -> span -> rule.  The rule gives (multiplier, kept)."""

    POINTWISE: ClassVar[tuple[str, ...]] = ("measure", "rule")
    measure: ClassVar[Any] = staticmethod(own)
    rule: ClassVar[Any]

    value_limit: ClassVar[float] = math.inf
    """The span's value is clamped to +-value_limit before the rule."""
    drops_as: ClassVar[str] = "rejected"
    """The metric that counts the tokens this stage drops."""

    mismatch: Mismatch
    span: ClassVar[Any]
    """Which of ``kernels.scans.SPANS`` carries the measure."""

    def pair(self, tokens: Tokens) -> Mismatch:
        """Which policies are compared in this batch."""
        return self.mismatch

    def __call__(self, tokens: Tokens) -> Multiplied:
        inputs = self.inputs(tokens)
        weight, kept = apply(self.rule, inputs, self.params)
        weight = torch.where(kept & tokens.mask, weight, 0)
        truncated = self.truncated(weight, kept & tokens.mask, inputs["value"])
        factor = self.row_factor(tokens.batch)
        return Multiplied(weight if factor is None else weight * factor[:, None], kept | ~tokens.mask, truncated)

    def inputs(self, tokens: Tokens) -> dict[str, Any]:
        """What the rule sees, each [B, T]; ``value`` is the measure carried over the span."""
        inputs = tokens.inputs(self.pair(tokens))
        measured = torch.where(tokens.mask, apply(self.measure, inputs, self.params), 0)
        value = SPANS[self.span](measured, tokens.rows)
        return inputs | {"value": value.clamp(-self.value_limit, self.value_limit)}

    def row_factor(self, batch: Batch) -> PerSequence | None:
        """A factor of each sequence on top of the rule, [B]; None: 1."""
        return None

    def truncated(self, weight: PerToken, kept: TokenMask, value: PerToken) -> TokenMask:
        return torch.zeros_like(kept)
