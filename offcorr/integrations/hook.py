"""``Hook``: which corrections the loss hook of a trainer can carry, and the reason where it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import resolve

__all__ = ["Hook", "Refusal"]

PREFIX = "offcorr:"


class Refusal(NamedTuple):
    """The reason why a hook cannot carry a correction, in a few words and as a clause of an error message."""

    words: str
    sentence: str


@dataclass(frozen=True)
class Hook:
    """The part of an optimizer step that a trainer shows to its loss function.

    Args:
        trainer: its name, the subject of the messages.
        sees: the sequences of one call: "sequence", "micro-batch" or "batch" (those of the whole optimizer step).
        carries: the optional fields of ``Batch`` that it supplies.
        engine_alone: whether the engine's log-probs and the trainer's old ones are told apart.  Where they are not,
            the one ratio is the total one, and ``old_logp`` is what the engine reported.

    >>> import offcorr
    >>> hook = Hook("ExampleRL", sees="sequence", carries=frozenset({"old_logp", "rollout_logp"}))
    >>> hook.refusal(offcorr.get("minpro"))
    >>> hook.resolve("bapo")
    Traceback (most recent call last):
    ValueError: loss 'bapo' cannot run in ExampleRL: it couples the sequences of the batch, but ExampleRL shows its
    loss one sequence at a time
    """

    trainer: str
    sees: str
    carries: frozenset[str]
    engine_alone: bool = True

    def refusal(self, correction: Correction) -> Refusal | None:
        """The reason why the trainer's hook cannot carry a correction; None where it can."""
        if correction.couples and self.sees != "batch":
            coupled = " and the ".join(sorted(correction.couples))
            shown = f"{self.trainer} shows its loss one {self.sees} at a time"
            return Refusal(f"couples the {coupled}", f"it couples the sequences of the {coupled}, but {shown}")
        if missing := sorted(correction.needs - self.carries):
            names = " and ".join(missing)
            return Refusal(f"needs {names}", f"it needs {names}, which {self.trainer} does not hand to its loss")
        if not self.engine_alone and "engine" in correction.compares:
            stages = [repr(stage) for stage in correction.stages.values() if stage.mismatch == "engine"]
            return Refusal(
                "engine ratio",
                f"{', '.join(stages)} compares the engine with the trainer at the weights that sampled, but "
                f"{self.trainer} has only the log-probs of the engine and the current ones, and their ratio, the total "
                "one, contains that mismatch already",
            )
        if not correction.count_rejected:
            return Refusal(
                "count_rejected=False",
                f"count_rejected=False divides by what the whole batch keeps, which {self.trainer} does not count",
            )
        return None

    def check(self, correction: Correction) -> Correction:
        """Returns the correction.

        Raises:
            ValueError: the hook cannot carry it.
        """
        if reason := self.refusal(correction):
            raise ValueError(f"loss {correction.method!r} cannot run in {self.trainer}: {reason.sentence}")
        return correction

    def resolve(self, spec: str, **options: Any) -> Correction:
        """Returns the correction of a spec, with or without "offcorr:" before it, if the hook can carry it."""
        return self.check(resolve(spec, **options))
