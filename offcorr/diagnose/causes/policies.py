"""Causes that leave two policies that differ: precision, caches, old weights, other contexts."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import Cause, Found
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.evidence import SAME, Estimate, Evidence

SIGNIFICANT = 5.0
"""Standard errors."""

WEIGHTS = 0.03
"""Mean |d| / (1 - p) above which weights differ by more than rounding; bf16 and int8 have .003 to .02."""

SHARED = 0.35
"""Split-half correlation by token id above which two policies differ in the same way everywhere."""

FAR = 0.15
"""Mean |d| / (1 - p) above which precision is no explanation."""


class Dropout(Cause):
    """The trainer scores one token after one context differently each time."""

    id = "dropout"
    stage = "policies"
    title = "the trainer's dropout is on"
    advice = "score with model.eval(), or set every dropout of the model's configuration to 0"

    def found(self, evidence: Evidence) -> Found | None:
        trainer, sampler = evidence.same_context
        if len(trainer) < 6 or evidence.gap < SAME:
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
            f"the trainer's log-probs of one token after one context are {spread:.2g} (1 - p) nats apart on average "
            f"({len(trainer)} tokens that samples of one prompt share), the sampler's {other:.2g}",
        )


class MoERouting(Cause):
    """A few tokens are far off, among others that agree."""

    id = "moe_routing"
    stage = "policies"
    title = "the sampler's router sends some tokens to other experts than the trainer's"
    advice = "compute the router in float32 on both sides, or replay the sampler's choice of experts in the trainer"

    def found(self, evidence: Evidence) -> Found | None:
        profile = Profile.of(evidence)
        if evidence.gap < evidence.floor or len(profile) < 64:
            return None
        heavy = profile.mean / max(profile.median, 1e-9)
        first, _, _ = profile.level(0, 1)
        if heavy < 5 or profile.smoothness > 0.75 or first > 2 or profile.median > 0.02:
            return None
        return Found(
            heavy,
            heavy / np.sqrt(len(profile)),
            5.0,
            float(np.log(heavy / 5)) + 0.5,
            f"|d| / (1 - p) has a mean of {profile.mean:.2g} and a median of {profile.median:.2g}: few tokens are far "
            "off, at no position in particular",
        )


class WeightsSwapped(Cause):
    """The size of d changes once within each sequence, from one token to the next."""

    id = "weights_swapped"
    stage = "policies"
    title = "the sampler's weights changed in the middle of the sequences"
    advice = (
        "finish or abort running requests before new weights are loaded, or log rollout_version per token and correct "
        "token by token"
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        share, first, cuts = profile.halves
        if share > 0.25 and len(cuts) >= 4 and not 0.1 < first < 0.9 and np.median(cuts) >= 4:
            return Found(
                share,
                float(np.sqrt(share * (1 - share) / len(evidence.records))),
                0.25,
                1.5 + 4 * (share - 0.25),
                f"{len(cuts)} sequences have a part where the two agree and one where they do not, the latter "
                f"{'behind' if first > 0.5 else 'in front'}; the change is at index {np.quantile(cuts, 0.1):.0f} to "
                f"{np.quantile(cuts, 0.9):.0f}",
            )
        split = profile.split
        if len(split.gain) < 4:
            return None
        large = split.gain > 12
        if large.mean() < 0.4:
            return None
        rise, place, sharp = split.rise[large], split.place[large], split.sharpness[large]
        typical = float(np.median(rise))
        agree = float((np.sign(rise) == np.sign(typical)).mean())
        if abs(typical) < 1.1 or agree < 0.85 or np.median(place) < 4 or np.median(sharp) < 0.6:
            return None
        first, gain = profile.level(0, 4)[0], float(np.median(split.gain[large]))
        if typical < 0 and abs(typical) < 2.2 and first > 0.5:  # another context fades, too, by token id unlike weights
            if gain < 30 or first > 2 or _noise(evidence):
                return None
        return Found(
            gain,
            float(split.gain[large].std() / np.sqrt(large.sum())),
            12.0,
            float(np.log(gain / 12)) + float(large.mean()),
            f"in {large.sum()} of {len(large)} sequences |d| {'rises' if typical > 0 else 'falls'} by a factor of "
            f"{np.exp(abs(typical)):.0f} from one token to the next, at index {np.quantile(place, 0.1):.0f} to "
            f"{np.quantile(place, 0.9):.0f}",
        )


class Position(Cause):
    """The size of d depends on how much padding a prompt has, or begins with the second token."""

    id = "position"
    stage = "policies"
    title = "positions or padding are counted differently"
    advice = (
        "pass attention_mask and position_ids of left-padded rows to the trainer's forward pass, and count positions "
        "from the first token that is no padding"
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        return _padding(profile) or _restarted(profile)


def _padding(profile: Profile) -> Found | None:
    """The sequences with the longest prompts of their batches agree, and the others do not."""
    share, longer = profile.whole
    size, agree = profile.longest_of_batch
    if not longer > 0.8 and not agree > 0.9:
        return None
    longest = max(longer, agree)
    said = f"the longest of each {size} rows in a row ({agree:.0%})"
    if longer >= agree:
        said = f"those with longer prompts than the others ({longer:.0%} of the pairs)"
    return Found(
        longest,
        float(np.sqrt(longest * (1 - longest) / len(profile.prompt))),
        0.8,
        2.0,
        f"{share:.0%} of the sequences agree: {said}, which have the least padding",
    )


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
        "the first token of the completions agrees and the next ones do not, by more than rounding makes"
        + (", and the difference fades" if fades else "")
        + ": the completion's positions do not continue those of the prompt",
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
            f"|d| / (1 - p) is {np.exp(drop.value):.1f} times smaller at the first token, which is read from the "
            "prompt at once, than at those that follow",
        )


class ChatTemplate(Cause):
    """The first token is much further off than the others."""

    id = "chat_template"
    stage = "policies"
    title = "trainer and sampler read different prompts, as from two chat templates"
    advice = "send the engine token ids, the same that the trainer scores, rather than messages or text"

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        first, error, count = profile.level(0, 1)
        if not count or not np.isfinite(error):
            first, error, count = profile.level(0, 4)
        z = first / error
        if count >= 4 and first > 1.6 and z > SIGNIFICANT:
            return Found(
                first,
                error,
                1.6,
                first,
                f"|d| / (1 - p) is {np.exp(first):.0f} times larger at the first token than typically",
            )
        repeatable = len(evidence.same_context[0]) >= 6  # else it may be dropout; without entropy, a temperature
        other = _noise(evidence) and profile.mean > FAR and not _older(evidence)
        if other and repeatable and first > -1 and evidence.entropy is not None:
            return Found(
                profile.mean,
                float(profile.size.std() / np.sqrt(len(profile))),
                FAR,
                0.3,
                f"|d| / (1 - p) is {profile.mean:.2g} on average, more than rounding makes, and differs from context "
                "to context, as where the two sides read different prompts",
            )
        return None


def _decay(profile: Profile) -> Estimate:
    """Mean log-size of the first eight tokens less that of the later half."""
    last = int(np.quantile(profile.position, 0.9)) if len(profile) else 0
    early, error, _ = profile.level(0, 8)
    late, late_error, _ = profile.level(max(16, last // 2), 10**9)
    if not np.isfinite(error) or not np.isfinite(late_error):
        return Estimate(0.0, np.inf)
    return Estimate(early - late, float(np.hypot(error, late_error)))


class TruncatedPrompt(Cause):
    """d is large at the beginning and fades, in other ways for other contexts."""

    id = "truncated_prompt"
    stage = "policies"
    title = "one side read a shorter prompt, or another history"
    advice = (
        "set the same longest prompt on both sides (TRL: vllm_max_model_length; vLLM: max_model_len) "
        "and carry the history's token ids from turn to turn (offcorr.tokens)"
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
                f"{share:.0%} of the sequences agree, and their prompts are shorter than those of the others "
                f"({1 - longer:.0%} of the pairs)",
            )
        decay = _decay(profile)
        if decay.value < 0.4 or decay.z < 4 or profile.mean < WEIGHTS or evidence.by_token_id.value > 0.5:
            return None
        return Found(
            decay.value,
            decay.error,
            0.4,
            decay.value,
            f"|d| / (1 - p) is {profile.mean:.2g} on average and {np.exp(decay.value):.1f} times larger in the first "
            "eight tokens than later",
        )


class StalePrefixCache(Cause):
    """d is largest at the beginning and fades, in the same way for each token id."""

    id = "stale_prefix_cache"
    stage = "policies"
    title = "the sampler read the prompt with older weights, from its prefix cache"
    advice = "reset the prefix cache after every weight update (vLLM: reset_prefix_cache())"
    not_told_from = ("weights that are a little older, or an fp8 cache: compare with a run without prefix caching",)

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        share, longer = profile.whole
        if longer < 0.2 and profile.mean < FAR:
            return Found(
                longer,
                float(np.sqrt(longer * (1 - longer) / len(profile.prompt))),
                0.2,
                1.5,
                f"{share:.0%} of the sequences agree, and their prompts are shorter than those of the others "
                f"({1 - longer:.0%} of the pairs): too short for a block of the cache",
            )
        decay = _decay(profile)
        if decay.value < 0.45 or decay.z < 3.5:
            return None
        drift = evidence.by_token_id
        if profile.mean > WEIGHTS and not drift.value > 0.5:
            return None
        return Found(
            decay.value,
            decay.error,
            0.45,
            decay.value,
            f"|d| / (1 - p) is {profile.mean:.2g} on average and {np.exp(decay.value):.1f} times larger in the first "
            "eight tokens than later",
        )


class StaleWeights(Cause):
    """Two policies that differ in the same way everywhere, by more than rounding."""

    id = "stale_weights"
    stage = "policies"
    title = "the sampler has older weights than the trainer scores with"
    advice = (
        "check that every update reaches the engine; where sampling runs ahead on purpose, correct for it with a "
        "method for stale data (`offcorr methods` lists them, such as minpro and topr)"
    )
    not_told_from = (
        "an adapter that never reached the sampler: give --checkpoint the base model, or log rollout_version",
    )

    def found(self, evidence: Evidence) -> Found | None:
        return None if _unsynced(evidence) else _other_weights(evidence)


class AdapterNotSynced(Cause):
    """As stale weights, while the logged versions say that sampler and trainer have the same."""

    id = "adapter_not_synced"
    stage = "policies"
    title = "an update, such as a LoRA adapter, does not reach the sampler"
    advice = "merge or reload the adapter at every sync, and score one known sequence with the engine after it"
    not_told_from = ("weights that are older than rollout_version says: give --checkpoint the base model",)

    def found(self, evidence: Evidence) -> Found | None:
        return _other_weights(evidence) if _unsynced(evidence) else None


def _older(evidence: Evidence) -> bool:
    """Whether versions are logged, and most say that the sampler's weights are older."""
    ages = [one for record in evidence.records if (one := age(record)) is not None]
    return bool(ages) and float(np.median(ages)) > 0


