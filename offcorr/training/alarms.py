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

HARD = ("mask", "stop")
"""The actions that change the training; not taken where the diagnosis finds nothing."""

MOVED = {
    "engine": "the engine's log-probs have moved away from the trainer's",
    "staleness": "the policy has moved away from the one that sampled",
    "surprise": "the tokens no longer follow the trainer's distribution",
}
"""For each series the finding in words, where it has left its own baseline."""

FAR = MOVED | {
    "engine": "the engine's log-probs are far from the trainer's",
    "staleness": "the policy is far from the one that sampled",
    "surprise": "the tokens do not follow the trainer's distribution",
}
"""The same, where it is beyond a fixed limit, perhaps from the first step on."""

OVERDUE = "the sampler gets no newer weights"
"""The finding in words, where the reported versions say it, however far the two policies are."""

ADVICE = {
    "engine": "score the same tokens with the same weights on both sides; look at the weight sync, the sampling "
    "parameters and the precision of the sampler",
    "staleness": "see whether the sampler still receives new weights; else lower the learning rate or the lag",
    "surprise": "compare the sampler's temperature, top_p, top_k and penalties with the trainer's",
}
"""For each series what to look at where no cause was found."""


D = "d: the trainer's log-prob of a token less the sampler's, in nats"
"""The quantity that the evidence speaks of."""


class MismatchError(RuntimeError):
    """Raised where the monitor was asked to stop the training."""


@dataclass(frozen=True)
class Alarm:
    """A verdict of the monitor.

    Args:
        step: the optimizer step.
        series: "engine", "staleness" or "surprise" (mean of -logp - entropy).
        severity: "warning" or "critical".
        cause: an id of ``offcorr.diagnose.CAUSES``; "unknown" or "clean" where none was found.  "clean": the last
            sequences show no difference at all, so that nothing is masked or stopped.
        confidence: of the cause, from 0 to 1, among the known causes.
        evidence: sentences with the numbers.
        advice: what to change.
        actions: those that were taken.
        dump: the file of the batch's records, if one was written.
        moved: the series has left its own baseline; False: a metric is beyond a fixed limit.
        overdue: by the reported versions the sampler gets no newer weights.
        revises: the cause that was named before, where an alarm that is on gets another; else "".
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
    moved: bool = True
    overdue: bool = False
    revises: str = ""

    def __str__(self) -> str:
        found = OVERDUE if self.overdue else (MOVED if self.moved else FAR)[self.series]
        written = "" if self.dump is None else f" The batch was written to {self.dump}."
        evidence = f" Evidence ({D}): {'; '.join(self.evidence)}." if self.evidence else ""
        return (
            f"step {self.step}: {found} ({self.severity}); {self._cause}: {self.advice.rstrip('.')}.{evidence}{written}"
        )

    @property
    def _cause(self) -> str:
        if self.cause == "unknown":
            return "no cause found"
        if self.cause == "clean":
            passed = [action for action in self.actions if action in HARD]
            left = "" if passed else ", and nothing is masked or stopped"
            return f"the last sequences show no cause (offcorr diagnose calls them clean){left}. What to look at"
        before = ""
        if self.revises:
            named = "no cause was" if self.revises in ("clean", "unknown") else f"{self.revises!r} was"
            before = f"; {named} named before"
        return f"cause: {self.cause} (confidence {self.confidence:.2f} among the known causes{before})"


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
