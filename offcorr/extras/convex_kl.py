"""``ConvexKL``: a KL penalty to two references at once, the base model and a recent policy (ReMix, 2507.06892)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offcorr.batch import LOG_LIMIT
from offcorr.stages.aggregate import check_denominator
from offcorr.training.schedules import Linear


class Penalty(NamedTuple):
    """Output of ``ConvexKL``.

    Attributes:
        loss: scalar, differentiable in ``logp``.
        coefficient: dL/dlogp, detached; 0 on masked tokens.
        base, precedent: mean k3 to each reference over the valid tokens (nats), detached.
    """

    loss: Tensor
    coefficient: Tensor
    base: Tensor
    precedent: Tensor


@dataclass(frozen=True)
class ConvexKL:
    """KL penalty that is a convex combination of those to a base model and to a precedent policy.

    L = sum_t m_t (lam k3(log b_t - log pi_t) + (1 - lam) k3(log q_t - log pi_t)) / Z,  k3(d) = e^d - 1 - d,
    for the base model b and the precedent policy q.  The gradient of a token is
    dL/dlogp_t = m_t (lam (1 - b_t / pi_t) + (1 - lam) (1 - q_t / pi_t)) / Z.
    Large lam holds the policy near the base model, small lam lets it move away, a step at a time.

    The combination of the two penalties is ReMix's (2507.06892); the estimator, which is TRL's, and the linear
    schedule are this library's.  On tokens that the policy itself has just sampled the mean of k3 is the KL
    divergence; on older ones it is not, and measures only how far the two are apart on these tokens.

    Args:
        lam: the base model's share, in [0, 1], or a ``offcorr.training.Linear`` from the first step to the last.

    Raises:
        ValueError: a share outside [0, 1].

    >>> import torch
    >>> logp, base = torch.tensor([[0.5, 0.5]]).log().requires_grad_(), torch.tensor([[0.25, 0.5]]).log()
    >>> penalty = ConvexKL(lam=0.5)(logp, base, precedent_logp=logp.detach(), mask=torch.ones(1, 2).bool())
    >>> penalty.coefficient
    tensor([[0.1250, 0.0000]])
    """

    lam: float | Linear = 0.5

    def __post_init__(self) -> None:
        for value in (self.lam.start, self.lam.end) if isinstance(self.lam, Linear) else (self.lam,):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"lam is {self.lam!r}, expected 0 <= lam <= 1")

    def share(self, done: float = 0.0) -> float:
        """The base model's share when the share ``done`` of the training is done."""
        return self.lam.at(done) if isinstance(self.lam, Linear) else float(self.lam)

    def __call__(
        self,
        logp: Tensor,
        base_logp: Tensor,
        precedent_logp: Tensor,
        mask: Tensor,
        *,
        denominator: float | Tensor | None = None,
        done: float = 0.0,
    ) -> Penalty:
        """Returns the penalty, to be multiplied by its weight (TRL's ``beta``) and added to the policy's loss.

        Args:
            logp: [B, T] or [N], log-probs (nats) under the weights being trained.
            base_logp, precedent_logp: same shape, log-probs of the same tokens under the two references.
            mask: same shape, bool: the valid tokens.
            denominator: Z, the number of valid tokens of the whole optimizer step; None: of these.
            done: share of the training that is done, for a scheduled ``lam``.

        Raises:
            ValueError: the shapes differ, or the denominator is not positive.
        """
        for name, values in (("base_logp", base_logp), ("precedent_logp", precedent_logp), ("mask", mask)):
            if values.shape != logp.shape:
                raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(logp.shape)}, that of logp")
        if denominator is not None:
            check_denominator(denominator)
        share, valid = self.share(done), mask.bool()
        count = valid.sum().clamp(min=1)
        parts = [_k3(logp, reference, valid) for reference in (base_logp, precedent_logp)]
        mixed = share * parts[0][0] + (1 - share) * parts[1][0]
        slope = share * parts[0][1] + (1 - share) * parts[1][1]
        z = count if denominator is None else denominator
        means = [part[0].detach().sum() / count for part in parts]
        return Penalty(mixed.sum() / z, slope / z, *means)


def _k3(logp: Tensor, reference: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """k3 of each token and its derivative with respect to ``logp``; 0 where a token is masked."""
    gap = torch.where(valid, reference.detach() - logp, 0).clamp(-LOG_LIMIT, LOG_LIMIT)
    return gap.exp() - 1 - gap, torch.where(gap.abs() < LOG_LIMIT, 1 - gap.exp(), 0).detach()
