"""Checks of a configuration's numeric options, TRL's and those of this library: finite numbers, and counts above 0."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Any

UNBOUNDED = (
    "max_grad_norm",
    "delta",
    "epsilon_high",
    "off_policy_mask_threshold",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap",
    "vllm_server_timeout",
)
"""The options that are upper bounds, of which infinity means that there is none."""


NOT_NEGATIVE = {
    "beta": "it would reward the distance from the reference model",
    "learning_rate": "every update would go the wrong way",
    "weight_decay": "the weights would grow",
    "epsilon": "it is a distance from a ratio of 1",
    "epsilon_high": "it is a distance from a ratio of 1",
    "delta": "it bounds a ratio",
    "repetition_penalty": "the logits are divided by it",
    "router_aux_loss_coef": "the load of the experts would become uneven",
    "ref_model_mixup_alpha": "it is a share of the weights",
    "off_policy_mask_threshold": "it bounds a divergence",
    "vllm_importance_sampling_clip_min": "it bounds a ratio",
    "vllm_importance_sampling_clip_max": "it bounds a ratio",
    "vllm_importance_sampling_cap": "it bounds a ratio",
}
"""The options that must not be negative, each with the reason; a negative ``beta`` is trained with in silence."""


def check_numbers(config: Any) -> None:
    """Raises ``ValueError`` for a float option that is no number, NaN, infinite or wrongly negative, or temperature 0.

    TRL takes such values, and the model's weights are NaN after the first update.

    Args:
        config: an instance of a dataclass; None is passed over, since TRL and transformers say where it is allowed.
    """
    for option in dataclasses.fields(config):
        value, kind = getattr(config, option.name), str(option.type)
        if value is None or "float" not in kind or "str" in kind or "list" in kind:
            continue
        wanted = "a number" if option.name in UNBOUNDED else "a finite number"
        number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
        if not number or (math.isinf(value) and not (value > 0 and option.name in UNBOUNDED)):
            raise ValueError(f"{option.name} is {value!r}, expected {wanted}")
        if value < 0 and option.name in NOT_NEGATIVE:
            raise ValueError(f"{option.name} is {value!r}, expected 0 or more: {NOT_NEGATIVE[option.name]}")
    temperature = getattr(config, "temperature", 1.0)
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature!r}, expected a number above 0: the trainer divides the model's logits by it"
        )


COUNTS = {
    "num_generations": 2,
    "max_completion_length": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "ref_model_sync_steps": 1,
}
"""The smallest values of options that are whole numbers, which TRL divides by or passes on."""


def check_counts(config: Any) -> None:
    """Raises ``ValueError`` where one of ``COUNTS`` is too small or not whole, before TRL divides by it."""
    for name, least in COUNTS.items():
        value = getattr(config, name, None)
        if isinstance(value, Real) and not isinstance(value, bool) and (value < least or value % 1 != 0):
            reason = ", since advantages compare the completions of a prompt" if name == "num_generations" else ""
            raise ValueError(f"{name} is {value!r}, expected a whole number, {least} or more{reason}")
