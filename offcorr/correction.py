"""``Correction``: ratio -> weight -> rejection -> gate -> aggregation, as one object."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr import metrics as metering
from offcorr.batch import LOG_LIMIT, Batch, Tokens
from offcorr.kernels import correction as fused_correction
from offcorr.metrics import CONTROL, Metrics
from offcorr.shapes import PerToken, Scalar, TokenMask
from offcorr.stages.aggregate import check_aggregate, check_denominator, row_weights, total
from offcorr.stages.base import Number, Stage, apply, plain
from offcorr.stages.gates import Clip, Gate
from offcorr.stages.multipliers import Multiplied
from offcorr.stages.ratios import Ratio, Token
from offcorr.stages.rejections import Rejection
from offcorr.stages.weights import Weight


class Output(NamedTuple):
    """What a correction gives.

    loss: scalar, differentiable in ``batch.logp``.
    coefficient: dL/dlogp, the shape of ``logp``, detached, float32 (float64 for float64 input).
    metrics: accumulators on the device.
    """

    loss: Scalar
    coefficient: Tensor
    metrics: Metrics


@dataclass(frozen=True, eq=False)
class Statistics:
    """What batch-coupled stages need to know of the global batch, stage by stage; merges."""

    parts: Mapping[str, Any]

    def merge(self, other: Statistics) -> Statistics:
        return Statistics({name: part.merge(other.parts[name]) for name, part in self.parts.items()})

    def all_reduce(self, gather: Callable[[Tensor], Tensor]) -> Statistics:
        """Stub until the typed statistics: merged over ranks."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        written = io.BytesIO()
        torch.save(self, written)
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, written.getvalue())
        return functools.reduce(Statistics.merge, (torch.load(io.BytesIO(x), weights_only=False) for x in parts))


class Terms(NamedTuple):
    """Per-token quantities before aggregation, each [B, T]."""

    surrogate: PerToken
    derivative: PerToken  # of the surrogate with respect to the token's own log-prob
    weight: PerToken  # detached, 0 where not kept
    kept: TokenMask
    vetoed: TokenMask
    truncated: TokenMask
    held_back: PerToken  # share of ratio * A that the gate held back


