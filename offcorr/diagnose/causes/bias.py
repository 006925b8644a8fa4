"""A number that one side adds to the logits of a few tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.sampling import ABLE, power
from offcorr.diagnose.evidence import Booleans, Evidence
from offcorr.diagnose.record import Floats, Integers

PURE = 0.95
"""Share of the tokens, of the few ids and of the others, whose sign, or size, has to follow from the id."""

LEAST = 0.3
"""Nats between the mean d of the two sets of ids, at least: about the bias, which rounding does not reach."""

LEVEL = 0.25
"""Spread of the mean d of the other ids, in units of the distance of the few from them, that is none of other weights,
which move each id by an amount of its own."""

CONVINCING = 30.0
"""Nats by which the token ids have to tell the signs better than chance does."""

TEMPERED = 0.95
"""Share of the spread of d from which a temperature is the better explanation."""

LISTED = 8
"""Token ids that a sentence names at most."""

UNSURE = 0.5
"""The most that a bias is sure: updates that rewarded these tokens everywhere leave the same, and where versions are
equal they may not have reached the sampler."""


class Carriers(NamedTuple):
    """Token ids whose tokens have something that those of other ids have not.

    Args:
        ids: most of whose tokens have it.
        follows: share of their tokens that have it, or of the others' tokens that have it not, the smaller one.
        nats: the log-likelihood of who has it given the ids, above that of as many at random.
        where: d of these ids, in words.
    """

    ids: Integers
    follows: float
    nats: float
    where: str

    @classmethod
    def of(cls, ids: Integers, has: Booleans, where: str) -> Carriers | None:
        """None: no id has it, or all have."""
        known, same, count = np.unique(ids, return_inverse=True, return_counts=True)
        chosen = np.bincount(same, has, minlength=len(known)) > count / 2
        if not chosen.any() or chosen.all():
            return None
        few = chosen[same]
        told = _entropy(has) - _entropy(has[few]) - _entropy(has[~few]) - chosen.sum() * np.log(len(known))
        return cls(known[chosen], min(float(has[few].mean()), float(1 - has[~few].mean())), float(told), where)


def _entropy(has: Booleans) -> float:
    """Entropy (nats) of as many draws of a share."""
    share = np.clip(has.mean(), 1e-12, 1 - 1e-12)
    return float(-len(has) * (share * np.log(share) + (1 - share) * np.log1p(-share)))


def _carriers(evidence: Evidence) -> Carriers | None:
    """The ids with one sign of d, where they are fewer than those with the other, or, without such, with a large d."""
    ids, d = evidence.ids, evidence.d
    properties = {"above": d > 0, "below": d < 0, "far from": np.abs(d - np.median(d)) > LEAST}
    found = {where: Carriers.of(ids, has, f"{where} that of the other ids") for where, has in properties.items()}
    far = found.pop("far from")
    fewer = min(filter(None, found.values()), key=lambda one: len(one.ids), default=None)
    return next((one for one in (fewer, far) if one and one.follows >= PURE and one.nats >= CONVINCING), None)


def _spread_by_id(evidence: Evidence) -> float:
    """The standard deviation of the mean d of the token ids that occur three times."""
    _, same, count = np.unique(evidence.ids, return_inverse=True, return_counts=True)
    often = count >= 3
    if not often.any():
        return 0.0
    level, weight = np.bincount(same, evidence.d)[often] / count[often], count[often]
    return float(np.sqrt(np.average((level - np.average(level, weights=weight)) ** 2, weights=weight)))


def _of_one_sign(ids: Integers, values: Floats) -> float:
    """Share of the values whose sign is that of the mean of their id."""
    _, same = np.unique(ids, return_inverse=True)
    return float((np.sign(np.bincount(same, values))[same] == np.sign(values)).mean())


def _listed(ids: Integers) -> str:
    return " or ".join(map(str, ids)) if len(ids) <= LISTED else f"{', '.join(map(str, ids[:LISTED]))}, …"


class LogitBias(Cause):
    """The sign of d, or its size, follows from the token id: one for a few ids and the other for the rest."""

    id = "logit_bias"
    stage = "sampling"
    title = "one side adds a number to the logits of a few tokens, and the other does not"
    advice = (
        "sample without logit_bias, bad_words and logits processors, and look for a loop of your own that changes the "
        "logits of these tokens"
    )
    not_told_from = (
        Alternative(
            "updates that rewarded, or punished, these tokens everywhere, and that the sampler has not, whatever the "
            "versions say",
            "give --model and, as --checkpoint, the weights that sampled",
        ),
        Alternative(
            "a temperature, softcap, clamp, truncation, ban or penalty: where an id has about the same probability in "
            "many contexts, what depends on the probability depends on the id, too",
            "read the engine's sampling options, or give --model",
            settled=lambda evidence: (
                not _alike_in_all_contexts(evidence)
                and ((few := _carriers(evidence)) is None or _one_number(evidence, few.ids))
            ),
        ),
        Alternative(
            "another prompt, template or position that one side read, to which few tokens are sensitive",
            "give --model, or compare the prompt ids that each side read",
        ),
        Alternative(
            "ids that the sampler did not draw, as an end token that a client writes under an id of its own",
            "compare the ids at the ends of the completions with those that the engine returned",
            settled=lambda evidence: (few := _carriers(evidence)) is None or not _at_the_ends(evidence, few.ids),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        if not len(evidence) or evidence.gap < evidence.floor or evidence.selected:
            return None
        few = _carriers(evidence)
        if few is None:
            return None
        chosen = np.isin(evidence.ids, few.ids)
        rest = evidence.keep(~chosen)
        off = evidence.d[chosen] - rest.d.mean()
        apart = float(np.abs(off).mean())
        if (
            apart < LEAST
            or _of_one_sign(evidence.ids[chosen], off) < PURE
            or _spread_by_id(rest) > LEVEL * apart
            or power(rest).explained > TEMPERED
        ):
            return None
        return Found(
            few.follows,
            float(np.sqrt(few.follows * (1 - few.follows) / len(evidence))),
            PURE,
            1.0 + 2 * float(np.log(few.nats / CONVINCING)),
            f"d is {few.where} at tokens with the id {_listed(few.ids)}, on average {apart:.2g} nats from it, and not "
            f"so at the others, for {100 * few.follows:.3g} % of both or more; other weights make such a difference "
            "between ids only where updates rewarded or punished these tokens everywhere",
            rough=True,
            surest=UNSURE,
        )


NEAR = 0.1
"""Mean deviation of what was added to the logits of an id, as a share of it, up to which it is one number: biases have
left .03, and a prompt without its first token .3 and more."""


def _one_number(evidence: Evidence, ids: Integers) -> bool:
    """Whether one number, added to the logits of each of these ids, leaves their d.

    A bias b of an id with the probability p changes the normaliser to 1 + p (e^b - 1), so that e^d is p + (1 - p) e^-b,
    where p is the trainer's, and its logits have none.  Other ids with a bias change the normaliser, too, by little
    where they are unlikely.
    """
    far = []
    for one in ids:
        which = (evidence.ids == one) & (evidence.trainer < ABLE)
        p = np.exp(evidence.trainer[which])
        added = -np.log(np.maximum((np.exp(np.clip(evidence.d[which], -50, 50)) - p) / (1 - p), 1e-12))
        far += [np.abs(added - np.median(added)) / max(abs(float(np.median(added))), 1e-12)] if len(added) else []
    return not far or float(np.mean(np.concatenate(far))) <= NEAR


def _at_the_ends(evidence: Evidence, ids: Integers) -> bool:
    """Whether all tokens with these ids are the last ones of their sequences."""
    last = np.append(np.diff(evidence.sequence) > 0, True)
    return bool(last[np.isin(evidence.ids, ids)].all())


ALIKE = 0.3
"""Spread of the log-probs of one id (nats) below which its contexts are alike."""


def _alike_in_all_contexts(evidence: Evidence) -> bool:
    """Whether an id has about the same probability in every context, by the trainer."""
    _, same = np.unique(evidence.ids, return_inverse=True)
    typical = np.bincount(same, evidence.trainer) / np.bincount(same)
    return float(np.abs(evidence.trainer - typical[same]).mean()) < ALIKE
