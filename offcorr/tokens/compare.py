"""Comparison of the tokens that an engine saw and sampled with a chat template's rendering of the same conversation."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["REASONS", "REPAIRABLE", "Difference", "turn_ends"]

REASONS = {
    "retokenised": "the same text in other tokens",
    "whitespace": "the same text but for whitespace",
    "tool_call": "a sampled tool call that was parsed and written again: the same JSON",
    "special_tokens": "the same text but for special tokens, such as the one that ends a turn",
    "reasoning": "reasoning of an earlier turn left out",
    "system": "another system prompt",
    "truncated": "messages left out",
    "rewritten": "a message with other content",
}
"""The reasons why a prompt does not continue what was recorded, from the mildest to the gravest."""

REPAIRABLE = ("retokenised", "whitespace", "tool_call", "special_tokens", "reasoning", "system")
"""The reasons that may be repaired; in the others the conversation itself has changed."""

SHOWN, BEFORE = 60, 15
"""Characters of an excerpt, and how many of them stand before the first difference."""


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first place at which two sequences differ; the length of the shorter one where it begins the other.

    >>> first_difference([5, 6, 7], [5, 6, 8]), first_difference("ab", "abc")
    (2, 2)
    """
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


@dataclass(frozen=True)
class Difference:
    """One message that differs between the record and the rendered prompt.

    Args:
        reason: one of ``REASONS``.
        message: its number in the record, from 0; a system prompt counts.
        recorded: an excerpt of its text as the engine saw or sampled it, around the first difference.
        rendered: the same of its text in the prompt.
    """

    reason: str
    message: int
    recorded: str
    rendered: str

    @classmethod
    def between(cls, reason: str, message: int, recorded: str, rendered: str) -> Difference:
        """The difference with excerpts of two texts.

        >>> print(Difference.between("rewritten", 2, "It is 21 degrees in Paris.", "It is 21 degrees in Rome."))
        rewritten, message 2: ...' 21 degrees in Paris.' was rendered as ...' 21 degrees in Rome.'
        """
        start = max(first_difference(recorded, rendered) - BEFORE, 0) if recorded != rendered else 0
        return cls(reason, message, *(_excerpt(text, start) for text in (recorded, rendered)))

    def __str__(self) -> str:
        """The reason, the message and both excerpts."""
        said = f"was rendered as {self.rendered}" if self.recorded != self.rendered else "in other tokens"
        return f"{self.reason}, message {self.message}: {self.recorded} {said}"


def _excerpt(text: str, start: int) -> str:
    end = start + SHOWN
    return ("..." if start else "") + repr(text[start:end]) + ("..." if end < len(text) else "")


