"""A cause that makes the logged values a function of the log-probs: their negative, another base, a sum or a mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from offcorr.diagnose.causes.base import NEARLY_GREEDY, Alternative, Cause, Found
from offcorr.diagnose.causes.prefixes import CHOICES, NEAR_A_BASE, centred, choices
from offcorr.diagnose.causes.versions import same_version
from offcorr.diagnose.evidence import SAME, Evidence
from offcorr.diagnose.record import Floats

SMALLEST = 0.003
"""Mean |d| (nats), at least, that another quantity leaves."""

FITS, FITS_BASE, FITS_CONSTANT = 0.3, 0.02, 1e-3
"""Share of the mean |d| that may be left; of a base, as a temperature can be near to one; and of a constant, which a
truncation of a flat policy is near to."""

AT_BOUND = 8
"""Tokens, at least, whose value is the bound of log-probs that were cut off."""

LIKELIEST = 16
"""Tokens, at least, that have to be the likeliest of their place, and that cannot be."""

SMALLEST_ADDED, LARGEST_ADDED = 1e-6, 0.3
"""The least that was added to each probability, before the logarithm, to be told from rounding, and the most, as a
sampler that is certain of every token looks like more."""

FEWEST_TOKENS, MOST_ROWS = 8, 512
"""Tokens of a sequence, at least, by which it is known again; sequences of one length, at most, that are compared."""

FAR_OLD, AGREES = 0.05, 0.1
"""Mean |logp - old_logp| (nats), at least, where ``old_logp`` is at fault; and the mean |logp - rollout_logp|, at most,
as a share of the mean |d|."""

UNIFORM = 0.5
"""Standard deviation of the trainer's log-probs (nats) below which a policy is nearly uniform."""

FARTHEST = 3.0
"""|d| (nats) that counts at most, so that a few tokens do not decide."""


