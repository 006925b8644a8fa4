"""The cause of an alarm, from a diagnosis and from what the monitor and the trainer's configuration know besides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offcorr.diagnose import CAUSES, Record, Report
from offcorr.diagnose.causes.over_steps import growth
from offcorr.diagnose.causes.prefixes import multiplies
from offcorr.diagnose.causes.sampling import ALSO_UPDATES
from offcorr.diagnose.causes.truncation import TRUNCATIONS
from offcorr.diagnose.causes.versions import gap_without_age, older, versioned
from offcorr.diagnose.diagnosis import FITTED, OF_OTHER_CHANGES
from offcorr.training.alarms import ADVICE
from offcorr.training.last_batches import NothingToCompare
from offcorr.training.own_updates import LOWER_LEARNING_RATE, of_own_updates
from offcorr.training.series import GROWN, SEVERAL, SMALLEST_K3, UNSYNCED, Series

OF_OTHER_TEXT = "retokenised"
"""The cause that a policy which has moved far looks like, as it gives up tokens."""

OF_AGE = ("stale_weights", "adapter_not_synced", "policy_updates")
"""The causes of staleness itself."""

OLDER = ("stale_weights", "adapter_not_synced")
"""Two names for a sampler without the newest weights; of one run one is given."""

SHARPENED = ("temperature", "temperature_silent")
"""Causes that older weights come to look like, where the policy has become sharper since."""

OF_THE_PROMPT = ("chat_template", "truncated_prompt", "position")
"""Causes that older weights look like where they differ most at the first tokens, and that make a gap from the first
step of a run on."""

NO_CAUSE = ("clean", "unknown")
"""The verdicts that name none."""

TRANSFORMED = (
    "unnormalised",
    "top_p",
    "min_p",
    "top_k",
    "top_p_silent",
    "logit_mask",
    "repetition_penalty",
    "penalty_silent",
    "unknown",
)
"""Causes that the data of a truncated or penalised distribution can look like."""

OF_OTHER_WEIGHTS = ("stale_weights", "weights_swapped")
"""Causes that ``old_logp`` of the weights that sampled each token rules out for the engine's gap."""

OF_OLDER_PROMPT = "stale_prefix_cache"
"""A cause that only a run with updates can have, so that the first steps tell nothing of it."""

OF_CONFIGURATION = ("sampling", "policies")
"""The stages of the causes that a configuration makes, from the first step of a run on."""

NO_PRECISION = 16.0
"""Growth of k3 since the alarm (a factor of 4 in |d|) above which a lower precision is no explanation."""

BY_VERSIONS = 0.8
"""Confidence in old weights where the versions stand still: the sampler may have weights that it does not report."""

OWN_LAG = (
    "this run's own lag of {lag}, which its sampler is set to, makes such a gap, and so do several updates on one "
    "generation, so there is no fault to look for. Which losses correct for it, docs/which.md says; a smaller lag, a "
    "smaller learning rate or, where there are several, fewer updates per generation (steps_per_generation) make it "
    "smaller"
)

OWN_LOG_PROBS = (
    "the sampler reports no log-probs, and the gap is one between logp and old_logp, which the trainer computes itself "
    "where no rollout_func returns it"
)

OWN_ADVICE = (
    f"{LOWER_LEARNING_RATE}; switch dropout off, where it is on; and where a rollout_func returns old_logp, see "
    "whether its sampler still receives new weights"
)

APART = "; anchor='snapshot' measures the lag and the engine's own mismatch apart"

ALSO_A_LAG = "a sampler that stays some updates behind leaves about the same (no version tells)"

REPORTED = "where the sampler is to stay behind, return rollout_version, so that the lag is known"

REFUTED = (
    "samples that are reported to be of the weights of now (lag 0) have k3 {:.2g}, and the first ones had none: by the "
    "versions new weights arrive, and by d they do not"
)

RISING = 2.0
"""Growth of k3 since it left its range, above which a gap that the first steps did not have at all is no precision."""

ROUNDING_GROWS = (
    "d is as small as rounding makes it, but it grows from step to step, as the rounding of weights that stay alike "
    "does not"
)

SETTING_GROWS = (
    "the log-probs alone would be taken for {cause!r}, as updates of the trainer's policy can look; k3 is {times:.2g} "
    "times that when it left its range, after steps in which the two sides agreed, and a setting of the sampler mostly "
    "makes one gap from its first step on"
)

