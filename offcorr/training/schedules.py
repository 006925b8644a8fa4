"""Options that change over training: ``Linear``, and a correction some of whose options follow one.

They have no state: the caller passes the share of the training that is done, so a resumed run needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from offcorr.correction import Correction
from offcorr.stages.checks import check_number


def share_done(step: int, steps: int) -> float:
    """Share of the training that is done at an optimizer step: 0 at the first, ``step`` 0, and 1 at the last.

    >>> [share_done(step, steps=3) for step in range(3)]
    [0.0, 0.5, 1.0]
    """
    return min(step / max(steps - 1, 1), 1.0)


@dataclass(frozen=True)
class Linear:
    """A number that runs from ``start`` at the first optimizer step to ``end`` at the last.

    In a configuration it is ``{"start": 2.0, "end": -1.0}``.

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
        return float(f"{(1 - done) * self.start + done * self.end:.12g}")  # .42, not .42000000000000004


@dataclass(frozen=True)
class Annealed:
    """A correction whose options change over training.

    Args:
        build: options to a Correction, for instance ``functools.partial(offcorr.get, "holderpo")``.
        options: its keywords. Any number among them, those of a weight too, may be a ``Linear``, or the mapping of its
            configuration.

    Raises:
        ValueError: an option is wrong at the start or at the end of its schedule; the message names both.

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
        if not self.schedules:
            self.at(0.0)
        for end, done in ("start", 0.0), ("end", 1.0):
            if self.schedules:
                self._check_end(end, done)

    def _check_end(self, end: str, done: float) -> None:
        """Raise the error of the correction at one end of the schedules, with their values there."""
        try:
            self.at(done)
        except (TypeError, ValueError) as error:
            values = ", ".join(f"{path} is {value:g}" for path, value in self.values(done).items())
            where = f"at the {end} of the schedule{'s' * (len(self.schedules) > 1)}, where {values}"
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{where}: {error}") from error

    @property
    def schedules(self) -> dict[str, Linear]:
        """The options that change, by their path: "power", "weight.cap", "weight.0.cap" in a list of weights."""
        return dict(_schedules_in(self.options))

    def at(self, done: float) -> Correction:
        """The correction when the share ``done`` of the training is done."""
        return self.build(**_resolved(self.options, done))

    def values(self, done: float) -> dict[str, float]:
        """The scheduled options at that share of the training, by their path."""
        return {path: schedule.at(done) for path, schedule in self.schedules.items()}


def _parsed(option: Any, path: str = "") -> Any:
    """The options with ``Linear`` in the place of its configuration."""
    if isinstance(option, Mapping):
        ends = option.keys() & {"start", "end"}
        if path and ends and "name" not in option:
            if option.keys() != {"start", "end"}:
                raise ValueError(
                    f"{path} is {dict(option)!r}, expected a number, or a schedule {{'start': ..., 'end': ...}}"
                )
            try:
                return Linear(**option)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return {name: _parsed(value, _joined(path, name)) for name, value in option.items()}
    if isinstance(option, list | tuple):
        return [_parsed(entry, _joined(path, i)) for i, entry in enumerate(option)]
    return option


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _resolved(option: Any, done: float) -> Any:
    if isinstance(option, Mapping):
        return {name: _resolved(value, done) for name, value in option.items()}
    if isinstance(option, list):
        return [_resolved(entry, done) for entry in option]
    return option.at(done) if isinstance(option, Linear) else option


def _schedules_in(option: Any, path: str = "") -> Iterator[tuple[str, Linear]]:
    if isinstance(option, Linear):
        yield path, option
    elif isinstance(option, Mapping | list):
        parts = option.items() if isinstance(option, Mapping) else enumerate(option)
        for name, value in parts:
            yield from _schedules_in(value, _joined(path, name))
