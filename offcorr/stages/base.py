"""What every stage of the pipeline has in common: a name, a configuration, and pointwise parts called by name."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, get_args

from torch import Tensor

from offcorr.shapes import Mismatch

Number = float | Tensor
"""A number of a stage: the host's own, or a 0-dim tensor on the batch's device, which is not read."""

INPUTS = frozenset(
    {
        "log_ratio",  # the stage's own two policies, this token, clamped
        "raw_log_ratio",  # the same, unclamped
        "value",  # what the stage's span made of its measure; for a gate, the ratio's logarithm as a constant
        "logp",  # the policy compared; for a gate always the one being trained
        "anchor_logp",  # the policy compared against
        "advantage",
        "position",  # 1-based count of valid tokens
        "reward",
    }
)
"""What a pointwise part may ask for, by naming its arguments; ``p`` is the stage's NamedTuple of numbers."""


class Stage:
    """A frozen dataclass that is its own configuration.

    Subclasses name their pointwise parts in ``POINTWISE``; each is a plain function over ``offcorr.ops`` whose
    argument names, taken from ``INPUTS``, say what it needs.  ``p`` stands for ``self.params``.
    """

    KIND: ClassVar[str] = ""
    POINTWISE: ClassVar[tuple[str, ...]] = ()
    _registry: ClassVar[dict[tuple[str, str], type[Stage]]] = {}

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.KIND = kind
            return
        if cls.__name__.startswith("_"):
            return
        key = (cls.KIND, cls.name())
        known = Stage._registry.get(key)
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"a {cls.KIND} named {cls.name()!r} exists already: {known.__module__}.{known.__qualname__}"
            )
        for part in cls.POINTWISE:
            pointwise = getattr(cls, part, None)
            unknown = set(arguments(pointwise)) - INPUTS - {"p"} if callable(pointwise) else set()
            if unknown:
                raise TypeError(
                    f"{cls.__name__}.{part} asks for {sorted(unknown)}, expected names from {sorted(INPUTS)} or p"
                )
        Stage._registry[key] = cls

    @classmethod
    def name(cls) -> str:
        """snake_case of the class name; it stands in configurations."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def params(self) -> tuple[Any, ...]:
        """What the pointwise parts see as ``p``: a NamedTuple of ``Number``, run-time arguments of a kernel."""
        return ()

    # A batch-coupled stage also has ``statistics(tokens)``, mergeable, and ``resolve(statistics)``, the same
    # stage with what it needs of the global batch known: its numbers are 0-dim tensors, so nothing waits for them.
    statistics: ClassVar[Any] = None
    resolve: ClassVar[Any] = None

    def found(self, resolved: Any) -> dict[str, Number]:
        """The numbers of what a batch-coupled stage became, by name: logged under ``offcorr/control/``."""
        return {}

    @property
    def asks_for(self) -> frozenset[str]:
        """The inputs that the pointwise parts name."""
        return frozenset(name for part in self.POINTWISE for name in arguments(getattr(self, part)))

    def to_config(self) -> dict[str, Any]:
        """Plain data that makes the same stage; numbers on a device are read."""
        config: dict[str, Any] = {"name": self.name()}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            config[field.name] = value.to_config() if isinstance(value, Stage) else plain(value)
        return config


def plain(value: Any) -> Any:
    """A number as the host's own; anything else as it is."""
    return value.item() if isinstance(value, Tensor) else value


@cache
def arguments(pointwise: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(pointwise).parameters)


def apply(pointwise: Callable[..., Any], inputs: Mapping[str, Any], params: tuple[Any, ...]) -> Any:
    """Call a pointwise part with the inputs that its arguments name."""
    return pointwise(*(params if name == "p" else inputs[name] for name in arguments(pointwise)))


def stage_from_config(kind: str, config: Any) -> Any:
    """A stage, or a tuple of them, from ``{"name": ..., **fields}``, a bare name, a list, or a stage itself."""
    if config is None or isinstance(config, Stage):
        return config
    if isinstance(config, list | tuple):
        return tuple(stage_from_config(kind, one) for one in config)
    if isinstance(config, str):
        config = {"name": config}
    if not isinstance(config, Mapping) or "name" not in config:
        raise ValueError(f"{kind} is {config!r}, expected an object, a name, or a mapping with a 'name'")
    fields = dict(config)
    cls = named(kind, fields.pop("name"))
    allowed = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for field in fields:
        if field not in allowed:
            raise ValueError(
                f"{kind} {cls.name()!r} has no option {field!r}{nearest(field, allowed)}; it has {allowed}"
            )
    if "inner" in fields:
        fields["inner"] = stage_from_config(kind, fields["inner"])
    return cls(**fields)


def named(kind: str, name: str) -> type[Stage]:
    names = sorted(known for k, known in Stage._registry if k == kind)
    if name not in names:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, names)}; known: {', '.join(names)}")
    return Stage._registry[kind, name]


def nearest(word: str, words: Any) -> str:
    """ ", did you mean ...?" for an error message."""
    import difflib

    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


# Checks for __post_init__: each names the field, what came and what was wanted.


def check_number(
    owner: Any, field: str, *, low: float = -math.inf, above: bool = False, optional: bool = False
) -> None:
    """``owner.field`` is a finite number >= ``low`` (> ``low`` with ``above``); None passes if ``optional``.

    A 0-dim tensor is taken at its word, as looking costs a synchronisation.
    """
    value = getattr(owner, field)
    if optional and value is None:
        return
    wanted = "a finite number" + ("" if low == -math.inf else f" {'>' if above else '>='} {low:g}")
    wanted += " or None" if optional else ""
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(
                f"{type(owner).__name__}: {field} has shape {tuple(value.shape)}, expected {wanted}, or a 0-dim tensor"
            )
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or (above and value == low):
        raise ValueError(f"{type(owner).__name__}: {field} is {value!r}, expected {wanted}")


def check_order(owner: Any, low: str, high: str) -> None:
    """``owner.low`` <= ``owner.high``; a tensor is taken at its word."""
    if any(isinstance(getattr(owner, field), Tensor) for field in (low, high)):
        return
    if getattr(owner, low) > getattr(owner, high):
        raise ValueError(
            f"{type(owner).__name__}: {low} = {getattr(owner, low)!r} is above {high} = {getattr(owner, high)!r}, "
            f"expected {low} <= {high}"
        )


def check_choice(owner: Any, field: str, choices: Any) -> None:
    value = getattr(owner, field)
    if value not in tuple(choices):
        raise ValueError(
            f"{type(owner).__name__}: {field} is {value!r}{nearest(value, choices)}, expected one of {list(choices)}"
        )


def check_pair(owner: Any) -> None:
    check_choice(owner, "mismatch", get_args(Mismatch))
