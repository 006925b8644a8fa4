"""``convex_reference``: one reference for a KL penalty to two policies, the base model and a recent one (ReMix)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def convex_reference(base_logp: Tensor, precedent_logp: Tensor, share: float) -> Tensor:
    """Returns log-probs of the mixture  share * base + (1 - share) * precedent, token by token.

    With it as the reference, the k3 estimate of the KL penalty, e^d - 1 - d for d = reference - logp, has the gradient
    of ReMix's convex combination (2507.06892) of the penalties to the base model b and to the precedent policy q:

        share (1 - b_t / pi_t) + (1 - share) (1 - q_t / pi_t)  =  1 - (share b_t + (1 - share) q_t) / pi_t.

    Its value is another, that of the distance to the mixture.  That two penalties are combined is ReMix's; the
    estimator is TRL's and the schedule is left to the caller, since the paper's code is not public.

    Args:
        base_logp, precedent_logp: of one shape, log-probs (nats) of the same tokens under the two policies.
        share: the base model's, in [0, 1].

    Raises:
        ValueError: the shapes differ, or the share is outside [0, 1].

    >>> convex_reference(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.1, 0.1]).log(), 0.25).exp()
    tensor([0.2000, 0.1000])
    """
    if base_logp.shape != precedent_logp.shape:
        raise ValueError(
            f"precedent_logp has shape {tuple(precedent_logp.shape)}, expected {tuple(base_logp.shape)}, that of "
            "base_logp"
        )
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share!r}, expected 0 <= share <= 1")
    log_share = math.log(share) if share else -math.inf
    log_rest = math.log1p(-share) if share < 1 else -math.inf
    return torch.logaddexp(base_logp + log_share, precedent_logp + log_rest)
