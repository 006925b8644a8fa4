"""A cause that changes the sampler's weights while it samples."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.policies import (
    ALIKE,
    COARSE_PRECISION,
    OTHER_IDS,
    OTHER_PROMPT,
    UNSURE,
    WEIGHTS,
    noise,
    of_age,
    repeatable,
)
from offcorr.diagnose.causes.profile import LEAST_MEAN, Profile
from offcorr.diagnose.causes.sampling import OTHER_TRANSFORM, PENALISED, at_seen_tokens
from offcorr.diagnose.causes.versions import changes_within
from offcorr.diagnose.evidence import Evidence


class WeightsSwapped(Cause):
    """The size of d changes once within each sequence, from one token to the next."""

    id = "weights_swapped"
    stage = "policies"
    title = "the sampler's weights changed in the middle of the sequences"
    advice = (
        "finish or abort running requests before new weights are loaded, or log rollout_version per token and correct "
        "token by token"
    )
    not_told_from = (
        Alternative("a prompt that was read with older weights", "give --model and an earlier --checkpoint"),
        OTHER_IDS,
        OTHER_PROMPT,
        OTHER_TRANSFORM,
        COARSE_PRECISION,
        Alternative(
            "weights that are older, or an update that did not reach the sampler, whose effect changes along the text",
            "give --model and, as --checkpoint, earlier weights",
        ),
        Alternative(
            "a penalty on tokens that stood before (repetition_penalty, presence_penalty, frequency_penalty)",
            "read the engine's sampling options, or give --model",
            settled=lambda evidence: not _after_repetitions(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        if evidence.gap < evidence.floor:
            return None
        profile = Profile.of(evidence)
        if profile.mean < LEAST_MEAN:
            return None
        share, first, cuts = profile.halves
        if share > 0.25 and len(cuts) >= 4 and not 0.1 < first < 0.9 and np.median(cuts) >= 4:
            margin = 1.5 + 4 * (share - 0.25)
            # A model with a recurrent state forgets another prompt after some tokens, and agrees from then on, and
            # positions may go wrong from some token on.
            surest = ALIKE if changes_within(evidence) else UNSURE
            if first < 0.5 and np.ptp(np.quantile(cuts, [0.1, 0.9])) <= 4:  # at one position, which no fade explains
                margin *= 2
            return Found(
                share,
                float(np.sqrt(share * (1 - share) / len(evidence.records))),
                0.25,
                margin,
                f"in {len(cuts)} of {len(evidence.records)} sequences the log-probs agree in the "
                f"{'first' if first > 0.5 else 'last'} part of the completion, and differ in the "
                f"{'last' if first > 0.5 else 'first'}; the change is mostly between index "
                f"{np.quantile(cuts, 0.1):.0f} and {np.quantile(cuts, 0.9):.0f}",
                surest=min(surest, UNSURE) if _after_repetitions(evidence) else surest,
            )
        if profile.mean < WEIGHTS:  # what rounding leaves follows the text, whose order of tokens may have a step
            profile = profile.within_ids
        split = profile.split
        if len(split.gain) < 4:
            return None
        large = split.gain > 12
        if large.mean() < 0.4:
            return None
        rise, place, sharp = split.rise[large], split.place[large], split.sharpness[large]
        typical = float(np.median(rise))
        agree = float((np.sign(rise) == np.sign(typical)).mean())
        if abs(typical) < 0.9 or agree < 0.85 or np.median(place) < 4 or np.median(sharp) < 0.6:
            return None
        dropped = typical < 0 and _dropped(profile)
        if not dropped and (abs(typical) < 1.1 or (typical < 0 and _may_fade(evidence, typical))):
            return None
        gain = float(np.median(split.gain[large]))
        margin = float(np.log(gain / 12)) + float(large.mean())
        return Found(
            gain,
            float(split.gain[large].std() / np.sqrt(large.sum())),
            12.0,
            max(margin, float(np.sqrt(profile.common_step.gain)) / 2) if dropped else margin,
            f"in {large.sum()} of {len(large)} sequences one step describes |d| best: "
            f"{'up' if typical > 0 else 'down'} by a factor of {np.exp(abs(typical)):.0f}, for good, mostly between "
            f"index {np.quantile(place, 0.1):.0f} and {np.quantile(place, 0.9):.0f} of the completion"
            f"{of_age(evidence)}",
            surest=ALIKE if changes_within(evidence) else UNSURE,
        )


def _after_repetitions(evidence: Evidence) -> bool:
    """Whether d is another at tokens that stood before, as under a penalty, of which more and more do."""
    apart = at_seen_tokens(evidence)
    return apart is not None and abs(apart.z) >= PENALISED


def _dropped(profile: Profile) -> bool:
    """Whether d falls at one position of all sequences, by more than a fade along the completion explains."""
    step = profile.common_step
    return step.gain > 20 and step.rise < -0.4 and step.place >= 8 and -1.5 < profile.level(0, 1)[0] < 3


def _may_fade(evidence: Evidence, typical: float) -> bool:
    """Whether what falls within the sequences may fade, as d after another context and under dropout does."""
    first = Profile.of(evidence).level(0, 1)[0]
    return typical > -1.8 or first < -1.5 or first > 2 or (noise(evidence) and not repeatable(evidence))
