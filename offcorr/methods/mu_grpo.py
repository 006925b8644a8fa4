"""mu-GRPO: a wide clip on the total ratio, without what follows a token that the policy has all but given up.

    dL/dlogp_t = -M_t c_t A_t / Z
    M_t = 0 where A_t < 0 and some valid token before t has R < threshold, otherwise 1
    c_t = R_t, unless R_t > 1 + eps_high for A_t > 0, or R_t < 1 - eps_low for A_t < 0: then 0

R_t = exp(logp_t - rollout_logp_t) is the token's total ratio, not clamped against the threshold; A_t is the advantage
and Z the denominator of the aggregation. The token below the threshold is itself kept; by the paper, dropping such
tokens alone still collapses. ``veto`` drops the whole sequence instead.

Source: the authors' page of 2605.17570. The threshold and the clip [0, 5] are its illustration and a figure's caption;
the paper's table could not be read, and the aggregation is unverified.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "mu_grpo",
    multiplier="R; 0 where clipped; the rejection drops tokens with A < 0 after a token with R < threshold",
    paper="2605.17570",
    provenance="authors' page",
    notes="threshold and clip stand on the authors' page as an illustration; the aggregation is unverified",
)
def mu_grpo(threshold: float = 1e-4, eps_low: float = 1.0, eps_high: float = 4.0) -> Correction:
    """Surrogate min(R A, clip(R) A) on the tokens that are kept.

    Args:
        threshold: lower bound on R, above 0; what follows a token below it is dropped where A < 0.
        eps_low, eps_high: distances from 1.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, rollout_logp=rollout, advantages=-torch.ones(1), mask=moved < 0)
    >>> 3 * offcorr.get("mu_grpo", threshold=0.7)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.Clip(eps_low, eps_high),
        reject=rejections.SuffixVeto(threshold),
        aggregate="seq-mean-token-mean",
    )
