"""``diagnose``: the causes of a mismatch, from what trainer and sampler logged."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offcorr.diagnose.causes import CAUSES, STAGES, Cause, Finding, Found, confidence
from offcorr.diagnose.causes.base import NEARLY_GREEDY
from offcorr.diagnose.causes.policies import differs_by_itself
from offcorr.diagnose.causes.sampling import loses_mass
from offcorr.diagnose.causes.truncation import TRUNCATIONS
from offcorr.diagnose.causes.versions import lag_by_versions, same_version, shown_to_be_older
from offcorr.diagnose.evidence import SAME, Evidence
from offcorr.diagnose.questions import MANY, of_one_side, open_questions, unexplained_surprise
from offcorr.diagnose.record import Record
from offcorr.diagnose.steps import differing_sequences, differing_steps

SAMPLED_TOKENS = 2_000_000
"""Tokens that the tests read, at most, of a random sample of the sequences."""

LITTLE, OF_THE_REST = 0.05, 0.5
"""Share of mean |d| below which a policy that differs may be what a test did not take away of the causes before it, and
its confidence at most then."""

LEFT_OVER = 0.65
"""Confidence at most in two policies that differ, beside sequences that were encoded again: some may not be found; and
in placeholders of 0 beside a truncation."""

ALONE = TRUNCATIONS | {"shift", "retokenised"}
"""Causes beside which a log-prob of 0 may be of a token that a truncation left alone: truncations, and those that move
such a log-prob to another token."""

OF_GREEDY = 0.5
"""Confidence at most in what a temperature near 0 leaves, too."""

BESIDE_DROPOUT = 0.5
"""Confidence at most in a further cause beside dropout, whose noise can leave its traces."""

BESIDE_A_FIT = 0.5
"""Confidence at most in what the fit of a temperature leaves."""

OF_OTHERS = {
    "stale_weights",
    "adapter_not_synced",
    "precision",
    "moe_routing",
    "weights_swapped",
    "chat_template",
    "truncated_prompt",
    "stale_prefix_cache",
}
"""Causes that what it leaves may look like, where the logits were changed otherwise."""

OF_OTHER_CHANGES = (
    "; it is what the temperature leaves, and where that is another change of the logits, such as a softcap or a "
    "penalty on repeated tokens, it is of the same cause"
)

OF_WHAT_IS_LEFT = "; this is of the part of d that the other causes named here leave"

FITTED, OF_MISFIT = {"temperature", "raw_logprobs"}, {"stale_weights", "adapter_not_synced", "precision"}
"""Causes whose fit, without entropy or beside a truncation, leaves a part of d, less than half of it, and causes that
this part looks like."""

ROUNDS = 6
"""Causes named at most."""


@dataclass(frozen=True)
class Report:
    """Result of ``diagnose``.

    Args:
        verdict: the id of the cause that explains most; "clean" or "unknown" where there is none; "unknown" also beside
            updates of the trainer that are smaller than a d without a cause.
        confidence: in the verdict, between 0 and 1, among the known causes: a fault without a name may leave the same.
        causes: the causes found, the one that explains most first.
        cannot_tell: what the data cannot decide, and which further field would.
        numbers: sequences and tokens of the dump (``dump_*``) and of the sample that the tests read, and of the sample
            the mean |d|, mean ratio, surprisal balance and, where ``logp`` is logged, mean |logp - old_logp|.
        evidence: the tokens that the tests read.
    """

    verdict: str
    confidence: float
    causes: Sequence[Finding]
    cannot_tell: Sequence[str]
    numbers: Mapping[str, float]
    evidence: Evidence = field(repr=False)

    @property
    def d_unexplained(self) -> bool:
        """Whether d is above what rounding makes, and no cause explains a part of it."""
        return self.evidence.gap > self.evidence.floor and not any(one.part_of_d for one in self.causes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "confidence": self.confidence,
            "causes": [finding.as_dict() for finding in self.causes],
            "d_unexplained": self.d_unexplained,
            "cannot_tell": list(self.cannot_tell),
            "numbers": dict(self.numbers),
        }


def diagnose(records: Iterable[Record], *, seed: int = 0) -> Report:
    """Names the causes of the mismatch in a dump.

    Each cause is looked for; what it explains is taken away, and the rest is looked at again.  Where trainer and
    sampler agree in some optimizer steps, or sequences, and differ in others, the causes are looked for in the latter.
    Of a dump of more than 2 million tokens the tests read a random sample of whole groups of sequences.

    Args:
        records: the sequences; they are read once, and no more than the sample is kept.
        seed: of the sample.

    Raises:
        TypeError: one of the records is no ``Record``.
        ValueError: there is no token that both sides scored.

    >>> rows = [{"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, -2.0], "logp": [-1.0, -2.0]}] * 40
    >>> diagnose(map(Record.of, rows)).verdict
    'clean'
    """
    whole = {"dump_sequences": 0.0, "dump_tokens": 0.0}
    evidence = Evidence.of(_sample(_counted(records, whole), seed))
    if not len(evidence):
        raise ValueError(
            "no token has a log-prob of both sides: rollout_logp is NaN, old_logp is NaN, or mask is 0, everywhere; "
            "log what the sampler reports as it samples (OffPolicy and vLLM do, transformers' generate does not), and "
            "what the trainer computes"
        )
    impossible = _impossible_entropy(evidence)
    if impossible:
        evidence = Evidence.of([dataclasses.replace(one, entropy=None) for one in evidence.records])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite log-probs are data
        differing, of_steps = differing_steps(evidence)
        findings, left = _explain(differing, of_steps)
        questions = []
        if not of_steps and (part := differing_sequences(evidence)):
            if part[0].ageless:
                evidence = dataclasses.replace(evidence, ageless=True)
                findings, left = _explain(evidence)
            findings, left = _of_part(findings, left, evidence, *part)
            questions = [] if findings else [SOME_DIFFER.format(part[1])]
        if (current := _of_logp(evidence)) is not None:
            found = _explain(current)
            if current.unrelated or (found[0] and _stage_of_most(found[0]) in OF_NO_UPDATE):
                questions = [COPIED if evidence.copied else OF_ONE_VERSION]
                evidence, (findings, left) = current, found
        numbers = _numbers(evidence) | whole
        cannot = [*impossible, *questions, *open_questions(evidence, [finding.cause for finding in findings])]
        if findings and np.isfinite(left.floor) and max(LEFT, left.floor) < left.gap < evidence.gap / 10:
            cannot.append(WHAT_IS_LEFT.format(left.gap))
    # The trainer's updates are a gap of their own, between logp and old_logp, while other shares are of mean |d|.  Of
    # two policies that differ and these updates the larger gap comes first; what is logged or drawn wrongly precedes.
    moved = evidence.moved if not all(one.of_d for one in findings) else 0.0
    of_d = evidence.gap / max(evidence.gap + moved, 1e-12)
    fault = max((one.share for one in findings if CAUSES[one.cause].stage in OF_FAULTS), default=1.0)

    def rank(one: Finding) -> float:
        if CAUSES[one.cause].stage == "values" and one.share == 0:  # of both sides alike, so that all of d is of it
            return 1.0
        if CAUSES[one.cause].stage == "policies" and one.of_d:
            return one.share * of_d
        return one.share if one.of_d else min(one.share, fault)

    # Of ranks that are equal but for rounding a fault precedes the trainer's updates, and a cause that is surer than .5
    # comes first; then the order is that of the stages.
    def order(one: Finding) -> tuple[float, bool, bool]:
        return round(rank(one), 2), CAUSES[one.cause].stage in OF_FAULTS, one.confidence > UNSURE

    findings.sort(key=order, reverse=True)
    if findings:
        return with_verdict(Report("", 0.0, findings, cannot, numbers, evidence))
    verdict, sure = without_cause(left)
    sure = min(sure, UNEXPLAINED if unexplained_surprise(evidence, []) else DRAWS_UNKNOWN)
    if evidence.entropy is None:
        sure = min(sure, DRAWS_UNSEEN)
    if of_one_side(evidence.records)[0] > MANY:
        sure = min(sure, UNEXPLAINED)
    if evidence.copied:
        sure, cannot = min(sure, ONE_COLUMN_SURE), [ONE_COLUMN, *cannot]
    return Report(verdict, sure, (), cannot, numbers, evidence)


LEFT = 0.02
"""Mean |d| (nats) that the named causes leave, from which on it is more than rounding, however small a part it is."""

WHAT_IS_LEFT = (
    "what makes the difference that the named causes leave, {:.2g} nats on average of the tokens that are left: a "
    "small part of mean |d|, and more than rounding. To find out, mend what is named, and dump again"
)

BELOW_0, SURPRISE = -0.01, 1e-6
"""The entropy (nats) below which rounding is no excuse, and how near to the surprise of the tokens it is a copy."""

NOT_ENTROPY = (
    "what the entropy of the trainer's distributions is: the logged one was left out, as it {}. To find out, log the "
    "sum of - p ln p over the vocabulary, of the distributions that old_logp is of"
)


def _impossible_entropy(evidence: Evidence) -> list[str]:
    """A sentence about an entropy that is none; nothing of one that may be right."""
    if evidence.entropy is None:
        return []
    known = np.isfinite(evidence.entropy)
    entropy, surprise = evidence.entropy[known], -evidence.trainer[known]
    below, uncertain = int((entropy < BELOW_0).sum()), surprise > 0.1
    if below > 0.01 * len(entropy):
        return [NOT_ENTROPY.format(f"is below 0 at {below:,} of {len(entropy):,} tokens, as no entropy is")]
    if uncertain.sum() >= 16 and not entropy[uncertain].any():
        return [NOT_ENTROPY.format("is 0 at every token, also where the trainer is not certain of it")]
    if uncertain.sum() >= 16 and (np.abs(entropy - surprise) < SURPRISE).mean() > 0.9:
        return [NOT_ENTROPY.format("is -old_logp, number for number: the surprise of the sampled token")]
    return []


OF_NO_UPDATE = ("values", "sampling")
"""The stages of the causes that no update of the weights leaves."""

OF_FAULTS = (*OF_NO_UPDATE, "unlogged")
"""Those of the causes that are logged or drawn wrongly."""


def _stage_of_most(findings: Sequence[Finding]) -> str:
    """The stage of the cause that explains most."""
    return CAUSES[max(findings, key=lambda one: one.share).cause].stage


def _explained(findings: Sequence[Finding]) -> float:
    """The share of the mean |d| that the faults among them explain."""
    return sum(one.share for one in findings if CAUSES[one.cause].stage in OF_NO_UPDATE)


MORE = 0.1
"""Share of the mean |d| by which the faults of a part explain more than those of all sequences, where it is a part that
has them."""


BY_SIZE = ("moe_routing", "precision", "stale_weights")
"""Causes that the sizes of d decide, of which sequences that agree change the mean and the median; others may be read
of the very fact that some agree."""


def _of_part(
    findings: list[Finding], left: Evidence, evidence: Evidence, part: Evidence, said: str
) -> tuple[list[Finding], Evidence]:
    """The causes of all sequences; or those of a part that alone differs, where it shows a fault of the values or of
    the sampling, which beside sequences without it looks like another policy, or where all show nothing but another
    policy.

    Args:
        findings, left: as read from all sequences, which are the evidence.
        part, said: what ``differing_sequences`` gives.
    """
    of_part, left_of_part = _explain(part, said, of_updates=False)
    # Of sequences that have an age, updates that sharpened the policy look like a temperature.
    of_fault = ("values",) if lag_by_versions(part) else OF_NO_UPDATE
    if of_part and _stage_of_most(of_part) in of_fault:
        values = _stage_of_most(of_part) == "values" and findings and _stage_of_most(findings) != "values"
        if values or _explained(of_part) > _explained(findings) + MORE:
            return of_part + [one for one in findings if not one.of_d], left_of_part
    if of_part and not findings and lag_by_versions(part):
        return of_part, left_of_part
    if of_part and findings and _stage_of_most(of_part) == "policies" and findings[0].cause in BY_SIZE:
        room = float(part.size.sum() / max(evidence.size.sum(), 1e-12))
        of_part = [dataclasses.replace(one, share=room * one.share) for one in of_part]
        return of_part + [one for one in findings if not one.of_d], left_of_part
    of_policies = [CAUSES[one.cause].stage == "policies" for one in findings]
    said_of = [one.evidence + said * of for one, of in zip(findings, of_policies, strict=True)]
    return [dataclasses.replace(one, evidence=words) for one, words in zip(findings, said_of, strict=True)], left


COPIED = (
    "what the trainer's log-probs were before its updates on the batch: old_logp is rollout_logp, number for number, "
    "so that logp was compared in its place. To find out, log as old_logp what the trainer computes"
)


ONE_COLUMN_SURE = 0.5
"""The most that "clean" is sure where both columns may be one."""

ONE_COLUMN = (
    "whether the trainer's log-probs are its own or a copy of the sampler's: the two are equal, number for number, as "
    "two forward passes seldom are. To find out, log as old_logp what the trainer computes"
)

OF_ONE_VERSION = (
    "why logp is another than old_logp, although by the versions no update lies between them: old_logp is about "
    "rollout_logp, and may have its fault, so that logp was compared in its place. To find out, score one sequence by "
    "hand as the trainer does, or, where trainer_version is that of the weights of old_logp, log that of logp"
)

SOME_DIFFER = (
    "why some sequences differ and others do not{}. To find out, compare them by the engine, or the worker, that "
    "sampled them"
)

FAR, ABOUT = 0.05, 0.1
"""Mean |logp - old_logp| (nats) above which the two are not of one policy, and mean |d|, as a share of it, up to which
``old_logp`` is about ``rollout_logp``."""


def _of_logp(evidence: Evidence) -> Evidence | None:
    """``logp`` in place of an ``old_logp`` that may have the fault of ``rollout_logp``; None: nothing says so.

    It may if it is a copy, or if, by the versions, it should be ``logp`` and is far from it.
    """
    of_one_version = same_version(evidence) and evidence.moved > FAR and evidence.gap < ABOUT * evidence.moved
    if evidence.moved <= SAME or not (evidence.copied or of_one_version):
        return None
    return Evidence.of(
        [dataclasses.replace(one, old_logp=one.logp, logp=None) for one in evidence.records if one.logp is not None]
    )


DRAWS_UNKNOWN, DRAWS_UNSEEN, UNEXPLAINED = 0.9, 0.7, 0.5
"""The most that "clean" is sure: how the tokens were drawn is in no log-prob, and a model that scores them again finds
no transform that is too slight for so many tokens; the same without entropy, where no log shows it; and where the
tokens surprise the trainer by more, or less, than its own draws do."""


UNSURE, NOT_CERTAIN = 0.5, 0.8
"""Confidence up to which a cause is hardly told from another, and up to which it may be none that has a name."""

NONE_OF_THEM = (
    "whether it is another cause of two policies that differ (older weights, an update that did not arrive, a coarse "
    "precision of weights or cache, another prompt or positions, another change of the logits), or a fault without a "
    "name here, such as a mistake in how one side computes, rescales, stores or orders its log-probs. To find out, "
    "compute the log-probs of one short sequence by hand, and compare them with both sides'"
)


def with_verdict(report: Report) -> Report:
    """The report with the verdict of its causes: the first; "unknown" where that is the trainer's updates, and d, which
    is larger, has no cause.  Where one of them is not certain, it asks whether it is none of them.
    """
    first, evidence, cannot = report.causes[0], report.evidence, report.cannot_tell
    verdict, sure = first.cause, first.confidence
    if CAUSES[verdict].stage == "updates" and report.d_unexplained and evidence.gap > evidence.moved:
        verdict, sure = without_cause(evidence)
    if any(one.confidence <= NOT_CERTAIN for one in report.causes):
        cannot = [*cannot, NONE_OF_THEM]
    return dataclasses.replace(report, verdict=verdict, confidence=sure, cannot_tell=cannot)


def without_cause(left: Evidence) -> tuple[str, float]:
    """Verdict and confidence where nothing was found."""
    if left.gap > left.floor:
        return "unknown", 0.5
    return "clean", float(confidence(np.log(left.floor / max(left.gap, 1e-9))))


def _explain(evidence: Evidence, of_steps: str = "", of_updates: bool = True) -> tuple[list[Finding], Evidence]:
    """Names, takes away, and looks again.

    Args:
        of_steps: the end of each finding's sentence.
        of_updates: whether to look for causes of a difference of ``logp`` and ``old_logp``, too.
    """
    findings: list[Finding] = []
    of_zeros: set[str] = set()
    whole = max(evidence.gap, 1e-12)
    left = evidence
    for stage in STAGES:
        if not np.isfinite(left.floor) and stage != "updates":  # nothing of d is left to explain
            continue
        if stage in ("sampling", "policies") and left.unrelated:
            continue
        causes = {id: cause for id, cause in CAUSES.items() if cause.stage == stage}
        if stage == "policies" and differs_by_itself(left):
            causes = {id: cause for id, cause in causes.items() if cause.of_passes}
        fitted = sum(one.share for one in findings if one.cause in FITTED)
        blurred = left.with_entropy is None or loses_mass(evidence)
        if stage == "policies" and blurred and fitted > 0.5 and not shown_to_be_older(left):
            causes = {id: cause for id, cause in causes.items() if id not in OF_MISFIT}
        while causes and len(findings) < ROUNDS:
            found = {id: found for id, cause in causes.items() if (found := cause.found(left)) is not None}
            found = {id: one for id, one in found.items() if of_updates or one.of_d}
            if not found:
                break
            best = max(found, key=lambda id: found[id].margin)
            after, share = found[best].left, found[best].share
            if share is None:
                rest = 0 if after is None else after.gap * len(after)
                share = (left.gap * len(left) - rest) / (whole * len(evidence))
                share = 1.0 if np.isnan(share) else share  # an infinite gap is explained
            of_zeros |= {best} if found[best].of_zeros else set()
            one = _finding(causes.pop(best), found[best], min(max(share, 0.0), 1.0), of_steps)
            if best in FITTED:  # what one of them leaves looks like the other, and both cannot be
                causes = {id: cause for id, cause in causes.items() if id not in FITTED}
            if left.selected:  # where d is above 0, beside a truncation
                one = dataclasses.replace(one, rough=True)
            if stage == "policies" and any(other.cause == "retokenised" for other in findings):
                one = dataclasses.replace(one, confidence=min(one.confidence, LEFT_OVER))
            if (
                stage == "policies"
                and one.share < LITTLE
                and sum(other.share for other in findings if other.of_d) > 1 - 2 * LITTLE
            ):
                one = dataclasses.replace(one, confidence=min(one.confidence, OF_THE_REST))
            if stage == "policies" and fitted and one.cause in OF_OTHERS and not lag_by_versions(left):
                said = one.evidence + OF_OTHER_CHANGES
                one = dataclasses.replace(one, confidence=min(one.confidence, BESIDE_A_FIT), evidence=said)
            if one.cause in BY_SIZE and not left.as_logged:
                one = dataclasses.replace(one, evidence=one.evidence + OF_WHAT_IS_LEFT)
            findings.append(one)
            if after is None or not len(after):
                left = left.with_floor(np.inf)
                break
            left = after
    if any(one.cause == "dropout" for one in findings):
        findings = [one if one.cause == "dropout" else _beside_dropout(one) for one in findings]
    if not NEARLY_GREEDY.settled(evidence):
        findings = [_of_nearly_greedy(one) for one in findings]
    if of_zeros and any(one.cause in ALONE for one in findings):
        findings = [_beside_zeros(one, of_zeros) for one in findings]
    return findings, left


def _beside_zeros(one: Finding, of_zeros: set[str]) -> Finding:
    """The finding beside others, of which some are of zeros, and some of a truncation, which leaves zeros, too."""
    if one.cause not in of_zeros and one.cause not in TRUNCATIONS:
        return one
    said = "a token that a truncation (top_p, top_k, min_p) left alone has 0, too"
    if one.cause in TRUNCATIONS:
        said = f"more of the zeros of {' and '.join(sorted(of_zeros))}, at tokens that are likely, leave the same"
    said = f"{one.evidence}; {said}"
    return dataclasses.replace(one, confidence=min(one.confidence, LEFT_OVER), evidence=said)


def _of_nearly_greedy(one: Finding) -> Finding:
    """The finding, where a temperature near 0 leaves zeros, and little probability to the other tokens."""
    if NEARLY_GREEDY not in CAUSES[one.cause].not_told_from:
        return one
    said = f"{one.evidence}; a temperature near 0 leaves the same"
    return dataclasses.replace(one, confidence=min(one.confidence, OF_GREEDY), evidence=said)


def _beside_dropout(one: Finding) -> Finding:
    if CAUSES[one.cause].robust:
        return one
    said = f"{one.evidence}; dropout may leave the same"
    return dataclasses.replace(one, confidence=min(one.confidence, BESIDE_DROPOUT), evidence=said)


def _finding(cause: Cause, found: Found, share: float, of_steps: str) -> Finding:
    rough = found.rough or (cause.stage == "policies" and found.share is None)
    return Finding(
        cause.id,
        min(confidence(found.margin), found.surest),
        found.statistic,
        found.error,
        found.threshold,
        share,
        cause.title,
        found.sentence + of_steps,
        cause.advice,
        rough,
        found.of_d,
        rough and found.share is None and found.left is None,
    )


def _numbers(evidence: Evidence) -> dict[str, float]:
    numbers = {
        "sequences": float(len(evidence.records)),
        "tokens": float(len(evidence)),
        "abs_mean": evidence.gap,
        "abs_max": float(evidence.size.max()),
        "ratio_mean": evidence.ratio_identity.value,
        "ratio_mean_se": evidence.ratio_identity.error,
        "k3": float((evidence.ratio - 1 - np.clip(evidence.d, -50, 50)).mean()),
    }
    if evidence.moved > 0:
        numbers |= {"updates_abs_mean": evidence.moved, "updates_abs_max": evidence.moved_most}
    if evidence.balance is not None:
        numbers |= {"surprisal_balance": evidence.balance.value, "surprisal_balance_se": evidence.balance.error}
        numbers["surprisal_balance_tokens"] = float(
            len(evidence.with_entropy or evidence) + len(evidence.aside.trainer)
        )
    return numbers


def _sample(records: Iterable[Record], seed: int) -> list[Record]:
    """A random sample of neighbours of one group, whole, of at most ``SAMPLED_TOKENS`` tokens."""
    kept: list[tuple[float, list[Record]]] = []
    tokens, bound, draw = 0, 1.0, random.Random(seed)
    for group in _groups(records):
        key = draw.random()
        if key >= bound:
            continue
        kept.append((key, group))
        tokens += sum(map(len, group))
        while tokens > SAMPLED_TOKENS and len(kept) > 1:
            bound /= 2
            kept = [one for one in kept if one[0] < bound] or kept[:1]
            tokens = sum(len(record) for _, group in kept for record in group)
    return [record for _, group in kept for record in group]


def _counted(records: Iterable[Record], whole: dict[str, float]) -> Iterable[Record]:
    for at, record in enumerate(records):
        if not isinstance(record, Record):
            raise TypeError(
                f"records[{at}] is a {type(record).__name__}, expected a Record: Record.of makes one of a row, and "
                "offcorr.diagnose.read those of files"
            )
        whole["dump_sequences"] += 1
        whole["dump_tokens"] += len(record)
        yield record


def _groups(records: Iterable[Record]) -> Iterable[list[Record]]:
    """Runs of records with one prompt or group id, in parts where they are longer than half a sample."""
    group: list[Record] = []
    tokens = 0
    for record in records:
        if group and (tokens >= SAMPLED_TOKENS / 2 or not _together(group[-1], record)):
            yield group
            group, tokens = [], 0
        group.append(record)
        tokens += len(record)
    if group:
        yield group


def _together(one: Record, other: Record) -> bool:
    if one.group_id is not None and other.group_id is not None:
        return one.group_id == other.group_id and one.step == other.step
    return np.array_equal(one.prompt_ids, other.prompt_ids)
