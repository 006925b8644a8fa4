"""Properties of a trainer's sampler: settings that distort its distribution, its precision, whether it lags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offcorr.data.around import Around
from offcorr.rollout.off_policy import OffPolicy
from offcorr.rollout.vllm_server import VLLMServer

OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}
"""The options that change the distribution beside the temperature, and the values that switch each off."""

SWITCHED_OFF = "top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0"


def distorting(args: Any, sampler: Any) -> dict[str, float]:
    """The settings in force, of ``OFF``, that are not switched off; empty for a sampler that keeps its own to itself.

    Args:
        sampler: the ``rollout_func``; None: TRL's own generation, with vLLM or without.
    """
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    if sampler is None:
        extra: Mapping[str, Any] = getattr(args, "generation_kwargs", None) or {}
        given = {name: extra.get(name, getattr(args, name, None)) for name in OFF}
    elif isinstance(sampler, OffPolicy):
        own = sampler._sampling(args)
        given = {"top_p": own.top_p, "top_k": own.top_k}
    else:
        return {}
    return {name: value for name, value in given.items() if value not in OFF[name]}


def precision_of(sampler: Any) -> str | None:
    """The precision of a sampler's weights, such as "int4"; None: not known."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler.precision if isinstance(sampler, OffPolicy) else None


def lag_of(sampler: Any) -> int | None:
    """The lag that a sampler is set to, in optimizer steps; None: not known."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler.lag if isinstance(sampler, OffPolicy) else None


def lags(sampler: Any) -> bool | None:
    """Whether a sampler's weights are older than the trainer's at some generation; None: not known."""
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    if isinstance(sampler, OffPolicy):
        return sampler.lag > 0
    return sampler.sync_every > 1 if isinstance(sampler, VLLMServer) else None


def distortion_warning(settings: Mapping[str, float], reported: bool) -> str:
    """The warning of these settings.

    Args:
        reported: the sampler reports log-probs, which the first batch's test looks at.
    """
    said = ", ".join(f"{name}={value:g}" for name, value in settings.items())
    seen = "" if reported else ", and without the sampler's log-probs no metric here shows it"
    return (
        f"{said}: the sampler draws from another distribution than the trainer scores, which is the model's at the "
        f"temperature alone. Every ratio is biased by that, and no correction mends it{seen}: set {SWITCHED_OFF}"
    )
