"""Log-probs of tokens in float32, computed by the same code when sampling and when training."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs (nats) of every token of the vocabulary: log_softmax(logits / temperature) in float32.

    The gradient is that of log_softmax.  float64 logits stay float64.

    Args:
        logits: [..., V], of any precision; -inf for a token that the sampler cannot draw.

    Raises:
        ValueError: ``temperature`` is not a number above 0.

    >>> log_probs(torch.tensor([0.0, 0.0])).exp()
    tensor([0.5000, 0.5000])
    """
    if isinstance(temperature, bool) or not (isinstance(temperature, int | float) and temperature > 0):
        raise ValueError(f"temperature is {temperature!r}, expected a number > 0")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).log_softmax(dim=-1)


def logprob(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob (nats, float32) of each token, [..., V] and [...] -> [...]: ``log_probs`` at the token.

    ``offcorr.rollout.decode`` reports the log-probs of this function for what it samples, so that a trainer that
    calls it, too, differs from the sampler only where the logits do.

    Args:
        logits: [..., V], those that predict the tokens: one position before each.
        tokens: [...] token ids.

    Raises:
        ValueError: the shapes do not fit, or ``temperature`` is not a number above 0.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> logprob(logits, torch.tensor([3]))
    tensor([-1.3863])
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}, expected {tuple(logits.shape[:-1])} to go with logits "
            f"{tuple(logits.shape)}"
        )
    return log_probs(logits, temperature).gather(-1, tokens[..., None])[..., 0]


def fp32_head(model: nn.Module) -> Float32Head:
    """Makes a model's last layer, from the hidden states to the logits, compute in float32.

    Weights and hidden states keep their precision and are converted on every call; gradients reach both, in their own
    precision.  Autocast does not apply inside the head.  It belongs on both sides: a float32 head on the trainer alone
    leaves the sampler's rounded logits as they are, and the two differ more than before.

    Args:
        model: a transformers model (possibly wrapped, as by DistributedDataParallel), or its head, an ``nn.Linear``.

    Returns:
        a handle: as a context manager it restores the head at the end, and so does its ``remove()``.

    Raises:
        TypeError: the model has no head, or one that is no plain ``nn.Linear`` (an adapter on it, for instance).

    >>> head = nn.Linear(4, 3).bfloat16()
    >>> hidden = torch.ones(2, 4, dtype=torch.bfloat16)
    >>> with fp32_head(head):
    ...     head(hidden).dtype
    torch.float32
    >>> head(hidden).dtype
    torch.bfloat16
    """
    return Float32Head(_head_of(model))


class Float32Head:
    """Handle of ``fp32_head``: a context manager, or ``remove()``."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._before = vars(head).get("forward")
        # A bound method, because a deep copy of the model then computes with the copy's weights.
        head.forward = MethodType(_float32_forward, head)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the head as it was."""
        vars(self._head).pop("forward", None)
        if self._before is not None:
            vars(self._head)["forward"] = self._before

    def __enter__(self) -> Float32Head:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _float32_forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)


def _head_of(model: Any) -> nn.Linear:
    owner = model
    while not hasattr(owner, "get_output_embeddings") and isinstance(getattr(owner, "module", None), nn.Module):
        owner = owner.module
    head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else owner
    if type(head) is not nn.Linear:
        raise TypeError(
            f"the head of {type(model).__name__} is {type(head).__name__}, expected a torch.nn.Linear (of a "
            "transformers model: get_output_embeddings()). Merge an adapter that lies on the head first"
        )
    return head
