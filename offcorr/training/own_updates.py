"""Whether the trainer's own updates make a gap of staleness: within a generation, or beside versions that move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offcorr.diagnose import Record
from offcorr.diagnose.causes.versions import age
from offcorr.training.series import GAP_BEGINS, Series

LOWER_LEARNING_RATE = (
    "lower the learning rate; or take fewer updates per generation (num_iterations, steps_per_generation), or a "
    "smaller lag, or a loss that corrects for it (docs/which.md)"
)

AGREES, AGREED = GAP_BEGINS**-0.5, 0.05
"""Mean |d| of an optimizer step over the largest, and in nats, up to which both sides agree in it."""


def of_own_updates(series: Series, records: Sequence[Record]) -> str:
    """The sentence that says by what the gap is known to be made by the trainer's own updates; "" where it is not.

    Args:
        series: of staleness.
        records: of the last batches, with ``logp`` as ``old_logp``.
    """
    sampled_by = {float(np.mean(one.rollout_version)) for one in records if one.rollout_version is not None}
    if len(sampled_by) > 1 or (sampled_by and series.aged):
        return "" if series.aged or series.without_age else _of_moving_versions(records)
    return _of_generation(series, records)


def _of_moving_versions(records: Sequence[Record]) -> str:
    """The sentence where the sampler's logged version moves, and its samples have an age."""
    ages = [one for record in records if (one := age(record)) is not None]
    versions = [float(np.mean(record.rollout_version)) for record in records if record.rollout_version is not None]
    if np.median(ages) <= 0 or max(versions) == min(versions):
        return ""
    return (
        f"by the logged versions the sampler receives new weights (version {min(versions):g} to {max(versions):g} in "
        f"these sequences), and the samples are of weights that are {_range(ages)} versions older than the trainer's"
    )


def _of_generation(series: Series, records: Sequence[Record]) -> str:
    """The sentence where the two sides agreed as the weights that sampled were new, and no others were due since."""
    if not series.lag_max:
        return ""
    gaps = _gap_of_steps(records)
    recent = {step: gap for step, gap in gaps.items() if step >= max(gaps) - series.lag_max}
    began_equal = len(recent) > 1 and min(recent.values()) <= min(AGREED, AGREES * max(recent.values()))
    if not began_equal and not (series.grown_in_generation and _agreed_when_new(series)):
        return ""
    return (
        f"the samples are of weights that are up to {series.lag_max:g} updates old, and sampler and trainer agreed "
        "when these weights were new: no new weights were due since"
    )


def _agreed_when_new(series: Series) -> bool:
    """Whether k3 of the last step on samples of the weights of now, about half the mean of d^2, was small."""
    return series.new_size is not None and series.new_size <= AGREED**2 / 2


def by_updates_alone(records: Sequence[Record], same_weights: bool) -> bool:
    """Whether the trainer, with the weights that sampled (``old_logp``), agrees with the sampler, but for a tenth of
    the gap that its weights of now (``logp``) leave: then no setting, and no other prompt or text, makes that gap.

    Args:
        records: of the last batches.
        same_weights: ``old_logp`` is known to be of the weights that sampled; else one that is a copy of the sampler's
            log-probs says nothing.
    """
    engine, gap = [], []
    for record in records:
        if record.logp is not None:
            seen = np.isfinite(record.logp + record.old_logp + record.rollout_logp)
            seen &= True if record.mask is None else record.mask
            engine.append(np.abs(record.old_logp - record.rollout_logp)[seen])
            gap.append(np.abs(record.logp - record.rollout_logp)[seen])
    own, whole = (float(np.concatenate([*of, []]).sum()) for of in (engine, gap))
    return own <= OF_ENGINE * whole and whole > 0 and (same_weights or own > 0)


OF_ENGINE = 0.1
"""Share of the gap of staleness, up to which the engine's own is none of it."""


def _gap_of_steps(records: Sequence[Record]) -> dict[int, float]:
    """Mean |d| (nats) of each optimizer step."""
    found: dict[int, list[float]] = {}
    for record in records:
        d = np.abs(record.old_logp - record.rollout_logp)
        seen = np.isfinite(d) if record.mask is None else np.isfinite(d) & record.mask
        if record.step is not None and seen.any():
            found.setdefault(record.step, []).append(float(d[seen].mean()))
    return {step: float(np.mean(gaps)) for step, gaps in found.items()}


def _range(ages: Sequence[float]) -> str:
    low, high = min(ages), max(ages)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
