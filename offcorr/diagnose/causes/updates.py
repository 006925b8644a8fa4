"""The trainer's own updates, which are no fault."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import CAUSES, Alternative, Cause, Found
from offcorr.diagnose.causes.policies import REPEATED, noisy, repeats_itself_now, updated
from offcorr.diagnose.causes.profile import EARLY, Profile
from offcorr.diagnose.causes.versions import VERSIONS, age, same_version
from offcorr.diagnose.evidence import SAME, Evidence


def _may_be_no_update(evidence: Evidence) -> bool:
    """Whether old_logp is a copy of the sampler's log-probs, and no version says that the trainer was updated: then
    logp differs from it by all that trainer and sampler differ by.
    """
    return evidence.copied and not updated(evidence)


NEXT_TO_NOTHING, HARDLY_ANYTHING = 0.1, 0.05
"""Share of the mean |logp - old_logp| that a fault of logp leaves, at most, as updates leave more; and one of which the
numbers alone are not sure."""


def _fault_of_logp(evidence: Evidence) -> str:
    """The end of a sentence, where one fault of the values or of the sampling explains logp by old_logp; or ""."""
    if (now := evidence.updates) is None or not len(now) or not now.gap > now.floor:
        return ""
    if np.ptp(now.trainer) == 0:
        return f"; logp is {now.trainer[0]:g} at every token"
    for cause in CAUSES.values():
        if cause.stage not in ("values", "sampling") or (found := cause.found(now)) is None or not found.of_d:
            continue
        left = 0.0 if found.left is None else found.left.gap * len(found.left) / (now.gap * len(now))
        if left < (NEXT_TO_NOTHING if cause.stage == "values" or found.surest > 0.5 else HARDLY_ANYTHING):
            return (
                f"; {cause.id} explains nearly all of it, with old_logp in the place of the sampler's log-probs and "
                "logp in that of the trainer's"
            )
    for id in OF_A_PROMPT:
        if CAUSES[id].found(now) is not None:
            return f"; {id} fits it, too, with old_logp in the place of the sampler's log-probs"
    early = Profile.of(now).early
    if 1 / OF_THE_FIRST <= early <= OF_THE_FIRST:
        return ""
    first = now.position < EARLY
    looks = (
        "where logp is of another prompt or position"
        if early > 1
        else "where logp has a penalty on tokens that were seen before"
    )
    return (
        f"; relative to 1 - p, where p is logp's probability, it is {early:.2g} times as large in the first {EARLY} "
        f"tokens of the completions as after them (geometric means; in nats, {now.size[first].mean():.2g} and "
        f"{now.size[~first].mean():.2g}), as {looks}, and as some updates leave it"
    )


OF_THE_FIRST = 3.0
"""Factor between the first tokens and those after them from which on another prompt, or a penalty, may make it: the
updates of our runs have left .7 to 1.9, and once 3.1."""


SUREST = 0.95
"""Confidence at most: a fault of logp that leaves no pattern looks the same."""


SHARED = 0.4
"""Split-half correlation of logp - old_logp by token id above which it is an update's: of our runs', .54 to .96, and
of rounding, dropout or another prompt up to .3."""


def _shared(evidence: Evidence) -> bool:
    """Whether logp moved in the same way everywhere, as an update makes it and no noise does."""
    return evidence.updates is not None and evidence.updates.by_token_id.value > SHARED


def _at_the_fewest(evidence: Evidence) -> str:
    """The end of a sentence, unless hardly any of logp - old_logp is there where the fewest updates lie between: a
    fault of the forward pass that computes logp is in every sample.
    """
    if (now := evidence.updates) is None:
        return ""
    ages = np.array([np.nan if (one := age(record)) is None else one for record in now.records])[now.sequence]
    if not len(known := np.unique(ages[np.isfinite(ages)])):
        return "; no version says how many updates lie between"
    if len(known) == 1:
        return "; as many updates lie between for every sample, so that nothing tells what grows with their number"
    newest, oldest = (float(now.size[ages == one].mean()) for one in (known[0], known[-1]))
    if newest < NEXT_TO_NOTHING * oldest:
        return ""
    alone = "of the updates alone, or " if known[0] > 0 else ""
    return (
        f"; it is {newest:.2g} nats in the newest samples, of {_updates(known[0])}, and {oldest:.2g} in the oldest, of "
        f"{_updates(known[-1])}: what the newest have may be {alone}of something in every sample"
    )


def _updates(count: float) -> str:
    return f"{count:.3g} update{'' if count == 1 else 's'}"


OF_A_PROMPT = ("chat_template", "truncated_prompt", "position")
"""Causes that another prompt of the forward pass of logp looks like."""


class PolicyUpdates(Cause):
    """The current log-probs differ from those under the weights that sampled."""

    id = "policy_updates"
    stage = "updates"
    title = "the trainer updated its weights after the tokens were sampled, as off-policy training does"
    advice = (
        "unless the loss does so already, correct for it there, by a method that compares logp with this old_logp "
        "(where a loss recomputes old_logp with the current weights, every ratio is 1 and nothing is corrected). Fewer "
        "updates per batch (num_iterations, steps_per_generation), a smaller lag or a smaller learning rate make the "
        "difference smaller"
    )
    not_told_from = (
        Alternative(
            "the trainer's dropout, which makes logp another than old_logp without any update, and beside one",
            "score one sequence twice as the training does",
            fields=VERSIONS,
            settled=repeats_itself_now,
        ),
        Alternative(
            "an old_logp, or rows in another order, with a fault that rollout_logp has, too: by the versions no update "
            "lies between old_logp and logp, unless trainer_version is that of the weights of old_logp",
            "score one sequence by hand as the trainer does",
            settled=lambda evidence: not same_version(evidence),
        ),
        Alternative(
            "a difference of trainer and sampler, such as another prompt, a lower precision or a temperature: old_logp "
            "is rollout_logp, number for number, so that d is 0 whatever they differ by",
            "log as old_logp what the trainer computes",
            fields=VERSIONS,
            settled=lambda evidence: not _may_be_no_update(evidence),
        ),
        Alternative(
            "a fault of logp itself, alone or beside updates, such as another prompt, another quantity, values of "
            "other tokens, rounding or another change of the logits in the forward pass that computes it",
            "score one sequence by hand as the trainer does",
            fields=VERSIONS,
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        moved, fault = evidence.moved, _fault_of_logp(evidence)
        if moved < 10 * SAME or moved < 0.2 * evidence.gap or noisy(evidence):
            return None
        spread, other = evidence.same_context.trainer, evidence.same_context.sampler
        if len(spread) >= REPEATED and spread.mean() > max(0.02, 0.1 * moved, 5 * other.mean()):
            return None  # each forward pass of the trainer differs
        share = moved / (moved + evidence.gap)
        if not fault and updated(evidence):
            fault = _at_the_fewest(evidence)
        sure = updated(evidence) and not fault and repeats_itself_now(evidence) and _shared(evidence)
        return Found(
            moved,
            evidence.moved_error,
            10 * SAME,
            1.0 + float(np.log(moved / (10 * SAME))) / 2,
            f"the trainer's current log-probs (logp) differ from those of the weights that it takes for the sampler's "
            f"(old_logp) by {moved:.2g} nats on average{fault}",
            evidence,
            share,
            surest=SUREST if sure else 0.5,
            of_d=False,
        )
