"""Properties of a trainer's sampler: settings that distort its distribution, its precision, whether it lags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offcorr.data.around import Around
from offcorr.lab.text import listed
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

OF_GENERATION: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, True),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "num_beams": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "sequence_bias": (None, {}),
    "logit_bias": (None, {}),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "dola_layers": (None,),
    "structured_outputs": (None,),
}
"""The keys of ``generation_kwargs`` in Transformers and vLLM that change the distribution as well, and the values that
switch each off.  The monitor has no cause of these names."""


def distorting(args: Any, sampler: Any) -> dict[str, float]:
    """The settings in force, of ``OFF``, that are not switched off, and a temperature that is not the trainer's.

    Empty for a sampler that keeps its own to itself.

    Args:
        sampler: the ``rollout_func``; None: TRL's own generation, with vLLM or without.
    """
    sampler = _innermost(sampler)
    if sampler is None:
        extra = _generation_kwargs(args)
        given = {name: extra.get(name, getattr(args, name, None)) for name in OFF}
        given |= {"temperature": extra.get("temperature", args.temperature)}
    elif isinstance(sampler, OffPolicy):
        own = sampler._sampling(args)
        given = {"top_p": own.top_p, "top_k": own.top_k}
    else:
        return {}
    off = OFF | {"temperature": (None, args.temperature)}
    return {name: value for name, value in given.items() if value not in off[name]}


def unknown_to_trainer(args: Any, sampler: Any) -> dict[str, Any]:
    """The entries of ``generation_kwargs`` in force, of ``OF_GENERATION``, that are not switched off."""
    sampler = _innermost(sampler)
    if sampler is not None:
        return {}
    given = {name: value for name, value in _generation_kwargs(args).items() if name in OF_GENERATION}
    return {name: value for name, value in given.items() if value not in OF_GENERATION[name]}


def of_model(of_trl: Any, own: Any) -> dict[str, Any]:
    """The settings of a model's generation_config that TRL's own generation applies, as it leaves them unset.

    Args:
        of_trl: the generation_config that TRL made; None: it has none, as with vLLM.
        own: that of the model.
    """
    off = OFF | OF_GENERATION
    if of_trl is None or own is None:
        return {}
    unset = {name: getattr(own, name, None) for name in off if getattr(of_trl, name, None) is None}
    return {name: value for name, value in unset.items() if value not in off[name]}


def _innermost(sampler: Any) -> Any:
    while isinstance(sampler, Around):
        sampler = sampler.sampler
    return sampler


def _generation_kwargs(args: Any) -> Mapping[str, Any]:
    return getattr(args, "generation_kwargs", None) or {}


def precision_of(sampler: Any) -> str | None:
    """The precision of a sampler's weights, such as "int4"; None: not known."""
    sampler = _innermost(sampler)
    return sampler.precision if isinstance(sampler, OffPolicy) else None


def lag_of(sampler: Any) -> int | None:
    """The lag that a sampler is set to, in optimizer steps; None: not known."""
    sampler = _innermost(sampler)
    return sampler.lag if isinstance(sampler, OffPolicy) else None


def lags(sampler: Any) -> bool | None:
    """Whether a sampler's weights are older than the trainer's at some generation; None: not known."""
    sampler = _innermost(sampler)
    if isinstance(sampler, OffPolicy):
        return sampler.lag > 0
    return sampler.sync_every > 1 if isinstance(sampler, VLLMServer) else None


def distortion_warning(settings: Mapping[str, Any], reported: bool, own: Mapping[str, Any]) -> str:
    """The warning of these settings.

    Args:
        reported: the sampler reports log-probs, which the first batch's test looks at.
        own: further settings, of the model's generation_config.
    """
    named = [f"{name}={value!r}" for name, value in settings.items()]
    said = ", ".join([*named, *(f"{name}={value!r} (of the model's generation_config)" for name, value in own.items())])
    cures = [f"set {SWITCHED_OFF}"] if not settings.keys().isdisjoint(OFF) else []
    if "temperature" in settings:
        cures.append("give the temperature as temperature=, which the trainer scores at, and not in generation_kwargs")
    if left_out := [name for name in settings if name in OF_GENERATION]:
        cures.append(f"leave {listed(left_out)} out of generation_kwargs")
    if own:
        cures.append(f"set {listed([f'model.generation_config.{name}' for name in own])} to None")
    seen = (
        "" if reported else ", and without the sampler's log-probs the monitor's series of surprise alone can show it"
    )
    return (
        f"{said}: the sampler draws from another distribution than the trainer scores, which is the model's at the "
        f"temperature alone. Every ratio is biased by that, and no correction mends it{seen}: {'; '.join(cures)}"
    )
