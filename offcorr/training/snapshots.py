"""Weights by version: read from a live model, sharded or not, with the last few versions kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn


def check_steps(name: str, steps: Any) -> None:
    """Raise ``ValueError`` unless ``steps`` is a whole number of optimizer updates, 0 or more."""
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"{name} is {steps!r}, expected a whole number of optimizer updates, 0 or more")


class MissingVersion(KeyError):
    """Raised for weights of a version that is not held."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return self.args[0]


class SnapshotRing:
    """Exact copies of a model's changing weights, by version, on the CPU.

    It holds at most ``lag + 1`` versions, the newest and the ``lag`` before it: a sampler that lags ``lag`` versions
    behind never needs older ones.
    """

    def __init__(self, lag: int) -> None:
        check_steps("lag", lag)
        self.lag = lag
        self._held: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """The versions held, oldest first."""
        return sorted(self._held)

    def push(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy ``weights`` (name, tensor) as ``version``, and drop versions that lie further back than the lag.

        Raises:
            ValueError: ``version`` is older than the newest version held.
        """
        newest = max(self._held, default=version)
        if version < newest:
            raise ValueError(f"version {version} pushed after version {newest}: clear() first")
        for old in [held for held in self._held if held < version - self.lag]:
            del self._held[old]
        self._held[version] = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}

    def __getitem__(self, version: int) -> dict[str, Tensor]:
        """The weights of ``version``.

        Raises:
            MissingVersion: they are not held (a KeyError that lists the versions held).
        """
        try:
            return self._held[version]
        except KeyError:
            raise MissingVersion(
                f"weights of version {version} are not held; held: {self.versions}. A ring keeps "
                f"the last {self.lag + 1} versions it was given; a run resumed from a checkpoint "
                "without its saved ring, or saved with a smaller lag, has none from before"
            ) from None

    def __contains__(self, version: int) -> bool:
        return version in self._held

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Drop every version."""
        self._held.clear()

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """Everything held: {version: {name: tensor}}."""
        return {version: dict(weights) for version, weights in self._held.items()}

    def load_state_dict(self, state: dict[int, dict[str, Tensor]]) -> None:
        """Hold the versions of a result of ``state_dict`` that lie within this ring's lag."""
        newest = max(state, default=0)
        self._held = {version: dict(state[version]) for version in sorted(state) if version >= newest - self.lag}


def is_sharded(parameter: Tensor) -> bool:
    """Whether this process holds only a part of the parameter (DeepSpeed ZeRO-3, FSDP2)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor")


def whole(parameter: Any) -> Tensor:
    """The whole parameter, detached; a sharded one is gathered over the ranks (a collective)."""
    if hasattr(parameter, "full_tensor"):  # FSDP2: a DTensor
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):  # DeepSpeed ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach()


def changing_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that training changes: parameters that require grad, and persistent floating-point buffers.

    Yields (name, whole tensor), each tied parameter once, in the model's own dtypes.  They are not copies: a later
    optimizer step changes them.  Under ZeRO-3 and FSDP2 every rank must iterate over all of them.  Of a PEFT model they
    are the adapters alone.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, whole(parameter)
    yield from persistent_buffers(model)


def frozen_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that never change, as (name, whole tensor); copies only if sharded."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, whole(parameter)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The floating-point buffers of a checkpoint, as (name, tensor)."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            if persistent and buffer is not None and buffer.is_floating_point():
                yield f"{prefix}.{name}" if prefix else name, whole(buffer)


def refuse_fsdp1(model: Any) -> None:
    """Raise ``ValueError`` under FSDP1, whose flattened parameters have no names of their own."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "OffPolicy reads parameters by name, which FSDP1 flattens away: set fsdp_version: 2 in "
            "the accelerate config"
        )
