"""``Stage``: the part that ratios, weights, rejections, gates and controllers have in common.

A stage is a frozen dataclass that is its own configuration.  It states what it does as data: plain functions over
``offcorr.ops`` (*pointwise* functions, named by their arguments), the name of a span, and a NamedTuple of numbers.
``Spec`` and ``GateSpec`` collect this data; the torch reference (``reference.py``) and the kernel interpret them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from offcorr import shapes
from offcorr.batch import Batch, Tokens
from offcorr.stages import definition, spans
from offcorr.stages.checks import check_word, nearest, uncalled

__all__ = ["Controller", "GateSpec", "Number", "Plan", "Pointwise", "Spec", "Stage"]

Number = float | Tensor
"""A number of a stage: a Python float, or a 0-dim tensor on the batch's device, which is never read on the host."""

Pointwise = Callable[..., Any]
"""A function of one token, written over ``offcorr.ops``; the names of its arguments say which inputs it gets."""


class Spec(NamedTuple):
    """A ratio, a weight or a rejection as data.

    The pipeline takes ``measure`` of every token (0 under the mask), carries it over the row by ``span``, clamps the
    result to +-``limit`` and hands it to ``rule`` as ``value``.  The log-ratio that a ratio's rule returns is clamped
    to +-20 afterwards.
    """

    mismatch: shapes.Mismatch  # the pair of policies that is compared
    measure: Pointwise  # one number per token
    span: str  # a name of ``offcorr.spans``
    rule: Pointwise  # a ratio's (log-ratio, slope); a weight's or rejection's (factor, kept)
    params: tuple[Any, ...]  # a NamedTuple of ``Number``, which the functions see as ``p``; () if there are none
    limit: float  # nats; infinite for a ratio
    counts_as: str  # "truncated", "vetoed" or "": see ``Weight.counts_as``
    owner: str  # the stage's class, for errors
    kind: str  # "ratio", "weight" or "rejection"


class GateSpec(NamedTuple):
    """A gate as data."""

    mismatch: shapes.Mismatch  # that of the ratio; its inputs are of this pair
    surrogate: Pointwise
    params: tuple[Any, ...]
    log_limit: float  # nats, on the log-ratio
    detached: bool
    owner: str  # the gate's class, for errors


