"""A number that one side adds to the logits of a few tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.sampling import power
from offcorr.diagnose.causes.versions import VERSIONS, same_version
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Integers

SMALL = 0.3
"""d below this share of its mean size, or of what a tenth of the tokens exceed, has no sign that counts."""

PURE = 0.95
"""Share of either sign that has to follow from the token id."""

LEAST = 0.3
"""Nats between the mean d of the two sets of ids, at least: about the bias, which rounding does not reach."""

LEVEL = 0.25
"""Spread of the mean d of the other ids, in units of the distance of the few from them, that is none of other weights,
which move each id by an amount of its own."""

CONVINCING = 30.0
"""Nats by which the token ids have to tell the signs better than chance does."""

TEMPERED = 0.95
"""Share of the spread of d from which a temperature is the better explanation."""

LISTED = 8
"""Token ids that a sentence names at most."""

SURE, ALSO_UPDATES = 0.8, 0.65
"""The most that a bias is sure, and where updates that rewarded a few tokens may leave the same."""


class Signs(NamedTuple):
    """The sign of d as a function of the token id.

    Args:
        ids: those with the rarer sign.
        follows: share of the tokens of either sign, the smaller one, whose sign is that of most of their id.
        nats: the log-likelihood of the signs given the ids, above that of as many signs at random.
        above: the sign of d of ``ids`` is +.
    """

    ids: Integers
    follows: float
    nats: float
    above: bool

    @classmethod
    def of(cls, evidence: Evidence) -> Signs | None:
        """None: one of the signs does not occur, or not by id."""
        if not len(evidence):
            return None
        large = evidence.size > SMALL * min(evidence.gap, float(np.quantile(evidence.size, 0.9)))
        above = evidence.d[large] > 0
        known, same = np.unique(evidence.ids[large], return_inverse=True)
        count = np.bincount(same, minlength=len(known))
        up = np.bincount(same, above, minlength=len(known))
        mostly = up > count / 2
        rarer = bool(mostly.mean() < 0.5)  # whether fewer ids have a d above 0
        chosen = mostly == rarer
        share = float((above == rarer).mean())
        few = chosen[same]  # whether the token has one of these ids
        if not few.any() or few.all() or not 0 < share < 1:
            return None
        chance = -len(above) * (share * np.log(share) + (1 - share) * np.log(1 - share))
        right = few == (above == rarer)
        follows = min(float(right[side].mean()) for side in (above, ~above))
        told = float(chance - chosen.sum() * np.log(len(known)))
        return cls(known[chosen], follows, told, rarer)


def _spread_by_id(evidence: Evidence) -> float:
    """The standard deviation of the mean d of the token ids that occur three times."""
    _, same, count = np.unique(evidence.ids, return_inverse=True, return_counts=True)
    often = count >= 3
    if not often.any():
        return 0.0
    level, weight = np.bincount(same, evidence.d)[often] / count[often], count[often]
    return float(np.sqrt(np.average((level - np.average(level, weights=weight)) ** 2, weights=weight)))


def _listed(ids: Integers) -> str:
    return " or ".join(map(str, ids)) if len(ids) <= LISTED else f"{', '.join(map(str, ids[:LISTED]))}, …"


class LogitBias(Cause):
    """The sign of d follows from the token id: one for a few ids and the other for the rest."""

    id = "logit_bias"
    stage = "sampling"
    title = "one side adds a number to the logits of a few tokens, and the other does not"
    advice = (
        "sample without logit_bias, bad_words and logits processors, and look for a loop of your own that changes the "
        "logits of these tokens"
    )
    not_told_from = (
        Alternative(
            "updates that rewarded, or punished, these tokens everywhere",
            "give --model and, as --checkpoint, the weights that sampled",
            fields=VERSIONS,
            settled=same_version,
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor or evidence.selected:
            return None
        signs = Signs.of(evidence)
        if signs is None or signs.follows < PURE or signs.nats < CONVINCING:
            return None
        chosen = np.isin(evidence.ids, signs.ids)
        rest = evidence.keep(~chosen)
        apart = float(evidence.d[chosen].mean() - rest.d.mean())
        if abs(apart) < LEAST or _spread_by_id(rest) > LEVEL * abs(apart) or power(rest).explained > TEMPERED:
            return None
        few, most = ("above", "below") if signs.above else ("below", "above")
        return Found(
            signs.follows,
            float(np.sqrt(signs.follows * (1 - signs.follows) / len(evidence))),
            PURE,
            1.0 + 2 * float(np.log(signs.nats / CONVINCING)),
            f"d is {few} 0 at tokens with the id {_listed(signs.ids)} (mean {evidence.d[chosen].mean():+.2g}), and "
            f"{most} 0 at the others (mean {rest.d.mean():+.2g}), for {100 * signs.follows:.3g} % of either; other "
            "weights differ in both directions at an id",
            at_most=True,
            surest=SURE if same_version(evidence) else ALSO_UPDATES,
        )
