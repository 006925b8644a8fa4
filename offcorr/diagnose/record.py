"""``Record``: what trainer and sampler logged of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcorr.batch import ORIGINS

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LOGPS = ("rollout_logp", "old_logp", "logp")
PER_TOKEN = (*LOGPS, "entropy", "mask", "turn_ids")
EITHER = ("advantage", "rollout_version", "trainer_version")
"""Fields with one value per sequence or one per token."""


class RecordError(ValueError):
    """A row that is no record.

    Args:
        kind: "missing" (a field that is needed), "value" (not what the field holds) or "length" (another than the
            completion's).
        field: the field's name, or those that are missing.
        message: what came and what was wanted, without the place.
        where: file and row.
    """

    def __init__(self, kind: str, field: str, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.kind, self.field, self.message, self.where = kind, field, message, where


@dataclass(frozen=True, eq=False)
class Record:
    """One sequence of a dump: T completion tokens after P prompt tokens.

    Args:
        prompt_ids: [P] token ids.
        completion_ids: [T] token ids.
        rollout_logp: [T] log-probs (nats) of the completion's tokens as the sampler reported them; NaN: unscored.
        old_logp: [T] the trainer's, under the weights that it takes for the sampler's.
        logp: [T] the trainer's, under the weights that are updated; None: not logged.
        entropy: [T] entropy (nats) of the trainer's distributions, those of ``old_logp`` (of ``logp`` without it).
        mask: [T] whether the model sampled the token and learns from it; None: every token.
        reward: of the sequence.
        advantage: of the sequence or [T].
        group_id: equal for the samples of one prompt.
        turn_ids: [T] the turn that each token belongs to.
        rollout_version: number of optimizer steps that the sampler's weights had seen, of the sequence or [T].
        trainer_version: the same of the weights of ``logp``.
        step: the optimizer step at which the sequence was trained on.
        origin: where the sequence came from, a name of ``offcorr.training.ORIGINS``.
        where: file and row, for messages.

    Raises:
        RecordError: a field of another length than the completion; the message names ``where``, the field and both.
    """

    prompt_ids: Integers
    completion_ids: Integers
    rollout_logp: Floats
    old_logp: Floats
    logp: Floats | None = None
    entropy: Floats | None = None
    mask: NDArray[np.bool_] | None = None
    reward: float | None = None
    advantage: float | Floats | None = None
    group_id: int | str | None = None
    turn_ids: Integers | None = None
    rollout_version: int | Integers | None = None
    trainer_version: int | Integers | None = None
    step: int | None = None
    origin: str | None = None
    where: str = ""

    def __post_init__(self) -> None:
        tokens = len(self.completion_ids)
        for name in (*PER_TOKEN, *EITHER):
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and value.shape != (tokens,):
                wanted = f"expected ({tokens},), a value per token of completion_ids"
                raise RecordError("length", name, f"{name} has shape {value.shape}, {wanted}", self.where)

    def __len__(self) -> int:
        return len(self.completion_ids)

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str = "") -> Record:
        """The record of one row of a dump: lists, arrays and numbers by the names of the fields.

        A log-prob that is None in a list is unscored (NaN).  Of the fields that hold one value per sequence or per
        token, a list of one is one value for the sequence.  ``old_logp`` may be absent where ``logp`` is there, and
        stands for it then.

        Raises:
            RecordError: a field that is needed is absent, a value is not what the field holds, or a length does not
                fit; the message names the field, what came and what was wanted.

        >>> row = {"prompt_ids": [5], "completion_ids": [7, 8], "rollout_logp": [-1.0, None], "logp": [-1.5, -0.5]}
        >>> record = Record.of(row, "dump.jsonl, row 1")
        >>> record.rollout_logp.tolist(), record.old_logp.tolist(), record.logp
        ([-1.0, nan], [-1.5, -0.5], None)
        """
        given = {name: value for name, value in row.items() if name in NAMES and value is not None}
        if "old_logp" not in given and "logp" in given:
            given["old_logp"] = given.pop("logp")
        missing = [name for name in ("prompt_ids", "completion_ids", "rollout_logp", "old_logp") if name not in given]
        if missing:
            present = ", ".join(str(name) for name, value in row.items() if value is not None) or "nothing"
            names = ", ".join(missing)
            raise RecordError("missing", names, f"{names} missing; present: {present}", where)
        made: dict[str, Any] = {}
        for name, value in given.items():
            try:
                made[name] = _converted(name, value)
            except (TypeError, ValueError) as error:
                shown = repr(value)
                shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
                raise RecordError("value", name, f"{name} is {shown}, expected {_wanted(name)}", where) from error
        return cls(**made, where=where)


NAMES = tuple(field.name for field in fields(Record) if field.name != "where")
"""The fields of a row of a dump."""


def _converted(name: str, value: Any) -> Any:
    if name in ("prompt_ids", "completion_ids", "turn_ids"):
        return _whole(value)
    if name == "mask":
        numbers = _numbers(value)
        if np.isnan(numbers).any():
            raise ValueError("a mask with a gap")
        return numbers != 0
    if name in (*LOGPS, "entropy"):
        return _numbers(value)
    if name in EITHER and _is_list(value):
        if len(value) == 1:
            return _converted(name, value[0])
        return _numbers(value) if name == "advantage" else _whole(value)
    if name in ("reward", "advantage"):
        return float(value)
    if name == "group_id":
        return value if isinstance(value, str) else int(_whole([value])[0])
    if name == "origin":
        if value not in ORIGINS:
            raise ValueError("not the name of an origin")
        return str(value)
    return int(_whole([value])[0])


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or np.ndim(value) > 0


def _numbers(value: Any) -> Floats:
    """A copy in float64, with None as NaN: a view would keep the whole table that it is a row of."""
    if not _is_list(value) or (len(value) and isinstance(value[0], str)):
        raise ValueError("not a list of numbers")
    return np.array(value, dtype=np.float64)


def _whole(value: Any) -> Integers:
    numbers = np.asarray(value, dtype=np.float64 if len(value) == 0 else None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iufb" or (numbers != np.floor(numbers)).any():
        raise ValueError("not a list of whole numbers")
    return numbers.astype(np.int64)


def _wanted(name: str) -> str:
    if name in ("prompt_ids", "completion_ids", "turn_ids"):
        return "a list of whole numbers"
    if name == "mask":
        return "a list of booleans, or of 0 and 1"
    if name in (*LOGPS, "entropy"):
        return "a list of numbers, one per completion token"
    if name == "reward":
        return "a number"
    if name == "advantage":
        return "a number, or one per completion token"
    if name == "group_id":
        return "a whole number or a name"
    if name == "origin":
        return f"one of {', '.join(ORIGINS)}"
    return "a whole number" + (", or one per completion token" if name in EITHER else "")
