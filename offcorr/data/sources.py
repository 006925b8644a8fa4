"""The trainers and samplers that groups can be replayed with; others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offcorr.stages.checks import warn_once


def check_trainer(name: str, trainer: Any) -> None:
    """Raise for a trainer that groups cannot be replayed in.

    Raises:
        TypeError: TRL's own trainer.
        ValueError: tools or environments, or a per-rank batch that tears groups.
    """
    if not hasattr(trainer, "correction_step"):
        raise TypeError(
            f"{name} needs the rows of the dataset, which {type(trainer).__name__} does not hand over: train with "
            "offcorr.trl.GRPOTrainer"
        )
    for setting in ("tools", "environment_factories"):
        if getattr(trainer, setting, None):
            raise ValueError(f"{name} does not store the state of {setting}: call the tools inside the rollout_func")
    args = trainer.args
    per_rank, size = args.per_device_train_batch_size * args.steps_per_generation, trainer.num_generations
    if per_rank % size:
        raise ValueError(
            f"{name} stores whole prompt groups, and the batch of a rank tears them: per_device_train_batch_size times "
            f"steps_per_generation is {per_rank}, expected a multiple of num_generations, {size}"
        )


def check_rows(name: str, rows: list[dict[str, Any]], size: int) -> None:
    """Raise ``ValueError`` unless the rows are whole prompt groups of ``size`` sequences, with values to be stored."""
    prompts = [row.get("prompt") for row in rows]
    torn = [start for start in range(0, len(rows), size) if prompts[start : start + size] != [prompts[start]] * size]
    if torn:
        raise ValueError(
            f"{name} stores whole prompt groups of num_generations, {size}, and of the {len(rows)} rows of a rank's "
            f"generation the group that begins at row {torn[0]} is torn"
        )
    for column, value in rows[0].items():
        if not _is_plain(value):
            raise ValueError(
                f"{name} stores rows in checkpoints, and the column {column!r} holds a {type(value).__name__}, "
                "expected text, numbers, and lists and dicts of these"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)


def keys_read(trainer: Any) -> tuple[str, ...]:
    """The keys of a sampler, of old_logp and logprobs, whose log-probs the correction of a trainer reads."""
    anchor, correction = getattr(trainer.args, "anchor", None), trainer.correction
    engine = anchor in ("rollout", "log_linear") or "rollout_logp" in correction.needs
    engine |= anchor is None and "engine" not in correction.compares  # anchor="rollout" is the default without old_logp
    read = {"old_logp": anchor in (None, "snapshot"), "logprobs": engine}
    return tuple(key for key, is_read in read.items() if is_read)


def check_anchor(name: str, trainer: Any) -> None:
    """Raise ``ValueError`` for an anchor with which no recorded log-probs would be read, whatever the sampler."""
    if trainer.correction is None or keys_read(trainer):
        return
    raise ValueError(
        f"{name} trains on sequences with the log-probs of the time when they were sampled, and "
        f"anchor={trainer.args.anchor!r} does not read them: every ratio of a replayed sequence would be taken from "
        f"newer weights than those that sampled it. Leave anchor out, or {CURE}"
    )


def check_sources(name: str, rollout: Mapping[str, Any], trainer: Any) -> None:
    """Raise ``ValueError`` where nothing reads the log-probs that a sampler recorded of replayed sequences.

    Under TRL's own loss, which reads none, and under a correction that takes no ratio to the weights that sampled,
    warns once.
    """
    given = [key for key in ("old_logp", "logprobs") if rollout.get(key) is not None]
    correction = trainer.correction
    if correction is None:
        if not given:
            raise ValueError(f"{name} needs log-probs to record, and its sampler returns none: {CURE}")
        warn_once(
            f"TRL's own loss reads no recorded log-probs, so sequences that {name} replays are trained on as if they "
            "were fresh; write loss_type='offcorr:...' to correct them"
        )
        return
    read = keys_read(trainer)
    if not set(given) & set(read):
        raise ValueError(
            f"{name} needs the log-probs of the time of sampling: anchor={getattr(trainer.args, 'anchor', None)!r} "
            f"and loss {correction.method!r} read {' and '.join(read)}, and the sampler returns "
            f"{' and '.join(given) or 'none'}: {CURE}"
        )
    warn_of_unseen_age(name, trainer, given)


def warn_of_unseen_age(name: str, trainer: Any, given: list[str]) -> None:
    """Warns once where no ratio of the correction depends on how old a replayed sequence is.

    Args:
        given: "old_logp" and "logprobs", as far as the sampler returns them.
    """
    correction = trainer.correction
    if not _sees_age(trainer, given):
        warn_once(
            f"loss {correction.method!r} takes no ratio to the weights that sampled, so sequences that {name} replays "
            "are trained on as if they were fresh; take a loss that corrects their age, for instance 'minpro'"
        )


def _sees_age(trainer: Any, given: list[str]) -> bool:
    """Whether a ratio of the correction depends on how old a sequence is, whose log-probs came under these keys."""
    correction = trainer.correction
    factors = [stage for place, stage in correction.stages.items() if place.startswith(("weight", "reject"))]
    if "old_logp" in correction.needs or any(stage.mismatch != "engine" for stage in factors):
        return True
    # An engine ratio is old_logp over rollout_logp: of the same weights, unless old_logp is recomputed.
    recomputed = "old_logp" not in given or getattr(trainer.args, "anchor", None) not in (None, "snapshot")
    return bool(factors) and recomputed


CURE = (
    "take a sampler that returns old_logp, such as offcorr.rollout.OffPolicy(), with anchor='snapshot', one that "
    "returns logprobs with anchor='rollout', or a loss that compares with the engine"
)
