"""Causes in the sampled distribution that neither side's log-probs carry: only the surprisal balance shows them."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.sampling import PROCESSED
from offcorr.diagnose.evidence import Estimate, Evidence
from offcorr.diagnose.record import Floats


def _unlogged(evidence: Evidence, sign: int) -> Estimate | None:
    """The surprisal balance where it is off by more than policies that differ this little can make it."""
    balance = evidence.balance
    if balance is None or not evidence.balanced or balance.z * sign < (4 if sign < 0 else 3.5):
        return None
    # The entropy may be of the weights after the updates on this batch.
    return balance if abs(balance.value) > 2 * (evidence.gap + evidence.moved) else None


class TemperatureSilent(Cause):
    """The tokens were drawn at a temperature that neither side's log-probs carry."""

    id = "temperature_silent"
    stage = "unlogged"
    title = "the sampler applies a temperature, and both sides log log-probs without it"
    advice = f"set the sampler's temperature= for the trainer, too, and {PROCESSED}"
    not_told_from = (Alternative("a penalty on repeated tokens, or min_p", "read the engine's sampling options"),)

    def found(self, evidence: Evidence) -> Found | None:
        for sign in (-1, 1):
            balance = _unlogged(evidence, sign)
            if balance is None or (_never_rare(evidence) if sign < 0 else _where_certain(evidence)):
                continue
            return _silent(evidence, balance, "less" if sign < 0 else "more")
        return None


class TopPSilent(Cause):
    """No unlikely token was drawn where the likeliest holds most of the mass."""

    id = "top_p_silent"
    stage = "unlogged"
    title = "the sampler truncates (top_p), and both sides log log-probs of the untruncated distribution"
    advice = f"sample with top_p=1.0, top_k=0, min_p=0.0, and {PROCESSED}"

    def found(self, evidence: Evidence) -> Found | None:
        balance = _unlogged(evidence, -1)
        if balance is None or not _never_rare(evidence):
            return None
        return _silent(
            evidence,
            balance,
            "less",
            ", and almost no unlikely token was drawn where one token has most of the probability",
        )


class PenaltySilent(Cause):
    """The tokens are more surprising than they should be, most of all where the trainer is nearly certain."""

    id = "penalty_silent"
    stage = "unlogged"
    title = "the sampler penalises tokens that were seen before, and both sides log log-probs without that penalty"
    advice = f"sample with repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0, and {PROCESSED}"

    def found(self, evidence: Evidence) -> Found | None:
        balance = _unlogged(evidence, 1)
        if balance is None or not _where_certain(evidence):
            return None
        return _silent(evidence, balance, "more", ", most of all where the trainer is nearly certain")


def _silent(evidence: Evidence, balance: Estimate, which: str, more: str = "") -> Found:
    return Found(
        balance.value,
        balance.error,
        3.5 * balance.error,
        abs(balance.z) / 8,
        f"the sampled tokens are {which} surprising than draws from the trainer's distributions would be, by "
        f"{abs(balance.value):.3f} nats per token, although the two log-probs agree (mean |d| {evidence.gap:.2g} nats)"
        f"{more}",
        evidence.unbalanced(),
        share=1.0,
    )


def _never_rare(evidence: Evidence) -> bool:
    """Whether no token below a share was drawn in any context whose entropy shows that one token has more than it.

    The least entropy without a token of more than a share s is that of (s, 1 - s).  Draws at the temperature that the
    other contexts suggest would hold a few such tokens.
    """
    known = evidence.with_entropy
    if known is None or known.entropy is None:
        return False
    h, t = known.entropy, known.trainer
    flat = (h > np.log(2)) & (h < 2.5)
    if flat.sum() < 16:
        return False
    surprise = (-t - h)[flat]
    power = float(np.clip(1 - surprise.mean() / surprise.var(), 1.03, 2.0))  # to first order in 1 / T - 1
    grid = np.linspace(1e-6, 0.5, 4000)
    rare = np.interp(np.minimum(h, np.log(2)), _binary(grid), grid)
    tempered = rare**power / (rare**power + (1 - rare) ** power)
    for share in (0.7, 0.8, 0.9, 0.95, 0.98):
        sure = h < _binary(np.array(share))
        drawn, expected = int((t[sure] < np.log(share) - 1e-3).sum()), float(tempered[sure].sum())
        if expected >= 2.5 and (drawn == 0 or drawn < 0.02 * expected):
            return True
    return False


def _binary(share: Floats) -> Floats:
    return -(share * np.log(share) + (1 - share) * np.log(1 - share))


def _where_certain(evidence: Evidence) -> bool:
    """Whether the excess of surprise is largest, relative to the entropy, where the trainer is nearly certain.

    A temperature scales all contexts; a penalty overturns those whose likeliest token was seen before.
    """
    known = evidence.with_entropy
    if known is None or known.entropy is None:
        return False
    h, surprise = known.entropy, -known.trainer - known.entropy
    low, high = (h > 0.05) & (h < np.log(2)), h > np.log(2)
    if min(low.sum(), high.sum()) < 16:
        return False
    among = [float(surprise[some].mean() / h[some].mean()) for some in (low, high)]
    return among[0] > 4 * max(among[1], 0.01)