def _unsynced(evidence: Evidence) -> bool:
    """Whether versions are logged, and all say that sampler and trainer have the same weights."""
    ages = [age(record) for record in evidence.records]
    return bool(ages) and all(one == 0 for one in ages)


def age(record: object) -> float | None:
    """Optimizer steps between the sampler's weights and the trainer's; None: not logged."""
    rollout, trainer = getattr(record, "rollout_version", None), getattr(record, "trainer_version", None)
    return None if rollout is None or trainer is None else float(np.mean(trainer) - np.mean(rollout))


def _noise(evidence: Evidence) -> bool:
    """Whether d has nothing in common between the sequences, by token id."""
    drift = evidence.by_token_id
    return bool(drift.value + 1.5 * drift.error < SHARED)


def _other_weights(evidence: Evidence) -> Found | None:
    profile = Profile.of(evidence)
    if evidence.gap < evidence.floor or profile.mean < WEIGHTS or (_noise(evidence) and not _older(evidence)):
        return None
    drift = evidence.by_token_id
    said = f"; by token id the halves of the data correlate by {drift.value:.2f}" if np.isfinite(drift.value) else ""
    return Found(
        profile.mean,
        float(profile.size.std() / np.sqrt(len(profile))),
        WEIGHTS,
        0.15 + 0.2 * float(np.log(profile.mean / WEIGHTS)),
        f"|d| / (1 - p) is {profile.mean:.2g} on average, more than rounding makes, and the same over the positions"
        f"{said}",
    )


