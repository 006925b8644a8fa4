"""Causes that leave two policies that differ: precision, dropout, routing, old weights."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.other_tokens import GROSS
from offcorr.diagnose.causes.over_steps import at_first, growth, last_steps, small_growth
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.causes.sampling import (
    ALSO_UPDATES,
    ENOUGH_FOR_A_FIT,
    OTHER_TRANSFORM,
    SIGNIFICANT,
    away,
    loses_mass,
    power,
)
from offcorr.diagnose.causes.versions import (
    VERSIONS,
    age,
    age_shows,
    before_any_update,
    lag_by_versions,
    lag_in_d,
    never_updated,
    newer,
    older,
    same_version,
    versioned,
)
from offcorr.diagnose.evidence import SAME, Estimate, Evidence, mean_by_sequence
from offcorr.diagnose.record import Floats

WEIGHTS = 0.03
"""Mean |d| / (1 - p) above which weights differ by more than rounding."""

MOSTLY = 0.02
"""Mean |d| / (1 - p) that bf16 and int8 mostly stay below; they have .003 or more."""

SHARED = 0.35
"""Split-half correlation by token id above which two policies differ in the same way everywhere."""

FAR = 0.15
"""Mean |d| / (1 - p) above which noise is no rounding."""

ALIKE = 0.8
"""Confidence at most in weights that changed within the sequences as the logged versions did: others leave the same."""

UNSURE = 0.5
"""Confidence at most in other weights where a coarse precision, another prompt or a temperature may look like them."""

ONE_SIGN = 0.03
"""Share of the d below 0 that those above 0 make up at least where both sides round."""

NOISE = 0.02
"""Mean |logp - old_logp| (nats) of the same weights, above what low precision leaves."""

REPEATED = 6
"""Tokens after contexts that were scored more than once, which a test for dropout needs."""


OTHER_IDS = Alternative(
    "ids that the sampler did not draw, as of text that was encoded again",
    "compare the token ids of both sides",
)


NO_UPDATES = 0.5
"""The most that dropout is sure by what updates may leave, too, where the versions name none."""


def of_age(evidence: Evidence) -> str:
    """The end of a sentence, where logged versions say that d is of older weights."""
    if not lag_by_versions(evidence):
        return ""
    return "; by the logged versions the sampler's weights are older than the trainer's, which may leave the same"


def _by_batch(evidence: Evidence) -> bool:
    """Whether samples of one prompt share a log-prob exactly, although others of the same context do not have it; or
    whole sequences agree with the sampler, as the first of those do that are packed in one row.
    """
    paired = evidence.same_context.paired
    return _some_agree(evidence) or (len(paired) > 0 and float(paired.mean()) > 0.2)


def _dated(evidence: Evidence) -> bool:
    """Whether every sequence says of which optimizer step it is, or of which weights, so that those of others are not
    compared with it."""
    fields = ("step", "trainer_version", "rollout_version")
    return all(any(getattr(record, name) is not None for name in fields) for record in evidence.records)


TELLING, SEVERAL = -0.05, 3
"""Log-prob below which a token shows whether the two sides agree, and such tokens that a sequence needs to show it."""


def _some_agree(evidence: Evidence) -> bool:
    """Whether both sides agree on whole sequences, two at least, of a dump in which they differ."""
    whole = Evidence.of(evidence.records)  # a part of the sequences may have been taken out
    telling = whole.trainer < TELLING
    several = len(whole.records)
    times = np.bincount(whole.sequence, telling, minlength=several)
    off = np.bincount(whole.sequence, telling & (whole.size > max(SAME, 0.02 * evidence.gap)), minlength=several)
    return int(((times >= SEVERAL) & (off == 0)).sum()) >= 2


def moved_by_nothing(evidence: Evidence) -> Estimate | None:
    """Mean |logp - old_logp| of the sequences whose versions say that no update lies between; None: too few of them."""
    return evidence.moved_of(np.array([age(record) == 0 for record in evidence.records], bool))


def noisy(evidence: Evidence) -> Estimate | None:
    """The same, where it is more than low precision leaves, and much of what all sequences have.

    Under dropout one token after one context does not have the same log-prob (logp) twice.
    """
    noise = moved_by_nothing(evidence)
    if noise is None or noise.value < max(NOISE, evidence.moved / 2) or repeats_itself_now(evidence):
        return None
    return noise


def repeats_itself(evidence: Evidence) -> bool:
    """Whether the trainer gave one token the same log-prob after one context each time, as no dropout does."""
    spread = evidence.same_context.trainer
    return len(spread) > 0 and float(spread.max()) < SAME


def repeats_itself_now(evidence: Evidence) -> bool:
    """Whether the current log-probs (logp) of one token after one context are alike, as under no dropout."""
    spread = evidence.same_context.now
    if len(spread) < REPEATED:  # of the tokens that are left
        spread = Evidence.of(evidence.records).same_context.now
    return len(spread) >= REPEATED and float(spread.mean()) <= max(NOISE, 0.1 * evidence.moved)


def differs_by_itself_now(evidence: Evidence) -> bool:
    """Whether those of enough tokens are not, as under dropout, or where the updates lie between the samples."""
    return len(evidence.same_context.now) >= REPEATED and not repeats_itself_now(evidence)


def updated(evidence: Evidence) -> bool:
    """Whether logged versions say of a sequence that the trainer was updated since it was sampled."""
    return any((age(record) or 0) > 0 for record in evidence.records)


class Dropout(Cause):
    """The trainer scores one token after one context differently each time."""

    id = "dropout"
    stage = "policies"
    of_passes = True
    title = "the trainer's dropout is on, or its forward pass draws in another way"
    advice = "score with model.eval(), or set every dropout of the model's configuration to 0"
    not_told_from = (
        Alternative(
            "something that depends on the batch, such as padding without an attention mask, or sequences that are "
            "packed in one row and see each other: some samples got exactly the same log-prob, or the sampler's, as "
            "under dropout none do",
            "score one sequence twice, in two batches, and once alone",
            settled=lambda evidence: not _by_batch(evidence) or noisy(evidence) is not None,
        ),
        Alternative(
            "another prompt that the trainer read with each sample, as where prompts were repeated, or shuffled, in "
            "another order than the completions, which the prompt ids of this dump need not show",
            "compare the prompt ids that the trainer scored, row by row, with these",
            settled=lambda evidence: noisy(evidence) is not None,
        ),
        Alternative(
            "other noise of the trainer's forward pass, such as a router that draws",
            "score one sequence twice with every dropout set to 0",
        ),
        Alternative(
            "rows of several optimizer steps, between which the trainer's weights moved and the sampler's did not",
            "log step, or rollout_version and trainer_version",
            settled=lambda evidence: noisy(evidence) is not None or _dated(evidence),
        ),
        Alternative(
            "an old_logp that is computed in another way than logp, such as in another precision, or with other "
            "padding",
            "compute both for one sequence, with dropout off",
            settled=lambda evidence: noisy(evidence) is None,
        ),
        Alternative(
            "the trainer's own updates on the batch, where trainer_version is that of the weights of old_logp",
            "score one sequence twice as the training does",
            settled=lambda evidence: noisy(evidence) is None or updated(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        return self._of_contexts(evidence) or self._of_updates(evidence)

    def _of_contexts(self, evidence: Evidence) -> Found | None:
        """From ``old_logp`` of one token after one context, which the trainer scored more than once."""
        trainer, sampler = evidence.same_context.trainer, evidence.same_context.sampler
        if len(trainer) < REPEATED or evidence.gap < SAME:
            return None
        spread, other = float(trainer.mean()), float(sampler.mean())
        least = max(0.02, 0.15 * Profile.of(evidence).mean)  # a forward pass in bf16 depends on its batch by less
        if spread < least or spread < 5 * other:
            return None
        return Found(
            spread,
            float(trainer.std() / np.sqrt(len(trainer))),
            least,
            2 * np.log(spread / least),
            f"the trainer scored the same token after the same context more than once, as samples of one prompt begin "
            f"alike, and its log-probs are off their mean by {spread:.2g} (1 - p) nats, where p is the token's "
            f"probability ({len(trainer)} tokens); the sampler's are by {other:.2g}, and without dropout the trainer's "
            "would agree, too",
            surest=0.5 if _by_batch(evidence) or noisy(evidence) is None else 1.0,
        )

    def _of_updates(self, evidence: Evidence) -> Found | None:
        """From ``logp`` and ``old_logp``, where the logged versions say that no update lies between them."""
        noise = noisy(evidence)
        if noise is None:
            return None
        return Found(
            noise.value,
            noise.error,
            NOISE,
            2 * float(np.log(noise.value / NOISE)),
            f"the trainer's log-probs (logp) differ from old_logp by {noise.value:.2g} nats on average where, by the "
            "logged versions, no update was made between them",
            evidence,
            noise.value / (noise.value + evidence.gap),
            surest=ALSO_UPDATES if updated(evidence) or differs_by_itself_now(evidence) else NO_UPDATES,
            of_d=False,
        )


OTHER_PROMPT = Alternative(
    "another prompt, template or position (rope_theta, padding) that one side read, or another forward pass of the "
    "same weights",
    "give --model, or compare the prompt ids that each side read, and the configurations of both models",
    settled=age_shows,
)

COARSE_PRECISION = Alternative(
    "a coarse precision of the sampler's weights, such as int4 or fp8 (int8 or bf16, in a model that bears rounding "
    "badly)",
    "give --model, or look at the engine's quantisation",
    settled=age_shows,
)

CHANGED_WITHIN = Alternative(
    "weights that changed within the sequences (weights_swapped)",
    "see whether running requests go on while new weights are loaded",
    settled=age_shows,
)


class MoERouting(Cause):
    """A few tokens are far off, among others that agree."""

    id = "moe_routing"
    stage = "policies"
    title = "the sampler's router sends some tokens to other experts than the trainer's"
    advice = "compute the router in float32 on both sides, or replay the sampler's choice of experts in the trainer"
    not_told_from = (
        Alternative(
            "older weights, or an update, such as a LoRA adapter, that did not reach the sampler, where it moved few "
            "tokens, in a model with or without experts",
            "score one known sequence with the engine after a sync, or give --model",
        ),
        OTHER_IDS,
        OTHER_TRANSFORM,
        OTHER_PROMPT,
        COARSE_PRECISION._replace(settled=lambda evidence: False),
        Alternative(
            "log-probs of a few tokens that somebody filled in, such as those of end tokens",
            "look where the log-probs of the tokens that are far off come from",
            settled=lambda evidence: len(_far_off(evidence)) >= BOTH_WAYS,
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        profile = Profile.of(evidence)
        if evidence.gap < evidence.floor or len(profile) < 64:
            return None
        heavy = _heavy(profile)
        if evidence.shrunk:
            heavy = min(heavy, _heavy(Profile.of(Evidence.of(evidence.records))))
        first, _, _ = profile.level(0, 1)
        # Other experts for one token also move those after it, by less; other tokens make those after them unlikely.
        smooth = profile.smoothness > 0.75 and (profile.tail < 5 or float(evidence.size.max()) > GROSS)
        if heavy < 5 or smooth or first > 2 or profile.median > 0.02 or _one_sided(evidence):
            return None
        if not len(_far_off(evidence)):  # the mean of |d| / (1 - p) is of tokens that are nearly certain
            return None
        return Found(
            heavy,
            profile.error / max(profile.median, 1e-9),
            5.0,
            float(np.log(heavy / 5)) + 0.5,
            f"the relative difference |d| / (1 - p) has a mean of {profile.mean:.2g} and a median of "
            f"{profile.median:.2g}: most tokens agree, and a few are far off",
            surest=UNSURE,  # nothing logged says whether the model has experts
        )


def _heavy(profile: Profile) -> float:
    """The mean of |d| / (1 - p), over its median."""
    return profile.mean / max(profile.median, 1e-9)


BOTH_WAYS = 8
"""Tokens that are far off, from which on they show whether they are so in both directions."""


def _far_off(evidence: Evidence) -> Floats:
    """d of the tokens where it is far from 0."""
    return evidence.d[evidence.size > 5 * evidence.gap]


def _one_sided(evidence: Evidence) -> bool:
    """Whether the tokens that are far off are so in one direction, as under a penalty; other experts do both."""
    far = _far_off(evidence)
    above = int((far > 0).sum())
    return len(far) >= BOTH_WAYS and not 0.1 <= above / len(far) <= 0.9


def _drawn_sharper(evidence: Evidence) -> bool:
    """Whether the tokens are likelier than draws from the trainer's distributions, as below its temperature."""
    return evidence.balanced and evidence.balance is not None and evidence.balance.z < -SIGNIFICANT


