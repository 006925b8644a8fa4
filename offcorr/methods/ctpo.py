"""CTPO: a clip of the prefix ratio between bounds that change with the position.

    dL/dlogp_t = -c_t A_t / Z,    P_t = prod_{s <= t} r_s
    c_t = P_t, unless P_t is outside [exp(-log_low t^power), exp(log_high t^power)] on the side that the advantage
          pushes towards (above for A_t > 0, below for A_t < 0): then 0
    c_t = 0 also for A_t < 0 and P_t > exp(log_dual t^power);  log_dual is log_high unless given

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; t counts valid tokens from 1; A_t is the advantage and Z
the denominator of the aggregation. log P_t is capped at 10, from above alone. With ``level="prefix_geometric"`` the
t-th root of P_t takes the place of P_t; its gradient keeps the token form, without a factor 1/t. The authors' script
for it has power -.5, with which the bounds narrow with the position.

Source: the authors' code, 2605.07331; for the root its branch cum-token-geomean-la. Their script adds a truncated
sequence weight of cap 5: ``weight=offcorr.weights.Truncate(5.0, level="sequence")``.
"""

from __future__ import annotations

from typing import Literal

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios
from offcorr.stages.checks import check_word


@register(
    "ctpo",
    multiplier="P, the prefix ratio or its t-th root; 0 where clipped (above exp(log_high t^power) for A > 0; below "
    "exp(-log_low t^power) or above exp(log_dual t^power) for A < 0), log_dual = log_high unless given",
    paper="2605.07331",
    provenance="official code",
    notes="the authors' script adds a sequence weight truncated at 5; their script for level='prefix_geometric' has "
    "power -.5",
)
def ctpo(
    log_low: float = 0.025,
    log_high: float = 0.05,
    power: float = 0.5,
    log_dual: float | None = None,
    level: Literal["prefix", "prefix_geometric"] = "prefix",
) -> Correction:
    """Surrogate min(P A, clip(P) A), with P the prefix ratio and bounds that depend on the position t.

    Args:
        log_low, log_high: distances of the bounds from 0 in log space at t = 1, in nats.
        power: exponent of t, of either sign.
        log_dual: bound in nats for A < 0: the loss term is at most exp(log_dual t^power) |A|; None: ``log_high``.
        level: "prefix", or "prefix_geometric", which takes the t-th root of the prefix ratio for P.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("ctpo")(batch).coefficient  # the multipliers
    tensor([[0., 1., 0.]])
    """
    check_word("ctpo", "level", level, ("prefix", "prefix_geometric"))
    return Correction(
        ratio=ratios.Prefix() if level == "prefix" else ratios.PrefixGeometric(),
        gate=gates.PositionClip(log_low, log_high, power, log_dual),
        aggregate="token-mean",
    )
