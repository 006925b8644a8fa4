"""OPMD, as in Trinity-RFT: REINFORCE with a step shortened by 1 + tau.

dL/dlogp_t = -A_t / ((1 + tau) Z).  No ratio: what regularises is the length of the step alone.
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


def shortened(logp: Any, advantage: Any, p: Any) -> Any:
    gradient = advantage / (1 + p.tau)
    return gradient * logp, gradient


@dataclass(frozen=True)
class Shortened(gates.Gate):
    """A log pi / (1 + tau): no ratio, multiplier 1 / (1 + tau)."""

    tau: float = 1.0

    surrogate = staticmethod(shortened)
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
    paper="Trinity-RFT 2505.17826",
    provenance="official code",
    on_policy=False,
    notes="Kimi's online mirror descent has another loss: see kimi",
)
def opmd(tau: float = 1.0) -> Correction:
    """A log pi / (1 + tau).

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("opmd")(batch).coefficient  # the multipliers
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    return Correction(ratio=None, gate=Shortened(tau), aggregate="token-mean")
