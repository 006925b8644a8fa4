"""REC: REINFORCE with clipping as a mask, with or without the importance ratio.

    dL/dlogp_t = -M_t r_t A_t / Z,  or -M_t A_t / Z with weighted=False

    one-side:  M_t = 1 where r_t <= U for A_t >= 0, r_t >= L for A_t < 0    (weighted: the gradient of PPO)
    two-side:  M_t = 1 where L <= r_t <= U
    ring:      M_t = 1 where two-side, or where r_t is far outside and the gradient leads back:
               r_t <= 1 - eps_low_prime for A_t > 0, r_t >= 1 + eps_high_prime for A_t <= 0

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio, detached; L = 1 - eps_low and U = 1 + eps_high; M_t is 0
elsewhere; A_t is the advantage and Z the denominator of the aggregation.

Source: the authors' code (Trinity-RFT), 2509.24203. The mask is a rejection, so ``reject=`` replaces it;
``weighted=False`` is the paper's NoIS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ops, ratios, rejections
from offcorr.stages.checks import check_choice, check_mismatch, check_number, warn_of_distances, warn_of_unused

Mode = Literal["one-side", "two-side", "ring"]


class Edges(NamedTuple):
    low: float
    high: float
    far_low: float
    far_high: float


def one_side(value: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(value)
    kept = ((advantage >= 0) & (ratio <= p.high)) | ((advantage < 0) & (ratio >= p.low))
    return ops.zeros_like(value) + 1, kept


def two_side(value: Any, p: Any) -> Any:
    ratio = ops.exp(value)
    return ops.zeros_like(value) + 1, (ratio >= p.low) & (ratio <= p.high)


def ring(value: Any, advantage: Any, p: Any) -> Any:
    ratio = ops.exp(value)
    near = (ratio >= p.low) & (ratio <= p.high)
    returning = ((advantage > 0) & (ratio <= p.far_low)) | ((advantage <= 0) & (ratio >= p.far_high))
    return ops.zeros_like(value) + 1, near | returning


RULES = {"one-side": one_side, "two-side": two_side, "ring": ring}


@dataclass(frozen=True)
class REC(rejections.Rejection):
    """Keeps the tokens whose ratio is within a clip's bounds (REC, 2509.24203).

    The rules of the three modes are in the module's docstring.

    Args:
        mode: "one-side", "two-side" or "ring".
        eps_low, eps_high: distances of the bounds from 1.
        eps_low_prime, eps_high_prime: distances of the outer bounds from 1, for "ring".
        mismatch: the pair of policies whose ratio is compared.
    """

    mode: Mode = "one-side"
    eps_low: float = 0.2
    eps_high: float = 0.2
    eps_low_prime: float = 0.6
    eps_high_prime: float = 2.0
    mismatch: Mismatch = "staleness"

    span = "token"

    def __post_init__(self) -> None:
        check_choice(self, "mode", RULES)
        for field in ("eps_low", "eps_high", "eps_low_prime", "eps_high_prime"):
            check_number(self, field, low=0)
            warn_of_distances("REC", **{field: getattr(self, field)})
        warn_of_unused(self, "mode", () if self.mode == "ring" else ("eps_low_prime", "eps_high_prime"))
        check_mismatch(self)

    @property
    def rule(self) -> Any:
        return RULES[self.mode]

    @property
    def params(self) -> Edges:
        return Edges(1 - self.eps_low, 1 + self.eps_high, 1 - self.eps_low_prime, 1 + self.eps_high_prime)


@register(
    "rec",
    multiplier="r, or 1 with weighted=False; the rejection masks one-side, two-side or ring",
    paper="2509.24203",
    provenance="official code",
    notes="the mask is a rejection, so reject= replaces it; weighted=False is the paper's NoIS",
)
def rec(
    mode: Mode = "one-side",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    eps_low_prime: float = 0.6,
    eps_high_prime: float = 2.0,
    weighted: bool = True,
) -> Correction:
    """Surrogate sg(r) A log pi, or A log pi with ``weighted=False``, on the tokens that the mask keeps.

    Args:
        mode: "one-side", "two-side" or "ring".
        eps_low, eps_high: distances of the bounds from 1.
        eps_low_prime, eps_high_prime: distances of the outer bounds from 1, for "ring".
        weighted: whether the ratio multiplies the gradient.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("rec")(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.DetachedRatio() if weighted else gates.ScoreFunction(),
        reject=REC(mode, eps_low, eps_high, eps_low_prime, eps_high_prime),
        aggregate="token-mean",
    )