class PrecisionOf(Cause):
    """Small differences everywhere."""

    id = "precision"
    stage = "policies"
    title = "the sampler computes, or stores its weights, in a lower precision"
    advice = (
        "keep it and correct for it (an importance weight for the engine, such as tis or icepop), or raise the "
        "engine's precision (vLLM: dtype=), at least that of the output head"
    )
    not_told_from = ("weights that are a little older: log rollout_version and trainer_version, or give --model",)

    def found(self, evidence: Evidence) -> Found | None:
        profile = Profile.of(evidence)
        largest = FAR if _noise(evidence) and not _older(evidence) else WEIGHTS
        if evidence.gap < evidence.floor or profile.mean >= largest or len(profile) < 8:
            return None
        return Found(
            profile.mean,
            float(profile.size.std() / np.sqrt(len(profile))),
            evidence.floor,
            0.15 + 0.1 * float(np.log(largest / max(profile.mean, 1e-9))),
            f"|d| / (1 - p) is {profile.mean:.2g} on average, as rounding makes it, the same over the positions",
        )


class PolicyUpdates(Cause):
    """The current log-probs differ from those before the updates on this batch."""

    id = "policy_updates"
    stage = "updates"
    title = "the trainer's policy moved by its own updates on this batch"
    advice = (
        "nothing is wrong: this is what clipping and corrections are for. Fewer updates per batch (num_iterations, "
        "steps_per_generation) or a smaller learning rate make it smaller"
    )

    def found(self, evidence: Evidence) -> Found | None:
        moved = evidence.moved
        if moved < 10 * SAME or moved < 0.2 * evidence.gap:
            return None
        spread = evidence.same_context[0]
        if len(spread) >= 6 and spread.mean() > max(0.02, 0.1 * moved):  # each forward pass differs
            return None
        share = moved / (moved + evidence.gap)
        return Found(
            moved,
            moved / np.sqrt(len(evidence)),
            10 * SAME,
            1.0 + float(np.log(moved / (10 * SAME))) / 2,
            f"logp differs from old_logp by {moved:.2g} nats on average, old_logp from the sampler's by "
            f"{evidence.gap:.2g}",
            evidence,
            share,
        )
