"""``informed``: a diagnosis from logs, corrected by what a model at hand says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from offcorr.diagnose.causes import CAUSES, Finding
from offcorr.diagnose.causes.base import Alternative
from offcorr.diagnose.causes.policies import EARLIER, FAR, repeats_itself
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.causes.unlogged import SELECTED
from offcorr.diagnose.causes.versions import same_version
from offcorr.diagnose.diagnosis import DRAWS_UNKNOWN, Report, with_verdict, without_cause
from offcorr.diagnose.evidence import SAME, Evidence
from offcorr.diagnose.questions import HIDDEN_BY_DROPOUT, open_questions
from offcorr.diagnose.rescore import (
    EXPLAINS,
    NEARLY_ALL,
    OF_CHECKPOINTS,
    TRANSFORMS,
    Hypothesis,
    Rescored,
    steps_in_words,
)

SAME_HYPOTHESIS = {"temperature": ("raw_logprobs", "unnormalised")}
"""Causes that a hypothesis cannot be told from, which keep the name that the logged data gave them."""

SILENT = {
    "temperature": "temperature_silent",
    "top_p": "top_p_silent",
    "top_k": "top_p_silent",
    "min_p": "top_p_silent",
    "repetition_penalty": "penalty_silent",
}
"""The cause of a hypothesis, and its name where neither side logged it."""


TRAINERS = ("dropout", "position", "policy_updates")
"""Causes in how the trainer scores."""

OTHER_WEIGHTS_OF_TRAINER = (
    "the trainer's log-probs are of other weights than the sampler's",
    "give, as --model, the weights that old_logp is of; if these are they, compute old_logp with the weights that "
    "sampled, or correct for the difference with a method that compares the two",
)
OF_TRAINER = {
    "stale_weights": OTHER_WEIGHTS_OF_TRAINER,
    "adapter_not_synced": OTHER_WEIGHTS_OF_TRAINER,
}
"""Title and advice of a cause that is named for the sampler, where it is the trainer's."""

EXACTLY = 0.02
"""Share of mean |d| up to which two log-probs are the same."""

FAR_OFF = 0.1
"""Share of mean |d| above which a difference between model and sampler has a cause."""

FIRSTS = 6
"""Completions whose first tokens tell."""

TELLING = math.log(0.95)
"""Log-prob below which a token shows whether two log-probs are the same: about a nearly certain one any two agree."""

SEVERAL, FEW = 3, 0.25
"""Such tokens that a sequence needs to show that it agrees; share of the others that may agree by chance."""

REFUTED = 0.5
"""The most that a cause from the logs is sure where its own hypotheses were tried and do not explain the gap."""

MOST_OF_IT = 0.95
"""Share of the gap that a temperature, a truncation or a penalty explains, below which another one may have made it:
a min_p of .5 has left .93 to a temperature of .3."""

OF_ANOTHER = (
    "whether the cause is {} or another change of the logits, which may fit better: a softcap, a clamp, a logit_bias, "
    "one of those that were tried at another value, or two of them. To find out, compare how each side computes its "
    "logits"
)

AT_WHICH = "; at which temperature the tokens were drawn, the one that was logged or another, these tokens do not tell"

OF_THE_DUMP = 0.6
"""Mean |d| of the steps that the model fits, as a share of the dump's, below which it says little of the others."""

OF_SOME_STEPS = 0.65
"""The most that a cause of these steps is sure."""

OTHER_STEPS = (
    "what makes the difference in the other steps, which is larger: the model fits {} alone. To find out, give --model "
    "the checkpoint of a later step, and the dump of that step"
)

NOISY = 0.65
"""The most that dropout is sure by its size alone: padding, or another prompt, may move log-probs by as much."""

OTHER_LOGITS = 0.25
"""Share of mean |d| by which the trainer's log-probs are off the model's, above which a transform of the sampler's does
not say what the trainer did."""

SURE_OF_THE_SAMPLER = 0.65
"""The most that a cause is sure then."""

CLOSE, AS_CLOSE = 0.75, 1.1
"""The most that a hypothesis is sure where one of another cause leaves less than twice its gap; and the multiple of it
up to which it is no surer than that one."""

