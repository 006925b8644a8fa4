"""The age of the sampler's weights, by the logged versions or by a d that grows over the optimizer steps."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.over_steps import growth
from offcorr.diagnose.evidence import Evidence

VERSIONS = ("rollout_version", "trainer_version")
"""The fields of a record that say it."""


def age(record: object) -> float | None:
    """Optimizer steps between the sampler's weights and the trainer's; None: not logged."""
    rollout, trainer = getattr(record, "rollout_version", None), getattr(record, "trainer_version", None)
    return None if rollout is None or trainer is None else float(np.mean(trainer) - np.mean(rollout))


def older(evidence: Evidence) -> bool:
    """Whether versions are logged, and most say that the sampler's weights are older, which may be what d is of."""
    if evidence.ageless:
        return False
    ages = [one for record in evidence.records if (one := age(record)) is not None]
    return bool(ages) and float(np.median(ages)) > 0


def newer(evidence: Evidence) -> int:
    """Number of sequences whose versions say that the sampler's weights are newer than the trainer's."""
    return sum((age(record) or 0) < 0 for record in evidence.records)


def changes_within(evidence: Evidence) -> bool:
    """Whether the sampler's version is logged by the token, and changes within sequences."""
    logged = [one.rollout_version for one in evidence.records]
    return any(isinstance(one, np.ndarray) and len(one) > 0 and np.ptp(one) > 0 for one in logged)


def versioned(evidence: Evidence) -> bool:
    """Whether every sequence has versions of both sides."""
    return bool(evidence.records) and all(age(record) is not None for record in evidence.records)


def same_version(evidence: Evidence) -> bool:
    """Whether versions are logged, and all say that sampler and trainer have the same weights."""
    return bool(evidence.records) and all(age(record) == 0 for record in evidence.records)


def before_any_update(evidence: Evidence) -> bool:
    """Whether both sides have versions, and the gap is there where both are 0, before any update, and hardly grows.

    Then it is of no update that the sampler lacks.
    """
    first = np.array([not np.any(record.trainer_version) for record in evidence.records])[evidence.sequence]
    if not versioned(evidence) or not first.any():
        return False
    return bool(first.all()) or float(evidence.size[first].mean()) > 0.5 * float(evidence.size[~first].mean())


def never_updated(evidence: Evidence) -> bool:
    """Whether the logs say, or d over the optimizer steps shows, that updates do not reach the sampler.

    Versions that say that the sampler's weights are older explain a d that grows.
    """
    return same_version(evidence) or (not versioned(evidence) and growth(evidence) is not None)


def shown_to_be_older(evidence: Evidence) -> bool:
    """Whether logged versions, or a d that grows over the optimizer steps, say that d is of older weights."""
    return older(evidence) or growth(evidence) is not None


def gap_without_age(evidence: Evidence) -> bool:
    """Whether samples of the trainer's own weights show a gap, too, at least half as large as that of the others."""
    ages = np.array([np.nan if (one := age(record)) is None else one for record in evidence.records])
    fresh = ages[evidence.sequence] == 0
    if fresh.all() or not fresh.any():
        return False
    return float(evidence.size[fresh].mean()) > 0.5 * float(evidence.size[~fresh].mean())


def age_shows(evidence: Evidence) -> bool:
    """Whether d itself says that it is of the age: of samples of three ages or more it is larger by the age, and by no
    jump between two of them.

    Versions that are older say nothing of what else differs: one update may be a hundredth of another prompt's d, and
    what is beside the age shows where the newest sequences have a tenth of the oldest ones' d, or more.  Nor
    does a d that grows over the optimizer steps while the age is one, as a setting that changes, or a precision, leaves
    it, too; and what was mended at some version leaves a jump.
    """
    ages = np.array([np.nan if (one := age(record)) is None else one for record in evidence.records])
    times = np.bincount(evidence.sequence, minlength=len(ages))
    gaps = np.bincount(evidence.sequence, evidence.size, minlength=len(ages)) / np.maximum(times, 1)
    known = np.isfinite(ages) & (times > 0)
    by_age = np.array([gaps[known & (ages == one)].mean() for one in np.unique(ages[known])])
    if not older(evidence) or len(by_age) < LEAST_AGES:
        return False
    rise = by_age[-1] - by_age[0]
    smooth = float(np.diff(by_age).max()) < BY_A_JUMP * rise
    grows = by_age[-1] > GROWS * by_age[0] or (evidence.newer_agree and by_age[-1] > LEAST_GROWS * by_age[0])
    return bool(grows and smooth and np.corrcoef(ages[known], gaps[known])[0, 1] > WITH_AGE)


LEAST_AGES, BY_A_JUMP = 3, 0.7
"""Ages, at least, and the share of the whole rise from which that between two of them is a jump."""

GROWS, LEAST_GROWS, WITH_AGE = 10.0, 2.0, 0.5
"""Mean |d| of the oldest sequences over that of the newest, or, where newer ones agree, of the newest that differ, and
the correlation of a sequence's with its age, from which d is of the age."""


def lag_by_versions(evidence: Evidence) -> bool:
    """Whether logged versions say that d is of older weights, and neither samples of the same weights nor a larger
    difference of ``logp`` and ``old_logp`` say that it is not."""
    return older(evidence) and evidence.moved <= evidence.gap and not gap_without_age(evidence)


def lag_in_d(evidence: Evidence) -> bool:
    """Whether logged versions, or a d that grows over the optimizer steps, say that the lag is in d."""
    return growth(evidence) is not None or lag_by_versions(evidence)


def no_lag_in_d(evidence: Evidence) -> bool:
    """Whether logged versions say that d is of the same weights, or, as under a snapshot, that another gap has the
    lag."""
    return same_version(evidence) or (older(evidence) and not lag_by_versions(evidence))