@dataclass(frozen=True)
class Correction:
    """An off-policy correction.  loss = - sum m * M * w * f(ratio, A) / Z.

    Args:
        ratio: how far apart two policies are; None: no ratio (only with a gate that uses none).
        gate: how the update is held back.
        weight: detached factors, one or a tuple of them, or None.
        reject: 0/1 multipliers, one or a tuple of them (AND), or None.
        aggregate: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum" or "seq-mean-token-sum-norm".
        max_length: the constant length of "seq-mean-token-sum-norm"; None: the padded width, with a warning.
        count_rejected: what was rejected stays in the denominator.
        strict: raise on NaN or infinity in ``logp``, ``old_logp`` or ``advantages`` (costs a synchronisation)
            instead of setting loss and gradient to 0 there.

    Raises:
        ValueError: a stage is not of its kind, or two of them count the same mismatch twice.

    >>> import torch, offcorr
    >>> loss_fn = Correction(ratio=offcorr.ratios.Prefix(), gate=offcorr.gates.Clip(0.2, 0.28))
    >>> logp = torch.zeros(1, 2, requires_grad=True)
    >>> out = loss_fn(Batch(logp=logp, advantages=torch.ones(1), mask=torch.ones(1, 2).bool()))
    >>> out.loss.backward(); logp.grad
    tensor([[-0.5000, -0.5000]])
    """

    ratio: Ratio | None = Token()
    gate: Gate = Clip()
    weight: Weight | tuple[Weight, ...] | None = None
    reject: Rejection | tuple[Rejection, ...] | None = None
    aggregate: str = "token-mean"
    max_length: int | None = None
    count_rejected: bool = True
    strict: bool = False
    method: str = field(default="custom", compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (
            ("ratio", Ratio),
            ("gate", Gate),
            ("weight", Weight),
            ("reject", Rejection),
        ):
            for stage in _as_tuple(getattr(self, name)):
                if not isinstance(stage, kind):
                    raise ValueError(f"{name} is {stage!r}, expected one of offcorr.{_MODULE[name]}")
        if not isinstance(self.gate, Gate):
            raise ValueError(
                "gate is None, expected one of offcorr.gates; offcorr.gates.ScoreFunction() holds nothing back"
            )
        if self.ratio is None and self.gate.uses_ratio:
            raise ValueError(f"ratio is None, but gate {self.gate!r} needs one, for instance offcorr.ratios.Token()")
        if self.ratio is not None and self.ratio.mismatch == "engine" and not self.gate.detached:
            raise ValueError(
                f"ratio {self.ratio!r} does not depend on logp, so gate {self.gate!r} would have no gradient; "
                "use gates.DetachedRatio() or a weight"
            )
        check_aggregate(self.aggregate, self.max_length)
        self._refuse_double_counting()

    # -- what it needs, for adapters ---------------------------------------------------------------------------

    @functools.cached_property
    def stages(self) -> dict[str, Stage]:
        """Every stage by its place: "ratio", "gate", "weight.0", "reject.0" ..."""
        places: dict[str, Stage] = {} if self.ratio is None else {"ratio": self.ratio}
        places["gate"] = self.gate
        places |= {f"weight.{i}": stage for i, stage in enumerate(_as_tuple(self.weight))}
        places |= {f"reject.{i}": stage for i, stage in enumerate(_as_tuple(self.reject))}
        return places

    @functools.cached_property
    def compares(self) -> frozenset[str]:
        """Which pairs of policies its stages compare."""
        return frozenset(of for s in self.stages.values() if (of := getattr(s, "mismatch", None)) is not None)

    @functools.cached_property
    def couples(self) -> frozenset[str]:
        """Stub: what batch-coupled stages couple."""
        return frozenset("batch" for s in self.stages.values() if s.statistics is not None)

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """The optional ``Batch`` fields it cannot do without, and ``old_logp`` where its ratio is 1 without."""
        asked = frozenset().union(*(s.asks_for for s in self.stages.values()))
        needs = {"rewards"} if "reward" in asked else set()
        needs |= {"group_ids"} & asked
        needs |= {"rollout_logp"} if self.compares & {"engine", "total"} else set()
        needs |= {"old_logp"} if self.ratio is not None and self.ratio.mismatch == "staleness" else set()
        return frozenset(needs)

    # -- the loss ----------------------------------------------------------------------------------------------

    def __call__(
        self,
        batch: Batch,
        denominator: float | Tensor | None = None,
        statistics: Statistics | None = None,
    ) -> Output:
        """Loss, coefficient and metrics of a batch.

        Args:
            denominator: Z; tokens (token-mean) or sequences (seq-mean-*) of the global batch. None: this batch's own.
            statistics: merged ``self.statistics(...)`` of the global batch, for methods that have any.
        """
        if denominator is not None:
            if not self.count_rejected:
                raise ValueError(
                    f"denominator is {denominator!r} together with count_rejected=False; an explicit denominator "
                    "cannot count what is kept, use one of the two"
                )
            check_denominator(denominator)
        with torch.no_grad():
            self._check_fields(batch)
            statistics = statistics or self._statistics(batch)
            known = self.resolve(statistics)
            fused = fused_correction.run(known, batch, denominator)
            loss, coefficient, data = fused or known._reference(batch, denominator)
            if statistics is not None:
                data = data | self._found(statistics, known, batch.logp.device)
        return Output(_Attach.apply(batch.logp, (loss, coefficient)), coefficient, Metrics(data))

    def statistics(self, batch: Batch) -> Statistics | None:
        """What batch-coupled stages need of this batch; merge over micro-batches and ranks.  None: nothing."""
        self._check_fields(batch)
        with torch.no_grad():
            return self._statistics(batch)

    def resolve(self, statistics: Statistics | None) -> Correction:
        """The same correction with every batch-coupled stage replaced by what ``statistics`` makes of it."""
        if statistics is None:
            return self
        known: dict[str, Any] = {
            p: s.resolve(statistics.parts[p]) if p in statistics.parts else s for p, s in self.stages.items()
        }
        return dataclasses.replace(
            self,
            ratio=known.get("ratio"),
            gate=known["gate"],
            weight=tuple(s for place, s in known.items() if place.startswith("weight")),
            reject=tuple(s for place, s in known.items() if place.startswith("reject")),
        )

    def terms(self, tokens: Tokens) -> Terms:
        """The pipeline, token by token.  With grad enabled the surrogate is differentiable, clamps straight-through."""
        weight, kept = torch.ones_like(tokens.logp), torch.ones_like(tokens.mask)
        vetoed, truncated = torch.zeros_like(kept), torch.zeros_like(kept)
        with torch.no_grad():
            for stage in (*_as_tuple(self.weight), *_as_tuple(self.reject)):
                one: Multiplied = stage(tokens)
                weight = weight * one.weight
                kept = kept & one.kept
                truncated = truncated | one.truncated
                if stage.drops_as == "vetoed":
                    vetoed = vetoed | ~one.kept

        of = self.ratio.mismatch if self.ratio else "staleness"
        pair = tokens.log_ratio(of)
        log_ratio, slope = torch.zeros_like(pair.clamped), torch.ones_like(pair.clamped)
        if self.ratio is not None:
            with torch.no_grad():
                log_ratio, slope = self.ratio(tokens)
                log_ratio = log_ratio.clamp(-LOG_LIMIT, self.gate.log_limit)
                if self.gate.detached:
                    slope = torch.ones_like(slope)
        ratio, value = log_ratio.exp() * slope, log_ratio
        if torch.is_grad_enabled() and not self.gate.detached:
            log_ratio = log_ratio + slope * (tokens.logp - tokens.logp.detach())
        # For a gate ``value`` is log_ratio as a constant, and ``logp`` the policy being trained.
        inputs = tokens.inputs(of) | {"log_ratio": log_ratio, "value": value, "logp": tokens.logp}
        surrogate, derivative = apply(self.gate.surrogate, self.gate.inputs(tokens, inputs), self.gate.params)
        derivative = derivative * slope
        full = ratio * tokens.advantages.abs()
        held_back = torch.where(full > 0, 1 - derivative.abs() / full, 0).clamp(0, 1)
        return Terms(surrogate, derivative, weight, kept, vetoed, truncated, held_back)

    # -- configuration -----------------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """Plain data that ``offcorr.from_config`` makes the same correction of."""
        if self.method != "custom":
            return {"method": self.method} | {name: _plain(value) for name, value in self.options.items()}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["method"], fields["options"]
        return {"method": "custom"} | {name: _plain(value) for name, value in fields.items()}

    # -- inside ------------------------------------------------------------------------------------------------

    def _reference(self, batch: Batch, denominator: float | Tensor | None) -> tuple[Scalar, Tensor, dict[str, Tensor]]:
        """Loss, coefficient and metrics by torch, all statistics known: the definition."""
        tokens = Tokens(batch)
        terms = self.terms(tokens)
        z, scale = self._scale(tokens, terms.kept, denominator)
        scale = scale[:, None] * terms.weight / z
        loss, coefficient = -scale * terms.surrogate, -scale * terms.derivative
        finite = loss.isfinite() & coefficient.isfinite() & tokens.trainable
        nonfinite = tokens.mask & ~finite
        loss, coefficient = (torch.where(finite, x, 0) for x in (loss, coefficient))
        if self.strict and nonfinite.any():
            row, place = nonfinite.nonzero()[0].tolist()
            raise ValueError(
                f"{int(nonfinite.sum())} valid tokens gave no finite number to train on, the first at sequence "
                f"{row}, position {place}: logp {float(batch.padded().logp[row, place]):g}"
            )
        data = {**metering.mismatch(tokens).data} | metering.loss_metrics(
            tokens,
            held_back=terms.held_back,
            weight=terms.weight,
            kept=terms.kept,
            vetoed=terms.vetoed,
            truncated=terms.truncated,
            coefficient=coefficient,
            nonfinite=nonfinite,
        )
        return loss.sum(), batch.repack(coefficient), data

    def _check_fields(self, batch: Batch) -> None:
        for name in self.needs - {"old_logp"}:
            if getattr(batch, name) is None:
                users = [repr(s) for s in self.stages.values() if _asks(s, name)]
                hint = (
                    "; pass rollout_logp=old_logp to say that engine and trainer agree"
                    if name == "rollout_logp"
                    else ""
                )
                raise ValueError(f"{name} is None, but {', '.join(users)} of {self.method!r} needs it{hint}")
        if self.strict and batch.mask.dtype != torch.bool:
            batch.check_mask_values()

    def _statistics(self, batch: Batch) -> Statistics | None:
        coupled = {place: s for place, s in self.stages.items() if s.statistics is not None}
        if not coupled:
            return None
        tokens = Tokens(batch)
        return Statistics({place: stage.statistics(tokens) for place, stage in coupled.items()})

    def _found(self, statistics: Statistics, known: Correction, device: torch.device) -> dict[str, Tensor]:
        """The ``offcorr/control/`` series: what batch-coupled stages became."""
        found: dict[str, Number] = {}
        for place in statistics.parts:
            found |= self.stages[place].found(known.stages[place])
        one = torch.ones((), dtype=torch.float64, device=device)  # filled there: a list would be copied from the host
        return {CONTROL + name: torch.stack([one * value, one]) for name, value in found.items()}

    def _scale(
        self, tokens: Tokens, kept: TokenMask, denominator: float | Tensor | None
    ) -> tuple[Scalar | float, Tensor]:
        """Z, and the weight of each row."""
        count = tokens.rows.count
        sequences = count.new_full((), len(tokens.mask))
        if not self.count_rejected:
            count = (tokens.mask & kept).sum(1).to(tokens.dtype)
            sequences = ((count > 0) | (tokens.rows.count == 0)).sum()
        rows = row_weights(self.aggregate, count, self.max_length, tokens.mask.shape[1])
        if denominator is not None:
            return denominator, rows
        return total(self.aggregate, count, sequences), rows

    def _refuse_double_counting(self) -> None:
        """Each of the two mismatches may multiply the gradient once: the total ratio is both of them."""
        counted: dict[str, str] = {}
        multiplying = [("ratio", self.ratio)] if self.ratio is not None and self.gate.uses_ratio else []
        for place, stage in multiplying + [("weight", s) for s in _as_tuple(self.weight)]:
            label = f"{place} {stage!r}"
            for mismatch in ("staleness", "engine") if stage.mismatch == "total" else (stage.mismatch,):
                if mismatch in counted:
                    raise ValueError(
                        f"{counted[mismatch]} and {label} both count the {mismatch} ratio; "
                        "drop one, or compare different policies (of=)"
                    )
                counted[mismatch] = label


_MODULE = {"ratio": "ratios", "gate": "gates", "weight": "weights", "reject": "rejections"}


def _as_tuple(stages: Any) -> tuple[Any, ...]:
    if stages is None:
        return ()
    return tuple(stages) if isinstance(stages, tuple | list) else (stages,)


def _asks(stage: Any, field_name: str) -> bool:
    if field_name == "rollout_logp":
        return getattr(stage, "mismatch", None) in ("engine", "total")
    return {"rewards": "reward"}.get(field_name, field_name) in stage.asks_for


def _plain(value: Any) -> Any:
    if isinstance(value, Stage):
        return value.to_config()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return plain(value)


class _Attach(torch.autograd.Function):
    """A scalar whose gradient with respect to ``logp`` is known already."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
        loss, coefficient = known  # no arguments of their own: the loss would be a view then, that nobody may add to
        ctx.save_for_backward(coefficient)
        ctx.dtype = logp.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # of create_graph=True: the coefficient would be taken for a constant
            raise RuntimeError("the loss has first derivatives only: create_graph=True asks for more")
        (coefficient,) = ctx.saved_tensors
        if ctx.dtype == torch.float16:  # the one dtype whose range the product may leave
            limits = torch.finfo(ctx.dtype)
            return (incoming * coefficient).clamp(limits.min, limits.max).to(ctx.dtype), None
        gradient = torch.empty_like(coefficient, dtype=ctx.dtype)
        return torch.mul(coefficient, incoming, out=gradient), None