PROMPT_GROWS = (
    "the log-probs alone would be taken for {cause!r}; but the two sides agreed in the first steps, and the gap has "
    "grown since it began, as where updates do not reach the sampler"
)

ALSO_A_CHANGE = (
    "what changed in the course of the run, such as the prompt, the temperature, a truncation (top_p, top_k), a "
    "penalty or the precision of the sampler, "
    "leaves the same where training makes its gap grow"
)

LOST_UPDATES = (
    "check that every update reaches the sampler: score one known sequence on both sides after a weight sync; with "
    "LoRA, merge or reload the adapter at every sync"
)


BEGAN = (
    "in the first steps the two sides agreed, and this gap came at once and has not grown since: look for what changed "
    "in the sampler then, such as its precision or its weights"
)


@dataclass(frozen=True)
class NamedCause:
    """A cause for an alarm.

    Args:
        cause: an id of ``offcorr.diagnose.CAUSES``, "unknown" or "clean".
        confidence: from 0 to 1.
        evidence: sentences beside the series' own.
        advice: what to change.
    """

    cause: str
    confidence: float
    evidence: tuple[str, ...]
    advice: str


def named_cause(
    series: Series,
    report: Report | Exception | None,
    sampling: Mapping[str, float],
    *,
    same_weights: bool = False,
    precision: str | None = None,
    lag: int | None = None,
    records: Sequence[Record] = (),
    by_updates: bool = False,
) -> NamedCause:
    """The cause of a series' alarm.

    Args:
        report: of the last batches; the error where the diagnosis failed, None without records.
        sampling: settings of the sampler that change its distribution, such as top_p, as the configuration has them.
        same_weights: ``old_logp`` is of the weights that sampled, so their age explains no gap of the engine.
        precision: of the sampler's weights, where the sampler says it.
        lag: that the sampler is set to, in optimizer steps, where it says it.
        records: those that the report is on; of staleness with ``old_logp`` where the sampler logged nothing.
        by_updates: of staleness, whether the sampler agrees with ``old_logp``, so that weights alone make the gap.
    """
    if series.overdue:  # the versions say it, whatever else the data look like
        return NamedCause("stale_weights", BY_VERSIONS, (), LOST_UPDATES)
    if isinstance(report, Exception):
        if isinstance(report, NothingToCompare):
            if series.name == "staleness" and records:
                return _of_own_log_probs(series, records)
            unknown = NamedCause("unknown", 0.0, (str(report),), ADVICE[series.name])
            return _configured(unknown, sampling) if sampling and series.name == "surprise" else unknown
        failed = f"the diagnosis failed ({type(report).__name__}: {report})"
        return NamedCause("unknown", 0.0, (failed,), ADVICE[series.name])
    if report is None:
        return NamedCause("unknown", 0.0, (), ADVICE[series.name])
    if series.name == "engine":
        report = _of_the_engine(report)
    named = NamedCause(report.verdict, report.confidence, (), ADVICE[series.name])
    if series.name == "engine" and same_weights and named.cause in OF_OTHER_WEIGHTS:
        named = _of_same_weights(report, precision)
    for finding in report.causes:
        if finding.cause == named.cause:
            others = tuple(_temperature(report)) if OF_OTHER_CHANGES in finding.evidence else ()
            others += tuple(_others(report)) if named.confidence <= ALSO_UPDATES else ()
            # Whether the sampler or the trainer moved, staleness alone does not tell.
            general = series.name == "staleness" and named.cause in OF_AGE
            advice = named.advice if general else finding.advice
            named = replace(named, evidence=(finding.evidence, *others), advice=advice)
    if sampling and named.cause in TRANSFORMED:
        return _configured(named, sampling)
    if updated := _by_own_updates(named, series, records):
        return updated
    if named.cause == "precision" and _grows(series, report):
        named = _grown(ROUNDING_GROWS, series, report)
    elif _grows_as_no_setting(named, series, report):
        named = _grown(SETTING_GROWS.format(cause=named.cause, times=series.risen), series, report)
    elif named.cause in OF_THE_PROMPT and (series.keeps_growing or (series.agreed and series.risen >= RISING)):
        named = _grown(PROMPT_GROWS.format(cause=named.cause), series, report)
    elif named.cause == "precision" and series.moved and series.agreed:
        named = replace(named, evidence=(*named.evidence, BEGAN))
    if not same_weights or series.name == "staleness":
        named = _of_known_age(named, series, report, by_updates)
    named = _of_known_precision(_never_updated(named, series, report), series, report, precision)
    return _of_own_lag(named, series, report, lag)


