"""Whether the engine's log-probs are those of the distribution that it sampled from, found out from logged data.

d = logp - rollout_logp (nats) of the sampled tokens.  The formulas are explained in docs/metrics.md, "Are these the
sampler's probabilities?".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offcorr.batch import above_zero
from offcorr.training.field_metrics import least_variance

Kind = Literal[
    "agrees",
    "probabilities",
    "temperature",
    "raw",
    "kept_mass",
    "unnormalised",
    "unlogged",
    "shifted",
    "placeholders",
    "per_sequence",
    "differs",
    "old_logp",
    "unknown",
]

UNCERTAIN, CERTAIN = 32, -0.05
"""Number of tokens with a log-prob below the second that are needed: the others look alike at every temperature."""

LARGE = 0.1
"""Mean |d| (nats) above which two log-probs of the same weights are not the same; an fp8 KV cache gives .03."""

HEALTHY = 0.05
"""Mean |d| (nats) up to which the engine's log-probs pass for the sampler's probabilities; its source is in
docs/metrics.md."""

NOTABLE = 0.01
"""Mean |d| (nats) up to which engine and trainer are said to agree; above it an engine weight may be worth it."""

WORTH_IT = f" (above {NOTABLE:g} an engine weight may be worth it: docs/which.md)"
"""Said of a gap above that; a loss that has an engine weight needs no such hint."""

SIGNIFICANT = 5.0
"""Standard errors that an effect is away from 0 before it is reported; a run makes one such test."""

FATAL_MASS, FATAL_SURPRISE, FATAL_RATIO = 0.02, 0.03, 0.2
"""Lost probability, mean of -logp - entropy (nats), and distance of the mean ratio from 1 where nothing explains it,
from which a training should not begin."""

UNLIKELY, IMPOSSIBLE = -1.5, -50.0
"""The trainer's log-prob below which an engine's exact 0 is a placeholder; an engine's log-prob that is one, where the
trainer's is not half as far."""

FILLED, FAR = 0.05, 0.3
"""Share of the tokens with one value from which it is a placeholder, if the trainer's are so far (nats) from it for
half of them."""

LIKELY = (-0.7, -0.02)
"""The trainer's log-probs, from and to, of tokens that a truncation may leave alone."""

SEVERAL, NEARLY_ALL = 4, 0.9
"""Number of uncertain tokens from which a sequence shows that its log-probs are not those of single tokens; the share
of such sequences that have to show it."""

BY_A_TEMPERATURE = 0.97
"""Share of the spread of d that a temperature explains at least, if it is one."""

COLDEST, HOTTEST = 0.2, 5.0
"""Temperatures beyond which no sampler is expected, so that a fit that gives one is no finding."""

TRUNCATED: tuple[Kind, ...] = ("kept_mass", "unnormalised", "unlogged", "differs")
"""The kinds that a truncated or penalised distribution can be called."""

PROCESSED = "let the engine report what it samples from (vLLM: logprobs_mode='processed_logprobs')"

OR_DROPOUT = ", and score with the trainer's dropout off, whose noise can look like this"

OR_LOGITS = (
    ". Where both have one, look for what else changes the logits of one side: coarse weights (int4, fp8), older "
    "weights, another prompt or position (rope_theta), a softcap, a scale, a logit_bias"
)

