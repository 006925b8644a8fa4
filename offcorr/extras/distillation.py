"""Distillation from a teacher, as per-token advantages of the tokens that the student sampled."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation_advantages(logp: Tensor, teacher_logp: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the advantages A_t = sg(log nu(y_t) - log pi(y_t)) of the student pi under the teacher nu.

    They are per token and detached, and 0 on masked tokens.  On-policy, the expected gradient of the policy loss with
    these advantages is that of the reverse KL to the teacher, sum_t KL(pi(.|s_t) || nu(.|s_t)), with the states s_t
    held fixed.  Off-policy they are corrected like any other advantage.

    Args:
        logp: [B, T] or [N], log-probs (nats) of the sampled tokens under the weights being trained.
        teacher_logp: same shape, log-probs (nats) of the same tokens under the teacher.
        mask: same shape, bool: the valid tokens; None: all.

    Raises:
        ValueError: the shapes differ.

    >>> distillation_advantages(torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -3.0]))
    tensor([ 0.5000, -1.0000])
    """
    for name, values in (("teacher_logp", teacher_logp), ("mask", mask)):
        if values is not None and values.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(logp.shape)}, that of logp")
    advantages = (teacher_logp - logp).detach()
    return advantages if mask is None else torch.where(mask.bool(), advantages, 0)