def _temperature(report: Report) -> Iterator[str]:
    """The temperature that the evidence of a cause beside it speaks of, in half a sentence."""
    for finding in report.causes:
        if finding.cause in FITTED:
            yield f"the temperature is a second cause, {finding.cause}, of confidence {finding.confidence:.2f}"


def _others(report: Report) -> Iterator[str]:
    """The causes that leave the same traces as the verdict, in half a sentence."""
    evidence = getattr(report, "evidence", None)
    words = (
        []
        if evidence is None
        else [other.words for other in CAUSES[report.verdict].not_told_from if not other.settled(evidence)]
    )
    if words:
        yield f"logged data do not tell it from {', nor from '.join(words)}"


def still(alarms: Iterable[Series], named: NamedCause) -> NamedCause:
    """The cause that an alarm has, where the new one is what it comes to look like, or another name of it.

    Updates that a sampler does not get sharpen the trainer's policy, so that its weights look like a temperature.

    Args:
        alarms: the series under alarm, the one whose cause is looked for first.
    """
    for series in alarms:
        if series.cause in OLDER and named.cause in OLDER:
            return replace(named, cause=series.cause)
        if series.cause in OF_AGE and named.cause in SHARPENED and named.confidence <= ALSO_UPDATES:
            said = f"the log-probs alone would be taken for {named.cause!r} by now, as where updates sharpen the policy"
            return NamedCause(series.cause, series.confidence, (said,), ADVICE[series.name])
    return named


def _of_the_engine(report: Report) -> Report:
    """The report without the trainer's updates on the batch, which move ``logp`` from ``old_logp`` alone."""
    left = [one for one in report.causes if one.of_d]
    if len(left) == len(report.causes):
        return report
    verdict, sure = (left[0].cause, left[0].confidence) if left else ("unknown", 0.0)
    return replace(report, verdict=verdict, confidence=sure, causes=left)


def _of_same_weights(report: Report, precision: str | None) -> NamedCause:
    """The cause where the weights' age is ruled out: the sampler's lower precision, or the next that was found."""
    if precision not in (None, "fp32"):
        said = f"the sampler's weights are {precision}, and old_logp is of the same weights in the trainer's precision"
        return NamedCause("precision", max(report.confidence, 0.5), (said,), CAUSES["precision"].advice)
    left = [finding for finding in report.causes if finding.cause not in OF_OTHER_WEIGHTS]
    if left:
        return NamedCause(left[0].cause, left[0].confidence, (), ADVICE["engine"])
    said = "old_logp is of the weights that sampled, so their age does not explain the gap"
    return NamedCause("unknown", 0.0, (said,), ADVICE["engine"])


def _configured(named: NamedCause, sampling: Mapping[str, float]) -> NamedCause:
    """The setting that the configuration has, in place of what the log-probs alone would be taken for."""
    if named.cause in sampling:
        return named
    cause = next(iter(sampling))
    settings = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
    alike = "" if named.cause == "unknown" else f", and the log-probs alone would be taken for {named.cause!r}"
    return NamedCause(
        cause,
        max(named.confidence, 0.5),
        (*named.evidence, f"the configuration sets {settings}{alike}"),
        CAUSES[cause].advice,
    )


def _by_own_updates(named: NamedCause, series: Series, records: Sequence[Record]) -> NamedCause | None:
    """The trainer's updates, where the run shows that they make the gap of staleness; None where it does not."""
    if series.name != "staleness" or named.cause in ("clean", "weights_swapped") or not records:
        return None
    versioned = any(record.rollout_version is not None for record in records)
    if versioned and named.cause not in OF_AGE:  # of samples with an age, a setting may distort all alike
        return None
    if not (said := of_own_updates(series, records)):
        return None
    return NamedCause("policy_updates", max(named.confidence, 0.75), (said,), LOWER_LEARNING_RATE)


def _of_own_log_probs(series: Series, records: Sequence[Record]) -> NamedCause:
    """The cause where the sampler reports no log-probs, as TRL's own generation does: ``logp`` moved from ``old_logp``,
    which the trainer computed."""
    if said := of_own_updates(series, records):
        return NamedCause("policy_updates", 0.75, (OWN_LOG_PROBS, said), LOWER_LEARNING_RATE)
    return NamedCause("unknown", 0.0, (OWN_LOG_PROBS,), OWN_ADVICE)