MENDS: dict[Kind, str] = {
    "agrees": "",
    "unknown": "",
    "probabilities": "pass log-probs, which are at most 0: the logarithms of the probabilities, not the negatives",
    "temperature": f"set the same temperature= for the sampler and the trainer, and {PROCESSED}{OR_LOGITS}",
    "raw": f"{PROCESSED}{OR_LOGITS}",
    "kept_mass": "sample without truncation (top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0); only in a loop of "
    "your own the trainer's log-probs can be renormalised instead, over the tokens that the engine kept, with "
    "offcorr.linear_logprob(..., support=)"
    f"{OR_DROPOUT}",
    "unnormalised": "divide the logits by the temperature before log_softmax, not the log-probs after it: "
    f"{PROCESSED}. Other changes look like this, too: another base than e (log-probs have to be in nats), a number "
    "that is added to the probabilities, a softmax over more or fewer ids than the trainer's",
    "unlogged": "set the sampler's temperature= for the trainer, too, sample with top_p=1.0, top_k=0, min_p=0.0, and, "
    f"where it does not yet, {PROCESSED}",
    "shifted": "the log-prob at index t must be that of the token at index t: move one of the two by one token",
    "placeholders": "leave tokens that the model did not sample, such as a tool's, out of the loss (mask; env_mask of "
    "TRL's rollout_func), and pass the engine's log-prob of every sampled token, NaN or None where it has none; greedy "
    "sampling (top_k=1), whose processed log-probs are all 0, is no distribution to correct for",
    "per_sequence": "pass the log-prob of each sampled token; where the engine gives only a sum or an average for a "
    "sequence, pass none (rollout_func: logprobs=None, and no key old_logp)",
    "old_logp": "return as old_logp the log-probs of the sampled tokens under the weights that sampled, scored as the "
    "trainer scores them, or leave the key out",
    "differs": "score the same tokens with the same weights on both sides: look for logits that are not shifted by "
    "one, a weight sync that missed parameters, another chat template, rows in another order, placeholders among the "
    "log-probs, and for sampling options that change the distribution (repetition_penalty=1.0, presence_penalty=0, "
    f"frequency_penalty=0, top_p=1.0, top_k=0, min_p=0.0 are off{OR_DROPOUT})",
}
"""For each kind what to change, with TRL's and vLLM's option names."""

OR_PRECISION = (
    ". Or the engine is quantised or computes in a lower precision: then this is its true mismatch, which an engine "
    "weight corrects (tis, icepop)"
)
"""The end of the mend of a difference whose mean ratio is near 1."""

OF_OTHER_TOKENS = (
    ". Or pass the log-prob of the token that was sampled, where these are of another, such as the likeliest; or, "
    "where the engine forbids some tokens, sample without that (logit_bias, bad_words, structured decoding); or give "
    "both sides the same prompt ids, where one reads another prompt"
)
"""The end of the mend of raised log-probs, whose tokens were not drawn as from the likeliest ones."""

NOT_SAMPLED = (
    "; or, where the model did not write some of these tokens, as a tool's text or a trace of another writer, leave "
    "them out of the loss (mask; env_mask of TRL's rollout_func), or say whose they are (origin)"
)
"""The change to make where surprising tokens may not have been sampled at all."""


