"""SAPO: a soft gate in place of the clip.

dL/dlogp_t = -r_t sech^2(tau (r_t - 1) / 2) A_t / Z, tau by the sign of A.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "sapo",
    multiplier="r sech^2(tau (r - 1) / 2)",
    paper="2511.20347",
    provenance="paper text; equals TRL's code (tested)",
)
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Correction:
    """(4 / tau) sigmoid(tau (r - 1)) A.

    >>> import torch, offcorr
    >>> old = torch.full((1, 3), -2.0)
    >>> moved = old + torch.tensor([0.5, -0.5, 1.0])
    >>> batch = offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=old < 0)
    >>> -3 * offcorr.get("sapo")(batch).coefficient  # the multipliers
    tensor([[1.4867, 0.5836, 1.4022]])
    """
    return Correction(
        ratio=ratios.Token(),
        gate=gates.SoftClip(tau_pos, tau_neg),
        aggregate="seq-mean-token-mean",
    )