def _of_known_age(named: NamedCause, series: Series, report: Report, by_updates: bool) -> NamedCause:
    """The sampler's age in place of a setting, where versions report an age and the gap grew since the first step.

    A setting makes about the same gap from the first step on, and updates that sharpen the policy look like a
    temperature.  A setting that changes in the run leaves its own baseline, and is seen in samples without an age, too.
    Where the samples of the first logged step had an age already, that step shows a part of the gap, and less growth
    is enough.
    """
    evidence = getattr(report, "evidence", None)
    other = named.cause == "unknown" or (named.cause in CAUSES and CAUSES[named.cause].stage in OF_CONFIGURATION)
    other = other or (named.cause == OF_OTHER_TEXT and named.confidence <= ALSO_UPDATES)
    if not other or named.cause in (*OF_AGE, "weights_swapped") or evidence is None or not older(evidence):
        return named
    times = (series.size or 0.0) / max(series.start, SMALLEST_K3)
    least = 0.0 if named.cause == OF_OLDER_PROMPT else GROWN if series.start_lag else NO_PRECISION
    changed = series.moved and not series.aged and not by_updates
    if times < least or changed or gap_without_age(evidence):
        return named
    said = (
        f"by the logged versions the sampler's weights are older than the trainer's, and k3 is {times:.2g} times that "
        "of the first logged step"
    )
    alone = f"(the log-probs alone would be taken for {named.cause!r})"
    if named.cause == OF_OLDER_PROMPT:
        said += f"; these explain the gap without an old prefix cache {alone}"
    elif named.cause != "unknown":
        said += f"; a setting would have had its effect there, too {alone}"
    advice = ADVICE["staleness"] if series.name == "staleness" else CAUSES["stale_weights"].advice
    return NamedCause("stale_weights", named.confidence, (said,), advice)


def _size_without_age(series: Series) -> float:
    """k3 of a step whose samples were of the trainer's own weights, the last one where it is known; 0: there was
    none.
    """
    if series.new_size is not None:
        return series.new_size
    return 0.0 if series.start_lag else series.start


def _as_large_without_age(series: Series) -> bool:
    """Whether samples of the trainer's own weights show the engine's gap, too, about as large."""
    fresh = _size_without_age(series)
    return series.name == "engine" and fresh > SMALLEST_K3 and (series.size or 0.0) < GROWN * fresh


def _of_known_precision(named: NamedCause, series: Series, report: Report, precision: str | None) -> NamedCause:
    """The sampler's lower precision in place of old weights, where samples without an age show the gap, too, or of
    another prompt, as a sampler that says its precision takes the trainer's token ids.

    Without logged versions no sample is known to have no age, and a gap that grows is not of the precision alone.
    """
    if named.cause not in (*OLDER, *OF_THE_PROMPT) or precision in (None, "fp32") or not _as_large_without_age(series):
        return named
    evidence = getattr(report, "evidence", None)
    grown = (series.size or 0.0) >= GROWN * max(series.start, SMALLEST_K3)
    if (evidence is None or not versioned(evidence)) and (grown or _grows(series, report)):
        said = f"the sampler's weights are {precision}, which by itself leaves about the same gap in every step"
        return replace(named, evidence=(*named.evidence, said))
    said = (
        f"the sampler's weights are {precision}, and k3, {series.size:.2g}, was {_size_without_age(series):.2g} of "
        "samples without an age"
    )
    return NamedCause("precision", max(named.confidence, 0.5), (said,), CAUSES["precision"].advice)


def _of_own_lag(named: NamedCause, series: Series, report: Report, lag: int | None) -> NamedCause:
    """Old weights in the words for a run whose sampler is set to lag: no fault, where the versions say that it lags."""
    evidence = getattr(report, "evidence", None)
    if named.cause != "stale_weights" or not lag or evidence is None or not older(evidence):
        return named
    if _as_large_without_age(series):
        said = f"k3 was {_size_without_age(series):.2g} of samples without an age, so that no lag makes this gap"
        return replace(named, evidence=(*named.evidence, said))
    return replace(named, advice=OWN_LAG.format(lag=lag) + (APART if series.name == "engine" else ""))


