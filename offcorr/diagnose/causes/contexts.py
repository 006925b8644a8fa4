"""Causes in what one side reads: positions, caches, prompts."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import NEARLY_GREEDY, Alternative, Cause, Found
from offcorr.diagnose.causes.policies import (
    CHANGED_WITHIN,
    COARSE_PRECISION,
    FAR,
    UNSURE,
    WEIGHTS,
    noise,
    not_drawn_so,
    of_age,
    repeatable,
)
from offcorr.diagnose.causes.profile import LEAST_MEAN, Profile
from offcorr.diagnose.causes.sampling import OTHER_TRANSFORM
from offcorr.diagnose.causes.versions import before_any_update, no_lag_in_d, older, same_version
from offcorr.diagnose.evidence import Estimate, Evidence

SIGNIFICANT = 5.0
"""Standard errors."""

FADES = 0.45
"""Mean log-size of the first eight tokens less that of the later half, from which an old cache is named."""


OLDER_WEIGHTS = Alternative(
    "weights that are older, as where an adapter was not synced, whose d may be largest at the first tokens, too",
    "log old_logp of the weights that sampled, and the versions",
    settled=no_lag_in_d,
)

NOT_SYNCED = Alternative(
    "an update, such as a LoRA adapter, that did not reach the sampler, whatever the versions say (adapter_not_synced)",
    "score one known sequence with the engine after a sync, or give --model, with the adapter apart",
    settled=lambda evidence: not same_version(evidence) or before_any_update(evidence),
)

OTHER_PASS = Alternative(
    "positions that one side counts or scales in its own way (rope_theta, padding), or another forward pass of the "
    "same weights, such as another attention kernel",
    "compare the configurations of both models",
)

OLD_CACHE = Alternative(
    "a prompt that was read with older weights (stale_prefix_cache)", "give --model and an earlier --checkpoint"
)


class Position(Cause):
    """The size of d depends on how much padding a prompt has, or begins with the second token."""

    id = "position"
    stage = "policies"
    of_passes = True
    title = "positions or padding are counted differently"
    advice = (
        "pass attention_mask and position_ids of left-padded rows to the trainer's forward pass, and count positions "
        "from the first token that is no padding"
    )
    not_told_from = (
        Alternative(
            "a penalty on tokens that stood in the completion before (presence_penalty, frequency_penalty, "
            "repetition_penalty)",
            "read the engine's sampling options",
            settled=lambda evidence: _by_padding(evidence),
        ),
        Alternative(
            "keys and values that the engine caches in a coarse precision (kv_cache_dtype)",
            "look at the engine's kv_cache_dtype",
            settled=lambda evidence: _by_padding(evidence),
        ),
        Alternative(
            "ids of the completions that were changed after sampling",
            "compare them with the ids that the engine returned",
            settled=lambda evidence: _by_padding(evidence),
        ),
        Alternative(
            "another prompt or template that one side read, as where it adds a system prompt to those that have none",
            "compare the prompt ids that each side read",
            settled=lambda evidence: not _by_padding(evidence),
        ),
        *(
            one._replace(settled=lambda evidence: _by_padding(evidence))
            for one in (OTHER_TRANSFORM, OLDER_WEIGHTS, COARSE_PRECISION)
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        return _padding(profile) or _restarted(profile)


def _by_padding(evidence: Evidence) -> bool:
    """Whether it was told by the padding, which none of the alternatives depends on."""
    return _padding(Profile.of(evidence)) is not None


def _padding(profile: Profile) -> Found | None:
    """The sequences with the longest prompts of their batches agree, and the others do not."""
    share, longer = profile.whole
    size, agree = profile.longest_of_batch
    if not longer > 0.8 and not agree > 0.9:
        return None
    longest = max(longer, agree)
    said = f"whose prompt is the longest of {size} neighbouring rows (true of {agree:.0%} of the rows)"
    if longer >= agree:
        said = f"with longer prompts than the others ({_pairs(longer)})"
    return Found(
        longest,
        float(np.sqrt(longest * (1 - longest) / len(profile.prompt))),
        0.8,
        2.0,
        f"the log-probs agree in {share:.0%} of the sequences, those {said}, which have the least padding",
        surest=UNSURE,  # a prompt that some have to themselves tells sequences apart by their prompts, too
    )


def _pairs(share: float) -> str:
    return f"in {share:.0%} of the pairs of one that agrees and one that does not"


def _restarted(profile: Profile) -> Found | None:
    """The first token agrees exactly, and the next are furthest off."""
    first, _, count = profile.level(0, 1)
    early, error, _ = profile.level(1, 8)
    late, late_error, _ = profile.level(32, 10**9)
    if not np.isfinite(late_error):
        late, late_error, _ = profile.level(16, 10**9)
    drop = Estimate(early - late, float(np.hypot(error, late_error)))
    fades = drop.value > 0.35 and drop.z > 3 and profile.mean > WEIGHTS
    if count < 4 or first > -2.5 or not (fades or profile.mean > 0.15):
        return None
    return Found(
        drop.value,
        drop.error,
        0.35,
        max(drop.value, 0.5) + 1,
        f"the log-probs agree more closely on the first token of the completions than elsewhere (|d| / (1 - p) is "
        f"{np.exp(first):.2g} of that of all, geometric means), and differ on the next ones by more than rounding makes"
        + (", less and less along the completion" if fades else "")
        + ", as where the positions of the completion do not continue those of the prompt",
        surest=UNSURE,  # a penalty on what stood in the completion before begins there, too
    )


class KVCache(Cause):
    """The first token agrees, or is nearer than the others, which are off by a little, as by rounding."""

    id = "kv_cache"
    stage = "policies"
    title = "the sampler caches keys and values in a lower precision, or decodes with another kernel"
    advice = (
        "keep the cache in the model's precision (vLLM: kv_cache_dtype='auto'), or correct for it with an importance "
        "weight for the engine, such as tis or icepop"
    )
    not_told_from = (
        Alternative("rounding of the weights (precision)", "give --model"),
        Alternative(
            "a penalty on tokens that stood in the completion before (presence_penalty, frequency_penalty, "
            "repetition_penalty), which leaves the first one as it is, or another change of the logits",
            "read the engine's sampling options",
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        profile = Profile.of(evidence)
        if evidence.gap < evidence.floor or profile.mean > 3 * WEIGHTS:
            return None
        first, error, count = profile.level(0, 1)
        early, early_error, _ = profile.level(1, 8)
        drop = Estimate(early - first, float(np.hypot(error, early_error)))
        if count < 6 or drop.value < 0.7 or drop.z < 3 or _restarted(profile):
            return None
        if drop.value < 2.5 and profile.mean > 2 * WEIGHTS:
            return None
        if drop.value < 1.5 and evidence.by_token_id.value > 0.45:
            return None
        return Found(
            -drop.value,
            drop.error,
            -0.7,
            drop.value,
            f"the relative difference |d| / (1 - p) is {np.exp(drop.value):.1f} times smaller (geometric means) at the "
            "first token of the completions than at the next seven: the first comes out of the pass over the prompt, "
            "and only those after it are decoded one by one from the cache",
            surest=UNSURE,  # a penalty leaves the first token as it is, too
        )


class ChatTemplate(Cause):
    """The first token is much further off than the others."""

    id = "chat_template"
    stage = "policies"
    title = "trainer and sampler read different prompts, as from two chat templates"
    advice = "send the engine token ids, the same that the trainer scores, rather than messages or text"
    not_told_from = (
        Alternative("a shorter prompt on one side (truncated_prompt)", "compare their prompt ids"),
        OLDER_WEIGHTS._replace(settled=lambda evidence: not_drawn_so(evidence) or OLDER_WEIGHTS.settled(evidence)),
        NOT_SYNCED._replace(settled=lambda evidence: not_drawn_so(evidence) or NOT_SYNCED.settled(evidence)),
        COARSE_PRECISION._replace(
            settled=lambda evidence: (
                _of_the_text_before(evidence) is not None
                or not_drawn_so(evidence)
                or COARSE_PRECISION.settled(evidence)
            )
        ),
        OTHER_TRANSFORM,
        OTHER_PASS,
        Alternative(
            "a temperature, or another option, that differs between requests",
            "compare the sampling options of the requests, or give --model",
            settled=lambda evidence: _of_the_text_before(evidence) is not None,
            cause="temperature",
        ),
        Alternative(
            "another quantity in place of the trainer's log-probs, such as log-probs that were divided by the length "
            "of the sequence, or by another number",
            "compute the trainer's log-prob of one token by hand",
            settled=lambda evidence: not not_drawn_so(evidence),
        ),
        Alternative(
            "sampler's log-probs of other tokens or of another model, such as a draft model, or rows in another order",
            "score one sequence by hand on both sides",
            settled=lambda evidence: not not_drawn_so(evidence),
        ),
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        if found := _of_the_text_before(evidence):
            return found
        profile = Profile.of(evidence)
        if not_drawn_so(evidence) and profile.mean > FAR:
            ratio = evidence.ratio_identity
            return Found(
                ratio.value,
                ratio.error,
                1.0,
                0.3,
                f"the mean ratio e^d is {ratio.value:.3g} +- {ratio.error:.2g}, where it is 1 for any two policies: "
                "the sampler's log-probs are not those that the tokens were drawn with, as where another prompt was "
                "scored with them, or the trainer's values are no log-probs of these tokens",
                surest=0.5,
            )
        other = noise(evidence) and profile.mean > FAR and not older(evidence)
        # Without repeated contexts it may be dropout, without entropy a temperature.
        if other and repeatable(evidence) and _first(profile)[0] > -1 and evidence.entropy is not None:
            return Found(
                profile.mean,
                profile.error,
                FAR,
                0.3,
                f"the relative difference |d| / (1 - p) is {profile.mean:.2g} on average, more than rounding to bf16 "
                f"or int8 makes, and little of d is shared by the tokens of one id{_by_id(evidence)}, as where the two "
                "sides read different prompts",
                surest=0.5,  # coarse rounding leaves the same, at times
            )
        return None


def _first(profile: Profile) -> tuple[float, float, int]:
    """Mean log-size of the first token of the completions, relative to a typical one, its error, and their number."""
    first, error, count = profile.level(0, 1)
    return (first, error, count) if count and np.isfinite(error) else profile.level(0, 4)


def _of_the_text_before(evidence: Evidence) -> Found | None:
    """The finding that the first token is much further off than the others."""
    profile = Profile.of(evidence)
    first, error, count = _first(profile)
    alone = np.isfinite(profile.level(0, 1)[1])
    if count < 4 or first <= 1.6 or first / error <= SIGNIFICANT or profile.mean <= WEIGHTS:
        return None
    return Found(
        first,
        error,
        1.6,
        first,
        f"the relative difference |d| / (1 - p) is {np.exp(first):.0f} times as large (geometric means) at the first "
        f"{'token' if alone else 'four tokens'} of the completions as over all of them, as where the text just before "
        f"differs{of_age(evidence)}",
        surest=UNSURE,
    )


def _decay(profile: Profile) -> Estimate:
    """Mean log-size of the first eight tokens less that of the later half."""
    last = int(np.quantile(profile.position, 0.9)) if len(profile) else 0
    early, error, _ = profile.level(0, 8)
    late, late_error, _ = profile.level(max(16, last // 2), 10**9)
    if not np.isfinite(error) or not np.isfinite(late_error):
        return Estimate(0.0, np.inf)
    return Estimate(early - late, float(np.hypot(error, late_error)))


def _by_id(evidence: Evidence) -> str:
    """The end of a sentence about how much of d is a token id's."""
    return f" (its mean of each id in one half of the sequences correlates by {evidence.by_token_id.value:.2f} with \
that in the other half)"


