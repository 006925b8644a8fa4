"""A cause that gives the two sides other tokens: text that was encoded again."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import CAUSES, Alternative, Cause, Found
from offcorr.diagnose.causes.values import FEW, ONE_SIDED
from offcorr.diagnose.evidence import LARGEST, Booleans, Evidence, surprisal_balance
from offcorr.diagnose.record import Floats


class Retokenised(Cause):
    """Each sequence agrees up to some token, and has nothing in common after it."""

    id = "retokenised"
    stage = "values"
    title = "the trainer scored other tokens than the sampler sampled"
    advice = (
        "carry the sampled token ids to the trainer; text that is encoded again need not give the same ids "
        "(offcorr.tokens keeps them)"
    )
    not_told_from = (
        Alternative(
            "another model, or weights far from those that sampled, from the start or from some token on "
            "(weights_swapped), to which such tokens are next to impossible",
            "compare the token ids and the weights of both sides",
            settled=lambda evidence: (found := CAUSES["retokenised"].found(evidence)) is None or found.surest == 1.0,
        ),
        Alternative(
            "another prompt, template or position that one side read, beside which some tokens are next to impossible",
            "compare the prompt ids that each side read",
            settled=lambda evidence: (
                (found := CAUSES["retokenised"].found(evidence)) is None or found.surest > OF_ANOTHER_POLICY
            ),
        ),
        Alternative(
            "log-probs of another sequence, as where rows were put in another order",
            "compare the log-probs of one sequence on both sides by hand",
            settled=lambda evidence: (
                (found := CAUSES["retokenised"].found(evidence)) is None or found.surest > OF_ANOTHER_POLICY
            ),
        ),
        Alternative(
            "a context that one side did not read, such as a tool's answer, or that its attention mask leaves out: the "
            "log-probs differ from the first token after masked ones on",
            "compare the ids that each side read, and its attention mask",
            settled=lambda evidence: _behind_masked(evidence) < HALF,
        ),
        Alternative(
            "tokens that one side forbids (min_tokens, ignore_eos, bad_words, a mask of its logits), where the other "
            "is nearly certain of them, or a penalty on repeated tokens that makes the sampler draw others",
            "see what each side does with its logits",
            settled=lambda evidence: (
                (found := CAUSES["retokenised"].found(evidence)) is None or found.surest > OF_ANOTHER_POLICY
            ),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        before, after = np.zeros(len(evidence), bool), np.zeros(len(evidence), bool)
        firsts, slips = [], []
        at_place = moved_by = 0.0
        for at in range(len(evidence.records)):
            tokens = evidence.of_sequence(at)
            trainer, sampler = evidence.trainer[tokens], evidence.sampler[tokens]
            first, by = _slip(trainer, sampler) or (_onset(evidence.size[tokens]), 0)
            if first is not None:
                firsts.append(first)
                slips += [by] * (by != 0)
                places = np.arange(max(0, -by), first)
                at_place += float(np.abs(trainer - sampler)[places].sum())
                moved_by += float(np.abs(trainer[places] - sampler[places + by]).sum())
                before[tokens.start : tokens.start + first] = True
                after[tokens.start + first : tokens.stop] = True
        if len(firsts) < 2 or (np.std(firsts) < 1.5 and len(firsts) > 4) or before.sum() < 16:
            return None
        before_size, after_size = float(evidence.size[before].mean()), float(evidence.size[after].mean())
        if after_size < 8 * before_size and len(slips) < 2:
            return None
        median = float(np.median(evidence.size[after]))
        if median < 0.1 * after_size and (evidence.d[after] > 0.02).mean() < ONE_SIDED and not slips:
            return None  # a sampler that forbids tokens makes all others likelier, by much where those were likely
        if moved_by < 4 * at_place + 1 and (len(slips) > len(firsts) / 2 or _shifted(evidence)):
            return None  # all is shifted, from the first token on
        if before_size < 0.02:  # the others that differ do for the same reason, early or just before they end
            far = evidence.size > max(0.01, 20 * float(np.median(evidence.size[before])))
            for at in range(len(evidence.records)):
                tokens = evidence.of_sequence(at)
                after[tokens] |= np.maximum.accumulate(far[tokens])
        share = len(firsts) / len(evidence.records)
        again = (
            f"; in {len(slips)} of them the sampler's log-probs fit again when they are moved by {_amounts(slips)}"
            if slips
            else ""
        )
        fit_again = len(slips) >= max(2, FIT_AGAIN * len(firsts))
        which = "" if slips else "that the trainer finds next to impossible, "
        sure = fit_again or (_agree(evidence, before) and _unrelated(evidence.keep(after)))
        sure = sure and _not_drawn(evidence, after)
        sure = sure and _behind_masked(evidence) < HALF
        sure = sure and np.ptp(firsts) > 0  # weights that were loaded while sampling begin at one token in all
        return Found(
            share,
            float(np.sqrt(share * (1 - share) / len(evidence.records))),
            2 / len(evidence.records),
            len(firsts) / 2 + len(slips),
            f"in {len(firsts)} of {len(evidence.records)} sequences the log-probs agree (mean |d| "
            f"{before_size:.2g} nats) up to a token {which}at index {min(firsts)} to "
            f"{max(firsts)}, and differ from there on (mean |d| {after_size:.2g} nats){again}"
            + ("" if sure or fit_again else MOVED),
            evidence.keep(~after),
            surest=(1.0 if fit_again or len(firsts) >= SEVERAL else FEW) if sure else OF_ANOTHER_POLICY,
            rough=not sure,
        )


ALL = 0.2
"""Share of mean |d| that a shift leaves at most where it is of all sequences, beside rounding."""


def _shifted(evidence: Evidence) -> bool:
    """Whether the log-probs of all sequences fit when they are moved by one token."""
    return (shift := CAUSES["shift"].found(evidence)) is not None and shift.statistic < ALL


HALF = 0.5
"""Share of the sequences with such a token in which it follows masked ones, from which on these may be the reason."""


def _behind_masked(evidence: Evidence) -> float:
    """Of the sequences that are far off from some token on, the share in which masked tokens precede that one."""
    behind = []
    for at, record in enumerate(evidence.records):
        tokens = evidence.of_sequence(at)
        if record.mask is None or (first := _onset(evidence.size[tokens])) is None:
            continue
        place = int(evidence.position[tokens][first])
        behind.append(place > 0 and not np.all(np.asarray(record.mask, bool)[max(0, place - FARTHEST_SLIP) : place]))
    return float(np.mean(behind)) if behind else 0.0


MOVED = "; a policy that has moved far since it sampled, or that read another prompt, may have given up such tokens"

AGREE = 0.001
"""Mean |d| (nats) up to the first other token, below which both sides have the same weights and prompt: a policy that
has moved far, or another prompt, makes tokens next to impossible, too, and differs before them as well."""

UNCERTAIN, TOLD = -0.05, 8
"""Log-prob below which a token tells whether both sides agree, and how many such tokens it takes."""

OF_ANOTHER_POLICY = 0.5
"""The confidence where the tokens before differ, too, as where the policy has moved or one side read another prompt."""

SEVERAL = 4
"""Sequences from which the log-probs that differ from some token on are no chance."""

FIT_AGAIN = 0.2
"""Share of these sequences, two at least, whose log-probs fit again when they are moved, below which some do by chance:
of a policy that has moved far since it sampled, one of 23 did."""

RELATED = 0.7
"""Correlation of the two log-probs after the first other token, from which they may be of the same ids: other ids have
left .6, as the same text is likely or unlikely to both, and weights that were loaded while sampling .8."""

FARTHEST_SLIP = 4
"""Tokens, at most, by which encoding a text again is seen to move what follows."""


def _agree(evidence: Evidence, before: Booleans) -> bool:
    """Whether both sides agree on these tokens: on those of which the trainer is not certain, as any two are certain of
    the others.
    """
    told = evidence.size[before & (evidence.trainer < UNCERTAIN)]
    return len(told) >= TOLD and float(told.mean()) < AGREE


def _unrelated(rest: Evidence) -> bool:
    """Whether the two log-probs correlate by less than those of the same tokens under weights that moved."""
    trainer, sampler = (np.clip(side, -LARGEST, 0) for side in (rest.trainer, rest.sampler))
    return bool(min(trainer.std(), sampler.std()) > 0 and np.corrcoef(trainer, sampler)[0, 1] < RELATED)


def _not_drawn(evidence: Evidence, which: Booleans) -> bool:
    """Whether these tokens surprise the trainer more than its own draws do, as other ids do, and other rows' log-probs
    do not."""
    entropy, trainer = evidence.entropy, evidence.trainer
    if entropy is None:
        return False
    which = which & np.isfinite(entropy) & (trainer > -LARGEST)
    return bool(which.any()) and surprisal_balance(trainer[which], entropy[which]).z > SURPRISED


SURPRISED = 3.0
"""Standard errors by which tokens are more surprising than draws, from which on they are none."""


def _slip(trainer: Floats, sampler: Floats) -> tuple[int, int] | None:
    """The index from which one sequence's log-probs fit only when they are moved, and by how many tokens."""
    far = np.abs(trainer - sampler) > 0.5
    if not far.any():
        return None
    first = int(far.argmax())
    places = np.arange(first + FARTHEST_SLIP, len(trainer) - FARTHEST_SLIP)
    if len(places) < 8 or (first and np.abs(trainer - sampler)[:first].mean() > 0.1):
        return None
    left = {by: _apart(trainer[places], sampler[places + by]) for by in range(-FARTHEST_SLIP, FARTHEST_SLIP + 1)}
    best = min(left, key=lambda by: left[by])
    return (first, best) if 0.2 < left[0] < np.inf and left[best] < 0.25 * left[0] else None


def _apart(trainer: Floats, sampler: Floats) -> float:
    """Median |d| of the tokens of which one side is not certain, as certain ones fit whatever they are moved by;
    infinite where these are few.
    """
    told = np.minimum(trainer, sampler) < UNCERTAIN
    return float(np.median(np.abs(trainer - sampler)[told])) if told.sum() >= TOLD else np.inf


def _amounts(slips: list[int]) -> str:
    """A number of tokens, in words."""
    amounts = sorted({abs(by) for by in slips})
    return (
        f"{amounts[0]} token{'s' * (amounts[0] > 1)}" if len(amounts) == 1 else f"{amounts[0]} to {amounts[-1]} tokens"
    )


GROSS = 4.0
"""|d| (nats) of a token that stands where the trainer expects none such."""


def _onset(size: Floats) -> int | None:
    """The index from which a sequence that agreed before is far off; None: there is none."""
    gross = size > GROSS
    if not gross.any():
        return None
    first = int(gross.argmax())
    if first < 1 or first > len(size) - 2:
        return None
    before, after = size[:first], size[first + 1 : first + 9]
    if before.mean() > 0.1 or after.mean() < 0.1 or after.mean() < 5 * before.mean():
        return None
    return first
