"""OPMD as in Trinity-RFT: REINFORCE with a gradient divided by 1 + tau.

    dL/dlogp_t = -A_t / ((1 + tau) Z)

A_t is the advantage and Z the denominator of the aggregation. There is no ratio: the division is the only
regularisation.

Source: Trinity-RFT's code, 2505.17826. Kimi's online policy mirror descent is a different loss (see ``kimi``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates
from offcorr.stages.checks import check_number


class Temperature(NamedTuple):
    tau: float


def scaled_score(logp: Any, advantage: Any, p: Any) -> Any:
    gradient = advantage / (1 + p.tau)
    return gradient * logp, gradient


@dataclass(frozen=True)
class ScaledScore(gates.Gate):
    """Surrogate A log pi / (1 + tau), without a ratio; the multiplier is 1 / (1 + tau) (Trinity-RFT, 2505.17826).

    Args:
        tau: strength of the regularisation, >= 0.
    """

    tau: float = 1.0

    surrogate = staticmethod(scaled_score)
    detached = True
    uses_ratio = False

    def __post_init__(self) -> None:
        check_number(self, "tau", low=0)

    @property
    def params(self) -> Temperature:
        return Temperature(self.tau)


@register(
    "opmd",
    multiplier="1 / (1 + tau)",
    paper="2505.17826 (Trinity-RFT)",
    provenance="official code",
    on_policy=False,
    notes="on-policy c is 1 / (1 + tau), not 1; Kimi's online policy mirror descent is a different loss: see kimi",
)
def opmd(tau: float = 1.0) -> Correction:
    """Surrogate A log pi / (1 + tau).

    Args:
        tau: strength of the regularisation, >= 0.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("opmd")(batch).coefficient  # the multipliers
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    return Correction(ratio=None, gate=ScaledScore(tau), aggregate="token-mean")
