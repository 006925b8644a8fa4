"""``Trajectory``: the tokens of a conversation as the engine saw and sampled them, carried from turn to turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from offcorr.stages.checks import one_of
from offcorr.tokens.compare import REASONS, REPAIRABLE, Comparison, Difference, first_difference, turn_ends

__all__ = ["Check", "Row", "Trajectory"]

BY_DEFAULT = ("retokenised", "whitespace", "tool_call", "special_tokens", "reasoning")
OTHERWISE = {"fork": "forked", "mask": "masked", "raise": "refused"}


@dataclass(frozen=True)
class Check:
    """The check of one prompt against what was recorded before it.

    Args:
        turn: the turn that the prompt begins, from 0.
        action: "continued", "repaired", "forked" or "masked".
        reason: one of ``REASONS``; None: the prompt continues the record.
        differences: the messages that differ.
    """

    turn: int
    action: str
    reason: str | None = None
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """The turn, the action, and each difference on a line."""
        return "\n  ".join([f"turn {self.turn}: {self.action}", *map(str, self.differences)])


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence for the trainer: P prompt tokens and T tokens from the first sampled one to the last.

    Args:
        prompt_ids: P token ids.
        completion_ids: T token ids; between two answers stand the tokens of tools, users and the template.
        mask: T, True where the model sampled the token in exactly this context.
        rollout_logp: T log-probs (nats) as the engine reported them; NaN: not sampled, or not reported.
        turn_ids: T turns, from 0; what stands between two answers counts to the later one.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[bool]
    rollout_logp: list[float]
    turn_ids: list[int]

    def record(self) -> dict[str, list[Any]]:
        """The fields by name, as a row of a dump holds them; ``offcorr.diagnose`` needs the trainer's log-probs, too.

        >>> Row([1, 2], [3, 4], [True, True], [-0.5, -0.25], [0, 0]).record()["completion_ids"]
        [3, 4]
        """
        return {name: list(value) for name, value in vars(self).items()}


class Trajectory:
    """The tokens of one conversation, of which each prompt must continue what the engine saw and sampled before.

    A chat template renders the whole conversation anew for each turn, and the result may differ from what the engine
    saw: sampled ids are not always those that the text is encoded to, and templates leave out earlier reasoning or
    write tool calls in their own way.  Log-probs of the recorded tokens then belong to another context.  ``prompt``
    finds such differences and returns the prompt to send to the engine:

    - **repaired**: the recorded ids, followed by what the rendered prompt has behind the turns that they hold;
    - **forked**: the rendered prompt; the tokens so far are a row of their own, and a new row begins;
    - **masked**: the rendered prompt in the same row, whose tokens stay in the context; sampled tokens behind the
      first difference leave the row and with it the loss.

    Args:
        tokenizer: has ``decode(ids, skip_special_tokens=...)``; without ``turn_ends`` also ``eos_token_id`` and,
            where it has a chat template, ``encode`` and ``apply_chat_template``.
        repair: the reasons, of ``REPAIRABLE``, that are repaired.  The default has all but "system": a new system
            prompt may be meant.  With ``()`` each prompt is returned as it came, for an engine that renders by itself.
        otherwise: the action for every other reason: "fork", "mask" or "raise".
        turn_ends: ids that end a turn, a tool call or a message.  None: those of ``offcorr.tokens.turn_ends``.
        reasoning: the texts that open and close reasoning.

    Attributes:
        checks: the ``Check`` of each prompt but the first.
        masked_tokens: number of sampled tokens that left the loss.

    Raises:
        ValueError: a reason that cannot be repaired, an action that does not exist, or no id that ends a turn.

    >>> from types import SimpleNamespace
    >>> words = ["<end>", "user: 6 * 7?", "model: ", "4", "2", "42", "user: sure?", "yes"]
    >>> tokenizer = SimpleNamespace(eos_token_id=0, decode=lambda ids, **_: "".join(words[i] for i in ids))
    >>> trajectory = Trajectory(tokenizer)
    >>> trajectory.prompt([1, 0, 2])
    [1, 0, 2]
    >>> trajectory.sampled([3, 4, 0], [-0.5, -0.25, -0.125])
    >>> trajectory.prompt([1, 0, 2, 5, 0, 6, 0, 2])  # the tokenizer encodes "42" as one token
    [1, 0, 2, 3, 4, 0, 6, 0, 2]
    >>> print(trajectory.checks[0])
    turn 1: repaired
      retokenised, message 1: 'model: 42' in other tokens
    >>> trajectory.sampled([7, 0], [-1.0, -0.5])
    >>> (row,) = trajectory.rows()
    >>> row.completion_ids, row.rollout_logp
    ([3, 4, 0, 6, 0, 2, 7, 0], [-0.5, -0.25, -0.125, nan, nan, nan, -1.0, -0.5])
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        repair: Collection[str] = BY_DEFAULT,
        otherwise: str = "fork",
        turn_ends: Collection[int] | None = None,
        reasoning: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        self.repair = frozenset([repair] if isinstance(repair, str) else repair)
        for reason in self.repair - {*REPAIRABLE}:
            raise ValueError(f"repair has {reason!r}{one_of(reason, REPAIRABLE)}")
        if otherwise not in OTHERWISE:
            raise ValueError(f"otherwise is {otherwise!r}{one_of(otherwise, OTHERWISE)}")
        self.otherwise = otherwise
        self.checks: list[Check] = []
        self.masked_tokens = 0
        self._comparison = Comparison(tokenizer, _ends(tokenizer, turn_ends), reasoning)
        self._closed: list[Row] = []
        self._turn, self._awaiting = -1, False  # awaiting: a prompt is there and nothing was sampled from it yet
        self._begin([])

    def _begin(self, prompt: list[int]) -> None:
        # The record ends with the last sampled token; what follows it is pending until something is sampled.
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._logp: list[float] = []
        self._turns: list[int] = []
        self._pending = prompt

    def prompt(self, ids: Any) -> list[int]:
        """Checks the next prompt and returns the one to sample from.

        Args:
            ids: the whole conversation as the chat template renders it, with the generation prompt: token ids, as a
                list, array or tensor.

        Raises:
            TypeError: ``ids`` are no token ids.
            ValueError: the prompt cannot be repaired and ``otherwise`` is "raise"; the message names what differs.
        """
        rendered = _token_ids("ids", ids)
        turn = self._turn + (not self._awaiting)
        recorded = len(self._ids)
        if recorded == 0:
            self._pending = rendered
        elif rendered[:recorded] == self._ids:
            self.checks.append(Check(turn, "continued"))
            self._pending = rendered[recorded:]
        else:
            self._mend(turn, rendered)
        self._turn, self._awaiting = turn, True
        return self._ids + self._pending

    def _mend(self, turn: int, rendered: list[int]) -> None:
        found, behind = self._comparison.differences(self._ids, self._mask, rendered)
        order = list(REASONS)
        reasons = sorted({one.reason for one in found}, key=order.index)
        refused = [reason for reason in reasons if reason not in self.repair]
        reason = (refused or reasons)[-1]
        action = "repaired" if behind is not None and not refused else OTHERWISE[self.otherwise]
        check = Check(turn, action, reason, tuple(found))
        if action == "refused":
            raise ValueError(f"the prompt does not continue what was recorded, {REASONS[reason]}; {check}")
        self.checks.append(check)
        if action == "repaired":
            self._pending = rendered[behind:]
        elif action == "forked":
            self._closed += self._row()
            self._begin(rendered)
        else:
            same = first_difference(self._ids, rendered)
            kept = max((at + 1 for at in range(same) if self._mask[at]), default=0)
            self.masked_tokens += sum(self._mask[kept:])
            for values in (self._ids, self._mask, self._logp, self._turns):
                del values[kept:]
            self._pending = rendered[kept:]

    def append(self, ids: Any) -> list[int]:
        """Adds tokens that the model did not sample, such as a tool's answer, and returns the prompt to sample from.

        For loops that encode only what is new; nothing is rendered anew, and so there is nothing to check.

        Raises:
            TypeError: ``ids`` are no token ids.
        """
        self._turn += not self._awaiting
        self._awaiting = True
        self._pending = self._pending + _token_ids("ids", ids)
        return self._ids + self._pending

    def sampled(self, ids: Any, logprobs: Any = None, *, prompt_ids: Any = None) -> None:
        """Adds what the engine sampled from the last prompt; once more for the same prompt adds to the same turn.

        Args:
            ids: the sampled token ids, the one that ended the turn included; none where nothing was sampled.
            logprobs: as many log-probs (nats), under the distribution that was sampled from; None, or a value that is
                None: not reported.
            prompt_ids: the prompt as the engine reports it, to be compared with the one that was returned.

        Raises:
            TypeError: ``ids`` are no token ids, or ``logprobs`` no numbers.
            ValueError: no prompt came before; ``logprobs`` has another length than ``ids``; the engine saw another
                prompt.
        """
        if self._turn < 0:
            raise ValueError("sampled() came before any prompt(); expected the prompt that was sampled from first")
        new = _token_ids("ids", ids)
        logp = [math.nan] * len(new) if logprobs is None else _log_probs(logprobs)
        if len(logp) != len(new):
            raise ValueError(f"logprobs has {len(logp)} values, expected {len(new)}, one per token of ids")
        if prompt_ids is not None and (seen := _token_ids("prompt_ids", prompt_ids)) != self._ids + self._pending:
            raise ValueError(
                f"turn {self._turn}: the engine saw a prompt of {len(seen)} tokens that is not the one of "
                f"{len(self._ids) + len(self._pending)} that prompt() returned; expected it to be sent as it is"
            )
        if not new:
            return
        context = len(self._pending)
        self._ids += self._pending + new
        self._mask += [False] * context + [True] * len(new)
        self._logp += [math.nan] * context + logp
        self._turns += [self._turn] * (context + len(new))
        self._pending, self._awaiting = [], False

    def _row(self) -> list[Row]:
        """The row that is being written, if anything of it was sampled."""
        if True not in self._mask:
            return []
        start = self._mask.index(True)
        ids = self._ids
        return [Row(ids[:start], ids[start:], self._mask[start:], self._logp[start:], self._turns[start:])]

    def rows(self) -> list[Row]:
        """The sequences so far: one, and one more for each fork; none where nothing was sampled.

        A prompt from which nothing was sampled is left out.
        """
        return [*self._closed, *self._row()]

    def __repr__(self) -> str:
        return f"Trajectory({self._turn + 1} turns, {len(self.rows())} rows)"