def _faded(profile: Profile, decay: Estimate) -> str:
    return (
        f"the relative difference |d| / (1 - p) is {profile.mean:.2g} on average, and its geometric mean is "
        f"{np.exp(decay.value):.1f} times as large in the first eight tokens of the completions as in their later half"
    )


class TruncatedPrompt(Cause):
    """d is large at the beginning and fades, in other ways for other contexts."""

    id = "truncated_prompt"
    stage = "policies"
    title = "one side read a shorter prompt, or another history"
    advice = (
        "set the same longest prompt on both sides (TRL: vllm_max_model_length; vLLM: max_model_len) "
        "and carry the history's token ids from turn to turn (offcorr.tokens)"
    )
    not_told_from = (
        Alternative("another prompt of the same length (chat_template)", "compare their prompt ids"),
        OLD_CACHE,
        OLDER_WEIGHTS,
        CHANGED_WITHIN,
        NOT_SYNCED,
        COARSE_PRECISION,
        OTHER_PASS,
        OTHER_TRANSFORM,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        share, longer = profile.whole
        if longer < 0.2 and profile.mean > FAR:
            return Found(
                longer,
                float(np.sqrt(longer * (1 - longer) / len(profile.prompt))),
                0.2,
                2.0,
                f"the log-probs agree in {share:.0%} of the sequences, those with shorter prompts than the "
                f"others ({_pairs(1 - longer)})",
                surest=UNSURE,  # old weights in full blocks of a prefix cache leave the same
            )
        decay = _decay(profile)
        if decay.value < 0.4 or decay.z < 4 or profile.mean < WEIGHTS or evidence.by_token_id.value > 0.5:
            return None
        if not repeatable(evidence):  # dropout of the attention weights fades, too
            return None
        return Found(
            decay.value,
            decay.error,
            0.4,
            decay.value,
            f"{_faded(profile, decay)}, while little of d is shared by the tokens of one id{_by_id(evidence)}"
            f"{of_age(evidence)}",
            surest=UNSURE,
        )


class StalePrefixCache(Cause):
    """d is largest at the beginning and fades, in the same way for each token id."""

    id = "stale_prefix_cache"
    stage = "policies"
    title = "the sampler read the prompt with older weights, from its prefix cache"
    advice = "reset the prefix cache after every weight update (vLLM: reset_prefix_cache())"
    not_told_from = (
        Alternative("older weights, or an fp8 cache", "compare with a run without prefix caching"),
        Alternative("a shorter or other prompt on one side", "give --model and an earlier --checkpoint"),
        NOT_SYNCED,
        CHANGED_WITHIN,
        COARSE_PRECISION,
        OTHER_PASS,
        OTHER_TRANSFORM,
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        if profile.mean < LEAST_MEAN:
            return None
        share, longer = profile.whole
        if longer < 0.2 and profile.mean < FAR:
            return Found(
                longer,
                float(np.sqrt(longer * (1 - longer) / len(profile.prompt))),
                0.2,
                1.5,
                f"the log-probs agree in {share:.0%} of the sequences, those with shorter prompts than the "
                f"others ({_pairs(1 - longer)}), which may be too short to fill a block of the prefix cache",
                surest=UNSURE,  # a prompt that was cut leaves the short ones, too
            )
        decay = _decay(profile)
        if decay.value < FADES or decay.z < 3.5:
            return None
        # What rounding leaves follows the text, whose order of tokens may have a fade of its own.
        same = _decay(profile.within_ids)
        if profile.mean < WEIGHTS and (same.value < FADES or same.z < SIGNIFICANT):
            return None
        drift = evidence.by_token_id
        shared = drift.value > 0.5
        if profile.mean > WEIGHTS and not shared:
            return None
        return Found(
            decay.value,
            decay.error,
            FADES,
            decay.value,
            _faded(profile, decay)
            + (f"; d is shared by the tokens of one id{_by_id(evidence)}" if shared else "")
            + of_age(evidence),
            surest=UNSURE,  # another prompt fades in the same way
        )