OTHER_TEMPERATURE = Alternative(
    "a temperature that one side applies and the other does not, alone or besides",
    "give --model",
    fields=("entropy",),
    settled=lambda evidence: (
        len(evidence) >= ENOUGH_FOR_A_FIT and not _drawn_sharper(evidence) and evidence.with_entropy is not None
    ),
    cause="temperature",
)

BESIDE_OTHER_WEIGHTS = Alternative(
    "a temperature or a truncation (top_p, top_k, min_p), alone or beside other weights: one that changes little, a "
    "temperature near 0, and what other weights outweigh do not show in the surprisal balance and the fit",
    "compare the sampler's options, or give --model",
    settled=lambda evidence: not OTHER_TEMPERATURE.settled(evidence) or age_shows(evidence),
    cause="temperature",
)


CHANGING_OPTION = Alternative(
    "a temperature, or another option that changes the logits (a softcap, a logit_bias, a penalty), which changes from "
    "step to step on one side",
    "compare the sampling options and the trainer's temperature at the last steps, or give --model",
    settled=lambda evidence: not _grows_as_an_option(evidence),
)


OWN_UPDATES = Alternative(
    "the trainer's own updates on the batch, where the log-prob that it logged is of after them",
    "log both old_logp and logp",
    settled=lambda evidence: any(one.logp is not None for one in evidence.records),
)

