"""VACO's mask: in sequences that have drifted, tokens that move on are dropped and tokens that move back are kept.

dL/dlogp_t = -r_t 1[A_t log R_t <= 0 or mean_t |R_t - 1| <= bound] A_t / Z, R the total ratio.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "vaco",
    multiplier="r unless far and moving on, then 0",
    paper="2603.01365",
    provenance="framework code",
    notes="the mask in the place of a clip; its bound is a guess; compares r where there is no rollout_logp",
)
def vaco(bound: float = 0.2) -> Correction:
    """r A on what the mask keeps.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("vaco")(batch).coefficient  # the multipliers
    tensor([[0.0000, 0.6065, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(), gate=gates.Unclipped(), reject=rejections.VACO(bound), aggregate="token-mean"
    )
