"""Statistics of how tokens were drawn (a temperature, a truncation, a penalty) from log-prob and entropy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offcorr.diagnose.evidence import Booleans, Estimate, Evidence
from offcorr.diagnose.record import Floats, Integers

FLAT = float(np.log(2))
"""Entropy (nats) above which no token need have more than half of the probability."""

LEAST_SHARE = 0.3
"""Smallest top_p that is looked for."""


def power_of_draws(logp: Floats, entropy: Floats) -> float:
    """The power of the distribution that the tokens were drawn from, 1 / temperature, if it is a power of this one.

    Weighted by p^(1 - power), the draws stand for draws from p, whose mean surprise is the entropy.

    Args:
        logp: [N] of the drawn tokens (nats), in contexts of about one normaliser.
        entropy: [N] of the distributions (nats).

    Returns:
        between 1 and 6; 1 where the draws are no less surprising than the entropy.

    >>> logp = np.log([0.9] * 99 + [0.1])  # drawn from (0.99, 0.01), scored by (0.9, 0.1)
    >>> round(power_of_draws(logp, np.full(100, 0.325)), 2)
    2.09
    """
    low, high = 1.0, 6.0

    def excess(power: float) -> float:
        logs = (1 - power) * logp
        return float((np.exp(logs - logs.max(initial=-np.inf)) * (-logp - entropy)).sum())

    if not len(logp) or excess(low) >= 0:
        return low
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return high


def least_share(logp: Floats, entropy: Floats) -> Floats:
    """[N] the least top_p under which each token can have been drawn, as far as its log-prob and the entropy show.

    Outside the likeliest tokens that hold a share s, tokens no likelier than the drawn one hold at least 1 - s, so the
    entropy is at least (1 - s) (- log p) - s log s.
    """
    low, high = np.full(len(logp), LEAST_SHARE), np.clip(1 - np.exp(logp), LEAST_SHARE, 1 - 1e-6)
    for _ in range(24):
        middle = (low + high) / 2
        outside = entropy + 1e-4 < (1 - middle) * -logp - middle * np.log(middle)
        low, high = np.where(outside, middle, low), np.where(outside, high, middle)
    return low


@dataclass(frozen=True)
class Truncation:
    """A top_p that may explain the draws, and by how much better than a temperature.

    Args:
        share: the least top_p under which every token can have been drawn.
        support: log-likelihood ratio of the truncation to the temperature, in nats.
    """

    share: float
    support: float


def truncation(logp: Floats, entropy: Floats) -> Truncation:
    """A truncation against a temperature, by two signs that the draws leave.

    A temperature makes unlikely tokens rarer, and a truncation ends them: 1 - the least share follows about a power
    law under a temperature, which a truncation cuts off; and where one token has most of the probability, a temperature
    still draws some of the others, as often as the other contexts suggest.
    """
    shares = least_share(logp, entropy)
    share = max(float(shares.max(initial=0)), 0.5)
    logs = np.log((1 - LEAST_SHARE) / (1 - shares[shares > LEAST_SHARE + 0.002]))
    flat = entropy > FLAT
    power = power_of_draws(logp[flat], entropy[flat]) if flat.sum() >= 16 else 1.0
    missing = [
        _missing(logp[sure], entropy[sure], power, at) for at in (0.5, share) for sure in [entropy < _binary(at)]
    ]
    return Truncation(share, _ends(logs) + max(missing))


def _missing(logp: Floats, entropy: Floats, power: float, share: float) -> float:
    """Log-likelihood ratio of as few others as were drawn, where one token has more than a share, to what is expected.

    Both are of a Poisson distribution; 0 where no fewer were drawn.
    """
    drawn, expected = int((logp < np.log(share) - 1e-3).sum()), others_expected(logp, entropy, power)
    if drawn >= expected:
        return 0.0
    return expected - drawn + (drawn * float(np.log(drawn / expected)) if drawn else 0.0)


def others_expected(logp: Floats, entropy: Floats, power: float) -> float:
    """Expected draws of other tokens than the likeliest at a power, in contexts whose likeliest has over half.

    The draws of the likeliest tokens tell their probabilities p; each stands for (odds against it) draws of the
    others.  These have the mass 1 - p and the entropy that is left, from which their sum of powers follows, at least.
    """
    p = np.exp(logp[logp > -FLAT])
    h, others = entropy[logp > -FLAT], np.maximum(1 - p, 1e-9)
    left = np.maximum(h - _binary(np.clip(p, 1e-9, 1 - 1e-9)), 0) / others
    return float(((others / p) ** power * np.exp((1 - power) * left)).sum())


def _ends(values: Floats) -> float:
    """Log-likelihood ratio of an exponential distribution that is cut off at the largest value to one that is not."""
    if len(values) < 6:
        return 0.0
    count, total, end = len(values), float(values.sum()), float(values.max())
    rates = np.concatenate([-np.geomspace(0.01, 30, 60), np.geomspace(0.01, 60, 120)])
    size = np.abs(rates)
    left_out = np.log1p(-np.exp(-size * end)) + size * end * (rates < 0)  # log |1 - e^(-rate end)|, of any size
    cut = count * (np.log(size) - left_out) - rates * total
    return max(float(cut.max() - count * np.log(count / total) + count), 0.0)


def _binary(share: Any) -> Any:
    return -(share * np.log(share) + (1 - share) * np.log(1 - share))


# -- repetitions ---------------------------------------------------------------------------------------------

SUCCESSORS = 8
"""Tokens that followed another most often, which stand for what may follow it."""


@dataclass(frozen=True)
class Repeats:
    """The excess of surprise, in units of what each context allows, and how it depends on repetition.

    Args:
        overall: mean excess.
        seen: how much larger it is where all likely next tokens stood in the context before than where none did.
    """

    overall: Estimate
    seen: Estimate

    @property
    def z(self) -> float:
        """Standard errors by which both are above 0."""
        return float(np.hypot(max(self.overall.z, 0), max(self.seen.z, 0)))


def repeats(evidence: Evidence) -> Repeats | None:
    """Whether tokens are more surprising than they should be where the likely ones were seen before.

    What is likely to come next is what followed the previous token in other sequences, so that this draw has no part in
    it: without a transform of the sampler both numbers are 0 on average.

    Returns:
        None: no entropy, or too few tokens whose predecessor was seen in other sequences.
    """
    known = evidence.with_entropy
    if known is None or known.entropy is None:
        return None
    seen = likely_seen(known)
    chosen = np.isfinite(seen) & (known.entropy > 0.02)
    if chosen.sum() < 64:
        return None
    h, seen = known.entropy[chosen], seen[chosen]
    excess = -known.trainer[chosen] - h
    allowed = np.where(h < 1, h * (1 - np.log(h)), 1.0)
    columns = np.stack([allowed, allowed * (seen - np.average(seen, weights=allowed))], 1)
    weighted = columns / allowed[:, None]
    inverse = np.linalg.pinv(weighted.T @ columns)
    fit = inverse @ (weighted.T @ excess)
    scores = weighted * (excess - columns @ fit)[:, None]
    errors = np.sqrt(np.diag(inverse @ (scores.T @ scores) @ inverse))
    return Repeats(*(Estimate(float(value), float(error)) for value, error in zip(fit, errors, strict=True)))


def likely_seen(evidence: Evidence) -> Floats:
    """[N] the share of the likely next tokens that stood in the context before; NaN: nothing is known of them.

    The likely ones are those that followed the previous token most often, counted in the other sequences.
    """
    ids, sequence, place, drawn = _stream(evidence)
    size = int(ids.max(initial=0)) + 1
    follows = np.flatnonzero(drawn)
    before, after, owner = ids[follows - 1], ids[follows], sequence[follows]
    pairs, counts = np.unique(before * size + after, return_counts=True)
    own, own_counts = np.unique((owner * size + before) * size + after, return_counts=True)
    standing, first = np.unique(sequence * size + ids, return_index=True)
    likely = _most_frequent(pairs // size, counts)
    begins = np.searchsorted(pairs[likely] // size, before)
    count, met = np.zeros(len(follows)), np.zeros(len(follows))
    for rank in range(SUCCESSORS):
        at = likely[np.minimum(begins + rank, len(likely) - 1)] if len(likely) else begins
        there = (begins + rank < len(likely)) & (pairs[at] // size == before) if len(likely) else begins < 0
        token = pairs[at] % size
        others = np.where(there, counts[at] - _found(own, own_counts, (owner * size + before) * size + token), 0)
        seen = _found(standing, place[first] + 1, owner * size + token)
        count, met = count + others, met + others * ((seen > 0) & (seen - 1 < place[follows]))
    share = np.full(len(ids), np.nan)
    share[follows] = np.where(count >= 3, met / np.maximum(count, 1), np.nan)
    starts = np.searchsorted(sequence, np.arange(len(evidence.records)))
    prompts = np.array([len(record.prompt_ids) for record in evidence.records])
    return np.asarray(share[(starts + prompts)[evidence.sequence] + evidence.position])


def _stream(evidence: Evidence) -> tuple[Integers, Integers, Integers, Booleans]:
    """Ids of all prompts and completions one after the other, their sequences, places, and which follow another one."""
    parts = [np.concatenate([record.prompt_ids, record.completion_ids]) for record in evidence.records]
    lengths = [len(part) for part in parts]
    place = np.concatenate([np.arange(length) for length in lengths])
    prompt = np.repeat([max(len(record.prompt_ids), 1) for record in evidence.records], lengths)
    known, ids = np.unique(np.concatenate(parts), return_inverse=True)
    return ids.astype(np.int64), np.repeat(np.arange(len(parts)), lengths), place, place >= prompt


def _most_frequent(groups: Integers, counts: Integers) -> Integers:
    """Indices of the ``SUCCESSORS`` largest counts of each group, in the order of the groups, which are sorted."""
    order = np.lexsort((-counts, groups))
    rank = np.arange(len(order)) - np.searchsorted(groups[order], groups[order])
    return order[rank < SUCCESSORS]


def _found(keys: Integers, values: Integers, wanted: Integers) -> Integers:
    """The value of each wanted key; 0: it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return np.where(keys[at] == wanted, values[at], 0) if len(keys) else np.zeros(len(wanted), np.int64)
