"""The result of a ``rollout_func``: its keys, the checks that it has to pass, and the tensors made of its rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offcorr.data.around import check_sampler
from offcorr.data.sources import keys_read
from offcorr.stages.checks import nearest, warn_once
from offcorr.training.described import in_short
from offcorr.training.origins import ORIGINS
from offcorr.training.unrecorded import DEMONSTRATION

SAMPLED = {"old_logp": torch.float32, "rollout_version": torch.long, "origin": torch.long}
"""The keys that a ``rollout_func`` may return beside TRL's; they travel with the batch to the loss."""

KEYS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "recorded_rewards", *SAMPLED)
"""The keys of a ``rollout_func`` that the loss reads; TRL hands any other to the reward functions."""

NAMES_ELSEWHERE = {
    "rollout_logp": "logprobs",
    "rollout_log_probs": "logprobs",
    "sampling_per_token_logps": "logprobs",
    "old_per_token_logps": "old_logp",
    "completion_mask": "env_mask",
    "response_mask": "env_mask",
    "loss_mask": "env_mask",
    "tool_mask": "env_mask",
}
"""Names of the same column in ``Batch``, in TRL's batches and in other frameworks: the key to return instead."""

PER_TOKEN = ("logprobs", "env_mask", "old_logp")

ROUNDING = 5e-3
"""Log-prob (nats) above which none is taken for one: rounding gives up to 1e-6 in float32, 5e-3 in bfloat16."""


def check_rollout_func(rollout_func: Any) -> None:
    """Raise ``TypeError`` for a ``rollout_func`` that cannot be called with prompts and trainer, or that is a class.

    One with a method ``check_options`` is asked to look at its own.
    """
    if rollout_func is not None:
        check_sampler("rollout_func", rollout_func)
        if hasattr(rollout_func, "check_options"):
            rollout_func.check_options()


def check_returned(output: Any, prompts: Sequence[Any], trainer: Any) -> None:
    """Check what a ``rollout_func`` returned, before anything is made of it.

    Args:
        output: the result for ``prompts``.
        trainer: a ``GRPOTrainer`` of this library.

    Raises:
        TypeError: it is no dict.
        ValueError: a number or a row that does not fit; the message names key and place, what came and what was wanted.
    """
    if not isinstance(output, Mapping):
        raise TypeError(
            f"rollout_func returned {_described(output)}, expected a dict with prompt_ids, completion_ids and logprobs"
        )
    _warn_of_unread_keys(output)
    _check_required(output)
    lengths = _check_ids(output, len(prompts), vocabulary_size(trainer.accelerator.unwrap_model(trainer.model)))
    for name in PER_TOKEN:
        if output.get(name) is not None:
            _check_numbers(name, output[name], lengths)
    if output.get("rollout_version") is not None:
        _check_versions(output["rollout_version"], lengths, trainer.state.global_step)
    if output.get("origin") is not None:
        _check_origins(output["origin"], len(lengths))
    if output.get("recorded_rewards") is not None:
        _check_rewards(output["recorded_rewards"], len(lengths), len(trainer.reward_funcs))
    trained = _trained_tokens(output, lengths)
    _check_padding(output, trained, trainer)
    _warn_of_long(trained, trainer.args.max_completion_length)
    _check_log_probs(output, trained, trainer)
    _check_engine(output, trained, trainer)
    if output.get("old_logp") is not None and trainer.tools:
        raise ValueError(
            "rollout_func returned old_logp and the trainer has tools: TRL then continues the completions by "
            "itself, without old_logp. Call the tools inside rollout_func and return env_mask"
        )


