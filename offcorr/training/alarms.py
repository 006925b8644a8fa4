"""``Alarm``: a verdict of a ``Monitor``, its words and its actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offcorr.diagnose import DumpWriter, Record
from offcorr.stages.checks import one_of
from offcorr.training.series import Severity

__all__ = ["ACTIONS", "Alarm", "MismatchError"]

ACTIONS = ("log", "warn", "dump", "mask", "stop")
"""The actions that an alarm can take."""

FOUND = {
    "engine": "the engine's log-probs have moved away from the trainer's",
    "staleness": "the policy has moved away from the one that sampled",
    "surprise": "the tokens no longer follow the trainer's distribution",
}
"""For each series the finding in words."""

ADVICE = {
    "engine": "score the same tokens with the same weights on both sides; look at the weight sync, the sampling "
    "parameters and the precision of the sampler",
    "staleness": "see whether the sampler still receives new weights; else lower the learning rate or the lag",
    "surprise": "compare the sampler's temperature, top_p, top_k and penalties with the trainer's",
}
"""For each series what to look at where no cause was found."""


class MismatchError(RuntimeError):
    """Raised where the monitor was asked to stop the training."""


@dataclass(frozen=True)
class Alarm:
    """A verdict of the monitor.

    Args:
        step: the optimizer step.
        series: "engine", "staleness" or "surprise" (mean of -logp - entropy).
        severity: "warning" or "critical".
        cause: an id of ``offcorr.diagnose.CAUSES``; "unknown" or "clean" where none was found.
        confidence: of the cause, from 0 to 1.
        evidence: sentences with the numbers.
        advice: what to change.
        actions: those that were taken.
        dump: the file of the batch's records, if one was written.
    """

    step: int
    series: str
    severity: Severity
    cause: str
    confidence: float
    evidence: tuple[str, ...]
    advice: str
    actions: tuple[str, ...]
    dump: Path | None = None

    def __str__(self) -> str:
        cause = (
            "no cause found" if self.cause == "unknown" else f"cause: {self.cause} (confidence {self.confidence:.2f})"
        )
        written = "" if self.dump is None else f" The batch was written to {self.dump}."
        return (
            f"step {self.step}: {FOUND[self.series]} ({self.severity}): {'; '.join(self.evidence)}. {cause}: "
            f"{self.advice.rstrip('.')}.{written}"
        )


def checked_actions(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """The actions that the option ``name`` asks for.

    Raises:
        ValueError: one that is unknown, or none at all.
    """
    actions = (given,) if isinstance(given, str) else tuple(given)
    for action in actions:
        if action not in ACTIONS:
            raise ValueError(f"{name} is {given!r}{one_of(action, ACTIONS)}")
    if not actions:
        raise ValueError(f"{name} is {given!r}, expected one or several of {list(ACTIONS)}")
    return actions


def write_dump(records: list[Record], path: Path) -> Path:
    """Writes the records to ``path`` or, where that exists, to a name with a number; returns the file."""
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}_{number}"), number + 1
    with DumpWriter(free) as writer:
        writer.write(records)
    return free
