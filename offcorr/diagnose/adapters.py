"""Adapters of peft: whether a model has one, the model without it, and two models that differ in it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def has_adapter(model: Any) -> bool:
    """Whether the model has a LoRA, or another adapter of peft, apart from its weights."""
    return hasattr(model, "disable_adapter") or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_alone(model: nn.Module, other: nn.Module) -> bool:
    """Whether the model has an adapter, and the other model the same weights but for it."""
    if not has_adapter(model):
        return False
    own, others = _without_adapters(model), _without_adapters(other)
    return own.keys() == others.keys() and all(
        value.shape == others[name].shape and torch.equal(value, others[name].to(value)) for name, value in own.items()
    )


def _without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The weights, by the names that they have without peft."""
    weights = model.state_dict()
    layer = "base_layer."  # beside it, in the module that wraps it, is the adapter; a wrapper may be wrapped again
    wrappers = {name.rpartition(layer)[0] for name in weights if f".{layer}" in name}
    return {
        name.removeprefix("base_model.model.").replace(layer, ""): value
        for name, value in weights.items()
        if not any(name.startswith(one) and not name.startswith(one + layer) for one in wrappers)
    }


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The adapter switched off, and on again afterwards."""
    if hasattr(model, "disable_adapter"):  # peft's own wrapper
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