SLIGHT = (
    "whether the tokens were drawn under a slight temperature, truncation or penalty that neither side logs: the "
    "sequences that were scored again are too few to tell. To find out, score more (--rescored)"
)

WHY_SO_DRAWN = (
    "why {} by the model's distributions: a ban or a bias of tokens (logit_bias, bad_words, min_tokens) that neither "
    "side logs, tokens that the model did not sample, or another prompt that both sides scored. To find out, compare "
    "the sampler's options, and decode these tokens"
)

ASKED = ". To find out, give --model"
ASKED_WITH_MODEL = {
    ", or give --model, with the adapter apart": ", or give a --model with its adapter apart",
    "give --model, with the adapter apart": "give a --model with its adapter apart",
    "give --model, or ": "",
    "give --model and, as --checkpoint, the weights that sampled": "give, as --checkpoint, the weights that sampled",
}
"""Requests for a model, and what is left of them where there is one."""

NO_LAG = (
    "; the logged versions of both sides are equal, so this is no lag on purpose: an update did not reach the sampler, "
    "or the sampler's precision is one that was not tried"
)

WHAT_THE_TRAINER_DID = (
    "what the trainer does to its logits: its log-probs are {off:.2g} nats from the model's at every temperature, and "
    "a softcap, a clamp or a scale that the model does not have would leave that. To find out, compare how each side "
    "computes its logits"
)

EARLIER_CHECKPOINTS = "give, as --checkpoint, the base model and earlier checkpoints"
OTHER_WEIGHTS = "give a checkpoint of other weights"
COMPARE = f"{OTHER_WEIGHTS}, or compare the prompt ids that each side read"


def informed(report: Report, rescored: Rescored) -> Report:
    """The report with what the hypotheses add: the cause of the gap, and a transform that neither side logged.

    A hypothesis that explains enough of the gap takes the place of the causes that cannot be told from it.  The tokens
    themselves say what they were drawn from: where a transform of the model's distributions makes all of them together
    likelier than the log-probs that the sampler logged do, and than the model as it is, it is named.
    """
    if rescored.other_model:
        return report
    evidence = report.evidence
    silent, read = _of_the_draws(rescored), _of_what_the_trainer_read(rescored)
    gap = read or _of_the_gap(report, rescored) or _of_the_trainer(report, rescored)
    part = 1.0 if gap is None or gap.cause in TRAINERS else _part(evidence, rescored)
    replaced = _replaced(report, rescored, silent, gap, part)
    if gap is not None and read is None and gap.cause not in TRAINERS:
        gap = _beside_the_trainer(gap, rescored)
        replaced.discard("dropout")  # what repeats itself shows it, beside whatever the sampler does
    others = [
        _refuted(_older(one, rescored, same_version(evidence)), rescored)
        for one in report.causes
        if one.cause not in replaced
    ]
    if gap is not None and part < 1:
        alike = [one for one in (*report.causes, *others) if one.cause == gap.cause]
        others = [one for one in others if one.cause != gap.cause]
        gap = _of_some_steps(gap, part, alike, report, rescored)
    # What is drawn wrongly precedes two policies that differ.
    first, second = (silent, gap) if gap is not None and CAUSES[gap.cause].stage == "policies" else (gap, silent)
    causes = _larger_gap_first([one for one in (first, second, *others) if one is not None], evidence)
    if part < 1:
        causes.sort(key=lambda one: -one.share)
    cannot_tell = _questions(report, rescored, silent, gap, [one.cause for one in others])
    if part < 1:
        cannot_tell.append(OTHER_STEPS.format(steps_in_words(rescored.steps)))
    if causes:
        return with_verdict(dataclasses.replace(report, causes=causes, cannot_tell=cannot_tell))
    return _without_causes(report, rescored, cannot_tell)


