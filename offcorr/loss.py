"""The loss of a plan by torch: the definition that the kernel is checked against, and its attachment to ``logp``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offcorr import metrics as measures
from offcorr.batch import Batch, Tokens
from offcorr.shapes import Scalar
from offcorr.stages import pointwise, reference
from offcorr.stages.aggregate import AGGREGATIONS, check_lengths, own_total, row_constant
from offcorr.stages.base import Plan
from offcorr.stages.blame import maker_of_nonfinite


def torch_loss(
    plan: Plan,
    batch: Batch,
    denominator: float | Tensor | None,
    measured: bool = True,
    controllers: Sequence[str] = (),
) -> tuple[Scalar, Tensor, dict[str, Any]]:
    """Loss, coefficient and, where they are ``measured``, metrics by torch: the definition."""
    tokens = batch.tokens
    did = reference.factors(plan.factors, tokens)
    gate = reference.gated(plan.ratio, plan.gate, tokens)
    weight = did.weight if tokens.weight is None else did.weight * tokens.weight
    scale = _row_scale(plan, tokens, did.kept, denominator) * weight
    loss, coefficient = -scale * gate.surrogate, -scale * gate.derivative
    finite = tokens.trainable & pointwise.finite(loss + coefficient)
    made = tokens.trainable & ~finite
    if plan.asks_reward:  # a comparison with NaN is False, and its result a number
        finite = finite & pointwise.finite(tokens.reward)
    nonfinite = tokens.mask & ~finite
    if plan.strict and nonfinite.any():  # looking synchronises
        if made.any():
            raise ValueError(_made_by(plan, tokens, made, controllers))
        row, place = nonfinite.nonzero()[0].tolist()
        raise ValueError(
            f"{int(nonfinite.sum())} valid tokens gave no finite number to train on, the first at sequence "
            f"{row}, position {place}: {_culprits(tokens.batch, row, place, plan.asks_reward)}"
        )
    loss, coefficient = torch.where(finite, loss, 0), torch.where(finite, coefficient, 0)
    if not measured:
        return loss.sum(), batch.repack(coefficient), {}
    data = measures.mismatch(tokens) | measures.loss_metrics(
        tokens,
        derivative=gate.derivative,
        held_back=gate.held_back,
        weight=weight,
        kept=did.kept,
        vetoed=did.vetoed,
        truncated=did.truncated,
        coefficient=coefficient,
        nonfinite=nonfinite,
    )
    return loss.sum(), batch.repack(coefficient), data


def _made_by(plan: Plan, tokens: Tokens, made: Tensor, controllers: Sequence[str]) -> str:
    """The stage that ``made`` NaN or infinity of fields that are finite, and where."""
    row, place = made.nonzero()[0].tolist()
    maker = maker_of_nonfinite(plan, tokens, row, place, controllers)
    return (
        f"{maker}, at sequence {row}, position {place}, the first of {int(made.sum())} valid tokens whose logp, "
        "old_logp and advantage are finite"
    )


def _culprits(padded: Batch, row: int, place: int, asks_reward: bool) -> str:
    """The fields that are not finite at a token, with their values; all where none is, but the loss overflows."""
    names = ("logp", "old_logp", "advantages", "weight", *(("rewards",) if asks_reward else ()))
    given = {name: getattr(padded, name) for name in names}
    values = {
        name: float(value[row, place] if value.ndim == 2 else value[row])
        for name, value in given.items()
        if value is not None
    }
    found = {name: value for name, value in values.items() if not math.isfinite(value)}
    return ", ".join(f"{name} {value:g}" for name, value in (found or values).items())


def _row_scale(plan: Plan, tokens: Any, kept: Tensor, denominator: float | Tensor | None) -> Tensor:
    """[B, 1], the weight of each sequence's sum over Z."""
    count = tokens.rows.count
    sequences: Any = len(tokens.mask)
    if not plan.count_rejected:
        count = kept.sum(1).to(tokens.dtype)
        _, sequences = kept_counts(count, tokens)
    if plan.max_length is not None:
        check_lengths(plan.aggregate, plan.max_length, tokens.rows.count)
    constant = row_constant(plan.aggregate, plan.max_length, tokens.mask.shape[1])
    rows = pointwise.row_weight(count, constant, AGGREGATIONS[plan.aggregate].divides_by_count)
    z = own_total(plan.aggregate, count, sequences) if denominator is None else denominator
    return (rows / z)[:, None]


def kept_counts(count: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
    """The number of tokens and of sequences that are kept, from the number of kept tokens of each sequence."""
    return count.sum(), ((count > 0) | (tokens.rows.count == 0)).sum()


class Attach(torch.autograd.Function):
    """A scalar whose gradient with respect to ``logp`` is known already: (loss, coefficient), in a tuple or not."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, *known: Any) -> Tensor:
        loss, coefficient = known if len(known) == 2 else known[0]
        ctx.save_for_backward(coefficient)
        ctx.dtype = logp.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # of create_graph=True: the coefficient would be taken for a constant
            raise RuntimeError("the loss has first derivatives only: create_graph=True asks for more")
        (coefficient,) = ctx.saved_tensors
        if ctx.dtype == torch.float16:  # the one dtype whose range the product may leave
            limits = torch.finfo(ctx.dtype)
            return (incoming * coefficient).clamp(limits.min, limits.max).to(ctx.dtype), None, None
        gradient = torch.empty_like(coefficient, dtype=ctx.dtype)
        return torch.mul(coefficient, incoming, out=gradient), None, None
