"""On-policy distillation as an advantage: a teacher's opinion of every token the student sampled."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation_advantages(logp: Tensor, teacher_logp: Tensor, mask: Tensor | None = None) -> Tensor:
    """A_t = sg(log nu(y_t) - log pi(y_t)): per token, detached; 0 where the mask is not.

    On-policy the policy gradient with it is that of the reverse KL to the teacher at the states visited,
    grad sum_t KL(pi(.|s_t) || nu(.|s_t)), the states held fixed.  Off-policy it is corrected like any other advantage.

    Args:
        logp: log-probs (nats) of the sampled tokens under the weights being trained, padded or packed.
        teacher_logp: of the same tokens under the teacher.
        mask: bool, the valid tokens.

    >>> distillation_advantages(torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -3.0]))
    tensor([ 0.5000, -1.0000])
    """
    for name, values in (("teacher_logp", teacher_logp), ("mask", mask)):
        if values is not None and values.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(logp.shape)}, that of logp")
    advantages = (teacher_logp - logp).detach()
    return advantages if mask is None else torch.where(mask.bool(), advantages, 0)
