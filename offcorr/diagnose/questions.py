"""Questions that a dump leaves open, and what would answer each: a field that the dump lacks, or another way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.causes.base import NEARLY_GREEDY
from offcorr.diagnose.causes.policies import (
    differs_by_itself,
    differs_by_itself_now,
    not_drawn_so,
    repeatable,
    repeats_itself,
    updated,
)
from offcorr.diagnose.causes.sampling import loses_more
from offcorr.diagnose.causes.truncation import TRUNCATIONS
from offcorr.diagnose.causes.values import FEWEST, zeros_of_truncation
from offcorr.diagnose.causes.versions import VERSIONS, newer
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.record import Record

OFF, OFF_ALONE = 5.0, 3.0
"""Standard errors by which the surprisal balance, or the mean ratio, has to be off."""

SMALLEST_ABOVE = 1e-6
"""A log-prob above 0 that is asked about, at least."""

LOST = 0.99
"""Mean ratio e^d below which two policies are asked about what else lowers it."""

MOVE_THE_BALANCE = ("values", "sampling", "unlogged", "policies")
"""Stages whose causes move it."""


HIDDEN_BY_DROPOUT = (
    "what else differs: the noise of dropout hides a second cause, such as older weights or a penalty. To find out, "
    "dump again with dropout off"
)

HIDDEN_BY_TRUNCATION = (
    "how much of the difference is of the tokens that are left out: it is below 0, and hides there what a lower "
    "precision, a temperature, older weights or another prompt make. To find out, dump again without the truncation or "
    "ban, or give --model"
)


def lacking(evidence: Evidence, fields: Iterable[str]) -> list[str]:
    """Those of the fields that some sequence has not."""
    return [name for name in fields if any(getattr(record, name) is None for record in evidence.records)]


def open_questions(evidence: Evidence, named: Sequence[str], *, draws_known: bool = False) -> list[str]:
    """One sentence per question, with a way to answer it.

    Args:
        named: the ids of the causes that were found.
        draws_known: a model said which distributions the tokens were drawn from.

    >>> from offcorr.diagnose import Record
    >>> row = {"prompt_ids": [1], "completion_ids": [2], "rollout_logp": [-1.0], "logp": [-1.0], "entropy": [0.5]}
    >>> open_questions(Evidence.of([Record.of(row)]), ["precision"])[-3]
    'whether the cause is precision or weights that are a little older. To find out, log rollout_version and \
trainer_version, or give --model'
    """
    said = []
    share, question = of_one_side(evidence.records)
    if share > HARDLY_ANY:
        said.append(question)
    if evidence.entropy is None and not draws_known:
        said.append(
            "whether the tokens were drawn at another temperature, or from fewer tokens (top_p, top_k), than both "
            "sides' log-probs say. To find out, log entropy: the trainer's, of each token's distribution"
        )
    known = evidence.with_entropy
    if known is not None and len(known) < 0.5 * len(evidence) and not draws_known:
        said.append(
            f"whether the {len(evidence) - len(known):,} of {len(evidence):,} tokens without entropy were drawn at "
            "another temperature, or from fewer tokens (top_p, top_k), than both sides' log-probs say. To find out, "
            "give --model"
        )
    if not draws_known and (off := unexplained_surprise(evidence, named)):
        said.append(
            f"why the tokens are {off} surprising than draws from the trainer's distributions would be. To find out, "
            "give --model, or read the engine's sampling options (temperature, top_p, top_k, min_p, penalties), and "
            "check that the weights that sampled are those that scored, and that every sequence was dumped, not the "
            "likelier or better ones alone"
        )
    if not draws_known and not named and evidence.gap <= evidence.floor:
        said.append(
            "whether the tokens were drawn under a penalty, or a bias or ban of some tokens, however large "
            "(logit_bias, bad_words, min_tokens), or under a temperature or truncation that shows in too few of them, "
            "that neither side's log-probs carry. To find out, read the engine's sampling options, or give --model, "
            "which tries temperatures, truncations and penalties on repetition, but no ban or bias"
        )
    if not named and evidence.gap <= evidence.floor:
        said.append(
            "whether other weights sampled than those that scored, where rollout_logp is not the engine's own, but was "
            "computed after the sampling from the trainer's weights. To find out, look where rollout_logp comes from"
        )
    if named and not any(CAUSES[id].stage == "sampling" for id in named) and zeros_of_truncation(evidence):
        zeros = int((evidence.sampler == 0).sum())
        said.append(
            f"whether the sampler left tokens out as well (top_p, top_k, min_p): {zeros:,} tokens have a log-prob of "
            "exactly 0 from the sampler, mostly likely ones, as the only token that is left has. To find out, read the "
            "engine's sampling options"
        )
    above = int((evidence.sampler > SMALLEST_ABOVE).sum())
    if above >= FEWEST and not any(CAUSES[id].stage == "values" for id in named):
        said.append(
            f"why {above:,} of the sampler's log-probs are above 0, by up to {float(evidence.sampler.max()):.2g} nats, "
            "as no log-prob is: they may not be normalised, a number may have been added to the probabilities, or a "
            "logit and its normaliser may have another precision. To find out, compute that of one token by hand"
        )
    if evidence.unrelated and not any(CAUSES[id].stage == "values" for id in named):
        said.append(
            "whether rollout_logp and old_logp are of the same tokens: they hardly correlate. To find out, compare the "
            "rows of one sequence on both sides; results that come back in another order are a usual reason"
        )
    if "temperature" in named and not draws_known and _lost(evidence, named):
        said.append(
            f"why the mean ratio e^d is {evidence.ratio_identity.value:.2f}, further below 1 than a temperature makes "
            "it, unless it is so low that the unlikely tokens were not drawn: the sampler may also leave tokens out "
            "(top_p, top_k, min_p), and part of the difference is then theirs. To find out, give --model, or read the "
            "engine's sampling options"
        )
    ratio = evidence.ratio_identity
    of_policies = named and {CAUSES[id].stage for id in named} <= {"policies", "updates"}
    if of_policies and "chat_template" not in named and not_drawn_so(evidence, off=3.0):
        said.append(
            f"why the mean ratio e^d is {ratio.value:.2f} +- {ratio.error:.2g}, while any two policies have 1: the "
            "sampler's log-probs may be those of other tokens, as of rows in another order, or the tokens were not "
            "drawn with them. To find out, compare the rows of one sequence on both sides"
        )
    if of_policies and ratio.value < LOST and ratio.value - 1 < -OFF * ratio.error:
        said.append(
            f"whether the sampler left tokens out as well (top_p, top_k, min_p, a ban), about {1 - ratio.value:.0%} of "
            f"the trainer's probability: the mean ratio e^d is {ratio.value:.3f} +- {ratio.error:.2g}, and would be 1 "
            "for two policies that differ by their weights alone, but for chance, as few tokens that are far off carry "
            "it. To find out, read the engine's sampling options, or give --model"
        )
    if few := _few_that_differ(evidence):
        said.append(
            f"why {few:,} of {len(evidence.records):,} sequences differ, while the others "
            "agree. To find out, compare these rows on both sides: they may have changed places, or come from another "
            "engine or worker"
        )
    asked = any(NEARLY_GREEDY in CAUSES[id].not_told_from for id in named) or "temperature" in named
    if named and not asked and not NEARLY_GREEDY.settled(evidence) and not draws_known:
        said.append(f"whether the cause is {NEARLY_GREEDY.words}. To find out, {NEARLY_GREEDY.how}")
    if many := newer(evidence):
        said.append(
            f"why rollout_version is above trainer_version in {many:,} of {len(evidence.records):,} sequences, as if "
            "the sampler had newer weights than the trainer's log-probs are of. To find out, see where the two are "
            "counted, and whether one stands for the other"
        )
    if "dropout" in named and not draws_known:
        said.append(HIDDEN_BY_DROPOUT)
    if "repetition_penalty" in named and not draws_known:
        said.append(
            "what else differs: a penalty moves each context by another amount, and hides a second cause, such as "
            "older weights. To find out, dump again without the penalty, or give --model"
        )
    if not TRUNCATIONS.isdisjoint(named) and not draws_known:
        said.append(HIDDEN_BY_TRUNCATION)
    if not {"dropout", "position", "shift"} & set(named) and differs_by_itself(evidence) and not draws_known:
        said.append(
            "why the trainer gives one token other log-probs after the same context, by "
            f"{float(evidence.same_context.trainer.mean()):.2g} (1 - p) nats, about as much as it differs from the "
            "sampler, which does not: a little dropout, such as of the attention weights, or a forward pass that "
            "depends on its batch. To find out, score one sequence twice in eval mode, in two batches"
        )
    if not {"dropout", "shift"} & set(named) and updated(evidence) and differs_by_itself_now(evidence):
        said.append(
            "how much of the distance of logp from old_logp is the trainer's dropout: its current log-probs (logp) of "
            "one token after the same context differ from sample to sample. To find out, score one sequence twice as "
            "the training does"
        )
    elif "shift" in named and "dropout" not in named and repeatable(evidence) and not repeats_itself(evidence):
        said.append("whether the trainer's dropout is on. To find out, dump again without the shift")
    elif "dropout" not in named and not repeatable(evidence):
        said.append(f"whether the trainer's dropout is on. To find out, {_repeated_contexts(evidence)}")
    for cause in CAUSES.values():
        for other in cause.not_told_from if cause.id in named else ():
            fields = lacking(evidence, other.fields)
            # Of two that are named, a field that is lacking may show one to be the only cause.
            if (other.cause not in named or fields) and not other.settled(evidence):
                how = f"log {' and '.join(fields)}, or {other.how}" if fields else other.how
                said.append(f"whether the cause is {cause.id} or {other.words}. To find out, {how}")
    return said


HARDLY_ANY, MANY = 0.01, 0.05
"""Share of the tokens that just one side scored, above which the report asks about them, and above which the others do
not speak for all."""


def of_one_side(records: Sequence[Record]) -> tuple[float, str]:
    """The share of the tokens that trainer or sampler did not score, of those that one of them did; and a question.

    >>> row = {"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, np.nan], "logp": [-1.0, -4.0]}
    >>> share, question = of_one_side([Record.of(row)])
    >>> share, question[:67]
    (0.5, 'whether trainer and sampler agree at the other 1 of 2 tokens, too: ')
    """
    masks = [np.ones(len(one), bool) if one.mask is None else one.mask for one in records]
    sides = [[getattr(one, name) for one in records] for name in ("old_logp", "rollout_logp")]
    mask, trainer, sampler = (np.concatenate(parts) for parts in (masks, *sides))
    scored, reported = mask & np.isfinite(trainer), mask & ~np.isnan(sampler)
    both, either = scored & reported, scored | reported
    one = either & ~both
    if not one.any() or not both.any():
        return 0.0, ""
    there, elsewhere = np.where(scored, trainer, sampler)[one].mean(), trainer[both].mean()
    return float(one.sum() / either.sum()), (
        f"whether trainer and sampler agree at the other {one.sum():,} of {either.sum():,} tokens, too: just one of "
        f"them has a log-prob there, of {there:.2g} nats on average, where the trainer's is {elsewhere:.2g} at the "
        "tokens that both have. To find out, log those of both for every token"
    )


AGREE, APART, FEW, OTHERS = 1e-4, 3.0, 0.1, 16
"""Mean |d| (nats) up to which a sequence agrees; how many times further off all others are; share of all sequences that
a few are, and how many those are that agree."""


def _few_that_differ(evidence: Evidence) -> int:
    """The number of sequences that differ, where they are few and the others agree; else 0."""
    times = np.bincount(evidence.sequence)
    means = np.bincount(evidence.sequence, evidence.size)[times > 0] / times[times > 0]
    agree = means <= AGREE
    few, others = int((~agree).sum()), int(agree.sum())
    if not 0 < few <= FEW * len(means) or others < OTHERS:
        return 0
    return few if means[~agree].min() > APART * means[agree].max() else 0


def unexplained_surprise(evidence: Evidence, named: Sequence[str]) -> str:
    """ "less" or "more" where the surprisal balance is off, and no cause was found that moves it; else ""."""
    balance = evidence.balance
    if (
        balance is None
        or abs(balance.z) < (OFF if named else OFF_ALONE)
        or any(CAUSES[id].stage in MOVE_THE_BALANCE for id in named)
    ):
        return ""
    return "less" if balance.value < 0 else "more"


def _lost(evidence: Evidence, named: Sequence[str]) -> bool:
    """Whether the mean ratio is below 1, and no cause was found that lowers it."""
    others = {id for id in named if CAUSES[id].stage in ("values", "sampling")} - {"temperature", "repetition_penalty"}
    return not others and loses_more(evidence)


def _repeated_contexts(evidence: Evidence) -> str:
    if _samples_repeat(evidence):
        return "dump more sequences: too few samples of one prompt begin with the same tokens"
    return "dump several samples of each prompt, which share their first tokens"


def _samples_repeat(evidence: Evidence) -> bool:
    prompts = {record.prompt_ids.tobytes() for record in evidence.records}
    return len(prompts) < len(evidence.records)


def wanted(evidence: Evidence) -> list[str]:
    """Parts of a dump that would tell more causes apart, and that this one lacks."""
    said = []
    if evidence.entropy is None or not np.isfinite(evidence.entropy).all():
        said.append("the trainer's entropy")
    if not _samples_repeat(evidence):
        said.append("several samples per prompt")
    if fields := lacking(evidence, VERSIONS):
        said.append(" and ".join(fields))
    return said
