"""Where a resumed run is not the one that it continues, said when it begins, since nothing else shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from offcorr.training.described import in_short

ASKED_FILE = "offcorr_run.json"
"""The file of a checkpoint folder with what the run was asked for, by option."""

SHORT = "{} in short"
"""The key of the same thing in few words, for messages."""

GENERATION = ("steps_per_generation", "num_iterations", "gradient_accumulation_steps")
"""The options that decide at which optimizer steps a generation ends; the asynchronous trainer has no generations."""


OF_TRLS_LOSS = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
"""The options of TRL's own losses, which a correction does not read."""

OF_TRAINING = (
    "reward_weights",
    "multi_objective_aggregation",
    "scale_rewards",
    "per_device_train_batch_size",
    "num_generations",
    "max_completion_length",
    "mask_truncated_completions",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "entropy_coef",
    "top_entropy_quantile",
    "use_bias_correction_kl",
    "max_grad_norm",
    "optim",
    "optim_args",
    "ess_base",
    "convex_kl",
    "warmup_steps",
    "warmup_ratio",
    "seed",
    "data_seed",
    "shuffle_dataset",
    "ignore_data_skip",
    "disable_dropout",
    "sync_ref_model",
)
"""Options of TRL and of this library that change the samples or the update under every loss."""

KEPT = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Options that a resumed run takes from the checkpoint, whose optimizer and schedule hold them."""


def asked_for(trainer: Any) -> dict[str, str]:
    """A trainer's options in words, by name: loss, schedules, learning rate, anchor, sampler and others that change its
    updates; to be called before it trains.

    ``loss`` is the correction at the start of its schedules; a sampler that has no repr of its own is named by its
    class or function.
    """
    args, sampler = trainer.args, getattr(trainer, "_sampler", None)
    anchor, options = getattr(args, "anchor", None), getattr(args, "anchor_kwargs", None)
    loss = trainer.correction
    trls = repr(getattr(args, "loss_type", None))
    names = (*KEPT, *GENERATION, *OF_TRAINING, *(OF_TRLS_LOSS if loss is None else ()))
    return {
        "loss": trls if loss is None else repr(loss),
        SHORT.format("loss"): trls if loss is None else in_short(loss),
        "anchor": repr(anchor) + (f" with {dict(options)}" if options else ""),
        "ess_lr": repr(getattr(args, "ess_lr", None)),
        "rollout_func": "None" if sampler is None else _named(sampler),
        "temperature": repr(getattr(args, "temperature", None)),
        "beta": repr(getattr(args, "beta", None)),
        "reward_funcs": repr(getattr(trainer, "reward_func_names", None)),
        "number of processes": repr(trainer.accelerator.num_processes),
        "schedules": _schedules(args),
        "lr_scheduler_type": _learning_rate(args),
        **{name: repr(_plain(getattr(args, name))) for name in names if hasattr(args, name)},
    }


def _schedules(args: Any) -> str:
    """The options of the loss that change over the training, and over how many updates they do."""
    options = getattr(args, "loss_kwargs", None) or {}
    changing = {name: value for name, value in options.items() if isinstance(value, Mapping) and "start" in value}
    if not changing:
        return "none"
    return f"{changing} over {_length(args)}"


WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""The courses of the learning rate that do not depend on the length of the training, with a warm-up in steps."""


def _learning_rate(args: Any) -> str:
    """The course of the learning rate, and over how many updates it runs where it depends on them."""
    name = str(_plain(args.lr_scheduler_type))
    warmup = getattr(args, "warmup_ratio", None) or args.warmup_steps
    return repr(name) if name in WITHOUT_END and not 0 < warmup < 1 else f"{name!r} over {_length(args)}"


def _plain(option: Any) -> Any:
    """An option as it is written, where transformers keeps a member of an enum."""
    return getattr(option, "value", option)


def _length(args: Any) -> str:
    """The length of a training."""
    return f"{args.max_steps} updates" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"


def _named(sampler: Any) -> str:
    text = repr(sampler)
    return str(getattr(sampler, "__qualname__", type(sampler).__qualname__)) if text.startswith("<") else text


def save_asked(asked: dict[str, str], folder: Path) -> None:
    """Write it into a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ASKED_FILE).write_text(json.dumps(asked, indent=2) + "\n")


def differences(asked: dict[str, str], checkpoint: Path) -> str:
    """A sentence on what a run is asked for otherwise than the one that saved ``checkpoint``; "": the same."""
    if not (checkpoint / ASKED_FILE).exists():
        return (
            f"{checkpoint} has no {ASKED_FILE}, as of another trainer: whether the run that saved it had the same "
            "loss, anchor and sampler is not known"
        )
    saved = _saved(checkpoint)
    short = {SHORT.format(name): name for name in asked}
    changed = [name for name, now in asked.items() if name not in short and saved.get(name, now) != now]
    if not changed:
        return ""
    each = "; ".join(_change(name, *_said(name, saved, asked)) for name in changed)
    return f"the run that goes on from {checkpoint} is not the one that saved it: {each}"


def _change(name: str, before: str, now: str) -> str:
    if name in KEPT:
        return f"{name} is {now} and stays {before}, which the checkpoint's optimizer holds"
    return f"{name} was {before}, and is {now}"


def _said(name: str, saved: dict[str, str], asked: dict[str, str]) -> tuple[str, str]:
    """The two values of an option that differ, in few words where these differ, too."""
    short = SHORT.format(name)
    if short in saved and short in asked and saved[short] != asked[short]:
        name = short
    return saved[name], asked[name]


def _saved(checkpoint: Path) -> dict[str, str]:
    file = checkpoint / ASKED_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def kept(checkpoint: Path) -> dict[str, str]:
    """The options that a run which resumes from ``checkpoint`` takes from it, whatever it is asked for."""
    saved = _saved(checkpoint)
    return {name: saved[name] for name in KEPT if name in saved}


def updates_of(checkpoint: str | Path) -> int:
    """The optimizer updates that the run of a checkpoint had made; 0: it does not say."""
    file = Path(checkpoint) / TRAINER_STATE_NAME
    return int(json.loads(file.read_text())["global_step"]) if file.exists() else 0


def nothing_left(trainer: Any, checkpoint: Path) -> str:
    """A sentence where ``checkpoint`` has all the updates that ``max_steps`` asks for; "": some are left."""
    most, done = trainer.args.max_steps, updates_of(checkpoint)
    if not 0 < most <= done:
        return ""
    return (
        f"max_steps={most} counts the updates in all, and {checkpoint} has {done} already: nothing is left to train, "
        "and transformers makes one more update"
    )


def cut_generation(trainer: Any, checkpoint: Path) -> str:
    """A sentence where ``checkpoint`` lies in the middle of a generation of the run that saved it; "": it does not.

    TRL keeps no samples in a checkpoint: it samples anew, and the rest of the generation is never trained on.
    """
    if getattr(trainer.args, "steps_per_generation", None) is None:  # the asynchronous trainer has no generations
        return ""
    saved = _saved(checkpoint)
    used, iterations, each = (int(saved.get(name, getattr(trainer.args, name))) for name in GENERATION)
    uses = used * iterations
    left = -trainer.state.global_step * each % uses
    if not left:
        return ""
    whole = next(steps for steps in range(1, uses + 1) if steps * each % uses == 0)
    return (
        f"the checkpoint of step {trainer.state.global_step} lies in the middle of a generation, whose other samples "
        "it does not hold: new ones are sampled, so the run is not the one that would have gone on. Set save_steps to "
        f"a multiple of {whole} for checkpoints between two generations"
    )