GROWING_PRECISION = Alternative(
    "a lower precision whose effect grows",
    "give --model and, as --checkpoint, the base model and earlier checkpoints",
    settled=lambda evidence: small_growth(evidence) is None or not _as_rounding(evidence),
)


class StaleWeights(Cause):
    """Two policies that differ in the same way everywhere, by more than rounding."""

    id = "stale_weights"
    stage = "policies"
    title = "the sampler has older weights than the trainer scores with"
    advice = (
        "check that every update reaches the engine, unless it is quantised to int4 or so, which leaves the same; "
        "where sampling runs ahead on purpose, correct for it with a method for stale data, against the weights that "
        "sampled (anchor='snapshot' in offcorr's trainers, for which a rollout_func returns 'old_logp'): for outputs "
        "of up to 96 tokens minpro, or topr only where the model already solves a good part of the tasks; for longer "
        "ones a token form such as offcorr:cispo (docs/which.md)"
    )
    not_told_from = (
        Alternative(
            "newer weights of the sampler, or an adapter that never reached it",
            "give --model, with the adapter apart",
            fields=VERSIONS,
            settled=lambda evidence: versioned(evidence) and not newer(evidence),
        ),
        Alternative(
            "an update, such as a LoRA adapter, that did not reach the sampler, whatever the versions say",
            "score one known sequence with the engine after a sync, or give --model, with the adapter apart",
            settled=lambda evidence: not older(evidence) or age_shows(evidence),
        ),
        GROWING_PRECISION,
        COARSE_PRECISION,
        OTHER_TEMPERATURE,
        BESIDE_OTHER_WEIGHTS,
        OTHER_TRANSFORM._replace(settled=age_shows),
        OWN_UPDATES._replace(settled=lambda evidence: versioned(evidence) or OWN_UPDATES.settled(evidence)),
        CHANGING_OPTION,
        OTHER_PROMPT,
        CHANGED_WITHIN,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if lag_by_versions(evidence) and (growing := _growing(evidence)):
            return growing
        return None if never_updated(evidence) or before_any_update(evidence) else _other_weights(evidence)


EARLIER = "give --model and, as --checkpoint, the base model and earlier checkpoints"


def _has_rollout_version(evidence: Evidence) -> bool:
    """Whether some record has one."""
    return any(record.rollout_version is not None for record in evidence.records)


FROM_THE_START = Alternative(
    "a further one, such as a temperature, that was there from the dump's first steps on",
    "diagnose the first steps by themselves",
    settled=lambda evidence: growth(evidence) is None or at_first(evidence) < WEIGHTS,
)


class AdapterNotSynced(Cause):
    """As stale weights, while the logged versions say that sampler and trainer have the same, or d keeps growing."""

    id = "adapter_not_synced"
    stage = "policies"
    title = "an update, such as a LoRA adapter, does not reach the sampler"
    advice = (
        "check that every update reaches the sampler (a LoRA adapter has to be merged or loaded again at every sync): "
        "score one known sequence with the engine after a sync"
    )
    not_told_from = (
        Alternative(
            "weights that are older than rollout_version says",
            EARLIER,
            settled=lambda evidence: not _has_rollout_version(evidence),
        ),
        Alternative("older weights (no rollout_version is logged)", EARLIER, VERSIONS, settled=_has_rollout_version),
        OWN_UPDATES,
        GROWING_PRECISION,
        COARSE_PRECISION,
        OTHER_TEMPERATURE,
        BESIDE_OTHER_WEIGHTS,
        OTHER_TRANSFORM._replace(settled=age_shows),
        CHANGING_OPTION,
        OTHER_PROMPT,
        CHANGED_WITHIN,
        FROM_THE_START,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if not older(evidence) and (growing := _growing(evidence)):
            return growing
        if not never_updated(evidence) or before_any_update(evidence):
            return None
        found, grown = _other_weights(evidence), growth(evidence)
        if found is None or grown is None:
            return found
        said = f"; it grows over the optimizer steps, from {grown[0]:.2g} to {grown[1]:.2g}, and does not level off"
        return found._replace(sentence=found.sentence + said)


AS_A_TEMPERATURE, BY_LOGP_ALONE = 0.5, 0.4
"""Share of the spread of d at the last steps from which a temperature explains it, with entropy and without: one that
changes explains .96 or more, a softcap .6 or more, and an adapter that was not loaded left .02 to it."""


def _grows_as_an_option(evidence: Evidence) -> bool:
    """Whether d grows over the optimizer steps, and a temperature explains it at the last third of them; or it is as
    small as rounding makes it, and as of a penalty or a bias.
    """
    if small_growth(evidence) is None:
        return False
    if _as_rounding(evidence) and not as_even_as_rounding(evidence):
        return True
    last = last_steps(evidence)
    fit = power(last)
    return away(fit.power) and fit.explained > (BY_LOGP_ALONE if last.with_entropy is None else AS_A_TEMPERATURE)


def noise(evidence: Evidence) -> bool:
    """Whether d has nothing in common between the sequences, by token id."""
    drift = evidence.by_token_id
    return bool(drift.value + 1.5 * drift.error < SHARED)


def repeatable(evidence: Evidence) -> bool:
    """Whether enough tokens were scored twice after one context to tell dropout from what is the same each time."""
    return len(evidence.same_context.trainer) >= REPEATED


BY_ITSELF = 0.5
"""Share of mean |d| / (1 - p) from which the trainer's own spread after one context is what d consists of."""


def differs_by_itself(evidence: Evidence) -> bool:
    """Whether the trainer gives one token other log-probs after the same context, about as far apart as d is large.

    Whatever the sampler does, and whatever one side read, leaves these alike.
    """
    spread = evidence.same_context
    if not repeatable(evidence) or evidence.gap < evidence.floor:
        return False
    own, others = float(spread.trainer.mean()), float(spread.sampler.mean())
    return own > max(5 * others, SAME) and own > BY_ITSELF * Profile.of(evidence).mean


def _two_policies(evidence: Evidence) -> bool:
    """Whether nothing speaks against two deterministic policies: no dropout, mean ratio 1, no change of temperature."""
    identity = evidence.ratio_identity
    off = abs(identity.value - 1) > 6 * identity.error and not evidence.selected
    if not repeatable(evidence) or off:
        return False
    return evidence.with_entropy is not None or not away(power(evidence).power)


def not_drawn_so(evidence: Evidence, off: float = SIGNIFICANT) -> bool:
    """Whether the mean ratio e^d is above 1, as for no two policies if the tokens were drawn from the sampler's.

    It is above 1 of tokens that were chosen for d > 0, too, and says nothing there.

    Args:
        off: standard errors, at least.
    """
    ratio = evidence.ratio_identity
    if evidence.selected or not evidence.as_logged:
        return False
    return ratio.value > 1.1 and ratio.value - 1 > off * ratio.error


def _other_weights(evidence: Evidence) -> Found | None:
    profile = Profile.of(evidence)
    if not_drawn_so(evidence):
        return None
    if evidence.gap < evidence.floor or profile.mean < WEIGHTS or (noise(evidence) and not older(evidence)):
        return None
    drift = evidence.by_token_id
    shared = drift.value >= SHARED
    if not shared and not older(evidence) and not _two_policies(evidence):
        return None
    said = (
        f"; the mean d of each token id in one half of the sequences correlates by {drift.value:.2f} with that in the "
        "other half, as that of noise does not"
    )
    of_age = _of_the_age(evidence) and not loses_mass(evidence, SIGNIFICANT)
    return Found(
        profile.mean,
        profile.error,
        WEIGHTS,
        0.15 + 0.2 * float(np.log(profile.mean / WEIGHTS)),
        f"the relative difference |d| / (1 - p) is {profile.mean:.2g} on average, more than the 0.003 to {MOSTLY} that "
        f"rounding to bf16 or int8 mostly makes{profile.course}{said if shared else ''}",
        surest=1.0 if of_age else UNSURE,
    )


def _of_the_age(evidence: Evidence) -> bool:
    """Whether d is of older weights, as it grows with their age, and no temperature explains it, as without an entropy
    one that goes with the version may."""
    explained = _grows_as_an_option(evidence) or not OTHER_TEMPERATURE.settled(evidence)
    return age_shows(evidence) and lag_in_d(evidence) and not explained


CERTAIN_TO_BOTH, OF_CERTAIN_TOKENS = float(np.log(0.99)), 0.5
"""The trainer's log-prob from which a token is nearly certain, and the share of |d| at such tokens above which it is of
no rounding."""


def _as_rounding(evidence: Evidence) -> Found | None:
    """A d no larger than rounding makes it."""
    profile = Profile.of(evidence)
    largest = FAR if noise(evidence) and not older(evidence) else WEIGHTS
    if evidence.gap < evidence.floor or profile.mean >= largest or len(profile) < 8:
        return None
    if profile.median < 0.01 * profile.mean:  # rounding leaves no sequence as it is
        return None
    certain = evidence.trainer > CERTAIN_TO_BOTH  # of which it leaves little
    if evidence.size[certain].sum() > OF_CERTAIN_TOKENS * evidence.size.sum():
        return None
    size = "no more than rounding makes"
    if profile.mean > MOSTLY:
        size = f"little more than the {MOSTLY} that rounding to bf16 or int8 makes at most, as a rule"
    if profile.mean >= WEIGHTS:
        size = "as coarse rounding makes it (older weights would mostly give a token id a similar d everywhere)"
    return Found(
        evidence.gap,
        mean_by_sequence(evidence.size, evidence.sequence).error,
        evidence.floor,
        0.15 + 0.1 * float(np.log(largest / max(profile.mean, 1e-9))),
        f"the relative difference |d| / (1 - p) is {profile.mean:.2g} on average, {size}{profile.course}",
        surest=UNSURE,  # weights that are a little older leave the same, and so may another prompt or a little dropout
    )


def _growing(evidence: Evidence) -> Found | None:
    """A d as small as rounding makes it, which grows over the optimizer steps."""
    found, grown = _as_rounding(evidence), small_growth(evidence)
    if found is None or grown is None:
        return None
    return found._replace(
        margin=min(0.35, 0.1 * float(np.log(grown[1] / max(grown[0], 1e-9)))),
        sentence=f"{found.sentence}; but it grows over the optimizer steps, from {grown[0]:.2g} to {grown[1]:.2g}, as "
        "the rounding of weights that stay alike does not",
    )


def _coarse_from_the_start(evidence: Evidence) -> bool:
    """Whether d is larger than fine rounding makes it, and no update that is missing explains it."""
    return Profile.of(evidence).mean >= WEIGHTS and before_any_update(evidence)


ONE_SIDED = 0.1
"""The sum of d as a share of that of |d|, above which d has one direction, as no rounding gives it."""


UNEVEN = 0.3
"""Share of the sum of |d| / (1 - p) that its largest 5% have, above which no rounding makes it: it leaves up to .22."""


def as_even_as_rounding(evidence: Evidence) -> bool:
    """Whether d has no direction and is of many tokens: a penalty, a bias or a ban leaves it one-sided or of few."""
    size, mean = np.sort(Profile.of(evidence).size), mean_by_sequence(evidence.d, evidence.sequence)
    directed = abs(mean.value) > max(ONE_SIDED * evidence.gap, 3 * mean.error) and not evidence.selected
    return not directed and float(size[len(size) - len(size) // 20 :].sum()) <= UNEVEN * float(size.sum())


COARSEST = 0.5
"""Mean |d| / (1 - p) above which no rounding of weights is expected: int4 left .16 in the toy model, and
leaves more where weights are larger."""


class PrecisionOf(Cause):
    """Small differences everywhere."""

    id = "precision"
    stage = "policies"
    of_passes = True
    title = "the sampler computes, or stores its weights, in a lower precision than the trainer, or in a higher one"
    advice = (
        "below .01 nats or so keep it; above, correct for it (an importance weight for the engine, such as tis or "
        "icepop), or raise the coarser side's precision, at least that of the output head (vLLM: dtype=; TRL trains "
        "with bf16=True by default)"
    )
    not_told_from = (
        Alternative(
            "keys and values that are cached in a lower precision, or of a prompt that was read with older weights",
            "give --model, or compare with a run whose cache has the model's precision (vLLM: kv_cache_dtype='auto')",
        ),
        Alternative("weights that are a little older", "give --model", fields=VERSIONS, settled=same_version),
        Alternative(
            "weights that the engine was not given, such as an adapter or another checkpoint",
            "give --model",
            settled=lambda evidence: not _coarse_from_the_start(evidence),
        ),
        OTHER_PROMPT,
        Alternative(
            "an update that did not reach the sampler, whatever the versions say",
            "score one known sequence with the engine after a sync, or give --model",
            settled=before_any_update,
        ),
        OTHER_TRANSFORM._replace(
            words=OTHER_TRANSFORM.words.replace("such as ", "such as a temperature near 1, "),
            settled=as_even_as_rounding,
        ),
        Alternative(
            "a bias or a ban of the token id that has much of the difference (logit_bias, min_tokens, ignore_eos)",
            "read the engine's sampling options, or give --model",
            settled=lambda evidence: not of_one_id(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        if before_any_update(evidence) and (coarse := _other_weights(evidence)):
            if coarse.statistic > COARSEST:
                return None
            said = (
                "; it was there before any update, at version 0, so none is missing (int4 has left 0.16 in a toy model)"
            )
            return coarse._replace(margin=0.0, sentence=coarse.sentence + said)
        above, below = float(np.maximum(evidence.d, 0).sum()), float(np.maximum(-evidence.d, 0).sum())
        found = _as_rounding(evidence)
        if found is None or above < ONE_SIGN * below:  # as of a sampler that forbids a few unlikely tokens
            return None
        if grown := small_growth(evidence):
            said = found.sentence + GROWS_WITH_WEIGHTS.format(*grown)
            return found._replace(sentence=said) if _age_elsewhere(evidence) else None
        return found


OF_ONE_ID, MORE_OFTEN = 0.2, 10.0
"""Share of the sum of |d| that the tokens of one id have, and that over their share of all tokens, from which on d is
theirs."""


def of_one_id(evidence: Evidence) -> bool:
    """Whether few tokens, all of one id, have much of |d|, as under a bias of an end token."""
    _, one, times = np.unique(evidence.ids, return_inverse=True, return_counts=True)
    of_all = np.bincount(one, evidence.size) / max(float(evidence.size.sum()), 1e-12)
    return bool(((of_all > OF_ONE_ID) & (of_all > MORE_OFTEN * times / len(evidence)) & (times >= 4)).any())


GROWS_WITH_WEIGHTS = (
    "; it grows over the optimizer steps, from {:.2g} to {:.2g}, as the rounding of weights does that grow, or as "
    "updates do that do not reach the sampler"
)


def _age_elsewhere(evidence: Evidence) -> bool:
    """Whether logged versions say that the sampler's weights are older, and d is not of that age: ``logp`` is further
    from ``old_logp``, as where that is of the weights that sampled, or samples without an age show a gap, too.
    """
    return older(evidence) and not lag_by_versions(evidence)
