"""Causes in the distribution that was sampled or logged: temperatures and penalties."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from offcorr.diagnose.causes.base import NEARLY_GREEDY, Alternative, Cause, Found
from offcorr.diagnose.causes.over_steps import growth
from offcorr.diagnose.causes.prefixes import (
    CHOICES,
    Factor,
    between_bases,
    choices,
    factor,
    logged,
    multiplies,
    multiplies_new_tokens,
)
from offcorr.diagnose.causes.versions import before_any_update, same_version
from offcorr.diagnose.evidence import LARGEST, Estimate, Evidence, mean
from offcorr.diagnose.record import Floats

SIGNIFICANT = 5.0
"""Standard errors that an effect is away from 0 before it is named."""

PROCESSED = "let the engine report what it samples from (vLLM: logprobs_mode='processed_logprobs')"


PADDED = Alternative(
    "ids that one side's softmax has and the other's has not, such as those that pad the vocabulary",
    "compare the number of logits on both sides",
)

NOT_PROPORTIONAL = 0.5
"""Confidence at most that log-probs were divided, where d is not proportional to them."""

AT_RANDOM = 3.0
"""Mean surprisal of tokens beyond the entropy, in entropies, from which on they were drawn from another policy."""


class Unnormalised(Cause):
    """d has one sign: the sampler's probabilities sum to less than 1, or to more in contexts of every kind."""

    id = "unnormalised"
    stage = "sampling"
    title = "log-probs divided by the temperature after the softmax"
    advice = (
        "find the side that does so, by the probabilities of all tokens after one prefix, which have to sum to 1 (a "
        "scoring function of the trainer, or a client of the engine), and divide the logits by the temperature there, "
        f"before log_softmax; {PROCESSED}"
    )
    not_told_from = (
        Alternative(
            "another change of one side's log-probs after the softmax, such as another base than e, a number that is "
            "added to probabilities, or a division by the sequence's length",
            "compare how each side computes its log-probs",
        ),
        PADDED._replace(settled=lambda evidence: _proportional(evidence)),
        Alternative(
            "a truncation or ban that the trainer applies, and the sampler does not: the tokens of which the trainer's "
            "log-prob is -inf are left out here, and with them the mean ratio may be 1",
            "see what the trainer does with its logits",
            settled=lambda evidence: not any(np.isneginf(one.old_logp).any() for one in evidence.records),
        ),
        Alternative(
            "a truncation (top_k, top_p, min_p) where contexts have many tokens alike, or a ban of likely tokens "
            "(logit_bias, bad_words, structured decoding)",
            "compare the sampler's options, or give --model",
            settled=lambda evidence: _surely_divided(evidence) or float(evidence.d.mean()) > 0,
        ),
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        d = evidence.d
        identity = evidence.ratio_identity
        proportional = _proportional(evidence)
        off = np.inf if proportional else abs(identity.value - 1) / max(identity.error, 1e-12)
        above, below = float(np.clip(d, 0, 3).sum()), float(np.clip(-d, 0, 3).sum())
        if evidence.gap < max(0.003, evidence.floor) or len(evidence) < 32 or off < SIGNIFICANT or evidence.selected:
            return None
        if above < 20 * below and (below < 20 * above or not _of_context(evidence)):
            return None
        uncertain = evidence.trainer < -0.5
        if not uncertain.any() or (evidence.size[uncertain] > evidence.floor).mean() < 0.9:  # it changes all of them
            return None
        if (np.sign(d[uncertain]) == np.sign(above - below)).mean() < 0.9:  # and in one direction
            return None
        unless = "" if _surely_divided(evidence) or d.mean() > 0 else ", unless the sampler leaves out tokens"
        side, rest = _without_division(evidence) if proportional else ("", None)
        which = "of which side, d alone does not say"
        if side:
            which = f"the surprisal balance is 0 if that side is the {side}'s"
        return Found(
            identity.value,
            identity.error,
            1.0,
            8.0,  # it precedes a temperature, which fits the same log-probs
            f"d is {'above' if d.mean() > 0 else 'below'} 0 at {_share(evidence, bool(d.mean() > 0)):.0%} of the "
            f"tokens that differ, and the mean ratio e^d is {identity.value:.3f}, where it is 1 for any two policies: "
            f"the probabilities of one side, which are e to its log-probs, do not sum to 1{unless}; {which}",
            rest,
            surest=1.0 if _surely_divided(evidence) else NOT_PROPORTIONAL,
            rough=not proportional,
        )


BALANCED = 3.0
"""Standard errors by which the surprisal balance is off where the tokens were drawn as the trainer would, at most."""

OF_ITS_FIT = 0.05
"""Share of the mean |d| that the fit of a division leaves by itself, at most."""


def _without_division(evidence: Evidence) -> tuple[str, Evidence]:
    """The side that was divided, or "" where the surprisal balance does not say; and the rest of d.

    What is taken away is the multiple of the log-prob that d is at uncertain tokens, by their median.
    """
    d, t = evidence.d, evidence.trainer
    uncertain = (t < -0.5) & np.isfinite(d)
    part = float(np.median(d[uncertain] / t[uncertain])) * t
    sides = {"sampler": evidence.explained(part), "trainer": dataclasses.replace(evidence, trainer=t - part)}
    off = {side: np.nan if rest.balance is None else abs(rest.balance.z) for side, rest in sides.items()}
    side, other = sorted(sides, key=lambda side: off[side])
    side = side if off[side] < BALANCED and off[other] > SIGNIFICANT else ""
    rest = sides[side or "sampler"]
    if not side and off["trainer"] < BALANCED:  # which explains the balance, if it was the trainer's
        rest = rest.unbalanced()
    return side, rest.with_floor(max(rest.floor, OF_ITS_FIT * evidence.gap))


def _share(evidence: Evidence, above: bool) -> float:
    """Of the tokens that differ, those whose d is on this side of 0."""
    d = evidence.d[evidence.size > evidence.floor]
    return float(((d > 0) == above).mean())


def _proportional(evidence: Evidence) -> bool:
    """Whether d is proportional to the log-prob."""
    near, varies = _near_a_multiple(evidence)
    return near and varies


def _surely_divided(evidence: Evidence) -> bool:
    """Whether d is proportional to the log-prob, and nothing else leaves about that.

    A truncation of a flat policy makes the sampled tokens likelier to the sampler, and likelier than the trainer's own
    draws; of a sampler that draws nearly at random they are far less likely than these, whatever it divides.
    """
    balance, entropy, drawn = evidence.balance, evidence.entropy, False
    if balance is not None and entropy is not None:
        drawn = balance.z > -4 and balance.value < AT_RANDOM * float(np.nanmean(entropy))
    return _proportional(evidence) and _one_multiple(evidence) and (drawn or float(evidence.d.mean()) > 0)


FACTORS, LEAST_FACTOR = 0.05, 0.15
"""Standard deviation of the factors of the sequences up to which it is one, and the least that a temperature is."""


def _one_multiple(evidence: Evidence) -> bool:
    """Whether one factor, as of a temperature, lies between the log-probs of all sequences, whatever their lengths, and
    is none between logarithms to two bases."""
    several = len(evidence.records)
    finite = np.isfinite(evidence.d)
    rows, t, s = evidence.sequence[finite], evidence.trainer[finite], evidence.sampler[finite]
    squares = np.bincount(rows, t * t, several)
    factors = (np.bincount(rows, t * s, several) / np.maximum(squares, 1e-12))[squares > 0]
    middle = float(np.median(factors))
    if not LEAST_FACTOR < middle < 1 / LEAST_FACTOR or between_bases(middle):
        return False
    return float(factors.std()) < FACTORS * middle


def _near_a_multiple(evidence: Evidence) -> tuple[bool, bool]:
    """Whether d is near a multiple of the log-prob, and whether it varies, as in all flat contexts it does not."""
    evidence = evidence.keep(np.isfinite(evidence.d))
    d, t = evidence.d, evidence.trainer
    unlikely = t < -0.5
    off = (d - float((d * t).sum() / np.square(t).sum()) * t)[unlikely]
    near = unlikely.sum() >= 16 and np.abs(off).mean() < 0.1 * evidence.size[unlikely].mean()
    return bool(near), bool(near and off.var() < 0.15 * d[unlikely].var())


def _of_context(evidence: Evidence) -> bool:
    """Whether d is proportional to the log-prob, or a smooth function of the entropy among policies in balance."""
    near, varies = _near_a_multiple(evidence)
    if near:
        return varies
    if not np.isfinite(evidence.d).all():
        return False
    d = evidence.d
    balance = evidence.balance
    h = evidence.entropy
    if balance is None or h is None or evidence.with_entropy is not evidence or balance.z < -4:
        return False
    if balance.value < -1.2 * (1 - evidence.ratio_identity.value):  # unlikely tokens were not drawn: a truncation
        return False
    context = np.stack([np.ones_like(h), h, h * h, np.sqrt(np.maximum(h, 0))], 1)
    residual = d - context @ np.linalg.lstsq(context, d, rcond=None)[0]
    return float(residual.var() / d.var()) < 0.15


@dataclasses.dataclass(frozen=True)
class Power:
    """Fit of sampler = power * trainer - f, where f is a function of the context, by Huber's regression.

    What is known of a context is its entropy h and one token's log-prob t, so the fit has two steps: the power, beside
    an f of h alone; then what is left, as a smooth function of t and h, the mean of f over the contexts that have both.
    """

    power: Estimate
    explained: float
    fitted: Floats


def power(evidence: Evidence) -> Power:
    """The power, the share of the spread of d that it explains beside f, and the fitted d.

    Without entropy f is a constant: then the power is nearer to 1 than the truth.
    """
    if not (finite := np.isfinite(evidence.d)).all():  # placeholders, which no fit can use
        fit = power(evidence.keep(finite))
        fitted = np.zeros(len(evidence))
        fitted[finite] = fit.fitted
        return dataclasses.replace(fit, fitted=fitted)
    t, d, h = evidence.trainer, evidence.d, evidence.entropy
    h = h if evidence.with_entropy is evidence else None
    context = [np.ones_like(t), *([] if h is None else [h, h * h, np.sqrt(np.maximum(h, 0))])]
    within, without = (_robust(context, values)[1] for values in (t, d))
    slope, residual, weights = _robust([t, *context], d)
    error = np.sqrt(np.square(within * residual * weights).sum()) / max((np.square(within) * weights).sum(), 1e-12)
    estimate = Estimate(1 - float(slope[0]), float(error))
    if h is not None and away(estimate):
        p = np.exp(np.minimum(t, 0))
        _, residual, weights = _robust([a * b for a in context for b in (np.ones_like(t), t, p, p * p)], residual)
    left, spread = ((np.abs(values) * weights).mean() for values in (residual, without))
    return Power(estimate, 1 - float(left / max(spread, 1e-12)) ** 2, d - residual)


def away(power: Estimate) -> bool:
    """Whether a power is not 1."""
    return abs(power.value - 1) >= max(0.02, SIGNIFICANT * power.error)


FITTED = 200_000
"""Tokens that coefficients are fitted to, at most."""


def _robust(columns: Sequence[Floats], values: Floats) -> tuple[Floats, Floats, Floats]:
    """Coefficients, residuals and weights of Huber's regression: residuals above three times their mean count less."""
    some = slice(None, None, -(-len(values) // FITTED))
    thinned, target = np.stack([column[some] for column in columns], 1), values[some]
    weights = np.ones_like(target)
    for _ in range(8):
        root = np.sqrt(weights)
        fit = np.linalg.lstsq(thinned * root[:, None], target * root, rcond=None)[0]
        weights = _huber(target - thinned @ fit)
    residual = values - sum(column * coefficient for column, coefficient in zip(columns, fit, strict=True))
    return np.asarray(fit, dtype=np.float64), residual, _huber(residual)


def _huber(residual: Floats) -> Floats:
    return np.minimum(3 * np.abs(residual).mean() / np.maximum(np.abs(residual), 1e-12), 1)


LOST, OFF = 0.97, 10.0
"""Mean ratio below which a temperature alone is hardly an explanation, as under it both sides can draw every token, and
the standard errors by which it has to be below 1."""


def loses_mass(evidence: Evidence, off: float = OFF) -> bool:
    """Whether the mean ratio e^d is below 1, as where the sampler cannot draw some of the trainer's tokens.

    Args:
        off: standard errors, at least.
    """
    ratio = evidence.ratio_identity
    return bool(ratio.value < LOST and ratio.value - 1 < -off * ratio.error)


OTHER_TRANSFORM = Alternative(
    "another change of the logits that one side makes, such as a truncation (top_p, top_k), a softcap, a clamp, a "
    "scale, a logit_bias or a penalty on repeated tokens",
    "compare how each side computes its logits, or give --model",
    settled=multiplies_new_tokens,
)


SHARPER = Alternative(
    "updates that made the trainer's policy sharper, or flatter, than the sampler's older weights",
    "give --model and, as --checkpoint, the weights that sampled",
    fields=("rollout_version", "trainer_version"),
    settled=lambda evidence: multiplies(evidence) or same_version(evidence),
)


SCALE = Alternative(
    "another factor on the logits of one side, which is the same as a temperature",
    "compare how each side computes its logits",
    settled=lambda evidence: not multiplies(evidence),
)


RESCALED = Alternative(
    "log-probs that one side rescaled after the softmax, by a factor and a number, or by another function: one side's "
    "log-prob of a token determines the other's in every context, as a temperature's does where all contexts are alike",
    "compute the log-prob of one token by hand",
    settled=lambda evidence: not _of_one_curve(logged(evidence)),
)


BESIDES = Alternative(
    "older weights, a lower precision or another prompt besides, as a temperature that is fitted without entropy "
    "leaves what they leave",
    "give --model",
    fields=("entropy",),
    settled=lambda evidence: evidence.with_entropy is not None or multiplies(evidence, 0.02),
)


PART_OF_IT = Alternative(
    "another prompt, older weights or a lower precision, a part of which the fit of a temperature takes",
    "give --model, or compare the prompt ids that each side read",
    settled=lambda evidence: (
        evidence.with_entropy is None or power(evidence).explained > NEARLY_ALL or multiplies(evidence)
    ),
)


class Temperature(Cause):
    """The sampler's log-probs carry another temperature, and it sampled from them."""

    id = "temperature"
    stage = "sampling"
    title = "the trainer does not apply the sampler's temperature"
    advice = f"set the same temperature= for the sampler and the trainer, and {PROCESSED}"
    not_told_from = (
        SHARPER,
        BESIDES,
        PART_OF_IT,
        OTHER_TRANSFORM,
        RESCALED,
        SCALE,
        Alternative(
            "log-probs without the temperature that the engine samples at (raw_logprobs), where the completions are "
            "few, or were chosen by their rewards or their likelihood",
            "compare the temperatures of both sides, or dump every sequence that was sampled",
            settled=lambda evidence: _tells_whose(evidence),
        ),
        Alternative(
            "the same beside a truncation (top_p, top_k, min_p), a part of which the fit of a temperature takes: the "
            "mean ratio e^d is below 1, as a truncation makes it, and as it is without one where no unlikely token "
            "happened to be drawn",
            "read the engine's sampling options",
            settled=lambda evidence: not _below_one(evidence) or loses_more(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        return _tempered(evidence, sampled_by_trainer=False)


class RawLogprobs(Cause):
    """The sampler's log-probs carry another temperature, and it sampled at the trainer's."""

    id = "raw_logprobs"
    stage = "sampling"
    title = "the engine logs log-probs without the temperature that it samples at"
    advice = PROCESSED
    not_told_from = (
        SHARPER,
        BESIDES,
        PART_OF_IT,
        OTHER_TRANSFORM,
        RESCALED,
        SCALE,
        Alternative(
            "a temperature that the trainer does not apply, where the completions are few, or were chosen by their "
            "rewards or their likelihood",
            "compare the temperatures of both sides, or dump every sequence that was sampled",
            settled=lambda evidence: _tells_whose(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        return _tempered(evidence, sampled_by_trainer=True)


NEARLY_ALL = 0.985
"""Share of the spread of d from which a temperature is no look of something else: updates that sharpened a small
policy have left up to .98 of it to a temperature, and a temperature .988 or more."""

DRAWN, CHOSEN = 4.0, 1.3
"""Log-likelihood ratio (nats) from which the tokens say whose temperature they were drawn at, and its mean over the
sequences in standard deviations: the better half of a normal distribution is 1.3 of its own deviations from the mean of
all."""


def _tells_whose(evidence: Evidence) -> bool:
    """Whether the tokens say whose temperature they were drawn at, however sequences were chosen."""
    inside = (evidence.trainer != 0) & (evidence.sampler != 0)  # a 0 may stand for no log-prob
    d, sequence = evidence.d[inside], evidence.sequence[inside]
    ratios = np.bincount(sequence, d)[np.unique(sequence)] if len(d) else np.zeros(1)
    whose = float(np.sign(ratios.sum()))
    decided = abs(float(ratios.sum())) > DRAWN and abs(float(ratios.mean())) > CHOSEN * float(ratios.std())
    # On the draws of one side the other's probability divided by its own is 1 on average, if both sum to 1; on those
    # of a sampler that leaves tokens out, less.
    other = mean(np.exp(np.clip(-whose * d, -LARGEST, LARGEST)))
    off = (other.value - 1) / max(other.error, 1e-12)
    return decided and off < SIGNIFICANT and (off > -SIGNIFICANT or whose < 0)


def _of_one_curve(evidence: Evidence) -> bool:
    """Whether one side's log-prob of a token determines the other's, whatever its context.

    The normaliser of a temperature has another value in each context, unless all are alike.
    """
    inside = (evidence.trainer != 0) & (evidence.sampler != 0)  # a 0 may stand for no log-prob
    from_here, at = np.unique(evidence.trainer[inside], return_index=True)
    to = evidence.sampler[inside][at]
    if len(at) < ENOUGH_FOR_A_FIT or not np.isfinite(to).all() or not np.isfinite(from_here).all():
        return False
    line = to[:-2] + (to[2:] - to[:-2]) * (from_here[1:-1] - from_here[:-2]) / (from_here[2:] - from_here[:-2])
    return float(np.abs(to[1:-1] - line).mean()) < OF_ONE_CURVE * evidence.gap


OF_ONE_CURVE = 0.15
"""Share of mean |d| by which a token's log-prob differs on average from a line between those of its neighbours in size,
below which all are of one curve: under temperatures it has been .25 to 1.2."""

UNKNOWN_DRAWS = 0.5
"""Confidence at most in one of the two causes, where the tokens do not say it."""

NEAR, EXPLAINED = 0.05, 0.8
"""Distance of the power from 1 within which weights that are rounded coarsely look like a temperature, and the share of
the spread of d that a temperature explains there at least: int4 has left .54 of it to a power of .98."""

ALSO_UPDATES = 0.65
"""Confidence at most in what updates of the weights can leave, too, and in updates where dropout can."""

BY_ITS_FIT = 0.5
"""Confidence in a temperature at most where no different tokens after one prefix show it: a softcap has left .992 of
the spread of d to one, and updates of a policy that has few likely tokens all of it."""


LEAST_GAP = 0.3
"""Difference between different tokens after one prefix, as a share of what the fitted power makes of them, below which
there is no temperature: the fit comes nearer to 1 than the truth."""

MULTIPLIED, BESIDE_TRUNCATION, ONE_FACTOR_SURE = 3.0, 0.01, 0.95
"""Margin where they say that it leaves next to nothing; beside a truncation, so that this is taken away first; and the
confidence at most in both cases."""

ENOUGH_FOR_A_FIT = 64
"""Tokens that a temperature is fitted to, at least."""

TEMPERED = 256
"""Tokens with entropy from which on a temperature is read of these alone."""


def _tempered(evidence: Evidence, sampled_by_trainer: bool) -> Found | None:
    """A power between the two log-probs that is not 1.

    The sum of d is the log-likelihood ratio of the sampled tokens under both log-probs, the trainer's first.
    """
    known = evidence.with_entropy
    if known is not None and known is not evidence and len(known) >= TEMPERED:
        return _tempered(known, sampled_by_trainer)  # those without entropy tell less, and look like something else
    if not sampled_by_trainer and (evidence.selected or (np.isinf(evidence.floor) and not evidence.balanced)):
        return _beside_truncation(evidence)
    if evidence.gap < max(0.002, evidence.floor) or len(evidence) < ENOUGH_FOR_A_FIT or evidence.selected:
        return None
    below = float(np.maximum(-evidence.d, 0).mean())
    above = float(np.maximum(evidence.d, 0).mean())
    if (evidence.d.sum() > 0) != sampled_by_trainer:
        return None
    fit, among = power(evidence), factor(evidence)
    if among is not None and among.alone and (evidence.with_entropy is None or _same_way(fit.power, among)):
        return _multiplied(evidence, among, fit, sampled_by_trainer, one_sign=below > 20 * above)
    if below > 20 * above:  # one sign: a truncated distribution
        return None
    if fit.explained <= NEARLY_ALL and growth(evidence) is not None:
        return None  # updates that a sampler does not get make the trainer's policy sharper, too
    # Without entropy, noise in the trainer's log-probs looks like a temperature of the sampler above the trainer's.
    likely = sampled_by_trainer or fit.power.value > 1
    usual = needed = 0.5 if evidence.with_entropy is evidence or not likely else 0.25
    if fit.power.value > 1 and not sampled_by_trainer and evidence.balance is not None and evidence.balance.z < -6:
        needed = 0.15  # how the tokens were drawn says the same as how their log-probs differ
    if abs(fit.power.value - 1) < NEAR:
        needed = usual = EXPLAINED
    if fit.explained < needed or not away(fit.power) or not 0.35 < fit.power.value < 5:
        return None
    if among is not None and among.gap < LEAST_GAP * abs(fit.power.value - 1) * among.spread:
        return None  # after one prefix both sides tell tokens apart alike
    more = ""
    if among is not None and among.far:
        more = (
            f"; it is not all, as {min(among.left, among.gap):.2g} of {among.gap:.2g} nats between the log-probs of "
            "different tokens after one prefix are left by any temperature"
        )
    carried = 1 / fit.power.value
    return Found(
        fit.power.value,
        fit.power.error,
        1.0,
        max((fit.explained - usual) * 8, (fit.explained - needed) * 2),
        f"the sampler's log-probs are the trainer's at about {carried:.2f} times its temperature, which explains "
        f"{fit.explained:.0%} of the spread of d{more}; {_whose(sampled_by_trainer)}",
        _rest(evidence if sampled_by_trainer else evidence.unbalanced(), fit),
        surest=BY_ITS_FIT,
        rough=True,
    )


def _multiplied(evidence: Evidence, among: Factor, fit: Power, sampled_by_trainer: bool, one_sign: bool) -> Found:
    """The same where one factor multiplies the differences between the log-probs of tokens after one prefix."""
    truncated = one_sign or loses_mass(evidence)
    margin = max(8 * (fit.explained - 0.5), BESIDE_TRUNCATION if truncated else MULTIPLIED)
    rest = _rest(evidence if sampled_by_trainer else evidence.unbalanced(), fit)
    if evidence.with_entropy is None:  # what the normalisers are, of a temperature or of a truncation too, is not known
        rest = rest.explained(rest.d - evidence.d * among.left / among.gap)
        rest = rest.with_floor(1.01 * rest.gap)
    sure = _tells_whose(evidence) and _changes_all(evidence) and not _of_one_curve(evidence)
    return Found(
        among.value,
        among.left,
        1.0,
        BESIDE_TRUNCATION if one_sign else margin,
        f"{_said(among)}; {_whose(sampled_by_trainer)}",
        rest,
        share=_share_beside_truncation(evidence, rest.gap) if _kept(evidence) < 1 else None,
        surest=ONE_FACTOR_SURE if sure else UNKNOWN_DRAWS,
        rough=True,
    )


def loses_more(evidence: Evidence) -> bool:
    """Whether the mean ratio e^d is further below 1 than a temperature makes it.

    A sampler that is sharper than the trainer hardly draws unlikely tokens, so that few carry the mean, and it has to
    be further off.
    """
    return loses_mass(evidence, SIGNIFICANT if _flatter(evidence) else OFF)


def _flatter(evidence: Evidence) -> bool:
    """Whether different tokens after one prefix say that the sampler's temperature is above the trainer's."""
    among = factor(evidence)
    return among is not None and among.alone and among.value < 1


BELOW = 2.0
"""Standard errors by which the mean ratio is below 1 where a truncation beside a temperature is asked about."""


def _below_one(evidence: Evidence) -> bool:
    """Whether the mean ratio e^d is below 1 by more than chance."""
    return evidence.ratio_identity.value + BELOW * evidence.ratio_identity.error < 1


def _kept(evidence: Evidence) -> float:
    """The most of the trainer's probability that the sampler keeps on average, by the mean ratio; 1: all, as it is by
    chance, or by a sharper sampler, whose mean few tokens carry.
    """
    ratio = evidence.ratio_identity
    return min(ratio.value + BELOW * ratio.error, 1.0) if _flatter(evidence) else 1.0


def _share_beside_truncation(evidence: Evidence, left: float) -> float:
    """The most that a temperature makes of the mean |d|, where a truncation makes a part that the fit takes, too.

    A truncation that keeps a share m of the trainer's probability keeps less of a flatter sampler's, so that it moves d
    by more than log m on average.
    """
    return float(max(0.0, 1 - max(left, -np.log(_kept(evidence))) / evidence.gap))


def _same_way(fitted: Estimate, among: Factor) -> bool:
    """Whether the fit finds the factor, too, as in the rest of a temperature that was taken away it does not."""
    return away(fitted) and (fitted.value > 1) == (among.value > 1)


def _beside_truncation(evidence: Evidence) -> Found | None:
    """A temperature besides, as all tokens after one prefix have the truncation in common."""
    was = logged(evidence)
    among = factor(was)
    if among is None or not among.alone:
        return None
    return Found(
        among.value,
        among.left,
        1.0,
        MULTIPLIED,
        f"{_said(among)}; a truncation makes no such difference, but hides how much of d the temperature makes",
        evidence.explained(evidence.d),
        surest=ONE_FACTOR_SURE if _changes_all(was) and not _of_one_curve(was) else UNKNOWN_DRAWS,
    )


DIFFERS, OF_THE_MEAN = 1e-4, 0.02
"""|d| (nats), and as a share of its mean, that a temperature leaves where the trainer is not certain, nearly always."""


def _changes_all(evidence: Evidence) -> bool:
    """Whether one factor multiplies the differences of tokens that are new to their contexts, and uncertain tokens
    differ wherever they stand, as under a temperature."""
    uncertain = evidence.size[evidence.trainer < -0.5]
    if not len(uncertain) or not multiplies_new_tokens(evidence):
        return False
    return float((uncertain > max(DIFFERS, OF_THE_MEAN * float(uncertain.mean()))).mean()) > 0.9


def _said(among: Factor) -> str:
    return (
        f"between {among.tokens} different tokens after prefixes that samples share, the sampler's log-probs differ "
        f"{among.value:.2f} times as much as the trainer's, as at {1 / among.value:.2f} times its temperature, which "
        f"leaves {among.left:.2g} of {among.gap:.2g} nats"
    )


def _whose(sampled_by_trainer: bool) -> str:
    return f"the sampled tokens are likelier by the {'trainer' if sampled_by_trainer else 'sampler'}'s log-probs"


def _rest(evidence: Evidence, fit: Power) -> Evidence:
    """Without the fitted d.  What contexts of one entropy and log-prob do not share is of second order in power - 1."""
    share = 0.25 if evidence.with_entropy is not evidence else 0.4 * abs(fit.power.value - 1)
    return evidence.explained(fit.fitted).with_floor(share * float(np.abs(fit.fitted).mean()))


PENALISED = 5.0
"""Standard errors between tokens that were seen before and new ones."""


UNPENALISED, AS_LIKELY = 0.05, 0.5
"""Share of the new tokens that are less likely to the sampler, as a penalty makes none, from which on updates, or
another change of the logits, may have left the same; the most that a penalty is sure then."""


def _unpenalised(evidence: Evidence) -> float:
    """Share of the new tokens of which the trainer is not certain that are less likely to the sampler."""
    new = evidence.d[~evidence.seen & (evidence.trainer < -0.02)]
    return float((new > 1e-4).mean()) if len(new) else 0.0


ENOUGH_IDS = 5
"""Ids, three tokens of each at least, that tell a penalty on all that were seen from an update that rewarded a few."""


FEW_REWARDED, MOST_PENALISED = 0.3, 0.5
"""The effect on the typical id, as a share of that on all tokens that were seen: below the first an update rewarded a
few ids, from the second on most are penalised, and between the two it may be either."""


ALIKE_AMONG_NEW, OF_THEMSELVES = 0.02, 0.1
"""Mean difference of d among new tokens after one prefix, as a share of mean |d| and of theirs, up to which only what
moves them all by one amount makes it: a penalty leaves 5e-5, and updates that rewarded repetitions .03 and .12."""


def surely_penalised(evidence: Evidence) -> bool:
    """Whether new tokens after one prefix have one d, as under a penalty, which moves their normaliser alone."""
    rows, prefix = choices(evidence, ~evidence.seen)
    if len(rows) < CHOICES:
        return False
    d = evidence.d[rows]
    mean = (np.bincount(prefix, d) / np.maximum(np.bincount(prefix), 1))[prefix]
    most = min(ALIKE_AMONG_NEW * evidence.gap, max(OF_THEMSELVES * float(np.abs(d).mean()), evidence.floor))
    return float(np.abs(d - mean).mean()) < most


ABLE = -0.02
"""Log-prob up to which a token moves at all, whatever its past: one that is certain hardly does."""


def at_seen_tokens(evidence: Evidence) -> Estimate | None:
    """The mean d at tokens that stand earlier in the prompt or completion less that at new ones; None: few tokens."""
    able = evidence.trainer < ABLE
    seen, new = evidence.d[evidence.seen & able], evidence.d[~evidence.seen & able]
    if min(len(seen), len(new)) < 16:
        return None
    error = float(np.sqrt(seen.var() / len(seen) + new.var() / len(new)))
    return Estimate(float(seen.mean() - new.mean()), max(error, 1e-12))


def _by_id(evidence: Evidence) -> Floats:
    """The mean d of each id that stands three times or more among the tokens that were seen before."""
    which = evidence.seen & (evidence.trainer < ABLE)
    _, ids, count = np.unique(evidence.ids[which], return_inverse=True, return_counts=True)
    return np.asarray((np.bincount(ids, evidence.d[which]) / np.maximum(count, 1))[count >= 3])


class RepetitionPenalty(Cause):
    """Tokens that stood in the context before are less likely to the sampler; all others are more likely."""

    id = "repetition_penalty"
    stage = "sampling"
    title = "the sampler penalises tokens that were seen before"
    advice = "sample with repetition_penalty=1.0, presence_penalty=0 and frequency_penalty=0"
    not_told_from = (
        Alternative(
            "another change of the logits that one side makes, such as a temperature, a softcap, a clamp, a scale or a "
            "logit_bias, or updates since",
            "read the engine's sampling options, or give --model",
            settled=lambda evidence: _unpenalised(evidence) < UNPENALISED,
        ),
        Alternative(
            "older weights of the sampler, whatever the versions say, where the updates since rewarded tokens of the "
            "prompt, or repetitions",
            "read the engine's sampling options, or give --model and, as --checkpoint, the weights that sampled",
            settled=lambda evidence: surely_penalised(evidence) and before_any_update(evidence),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        apart = at_seen_tokens(evidence)
        if apart is None or apart.z < PENALISED or evidence.gap < 0.003:
            return None
        able, difference = evidence.trainer < ABLE, apart.value
        seen, new = evidence.d[evidence.seen & able], evidence.d[~evidence.seen & able]
        above = float(np.maximum(new, 0).sum() / max(np.abs(new).sum(), 1e-12))
        if seen.mean() < 0 or above > 0.1:
            return None
        of_ids = _by_id(evidence)
        typical = (np.median(of_ids) - new.mean()) / difference if len(of_ids) >= ENOUGH_IDS else 1.0
        if typical < FEW_REWARDED:  # a few tokens that updates rewarded
            return None
        surest = AS_LIKELY if not surely_penalised(evidence) else 1.0 if before_any_update(evidence) else ALSO_UPDATES
        most = _unpenalised(evidence) < UNPENALISED and typical >= MOST_PENALISED
        after = np.where(evidence.seen, seen.mean(), new.mean()) * able
        left = evidence.unbalanced().explained(after)
        return Found(
            difference,
            apart.error,
            PENALISED * apart.error,
            apart.z / 8,
            f"d is {seen.mean():+.3f} nats on average at tokens that stand earlier in the prompt or completion, and "
            f"{new.mean():+.3f} at new ones, where it is at most 0 for {1 - float((new > 1e-4).mean()):.0%} of them; "
            "the share that is explained is what these two means remove, and a penalty, which moves each context by "
            "another amount, makes more of d than that",
            left.with_floor(1.1 * left.gap),
            surest=surest if most else AS_LIKELY,
            rough=True,
        )
