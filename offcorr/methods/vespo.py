"""VESPO: a smooth kernel of the sequence ratio in place of a clip.

dL/dlogp_t = -phi(W) A_t / Z, W the sequence ratio, detached, phi(W) = W^k exp(lam (1 - W)), (k, lam) by the sign of A.
phi(1) = 1; the largest phi is at W = k / lam; far out on either side it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ops, ratios
from offcorr.stages.checks import check_number


class Shapes(NamedTuple):
    k_pos: float
    lam_pos: float
    k_neg: float
    lam_neg: float


def gamma_kernel(log_ratio: Any, logp: Any, advantage: Any, p: Any) -> Any:
    k = ops.where(advantage >= 0, ops.zeros_like(log_ratio) + p.k_pos, p.k_neg)
    lam = ops.where(advantage >= 0, ops.zeros_like(log_ratio) + p.lam_pos, p.lam_neg)
    gradient = ops.exp(lam + k * log_ratio - lam * ops.exp(log_ratio)) * advantage
    return gradient * logp, gradient


@dataclass(frozen=True)
class GammaKernel(gates.Gate):
    """sg(phi(ratio)) A log pi, phi(W) = W^k exp(lam (1 - W)): a Gamma density's shape, 1 at W = 1.

    Args:
        k_pos, lam_pos: shape and rate where A >= 0.
        k_neg, lam_neg: shape and rate where A < 0.
    """

    k_pos: float = 2.0
    lam_pos: float = 3.0
    k_neg: float = 3.0
    lam_neg: float = 2.0

    surrogate = staticmethod(gamma_kernel)
    detached = True

    def __post_init__(self) -> None:
        for field in Shapes._fields:
            check_number(self, field, low=0, above=field.startswith("lam"))

    @property
    def params(self) -> Shapes:
        return Shapes(self.k_pos, self.lam_pos, self.k_neg, self.lam_neg)


@register(
    "vespo",
    multiplier="phi(W) = W^k exp(lam (1 - W))",
    paper="2602.10693",
    provenance="paper text",
)
def vespo(k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0) -> Correction:
    """sg(phi(sequence ratio)) A log pi.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("vespo")(batch).coefficient  # the multipliers
    tensor([[0.0426, 0.0426, 0.0426]])
    """
    return Correction(
        ratio=ratios.Sequence(),
        gate=GammaKernel(k_pos, lam_pos, k_neg, lam_neg),
        aggregate="token-mean",
    )