def _replaced(report: Report, rescored: Rescored, silent: Finding | None, gap: Finding | None, part: float) -> set[str]:
    """The ids of the causes from the logs that what was found with the model takes the place of, or excludes.

    Args:
        part: see ``_part``.
    """
    found = [one for one in (silent, gap) if one is not None]
    stages = {CAUSES[one.cause].stage for one in found} & {"unlogged", "policies"}  # of which one cause is named
    if part < 1:  # the logs speak of the other steps, too
        stages -= {"policies"}
    replaced = {one.cause for one in found} | {id for id, cause in CAUSES.items() if cause.stage in stages}
    if rescored.best_drawn[1] <= 0:  # the sequences that were scored again speak against what the logs of all show
        replaced |= set(SILENT.values())
    if not rescored.experts:
        replaced.add("moe_routing")
    if gap is not None:
        room = 2 * (1 - part * gap.share) + 0.1  # of mean |d|: no more is left to a cause that the logs show beside it
        of_d = ("sampling", "policies") if part * gap.share > NEARLY_ALL else ("sampling",)
        of_gap = [one for one in report.causes if CAUSES[one.cause].stage in of_d and one.of_d]
        replaced |= {one.cause for one in of_gap if one.share > room}
    return replaced


def _questions(
    report: Report, rescored: Rescored, silent: Finding | None, gap: Finding | None, others: list[str]
) -> list[str]:
    """Questions that the model leaves open.

    Args:
        others: the causes that the logs show beside ``silent`` and ``gap``.
    """
    asked = open_questions(report.evidence, others, draws_known=True)
    if silent is not None:
        asked += [
            f"whether the cause is {silent.cause} or {other.words}. To find out, {other.how}"
            for other in _alike(silent, report.evidence)
        ]
    asked = [_not_yet_done(one, rescored) for one in asked]
    if gap is not None and rescored.hypotheses and _may_be_another(rescored.hypotheses[0]):
        asked.append(OF_ANOTHER.format(gap.cause))
    if "dropout" not in others and any(one is not None and _trainer_is_off(one, rescored) for one in (silent, gap)):
        asked.append(WHAT_THE_TRAINER_DID.format(off=rescored.trainer))
    if gap is None and rescored.gap > EXACTLY * rescored.logged and "dropout" in others:
        asked.append(HIDDEN_BY_DROPOUT)
    return asked


def _without_causes(report: Report, rescored: Rescored, cannot_tell: list[str]) -> Report:
    """The report where neither logs nor model leave a cause: clean, less surely where a transform is nearly found."""
    verdict, sure = report.verdict, report.confidence
    if report.causes:
        verdict, sure = without_cause(report.evidence)
    if verdict == "clean":
        sure = min(without_cause(report.evidence)[1], _odds(rescored.threshold - rescored.best_drawn[1]), DRAWS_UNKNOWN)
        if rescored.best_drawn[1] > 0:
            cannot_tell.append(SLIGHT)
            sure = min(sure, report.confidence) if report.verdict == "clean" else sure
        if rescored.misfit:
            cannot_tell.append(WHY_SO_DRAWN.format(rescored.misfit))
            sure = min(sure, REFUTED)
    return dataclasses.replace(report, verdict=verdict, confidence=sure, causes=[], cannot_tell=cannot_tell)


def _alike(silent: Finding, evidence: Evidence) -> list[Alternative]:
    """Causes that may leave the draws as a silent transform does: where it fits them badly, all that it may be."""
    others = CAUSES[silent.cause].not_told_from if silent.confidence <= REFUTED else (SELECTED,)
    return [other for other in others if not other.settled(evidence)]


def _part(evidence: Evidence, rescored: Rescored) -> float:
    """Mean |d| of the steps that the model fits as a share of that of the dump, where it is far below it; else 1."""
    steps = [record.step in rescored.steps for record in evidence.records]
    fitted = evidence.size[np.array(steps, bool)[evidence.sequence]]
    part = float(fitted.mean()) / max(evidence.gap, 1e-12) if len(fitted) else 1.0
    return part if part < OF_THE_DUMP else 1.0


