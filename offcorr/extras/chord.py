"""CHORD: a mixture of a policy loss and supervised learning on expert data (2508.11408; official code, Trinity-RFT)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offcorr.correction import Output
from offcorr.stages.aggregate import checked_denominator
from offcorr.stages.checks import check_number


class Supervised(NamedTuple):
    """Output of ``CHORD.supervised``.

    Attributes:
        loss: scalar, differentiable in the log-probs of expert tokens; not yet times mu.
        coefficient: dL_sft/dlogp of the expert tokens, detached.
    """

    loss: Tensor
    coefficient: Tensor


class Mixed(NamedTuple):
    """Output of ``CHORD``.

    Attributes:
        loss: scalar, differentiable in the log-probs of sampled and expert tokens.
        coefficient: dL/dlogp of the sampled tokens, (1 - mu) times that of the correction; detached.
        sft_coefficient: dL/dlogp of the expert tokens; detached.
    """

    loss: Tensor
    coefficient: Tensor
    sft_coefficient: Tensor


@dataclass(frozen=True)
class CHORD:
    """Mixture of the loss of a correction and a weighted cross-entropy on expert tokens (CHORD, 2508.11408).

    L = (1 - mu) L_policy + mu L_sft,  L_sft = - sum_t phi(p_t) log p_t / Z_sft,  phi(p) = sg(p (1 - p)).

    The gradient of an expert token is dL/dlogp_t = - mu p_t (1 - p_t) / Z_sft: it is small where p_t is near 0 or 1.
    The policy's part is the output of any correction.

    Args:
        mu: weight of the supervised part, in [0, 1]; ``scheduled_mu`` gives one that changes from step to step.
        phi: whether expert tokens are weighted by p (1 - p); False: by 1 (CHORD-mu in the paper).

    Raises:
        ValueError: mu is outside [0, 1].

    >>> import torch, offcorr
    >>> sampled, expert = torch.zeros(1, 2, requires_grad=True), torch.tensor([[0.5, 0.9]]).log().requires_grad_()
    >>> ones = torch.ones(1, 2, dtype=torch.bool)
    >>> out = offcorr.get("ppo")(offcorr.Batch(logp=sampled, advantages=torch.ones(1), mask=ones))
    >>> mixed = CHORD(mu=0.5)(out, expert, ones)
    >>> mixed.sft_coefficient
    tensor([[-0.0625, -0.0225]])
    """

    mu: float = 0.1
    phi: bool = True

    def __post_init__(self) -> None:
        check_number(self, "mu", low=0.0, high=1.0)

    def __call__(
        self, out: Output, sft_logp: Tensor, sft_mask: Tensor, denominator: float | Tensor | None = None
    ) -> Mixed:
        """Returns the mixed loss and its derivatives.

        Args:
            out: output of the correction on the sampled batch.
            sft_logp: [B, T] or [N], log-probs (nats) of the expert tokens under the weights being trained.
            sft_mask: same shape, bool: the valid expert tokens.
            denominator: number of valid expert tokens in the global batch; None: the number in this batch.

        Raises:
            ValueError: the shapes differ, or the denominator is not positive.
        """
        sft = self.supervised(sft_logp, sft_mask, denominator)
        loss = (1 - self.mu) * out.loss + self.mu * sft.loss
        return Mixed(loss, (1 - self.mu) * out.coefficient, self.mu * sft.coefficient)

    def supervised(self, sft_logp: Tensor, sft_mask: Tensor, denominator: float | Tensor | None = None) -> Supervised:
        """Returns L_sft and its derivative, for a trainer that mixes the terms itself; arguments as in a call.

        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> CHORD(mu=0.5).supervised(torch.tensor([[0.5, 0.9]]).log(), mask).coefficient
        tensor([[-0.1250, -0.0450]])
        """
        if sft_logp.shape != sft_mask.shape:
            raise ValueError(
                f"sft_mask has shape {tuple(sft_mask.shape)}, expected {tuple(sft_logp.shape)}, that of sft_logp"
            )
        if denominator is not None:
            denominator = checked_denominator(denominator)
        mask = sft_mask.bool()
        logp = torch.where(mask, sft_logp, 0)
        p = logp.detach().exp()
        weight = torch.where(mask, p * (1 - p) if self.phi else 1.0, 0)
        z = mask.sum().clamp(min=1) if denominator is None else denominator
        return Supervised(-(weight * logp).sum() / z, -weight / z)


def scheduled_mu(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Returns mu of a step: it rises from 0 to ``peak`` over ``warmup`` steps and falls to ``valley`` over ``decay``.

    The rise is linear, the fall half a cosine.

    >>> [round(scheduled_mu(s, warmup=2, decay=2, peak=0.9, valley=0.1), 2) for s in range(6)]
    [0.0, 0.45, 0.9, 0.5, 0.1, 0.1]
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))
