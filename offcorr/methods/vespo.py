"""VESPO: a smooth function of the sequence ratio in place of a clip.

    dL/dlogp_t = -phi(W) A_t / Z,    phi(W) = W^k exp(lam (1 - W)),  W = prod_t r_t

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; W is detached: phi(W) scales the gradient and receives
none; (k, lam) is (k_pos, lam_pos) for A_t >= 0 and (k_neg, lam_neg) for A_t < 0; A_t is the advantage and Z the
denominator of the aggregation. phi(1) = 1; phi is largest at W = k / lam and falls to 0 for small and for large W.

Source: the paper's text, 2602.10693.
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
    """Surrogate sg(phi(ratio)) A log pi, with phi(W) = W^k exp(lam (1 - W)) (VESPO, 2602.10693).

    phi has the shape of a Gamma density and is 1 at W = 1. The multiplier is phi(ratio).

    Args:
        k_pos, lam_pos: shape and rate for A >= 0; lam_pos > 0.
        k_neg, lam_neg: shape and rate for A < 0; lam_neg > 0.
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
    multiplier="phi(W) = W^k exp(lam (1 - W)), W the product of r over the sequence, k and lam by the sign of A",
    paper="2602.10693",
    provenance="paper text",
)
def vespo(k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0) -> Correction:
    """Surrogate sg(phi(W)) A log pi, with W the ratio of the sequence.

    Args:
        k_pos, lam_pos: shape and rate of phi for A >= 0; lam_pos > 0.
        k_neg, lam_neg: shape and rate of phi for A < 0; lam_neg > 0.

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
