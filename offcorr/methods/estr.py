"""ESTR: PPO's clip on the tokens whose log-ratio is small for the entropy of their distribution.

    dL/dlogp_t = -1[D_t^2 <= tau (H_t + floor)] c_t A_t / Z

D_t = logp_t - rollout_logp_t is the token's total log-ratio, not clamped, and c_t is PPO's multiplier of exp(D_t): the
ratio, or 0 where it is clipped (see ``offcorr.methods.ppo``); H_t is the entropy of the token's distribution in nats;
A_t is the advantage and Z the denominator of the aggregation. The mask is detached.

Source: a reader's notes on 2607.22186; the paper's body could not be read. No value of tau has been published where it
could be read, so it has no default; the bounds of the clip are unverified. In the paper H is the entropy of the
behaviour distribution, the sampler's. ``Batch.entropy``, which is taken here, is the trainer's: an approximation,
unless the caller puts the sampler's there.
"""

from __future__ import annotations

from offcorr.correction import Correction
from offcorr.methods.registry import register
from offcorr.stages import gates, ratios, rejections


@register(
    "estr",
    multiplier="as ppo, of R; the rejection drops tokens with log^2 R > tau (H + floor)",
    paper="2607.22186",
    provenance="notes by others about the paper",
    notes="needs entropy, the trainer's for the sampler's: an approximation; tau is unpublished, so it has no default",
    example={"tau": 0.1},
)
def estr(tau: float, floor: float = 0.01, eps_low: float = 0.2, eps_high: float = 0.2) -> Correction:
    """Surrogate min(R A, clip(R) A) on the tokens that are kept.

    Args:
        tau: bound on log^2 R per nat of entropy; no default.
        floor: added to the entropy, in nats.
        eps_low, eps_high: distances from 1.

    >>> import torch, offcorr
    >>> rollout = torch.full((1, 3), -2.0)
    >>> moved = rollout + torch.tensor([0.1, -0.5, 0.15])
    >>> fields = {"rollout_logp": rollout, "entropy": torch.tensor([[0.5, 0.5, 0.1]])}
    >>> batch = offcorr.Batch(logp=moved, advantages=torch.ones(1), mask=moved < 0, **fields)
    >>> -3 * offcorr.get("estr", tau=0.1)(batch).coefficient  # the multipliers
    tensor([[1.1052, 0.0000, 0.0000]])
    """
    return Correction(
        ratio=ratios.Token(mismatch="total"),
        gate=gates.Clip(eps_low, eps_high),
        reject=rejections.ESTR(tau, floor),
        aggregate="token-mean",
    )
