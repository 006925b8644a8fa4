"""SAPO: a smooth gate in place of the clip.

    dL/dlogp_t = -c_t A_t / Z,    c_t = r_t sech^2(tau (r_t - 1) / 2)

r_t = exp(logp_t - old_logp_t) is the token's staleness ratio; tau is tau_pos for A_t > 0 and tau_neg for A_t <= 0; A_t
is the advantage and Z the denominator of the aggregation.

Source: the paper's text, 2511.20347; tested to equal TRL's loss.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios


@register(
    "sapo",
    multiplier="r sech^2(tau (r - 1) / 2), tau by the sign of A",
    paper="2511.20347",
    provenance="paper text; tested to equal TRL's code",
)
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Correction:
    """Surrogate (4 / tau) sigmoid(tau (r - 1)) A, with tau chosen by the sign of A.

    Args:
        tau_pos, tau_neg: temperatures for A > 0 and A <= 0, above 0; a larger one narrows the gate.

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
