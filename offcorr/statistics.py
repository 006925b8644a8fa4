"""``Statistics``: those of a correction's controllers, merged over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offcorr.metrics import Gather


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of the controllers, one entry per controller, keyed by its slot ("gate", "weight.0" ...).

    ``merge`` combines micro-batches, ``all_reduce`` ranks.  ``classes`` has each controller's class and choices.
    """

    parts: Mapping[str, Any]
    classes: Mapping[str, str] = field(default_factory=dict)

    def merge(self, other: Statistics) -> Statistics:
        """Both together, as if they had been one batch.

        Raises:
            TypeError: ``other`` is no ``Statistics``.
            ValueError: they are those of other controllers.
        """
        check_type(other)
        if self.parts.keys() != other.parts.keys() or self.classes != other.classes:
            raise ValueError(f"the other statistics are of {_listed(other)}, expected {_listed(self)}, as these are")
        parts = {place: part.merge(other.parts[place]) for place, part in self.parts.items()}
        return Statistics(parts, self.classes)

    def all_reduce(self, gather: Gather) -> Statistics:
        """Merged over ranks, tensor by tensor.

        Args:
            gather: [K] of this rank to [ranks, K]; the ranks' tensors may have different lengths.
        """
        return Statistics({place: _all_reduced(part, gather) for place, part in self.parts.items()}, self.classes)


def check_type(statistics: object) -> None:
    """Raise TypeError for anything but ``Statistics``."""
    if not isinstance(statistics, Statistics):
        raise TypeError(f"statistics is a {type(statistics).__name__}, expected an offcorr.Statistics")


def check_parts(statistics: object, classes: Mapping[str, str], method: str) -> None:
    """Raise unless the statistics are those of a method's controllers, given as their kinds by place (``kind_of``).

    Statistics that were made without ``classes`` need the same places alone.
    """
    check_type(statistics)
    assert isinstance(statistics, Statistics)
    if statistics.parts.keys() != classes.keys() or (statistics.classes and statistics.classes != classes):
        wanted = _listed(Statistics(classes, classes))
        raise ValueError(f"statistics are of {_listed(statistics)}, but those of {method!r} are of {wanted}")


def kind_of(controller: Any) -> str:
    """A controller's class and the choices, words and flags, that differ from its defaults.

    Numbers may change between the statistics and their use, as those of a schedule do.

    >>> import offcorr
    >>> kind_of(offcorr.get("m2po", mismatch="total", tau=0.1).stages["reject.0"])
    "MomentBudget(mismatch='total')"
    """
    fields = dataclasses.fields(controller) if dataclasses.is_dataclass(controller) else ()
    options = {f.name: (getattr(controller, f.name), f.default) for f in fields}
    changed = [
        f"{name}={value!r}"
        for name, (value, default) in options.items()
        if isinstance(value, str | bool) and value != default
    ]
    return type(controller).__name__ + (f"({', '.join(changed)})" if changed else "")


def _listed(statistics: Statistics) -> str:
    """Its controllers, for errors."""
    shown = [f"{place} {statistics.classes.get(place, '')}".rstrip() for place in statistics.parts]
    return ", ".join(shown) or "no controller"


def check_part(part: Any, controller: Any) -> None:
    """Raise TypeError for statistics that could not be merged over micro-batches or ranks."""
    name = f"{type(controller).__name__}.statistics"
    if not hasattr(type(part), "__dataclass_fields__") or not callable(getattr(part, "merge", None)):
        raise TypeError(f"{name} returned a {type(part).__name__}, expected a frozen dataclass of tensors with merge()")
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if not isinstance(value, Tensor) or value.ndim > 1:
            raise TypeError(f"{name}: {f.name} is {value!r}, expected a tensor of at most one dimension")


def _all_reduced(part: Any, gather: Gather) -> Any:
    """A controller's statistics merged over ranks, by gathering each of its tensors."""
    make: Any = type(part)
    columns = {f.name: _gathered(getattr(part, f.name), gather) for f in dataclasses.fields(part)}
    ranks = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    parts = [make(**row) for row in ranks]
    while len(parts) > 1:  # neighbours first: one after another, statistics that join would be copied once per rank
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a.merge(b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def _gathered(values: Tensor, gather: Gather) -> list[Tensor]:
    """Every rank's tensor, which may differ in length: padded to the longest, gathered, and cut again."""
    flat = values.reshape(-1)
    lengths = gather(torch.tensor([len(flat)], device=flat.device)).flatten().tolist()
    padded = gather(torch.nn.functional.pad(flat, (0, max(lengths) - len(flat))))
    parts = [rank[:length] for rank, length in zip(padded, lengths, strict=True)]
    return [rank[0] if values.ndim == 0 else rank for rank in parts]
