"""M2PO: importance sampling without the tokens that contribute most to the second moment of the log-ratio.

    dL/dlogp_t = -r_t A_t / Z on the tokens that are kept, 0 on the others

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio, not clamped in log^2 r; A_t is the advantage and Z the
denominator of the aggregation. A token is outward where A log r > 0: it has moved in the direction that the advantage
pushes. The outward tokens with the largest log^2 r are dropped until the mean of log^2 r over the remaining outward
ones is at most tau; the others are always kept. There is one threshold for the global batch, found by an exact sort.

``tokens="all"`` counts every token and may drop any. ``mode="clip"`` is PPO's clip at exp(-sqrt u) and exp(sqrt u) in
place of the mask, where u solves mean(min(log^2 r, u)) = tau over the outward tokens.

Source: the final version of 2510.01161, algorithm 1 (the outward mask), its first version as AReaL reads it
(``tokens="all"``), and the authors' code (``mode="clip"``). AReaL compares old_logp with rollout_logp, takes one
threshold per micro-batch, and applies the mask to PPO's clipped surrogate. The authors' code takes the sign of A from
the first token of a sequence, works per micro-batch, and stops at the square below u; its floors are off. The pull
requests of ms-swift (9965) and Trinity-RFT (615, 616) compare logp with rollout_logp: ``mismatch="total"``.
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.shapes import Mismatch
from offcorr.stages import gates, ratios
from offcorr.stages.controllers import MomentBudget, MomentClip


@register(
    "m2po",
    multiplier="r; the rejection drops the outward tokens (A log r > 0) with the largest log^2 r",
    paper="2510.01161",
    provenance="paper text (final version); official code for mode='clip'",
    notes="over the global batch; AReaL counts all tokens, compares old_logp with rollout_logp, per micro-batch, and "
    "keeps PPO's clip; ms-swift and Trinity-RFT compare with rollout_logp: mismatch='total'",
)
def m2po(
    tau: float = 0.04,
    tokens: Literal["outward", "all"] = "outward",
    mode: Literal["mask", "clip"] = "mask",
    mismatch: Mismatch = "staleness",
    floor_low: float | None = None,
    floor_high: float | None = None,
) -> Correction:
    """Surrogate r A on the tokens that are kept, or min(r A, clip(r) A) with ``mode="clip"``.

    Args:
        tau: bound on the mean of log^2 r, in nats^2.
        tokens: "outward": the mean is over the outward tokens, and no other is dropped; "all": over every token.
        mode: "mask" drops tokens; "clip" clips the ratio of outward tokens.
        mismatch: the pair of policies that r compares.
        floor_low, floor_high: with "clip", distances from 1 that are never clipped; None: no floor.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("m2po", tau=0.25)(batch).coefficient  # the multipliers
    tensor([[1.6487, 0.6065, 0.0000]])
    """
    if mode not in ("mask", "clip"):
        raise ValueError(f"m2po: mode is {mode!r}, expected 'mask' or 'clip'")
    if mode == "clip" and tokens != "outward":
        raise ValueError(f"m2po: tokens is {tokens!r} with mode 'clip', expected 'outward': a clip cuts no other")
    if mode == "mask" and (floor_low is not None or floor_high is not None):
        raise ValueError(
            f"m2po: floor_low is {floor_low!r} and floor_high is {floor_high!r} with mode 'mask', expected None: "
            "they are floors of a clip"
        )
    clip = mode == "clip"
    return Correction(
        ratio=ratios.Token(mismatch=mismatch),
        gate=MomentClip(tau, floor_low, floor_high, mismatch) if clip else gates.Unclipped(),
        reject=None if clip else MomentBudget(tau, tokens, mismatch),
        aggregate="token-mean",
    )