def _of_some_steps(one: Finding, part: float, alike: Sequence[Finding], report: Report, rescored: Rescored) -> Finding:
    """The finding of the steps that the model fits, as a share of the dump's mean |d|.

    Args:
        alike: findings of the same cause from the logs, which are of the whole dump.
    """
    gap = report.evidence.gap
    said = (
        f"{one.evidence}; this is of {steps_in_words(rescored.steps)}, which alone the model fits: mean |d| is "
        f"{part * gap:.2g} nats there, and {gap:.2g} in the dump"
    )
    share = max([part * one.share, *(other.share for other in alike)])
    sure = one.confidence if alike else min(one.confidence, OF_SOME_STEPS)
    return dataclasses.replace(one, confidence=sure, share=share, evidence=said)


def _beside_the_trainer(finding: Finding, rescored: Rescored) -> Finding:
    """Its share of mean |d| rather than of the model's gap: what the trainer's log-probs are off by themselves is left.

    The difference between model and trainer is taken to have nothing to do with that between model and sampler.
    """
    if rescored.trainer <= EXACTLY * rescored.logged or rescored.logged <= SAME:
        return finding
    left = math.hypot(rescored.trainer, (1 - finding.share) * rescored.gap)
    said = (
        f"{finding.evidence}; the trainer's logged log-probs are {rescored.trainer:.2g} nats from the model's, which "
        "no change of the sampler removes"
    )
    sure = min(finding.confidence, SURE_OF_THE_SAMPLER) if _trainer_is_off(finding, rescored) else finding.confidence
    share = min(finding.share, max(0.0, 1 - left / rescored.logged))
    return dataclasses.replace(finding, confidence=sure, share=share, evidence=said)


def _trainer_is_off(finding: Finding, rescored: Rescored) -> bool:
    """Whether, beside a transform of the sampler's, the trainer's log-probs are far from the model's at every
    temperature.
    """
    return CAUSES[finding.cause].stage == "sampling" and rescored.trainer > OTHER_LOGITS * rescored.logged


def _larger_gap_first(causes: list[Finding], evidence: Evidence) -> list[Finding]:
    """The trainer's updates before two policies that differ by less, as in the report from the logs."""
    if not causes or CAUSES[causes[0].cause].stage != "policies" or evidence.moved <= evidence.gap:
        return causes
    return sorted(causes, key=lambda one: one.cause != "policy_updates")


def _older(finding: Finding, rescored: Rescored, equal_versions: bool) -> Finding:
    """An adapter that does not explain the gap, or that the model has not, is not what the sampler lacks."""
    if finding.cause != "adapter_not_synced":
        return finding
    cause = CAUSES["stale_weights"]
    tried = any(one.cause == finding.cause for one in rescored.hypotheses)
    why = "without its adapter the model is no nearer to the sampler" if tried else "the model has no adapter apart"
    why += NO_LAG * equal_versions
    return dataclasses.replace(
        finding, cause=cause.id, title=cause.title, advice=cause.advice, evidence=f"{finding.evidence}; {why}"
    )


def _refuted(finding: Finding, rescored: Rescored) -> Finding:
    """Less sure where hypotheses of the finding's cause were tried, and none of any cause explains the gap; and where
    the sampler's log-probs are the model's own.
    """
    if rescored.as_the_model and CAUSES[finding.cause].stage == "policies" and finding.cause not in TRAINERS:
        said = f"{finding.evidence}; but scored again, the sampler's log-probs are the model's: look at the trainer's"
        return dataclasses.replace(finding, confidence=min(finding.confidence, REFUTED), evidence=said)
    tried = {one.cause for one in rescored.hypotheses}
    explained = any(one.share > EXPLAINS for one in rescored.hypotheses)
    asked = finding.cause in tried or (finding.cause == "weights_swapped" and not tried.isdisjoint(OF_CHECKPOINTS))
    if finding.cause not in (*OF_CHECKPOINTS, "truncated_prompt", "weights_swapped") or not asked or explained:
        return finding
    if rescored.gap <= SAME or rescored.as_the_model:  # the model leaves no gap to explain
        return finding
    both = not tried.isdisjoint(OF_CHECKPOINTS)
    nothing = "neither the model nor the checkpoint explains it" if both else "the model does not explain it"
    said = f"{finding.evidence}; scored again, {nothing}"
    return dataclasses.replace(finding, confidence=min(finding.confidence, REFUTED), evidence=said)


