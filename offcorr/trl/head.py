"""This library's log-prob head inside TRL's forward, where it was measured to be the faster one.

TRL patches the model's forward, which projects hidden states to log-probs through one autograd function; that function
is what is exchanged, for the time of a forward pass, so FSDP, ZeRO-3, PEFT and MoE models take TRL's way as before.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import trl.trainer.utils
from torch import Tensor

from offcorr.kernels.logprob import linear_logprob
from offcorr.trl.replaced import replaced

HEADS = ("auto", "trl", "offcorr")
MEASURED_FASTER = ("cpu",)
"""Devices where "auto" takes ours: .47 of TRL's time and .03 of its memory (benchmarks/results/cpu_logprob.md)."""


class Head:
    """In the place of TRL's function: the same call, the same five results."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        soft_cap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        """(log-prob, entropy, log of the sum of squared probabilities, None, None), each [N], as ``outputs`` asks."""
        if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            # As TRL's does with a head kept in another precision than the rest of the model.
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        found = linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            soft_cap=soft_cap,
            logit_scale=logit_scale,
            entropy="entropy" in outputs,
            sum_sq_probs="log_sum_sq_probs" in outputs,
        )
        squares = found.sum_sq_probs
        return found.logp, found.entropy, None if squares is None else squares.log(), None, None


_PLACE = "_ChunkedLogProbFunction"


def _supported() -> bool:
    """Whether the installed TRL calls the function to exchange as ``Head.apply`` is called."""
    theirs = getattr(trl.trainer.utils, _PLACE, None)
    if theirs is None or not hasattr(trl.trainer.utils, "add_fused_lm_head"):
        return False
    return len(inspect.signature(theirs.forward).parameters) == 1 + len(inspect.signature(Head.apply).parameters)


SUPPORTED = _supported()


def head(choice: str, device: torch.device) -> Any:
    """A context in which TRL's forward uses the head of ``choice``, one of ``HEADS``, for a model on ``device``."""
    ours = choice == "offcorr" or (choice == "auto" and device.type in MEASURED_FASTER)
    if not ours or not SUPPORTED:
        return nullcontext()
    # TRL scores only the tokens with a label where it thinks that its kernel runs, all of them elsewhere.
    return replaced(trl.trainer.utils, **{_PLACE: Head, "_use_triton": lambda device: True})
