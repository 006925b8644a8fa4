"""Random cases for the hooks of other trainers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import offcorr
from offcorr import Batch
from offcorr.integrations.hook import Hook
from offcorr.methods.registry import Method, catalogue, illustration


def case(seed: int, sequences: int = 6, width: int = 9) -> Batch:
    """A float64 batch, every token scored by the engine, with an empty sequence and large ratios among small ones."""
    batch = offcorr.testing.example(seed, sequences, width, spread=0.5)
    draw = torch.Generator().manual_seed(seed)
    noise = 0.4 * torch.randn((sequences, width), generator=draw, dtype=torch.float64)
    return Batch(
        logp=batch.logp.requires_grad_(),
        old_logp=batch.old_logp,
        rollout_logp=(batch.old_logp + noise).clamp(max=-0.01),
        advantages=torch.randn((sequences, 1), generator=draw, dtype=torch.float64).expand(sequences, width),
        mask=batch.mask,
    )


def carried(hook: Hook) -> list[str]:
    """The methods that a hook takes, with the values that illustrate options without a default: "pnpo?low=0.8"."""
    return [_spec(method) for method in catalogue() if hook.refusal(illustration(method.name)) is None]


def refused(hook: Hook) -> set[str]:
    return {method.name for method in catalogue() if hook.refusal(illustration(method.name)) is not None}


def _spec(method: Method) -> str:
    return "?".join(filter(None, (method.name, "&".join(f"{name}={value}" for name, value in method.example.items()))))


def gradient(loss: Tensor, batch: Batch) -> Tensor:
    """dL/dlogp; nothing is left behind on the leaf."""
    return torch.autograd.grad(loss, batch.logp)[0]


def assert_same(ours: Tensor, theirs: Tensor, batch: Batch, places: float = 1e-9) -> None:
    """Two losses agree in value and gradient."""
    torch.testing.assert_close(ours, theirs, rtol=places, atol=places)
    torch.testing.assert_close(gradient(ours, batch), gradient(theirs, batch), rtol=places, atol=places)


def skip(what: str) -> None:
    pytest.skip(f"{what}: `make test-integrations` gets it", allow_module_level=True)