def _not_yet_done(question: str, rescored: Rescored) -> str:
    """The question without a request for the model, nor for a checkpoint if one was tried."""
    for asked, left in ASKED_WITH_MODEL.items():
        question = question.replace(asked, left)
    question = question.removesuffix(", or give --model")
    if question.endswith(ASKED):
        return f"{question.removesuffix(ASKED)}. Scored again with --model, neither fits well enough to decide it"
    both = "give --model and an earlier --checkpoint"
    if not any(one.cause in OF_CHECKPOINTS for one in rescored.hypotheses):
        return question.replace(both, "give an earlier --checkpoint").replace(EARLIER, EARLIER_CHECKPOINTS)
    left = COMPARE if question.endswith((both, EARLIER)) else OTHER_WEIGHTS
    return question.replace(both, left).replace(EARLIER, left)


def _of_the_gap(report: Report, rescored: Rescored) -> Finding | None:
    """The hypothesis that explains most of the gap, if it explains enough."""
    noisy = not repeats_itself(report.evidence)
    # Beside a noisy trainer older weights leave a model that is nearer to the sampler than the trainer is.
    weights = [
        one for one in rescored.hypotheses if one.cause in OF_CHECKPOINTS and rescored.gap > FAR_OFF * rescored.logged
    ]
    fits = [
        one
        for one in rescored.hypotheses
        if (noisy if one.cause == "dropout" else not rescored.as_the_model or one in weights)
    ]
    best = fits[0] if fits else None
    if best is None or best.share <= EXPLAINS:
        return None
    if best.cause == "dropout":
        said = (
            f"scored again without dropout, the model's log-probs are {best.gap:.2g} nats from the sampler's on "
            f"average; its dropout moves them by {rescored.dropout:.2g}, about as much as the trainer's are off "
            f"({rescored.logged:.2g})"
        )
        by_log = max((one.confidence for one in report.causes if one.cause == "dropout"), default=0.0)
        return _finding("dropout", max(min(best.share, NOISY), by_log), best.share, EXPLAINS, best.share, said)
    named = {one.cause: one.confidence for one in report.causes}
    id = next((one for one in SAME_HYPOTHESIS.get(best.cause, ()) if one in named), best.cause)
    sure, beside = _sure(best, fits)
    undecided = best.cause in SAME_HYPOTHESIS and named.get(id, 0.0) <= REFUTED
    if undecided and id != "unnormalised" and abs(rescored.drawn_as_logged) > rescored.threshold:
        id = best.cause if rescored.drawn_as_logged > 0 else "raw_logprobs"  # as the trainer's distributions have it
        undecided = False
    said = (
        f"scored again under the hypothesis '{best.words}', the sampled tokens are {best.gap:.2g} nats from the "
        f"sampler's log-probs on average, in place of {best.before:.2g}: it explains {best.share:.0%} of the "
        f"gap{beside}"
    )
    said += NO_LAG * (id == "stale_weights" and same_version(report.evidence))
    if _may_be_another(best):
        sure = min(sure, REFUTED)
    if undecided:
        said += AT_WHICH
        sure = min(sure, REFUTED)
    return _finding(id, sure, best.share, EXPLAINS, best.share, said)


def _may_be_another(best: Hypothesis) -> bool:
    """Whether the best is a change of the logits that leaves more than another one may leave."""
    return best.cause in TRANSFORMS and EXPLAINS < best.share < MOST_OF_IT


def _sure(best: Hypothesis, tried: Sequence[Hypothesis]) -> tuple[float, str]:
    """The share of the gap that the best hypothesis explains; less where one of another cause nearly does, which is
    said in half a sentence.
    """
    others = [one for one in tried if one.cause != best.cause]
    second = min(others, key=lambda one: one.gap, default=None)
    if second is None or second.gap > 2 * best.gap + SAME:
        return best.share, ""
    sure = REFUTED if second.gap < AS_CLOSE * best.gap + SAME else CLOSE
    return min(best.share, sure), f"; under '{second.words}' [{second.cause}] {second.gap:.2g} nats are left"


