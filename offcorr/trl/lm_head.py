"""This library's LM head (hidden states to log-probs) inside TRL's forward, where it was measured to be faster.

TRL patches the model's forward to project hidden states to log-probs by one autograd function.  Only this function is
exchanged, for the time of a forward pass, so FSDP, ZeRO-3, PEFT and MoE models run through TRL's code as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import trl.trainer.utils
from torch import Tensor

from offcorr.exact.logprob import log_probs
from offcorr.kernels.logprob import linear_logprob
from offcorr.trl.patch import patched

HEADS = ("auto", "trl", "offcorr", "exact")
MEASURED_FASTER = ("cpu",)
"""Devices where "auto" takes this library's: .47 of the time, .03 of the memory (benchmarks/results/cpu_logprob.md)."""


class LinearLogProb:
    """``offcorr.linear_logprob`` with the signature and the five results of TRL's function."""

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
            # TRL does the same with a head kept in another precision than the rest of the model.
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        result = linear_logprob(
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
        squares = result.sum_sq_probs
        return result.logp, result.entropy, None if squares is None else squares.log(), None, None


class ExactLogProb:
    """The sampler's arithmetic (``offcorr.exact``) with the signature and the results of TRL's function."""

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
        """As ``LinearLogProb.apply``, from the whole logits [N, V], which have the model's precision."""
        bias = None if bias is None else bias.to(hidden.dtype)
        logits = F.linear(hidden, weight.to(hidden.dtype), bias)
        logits = logits if logit_scale == 1 else logits * logit_scale
        logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
        every = log_probs(logits, temperature)
        logp = every.gather(-1, targets[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1) if "entropy" in outputs else None
        squares = (2 * every).logsumexp(-1) if "log_sum_sq_probs" in outputs else None
        return logp, entropy, squares, None, None


_FUNCTION = "_ChunkedLogProbFunction"


def _supported() -> bool:
    """Whether the installed TRL has the function, with the signature of ``LinearLogProb.apply``."""
    theirs = getattr(trl.trainer.utils, _FUNCTION, None)
    if theirs is None or not hasattr(trl.trainer.utils, "add_fused_lm_head"):
        return False
    with_context, ours = (inspect.signature(f).parameters for f in (theirs.forward, LinearLogProb.apply))
    return len(with_context) == 1 + len(ours)


SUPPORTED = _supported()


def lm_head(choice: str, device: torch.device) -> Any:
    """Context in which TRL's forward uses the LM head of ``choice``, one of ``HEADS``, for a model on ``device``."""
    if choice == "auto" and device.type in MEASURED_FASTER:
        choice = "offcorr"
    function = {"offcorr": LinearLogProb, "exact": ExactLogProb}.get(choice)
    if function is None or not SUPPORTED:
        return nullcontext()
    # With _use_triton, TRL scores the tokens with a label alone instead of all of them.
    return patched(trl.trainer.utils, **{_FUNCTION: function, "_use_triton": lambda device: True})


def counting_real_tokens(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model with positions that count real tokens, as a sampler's do; without position_ids they count padding, too.

    Raises:
        ValueError: when the model is called with images, whose positions are not a count.
    """

    def forward(**inputs: Any) -> Any:
        images = [name for name in inputs if name.startswith(("pixel", "image"))]
        if images:
            raise ValueError(
                f"logprob_head='exact' takes text alone, but the batch has {', '.join(images)}: take 'auto'"
            )
        return model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0))

    return forward
