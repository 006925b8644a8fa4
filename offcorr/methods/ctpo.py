"""CTPO: clip the prefix ratio, between bounds that widen with position.

dL/dlogp_t = -c_t A_t / Z, c_t = the prefix ratio where it is inside [exp(-log_low t^power), exp(log_high t^power)] or
recovering, else 0; for A < 0 it is 0 above exp(log_dual t^power) too.  t is the 1-based count of valid tokens, and the
log-ratio is capped at 10.  The authors' script adds seq_tis at cap 5:
``weight=weights.Truncate(5.0, level="sequence")``.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "ctpo",
    multiplier="prefix ratio inside or recovering, else 0",
    paper="2605.07331",
    provenance="official code",
)
def ctpo(
    log_low: float = 0.025,
    log_high: float = 0.05,
    power: float = 0.5,
    log_dual: float | None = None,
) -> Correction:
    """min(R A, clip(R) A), R the prefix ratio; ``log_dual`` None: ``log_high``.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("ctpo")(batch).coefficient  # the multipliers
    tensor([[0., 1., 0.]])
    """
    return Correction(
        ratio=ratios.Prefix(),
        gate=gates.PositionClip(log_low, log_high, power, log_dual),
        aggregate="token-mean",
    )