def _of_what_the_trainer_read(rescored: Rescored) -> Finding | None:
    """The hypothesis about the trainer that explains most of the gap, if it explains enough."""
    best = rescored.of_trainer[0] if rescored.of_trainer else None
    if best is None or best.share <= EXPLAINS:
        return None
    sure, beside = _sure(best, rescored.of_trainer)
    said = (
        f"scored again, the sampler's log-probs are the model's own, and the trainer's, {rescored.logged:.2g} nats "
        f"from them on average, are {best.gap:.2g} from those under the hypothesis '{best.words}': it explains "
        f"{best.share:.0%} of the gap{beside}"
    )
    found = _finding(best.cause, sure, best.share, EXPLAINS, best.share, said)
    title, advice = OF_TRAINER.get(best.cause, (found.title, found.advice))
    return dataclasses.replace(found, title=title, advice=advice)


def _of_the_trainer(report: Report, rescored: Rescored) -> Finding | None:
    """A cause in how the trainer scores, where the sampler's log-probs are the model's and the trainer's are not.

    Nothing that the sampler does is a cause then.
    """
    evidence = report.evidence
    cause = CAUSES.get(report.verdict)
    if rescored.gap > EXACTLY * rescored.logged or report.verdict in TRAINERS:
        return None
    if report.verdict != "unknown" and (cause is None or cause.stage != "policies"):
        return None
    telling = evidence.trainer < TELLING
    same = (evidence.size < EXACTLY * evidence.gap)[telling]
    sequence, begins = evidence.sequence[telling], evidence.position[telling] == 0
    differing = np.bincount(sequence, ~same, len(evidence.records))
    whole = differing[np.bincount(sequence, minlength=len(evidence.records)) >= SEVERAL] == 0
    firsts, others = same[begins], same[~begins]
    share = float(whole.mean()) if len(whole) else 0.0
    agree = max(share, float(firsts.mean()) if len(firsts) else 0.0)
    known = "scored again, the sampler's log-probs are the model's own, and the trainer's differ by "
    known += f"{rescored.logged:.2g} nats on average; "
    where, sure = "", 0.9
    if 0 < share < 1:
        where, sure = f"in {share:.0%} of the sequences", REFUTED  # the others may have been read with other prompts
    elif len(firsts) >= FIRSTS and firsts.all() and len(others) and others.mean() < FEW:
        where = "at the first token of every completion, and hardly at any other"
    if where:
        return _finding("position", sure, agree, 0.0, 1.0, f"{known}they agree exactly {where}")
    if same_version(evidence) and Profile.of(evidence).mean > FAR and not repeats_itself(evidence):
        said = f"{known}both sides had the same weights, as the logged versions say, and no sequence agrees"
        return _finding("dropout", NOISY, agree, 0.0, 1.0, said)
    return None


def _of_the_draws(rescored: Rescored) -> Finding | None:
    """The transform that the tokens were drawn under, if neither side logged it."""
    best, ahead = rescored.best_drawn
    fits = [one for one in rescored.hypotheses if one.cause in TRANSFORMS]
    if best is None or ahead <= rescored.threshold:
        return None
    id = SILENT[best.cause]
    second = max((one.drawn for one in fits if SILENT[one.cause] != id), default=-math.inf)
    said = (
        f"the model's distributions under '{best.words}' fit the sampled tokens better than its own, and than the "
        f"log-probs that the sampler logged: the tokens are e^{ahead:.0f} times likelier to be drawn so"
    )
    sure = _odds(best.drawn - second)
    if rescored.misfit:
        said += f"; but they do not fit as draws from these, either: {rescored.misfit}"
        sure = min(sure, REFUTED)
    return _finding(id, sure, ahead, rescored.threshold, 1.0, said)


def _finding(id: str, sure: float, statistic: float, threshold: float, share: float, said: str) -> Finding:
    cause = CAUSES[id]
    return Finding(id, sure, statistic, 0.0, threshold, share, cause.title, said, cause.advice)


def _odds(ahead: float) -> float:
    """Probability of the better of two hypotheses from the log of their likelihood ratio."""
    return 1 / (1 + math.exp(-ahead)) if ahead < 30 else 1.0
