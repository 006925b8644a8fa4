"""Causes in the sampled distribution that neither side's log-probs carry: only the surprisal balance shows them."""

from __future__ import annotations

import numpy as np

from offcorr.diagnose.causes.base import Alternative, Cause, Found
from offcorr.diagnose.causes.drawn import Repeats, Truncation, repeats, truncation
from offcorr.diagnose.causes.over_steps import surprising_steps
from offcorr.diagnose.causes.sampling import PROCESSED
from offcorr.diagnose.evidence import Estimate, Evidence

ENDS = 2.2
"""Log-likelihood ratio (nats) from which a truncation is named rather than a temperature."""

REPEATED = 3.5
"""Standard errors by which draws are too surprising, over all and after repetitions, before a penalty is named."""

RAISES = 1.5
"""Standard errors by which a penalty makes the tokens too surprising as a whole, at least."""


def _unlogged(evidence: Evidence, sign: int) -> Estimate | None:
    """The surprisal balance where it is off by more than policies that differ this little can make it."""
    balance = evidence.balance
    if balance is None or not evidence.balanced or balance.z * sign < (4 if sign < 0 else 3.5):
        return None
    return balance if abs(balance.value) > _other_policies(evidence) else None


def _other_policies(evidence: Evidence) -> float:
    """Surprise per token (nats) that two policies which differ can add, and updates on the batch before the entropy."""
    known = evidence.with_entropy or evidence
    return 2 * (known.gap + known.moved)


OPTIONS = "read the engine's sampling options, or give --model"

SELECTED = Alternative(
    "sequences that were chosen by their rewards or their likelihood, such as the correct ones or the best of several",
    "dump every sequence that was sampled",
    settled=lambda evidence: len({one.reward for one in evidence.records} - {None}) > 1,
)

LEFT_OUT = Alternative(
    "tokens that were masked by their log-probs, such as unlikely ones that the engine reported no log-prob of",
    "log them with mask 1, and NaN for what the engine did not report",
    settled=lambda evidence: all(one.mask is None or bool(np.all(one.mask)) for one in evidence.records),
)

OTHER_ENTROPY = Alternative(
    "an entropy of other distributions than those of old_logp, as of raw logits beside a temperature, or in bits",
    "compute both from the same logits, in nats",
)


def _surprise(evidence: Evidence) -> float:
    """The surprisal balance, and 0 where it is not known."""
    return 0.0 if evidence.balance is None else evidence.balance.value


OTHER_SAMPLER = Alternative(
    "other weights that sampled than scored, or another prompt that they read, where rollout_logp is of the trainer's",
    "see where rollout_logp is computed, and when the sampler gets new weights",
)

NOT_SAMPLED = Alternative(
    "tokens that the model did not sample, such as a tool's text, a trace or appended end tokens, within the mask",
    "decode the tokens with the lowest log-probs (env_mask of TRL's rollout_func leaves a tool's out)",
)

BANNED = Alternative(
    "a ban or a bias of some tokens (logit_bias, bad_words, min_tokens)",
    "read the engine's sampling options, as --model tries no ban or bias",
)


class TemperatureSilent(Cause):
    """The tokens were drawn at a temperature that neither side's log-probs carry."""

    id = "temperature_silent"
    stage = "unlogged"
    title = "the sampler applies a temperature, and both sides log log-probs without it"
    advice = (
        f"set the sampler's temperature= for the trainer, too, and {PROCESSED}; where the sampler truncates instead, "
        "sample with top_p=1.0, top_k=0, min_p=0.0"
    )
    not_told_from = (
        SELECTED,
        LEFT_OUT,
        OTHER_ENTROPY,
        Alternative("a truncation (top_p, top_k, min_p)", OPTIONS, settled=lambda evidence: _surprise(evidence) > 0),
        Alternative(
            "a penalty on repeated tokens",
            OPTIONS,
            settled=lambda evidence: _surprise(evidence) < 0,
        ),
        OTHER_SAMPLER,
        BANNED,
        NOT_SAMPLED._replace(settled=lambda evidence: _surprise(evidence) < 0),
    )

    def found(self, evidence: Evidence) -> Found | None:
        where, of_steps, rest = surprising_steps(evidence)
        for sign in (-1, 1):
            balance = _unlogged(where, sign)
            if balance is None:
                continue
            if sign > 0:
                found = None if _penalised(where) else _silent(where, balance, of_steps)
            else:
                ends = _truncation(where, rest).support > ENDS
                found = None if ends else _silent(where, balance, of_steps)
            return found and found._replace(left=evidence.unbalanced())
        return None


