"""P3O: ratios capped by the batch's effective sample size, and a KL penalty that grows as it falls.

    dL/dlogp_t = -(min(R_t, e) A_t - (1 - e) (1 - 1 / R_t)) / Z

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio, e = (sum R)^2 / (n sum R^2) the effective share of the n
valid tokens of the global batch, which is at most 1; A_t is the advantage and Z the denominator of the aggregation. The
cap is detached. The penalty is k = log R + 1 / R - 1, whose gradient 1 - 1 / R pulls back from both sides; it does not
depend on the advantage, and acts on tokens without one too. As e <= 1, a token with R = 1 is damped in a batch that has
drifted.

Source: 2605.12380 and the code of FeynRL, whose old log-probs are the engine's. Its e is that of a micro-batch over
ranks, this one's that of the global batch. As in its code the exponent of 1 / R is limited to +-10
nats, in the penalty and in its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import Tokens
from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ops, ratios
from offcorr.stages.base import Number
from offcorr.stages.checks import check_mismatch, check_number
from offcorr.stages.controllers import Controller


class Share(NamedTuple):
    share: Number


def capped_by_share(log_ratio: Any, value: Any, logp: Any, advantage: Any, p: Any) -> Any:
    gradient = ops.minimum(ops.exp(value), p.share) * advantage
    exponent = ops.clamp(-value, -10.0, 10.0) + (value - log_ratio)  # the gradient passes the limit
    excess = ops.expm1_minus(exponent)  # 1 / R - 1 + log R, inside the limit
    surrogate = gradient * logp - (1 - p.share) * (excess + exponent + log_ratio)
    return surrogate, gradient + (1 - p.share) * (excess + exponent)


@dataclass(frozen=True)
class EssCapped(gates.Gate):
    """Surrogate sg(min(ratio, share)) A log pi - (1 - share) (log ratio + 1 / ratio - 1), for ratios in token form.

    The derivative is min(ratio, share) A - (1 - share) (1 - 1 / ratio), the exponent of 1 / ratio limited to +-10.

    Args:
        share: the effective share of the batch's tokens, from 0 to 1.
    """

    share: Number

    surrogate = staticmethod(capped_by_share)
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "share", low=0, high=1)

    @property
    def params(self) -> Share:
        return Share(self.share)


@dataclass(frozen=True, eq=False)
class RatioMoments:
    """Logarithms of the sums of the ratios and of their squares, unclamped, and the number of tokens; 0-dim."""

    first: Tensor
    second: Tensor
    count: Tensor

    def merge(self, other: RatioMoments) -> RatioMoments:
        """Both batches."""
        return RatioMoments(
            torch.logaddexp(self.first, other.first),
            torch.logaddexp(self.second, other.second),
            self.count + other.count,
        )


@dataclass(frozen=True)
class EssCap(Controller):
    """``EssCapped`` with the effective share of the global batch (P3O, 2605.12380).

    It is (sum ratio)^2 / (n sum ratio^2) over the n valid tokens, of ratios that are not clamped; 1 where there is no
    token.

    Args:
        mismatch: the pair of policies whose token ratios give e; the ratio's.
    """

    mismatch: Mismatch = "total"

    becomes, couples = "gate", "batch"
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_mismatch(self)

    def statistics(self, tokens: Tokens) -> RatioMoments:
        d = torch.where(tokens.trainable, tokens.log_ratio(self.mismatch).raw.double(), -torch.inf).flatten()
        return RatioMoments(d.logsumexp(0), (2 * d).logsumexp(0), tokens.trainable.sum().double())

    def resolve(self, statistics: RatioMoments) -> EssCapped:
        """The gate with this share, a 0-dim tensor."""
        share = (2 * statistics.first - statistics.second - statistics.count.log()).exp()
        return EssCapped(torch.where(statistics.count > 0, share.clamp(max=1), 1))

    def logged(self, resolved: EssCapped) -> dict[str, Number]:
        """The effective share, which is also the cap."""
        return {"ess_share": resolved.share}


@register(
    "p3o",
    multiplier="min(R, e) - (1 - e) (1 - 1 / R) / A, e the effective share of the batch's tokens; the exponent of "
    "1 / R limited to +-10",
    paper="2605.12380",
    provenance="framework code (FeynRL)",
    notes="the token-level heir of 1905.01756, not pairwise PPO (2310.00212); the penalty acts where A = 0 too; FeynRL "
    "computes e per micro-batch, this method over the global batch; as in its code the exponent of 1 / R is "
    "limited to +-10 nats",
)
def p3o() -> Correction:
    """Surrogate sg(min(R, e)) A log pi - (1 - e) (log R + 1 / R - 1), the exponent of 1 / R within +-10; no options.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=torch.ones(1), mask=moved < 0)
    >>> -3 * offcorr.get("p3o")(batch).coefficient  # the multipliers
    tensor([[0.7034, 0.7446, 0.6526]])
    """
    return Correction(ratio=ratios.Token(mismatch="total"), gate=EssCap(), aggregate="token-mean")