def column(name: str, rows: list[Any], width: int, device: torch.device) -> Tensor:
    """The rows of one of ``SAMPLED`` as a tensor: [B] of numbers, [B, width] of lists, right-padded with 0.

    None, a log-prob that is not known, becomes NaN.

    >>> column("old_logp", [[-1.0, None], [-2.0]], 3, torch.device("cpu"))
    tensor([[-1., nan, 0.],
            [-2., 0., 0.]])
    """
    if _length(rows[0]) is None:
        return torch.as_tensor(rows, dtype=SAMPLED[name], device=device)
    filled = [[*(torch.nan if x is None else x for x in row), *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=SAMPLED[name], device=device)


def none_as_nan(rows: list[Any]) -> list[Any]:
    """Rows of log-probs with NaN for None, which TRL before 1.16 cannot read.

    >>> none_as_nan([[-1.0, None], [-2.0]])
    [[-1.0, nan], [-2.0]]
    """
    return [[torch.nan if x is None else x for x in row] if any(x is None for x in row) else row for row in rows]


def vocabulary_size(model: Any) -> int:
    """The number of token ids that a model of transformers has embeddings for."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return size or model.config.get_text_config().vocab_size


# -- keys and rows -----------------------------------------------------------------------------------------------


def _warn_of_unread_keys(output: Mapping[str, Any]) -> None:
    for name in output:
        if name in KEYS:
            continue
        near = f", did you mean {NAMES_ELSEWHERE[name]!r}?" if name in NAMES_ELSEWHERE else nearest(name, KEYS)
        if near:
            warn_once(f"rollout_func returned the key {name!r}, which only a reward function may read{near}")


def _check_required(output: Mapping[str, Any]) -> None:
    """The keys that TRL requires; ``logprobs`` may be None."""
    missing = [name for name in ("prompt_ids", "completion_ids", "logprobs") if name not in output]
    if missing:
        cure = ". A sampler that reports no log-probs returns logprobs=None" if "logprobs" in missing else ""
        raise ValueError(
            f"rollout_func returned a dict without {' and '.join(missing)}, expected prompt_ids, completion_ids and "
            f"logprobs; present: {', '.join(map(str, output)) or 'nothing'}{cure}"
        )


def _check_ids(output: Mapping[str, Any], prompts: int, vocabulary: int) -> list[int]:
    """The number of tokens of each completion, of which there is one for each prompt."""
    for name in ("prompt_ids", "completion_ids"):
        rows = output[name]
        if _length(rows) is None:
            raise ValueError(f"rollout_func: {name} is {rows!r}, expected a list of token ids for each prompt")
        if len(rows) != prompts:
            raise ValueError(
                f"rollout_func returned {name} for {len(rows)} completions, expected {prompts}, one for each of the "
                "prompts that it was given (TRL repeats a prompt for each of its completions)"
            )
        for i, row in enumerate(rows):
            if not _length(row):
                found = "empty" if _length(row) == 0 else repr(row)
                wanted = "a list of token ids, not text" if isinstance(row, str) else "at least one token id"
                raise ValueError(f"rollout_func: {name}[{i}] is {found}, expected {wanted}")
            ids = _plain(row)
            if (t := _first(ids, lambda value: not _is_token(value, vocabulary))) is not None:
                raise ValueError(
                    f"rollout_func: {name}[{i}][{t}] is {ids[t]!r}, expected a token id from 0 to {vocabulary - 1}, "
                    "those of the model's vocabulary"
                )
    return [len(ids) for ids in output["completion_ids"]]


def _warn_of_long(trained: list[Tensor], longest: int | None) -> None:
    """Warns of more tokens of the model's than the configuration allows; those of an environment do not count."""
    most = max((int(tokens.sum()) for tokens in trained), default=0)
    if longest is not None and most > longest:
        warn_once(
            f"rollout_func returned completions of up to {most} tokens, and max_completion_length is {longest}: they "
            "are trained on whole. Raise max_completion_length, by which TRL tells completions that were cut off, or "
            "sample fewer tokens"
        )


def _check_length(name: str, rows: Any, completions: int) -> None:
    if _length(rows) is None:
        raise ValueError(
            f"rollout_func: {name} is {rows!r}, expected a list with one entry for each of the {completions} "
            "completions"
        )
    if len(rows) != completions:
        raise ValueError(
            f"rollout_func returned {name} for {len(rows)} completions, expected {completions}, those of completion_ids"
        )


def _check_row(name: str, i: int, row: Any, tokens: int) -> list[Any]:
    """A row as a list, with one entry for each token: TRL would pad a short one, and move what comes after the gap."""
    values = _plain(row)
    if _length(values) != tokens:
        found = repr(values) if _length(values) is None else f"{len(values)} numbers"
        raise ValueError(
            f"rollout_func returned {name}[{i}] of {found}, expected {tokens}: one number for each token of "
            f"completion_ids[{i}]"
        )
    return values


def _check_numbers(name: str, rows: Any, lengths: list[int]) -> None:
    """One number, or None, for each token; of a mask 0 or 1."""
    _check_length(name, rows, len(lengths))
    for i, (row, tokens) in enumerate(zip(rows, lengths, strict=True)):
        values = _check_row(name, i, row, tokens)
        if name == "env_mask" and (t := _first(values, lambda value: not _is_bit(value))) is not None:
            raise ValueError(
                f"rollout_func: env_mask[{i}][{t}] is {values[t]!r}, expected 0 or 1: 1 for a token of the model's"
            )
        if (t := _first(values, lambda value: not (value is None or _is_number(value)))) is not None:
            several = "" if _length(values[t]) is None else "; of several candidates, that of the sampled token"
            raise ValueError(f"rollout_func returned {name}[{i}][{t}] = {values[t]!r}, expected a number{several}")


# -- where the tokens come from ----------------------------------------------------------------------------------


def _check_versions(rows: Any, lengths: list[int], now: int) -> None:
    """Versions are optimizer steps, up to the trainer's: one per completion, or one per token."""
    name = "rollout_version"
    _check_length(name, rows, len(lengths))
    each = all(_length(row) is None for row in rows)
    for i, (row, tokens) in enumerate(zip(rows, lengths, strict=True)):
        values = [_plain(row)] if each else _check_row(name, i, row, tokens)
        if (t := _first(values, lambda value: not _is_whole(value, now))) is not None:
            place = f"{name}[{i}]" if each else f"{name}[{i}][{t}]"
            raise ValueError(
                f"rollout_func: {place} is {values[t]!r}, expected a whole number from 0 to {now}, the trainer's step: "
                "the number of optimizer steps of the weights that sampled"
            )


def _check_origins(rows: Any, completions: int) -> None:
    _check_length("origin", rows, completions)
    values = [_plain(row) for row in rows]
    if (i := _first(values, lambda value: not _is_whole(value, len(ORIGINS) - 1))) is not None:
        known = ", ".join(f"{index} for {name!r}" for index, name in enumerate(ORIGINS))
        raise ValueError(
            f"rollout_func: origin[{i}] is {values[i]!r}, expected an index of offcorr.training.ORIGINS: {known}"
        )


def _check_rewards(rows: Any, completions: int, functions: int) -> None:
    """None, or as many rewards as functions; None is the reward of a function that scored nothing."""
    name = "recorded_rewards"
    _check_length(name, rows, completions)
    for i, row in enumerate(rows):
        if row is None:
            continue
        rewards = _plain(row)
        if _length(rewards) is None:
            raise ValueError(
                f"rollout_func: {name}[{i}] is {rewards!r}, expected None or a list with one number for "
                f"each reward function, {functions}"
            )
        if len(rewards) != functions:
            raise ValueError(
                f"rollout_func returned {name}[{i}] of {len(rewards)} numbers, expected {functions}: one for each "
                "reward function"
            )
        if (f := _first(rewards, lambda reward: not (reward is None or _is_known(reward)))) is not None:
            raise ValueError(
                f"rollout_func: {name}[{i}][{f}] is {rewards[f]!r}, expected a number, or None for a function that "
                "scored nothing"
            )


# -- log-probs ---------------------------------------------------------------------------------------------------


def _trained_tokens(output: Mapping[str, Any], lengths: list[int]) -> list[Tensor]:
    """[tokens] bool for each completion: those that ``env_mask`` leaves to the loss."""
    mask = output.get("env_mask")
    if mask is None:
        return [torch.ones(tokens, dtype=torch.bool) for tokens in lengths]
    trained = [torch.tensor(_plain(row)).bool() for row in mask]
    if not any(row.any() for row in trained):
        warn_once(
            f"rollout_func: env_mask is 0 for every token of {len(lengths)} completions: none is trained on, and their "
            "loss is 0. It is 1 for the tokens that the model wrote"
        )
    return trained


def _check_padding(output: Mapping[str, Any], trained: list[Tensor], trainer: Any) -> None:
    """No row goes on with padding behind its end, which TRL would train on as on sampled tokens.

    Padding is told from sampled tokens of the same id by log-probs that are 0 or unknown.
    """
    padding = trainer._tokenizer.pad_token_id
    ends = {trainer._tokenizer.eos_token_id, *getattr(trainer, "eos_token_ids", ())}
    for i, (row, tokens) in enumerate(zip(output["completion_ids"], trained, strict=True)):
        ids = _plain(row)
        last = next((t for t in reversed(range(len(ids))) if ids[t] != padding), -1)
        first = last + 1 + (padding in ends)  # of the same id the first is the end itself
        ended = padding in ends or (last >= 0 and ids[last] in ends)
        if not ended or not tokens[first:].any():
            continue
        if output["logprobs"] is not None:
            values = _log_probs(output["logprobs"][i])[first:]
            if not ((values == 0) | values.isnan()).all():
                continue
        elif padding in ends:
            continue
        raise ValueError(
            f"rollout_func: completion_ids[{i}] ends with padding, {len(ids) - first} of {len(ids)} tokens (id "
            f"{padding}) behind its end-of-sequence token, expected sampled tokens alone, since all are trained on: "
            "cut each row, and its log-probs, behind the end-of-sequence token"
        )


def _check_log_probs(output: Mapping[str, Any], trained: list[Tensor], trainer: Any) -> None:
    """Log-probs of the tokens that are trained on: below 0, and known where the ratio is taken from them."""
    reads = trainer.correction is not None and "old_logp" in keys_read(trainer)
    for name in ("logprobs", "old_logp"):
        if output.get(name) is None:
            continue
        for i, (row, tokens) in enumerate(zip(output[name], trained, strict=True)):
            values = _log_probs(row)
            wrong = (values > ROUNDING) | values.isinf()
            if name == "old_logp" and reads and not _is_demonstration(output, i):
                wrong |= values.isnan()
            if (wrong & tokens).any():
                t = int((wrong & tokens).nonzero()[0])
                raise ValueError(f"rollout_func: {name}[{i}][{t}] is {_plain(row)[t]!r}, {_wanted(name, values[t])}")


def _wanted(name: str, value: Tensor) -> str:
    if value.isfinite():
        return (
            "expected a log-prob, which is at most 0: pass the logarithms of the probabilities, from a log_softmax in "
            "float32"
        )
    if name == "logprobs":
        return "expected a finite log-prob, or None or NaN where the engine could not score the token"
    return (
        "expected a finite log-prob, as the ratio of the token is taken from it: env_mask 0 leaves a token out of the "
        "training"
    )


def _check_engine(output: Mapping[str, Any], trained: list[Tensor], trainer: Any) -> None:
    """A loss that compares with the engine needs log-probs of it, and so does an anchor that takes them."""
    correction, rows = trainer.correction, output.get("logprobs")
    if correction is None or "logprobs" not in output:
        return
    anchored = rows is not None and output.get("old_logp") is None and "logprobs" in keys_read(trainer)
    if "rollout_logp" not in correction.needs and not (anchored and {"old_logp"} & correction.needs):
        return
    found = "logprobs=None"
    if rows is not None:
        seen = [
            _log_probs(row)[tokens]
            for i, (row, tokens) in enumerate(zip(rows, trained, strict=True))
            if not _is_demonstration(output, i)  # no engine sampled it
        ]
        reported = torch.cat(seen) if seen else torch.zeros(0)
        if not len(reported) or not reported.isnan().all():
            return
        found = f"logprobs that are NaN or None for all {len(reported)} tokens that are trained on"
    if "rollout_logp" in correction.needs:
        raise ValueError(
            f"rollout_func returned {found}, but loss {in_short(correction)} compares with the engine's log-probs: "
            "return them, or take a loss that needs no engine"
        )
    raise ValueError(
        f"rollout_func returned {found}, and the ratios of loss {correction.method!r} are taken from them: each would "
        "be 1, and nothing corrected. Return the log-probs, or old_logp of the weights that sampled; with "
        "logprobs=None and without an anchor in the configuration the ratios are taken from log-probs that TRL computes"
    )


def _is_demonstration(output: Mapping[str, Any], i: int) -> bool:
    """Nobody need have recorded the log-probs of a demonstration; ``filled`` stands in for them."""
    origins = output.get("origin")
    return origins is not None and _plain(origins[i]) == DEMONSTRATION


def _log_probs(row: Any) -> Tensor:
    """[tokens] in float64; NaN for None."""
    return torch.tensor([torch.nan if value is None else value for value in _plain(row)], dtype=torch.float64)


# -- values ------------------------------------------------------------------------------------------------------


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _length(value: Any) -> int | None:
    """The length of a list, or of anything like one; None of a number and of text."""
    try:
        return None if isinstance(value, str) else len(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """The numbers of a tensor or an array; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _first(values: Sequence[Any], wrong: Callable[[Any], bool]) -> int | None:
    """The index of the first wrong value; None: none is.  Where values repeat, each is looked at once."""
    try:
        if not any(map(wrong, set(values))):
            return None
    except TypeError:  # a list among them
        pass
    return next((t for t, value in enumerate(values) if wrong(value)), None)


def _is_number(value: Any) -> bool:
    return type(value) is float or (hasattr(value, "__float__") and _length(value) is None)


def _is_known(value: Any) -> bool:
    return _is_number(value) and not math.isnan(float(value))


def _is_bit(value: Any) -> bool:
    return _is_number(value) and bool(value == 0 or value == 1)


def _is_token(value: Any, vocabulary: int) -> bool:
    return not isinstance(value, float) and _is_whole(value, vocabulary - 1)


def _is_whole(value: Any, largest: int) -> bool:
    """A whole number from 0 to ``largest``; 1.0 is one."""
    try:
        whole = value if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        return False
    return 0 <= whole <= largest
