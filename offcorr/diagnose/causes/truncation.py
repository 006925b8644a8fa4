"""Causes that leave a part of the vocabulary out of the sampler's distribution: truncations and bans."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from offcorr.diagnose.causes.base import NEARLY_GREEDY, Alternative, Cause, Found
from offcorr.diagnose.causes.prefixes import factor, logged, multiplies
from offcorr.diagnose.causes.sampling import PADDED, SIGNIFICANT
from offcorr.diagnose.evidence import Booleans, Estimate, Evidence
from offcorr.diagnose.record import Floats


@dataclasses.dataclass(frozen=True)
class Kept:
    """The features that tell truncated distributions apart.  d is the logarithm of the kept mass."""

    lost: Estimate  # 1 - mean ratio
    alone: int  # truncated tokens whose probability is 1 to the sampler
    certain: float  # among tokens likelier to the trainer than any kept mass, the share of which that holds
    crowded: float  # share of the tokens without which the others kept would still hold the smallest kept mass
    balance: Estimate | None
    left: Evidence
    least: float  # the smallest kept mass
    tail: float  # the 2 % quantile of the truncated d over their mean
    share: Share | None = None  # of the mass, under which the tokens can be alone as they are; None: not found
    among_others: bool = False  # d has both signs
    coarse: bool = False  # a share of the mass fits if what lies within BLURRED of it is left out
    noisy: bool = False  # d is above 0 at some tokens, which no truncation makes
    rounded: bool = False  # something else moves the border of the kept tokens
    narrow: bool = False  # the mass is much the same in every context, as rounding leaves that of a top-p

    @property
    def nucleus(self) -> bool:
        """Whether the kept tokens can be those of a top-p, to the last token or with a border that rounding blurs."""
        return self.exact_nucleus or self.narrow

    @property
    def exact_nucleus(self) -> bool:
        """Whether the kept tokens can be the fewest likeliest ones that hold a share of the mass, one everywhere.

        The kept mass is then at least that share in every context, and less than it without any one of the kept
        tokens, such as the sampled one; where one token has more than the share, it is alone.
        """
        if self.share is not None:
            return self.share.fits or (self.noisy and self.coarse)
        return not self.certain <= 0.98 and self.crowded < CROWDED


ALONE = 8
"""Tokens that are alone, from which on the share of the mass is found that decides it."""


ROUNDED_UP = 1e-5
"""A log-prob above 0 that rounding leaves, at most."""

SHARP, BLURRED = 0.01, 0.03
"""Distance of a probability from top-p within which rounding, and coarse rounding, decides whether a token is alone."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of the mass above which a token is alone and below which it is not, as a top-p has it.

    Rounding blurs the kept mass, of which the smallest is then below top-p, more than the probabilities near top-p.
    """

    value: float
    exceptions: float  # that the best share leaves, over the tokens that are alone, or are not, if these are fewer
    below: float  # among truncated tokens, the share of which is kept with less than this mass
    superfluous: float  # that would not be needed for it

    @classmethod
    def of(cls, evidence: Evidence, truncated: Booleans, width: float) -> Share | None:
        """The share with the fewest exceptions; None: fewer than ``ALONE`` tokens are alone, or unlikely ones are.

        Args:
            width: distance from the share, in probability, within which nothing counts; in mass twice as much.
        """
        certain = evidence.sampler > -1e-6
        likely = evidence.trainer > np.log(0.5)
        if (certain & ~likely).sum() > 0.005 * certain.sum():  # zeros that are no probabilities stand among them
            return None
        able = likely & (evidence.trainer < -1e-3)
        p, alone = np.exp(evidence.trainer[able]), certain[able]
        fewer = min(int(alone.sum()), int((~alone).sum()))
        if fewer < ALONE:
            return None
        (low, high), exceptions = _parted(p[alone], p[~alone], width)
        mass = np.exp(np.minimum(evidence.d, 0))[truncated]
        without = mass - np.exp(evidence.trainer[truncated])
        below, superfluous, value = min(
            (
                (float((mass < value - 2 * width).mean()), float((without > value + 2 * width).mean()), float(value))
                for value in np.linspace(low, high, 9)
            ),
            key=lambda one: one[0] + one[1],
        )
        return cls(value, exceptions / fewer, below, superfluous)

    @property
    def fits(self) -> bool:
        """Whether it is a top-p."""
        return self.exceptions <= 0.01 and self.below < 0.05 and self.superfluous < 0.01


def _parted(alone: Floats, others: Floats, width: float) -> tuple[tuple[float, float], int]:
    """The borders, from and to, that leave the fewest numbers on the wrong side, farther off than a width; exceptions.

    Those are twice the fewer of the numbers on either wrong side: placeholders of 0 stand on one alone.
    """
    alone, others = np.sort(alone), np.sort(others)
    borders = np.unique(np.concatenate([alone, others]))
    below = np.searchsorted(alone, borders - width)
    above = len(others) - np.searchsorted(others, borders + width, "right")
    best = below + above == (below + above).min()
    return (float(borders[best][0]), float(borders[best][-1])), int(2 * np.minimum(below, above)[best].max())


FEW_EXCEPTIONS = 4
"""Tokens that speak against a top-p, below which something else may have moved them over its border."""

TOLD = 32
"""Tokens that tell what else differs, at least."""


NARROW = 0.05
"""Distance of the smallest kept mass (its 1 % quantile) from the median one, below which the mass is one in every
context but for rounding: a top-p beside int8 weights has left .02 to .03, top-k and min-p .06 and more.  It has to be
less than half of what is missing, too."""


def kept(evidence: Evidence) -> Kept | None:
    """The features; None: the sampler's probabilities do not exceed the trainer's."""
    lost = Estimate(1 - evidence.ratio_identity.value, evidence.ratio_identity.error)
    d = evidence.d
    above, below = float(np.clip(d, 0, 1).sum()), float(np.clip(-d, 0, 1).sum())
    if lost.value < max(0.0005, SIGNIFICANT * lost.error) or evidence.selected:
        return None
    if (evidence.sampler > ROUNDED_UP).sum() >= ALONE:  # probabilities above 1, which no truncation leaves
        return None
    if above > 0.03 * below:
        return _kept_among_others(evidence, lost)
    noise = max(1e-4, 3 * float(np.maximum(d, 0).mean()))
    truncated = d < -noise
    if truncated.sum() < 8:
        return None
    alone = (evidence.sampler > -1e-6) & truncated
    least = float(np.quantile(d[truncated], 0.01))
    raised = d[d > 1e-4]  # by what else differs, which moves the border of the kept tokens by as much
    border = 2 * float(np.quantile(raised, 0.9)) if len(raised) >= 8 else 0.0
    above_all = (evidence.trainer > least + 0.002 + border) & (evidence.trainer < -noise - border / 2)
    certain = float((evidence.sampler > -1e-6)[above_all].mean()) if above_all.sum() >= 4 else np.nan
    others = np.exp(np.minimum(d, 0)) - np.exp(evidence.trainer)
    crowded = float((others > np.exp(least) + 0.01 + border)[truncated].mean())
    tail = float(np.quantile(d[truncated], 0.02) / d[truncated].mean())
    # Where d is above 0, no kept mass hides what else differs; a few such tokens tell nothing.
    left = evidence.unbalanced().explained(np.minimum(d, 0))
    left = left.selection(d > 1e-4) if len(raised) >= TOLD else left.with_floor(np.inf)
    common = (lost, int(alone.sum()), certain, crowded, evidence.balance, left, float(np.exp(least)), tail)
    above_least = float(np.exp(np.median(d[truncated])) - np.exp(least))
    narrow = above_least < min(NARROW, 0.5 * (1 - float(np.exp(least))))
    share, coarse = (Share.of(evidence, truncated, width) for width in (SHARP, BLURRED))
    if share is not None and coarse is not None:
        noisy = len(raised) > 0
        blurred = (coarse.fits or noisy) and not share.fits
        return Kept(*common, share=share, coarse=coarse.fits, noisy=noisy, rounded=blurred, narrow=narrow)
    few = above_all.sum() * (1 - certain) < FEW_EXCEPTIONS and crowded < CROWDED
    far = (evidence.trainer > np.log(np.exp(least) + BLURRED)) & (evidence.trainer < -noise)
    blurred = crowded < 4 * CROWDED and not (far.sum() >= 4 and (evidence.sampler > -1e-6)[far].mean() < 0.5)
    rounded = len(raised) > 0 or bool(few and certain <= 0.98) or bool(blurred and crowded > 0)
    return Kept(*common, rounded=rounded, narrow=narrow)


def _kept_among_others(evidence: Evidence, lost: Estimate) -> Kept | None:
    """The features where d has both signs: two policies differ, too, but the mean ratio of two policies is 1.

    It is asked that unlikely tokens are missing, because a few tokens that are far off can lower the sample's mean.
    """
    balance = evidence.balance
    if balance is None or balance.z > -4 or lost.value < 0.005:
        return None
    alone = (evidence.sampler > -1e-6) & (evidence.trainer < -1e-3)
    left = evidence.unbalanced().explained(np.full(len(evidence), np.log1p(-lost.value))).with_floor(0.6 * lost.value)
    certain = 1.0 if alone.any() else 0.0
    return Kept(lost, int(alone.sum()), certain, 0.0, balance, left, 1 - lost.value, 2.0, among_others=True)


ADVICE = (
    "sample without truncation (top_p=1.0, top_k=0, min_p=0.0, typical_p=1.0), or, only in a loop of your own, "
    "renormalise the trainer's log-probs over the tokens that the engine kept, with "
    "offcorr.linear_logprob(..., support=)"
)


TRUNCATIONS = {"top_p", "top_k", "min_p", "logit_mask"}
"""The causes of this file."""

UNSURE = math.log(0.95)
"""Log-prob below which a token tells one change of its distribution from another."""

TELLING = 32
"""Tokens below it that a truncation is told from a temperature by."""


def _truncated(evidence: Evidence, found: Kept, sentence: str, margin: float) -> Found:
    if multiplies(logged(evidence)):
        sentence += "; a temperature beside it, which different tokens after one prefix show, changes this share, too"
    return Found(
        found.lost.value,
        found.lost.error,
        SIGNIFICANT * found.lost.error,
        margin,
        f"the sampler's probabilities are as those of a part of the vocabulary, scaled to sum to 1; this part has "
        f"{1 - found.lost.value:.3f} of the trainer's probability on average; {sentence}",
        found.left,
        surest=LOOK_ALIKE,
        rough=True,
    )


def _surely_top_p(evidence: Evidence, found: Kept) -> bool:
    """Whether the kept mass is one in every context, to the last token, and nothing else may stand beside it."""
    told = int((evidence.trainer < UNSURE).sum()) >= TELLING and not flat(evidence) and not unresolved(found)
    alone = _no_temperature(evidence) and not multiplies(logged(evidence))
    one = found.exact_nucleus and found.narrow and not (found.rounded or found.among_others or _high(found))
    one = one and found.share is not None  # tokens that are alone, or not, by their probability
    return told and alone and one and _everywhere(evidence, found)


def _everywhere(evidence: Evidence, found: Kept) -> bool:
    """Whether d is below 0 at the tokens that are less likely than what the least kept mass leaves out: a context of
    which top_p keeps every token has none.
    """
    unlikely = evidence.trainer < math.log(max(1 - found.least, 1e-9))
    return not unlikely.any() or float((evidence.d < -1e-4)[unlikely].mean()) > 0.9


LIKELY = math.log(0.5)
"""Log-prob above which a truncation leaves a token alone, as long as few others are kept at all."""

NEARLY_WHOLE = 0.96
"""Share of the mass from which a top-p looks like a low min-p."""

LOOK_ALIKE = 0.5
"""Confidence at most in one truncation, as another one, alone or beside a temperature, leaves about the same."""


def flat(evidence: Evidence) -> bool:
    """Whether hardly any token is likely: then one rule or another keeps about as many tokens in every context."""
    return int((evidence.trainer > LIKELY).sum()) < ALONE


def _high(found: Kept) -> bool:
    return found.share is not None and found.share.fits and found.share.value > NEARLY_WHOLE


def unresolved(found: Kept) -> bool:
    """Whether so little is missing that the balance cannot say whether the unlikely tokens are."""
    if found.balance is None or (found.share is not None and found.share.fits):
        return False
    return found.lost.value < 2 * found.balance.error


LONG_TAIL, LONGEST_TAIL = 3.0, 6.0
"""The 2 % quantile of the truncated d over their mean that a top-k or min-p of our simulations stays below, and the
one from which on a ban is assumed where nothing else tells the two apart."""


def _by_tail(found: Kept) -> bool:
    """Whether a ban is told from a truncation by a few largest d alone, as without the entropy."""
    return found.balance is None and found.tail > LONG_TAIL and not found.exact_nucleus


def _told_by_tail(evidence: Evidence) -> bool:
    found = kept(evidence)
    return found is not None and _by_tail(found)


def _alike(evidence: Evidence) -> bool:
    found = kept(evidence)
    return flat(evidence) or (found is not None and unresolved(found))


OTHER_TRUNCATION = Alternative(
    "another truncation or ban (top_p, top_k, min_p, logit_bias): the policy is so flat, or they leave out so little, "
    "that they look alike",
    "compare the sampler's options, or give --model",
    settled=lambda evidence: not _alike(evidence),
)


BESIDE = Alternative(
    "another of top_p, top_k and min_p, beside a temperature of the sampler, which changes the share that is kept",
    "compare the sampler's options, or give --model",
    settled=lambda evidence: _no_temperature(evidence),
)


def _no_temperature(evidence: Evidence) -> bool:
    """Whether different tokens after one prefix show that no temperature stands beside it; they may be too few."""
    among = factor(logged(evidence))
    return among is not None and not among.alone


COLDER = Alternative(
    "a temperature of the sampler below the trainer's, alone: nearly every sampled token is the likeliest one, whose "
    "probability rises either way",
    "compare the temperatures of both sides, or give --model",
    settled=lambda evidence: int((evidence.d < -1e-4)[evidence.trainer < LIKELY].sum()) >= ALONE,
)


BAN = Alternative(
    "a ban of some tokens (logit_bias, bad_words, structured decoding)",
    "compare the sampler's options, or give --model",
    ("entropy",),
    settled=lambda evidence: evidence.with_entropy is not None and not _told_by_tail(evidence),
)
LIKELIEST = Alternative(
    "a truncation to the likeliest tokens (top_p, top_k, min_p), which in contexts with many tokens alike cuts likely "
    "ones, too",
    "compare the sampler's options, or give --model",
)


DIVIDED = Alternative(
    "log-probs of one side that were divided by the temperature after the softmax, or of other tokens than the sampled "
    "ones, such as the likeliest",
    "compare how each side computes its log-probs, or give --model",
)
DIVIDED_UNLESS_DRAWN_SO = DIVIDED._replace(
    settled=lambda evidence: evidence.balance is not None and evidence.balance.z < -4
)

CROWDED = 0.012
"""Share of the tokens that rounding can make superfluous under top_p: it moves probabilities across the border."""


UNSURE_OF_TOP_P = 0.8
"""The most that a top_p is sure where it keeps the same mass in every context.  In a peaked policy it does not, and
a low min_p leaves about the same."""


class TopP(Cause):
    """One-sided d; no kept token is superfluous for one share of the mass, the same in every context."""

    id = "top_p"
    stage = "sampling"
    title = "the sampler draws from the likeliest tokens that hold top_p of the mass"
    advice = ADVICE
    not_told_from = (
        Alternative(
            "a top_k or min_p that keeps about as much in every context, as a low min_p does in a peaked policy, or a "
            "typical_p",
            "compare the sampler's options, or give --model",
        ),
        OTHER_TRUNCATION,
        BESIDE,
        COLDER,
        DIVIDED_UNLESS_DRAWN_SO,
        PADDED,
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        found = kept(evidence)
        if found is None or _banned(found) or not found.nucleus:
            return None
        least = found.least if found.share is None else found.share.value
        said = (
            f"it has at least {least:.3f} nearly everywhere, and hardly ever more tokens than this share needs, "
            "as under top_p"
        )
        if found.among_others:
            said = (
                "the tokens that it leaves alone are as under a top_p, whose value these numbers do not tell beside "
                "what else differs"
            )
        if not found.exact_nucleus:
            said = (
                f"it is much the same in every context, from {found.least:.3f} on, as under a top_p whose border is "
                "blurred by a difference as small as rounding makes, which these numbers then hold as well"
            )
        named = _truncated(evidence, found, said, 2.0)
        return named._replace(surest=UNSURE_OF_TOP_P) if _surely_top_p(evidence, found) else named


BLURRED_TOP_P = Alternative(
    "a top_p whose border is blurred by rounding, or by other weights besides",
    "compare the sampler's options, or give --model",
    settled=lambda evidence: (found := kept(evidence)) is None or not (found.rounded or found.among_others),
)


TOP_P_AND_K = Alternative(
    "top_p and top_k together, as a model's generation_config.json may set them (Qwen3: .95 and 20), or one of them "
    "beside a temperature",
    "compare the sampler's options, or give --model",
)


class MinP(Cause):
    """One-sided d that no share of the mass explains; a token can be alone."""

    id = "min_p"
    stage = "sampling"
    title = "the sampler draws from the tokens with at least min_p of the likeliest one's probability"
    advice = ADVICE
    not_told_from = (
        TOP_P_AND_K,
        BLURRED_TOP_P,
        OTHER_TRUNCATION,
        BESIDE,
        COLDER,
        BAN,
        DIVIDED_UNLESS_DRAWN_SO,
        PADDED,
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        found = kept(evidence)
        if found is None or found.alone == 0 or _banned(found) or found.nucleus:
            return None
        said = (
            f"it differs from context to context, from {found.least:.3f} on{_no_top_p(found)}, and "
            f"{found.alone} of the sampled tokens have probability 1 at the sampler, as under no top_k alone"
        )
        return _truncated(evidence, found, said, 2.0)


class TopK(Cause):
    """One-sided d that no share of the mass explains, and no token is alone."""

    id = "top_k"
    stage = "sampling"
    title = "the sampler draws from the top_k likeliest tokens"
    advice = ADVICE
    not_told_from = (
        BLURRED_TOP_P,
        OTHER_TRUNCATION,
        BESIDE,
        COLDER,
        BAN,
        Alternative(
            "a low min_p, which leaves no token alone where the policy is flat",
            "compare the sampler's options, or give --model",
        ),
        DIVIDED,
        PADDED,
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        found = kept(evidence)
        if found is None or found.alone or _banned(found) or found.nucleus:
            return None
        said = (
            f"it differs from context to context, from {found.least:.3f} on{_no_top_p(found)}, and no sampled "
            "token has probability 1 at the sampler, as some have under min_p"
        )
        # Other weights that were sampled at another temperature than is logged leave this, too.
        return _truncated(evidence, found, said, 0.1 if found.among_others else 2.0)


def _no_top_p(found: Kept) -> str:
    return "" if found.rounded or found.among_others else ", as under no single top_p"


class LogitMask(Cause):
    """One-sided d, although the sampled tokens are no likelier than the trainer's."""

    id = "logit_mask"
    stage = "sampling"
    title = "the sampler forbids some tokens that the trainer does not"
    advice = (
        "sample without structured decoding, logit_bias, bad_words, min_tokens and ignore_eos, or, only in a loop of "
        "your own, apply the same mask in the trainer (offcorr.linear_logprob(..., support=)); where the sampler "
        "truncates instead, sample with top_p=1.0, top_k=0, min_p=0.0"
    )
    not_told_from = (
        BLURRED_TOP_P,
        OTHER_TRUNCATION,
        LIKELIEST,
        COLDER,
        DIVIDED_UNLESS_DRAWN_SO,
        PADDED,
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        found = kept(evidence)
        if found is None or not _banned(found):
            return None
        said = "the rest is missing in a few contexts, where unlikely tokens would be missing in most"
        if flat(evidence):
            said = "no token is likely, so the sampled tokens do not say which ones are missing"
        elif found.balance is not None:
            said = (
                "the sampled tokens are hardly likelier than draws from the trainer's distributions (surprisal balance "
                f"{found.balance.value:+.3f} nats), as where likely tokens are missing, or many are alike"
            )
        # Of many tokens alike a truncation cuts likely ones, too, a policy that is mostly certain leaves it few tokens
        # to cut, and other weights besides move the surprisal balance.
        return _truncated(evidence, found, said, 2.0)


def _banned(found: Kept) -> bool:
    """Whether likely tokens are missing rather than unlikely ones."""
    long = found.tail > LONGEST_TAIL
    if found.balance is None:
        return long
    if found.exact_nucleus and found.balance.z < -4:
        return False
    if found.share is not None and found.share.fits and not long:
        return False
    return found.balance.value > (-2.0 if long else -1.2) * found.lost.value
