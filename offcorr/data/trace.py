"""``Trace``: a stored completion of a prompt, and ``Encoder``, which makes its tokens from a row."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offcorr.rollout.sampler import tokenize_with
from offcorr.stages.checks import nearest, warn_once

FIELDS = ("prompt", "prompt_ids", "completion", "completion_ids", "logp", "mask", "reward", "ended")
"""The fields of a row of traces; others are left alone."""

ROUNDING = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A completion of T tokens, by another model, a person or an earlier run.

    Args:
        prompt_ids: token ids.
        completion_ids: T token ids, with the EOS where the completion ended.
        logp: T log-probs (nats) of these tokens under the policy that wrote them; None: not known.
        mask: T numbers, 0 where the writer did not choose the token (a tool's answer), which is never trained on;
            None: all are 1.  Log-probs of such tokens are not looked at.
        reward: as its writer recorded it; it is for choosing traces, and no advantage is computed from it.
        where: file and row, for messages.

    Raises:
        ValueError: a field of another length than the completion, a log-prob that is none; the message names
            ``where``, the field, what came and what was wanted.

    >>> Trace((5,), (7, 1), logp=(-0.5,), where="teacher.jsonl, row 3")
    Traceback (most recent call last):
    ValueError: teacher.jsonl, row 3: logp has 1 numbers, expected 2, one for each token of the completion
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logp: tuple[float, ...] | None = None
    mask: tuple[int, ...] | None = None
    reward: float | None = None
    where: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completion_ids"):
            if not getattr(self, name):
                raise self.error(f"{name} is empty, expected at least one token")
        for name in ("logp", "mask"):
            values, tokens = getattr(self, name), len(self.completion_ids)
            if values is not None and len(values) != tokens:
                raise self.error(
                    f"{name} has {len(values)} numbers, expected {tokens}, one for each token of the completion"
                )
        if self.mask is not None:
            odd = next((value for value in self.mask if value not in (0, 1)), None)
            if odd is not None or not any(self.mask):
                found = "0 everywhere" if odd is None else f"{odd!r} at a token"
                raise self.error(f"mask is {found}, expected 0 and 1, with 1 for at least one token")
        for t, (value, own) in enumerate(zip(self.logp or (), self.mask or (1,) * len(self), strict=False)):
            if own and not (math.isfinite(value) and value <= ROUNDING):
                raise self.error(f"logp[{t}] is {value!r}, expected a log-prob (nats): a finite number, 0 or below")

    def __len__(self) -> int:
        return len(self.completion_ids)

    def error(self, message: str) -> ValueError:
        """An error about this trace."""
        return ValueError(f"{self.where}: {message}" if self.where else message)


class Encoder:
    """Makes traces from rows, with the tokens that a trainer with this tokenizer would have.

    Args:
        processor: a tokenizer, or a processor that has one.
        chat_template: of messages; None: the tokenizer's own.
        chat_template_kwargs: its options, as ``GRPOConfig`` takes them.
    """

    def __init__(
        self, processor: Any, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ):
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.chat_template = chat_template
        self.options = dict(chat_template_kwargs or {})
        if self.tokenizer.eos_token_id is None:
            raise ValueError("tokenizer has no EOS token, which a completion given as text ends with")
        self.eos: int = self.tokenizer.eos_token_id

    def trace(self, row: Mapping[str, Any], where: str) -> Trace:
        """The trace of a row.

        Raises:
            ValueError: a field is missing, holds something else than it should, or contradicts another.
        """
        given = {name: value for name, value in row.items() if value is not None}
        try:
            _check_names(given)
            prompt_ids = self._prompt(given)
            completion_ids = self._completion(given, prompt_ids)
            logp, mask, reward = _numbers(given, "logp", float), _numbers(given, "mask", int), _number(given, "reward")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return Trace(prompt_ids, completion_ids, logp=logp, mask=mask, reward=reward, where=where)

    def check_vocabulary(self, name: str, ids: Sequence[int]) -> None:
        """Raise ``ValueError`` for ids that the tokenizer does not have."""
        size = len(self.tokenizer)
        odd = next(((t, i) for t, i in enumerate(ids) if not 0 <= i < size), None)
        if odd is not None:
            raise ValueError(f"{name}[{odd[0]}] is {odd[1]}, expected an id below {size}, the tokenizer's vocabulary")

    def prompt(self, prompt: Any) -> tuple[int, ...]:
        """The token ids of a prompt: text, messages, or ids, which are taken as they are."""
        if not isinstance(prompt, str) and len(prompt) and not isinstance(prompt[0], Mapping):
            return tuple(map(int, prompt))
        return tuple(tokenize_with(self.processor, [prompt], self.chat_template, self.options)[0])

    def _prompt(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        ids = _numbers(given, "prompt_ids", int)
        if ids is not None:
            self.check_vocabulary("prompt_ids", ids)
        if "prompt" not in given:
            return ids or ()
        made = self.prompt(given["prompt"])
        if ids is not None and ids != made:
            raise ValueError(f"prompt_ids is {_short(ids)}, expected {_short(made)}, the tokens of prompt")
        return made

    def _completion(self, given: Mapping[str, Any], prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        ids = _numbers(given, "completion_ids", int)
        if ids is not None:
            self.check_vocabulary("completion_ids", ids)
        if "completion" not in given:
            return ids or ()
        completion = given["completion"]
        if isinstance(completion, str):
            if ids is not None:
                self._check_decoded(ids, completion)
                return ids
            return self._ended(self._encoded(completion), given.get("ended", True))
        made = self._answer(given, completion, prompt_ids)
        if ids is not None and ids != made:
            raise ValueError(f"completion_ids is {_short(ids)}, expected {_short(made)}, the tokens of completion")
        return made

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        back = self._decoded(ids)
        if back != text:
            raise ValueError(f"completion does not re-tokenise: its tokens decode to {_differing(back, text)}")
        return ids

    def _check_decoded(self, ids: tuple[int, ...], text: str) -> None:
        eos = self.tokenizer.eos_token
        own = self._decoded(ids[:-1] if ids[-1:] == (self.eos,) else ids)
        if own != text.removesuffix(eos):
            raise ValueError(f"completion_ids and completion disagree: the ids decode to {_differing(own, text)}")

    def _answer(self, given: Mapping[str, Any], completion: Any, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of an assistant's message after the prompt, up to the EOS that ends it."""
        prompt = given.get("prompt")
        if isinstance(prompt, str) or prompt is None or len(completion) != 1:
            raise ValueError(
                f"completion is {_short(completion)}, expected text, or after a prompt of messages one message by the "
                "assistant; for anything else give completion_ids, with mask"
            )
        rendered = self.processor.apply_chat_template(
            conversation=[[*prompt, *completion]],
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=True,
            **self.options,
        )["input_ids"][0]
        if tuple(rendered[: len(prompt_ids)]) != prompt_ids:
            raise ValueError(
                "completion: the chat template renders the prompt in another way once an answer follows, so the "
                "answer's tokens cannot be told from it: give completion_ids"
            )
        ids = tuple(rendered[len(prompt_ids) :])
        text, content = self._decoded(ids), completion[0]["content"]
        if content not in text:
            raise ValueError(f"completion does not re-tokenise: its tokens decode to {_differing(text, content)}")
        ends = [t for t, token in enumerate(ids) if token == self.eos]
        return ids[: ends[-1] + 1] if ends else self._ended(ids, given.get("ended", True))

    def _ended(self, ids: tuple[int, ...], ended: bool) -> tuple[int, ...]:
        return (*ids, self.eos) if ended and ids[-1:] != (self.eos,) else ids

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _check_names(given: Mapping[str, Any]) -> None:
    if "old_logp" in given or "rollout_logp" in given:
        raise ValueError("the row is one of a dump (it has old_logp or rollout_logp): read it by Traces.from_dump")
    for kind in ("prompt", "completion"):
        if kind not in given and f"{kind}_ids" not in given:
            present = ", ".join(map(str, given)) or "nothing"
            raise ValueError(f"{kind} and {kind}_ids are missing; present: {present}")
    for name in given:
        if name not in FIELDS and (near := nearest(name, FIELDS)):
            warn_once(f"a row of traces has the field {name!r}, which is not read{near}")


def _numbers(given: Mapping[str, Any], name: str, kind: Any) -> tuple[Any, ...] | None:
    """A field as a tuple of numbers; a whole number in another type, such as 3.0, is one."""
    if name not in given:
        return None
    values = given[name].tolist() if hasattr(given[name], "tolist") else given[name]
    try:
        if isinstance(values, str):
            raise TypeError
        numbers = tuple(math.nan if value is None else kind(value) for value in values)
        if kind is int and any(number != value for number, value in zip(numbers, values, strict=True)):
            raise ValueError
    except (TypeError, ValueError):
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name} is {_short(values)}, expected a list of {wanted}") from None
    return numbers


def _number(given: Mapping[str, Any], name: str) -> float | None:
    try:
        return None if name not in given else float(given[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {_short(given[name])}, expected a number") from None


def _short(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _differing(found: str, wanted: str) -> str:
    """Both texts from a little before their first difference."""
    same = len(os.path.commonprefix([found, wanted]))
    start = max(0, same - 10)
    return f"{_short(found[start : start + 40])}, expected {_short(wanted[start : start + 40])} (character {same})"
