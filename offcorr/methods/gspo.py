"""GSPO: clip the geometric ratio of the sequence.

dL/dlogp_t = -c_t A_t / Z, c_t = s inside or recovering, else 0; s = (prod r)^(1/T).
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "gspo",
    multiplier="s inside or recovering, else 0",
    paper="2507.18071",
    provenance="paper text; equals TRL's code (tested)",
)
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4, dual_clip: float | None = None) -> Correction:
    """min(s A, clip(s) A), s the geometric ratio, in token form.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("gspo")(batch).coefficient  # the multipliers
    tensor([[0., 0., 0.]])
    """
    return Correction(
        ratio=ratios.Geometric(),
        gate=gates.Clip(eps_low, eps_high, dual_clip),
        aggregate="seq-mean-token-mean",
    )
