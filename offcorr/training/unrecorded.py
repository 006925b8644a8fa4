"""``filled``: a stand-in for the log-probs of traces that nobody recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from offcorr.training.field_metrics import DEMONSTRATION

__all__ = ["DEMONSTRATION", "filled"]


def filled(old_logp: Tensor | None, logp: Tensor, origin: Tensor | None) -> Tensor | None:
    """``old_logp`` with ``logp``, detached, where a demonstration has none (NaN), so that its ratio is 1.

    ``logp / sg(logp)`` has the value 1 and the gradient of ``log pi``: the token is trained on as if the policy had
    sampled it.

    Args:
        old_logp: [B, T] log-probs (nats) under the policies that sampled; None: unchanged.
        logp: [B, T] the same under the weights being trained.
        origin: [B] indices of ``ORIGINS``; None: nothing is filled.

    >>> from offcorr.training import origin_ids
    >>> old_logp, logp = torch.tensor([[-1.0], [torch.nan]]), torch.tensor([[-2.0], [-3.0]])
    >>> filled(old_logp, logp, torch.tensor(origin_ids(["fresh", "demonstration"])))
    tensor([[-1.],
            [-3.]])
    """
    if old_logp is None or origin is None:
        return old_logp
    unknown = old_logp.isnan() & (origin == DEMONSTRATION)[:, None]
    return torch.where(unknown, logp.detach().to(old_logp), old_logp)