class Stage:
    """A frozen dataclass, known by the snake-case form of its class name.

    ``PARTS`` names the pointwise functions of a kind and how many values each returns.  A subclass gives them as class
    attributes, wrapped in ``staticmethod``, or as properties where they depend on its fields.  The attributes are
    checked when the class is defined.

    Raises:
        TypeError: when a subclass is defined whose attributes cannot work, or when one with fields is not a frozen
            dataclass; the message names the class and the attribute.
    """

    KIND: ClassVar[str] = ""
    PARTS: ClassVar[Mapping[str, int]] = {}

    prepare: Callable[[Batch], Batch] | None = None
    """Replaces fields of the batch (rewards, weight, advantages) before the pipeline runs."""

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.KIND = kind
            definition.KINDS[kind] = cls
            return
        definition.check(cls)
        if not cls.__name__.startswith("_"):
            register_form(cls.KIND, snake_case(cls.__name__), cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        definition.check_dataclass(cls)  # type: ignore[arg-type]
        return super().__new__(cls)

    def __repr__(self) -> str:
        """That of a stage without fields; a dataclass writes its own, with the fields."""
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        """Stages without fields are equal by their class; a dataclass compares its fields by a method of its own."""
        return self is other or (type(self) is type(other) and not hasattr(self, "__dataclass_fields__"))

    def __hash__(self) -> int:
        return hash(type(self))

    @classmethod
    def name(cls) -> str:
        """The name that stands for the class in configurations."""
        short = snake_case(cls.__name__)
        return short if _FORMS.get((cls.KIND, short)) is cls else f"{cls.__module__}:{cls.__qualname__}"

    @property
    def mismatch(self) -> shapes.Mismatch | None:
        """The pair of policies it compares; None: "total" where ``rollout_logp`` is given, else "staleness"."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of ``Batch`` that it looks at in ``prepare`` or in its statistics."""
        return frozenset()

    @property
    def params(self) -> tuple[Any, ...]:
        """The numbers that the pointwise functions see as ``p``: a NamedTuple of ``Number``."""
        return ()

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs that the pointwise functions name."""
        return frozenset(name for part in self.PARTS for name in arguments(getattr(self, part))) - {"p"}

    def to_config(self) -> dict[str, Any]:
        """Plain data that makes the same stage; numbers on a device are read."""
        config: dict[str, Any] = {"name": self.name()}
        if dataclasses.is_dataclass(self):  # a stage without options need not be one
            config |= {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return config


def spec_of(stage: Any, engine_known: bool) -> Spec:
    """A ratio, a weight or a rejection as data, for batches with or without ``rollout_logp``."""
    spans.check(stage.span, type(stage).__name__)
    check_word(type(stage).__name__, "counts_as", getattr(stage, "counts_as", ""), definition.METRICS_FED)
    return Spec(
        stage.mismatch or ("total" if engine_known else "staleness"),
        stage.measure,
        stage.span,
        stage.rule,
        definition.checked_params(stage),
        getattr(stage, "limit", math.inf),
        getattr(stage, "counts_as", ""),
        type(stage).__name__,
        stage.KIND,
    )


def own(log_ratio: Any) -> Any:
    """The measure of most stages: the token's own log-ratio."""
    return log_ratio


def snake_case(name: str) -> str:
    """A class name as it stands in configurations."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


@cache
def arguments(pointwise: Pointwise) -> tuple[str, ...]:
    """The names of a pointwise function's arguments."""
    return tuple(inspect.signature(pointwise).parameters)


# -- names and configurations --------------------------------------------------------------------------------

_FORMS: dict[tuple[str, str], Callable[..., Any]] = {}
"""(kind, name) -> the class, or the function that builds a stage (``Truncate``, ``Mask``)."""


def register_form(kind: str, name: str, build: Callable[..., Any]) -> None:
    """Make a class or function known to configurations.

    Where another module has taken the name, it is known by ``module:Name`` instead.
    """
    path = f"{build.__module__}:{build.__qualname__}"
    known = _FORMS.get((kind, name))
    same = known is None or f"{known.__module__}:{known.__qualname__}" == path
    _FORMS[kind, name if same else path] = build


def forms(kind: str) -> list[str]:
    """The names that configurations may use for a kind of stage."""
    return sorted(name for known, name in _FORMS if known == kind)


def form(kind: str, name: str) -> Callable[..., Any]:
    """The class or function of this name.

    Raises:
        ValueError: the name is unknown; the message gives the nearest one.
    """
    module = name.rpartition(":")[0]
    if module and (kind, name) not in _FORMS:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{kind} {name!r}: module {module!r} cannot be imported ({error})") from error
        short = snake_case(name.rpartition(":")[2].rpartition(".")[2])
        found = _FORMS.get((kind, short))
        if found is not None and f"{found.__module__}:{found.__qualname__}" == name:
            return found
    if (kind, name) not in _FORMS:
        known = forms(kind)
        plain = snake_case(name.partition("(")[0])
        options = f" Options stand beside the name: {{'name': {plain!r}, ...}}." if "(" in name else ""
        raise ValueError(
            f"unknown {kind} {name!r}{nearest(name, known, '.')}{options} Known: {', '.join(known)}; your own are "
            "known once the module that defines them is imported"
        )
    return _FORMS[kind, name]


def stage_from_config(kind: str, config: Any) -> Any:
    """A stage, or a tuple of them, from ``{"name": ..., **options}``, a bare name, a list, or a stage itself.

    Raises:
        ValueError: the name or an option is unknown, an option without a default is missing, or the configuration is
            none of these.
    """
    if config is None or isinstance(config, Stage):
        return config
    if isinstance(config, list | tuple):
        return tuple(stage_from_config(kind, entry) for entry in config)
    if told := uncalled(config):
        raise ValueError(f"{kind}: {told}")
    if isinstance(config, str):
        config = {"name": config}
    if not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
        raise ValueError(f"{kind} is {config!r}, expected an object, a name, or a mapping with a 'name'")
    options = dict(config)
    name = options.pop("name")
    build = form(kind, name)
    allowed = _options(build)
    for option in options:
        if option not in allowed:
            near = nearest(option, allowed, ".")
            raise ValueError(f"{kind} {name!r} has no option {option!r}{near} It has {list(allowed) or 'none'}")
    if missing := [option for option, required in allowed.items() if required and option not in options]:
        raise ValueError(
            f"{kind} {name!r} requires {' and '.join(missing)}, without a default, expected "
            f"{{'name': {name!r}, {', '.join(f'{option!r}: ...' for option in missing)}}}"
        )
    if "inner" in options:
        options["inner"] = stage_from_config(kind, options["inner"])
    return build(**options)


def _options(build: Any) -> dict[str, bool]:
    """The options of a class or function by name, and whether each is required."""
    if not dataclasses.is_dataclass(build):
        taken = inspect.signature(build).parameters.values()
        return {
            one.name: one.default is one.empty for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
    # Python 3.10's signature of a class is that of __new__.
    missing = dataclasses.MISSING
    return {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(build)}


def plain(value: Any) -> Any:
    """Plain data: a stage as its configuration, a tensor as its number, a tuple as a list."""
    if isinstance(value, Stage):
        return value.to_config()
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return value.item() if isinstance(value, Tensor) else value


# -- controllers ---------------------------------------------------------------------------------------------


class Controller(Stage, kind="controller"):
    """A stage whose numbers depend on the whole optimizer batch.

    ``becomes`` is the kind of the stage that it resolves to: "gate", "weight", "rejection" or "advantages".
    ``couples`` names the sequences that share statistics: the whole "batch", or the samples of one prompt ("group").
    """

    becomes: ClassVar[str]
    uses_ratio: bool = True
    scales_with_advantage: bool = True
    """As in ``Gate``, for a controller that becomes one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        kind = getattr(cls, "becomes", None)
        if kind is not None:
            cls.KIND = kind
        super().__init_subclass__(**kwargs)

    @property
    def couples(self) -> str:
        """The sequences whose statistics it joins: "batch" or "group"."""
        return "batch"

    def statistics(self, tokens: Tokens) -> Any:
        """Its statistics of a micro-batch: a frozen dataclass of tensors with a method ``merge(other)``."""
        raise NotImplementedError(f"{type(self).__name__} needs statistics(self, tokens), of a micro-batch")

    def resolve(self, statistics: Any) -> Stage:
        """An ordinary stage whose numbers are computed from the merged statistics of the optimizer batch."""
        raise NotImplementedError(f"{type(self).__name__} needs resolve(self, statistics), the stage that it becomes")

    def logged(self, resolved: Any) -> dict[str, Number]:
        """Numbers of the resolved stage by name, logged under ``offcorr/control/``.

        Where another controller of the correction logs the same name, the second follows its place
        (``offcorr/control/reject.1/squared_log_ratio``).
        """
        return {}


class Plan(NamedTuple):
    """A resolved correction as data, for one kind of batch; the reference and the kernel interpret it."""

    method: str
    ratio: Spec | None
    factors: tuple[Spec, ...]  # weights, then rejections
    gate: GateSpec
    aggregate: str
    max_length: int | None
    count_rejected: bool
    strict: bool
    asks_reward: bool  # whether a function of a stage reads the sequence's reward

    @classmethod
    def of(cls, correction: Any, engine_known: bool) -> Plan:
        """The plan of a correction without controllers, for batches with or without ``rollout_logp``."""
        stages = correction.stages
        others = {place: stage for place, stage in stages.items() if place not in ("gate", "advantages")}
        specs = {place: spec_of(stage, engine_known) for place, stage in others.items()}
        ratio, gate = specs.pop("ratio", None), correction.gate
        return cls(
            correction.method,
            ratio,
            tuple(specs.values()),
            GateSpec(
                ratio.mismatch if ratio else "staleness",
                gate.surrogate,
                definition.checked_params(gate),
                gate.log_limit,
                gate.detached,
                type(gate).__name__,
            ),
            correction.aggregate,
            correction.max_length,
            correction.count_rejected,
            correction.strict,
            any("reward" in stage.inputs for place, stage in stages.items() if place != "advantages"),
        )
