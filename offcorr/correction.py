"""``Correction``: ratio -> weight -> rejection -> gate -> aggregation, as one object."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import Batch, check_batch
from offcorr.kernels import dispatch
from offcorr.loss import Attach, kept_counts, torch_loss
from offcorr.metrics import CONTROL, Mean, Metrics
from offcorr.shapes import Scalar
from offcorr.stages import calls, reference
from offcorr.stages.advantages import Advantages
from offcorr.stages.aggregate import (
    AGGREGATIONS,
    check_aggregate,
    checked_denominator,
    tokens_on_host,
    warn_of_small_denominator,
    warn_of_tokens,
)
from offcorr.stages.base import Controller, Number, Plan, Stage, plain
from offcorr.stages.checks import check_flag, warn_once
from offcorr.stages.composed import (
    SLOTS,
    as_tuple,
    check_ratio_and_gate,
    check_slot,
    check_stage,
    refuse_double_counting,
)
from offcorr.stages.gates import Clip, Gate
from offcorr.stages.ratios import Ratio, Token
from offcorr.stages.rejections import Rejection
from offcorr.stages.spans import PRODUCTS
from offcorr.stages.weights import Weight
from offcorr.statistics import Statistics as Statistics
from offcorr.statistics import check_part, check_parts, kind_of


class Output(NamedTuple):
    """The result of a correction.

    loss: scalar, differentiable in ``batch.logp``.
    coefficient: dL/dlogp, the shape of ``logp``, detached, float32 (float64 for float64 input).
    metrics: accumulators on the device.
    """

    loss: Scalar
    coefficient: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Correction:
    """An off-policy correction.  loss = - sum m * M * w * f(ratio, A) / Z.

    The gradient is ``out.coefficient`` = dL/dlogp = - m * M * w * df/dv * dv/dlogp / Z for every token: m is the mask,
    w the product of the weights, M that of the rejections, f the gate's surrogate, v the log-ratio and dv/dlogp its
    slope, Z the denominator.

    Args:
        ratio: how far apart two policies are; not given: ``Token()``; None: no ratio (only with a gate that uses none).
        gate: how the surrogate limits the update; not given: PPO's clip, ``Clip(0.2, 0.2)``.  ``Unclipped()`` has no
            limit.
        weight: detached factors, one or a tuple of them, or None.
        reject: factors of 0 or 1, one or a tuple of them (AND), or None.
        advantages: what takes the place of the batch's advantages, for all other stages; None: nothing does.
        aggregate: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum" or "seq-mean-token-sum-norm".
        max_length: the constant length of "seq-mean-token-sum-norm"; None: the padded width, with a warning.
        count_rejected: whether rejected tokens stay in the denominator; False warns where it changes nothing.
        strict: raise on NaN or infinity in ``logp``, ``old_logp`` or ``advantages``, and in ``rewards`` where a stage
            reads them (costs a synchronisation), instead of setting loss and gradient to 0 there.

    Raises:
        ValueError: a stage is not of its kind, or two of them count the same mismatch.
        TypeError: a function that a user's stage computes from its fields cannot be called.

    >>> import torch, offcorr
    >>> loss_fn = Correction(ratio=offcorr.ratios.Prefix(), gate=offcorr.gates.Clip(0.2, 0.28))
    >>> logp = torch.zeros(1, 2, requires_grad=True)
    >>> out = loss_fn(Batch(logp=logp, advantages=torch.ones(1), mask=torch.ones(1, 2).bool()))
    >>> out.loss.backward(); logp.grad
    tensor([[-0.5000, -0.5000]])
    """

    ratio: Ratio | None = Token()
    gate: Gate | Controller = Clip()
    weight: Weight | Controller | tuple[Weight | Controller, ...] | None = None
    reject: Rejection | Controller | tuple[Rejection | Controller, ...] | None = None
    advantages: Advantages | Controller | None = None
    aggregate: str = "token-mean"
    max_length: int | None = None
    count_rejected: bool = True
    strict: bool = False
    made_from: MadeFrom | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for slot in SLOTS:
            value = getattr(self, slot)
            if isinstance(value, list):  # a correction compares its stages, and may be a key
                object.__setattr__(self, slot, tuple(value))
            check_slot(slot, getattr(self, slot))
        for stage in self.stages.values():
            check_stage(stage, OPTIONAL)
        check_ratio_and_gate(self.ratio, self.gate)
        for name in ("count_rejected", "strict"):
            check_flag(self, name)
        check_aggregate(self.aggregate, self.max_length)
        refuse_double_counting(self.ratio, self.gate, as_tuple(self.weight))
        if not self.count_rejected and not self.divides_by_kept:
            divides = AGGREGATIONS[self.aggregate].unit != "none"
            reason = "no weight or rejection drops a token" if divides else f"{self.aggregate!r} divides by no count"
            warn_once(f"count_rejected=False changes nothing here: {reason}")

    # -- for adapters ------------------------------------------------------------------------------------------

    @functools.cached_property
    def method(self) -> str:
        """The name it was made by; "custom" where there is none, or a field has changed since."""
        return self.made_from.method if self.made_from and self.made_from.values == self._values else "custom"

    @functools.cached_property
    def stages(self) -> dict[str, Stage]:
        """Every stage by its place: "ratio", "gate", "weight.0", "reject.0" ..."""
        places: dict[str, Stage] = {} if self.ratio is None else {"ratio": self.ratio}
        places["gate"] = self.gate
        for slot in ("weight", "reject"):
            places |= {f"{slot}.{i}": stage for i, stage in enumerate(as_tuple(getattr(self, slot)))}
        if self.advantages is not None:
            places["advantages"] = self.advantages
        return places

    @functools.cached_property
    def controllers(self) -> dict[str, Controller]:
        """The stages that depend on the whole optimizer batch, by place."""
        return {place: stage for place, stage in self.stages.items() if isinstance(stage, Controller)}

    @functools.cached_property
    def couples(self) -> frozenset[str]:
        """The sequences that its controllers couple: "batch", "group" (the samples of a prompt), both or none."""
        return frozenset(stage.couples for stage in self.controllers.values())

    @property
    def divides_by_kept(self) -> bool:
        """Whether the denominator counts what weights and rejections keep."""
        drops = as_tuple(self.weight) + as_tuple(self.reject)
        return not self.count_rejected and bool(drops) and AGGREGATIONS[self.aggregate].unit != "none"

    @property
    def scales_with_advantage(self) -> bool:
        """Whether a token with advantage 0 has coefficient 0."""
        return all(getattr(stage, "scales_with_advantage", True) for stage in self.stages.values())

    @functools.cached_property
    def compares(self) -> frozenset[str]:
        """The pairs of policies that its stages compare, where that does not depend on the batch."""
        return frozenset(stage.mismatch for stage in self.stages.values() if stage.mismatch is not None)

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """The optional ``Batch`` fields that it requires; ``old_logp`` for a staleness ratio, which is 1 without it."""
        return frozenset(name for stage in self.stages.values() for name in needed_by(stage))

    # -- the loss ----------------------------------------------------------------------------------------------

    def __call__(
        self,
        batch: Batch,
        denominator: float | Tensor | None = None,
        statistics: Statistics | None = None,
        *,
        kept: bool = False,
        anchored: bool = False,
    ) -> Output:
        """Loss, coefficient and metrics of a batch.

        Args:
            denominator: Z; tokens (token-mean) or sequences (seq-mean-*) of the global batch. None: this batch's own.
                On a CPU, one that seems to be of the other unit warns once: of sequences below half of this batch's
                own tokens, or of tokens as many as its own.
            statistics: merged ``self.statistics(...)`` of the global batch, for methods with controllers. None: this
                batch's own, which warns once where a denominator says that the batch is part of a larger one.
            kept: the denominator counts what is kept (the sum of ``kept_units``), as ``count_rejected=False`` needs;
                without a denominator it changes nothing.
            anchored: an anchor has placed the batch (``Step``), so that an ``old_logp`` of None is meant; else a
                method that compares with it warns once.

        Raises:
            TypeError: ``batch`` is no ``Batch``, or ``statistics`` no ``Statistics``.
            ValueError: a field that it needs is None, the denominator is wrong, or the statistics are another method's;
                with ``strict``, a valid token has no finite number, or no token has an engine's log-prob that the
                method needs.
        """
        denominator = self._checked(batch, denominator)
        if batch.old_logp is None and not anchored and not torch.compiler.is_compiling():
            self._warn_without_old_logp(batch.rollout_logp is not None)
        if denominator is not None and not self.count_rejected and not kept:
            self._refuse_denominator(denominator)
        if denominator is not None and not anchored and not torch.compiler.is_compiling():
            self._warn_of_a_part(batch, denominator, statistics)
        with torch.no_grad():
            if statistics is None and self.controllers:
                statistics = self.statistics(batch)
            resolved = self if statistics is None else self.resolve(statistics)
            control = self._control(resolved, batch.logp.device) if self.controllers else {}
            if self.controllers:
                calls.check_resolved(self.controllers, resolved.stages, batch, self.strict)
            if resolved._preparing:
                batch = resolved.prepared(batch)
            plan = resolved.plan(batch)
            if self.controllers:
                plan = plan._replace(method=self.method)  # what is resolved has no name of its own
            if kept and denominator is not None and not AGGREGATIONS[self.aggregate].divides_by_count:
                plan = plan._replace(count_rejected=True)  # Z is known, and nothing else depends on what is kept
            names = self._controllers_by_place
            fused = dispatch.run(plan, batch, denominator)
            loss, coefficient, data = fused or torch_loss(plan, batch, denominator, controllers=names)
        # A loss that is an argument of its own would come out as a view, and adding to it would be an error; but of
        # tensors in a tuple torch.compile makes a result without a gradient.
        compiling = torch.compiler.is_compiling()
        known: Any = (loss.clone(), coefficient) if compiling else ((loss, coefficient),)
        return Output(Attach.apply(batch.logp, *known), coefficient, Metrics(data | control))

    @torch.no_grad()
    def coefficient(self, batch: Batch, denominator: float | Tensor | None = None) -> Tensor:
        """dL/dlogp of every token, in the layout of ``logp``: that of a call, by torch and without the metrics.

        Args:
            denominator: as in a call.  Controllers take the statistics of this batch.

        >>> import offcorr
        >>> batch, tis = offcorr.testing.example(), offcorr.get("tis")
        >>> torch.equal(tis.coefficient(batch), tis(batch).coefficient)
        True
        """
        denominator = self._checked(batch, denominator)
        if denominator is not None and not self.count_rejected:
            self._refuse_denominator(denominator)
        resolved = self.resolve(self.statistics(batch))
        batch = resolved.prepared(batch)
        names = self._controllers_by_place
        return torch_loss(resolved.plan(batch), batch, denominator, measured=False, controllers=names)[1]

    def statistics(self, batch: Batch) -> Statistics | None:
        """The statistics of the controllers, to be merged over micro-batches and ranks; None if there are none."""
        self._checked(batch, None)
        if not self.controllers:
            return None
        with torch.no_grad():
            parts = {place: calls.statistics_of(stage, batch.tokens) for place, stage in self.controllers.items()}
        for place, part in parts.items():
            check_part(part, self.stages[place])
        return Statistics(parts, self._kinds)

    def kept_units(self, batch: Batch, statistics: Statistics | None = None) -> Tensor:
        """[2] float64: the tokens and the sequences of a batch that ``count_rejected=False`` divides by.

        A sequence without a valid token counts, as it does where nothing is rejected.

        Args:
            statistics: as in a call.
        """
        self._checked(batch, None)
        with torch.no_grad():
            resolved = self.resolve(self.statistics(batch) if statistics is None else statistics)
            batch = resolved.prepared(batch)
            kept = reference.factors(resolved.plan(batch).factors, batch.tokens).kept
            return torch.stack(kept_counts(kept.sum(1), batch.tokens)).double()

    def resolve(self, statistics: Statistics | None) -> Correction:
        """The same correction, every controller replaced by an ordinary stage computed from ``statistics``.

        Raises:
            TypeError: ``statistics`` is neither ``Statistics`` nor None.
            ValueError: they are those of other controllers.
        """
        if statistics is None:
            return self
        check_parts(statistics, self._kinds, self.method)
        known: dict[str, Any] = dict(self.stages)
        for place, controller in self.controllers.items():
            known[place] = calls.resolved(controller, statistics.parts[place])
        slots: dict[str, Any] = {"advantages": known.get("advantages")}
        for slot in ("weight", "reject"):
            slots[slot] = tuple(stage for place, stage in known.items() if place.startswith(slot)) or None
        return dataclasses.replace(self, ratio=known.get("ratio"), gate=known["gate"], **slots)

    def plan(self, batch: Batch) -> Plan:
        """The stages as data, for a batch like this one; controllers must have been resolved."""
        engine_known = batch.rollout_logp is not None
        if engine_known not in self._plans:
            plan = Plan.of(self, engine_known)
            reference.check_rejections(plan, batch)
            self._plans[engine_known] = plan
        return self._plans[engine_known]

    def prepared(self, batch: Batch) -> Batch:
        """The batch with the fields that stages replace (rewards, weight, advantages)."""
        for stage in self._preparing:
            batch = calls.prepared(stage, batch)
        return batch

    # -- configuration -----------------------------------------------------------------------------------------

    def with_max_length(self, max_length: int) -> Correction:
        """The same named method with this constant length; itself where it needs none or has one."""
        if not AGGREGATIONS[self.aggregate].constant_length or self.max_length is not None:
            return self
        longer = dataclasses.replace(self, max_length=max_length)
        if self.method == "custom" or self.made_from is None:
            return longer
        return named(longer, self.method, {**self.made_from.options, "max_length": max_length})

    def to_config(self) -> dict[str, Any]:
        """Plain data from which ``offcorr.from_config`` makes the same correction, all options spelled out."""
        if self.method != "custom":
            assert self.made_from is not None
            return {"method": self.method} | {name: plain(value) for name, value in self.made_from.options.items()}
        return {"method": "custom"} | {name: plain(getattr(self, name)) for name in FIELDS}

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in FIELDS)

    @functools.cached_property
    def _multiplies(self) -> Stage | None:
        """A stage whose span is a product over many tokens."""
        return next((stage for stage in self.stages.values() if getattr(stage, "span", "") in PRODUCTS), None)

    @functools.cached_property
    def _controllers_by_place(self) -> list[str]:
        """The class of the controller, or "", for the ratio, the gate, the weights and the rejections."""
        return [self._classes.get(place, "") for place in self.stages if place != "advantages"]

    @functools.cached_property
    def _classes(self) -> dict[str, str]:
        """The class of each controller, by place."""
        return {place: type(stage).__name__ for place, stage in self.controllers.items()}

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """The class of each controller and the choices that differ from its defaults, by place."""
        return {place: kind_of(stage) for place, stage in self.controllers.items()}

    @functools.cached_property
    def _preparing(self) -> list[Stage]:
        """The stages that replace fields of the batch."""
        return [stage for stage in self.stages.values() if stage.prepare is not None]

    @functools.cached_property
    def _required(self) -> tuple[str, ...]:
        """The fields of a batch that may not be None; torch.compile of torch 2.6 refuses a loop over a frozenset."""
        return tuple(sorted(self.needs - {"old_logp"}))

    @functools.cached_property
    def _plans(self) -> dict[bool, Plan]:
        return {}

    def _checked(self, batch: Batch, denominator: float | Tensor | None) -> float | Tensor | None:
        """The denominator as a number or a tensor without dimensions; raises where batch or denominator do not fit."""
        check_batch(batch)
        for name in self._required:
            if getattr(batch, name) is None:
                users = [repr(stage) for stage in self.stages.values() if name in needed_by(stage)]
                known = name == "rollout_logp"
                hint = "; pass rollout_logp=old_logp to say that engine and trainer agree" if known else ""
                raise ValueError(f"{name} is None, but {', '.join(users)} of {self.method!r} needs it{hint}")
        if denominator is not None:
            if AGGREGATIONS[self.aggregate].unit == "none":
                raise ValueError(
                    f"denominator is {denominator!r}, expected None: aggregate {self.aggregate!r} divides by nothing"
                )
            denominator = checked_denominator(denominator)
        if self.strict:
            if batch.mask.dtype != torch.bool:
                batch.check_mask_values()
            if "rollout_logp" in self.needs:
                batch.check_scored()
        if batch.logp.dtype in (torch.bfloat16, torch.float16) and self._multiplies:
            warn_once(
                f"logp is {batch.logp.dtype}, and {self._multiplies!r} of {self.method!r} multiplies the ratios of "
                "many tokens: the rounding of every log-prob adds up, to a gradient that is 10 to 30 % off over some "
                "thousand tokens. Compute log-probs in float32"
            )
        return denominator

    def _warn_without_old_logp(self, engine_known: bool) -> None:
        """Warn once that, without ``old_logp``, the current policy takes its place in the stages that compare with it.

        A total ratio and a score function do not look at it.
        """
        instead = {"staleness": "ratio 1", "engine": "logp against rollout_logp"}
        open_to = "total" if engine_known else "staleness"
        stages = [
            f"{stage!r} has {instead[pair]}"
            for place, stage in self.stages.items()
            if (pair := stage.mismatch or ("" if place in ("gate", "advantages") else open_to)) in instead
            and (place != "ratio" or getattr(self.gate, "uses_ratio", True))
        ]
        if stages:
            warn_once(
                f"old_logp is None, and {self.method!r} compares with it; logp, detached, takes its place: "
                f"{', '.join(stages)}. Pass the log-probs "
                "under the weights that sampled, in the trainer's precision; old_logp=logp.detach() says that these "
                "are the current ones" + ("; rollout_logp does not take its place" if engine_known else "")
            )

    def _warn_of_a_part(self, batch: Batch, denominator: float | Tensor, statistics: Statistics | None) -> None:
        """Warn once of a micro-batch whose statistics are its own, and of a denominator that is too small for it."""
        if self.controllers and statistics is None and not _is_own_total(self.aggregate, batch, denominator):
            warn_once(
                f"denominator is given without statistics=, and {', '.join(map(repr, self.controllers.values()))} of "
                f"{self.method!r} depends on the whole batch: it adapts to each micro-batch, with other bounds than "
                "the whole batch's. Pass statistics=, those of all micro-batches and ranks merged, or use "
                "offcorr.training.Step (docs/extending.md, 5. A controller)"
            )
        if AGGREGATIONS[self.aggregate].unit == "tokens":
            warn_of_small_denominator(denominator, batch.mask)
        elif AGGREGATIONS[self.aggregate].unit == "sequences":
            warn_of_tokens(self.aggregate, denominator, batch.mask, batch.sequences)

    def _control(self, resolved: Correction, device: torch.device) -> dict[str, Mean]:
        """The ``offcorr/control/`` series: those of resolved controllers, with the place where a name is taken."""
        numbers: dict[str, Number] = {}
        for place, controller in self.controllers.items():
            logged = calls.numbers_logged(controller, resolved.stages[place])
            numbers |= {f"{place}/{name}" if name in numbers else name: number for name, number in logged.items()}
        one = torch.ones((), dtype=torch.float64, device=device)  # a list would be copied from the host
        return {CONTROL + name: Mean(torch.stack([one * value, one])) for name, value in numbers.items()}

    def _refuse_denominator(self, denominator: float | Tensor) -> None:
        raise ValueError(
            f"denominator is {denominator!r} together with count_rejected=False; an explicit denominator cannot "
            "count what is kept: use one of the two, or pass the sum of kept_units() and kept=True"
        )


FIELDS = tuple(f.name for f in dataclasses.fields(Correction) if f.name != "made_from")
"""The fields that say what a correction does; they may stand in its configuration."""

OPTIONAL = tuple(f.name for f in dataclasses.fields(Batch) if f.default is None)
"""The fields of a batch that may be None."""

_FIELD_OF_INPUT = {"reward": "rewards", "entropy": "entropy"}
"""The field of a batch that an input of pointwise functions is read from, where it may be None."""


@dataclass(frozen=True, eq=False)
class MadeFrom:
    """The named method that a correction came from: its name, its options, and the fields that they gave."""

    method: str
    options: Mapping[str, Any]
    values: tuple[Any, ...]


def named(correction: Correction, method: str, options: Mapping[str, Any]) -> Correction:
    """The correction, known as ``method`` with these options until one of its fields is replaced."""
    return dataclasses.replace(correction, made_from=MadeFrom(method, options, correction._values))


# -- helpers -------------------------------------------------------------------------------------------------


def _is_own_total(aggregate: str, batch: Batch, denominator: float | Tensor) -> bool:
    """Whether the denominator is this batch's own count, so that it is the whole batch; read on a CPU only."""
    if isinstance(denominator, Tensor) and denominator.device.type != "cpu":
        return False
    own = tokens_on_host(batch.mask) if AGGREGATIONS[aggregate].unit == "tokens" else batch.sequences
    return float(denominator) == own


def needed_by(stage: Any) -> set[str]:
    """The optional fields of ``Batch`` that a stage requires."""
    needs = {field for name, field in _FIELD_OF_INPUT.items() if name in stage.inputs}
    needs |= set(stage.needs)
    needs |= {"rollout_logp"} if stage.mismatch in ("engine", "total") else set()
    needs |= {"old_logp"} if isinstance(stage, Ratio) and stage.mismatch in ("staleness", None) else set()
    return needs
