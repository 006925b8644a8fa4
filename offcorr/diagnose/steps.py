"""``differing_steps``, ``differing_sequences``: where trainer and sampler differ, while they agree elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np

from offcorr.diagnose.causes.over_steps import growth, ranges, steps_of
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.causes.versions import age
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Floats

AGREE = 0.02
"""Mean |d| / (1 - p) of a step up to which trainer and sampler agree, but for rounding."""

APART = 5.0
"""Factor by which the steps that differ are further off than those that agree."""

EXCEPTIONS = 0.1
"""Share of the sequences of steps that differ which may agree, as very short ones do."""


def differing_steps(evidence: Evidence) -> tuple[Evidence, str]:
    """The evidence of the steps that differ, and half a sentence that says so; all of it and "" where the steps are not
    of two kinds.

    A test that reads both kinds as one takes the change from one to the other for a trait of the cause.  Where each
    step has sequences of both kinds, or d grows from step to step, that is a trait of the cause.
    """
    step = steps_of(evidence)
    gaps = Profile.of(evidence).gaps
    bound = _between(step, gaps)
    if bound is None or growth(evidence) is not None:
        return evidence, ""
    steps, index = np.unique(step, return_inverse=True)
    differs = _means(index, gaps) > bound
    far = differs[index]
    if (gaps[~far] > bound).any() or (gaps[far] < bound).mean() > EXCEPTIONS:
        return evidence, ""
    said = (
        f"; this is of {differs.sum()} of the {len(steps)} optimizer steps, {ranges(steps[differs], steps)}: in the "
        "others the log-probs agree"
    )
    return Evidence.of([record for record, one in zip(evidence.records, far, strict=True) if one]), said


FEWEST, LEAST = 4, 0.1
"""Sequences of each kind, and their share of all, from which they are two kinds."""


def differing_sequences(evidence: Evidence) -> tuple[Evidence, str] | None:
    """The evidence of the sequences that differ, and half a sentence that says so; None where they are not of two
    kinds, as those of two engines, of which one is faulty, are.
    """
    gaps = Profile.of(evidence).gaps
    known = np.sort(np.maximum(gaps[~np.isnan(gaps)], 1e-6))
    fewest = max(FEWEST, round(LEAST * len(known)))
    if len(known) < 2 * fewest:
        return None
    rises = known[fewest : len(known) - fewest + 1] / known[fewest - 1 : len(known) - fewest]
    at = int(rises.argmax()) + fewest - 1
    if rises.max() < APART or known[at] > AGREE:
        return None
    bound = float(np.sqrt(known[at] * known[at + 1]))
    far = [record for record, gap in zip(evidence.records, gaps, strict=True) if gap > bound]
    near = [record for record, gap in zip(evidence.records, gaps, strict=True) if gap <= bound]
    said = (
        f"; this is of {len(far)} of the {len(evidence.records)} sequences: in the others the log-probs agree "
        f"(|d| / (1 - p) is {np.nanmean(gaps[gaps <= bound]):.2g} on average)"
    )
    part = Evidence.of(far)
    ages = [[one for record in records if (one := age(record)) is not None] for records in (far, near)]
    if all(ages):
        as_old = bool(0 < np.median(ages[0]) <= np.median(ages[1]))
        part = dataclasses.replace(part, ageless=as_old, newer_agree=max(ages[1]) < min(ages[0]))
    return part, said


def _between(step: Floats, gaps: Floats) -> float | None:
    """A mean |d| / (1 - p) between the steps that agree and those that differ; None: there are not both."""
    if np.isnan(step).any() or len(steps := np.unique(step)) < 2:
        return None
    means = np.sort(_means(np.searchsorted(steps, step), gaps))
    means = np.maximum(means[~np.isnan(means)], 1e-6)
    rises = means[1:] / means[:-1]
    if not len(rises) or rises.max() < APART or means[at := int(rises.argmax())] > AGREE:
        return None
    return float(np.sqrt(means[at] * means[at + 1]))


def _means(index: np.ndarray, gaps: Floats) -> Floats:
    """[steps] mean over the sequences that have a gap; NaN of a step without one."""
    known = ~np.isnan(gaps)
    count = np.bincount(index[known], minlength=index.max() + 1)
    total = np.bincount(index[known], gaps[known], minlength=index.max() + 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
