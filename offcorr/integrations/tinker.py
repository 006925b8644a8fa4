"""Tinker: ``training_client.forward_backward_custom(data, loss("minpro?eps_high=0.28"))``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.integrations.hook import Hook

__all__ = ["HOOK", "loss"]

HOOK = Hook(
    "Tinker",
    sees="batch",
    carries=frozenset({"old_logp", "rollout_logp", "rewards", "group_ids"}),
    engine_alone=False,
)
"""Tinker's custom loss runs on the client and sees every sequence of a ``forward_backward_custom`` call."""


def loss(
    spec: str,
    *,
    rewards: Sequence[float] | None = None,
    group_ids: Sequence[int] | None = None,
    denominator: float | None = None,
    **options: Any,
) -> Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """Returns a loss for ``forward_backward_custom``.

    Each datum has ``logprobs`` (the sampler's), ``advantages`` and, if some tokens are not trained on, ``mask`` in its
    ``loss_fn_inputs``.  The ratio is the total one, of the current log-probs to the sampler's; its metrics are
    ``offcorr/staleness/*``.

    Args:
        spec: a method, as for ``offcorr.get``.
        rewards, group_ids: one for each datum of a call, for methods that need them.
        denominator: tokens or sequences of the whole optimizer step, where it has several calls.
        options: the method's options, where they do not stand in ``spec``.

    Raises:
        ValueError: the method has a stage for the engine mismatch, or the spec is wrong.

    >>> from types import SimpleNamespace
    >>> inputs = {"logprobs": torch.full((3,), -2.0), "advantages": torch.ones(3), "mask": torch.tensor([0, 1, 1])}
    >>> logp = torch.full((3,), -1.9, requires_grad=True)
    >>> value, metrics = loss("cispo", cap=1.0)([SimpleNamespace(loss_fn_inputs=inputs)], [logp])
    >>> value.backward(); logp.grad
    tensor([ 0.0000, -0.5000, -0.5000])
    """
    correction = HOOK.resolve(spec, **options)

    def custom_loss(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        lengths = [len(logp) for logp in logprobs]
        device = logprobs[0].device
        sampled, advantages = (_joined(data, lengths, name, device) for name in ("logprobs", "advantages"))
        masks = [(datum.loss_fn_inputs.get("mask"), length) for datum, length in zip(data, lengths, strict=True)]
        mask = torch.cat([torch.ones(length) if own is None else _tensor(own).cpu() for own, length in masks])
        batch = Batch.packed(
            logp=torch.cat(logprobs),
            old_logp=sampled,
            rollout_logp=sampled,
            advantages=advantages,
            mask=mask.bool().to(device),
            rewards=None if rewards is None else torch.tensor(rewards, dtype=torch.float32, device=device),
            group_ids=None if group_ids is None else torch.tensor(group_ids, device=device),
            cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0),
        )
        out = correction(batch, denominator=denominator)
        computed = out.metrics.compute().items()
        return out.loss, {name: value for name, value in computed if not name.startswith("offcorr/engine/")}

    return custom_loss


def _tensor(values: Any) -> Tensor:
    """A tensor of Tinker's ``TensorData``, or of a tensor."""
    return values if isinstance(values, Tensor) else values.to_torch()


def _joined(data: Sequence[Any], lengths: list[int], name: str, device: torch.device) -> Tensor:
    """A field of every datum, end to end."""
    for place, datum in enumerate(data):
        if name not in datum.loss_fn_inputs:
            raise ValueError(f"datum {place} has no {name!r} in loss_fn_inputs, expected one number per token")
    parts = [_tensor(datum.loss_fn_inputs[name]) for datum in data]
    if (found := [len(part) for part in parts]) != lengths:
        raise ValueError(f"{name} has {found} numbers in loss_fn_inputs, expected {lengths}, the tokens of each datum")
    return torch.cat(parts).to(device=device, dtype=torch.promote_types(parts[0].dtype, torch.float32))