class Estimate(NamedTuple):
    """An estimated number and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Semantics:
    """Result of ``logprob_semantics``.

    Args:
        kind: one of

            - "agrees": the two are the same log-probs, up to noise;
            - "probabilities": the log-probs of the engine, or of the trainer, are above 0, so they are none;
            - "temperature": the engine sampled at another temperature than the trainer scores at;
            - "raw": the engine sampled from the trainer's distribution, and reported log-probs at another temperature;
            - "kept_mass": the engine renormalised over the tokens that top-p, top-k or min-p kept, the trainer did not;
            - "unnormalised": the engine's probabilities do not sum to 1, as where a log-prob was divided by T;
            - "unlogged": the two agree, but the tokens were drawn from another distribution than the entropy's;
            - "shifted": the engine's log-probs belong to the next or the previous token, or the trainer's do;
            - "placeholders": some of the engine's log-probs are 0, or another constant, in place of numbers;
            - "per_sequence": the engine's log-probs are averages or sums over a sequence, in place of one number per
              token; or those of ``old_logp`` are;
            - "differs": they differ in none of these ways;
            - "old_logp": ``old_logp`` is wrong: ``logp`` of the same weights is another, and the engine's, where it
              reports some, agree with ``logp``;
            - "unknown": the data cannot tell.
        tokens: number of tokens that both sides scored.
        gap: mean |d|; for "old_logp" of the two.
        ratio: mean e^d; for "kept_mass" this is the mean kept mass.
        temperature: for "temperature" and "raw", the one that the engine's log-probs carry; None without entropy.  The
            error is that of sampling alone; that entropy stands for the whole context adds up to .02 at .7, .05 at .5.
        surprise: mean of -logp - entropy; None without entropy.
        sentence: the finding in words.
        same_weights: False: the trainer's log-probs are of later weights than those that sampled.
        unrelated: for "differs": the two hardly correlate.
        shifted: for "placeholders": the other log-probs belong to the next or the previous token, too.
        raised: for "unnormalised": the engine's are above the trainer's as under a truncation, which the tokens
            exclude.
        colder: for "differs", "kept_mass", "unnormalised" and "placeholders": the engine is so much more certain than
            the trainer as a far lower temperature makes it.
    """

    kind: Kind
    tokens: int
    gap: float
    ratio: Estimate
    temperature: Estimate | None
    surprise: Estimate | None
    sentence: str
    same_weights: bool = True
    shifted: bool = False
    unrelated: bool = False
    raised: bool = False
    colder: bool = False

    @property
    def mend(self) -> str:
        """The change to make; empty where nothing is wrong."""
        surprising = self.kind == "unlogged" and self.surprise is not None and self.surprise.value > 0
        also = f"; and {MENDS['shifted']}" if self.shifted else ""
        if self.colder and self.kind == "differs":
            return f"{MENDS['temperature']}. Where the temperatures are the same, {MENDS['differs']}"
        also += f"; or {MENDS['temperature']}" * self.colder
        true = self.kind == "differs" and not (self._no_policies or self.unrelated)
        end = NOT_SAMPLED * surprising + OR_PRECISION * true + OF_OTHER_TOKENS * self.raised
        return MENDS[self.kind] + also + end

    @property
    def _no_policies(self) -> bool:
        """Whether the mean ratio is far from 1, as it is for no two policies."""
        return abs(self.ratio.value - 1) > max(FATAL_RATIO, SIGNIFICANT * self.ratio.error)

    @property
    def wrong(self) -> bool:
        """Whether something is to be mended."""
        return bool(self.mend)

    @property
    def fatal(self) -> bool:
        """Whether no weight can correct this: the log-probs are not the sampler's probabilities, by enough to matter.

        Below .02 of lost probability or .03 nat of surprise nothing is fatal.  What "differs" may be a true mismatch,
        as long as the mean ratio is near 1, which it is for any two policies, and the engine not far more certain; a
        temperature beside later weights may be their training, and one that was found without entropy mere noise.
        """
        if self.kind == "kept_mass":
            return FATAL_MASS <= 1 - self.ratio.value
        if self.kind == "unlogged":
            return self.surprise is not None and FATAL_SURPRISE <= abs(self.surprise.value)
        if self.kind in ("temperature", "raw"):
            return self.same_weights and self.temperature is not None
        if self.kind == "old_logp":
            return self.gap > LARGE and self.ratio.value == self.ratio.value  # NaN: no engine bears logp out
        if self.kind == "differs":
            return self._no_policies or self.unrelated or self.colder
        return self.kind in ("probabilities", "shifted", "placeholders", "per_sequence", "unnormalised")


@torch.no_grad()
def logprob_semantics(
    logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    temperature: float = 1.0,
    same_weights: bool = True,
) -> Semantics:
    """Tells from logged data whether ``rollout_logp`` is of the distribution that the trainer scores with ``logp``.

    Args:
        logp: [B, T] the trainer's log-probs (nats) of the sampled tokens, under the weights that sampled (``old_logp``)
            and at the trainer's temperature.
        rollout_logp: [B, T] as the engine reported them; NaN: unscored.
        mask: [B, T] the valid tokens.
        entropy: [B, T] of the distributions of ``logp``, in nats.  Without it a temperature has a direction and no
            value, and "unlogged" is not found.
        temperature: the trainer's.
        same_weights: False: ``logp`` is of later weights than those that sampled.  Their distance is then no error,
            and a temperature may be their training.

    It copies the tensors to the host, so it is for a run's first batch rather than for every step.

    A sampler at temperature .7 beside a trainer at 1:

    >>> import torch
    >>> from offcorr.training import logprob_semantics
    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = 3 * torch.randn(16, 32, 50, generator=generator)
    >>> trainer, engine = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)
    >>> tokens = torch.multinomial(engine.exp().view(-1, 50), 1, generator=generator).view(16, 32, 1)
    >>> found = logprob_semantics(trainer.gather(-1, tokens)[..., 0], engine.gather(-1, tokens)[..., 0],
    ...                           torch.ones(16, 32).bool(), entropy=-(trainer.exp() * trainer).sum(-1))
    >>> print(found.sentence)
    the engine's log-probs carry a temperature of about 0.70, the trainer's 1.00: it sampled at its own
    (mean |d| 0.27 over 512 tokens)

    Raises:
        ValueError: tensors of different shapes, or a temperature that is not above 0.
    """
    columns = {"logp": logp, "rollout_logp": rollout_logp, "mask": mask}
    if entropy is not None:
        columns["entropy"] = entropy
    for name, column in columns.items():
        if column.ndim != 2 or column.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(column.shape)}, expected [B, T], here {tuple(logp.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature!r}, expected a number > 0")
    ours, theirs = logp.cpu().double(), rollout_logp.cpu().double()
    entropies = None if entropy is None else entropy.cpu().double()
    drawn = mask.cpu().bool() & ours.isfinite()
    if entropies is not None:
        drawn &= entropies.isfinite()
    seen = drawn & theirs.isfinite()
    if not seen.any():
        nan = Estimate(torch.nan, torch.nan)
        sentence = (
            "the engine reported no log-probs" if mask.any() else "no token is trained on: the mask is 0 everywhere"
        )
        return Semantics("unknown", 0, torch.nan, nan, None, None, sentence, same_weights)
    t, e = ours[seen], theirs[seen]
    h = None if entropies is None else entropies[seen]
    d = t - e
    gap = d.abs().mean().item()
    ratio = mean_of(d.clamp(-50, 50).exp())
    surprise = None
    if h is not None and entropies is not None:
        # The engine may have scored the likely tokens alone, or all but those that the model did not sample.
        both = surprise_of(t, h), surprise_of(ours[drawn], entropies[drawn])
        surprise = min(both, key=lambda one: abs(one.value) / max(one.error, 1e-12))
    # The mean of -log-prob of the engine's own samples is the entropy of its distributions.
    certain, colder = 1.0, ""
    if h is not None and same_weights and surprise is not None:
        reported = -e.mean().item() / max(h.mean().item(), 1e-12)
        if surprise.value < -SIGNIFICANT * surprise.error:  # the tokens bear it out
            certain = reported
        elif reported < MAYBE_COLDER:
            colder = AS_COLDER.format(-e.mean(), h.mean())
    measured = f" (mean |d| {gap:.2g} over {len(d)} tokens)"

    def result(kind: Kind, finding: str, carried: Estimate | None = None) -> Semantics:
        return Semantics(kind, len(d), gap, ratio, carried, surprise, finding + measured, same_weights)

    for whose, values in (("engine's log-probs", e), ("trainer's log-probs (old_logp, if the sampler supplies it)", t)):
        if above_zero(values):
            what = "negatives of log-probs" if values.max() > 1 + 1e-6 else "probabilities"
            return result("probabilities", f"the {whose} are above 0, as no log-prob is: {what}, it seems")
    if (torch.minimum(t, e) < CERTAIN).sum() < UNCERTAIN:
        return result("unknown", "too few uncertain tokens to compare the engine's log-probs with the trainer's")
    if (e == e[0]).all():
        return result("placeholders", f"the engine reported the log-prob {e[0]:.3g} for every token")
    if finding := not_per_token(theirs, ours, seen):
        return result("per_sequence", f"the engine's log-probs {finding}")
    stands_in = _placeholders(t, e) | _of_one_place(ours, theirs, seen)[seen]
    if number := int(stands_in.sum()):
        constant = e[stands_in].mode().values.item() + 0.0  # -0 is 0
        tokens = f"{number / len(e):.0%} of the tokens" if number > 0.01 * len(e) else f"{number} of the tokens"
        others = seen.clone()
        others[seen] = ~stands_in
        finding = f"the engine reported a placeholder, {constant:g}, for {tokens}"
        if constant < 0 and constant == e.min() and (t[stands_in] < constant).double().mean() > 0.9:
            finding = f"the engine's log-probs are cut off at {constant:g}, where {tokens} stand"
        if (e == e.round()).all():
            finding = "the engine's log-probs are whole numbers: rounded, or cut off behind the point"
        if int((e[stands_in] == constant).sum()) < number / 2:
            finding = (
                f"the engine reported values from {e[stands_in].min():.3g} to {e[stands_in].max():.3g} for {tokens}, "
                "as no model gives them: placeholders, or raw logits in place of log-probs"
            )
        if neighbour := _shift(ours, theirs, others):
            finding += f", and its other log-probs are those of the {neighbour} token"
        greedy = certain < NEARLY_GREEDY and constant == 0
        finding += LEFT_ALONE * (constant == 0)
        finding += AS_NEARLY_GREEDY * greedy or colder * (constant == 0)
        return replace(result("placeholders", finding), shifted=bool(neighbour), colder=greedy)
    if neighbour := _shift(ours, theirs, seen):
        trainers = "next" if neighbour == "previous" else "previous"
        finding = f"the engine's log-probs are those of the {neighbour} token, or the trainer's those of the {trainers}"
        return result("shifted", finding)

    above, below = d.clamp(min=0).mean().item(), -d.clamp(max=0).mean().item()
    # A constant d (the log of the kept mass) looks proportional to t, too, where t hardly varies.
    residual = _robust_fit(t[:, None], d)[1].abs().mean()
    proportional = residual < 0.1 * gap and residual < 0.5 * (d - d.median()).abs().mean()
    related = not _unrelated(t, e, gap)
    if gap > 0.005 and related and (above > 20 * below or (below > 20 * above and proportional)):
        finding = "the engine's probabilities do not sum to 1 if the trainer's do"
        filled = ((t == 0) & (e < -0.5)) | _filled_in(e, t)
        if filled.any():
            finding += (
                f"; {int(filled.sum())} of the trainer's log-probs are exactly {t[filled].mode().values.item():g} "
                "where the engine's are not, as where it scored fewer tokens, multiplied by a mask, or cut its "
                "log-probs off at a value: look at these first"
            )
        finding += AS_NEARLY_GREEDY * (certain < NEARLY_GREEDY) or colder
        return replace(result("unnormalised", finding), colder=certain < NEARLY_GREEDY)

    power, explained, of_engine = _power(t, d, h)
    evidence = d.sum().item()
    surprising = surprise if surprise is not None and abs(surprise.value) > SIGNIFICANT * surprise.error else None
    # Without entropy, noise in logp looks like a temperature of the engine above the trainer's.
    needed = 0.6 if h is not None else 0.25 if power.value > 1 or evidence > SIGNIFICANT else 0.5
    # A very certain policy's entropy stands badly for its contexts; here the tokens themselves bear the engine out.
    needed = 0.25 if same_weights and surprising is not None and evidence < -SIGNIFICANT else needed
    plausible = COLDEST < temperature / max(power.value, 1e-6) < HOTTEST and of_engine > 0.5
    if gap > 0.001 and explained > needed and plausible and below < 20 * above:
        if abs(power.value - 1) > max(0.01, SIGNIFICANT * power.error):
            fit = explained if explained < BY_A_TEMPERATURE else None
            return result(*_tempered(power, evidence, temperature, fit, known=h is not None, same=same_weights))

    lost, doubtful = 1 - ratio.value, SIGNIFICANT * ratio.error
    raised = (d > RAISED).double().mean().item()
    if lost > max(0.002, doubtful) and below > 5 * above and raised < FEW_RAISED and related:
        mass = f"{ratio.value:.3g} +- {ratio.error:.1g}"
        likelier = surprise is not None and surprise.value < -LIKELIER * surprise.error
        if not likelier and surprise is not None and surprise.value - 2 * surprise.error > -lost:
            # Without its unlikely tokens a distribution gives likelier ones: by more than what it lost, in nats.
            are = "drawn as from all"
            if surprise.value > LIKELIER * surprise.error:
                are = "not the likeliest ones, rather the others"
            finding = (
                f"the engine's log-probs are raised as if tokens were left out that hold {1 - ratio.value:.3g} +- "
                f"{ratio.error:.1g} of the probability, but the sampled tokens are {are} (mean of -logp - entropy "
                f"{surprise.value:+.2g} +- {surprise.error:.1g}, and far below 0 under top-p, top-k or min-p)"
            )
            return replace(result("unnormalised", finding), raised=True)
        or_else = "; or some tokens are forbidden (logit_bias, bad_words), or the trainer's softmax is over more ids"
        if not likelier:
            or_else += (
                ", or they were divided by a temperature above 1 after the softmax, or are of other tokens than the "
                f"sampled ones, which {'entropy' if surprise is None else 'more tokens'} would show"
            )
        or_else += AS_NEARLY_GREEDY * (certain < NEARLY_GREEDY) or colder
        finding = (
            f"the engine's log-probs are renormalised over the tokens that top-p, top-k or min-p kept, {mass} of the "
            f"probability on average, and the trainer's are not{or_else}"
        )
        return replace(result("kept_mass", finding), colder=certain < NEARLY_GREEDY)
    far_colder = certain < COLDER and gap > HEALTHY
    if far_colder or (gap > LARGE and (same_weights or abs(lost) > doubtful)):
        why = " nor by one temperature" if h is not None else "; entropy would show whether by a temperature"
        why = colder or why
        finding = f"the engine's log-probs differ from the trainer's, not by a kept mass alone{why}"
        if certain < COLDER and h is not None:
            finding = (
                "the engine's log-probs differ from the trainer's as at a far lower temperature of the engine's: by "
                f"its own samples its distributions have an entropy of {-e.mean():.2g} nats, the trainer's "
                f"{h.mean():.2g}"
            )
        if abs(lost) > max(FATAL_RATIO, doubtful):
            finding += (
                f"; the mean ratio e^d is {ratio.value:.3g} +- {ratio.error:.1g}, and 1 on average for any two policies"
            )
        if not related:
            finding += "; they hardly correlate, as of other tokens or after another text"
        return replace(result("differs", finding), unrelated=not related, colder=certain < COLDER)
    near = "agree with" if gap <= HEALTHY else "are near"
    if gap > NOTABLE and not same_weights:
        return result("agrees", "the engine's log-probs differ from the trainer's as those of other weights do")
    if same_weights and surprising is not None:
        were = "were drawn from a distribution that is more certain"
        if surprising.value > 0:
            were = "were drawn from a distribution that is less certain, or not all sampled by this model"
        return result(
            "unlogged",
            f"the engine's log-probs {near} the trainer's, but the tokens {were}: mean of -logp - entropy "
            f"{surprising.value:.2g} +- {surprising.error:.1g} in place of 0, unless the entropy is of other "
            "distributions than the trainer's log-probs, as of raw logits beside a temperature, or in bits",
        )
    if gap > HEALTHY:
        sentence = (
            f"the engine's log-probs differ from the trainer's by mean |d| {gap:.2g} over {len(d)} tokens (healthy: "
            f"below {HEALTHY:g}){colder}"
        )
        return Semantics("agrees", len(d), gap, ratio, None, surprise, sentence, same_weights)
    if gap > NOTABLE:
        sentence = (
            f"the engine's log-probs are near the trainer's: mean |d| is {gap:.2g} over {len(d)} tokens{WORTH_IT}"
        )
        return Semantics("agrees", len(d), gap, ratio, None, surprise, sentence, same_weights)
    return result("agrees", "the engine's log-probs agree with the trainer's")


COLDER, NEARLY_GREEDY = 0.5, 0.3
"""Entropy of the engine's distributions over that of the trainer's below which one temperature is far below the other
one, as no rounding of weights makes it; and below which it is near 0 and leaves zeros and a missing mass."""

LEFT_ALONE = "; but a token that structured decoding, or a truncation, left alone has a true 0"

AS_NEARLY_GREEDY = "; a sampler at a temperature near 0 leaves the same"

MAYBE_COLDER = 0.75
"""The same below which such a temperature is said to be possible, where too few tokens tell."""

AS_COLDER = (
    "; a far lower temperature of the engine may leave the same: by its own samples its distributions have an entropy "
    "of {:.2g} nats, the trainer's {:.2g}, and these tokens are too few to tell"
)

LIKELIER = 3.0
"""Standard errors that the mean of -logp - entropy is below 0 by where the tokens are of a truncated distribution."""

RAISED, FEW_RAISED = 0.2, 0.02
"""d (nats) that a truncation leaves at no token, whatever noise is beside it, and the share of such tokens from which
the weights are others."""

FAR_APART, UNRELATED = 0.5, 0.3
"""Mean |d| (nats) above which it is looked at, and the correlation of the two sides' log-probs below which they are
hardly those of the same tokens after the same text."""


def _unrelated(t: Tensor, e: Tensor, gap: float) -> bool:
    """Whether the engine's log-probs hardly correlate with the trainer's, as of other tokens or another context."""
    if gap <= FAR_APART or min(t.std().item(), e.std().item()) == 0:
        return False
    return torch.corrcoef(torch.stack([t, e]))[0, 1].item() < UNRELATED


ROWS, ELSEWHERE = 8, 0.02
"""Sequences of which each has a 0 at one index, for it to be filled in there, and share of zeros elsewhere up to which
no truncation leaves them."""


def _placeholders(t: Tensor, e: Tensor) -> Tensor:
    """[N] the tokens whose engine's log-prob cannot be that of a sampled token, given the trainer's."""
    zero = e == 0
    unlikely, likely = t < UNLIKELY, (t > LIKELY[0]) & (t < LIKELY[1])
    odd = zero & unlikely
    # A truncation leaves tokens alone, with a log-prob of 0: likely ones, far more often than others.
    alone = likely.any() and zero[likely].double().mean() > 4 * zero[unlikely].double().mean()
    alone = alone and zero[~unlikely].sum() > odd.sum()
    agree = (t - e)[~odd].abs().mean() <= NOTABLE
    if alone or odd.sum() < (1 if agree else SEVERAL):
        odd = torch.zeros_like(odd)
    return odd | ((e <= IMPOSSIBLE) & (t > e / 2)) | _filled_in(t, e)


def _of_one_place(ours: Tensor, theirs: Tensor, seen: Tensor) -> Tensor:
    """[B, T] the engine's zeros at an index at which every sequence has one, and hardly one has any elsewhere.

    A truncation to half of the mass or more leaves no token alone that the trainer gives less.
    """
    zero = (theirs == 0) & seen
    filled = (zero == seen).all(0) & (seen.sum(0) >= ROWS) & (torch.where(seen, ours, 0).amin(0) < LIKELY[0])
    here = zero & filled
    others = seen & ~here
    few = others.any() and (zero & others).sum() < ELSEWHERE * others.sum()
    return here if few else torch.zeros_like(here)


def _filled_in(t: Tensor, e: Tensor) -> Tensor:
    """[N] the tokens with the one value below 0 that keeps returning where the trainer's log-probs vary.

    Samples of one prompt share their first tokens' values, on both sides.
    """
    values, which, times = e.unique(return_inverse=True, return_counts=True)
    most = int((times * (values < -1e-6)).argmax())
    here = which == most
    own = t[here]
    far = (own - values[most]).abs() > FAR
    if len(own) < max(SEVERAL, FILLED * len(e)) or far.double().mean() < 0.5 or len(own.unique()) < 0.5 * len(own):
        return torch.zeros_like(here)
    return here


def _tempered(
    power: Estimate, evidence: float, temperature: float, fit: float | None, *, known: bool, same: bool
) -> tuple[Kind, str, Estimate | None]:
    """Kind, finding and carried temperature, from the power p in rollout_logp = p logp - f(context).

    evidence: sum of d, the log-likelihood ratio of the sampled tokens under the trainer's and the engine's log-probs.
    fit: the share of the spread of d that the power explains, where another change may as well be what it fits.
    """
    carried = Estimate(temperature / power.value, temperature * power.error / power.value**2)
    if known:
        said = f"carry a temperature of about {carried.value:.2f}, the trainer's {temperature:.2f}"
        if fit is not None:
            said = (
                f"differ about as at a temperature of {carried.value:.2f}, the trainer's {temperature:.2f} (it fits "
                f"{fit:.0%} of the spread: another change of the logits may leave the same)"
            )
    else:
        said = f"carry a {'lower' if power.value > 1 else 'higher'} temperature than the trainer's"
    who = "these tokens do not show which of the two it sampled at"
    if evidence > SIGNIFICANT:
        who = "it sampled at the trainer's"
    elif evidence < -SIGNIFICANT:
        who = "it sampled at its own"
    later = "" if same else "; training since the tokens were sampled can look like this, too"
    kind: Kind = "raw" if evidence > SIGNIFICANT else "temperature"
    return kind, f"the engine's log-probs {said}: {who}{later}", carried if known else None


def mean_of(values: Tensor) -> Estimate:
    """The mean of [N] values and its standard error."""
    return Estimate(values.mean().item(), (values.var(correction=0) / len(values)).sqrt().item())


def surprise_of(t: Tensor, h: Tensor) -> Estimate:
    """Mean of -t - h, which is 0 where the tokens were drawn from the distributions with log-probs t and entropies h.

    Given their contexts the terms are uncorrelated.  Their variance is that of the sample, or what it is at least in a
    distribution of two outcomes: the rare tokens that it comes from may be absent from the sample.
    """
    value = mean_of(-t - h)
    least = least_variance(h).mean() / len(h)
    return Estimate(value.value, max(value.error, least.sqrt().item()))


def _shift(ours: Tensor, theirs: Tensor, seen: Tensor) -> str:
    """ "next" or "previous", the neighbour whose log-prob the engine reports in place of a token's own; else ""."""

    def gap(a: Tensor, b: Tensor, both: Tensor) -> float:
        return (a - b)[both].abs().mean().item() if both.any() else torch.inf

    own = gap(ours, theirs, seen)
    both = seen[:, 1:] & seen[:, :-1]
    moved = {"next": gap(ours[:, 1:], theirs[:, :-1], both), "previous": gap(ours[:, :-1], theirs[:, 1:], both)}
    nearest = min(moved, key=moved.__getitem__)
    return nearest if own > LARGE and moved[nearest] < own / 2 else ""