def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The ids that end a message: the tokenizer's EOS, and special tokens that the chat template writes behind content.

    Raises:
        ValueError: there are none.

    >>> from types import SimpleNamespace
    >>> sorted(turn_ends(SimpleNamespace(eos_token_id=7)))
    [7]
    """
    ends = {tokenizer.eos_token_id} - {None}
    if getattr(tokenizer, "chat_template", None):
        contents = {"system": "Some rules.", "user": "A question?", "assistant": "An answer."}
        messages = [{"role": role, "content": content} for role, content in contents.items()]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # the template's own error: some refuse a system prompt
            text = tokenizer.apply_chat_template(messages[1:], tokenize=False)
        for content in contents.values():
            behind = tokenizer.encode(text.partition(content)[2], add_special_tokens=False)
            ends |= {one for one in behind[:1] if tokenizer.decode([one], skip_special_tokens=True) == ""}
    if not ends:
        raise ValueError(
            "tokenizer.eos_token_id is None and its chat template writes no special token behind a message; "
            "expected turn_ends=, the ids that end a turn"
        )
    return frozenset(ends)


class Message(NamedTuple):
    """The tokens up to the end of a turn: ``ids`` without it, ``end`` the id of it, ``stop`` the position behind it."""

    ids: list[int]
    end: int | None  # None: cut off before its end
    stop: int


def messages(ids: Sequence[int], ends: Collection[int]) -> list[Message]:
    """The tokens divided at turn ends; what follows the last one is a message without an end."""
    found, start = [], 0
    for at, token in enumerate(ids):
        if token in ends:
            found.append(Message(list(ids[start:at]), token, at + 1))
            start = at + 1
    if start < len(ids):
        found.append(Message(list(ids[start:]), None, len(ids)))
    return found


def spaced(text: str) -> str:
    """The text with one space between words and no other whitespace, without U+FFFD (bytes that are no UTF-8)."""
    return re.sub(r"(?<!\w) | (?!\w)", "", re.sub(r"\s+", " ", text.replace("\ufffd", "")))


def json_in_order(text: str) -> str:
    """The text with each JSON object in it written in one way: keys sorted, no escapes.

    >>> json_in_order('f {"b": 1, "a": "\\\\u00e9"} {')
    'f {"a": "é", "b": 1} {'
    """
    decoder, parts, at = json.JSONDecoder(), [], 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            parts.append(text[at : start + 1])
            at = start + 1
        else:
            parts += [text[at:start], json.dumps(value, sort_keys=True, ensure_ascii=False)]
            at = stop
    return "".join(parts) + text[at:]


class Comparison:
    """Compares a record with a rendered prompt, message by message.

    Args:
        tokenizer: has ``decode(ids, skip_special_tokens=...)``.
        ends: ids that end a turn.
        reasoning: the texts that open and close reasoning.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], reasoning: tuple[str, str]) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        opening, closing = map(re.escape, reasoning)
        self.marks = re.compile(f"{opening}|{closing}")
        self.reasoning = re.compile(rf"{opening}(.*?)(?:{closing}|\Z)", flags=re.DOTALL)

    def differences(
        self, recorded: Sequence[int], mask: Sequence[bool], rendered: Sequence[int]
    ) -> tuple[list[Difference], int | None]:
        """The messages of ``recorded`` that ``rendered`` changed, and the position in it behind the recorded turns.

        Args:
            recorded: [N] the ids that the engine saw and sampled, up to the last sampled one.
            mask: [N] True where the engine sampled.
            rendered: the ids of the next prompt, of which ``recorded`` is no prefix.

        Returns:
            The differences, at least one; and the position, None where ``rendered`` lacks some of the turns.
        """
        old, new = messages(recorded, self.ends), messages(rendered, self.ends)
        new = [message for message in new if message.end is not None]
        starts = [0, *(message.stop for message in old)]
        sampled = [any(mask[start : message.stop]) for start, message in zip(starts, old, strict=False)]
        found = []
        systems = [bool(side) and not sampled[0] and self.is_system(side[0]) for side in (old, new)]
        shift = systems[1] - systems[0]  # 1: the prompt has a system prompt and the record none
        if shift:
            found.append(Difference.between("system", 0, *(self.text(side[0]) if side else "" for side in (old, new))))
        for at in range(max(-shift, 0), len(old)):
            if at + shift >= len(new):
                found.append(Difference.between("rewritten", at, self.text(old[at]), ""))
                break
            reason = self.reason(old[at], new[at + shift], sampled[at])
            if reason == "rewritten" and at == 0 and all(systems):
                reason = "system"
            if reason is not None:
                texts = (self.text(one, with_end=reason == "special_tokens") for one in (old[at], new[at + shift]))
                found.append(Difference.between(reason, at, *texts))
        if any(one.reason == "rewritten" for one in found):
            if (behind := self.behind_text(recorded, rendered)) is not None:
                text = self.tokenizer.decode(list(recorded), skip_special_tokens=False)
                return [Difference.between("retokenised", 0, text, text)], behind
            if (missing := self.missing(old, new)) is not None:
                return [Difference.between("truncated", missing, self.text(old[missing]), "")], None
        history = len(old) + shift
        if not 0 < history <= len(new):
            return found, None
        last = new[history - 1]
        return found, last.stop if old[-1].end is not None else last.stop - 1

    def text(self, message: Message, with_end: bool = False) -> str:
        """The text of a message, without its end or with it."""
        end = [] if message.end is None or not with_end else [message.end]
        return str(self.tokenizer.decode(message.ids + end, skip_special_tokens=False))

    def is_system(self, message: Message) -> bool:
        """Whether the tags and the role at the beginning of a message are those of a system prompt."""
        tags = r"\s*(?:(?:<[^<>\s]+>|\[\w+\])\s*)*"
        header = re.match(rf"{tags}(?:(?:system|developer)(?=\n|<))?", self.text(message), flags=re.IGNORECASE)
        return header is not None and re.search(r"system|developer", header[0], flags=re.IGNORECASE) is not None

    def reason(self, old: Message, new: Message, sampled: bool) -> str | None:
        """The mildest reason that explains how a message differs; None: it does not."""
        same_end = old.end in (None, new.end)
        if old.ids == new.ids and same_end:
            return None
        before, after = self.text(old), self.text(new)

        def agree(before: str, after: str) -> bool:
            return spaced(before) == spaced(after) or (
                sampled and spaced(json_in_order(before)) == spaced(json_in_order(after))
            )

        if same_end and before.replace("\ufffd", "") == after.replace("\ufffd", ""):
            return "retokenised"
        if same_end and spaced(before) == spaced(after):
            return "whitespace"
        if same_end and agree(before, after):
            return "tool_call"
        if agree(*(self.tokenizer.decode(one.ids, skip_special_tokens=True) for one in (old, new))):
            return "special_tokens"
        thoughts = [{spaced(found) for found in self.reasoning.findall(text)} for text in (before, after)]
        kept = thoughts[1] - {""} <= thoughts[0]
        if kept and agree(self.reasoning.sub("", before), self.reasoning.sub("", after)):
            return "reasoning"
        # An answer that was cut off while it reasoned may be rendered without the mark.
        if agree(self.marks.sub("", before), self.marks.sub("", after)):
            return "reasoning"
        return "rewritten"

    def behind_text(self, recorded: Sequence[int], rendered: Sequence[int]) -> int | None:
        """The number of tokens of ``rendered`` that together have the text of ``recorded``; None: no number has."""
        text = self.tokenizer.decode(list(recorded), skip_special_tokens=False)

        def beginning(tokens: int) -> str:
            return str(self.tokenizer.decode(list(rendered[:tokens]), skip_special_tokens=False))

        tokens = bisect_left(range(len(rendered)), len(text), key=lambda tokens: len(beginning(tokens)))
        return tokens if beginning(tokens) == text else None

    def missing(self, old: list[Message], new: list[Message]) -> int | None:
        """The first message that ``new`` leaves out, where what it has of ``old`` is unchanged; else None.

        Messages may be missing in the middle or at the end; a beginning may be cut off within a message.
        """

        def content(message: Message) -> str:
            return spaced(json_in_order(self.reasoning.sub("", self.text(message))))

        before, after = [content(message) for message in old], [content(message) for message in new]
        same = first_difference(before, after)
        if same == len(before) or not after:
            return None
        if same == len(after):
            return same
        for kept in range(same + 1, len(before)):
            if before[kept:] == after[same : same + len(before) - kept]:
                return same
        for cut in range(len(before) - 1):
            if after[0] and before[cut].endswith(after[0]) and before[cut + 1 :] == after[1 : len(before) - cut]:
                return 0
        return None
