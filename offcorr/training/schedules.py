"""Options that change over training: ``Linear``, and a correction some of whose options follow one.

Nothing here holds a step: the caller says which share of the training is done, so a resumed run needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from offcorr.correction import Correction
from offcorr.stages.checks import check_number


@dataclass(frozen=True)
class Linear:
    """From ``start`` to ``end`` over training; in a configuration ``{"start": 2.0, "end": -1.0}``.

    >>> power = Linear(2.0, -1.0)
    >>> power.at(0.0), power.at(0.5), power.at(1.0)
    (2.0, 0.5, -1.0)
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        check_number(self, "start")
        check_number(self, "end")

    def at(self, done: float) -> float:
        """The value when the share ``done`` of the training is done.

        Raises:
            ValueError: ``done`` is not between 0 and 1.
        """
        if not 0 <= done <= 1:
            raise ValueError(f"done is {done!r}, expected the share of the training that is done, between 0 and 1")
        return (1 - done) * self.start + done * self.end


@dataclass(frozen=True)
class Annealed:
    """A correction over training: built anew from the options in force.

    Args:
        build: options to a Correction, for instance ``functools.partial(offcorr.get, "holderpo")``.
        options: its keywords. A ``Linear``, or the mapping that stands for one, may stand wherever a number may,
            in the options of a weight too.

    Raises:
        ValueError: an option is wrong at the start or at the end of its schedule.

    >>> import functools, offcorr
    >>> cap = {"name": "truncate", "cap": Linear(4.0, 2.0)}
    >>> annealed = Annealed(functools.partial(offcorr.get, "holderpo"), {"power": Linear(2.0, -1.0), "weight": cap})
    >>> annealed.at(0.5).ratio
    PowerMean(mismatch='staleness', power=0.5)
    >>> annealed.values(0.5)
    {'power': 0.5, 'weight.cap': 3.0}
    """

    build: Callable[..., Correction]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _parsed(self.options))
        for end in (0.0, 1.0) if self.schedules else (0.0,):
            self.at(end)

    @property
    def schedules(self) -> dict[str, Linear]:
        """What changes, by where it stands: "power", "weight.cap", "weight.0.cap" in a list of weights."""
        return dict(_found(self.options))

    def at(self, done: float) -> Correction:
        """The correction when the share ``done`` of the training is done."""
        return self.build(**_resolved(self.options, done))

    def values(self, done: float) -> dict[str, float]:
        """The scheduled options then, by where they stand."""
        return {place: schedule.at(done) for place, schedule in self.schedules.items()}


def _parsed(option: Any) -> Any:
    if isinstance(option, Mapping):
        return Linear(**option) if option.keys() == {"start", "end"} else {k: _parsed(v) for k, v in option.items()}
    return [_parsed(one) for one in option] if isinstance(option, list | tuple) else option


def _resolved(option: Any, done: float) -> Any:
    if isinstance(option, Mapping):
        return {name: _resolved(value, done) for name, value in option.items()}
    if isinstance(option, list):
        return [_resolved(one, done) for one in option]
    return option.at(done) if isinstance(option, Linear) else option


def _found(option: Any, place: str = "") -> Iterator[tuple[str, Linear]]:
    if isinstance(option, Linear):
        yield place, option
    elif isinstance(option, Mapping | list):
        parts = option.items() if isinstance(option, Mapping) else enumerate(option)
        for name, value in parts:
            yield from _found(value, f"{place}.{name}" if place else str(name))