def _grows(series: Series, report: Report) -> bool:
    """Whether d keeps growing, as it does where updates do not reach the sampler."""
    evidence = getattr(report, "evidence", None)
    if series.growth >= NO_PRECISION or series.risen >= (RISING if series.agreed else GROWN):
        return True
    return evidence is not None and growth(evidence) is not None


def _never_updated(named: NamedCause, series: Series, report: Report) -> NamedCause:
    """That no update reaches the sampler, where the run says since when and no logged version explains it."""
    evidence = getattr(report, "evidence", None)
    older_by_log = evidence is not None and older(evidence)
    if series.name == "surprise" or named.cause not in OF_AGE:
        return named
    if older_by_log or not (series.never_fell or series.never_synced):
        if series.name == "staleness" and series.without_age and older_by_log:
            return NamedCause("adapter_not_synced", named.confidence, (REFUTED.format(series.new_size),), LOST_UPDATES)
        return named
    also = () if evidence is not None and versioned(evidence) else (ALSO_A_LAG,)
    if not series.never_fell:
        said = (
            f"sampler and trainer agreed at the first step, and k3 has been above {UNSYNCED:g} in the last "
            f"{series.behind} steps, although the reported lag is 0: it looks as if the sampler was never updated"
        )
        return NamedCause("adapter_not_synced", named.confidence, (said, *also), f"{LOST_UPDATES}; {REPORTED}")
    if series.agreed_steps >= SEVERAL:
        said = (
            f"sampler and trainer agreed up to step {series.agreed_until}, and k3 has grown since, to "
            f"{series.size:.2g}: it looks as if updates had not reached the sampler since step {series.agreed_until}"
        )
        sure, also = min(named.confidence, EITHER), (*also, ALSO_A_CHANGE)
        return NamedCause("adapter_not_synced", sure, (said, *also), f"{LOST_UPDATES}; {REPORTED}")
    said = (
        f"sampler and trainer agreed at the first step, and k3 was the largest so far in {series.highs} of the "
        f"{series.steps - 1} steps since: it looks as if the sampler was never updated, as a copy of the model that "
        "gets no new weights"
    )
    return NamedCause("adapter_not_synced", named.confidence, (said, *also), f"{LOST_UPDATES}; {REPORTED}")


EXACT = 0.001
"""Share of d that a temperature leaves, at most, where nothing else lies between the two sides; older weights leave
more."""


def _grows_as_no_setting(named: NamedCause, series: Series, report: Report) -> bool:
    """Whether what looks like a setting of the sampler keeps growing, after steps in which the two sides agreed."""
    setting = named.cause in SHARPENED or (named.cause in CAUSES and CAUSES[named.cause].stage == "sampling")
    if named.cause in TRUNCATIONS:  # which moves d below 0 and the mean ratio below 1, as no update does
        return False
    if not setting or named.confidence > ALSO_UPDATES:
        return False
    evidence = getattr(report, "evidence", None)
    if named.cause in FITTED and evidence is not None and multiplies(evidence, EXACT):
        return False
    return series.name != "surprise" and series.agreed and series.moved and series.risen >= RISING


EITHER = 0.5
"""Confidence in updates that do not reach the sampler, where a change in the course of the run leaves the same."""


def _grown(said: str, series: Series, report: Report) -> NamedCause:
    """Updates that do not reach the sampler, in place of a cause that makes about the same gap in each step."""
    evidence = getattr(report, "evidence", None)
    cause = "stale_weights" if evidence is not None and older(evidence) else "adapter_not_synced"
    return NamedCause(
        cause,
        EITHER,
        (said, ALSO_A_CHANGE),
        ADVICE["staleness"] if series.name == "staleness" else LOST_UPDATES,
    )


def stays(series: Series, found: NamedCause) -> bool:
    """Whether the cause that was named stays, after a look that found this one."""
    # Weights that drift apart have other names as they do, and first that of a lower precision.
    alike: tuple[str, ...] = ("precision", *OF_AGE) if series.cause in OF_AGE else (series.cause,)
    if series.cause == "policy_updates":  # until a generation begins with a gap
        alike = ("precision", "policy_updates")
    if found.cause in (*alike, *NO_CAUSE):
        series.rival = ""
        return True
    return series.cause not in NO_CAUSE and not series.outweighs(found.cause, found.confidence)
