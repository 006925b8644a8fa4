"""``Hook``: which corrections the loss hook of a trainer can carry, and the reason where it cannot."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction, named
from offcorr.methods.registry import resolve, split_spec
from offcorr.stages.gates import Clip
from offcorr.stages.ratios import Token

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
        surrogate: whether the ratio and the gate are the correction's; False: the trainer's own, which the engine's
            weights and rejections multiply.
        aggregates: whether the correction divides by the denominator; False: the trainer does, and the correction sums.
        scales: whether the trainer puts its denominator into the advantages.

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
    surrogate: bool = True
    aggregates: bool = True
    scales: bool = False

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
        if not self.surrogate and (reason := self._not_a_factor(correction)):
            return reason
        if self.scales and not correction.scales_with_advantage:
            return Refusal(
                "scale of A",
                f"its gradient is not proportional to the advantage, and {self.trainer} divides the advantages by its "
                "denominator before the loss sees them",
            )
        if not correction.count_rejected and self.sees != "batch":
            return Refusal(
                "count_rejected=False",
                f"count_rejected=False divides by what the whole batch keeps, which {self.trainer} does not count",
            )
        return None

    def _not_a_factor(self, correction: Correction) -> Refusal | None:
        """The reason why a correction is more than weights and rejections of the engine mismatch on PPO's clip."""
        plain = correction.ratio == Token() and isinstance(correction.gate, Clip)
        others = [stage for place, stage in correction.stages.items() if place not in ("ratio", "gate")]
        if plain and others and all(stage.mismatch == "engine" for stage in others):
            return None
        return Refusal(
            "own surrogate",
            f"{self.trainer} computes the surrogate itself and lets a function multiply it: the weights and rejections "
            "of the engine mismatch, on PPO's clip",
        )

    def check(self, correction: Correction) -> Correction:
        """Returns the correction.

        Raises:
            ValueError: the hook cannot carry it.
        """
        if reason := self.refusal(correction):
            raise ValueError(f"loss {correction.method!r} cannot run in {self.trainer}: {reason.sentence}")
        return correction

    def resolve(self, spec: str, **options: Any) -> Correction:
        """Returns the correction of a spec, with or without "offcorr:" before it, if the hook can carry it.

        Where the trainer divides by the denominator the correction sums, whatever its own aggregation.

        Raises:
            ValueError: it cannot, or the spec is wrong.
        """
        if self.aggregates:
            return self.check(resolve(spec, **options))
        given = {**split_spec(spec)[1], **options}.get("aggregate", "sum")
        if given != "sum":
            raise ValueError(
                f"aggregate is {given!r}, but {self.trainer} divides by the denominator of its own: leave it out"
            )
        correction = self.check(resolve(spec, **options))
        own = {} if correction.made_from is None else {**correction.made_from.options}
        summed = dataclasses.replace(correction, aggregate="sum", max_length=None)
        return named(summed, correction.method, {**own, "aggregate": "sum", "max_length": None})