def not_per_token(values: Tensor, others: Tensor, seen: Tensor) -> str:
    """The finding that ``values`` are averages or sums over a sequence, in words; "" where they are not.

    Args:
        values: [B, T] the log-probs to judge (nats).
        others: [B, T] log-probs of the same tokens.
        seen: [B, T] the tokens with both.
    """
    tokens, constant, falling, rising = 0, [], [], []
    for row in range(len(values)):
        own, other = values[row][seen[row]], others[row][seen[row]]
        uncertain = other[other < CERTAIN]
        if len(uncertain) < SEVERAL or uncertain.max() - uncertain.min() < LARGE:
            continue
        tokens += len(uncertain)
        change, others_change, slack = own.diff(), other.diff(), 1e-6 * own.abs().max()
        constant.append(bool((own.max() - own.min() <= slack).item()))
        falling.append(bool((change <= slack).all() and (others_change > slack).any()))
        rising.append(bool((change >= -slack).all() and (others_change < -slack).any()))
    wanted = NEARLY_ALL * len(constant)
    if tokens < UNCERTAIN or max(sum(constant), sum(falling), sum(rising)) < wanted:
        return ""
    if sum(constant) >= wanted:
        if not values[seen].any():
            return "are 0 at every token: they are placeholders, and no log-probs"
        return (
            "are the same at every token of a sequence: they are no log-probs of single tokens (an average or a sum?)"
        )
    way = "fall" if sum(falling) >= wanted else "rise"
    return f"only {way} from token to token of a sequence: they are no log-probs of single tokens (cumulative sums?)"


