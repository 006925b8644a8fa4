"""Checks of the arguments of ``linear_logprob`` and ``logits_logprob``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offcorr.kernels.logprob.tiles import Transform

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def transform_of(logit_scale: float, soft_cap: float | None, temperature: float) -> Transform:
    """The checked options as a ``Transform``.

    Raises:
        ValueError: temperature or soft_cap is not positive, or logit_scale is 0 or not finite.
    """
    for name, value in (("temperature", temperature), ("soft_cap", soft_cap), ("logit_scale", logit_scale)):
        if isinstance(value, Tensor) and value.ndim:
            raise ValueError(f"{name} is a tensor of shape {list(value.shape)}, expected one number for all tokens")
    for name, value in (("temperature", temperature), ("soft_cap", soft_cap)):
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"{name} is {value}, expected a positive number")
    if not 0 < abs(logit_scale) < math.inf:
        raise ValueError(f"logit_scale is {logit_scale}, expected a finite number other than 0")
    return Transform(float(logit_scale), soft_cap if soft_cap is None else float(soft_cap), float(temperature))


def check_float(name: str, x: Tensor) -> None:
    """Raises ValueError for a sharded tensor and TypeError for a dtype that is not supported."""
    if any(cls.__name__ == "DTensor" for cls in type(x).__mro__):
        raise ValueError(
            f"{name} is a DTensor ({getattr(x, 'placements', '')}), expected a plain tensor: give the rank's part of a "
            "vocabulary-sharded head, to_local(), with group= and vocabulary_start=, or gather it with full_tensor()"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}, expected one of {', '.join(str(d)[6:] for d in DTYPES)}")


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Checks hidden states and head, and returns the dtype to compute in.

    Raises:
        ValueError: shapes do not fit together, a tensor is on another device, or the head is sharded.
        TypeError: a dtype is not supported, or differs from that of hidden outside autocast.
    """
    named = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    kind = hidden.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    autocast_dtype = torch.get_autocast_dtype(kind) if autocast else None
    for name, x in named.items():
        check_float(name, x)
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, expected {hidden.device}, where hidden is")
        if autocast_dtype is None and x.dtype != hidden.dtype:
            raise TypeError(f"{name} is {x.dtype}, expected {hidden.dtype} like hidden (or autocast)")
    if hidden.ndim < 1 or hidden.shape[-1] < 1:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, expected (..., H) with H at least 1")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or not len(weight):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected (V, {hidden.shape[-1]}) to go with hidden "
            f"{tuple(hidden.shape)}; a head that FSDP or ZeRO-3 has split must be gathered first"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({len(weight)},) to go with weight")
    return hidden.dtype if autocast_dtype is None or hidden.dtype == torch.float64 else autocast_dtype


def check_targets(target: Tensor, mask: Tensor | None, shape: torch.Size, name: str, device: torch.device) -> None:
    """Checks targets and mask against ``shape``, that of the argument called ``name`` without its last dimension.

    Raises:
        ValueError: wrong shape or device.
        TypeError: target is not an integer tensor, or mask neither integer nor bool.
    """
    for field, x in (("target", target), ("mask", mask)):
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(
                f"{field} has shape {tuple(x.shape)}, expected {tuple(shape)}, the shape of {name} without its last "
                "dimension"
            )
        if x.device != device:
            raise ValueError(f"{field} is on {x.device}, expected {device}, where {name} is")
        if x.dtype.is_floating_point or x.dtype.is_complex or (field == "target" and x.dtype == torch.bool):
            raise TypeError(f"{field} is {x.dtype}, expected integers{' or bool' if field == 'mask' else ''}")


def check_slice(group: Any, vocabulary_start: int | None) -> int:
    """Returns the vocabulary entry of the head's first row.

    Raises:
        ValueError: only one of the two is given, or vocabulary_start is negative.
    """
    if (group is None) != (vocabulary_start is None):
        missing, given = ("vocabulary_start", "group") if vocabulary_start is None else ("group", "vocabulary_start")
        raise ValueError(f"{missing} is None, expected a value to go with {given}: a split head takes both")
    if vocabulary_start is not None and vocabulary_start < 0:
        raise ValueError(
            f"vocabulary_start is {vocabulary_start}, expected the token of the rank's first row of weight"
        )
    return vocabulary_start or 0
