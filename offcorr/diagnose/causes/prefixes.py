"""Different tokens after one prompt and prefix, as samples of one prompt have at their beginnings.

A temperature multiplies the differences between their log-probs by one factor, whatever the prefix; a truncation leaves
them as they are, and other weights do neither.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offcorr.diagnose.evidence import Booleans, Evidence
from offcorr.diagnose.record import Floats, Integers

CHOICES, APART = 24, 0.05
"""Different tokens after shared prefixes that a temperature is read of, at least, and how far from the mean of their
prefix (nats) their log-probs are on average, at least."""

SURELY, ONE_FACTOR, NO_FACTOR = 0.07, 0.1, 0.25
"""Share of the difference that a factor leaves: up to the second it is a temperature (which leaves up to .055 beside
int8, a softcap mostly .25 or more, updates that rewarded one token .3, a clamp .44), surely up to the first (a softcap
that squeezes the logits to a quarter has left .072), and above the third it is something else, or there is something
else besides."""


NEAR_A_BASE = 0.005
"""Relative distance from 1 / ln 2, or 1 / ln 10, of the median quotient of two log-probs, up to which another
difference may stand beside the base; a division by .7 is .01 away."""


def between_bases(factor: float) -> bool:
    """Whether a factor on log-probs is that between logarithms to two of the bases e, 2 and 10."""
    logarithms = np.log(np.log([np.e, 2, 10]))
    apart = np.abs(np.log(factor) - (logarithms[:, None] - logarithms))
    return bool(apart[~np.eye(3, dtype=bool)].min() < NEAR_A_BASE)


class Factor(NamedTuple):
    """The factor between both sides' log-probs of different tokens after one prefix, less their means.

    A temperature is such a factor, whatever the prefix; what it does to the normaliser is common to the tokens.

    Args:
        value: the factor.
        spread: mean size of the trainer's log-probs, less their means (nats).
        gap: mean difference of the two sides' log-probs, less those means (nats).
        left: the same once the trainer's are multiplied.
        tokens: how many there are.
    """

    value: float
    spread: float
    gap: float
    left: float
    tokens: int

    @property
    def alone(self) -> bool:
        """Whether it explains nearly all of the difference."""
        return 0.2 < self.value < 5 and abs(self.value - 1) >= 0.02 and self.left <= ONE_FACTOR * self.gap

    @property
    def far(self) -> bool:
        """Whether it leaves so much of the difference that something else made most of it, or all."""
        return self.left > NO_FACTOR * self.gap


def factor(evidence: Evidence) -> Factor | None:
    """The factor, where samples of one prompt share enough prefixes and go on in different ways.

    First tokens are enough, where there are enough of them: few samples share longer prefixes.
    """
    rows, prefix = choices(evidence)
    if len(rows) < CHOICES:
        return None
    trainer, sampler = (centred(side[rows], prefix) for side in (evidence.trainer, evidence.sampler))
    if (spread := float(np.abs(trainer).mean())) < APART:
        return None
    value = float((trainer * sampler).sum() / np.square(trainer).sum())
    gap, left = (float(np.abs(sampler - by * trainer).mean()) for by in (1, value))
    return Factor(value, spread, gap, left, len(rows))


def choices(evidence: Evidence, among: Booleans | None = None) -> tuple[Integers, Integers]:
    """Tokens that follow one prefix with others of another id, each id once, and the number of that prefix.

    They are first tokens where these are enough.

    Args:
        among: the tokens to choose from; None: all.
    """
    allowed = np.ones(len(evidence), bool) if among is None else among
    firsts = _choices(evidence, allowed & (evidence.position == 0))
    return firsts if len(firsts[0]) >= CHOICES else _choices(evidence, allowed & (evidence.prefix >= 0))


def _choices(evidence: Evidence, which: Booleans) -> tuple[Integers, Integers]:
    rows = np.flatnonzero(which & np.isfinite(evidence.trainer) & np.isfinite(evidence.sampler))
    key = evidence.prefix[rows] * (evidence.ids.max(initial=0) + 1) + evidence.ids[rows]
    rows = rows[np.unique(key, return_index=True)[1]]
    _, prefix, count = np.unique(evidence.prefix[rows], return_inverse=True, return_counts=True)
    several = count[prefix] > 1
    return rows[several], prefix[several]


def centred(values: Floats, prefix: Integers) -> Floats:
    """The values less the mean of their prefix."""
    return np.asarray(values - (np.bincount(prefix, values) / np.maximum(np.bincount(prefix), 1))[prefix])


def logged(evidence: Evidence) -> Evidence:
    """The evidence as the dump has it, with nothing taken away."""
    return evidence if evidence.as_logged and not evidence.selected else Evidence.of(evidence.records)


NEW = 8
"""Of these tokens those that did not stand in the context before, at least, since a penalty on those that did is a
factor on their logits, too."""


def multiplies_new_tokens(evidence: Evidence) -> bool:
    """``multiplies`` for sure, of tokens of which enough did not stand in the context before."""
    return multiplies(evidence, SURELY) and int((~evidence.seen[choices(evidence)[0]]).sum()) >= NEW


def multiplies(evidence: Evidence, left: float = ONE_FACTOR) -> bool:
    """Whether one factor is all that lies between the log-probs of different tokens after one prefix."""
    among = factor(evidence)
    return among is not None and among.alone and among.left <= left * among.gap