def _power(t: Tensor, d: Tensor, h: Tensor | None) -> tuple[Estimate, float, float]:
    """p of rollout_logp = p logp - f(context), and the shares that it explains, beside f, of the spread of d and of
    that of rollout_logp.

    f is a polynomial of the entropy; without entropy, a constant: then p is nearer to 1 than the truth.
    """
    context = torch.stack([torch.ones_like(t), *([] if h is None else [h, h * h])], 1)
    within, without, engine = (_robust_fit(context, values)[1] for values in (t, d, t - d))
    slope, residual, weights = _robust_fit(torch.cat([t[:, None], context], 1), d)
    error = (within * residual * weights).square().sum().sqrt() / (within.square() * weights).sum()
    left, *spreads = ((values.abs() * weights).mean() for values in (residual, without, engine))
    of_d, of_engine = (1 - (left / spread.clamp(min=1e-12)).item() ** 2 for spread in spreads)
    return Estimate(1 - slope[0].item(), error.item()), of_d, of_engine


def _robust_fit(columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients, residuals and weights of Huber's regression: residuals above three times their mean count less."""
    weights = torch.ones_like(values)
    for _ in range(8):
        root = weights.sqrt()
        fit = torch.linalg.lstsq(columns * root[:, None], (values * root)[:, None], driver="gelsd").solution[:, 0]
        residual = values - columns @ fit
        weights = (3 * residual.abs().mean() / residual.abs().clamp(min=1e-12)).clamp(max=1)
    return fit, residual, weights