class OtherQuantity(Cause):
    """One side's values fit the other's once a function of them is undone."""

    id = "other_quantity"
    stage = "values"
    robust = True
    title = "the values of one side, or of both, are another quantity than the log-probs of these tokens"
    advice = (
        "log, in the order of the rows, ln p of each token, where p is its own probability: not p itself, -ln p, a sum "
        "or mean over tokens or a logarithm to another base, with no bound and with nothing added to p or to ln p"
    )
    not_told_from = (
        Alternative(
            "a truncation or ban (top_k, top_p, logit_bias): the trainer's log-probs are so much alike that one moves "
            "all by one number",
            "read the engine's sampling options",
            settled=lambda evidence: not _as_truncated(evidence),
        ),
        Alternative(
            "a truncation to few tokens (top_k, min_p), which leaves the likely ones as they are where the others "
            "have next to no probability",
            "read the engine's sampling options",
            fields=("entropy",),
            settled=lambda evidence: evidence.entropy is not None or not _of_the_likeliest(evidence),
        ),
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if positive := _of_both_sides(evidence) or _of_some(evidence):
            return positive
        if evidence.gap < SMALLEST or len(evidence) < 32 or not evidence.as_logged:
            return None
        own = _distance(evidence.d)
        fitted = []
        for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
            values, wanted = getattr(evidence, side), getattr(evidence, other)
            for words, most, undone in _undone(values, wanted, evidence):
                left = _distance(undone - wanted)
                if left < most * own:
                    fitted.append((left, side, words, undone))
        if of_likeliest := not fitted and _of_the_likeliest(evidence):
            words = "those of the likeliest token of each place, whichever was sampled"
            fitted.append((0.0, "sampler", words, evidence.trainer))
        if (rows := _other_rows(evidence)) is not None and (left := _distance(rows - evidence.trainer)) < FITS * own:
            fitted.append((left, "sampler", "those of other sequences, as of rows in another order", rows))
        if not fitted:
            return _of_old_logp_alone(evidence)
        best = min(one[0] for one in fitted)
        alike = [
            (left, side, words, _with(evidence, side, undone))
            for left, side, words, undone in fitted
            if left <= best + SAME
        ]
        left, side, words, after = min(alike, key=lambda one: _off_balance(one[-1]))
        return Found(
            left / own,
            0.0,
            FITS,
            float(len(evidence)),  # it precedes the placeholders that such values would be taken for
            f"the {side}'s values are {words}: mean |d| is {evidence.gap:.2g} nats, and {left:.2g} once that is undone",
            after,
            surest=0.5 if _as_truncated(evidence) or (of_likeliest and evidence.entropy is None) else 1.0,
        )


def _as_truncated(evidence: Evidence) -> bool:
    """Whether a truncation of a policy that is nearly uniform may leave the same: one number, by which the sampler's
    log-probs are larger.
    """
    return float(np.std(evidence.trainer)) < UNIFORM and bool((evidence.d < 0).mean() > 0.98)


def _with(evidence: Evidence, side: str, values: Floats) -> Evidence:
    """With the values in place of the side's."""
    changed: dict[str, Any] = {side: values}
    return dataclasses.replace(evidence, **changed)


def _off_balance(evidence: Evidence) -> float:
    """Size of the surprisal balance, which tells the side of a number that one has added; 0: unknown."""
    return 0.0 if evidence.balance is None else abs(evidence.balance.value)


def _of_both_sides(evidence: Evidence) -> Found | None:
    """The finding where the values of both sides are above 0, as log-probs are not."""
    sides = {"sampler": evidence.sampler, "trainer": evidence.trainer}
    if len(evidence) < 32 or any(not np.isfinite(side).all() or _share_above(side) < 0.98 for side in sides.values()):
        return None
    probabilities = max(side.max() for side in sides.values()) <= 1 + 1e-6
    undone: dict[str, Any] = {
        name: np.log(np.maximum(side, 1e-30)) if probabilities else -side for name, side in sides.items()
    }
    return Found(
        1.0,
        0.0,
        0.98,
        float(len(evidence)),
        "the values of both sides are above 0, as no log-prob is: "
        + ("probabilities, not their logarithms" if probabilities else "the negatives of log-probs"),
        dataclasses.replace(evidence, **undone),
        share=0.0,  # of both sides alike: what d is once that is undone is left to the other causes
    )


def _of_some(evidence: Evidence) -> Found | None:
    """The finding where the values of one side are above 0 in some sequences, and hardly ever in the others."""
    for side in ("sampler", "trainer"):
        values = getattr(evidence, side)
        times = np.bincount(evidence.sequence, minlength=len(evidence.records))
        above = np.bincount(evidence.sequence, values > 0, minlength=len(evidence.records))
        whole = (times > 0) & (above > 0.98 * times)
        here = whole[evidence.sequence]
        if whole.sum() < 2 or whole.sum() == (times > 0).sum() or here.sum() < 32 or (values[~here] > 1e-6).any():
            continue
        probabilities = values[here].max() <= 1 + 1e-6
        undone = values.copy()
        undone[here] = np.log(np.maximum(values[here], 1e-30)) if probabilities else -values[here]
        share = float(here.mean())
        own = evidence.size.sum()
        changed: dict[str, Any] = {side: undone}
        return Found(
            share,
            0.0,
            0.0,
            float(len(evidence)),
            f"in {whole.sum()} of {(times > 0).sum()} sequences the {side}'s values are above 0, as no log-prob is: "
            + ("probabilities, not their logarithms" if probabilities else "the negatives of log-probs"),
            dataclasses.replace(evidence, **changed),
            share=float(evidence.size[here].sum() / own) if np.isfinite(own) and own > 0 else 1.0,
        )
    return None


def _of_old_logp_alone(evidence: Evidence) -> Found | None:
    """The finding where ``logp`` agrees with the sampler's, and an ``old_logp`` of the same weights does not."""
    known = np.isfinite(evidence.now)
    if not same_version(evidence) or known.sum() < 32 or evidence.moved < FAR_OLD or not evidence.as_logged:
        return None
    own, of_logp = (float(np.abs((side - evidence.sampler)[known]).mean()) for side in (evidence.trainer, evidence.now))
    if not of_logp < AGREES * own:
        return None
    rows = [dataclasses.replace(one, old_logp=one.logp, logp=None) for one in evidence.records if one.logp is not None]
    left = Evidence.of(rows)
    return Found(
        own,
        0.0,
        FAR_OLD,
        1.0,  # what a cause says of its values more precisely precedes it
        f"by the versions old_logp and logp are of the same weights, and logp agrees with rollout_logp (mean |d| "
        f"{of_logp:.2g} nats), while old_logp agrees with neither ({own:.2g}): old_logp alone is at fault, as where it "
        "was scored at another temperature than logp, or is of an anchor that is not the weights that sampled",
        left,
        share=1 - of_logp / own,
        surest=0.8,
    )


def _share_above(values: Floats) -> float:
    """Share of the values that are above 0."""
    return float((values > 0).mean())


def _other_rows(evidence: Evidence) -> Floats | None:
    """[N] for each sequence the sampler's values of the one of the same length that fit it best; None where most fit
    best as they are.
    """
    starts = np.flatnonzero(np.diff(evidence.sequence, prepend=-1))
    lengths = np.diff(np.append(starts, len(evidence)))
    undone, moved, used, rows = evidence.sampler.copy(), 0, 0, 0
    for length in np.unique(lengths[lengths >= FEWEST_TOKENS]):
        first = starts[lengths == length][:MOST_ROWS]
        tokens = first[:, None] + np.arange(length)
        trainer, sampler = evidence.trainer[tokens], evidence.sampler[tokens]
        best = np.array([np.abs(row - sampler).mean(1).argmin() for row in trainer])
        moved += int((best != np.arange(len(first))).sum())
        used, rows = used + len(np.unique(sampler[best], axis=0)), rows + len(np.unique(sampler, axis=0))
        undone[tokens] = sampler[best]
    # Of a policy that is certain nearly everywhere any row fits any other; in another order, each fits one.
    each = used > EACH_ROW * rows
    return undone if each and moved > len(starts) / 2 and evidence.gap > ROWS_DIFFER else None


EACH_ROW = 0.7
"""Share of the different rows that fit some sequence best, at least, where all are there in another order."""

ROWS_DIFFER = 0.1
"""Mean |d| (nats) that rows in another order make, at least."""


def _distance(d: Floats) -> float:
    """Mean |d|, each at most ``FARTHEST``; a value that is none is as far off."""
    return float(np.minimum(np.nan_to_num(np.abs(d), nan=FARTHEST), FARTHEST).mean())


def _undone(values: Floats, wanted: Floats, evidence: Evidence) -> Iterator[tuple[str, float, Floats]]:
    """Each quantity in words, the share of |d| that may be left, and the log-probs if the values are that quantity."""
    if not np.isfinite(values).all():
        return
    if (values >= 0).mean() > 0.98:
        most = np.inf if _share_above(values) > 0.98 else FITS  # whatever the weights are, these are no log-probs
        probabilities = values.max() <= 1 + 1e-6
        yield "the negatives of log-probs", FITS if probabilities else most, -values
        if probabilities:
            logarithms, rounded = np.log(np.maximum(values, 1e-30)), (values == 0) & bool((values > 0).mean() > 0.5)
            yield "probabilities, not their logarithms", most, np.where(rounded, wanted, logarithms)
        for words, fits, natural in _bases(-values, wanted, evidence):
            yield f"the negatives of {words}", fits, natural
        return
    yield from _bases(values, wanted, evidence)
    yield from _sums(values, wanted, evidence)
    yield from _of_sequences(values, wanted, evidence)
    summed = np.exp(np.minimum(values, 1))  # above 1 where the number was added to nearly 1
    added = float(np.median(summed - np.exp(np.minimum(wanted, 0))))
    if SMALLEST_ADDED < added < LARGEST_ADDED:
        probabilities = np.maximum(summed - added, 1e-30)
        yield f"log(p + {added:.2g}), where p is the probability", FITS_BASE, np.log(probabilities)
    if (constant := float(np.median(values - wanted))) != 0:
        words = f"off by {constant:+.3g} nats, one number at every token, or the other side's are"
        yield words, FITS_CONSTANT, values - constant
    at_bound = values <= values.min() + 1e-6
    if (at_bound & evidence.once).sum() >= AT_BOUND and (wanted[at_bound] < values.min()).mean() > 0.9:
        words = f"cut off at {values.min():.4g}, where {at_bound.sum()} of {len(values)} of them stand"
        yield words, FITS, np.where(at_bound, wanted, values)


def _bases(values: Floats, wanted: Floats, evidence: Evidence) -> Iterator[tuple[str, float, Floats]]:
    """The same of logarithms to another base than e."""
    for base in (2, 10):
        fits = FITS if _is_base(values, wanted, base) else FITS_BASE
        natural = values * np.log(base)
        if _distance(natural - wanted) < NO_BASE * _of_a_factor(values, wanted) and not (
            _among(values - wanted, evidence) < _among(natural - wanted, evidence)  # as a ban leaves them
        ):
            yield f"logarithms to base {base}", fits, natural


NO_BASE = 10
"""Mean |d| that a base leaves, times what the best factor does, from which on it is another factor near to the base."""


def _of_a_factor(values: Floats, wanted: Floats) -> float:
    """Mean |d| (nats) that is left where the values are multiplied by the factor that is the median of those of tokens
    that are not certain."""
    uncertain = (wanted < -0.5) & (values < 0)
    factor = float(np.median(wanted[uncertain] / values[uncertain])) if uncertain.any() else 1.0
    return _distance(factor * values - wanted)


def _among(d: Floats, evidence: Evidence) -> float:
    """Mean distance (nats) of the d of tokens after one prefix from each other; 0 of fewer than ``CHOICES`` tokens."""
    rows, prefix = choices(evidence)
    return float(np.abs(centred(d[rows], prefix)).mean()) if len(rows) >= CHOICES else 0.0


def _is_base(values: Floats, wanted: Floats, base: int) -> bool:
    """Whether the median quotient of the values and the log-probs is that of logarithms to the base."""
    uncertain = wanted < -0.5
    if not uncertain.any():
        return False
    return abs(float(np.median(values[uncertain] / wanted[uncertain])) * np.log(base) - 1) < NEAR_A_BASE


def _of_the_likeliest(evidence: Evidence) -> bool:
    """Whether the sampler's values can be those of the likeliest token of each place.

    Tokens that have to be the likeliest ones agree, and others have larger values, by far on average; the entropy of
    a distribution is at least -ln p of its likeliest token.
    """
    values, wanted = evidence.sampler, evidence.trainer
    likeliest, others = (wanted > np.log(0.55)) & (wanted < -0.02), wanted < np.log(0.3)
    if likeliest.sum() < LIKELIEST or others.sum() < LIKELIEST:
        return False
    agree = float(np.abs(values - wanted)[likeliest].mean()) < 0.01
    above = (values - wanted)[others]
    fits = np.exp(values[others]) + np.exp(wanted[others]) < 1.02  # of two tokens, unless it is the same
    larger = (above > -0.01).mean() > 0.98 and (above > 0.1).mean() > 0.5 and np.minimum(above, 3).mean() > 0.7
    within = evidence.entropy is None or (np.nan_to_num(evidence.entropy, nan=np.inf) > -values - 0.02).mean() > WITHIN
    return bool(agree and larger and within and (fits | (above < 0.01)).mean() > 0.98)


WITHIN = 0.998
"""Share of the values that have to be such as the entropy allows: of a top-k to few tokens 1.5 % were not."""


def _of_sequences(values: Floats, wanted: Floats, evidence: Evidence) -> Iterator[tuple[str, float, Floats]]:
    """One number at every token of a sequence: the mean or the sum over it, beside which the other side's course is
    taken for both."""
    starts = np.flatnonzero(np.diff(evidence.sequence, prepend=-1))
    lengths = np.diff(np.append(starts, len(evidence)))
    same = np.maximum.reduceat(values, starts) == np.minimum.reduceat(values, starts)
    if (several := lengths >= FEWEST_TOKENS).sum() < 2 or same[several].mean() < 0.9 or np.ptp(values[starts]) == 0:
        return
    sums = np.add.reduceat(wanted, starts)
    for which, of_sequence in (("mean", sums / lengths), ("sum", sums)):
        yield (
            f"the {which} over the sequence, at each of its tokens",
            FITS,
            (wanted + np.repeat(values[starts] - of_sequence, lengths)),
        )


def _sums(values: Floats, wanted: Floats, evidence: Evidence) -> Iterator[tuple[str, float, Floats]]:
    """Running sums, which fall at each token that is not certain, and come from the first token of a completion on."""
    begins = np.ones(len(evidence), bool)
    begins[1:] = np.diff(evidence.sequence) != 0
    within = ~begins[1:]
    steps = np.diff(values)
    uncertain = within & (wanted[1:] < -0.01)
    if uncertain.any() and (steps[uncertain] < 0).mean() < 0.9:
        return
    if within.sum() >= 16 and (steps[within] <= 1e-6).all() and (np.diff(evidence.position)[within] == 1).all():
        yield "sums over the tokens so far", FITS, np.where(begins, values, np.append(values[:1], steps))