def _ends(tokenizer: Any, given: Collection[int] | None) -> frozenset[int]:
    if given is None:
        return turn_ends(tokenizer)
    ends = frozenset(_token_ids("turn_ends", list(given)))
    if not ends:
        raise ValueError("turn_ends is empty, expected at least one id that ends a turn")
    return ends


def _token_ids(name: str, given: Any) -> list[int]:
    """A list of token ids, from a list, an array or a tensor."""
    if isinstance(given, Mapping) or hasattr(given, "keys"):
        raise TypeError(
            f"{name} is a {type(given).__name__}, expected a list of token ids: "
            f'its "input_ids", or apply_chat_template(..., return_dict=False)'
        )
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple):
        raise TypeError(f"{name} is a {type(given).__name__}, expected a list of token ids")
    for at, one in enumerate(listed):
        if not isinstance(one, Integral) or isinstance(one, bool):
            raise TypeError(f"{name}[{at}] is {one!r:.60}, expected a token id")
    return [int(one) for one in listed]


def _log_probs(given: Any) -> list[float]:
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    for at, one in enumerate(listed):
        if one is not None and (not isinstance(one, Real) or isinstance(one, bool)):
            raise TypeError(f"logprobs[{at}] is {one!r:.60}, expected a number (nats) or None")
    return [math.nan if one is None else float(one) for one in listed]
