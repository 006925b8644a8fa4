"""Checks of the stages of a correction, one by one and together: an error names the slot or the class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offcorr.stages import definition, spans
from offcorr.stages.base import Controller, Stage
from offcorr.stages.checks import one_of, uncalled, warn_once
from offcorr.stages.gates import Gate
from offcorr.stages.ratios import Token

SLOTS = {
    "ratio": "ratio",
    "gate": "gate",
    "weight": "weight",
    "reject": "rejection",
    "advantages": "advantages",
}
"""The fields of a correction that hold stages, and the kind of stage that each takes."""

SEVERAL = ("weight", "reject")
"""The slots that take any number of stages."""


def as_tuple(stages: Any) -> tuple[Any, ...]:
    """The stages of a slot."""
    if stages is None:
        return ()
    return stages if isinstance(stages, tuple) else (stages,)


def check_slot(slot: str, value: Any) -> None:
    """Raise ValueError for anything but the stages that a slot takes."""
    kind = SLOTS[slot]
    if slot == "gate" and value is None:
        raise ValueError("gate is None, expected one of offcorr.gates; gates.ScoreFunction() limits nothing")
    if isinstance(value, tuple) and slot not in SEVERAL:
        raise ValueError(f"{slot} is {value!r}, expected one stage" + ("" if slot == "gate" else " or None"))
    for stage in as_tuple(value):
        if told := uncalled(stage):
            raise ValueError(f"{slot}: {told}")
        if not isinstance(stage, Stage) or stage.KIND != kind:
            theirs = getattr(stage, "KIND", None)
            place = next((f"; it belongs into {name}=" for name, takes in SLOTS.items() if takes == theirs), "")
            raise ValueError(f"{slot} is {stage!r}, expected one of offcorr.{kind.removesuffix('s')}s{place}")


def check_stage(stage: Stage, optional: Iterable[str]) -> None:
    """Raise for what a class says of its stages, where that depends on their fields.

    Args:
        optional: the fields of a batch that may be None.

    Raises:
        ValueError: ``needs`` is no set of them, or ``couples`` or ``span`` is unknown.
        TypeError: a pointwise function that a property gives cannot be called.
    """
    name, needs = type(stage).__name__, stage.needs
    if isinstance(stage, Controller) and stage.couples not in definition.COUPLES:
        raise ValueError(f"{name}.couples is {stage.couples!r}{one_of(stage.couples, definition.COUPLES)}")
    if not isinstance(needs, frozenset | set):
        raise ValueError(f"{name}.needs is {needs!r}, {definition.needs_wanted(needs)}")
    for field in needs:
        if field not in optional:
            raise ValueError(f"{name}.needs has {field!r}, expected a frozenset of names{one_of(field, optional)}")
    definition.check_computed(stage)
    if "measure" in stage.PARTS:
        span: Any = getattr(stage, "span", None)  # which a property may compute
        spans.check(span, name)


def check_ratio_and_gate(ratio: Any, gate: Any) -> None:
    """Raise ValueError where a gate has no ratio, or no gradient by it; warn where it uses none of its own."""
    if isinstance(gate, Gate):
        definition.check_uses_ratio(type(gate).__name__, gate.uses_ratio, gate.surrogate)
        if ratio is None and gate.uses_ratio:
            raise ValueError(f"ratio is None, but gate {gate!r} needs one, for instance offcorr.ratios.Token()")
        if ratio is not None and ratio.mismatch == "engine" and not gate.detached:
            raise ValueError(
                f"ratio {ratio!r} does not depend on logp, so gate {gate!r} would have no gradient; "
                "use gates.DetachedRatio() or a weight"
            )
        if ratio not in (None, Token()) and not gate.uses_ratio:
            warn_once(
                f"ratio {ratio!r} has no effect: gate {gate!r} uses none; gates.DetachedRatio() multiplies by one"
            )


def refuse_double_counting(ratio: Any, gate: Any, weights: Iterable[Any]) -> None:
    """Each of the two mismatches may multiply the gradient once: the total ratio is both of them."""
    counted: dict[str, str] = {}
    uses_ratio = ratio is not None and getattr(gate, "uses_ratio", True)
    multiplying = [("ratio", ratio)] if uses_ratio else []
    for slot, stage in multiplying + [("weight", weight) for weight in weights]:
        label = f"{slot} {stage!r}"
        for mismatch in ("staleness", "engine") if stage.mismatch in ("total", None) else (stage.mismatch,):
            if mismatch in counted:
                says = (
                    f"; a controller that counts one pair of policies alone says so in its class, as in "
                    f'mismatch = "engine" of {type(stage).__name__}'
                )
                raise ValueError(
                    f"{counted[mismatch]} and {label} both count the {mismatch} ratio; "
                    f"drop one, or compare different policies (mismatch=){says * isinstance(stage, Controller)}"
                )
            counted[mismatch] = label
