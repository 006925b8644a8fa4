"""``check_prompts``: the ``prompt_ids`` of a ``rollout_func`` against those that the trainer makes of the prompts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from offcorr.rollout.sampler import tokenize_with
from offcorr.stages.checks import outside

SHOWN = 60
"""Characters of a prompt that a message shows."""


def check_prompts(output: Mapping[str, Any], prompts: Sequence[Any], trainer: Any) -> None:
    """Compare ``prompt_ids`` with the trainer's tokens of the same prompts, once; to be called at the first batch.

    A row is in order where it holds the trainer's ids, or the prompt's text: a conversation of several turns, a chat
    template of one's own and a system prompt pass, as does a prompt cut on the left to ``max_prompt_length``.  Any
    other row is a warning, as another prompt may be meant.

    Args:
        output: a result that ``check_returned`` has passed.
        prompts: those that the ``rollout_func`` was given, text or messages.
        trainer: a ``GRPOTrainer`` of this library.

    Raises:
        ValueError: a row has the ids of another row's prompt.
    """
    expected = _expected(prompts, trainer)
    if expected is None or "prompt_ids" not in output:
        return
    given = [[int(token) for token in row] for row in output["prompt_ids"]]
    longest = getattr(trainer.args, "max_prompt_length", None)
    tokenizer = trainer.processing_class
    wrong = [
        i
        for i, (own, wanted) in enumerate(zip(given, expected, strict=True))
        if not _in_order(own, wanted, prompts[i], tokenizer, longest)
    ]
    for i in wrong:
        if given[i] in expected and not _holds(expected[i], given[i]):
            raise ValueError(
                f"rollout_func: prompt_ids[{i}] is {_shown(given[i], tokenizer)}, which is the prompt of row "
                f"{expected.index(given[i])}, expected {_shown(expected[i], tokenizer)}: return the rows in the order "
                "of the prompts that were given"
            )
    if wrong:
        i = wrong[0]
        count = f" (and of {len(wrong) - 1} more of {len(given)} rows)" if wrong[1:] else ""
        warnings.warn(
            f"rollout_func: prompt_ids[{i}]{count} is {_shown(given[i], tokenizer)}, expected "
            f"{_shown(expected[i], tokenizer)}, the trainer's tokens of the prompt that was given"
            f"{_part(given[i], expected[i])}. The loss scores the completion after the ids that are returned: they "
            "have to be those that it was sampled after. Where another prompt is meant, this warning can be ignored",
            stacklevel=outside(),
        )


def _expected(prompts: Sequence[Any], trainer: Any) -> list[list[int]] | None:
    """The trainer's tokens of the prompts; None: they cannot be known here."""
    if getattr(trainer, "_is_vlm", False) or getattr(trainer, "environment_factories", None):
        return None
    options = dict(getattr(trainer, "chat_template_kwargs", None) or {})
    if getattr(trainer, "tools", None):
        options["tools"] = trainer.tools
    try:
        return [
            [*ids]
            for ids in tokenize_with(
                trainer.processing_class, [*prompts], getattr(trainer, "chat_template", None), options
            )
        ]
    except Exception:  # of any kind: a rollout_func may know prompts that the tokenizer cannot take
        return None


def _in_order(own: list[int], wanted: list[int], prompt: Any, tokenizer: Any, longest: int | None) -> bool:
    if _holds(own, wanted):
        return True
    if _holds(wanted, own):  # a part of the prompt
        return longest is not None and len(own) == longest and wanted[-longest:] == own
    text = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    return isinstance(text, str) and bool(text.strip()) and _unspaced(text) in _unspaced(tokenizer.decode(own))


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))


def _part(own: list[int], wanted: list[int]) -> str:
    """Which part of the expected ids came, if it is one."""
    if not _holds(wanted, own):
        return ""
    where = "first" if wanted[: len(own)] == own else "last" if wanted[-len(own) :] == own else "inner"
    return f", of which these are the {where} {len(own)}"


def _shown(ids: list[int], tokenizer: Any) -> str:
    text = tokenizer.decode(ids)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return f"{text!r} ({len(ids)} tokens)"
