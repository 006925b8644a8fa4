"""Variants of the trainer's model that a sampler may have: another precision, a rounded cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.training.precision import Precision, quantise_int
from offcorr.training.replica import Replica
from offcorr.training.snapshots import changing_weights


def cast(model: nn.Module, precision: str) -> nn.Module:
    """A copy of the model with weights in another precision."""
    weights = dict(model.named_parameters())
    replica = Replica(model, next(model.parameters()).device)
    return replica.load({key: weights[key] for key, _ in changing_weights(model)}, Precision.named(precision))


def rounded_caches() -> dict[str, Callable[[int], Any]]:
    """Makers of caches that keep keys and values in a lower precision, by the hypothesis in words.

    They take the number of tokens of the prompt, which is read first; it may attend to its own keys and values before
    they are rounded.
    """
    formats = {"int8": partial(quantise_int, bits=8)}
    for name, storage in (("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        if hasattr(torch, storage):
            formats[name] = partial(_unscaled, storage=storage)
            formats[f"{name} by cutting digits off"] = partial(_cut, storage=storage)
    return {
        f"keys and values in {name}{', a prompt that attends to exact ones' if exact else ''}": partial(
            _rounded_cache, rounded, exact
        )
        for name, rounded in formats.items()
        for exact in (True, False)
    }


def _unscaled(values: Tensor, storage: str) -> Tensor:
    """As vLLM's fp8 cache without calibrated scales."""
    dtype = getattr(torch, storage)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).to(values.dtype)


def _cut(values: Tensor, storage: str) -> Tensor:
    """The same, rounded towards zero, as vLLM's cache on a CPU (0.32 with fp8_e4m3)."""
    dtype = getattr(torch, storage)
    near = _unscaled(values, storage)
    code = near.to(dtype).view(torch.uint8)  # the sign is the first bit, so a smaller code is nearer to zero
    return (code - (near.abs() > values.abs()).to(torch.uint8)).view(dtype).to(values.dtype)


def _rounded_cache(rounded: Callable[[Tensor], Tensor], exact_prompt: bool, prompt: int) -> Any:
    """Takes the number of tokens of the prompt, which is to be read by itself."""
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            before = self.get_seq_length(layer)
            if exact_prompt and before < prompt:
                return super().update(keys, values, layer, *more, **named)  # type: ignore[no-any-return]
            if exact_prompt and before == prompt:
                own = self.layers[layer]
                own.keys, own.values = rounded(own.keys), rounded(own.values)
            return super().update(rounded(keys), rounded(values), layer, *more, **named)  # type: ignore[no-any-return]

    return RoundedCache()