class TopPSilent(Cause):
    """The tokens are less surprising than they should be, and unlikely ones end rather than become rare."""

    id = "top_p_silent"
    stage = "unlogged"
    title = "the sampler truncates (top_p, top_k, min_p), and both sides log log-probs of the full distribution"
    advice = f"sample with top_p=1.0, top_k=0, min_p=0.0 and the trainer's temperature, and {PROCESSED}"
    not_told_from = (
        SELECTED,
        LEFT_OUT,
        OTHER_ENTROPY,
        Alternative("a low temperature", OPTIONS),
        OTHER_SAMPLER,
        BANNED,
    )

    def found(self, evidence: Evidence) -> Found | None:
        where, of_steps, rest = surprising_steps(evidence)
        balance, ended = _unlogged(where, -1), _truncation(where, rest)
        if balance is None or ended.support <= ENDS:
            return None
        found = _silent(
            where,
            balance,
            f", and by their log-probs and entropies unlikely tokens end, as under a top_p of {ended.share:.2f} or "
            "more, as they mostly do not at a low temperature, where they become rare; distributions that "
            f"are flat over few tokens end by themselves, too{of_steps}",
        )
        return found._replace(left=evidence.unbalanced())


class PenaltySilent(Cause):
    """The tokens are more surprising than they should be, most of all where the likely ones were seen before."""

    id = "penalty_silent"
    stage = "unlogged"
    title = "the sampler penalises tokens that were seen before, and both sides log log-probs without that penalty"
    advice = f"sample with repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0, and {PROCESSED}"
    not_told_from = (
        Alternative(
            "older weights that sampled, where the updates since rewarded repetitions, and rollout_logp is of the "
            "trainer's weights, such as a copy of old_logp",
            "see where rollout_logp is computed, or give --model and, as --checkpoint, the weights that sampled",
        ),
        Alternative(
            "a ban of repetitions (no_repeat_ngram_size)",
            "read the engine's sampling options",
        ),
        SELECTED,
        OTHER_ENTROPY,
        Alternative("a high temperature, or a ban or a bias of likely tokens", OPTIONS),
        NOT_SAMPLED,
    )

    def found(self, evidence: Evidence) -> Found | None:
        where, of_steps, _ = surprising_steps(evidence)
        found = _penalised(where)
        if found is None:
            return None
        return Found(
            found.seen.value,
            found.seen.error,
            2 * found.seen.error,
            (found.z - REPEATED) / 3 + 0.3,
            f"where the likely next tokens stood in the context before, the sampled tokens are more surprising than "
            f"draws from the trainer's distributions would be, relative to the others by {found.seen.value:.2f} +- "
            f"{found.seen.error:.2f} of what the entropy allows, {_while(where)}{of_steps}",
            evidence.unbalanced(),
            share=1.0,
            surest=0.5,  # weights that repeat themselves less leave the same
        )


def _while(evidence: Evidence) -> str:
    """The size of d in words, but for what the causes that were found before explain."""
    differ = f"while the two log-probs differ by {evidence.gap:.2g} nats on average"
    return differ if evidence.untouched else f"{differ}, but for the other causes"


def _silent(evidence: Evidence, balance: Estimate, more: str = "") -> Found:
    """The finding, but for what is left; it is barely surer than another.

    In a policy that is flat over a few tokens, or certain, a low temperature and a truncation leave nearly the same,
    and a high one what a penalty leaves.  Other weights that sampled, or another prompt, can make the draws surprising,
    or the contrary, by themselves.
    """
    return Found(
        balance.value,
        balance.error,
        3.5 * balance.error,
        0.0,
        f"the sampled tokens are {'more' if balance.value > 0 else 'less'} surprising than draws from the trainer's "
        f"distributions would be, by {abs(balance.value):.3f} nats per token, {_while(evidence)}{more}",
        share=1.0,
    )


def _truncation(evidence: Evidence, rest: Evidence | None) -> Truncation:
    """The truncation that may explain the draws, against a temperature.

    Args:
        rest: tokens of steps without a cause.  Where unlikely tokens end there, too, as in flat distributions over few
            tokens, that is no sign of a truncation, and as much of it is taken away.
    """
    known, others = evidence.with_entropy, rest and rest.with_entropy
    if known is None or known.entropy is None:
        return Truncation(0.0, 0.0)
    found = truncation(known.trainer, known.entropy)
    if others is None or others.entropy is None:
        return found
    usual = truncation(others.trainer, others.entropy).support
    if usual <= ENDS:
        return found
    return Truncation(found.share, max(found.support - usual * len(known) / len(others), 0.0))


def _penalised(evidence: Evidence) -> Repeats | None:
    """The excess of surprise, where it is larger after repetitions: a temperature has no regard to them."""
    found = repeats(evidence) if evidence.balanced else None
    if found is None or found.z < REPEATED or found.seen.z < 2 or found.seen.value < found.overall.value:
        return None
    if found.overall.z < RAISES:  # a penalty makes the tokens more surprising as a whole, too
        return None
    known = evidence.with_entropy or evidence
    if _surprise(evidence) < 2 * known.gap:  # two policies that differ can, as where the sampler read another prompt
        return None
    return found if 0.5 * found.seen.value > _other_policies(evidence) else None
