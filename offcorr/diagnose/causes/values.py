"""Causes that make the logged values no log-probs of these tokens: placeholders, masks, shifts, rounding."""

from __future__ import annotations

import dataclasses

import numpy as np

from offcorr.diagnose.causes.base import CAUSES, NEARLY_GREEDY, Alternative, Cause, Found
from offcorr.diagnose.causes.grids import on_a_grid
from offcorr.diagnose.evidence import SAME, Booleans, Evidence, surprisal_balance
from offcorr.diagnose.record import Floats, Integers, Record

FEWEST = 3
"""Tokens that a test of single tokens needs."""


FEW = 0.65
"""Confidence where few tokens, or sequences, show a cause, or another leaves the same in few."""

ONE_SIDED = 0.03
"""Share of d above 0, below which d has one sign, as where a sampler forbids tokens, and the others are likelier."""

IMPOSSIBLE = -50.0
"""Log-prob (nats) of a token that is not sampled once in all of training."""

SHIFTED = 0.4
"""Part of the mean |d| that is left beside the neighbour's log-probs: above it, another cause can leave that."""

OF_ENDS = ("appended_eos", "shift")
"""Causes that leave a filled-in value at the last tokens of completions."""


class Sentinel(Cause):
    """Values that stand for "no log-prob": infinite, above 0, one constant far off, or an exact 0."""

    id = "sentinel"
    stage = "values"
    robust = True
    title = "placeholders among one side's log-probs"
    advice = (
        "log each side's own log-prob of each sampled token, which vLLM reports whatever its rank, and where there is "
        "none NaN or None, never -9999, -100 or 0; mask tokens that the model did not sample, but none for the lack of "
        "the engine's log-prob, as those without one may be the unlikely ones"
    )
    not_told_from = (
        Alternative(
            "greedy sampling (temperature 0, top_k=1) of these sequences, whose log-probs are 0: it is no distribution "
            "to correct for",
            "read the engine's sampling options, of each request",
            fields=("entropy",),
            settled=lambda evidence: not _may_be_greedy(evidence),
        ),
        Alternative(
            "end tokens that were appended, and that the model did not sample (appended_eos)",
            "look whether these completions were cut by the length limit",
            settled=lambda evidence: not _at_ends(evidence),
        ),
        Alternative(
            "log-probs of which the sampler is certain to float32's precision, and the trainer is not, as where one "
            "side bounds its logits (a softcap)",
            "compare how each side computes its logits, or give --model",
            settled=lambda evidence: not _nearly_zero(evidence),
        ),
        Alternative(
            "another quantity of the sampler, or log-probs that it rescaled or added something to: values above 0 are "
            "no log-probs, and these are no placeholder, of which one or two stand often",
            "compute the log-prob of one such token by hand",
            settled=lambda evidence: not _differ_above(evidence.sampler[_placeholders(evidence)[0]]),
        ),
        Alternative(
            "logits that one side clamps, where tokens with a clamped logit have one log-prob in each context",
            "compare how each side computes its logits, or give --model",
            settled=lambda evidence: not _many(*_repeats(evidence)),
        ),
        Alternative(
            "log-probs that were cut off (clamped) at the value that stands most often, as none is below it, and the "
            "tokens with it are unlikely ones",
            "compare one such token's log-prob of both sides",
            settled=lambda evidence: not _cut_off(evidence, *_repeats(evidence)),
        ),
        Alternative(
            "tokens that a truncation (top_p, top_k, min_p) or structured decoding left alone, though the trainer "
            "finds them unlikely",
            "compare the sampler's options, and look what these tokens are",
            settled=lambda evidence: (
                not (evidence.sampler == 0).any()
                or (bool(_whole_of_zeros(evidence).any()) and not _truncated(evidence.d[evidence.sampler != 0]))
            ),
        ),
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        one_number = constant(evidence) or constant(evidence, "trainer")
        if one_number is not None or _mostly_above(evidence):
            return one_number
        if (filled := _zeros_of_the_trainer(evidence) | _impossible_of_the_trainer(evidence)).any():
            numbers, count = np.unique(evidence.trainer[filled], return_counts=True)
            value = numbers[count.argmax()]
            return Found(
                float(filled.mean()),
                0.0,
                FEWEST / len(evidence),
                float(filled.sum()) / FEWEST,
                f"{filled.sum()} of {len(evidence)} tokens have exactly {value:g} from the trainer, where "
                f"the sampler has {evidence.sampler[filled].mean():.2g} on average: these are not the trainer's "
                "log-probs of them, as where it scored fewer tokens than were sampled, or multiplied by a mask (then "
                "mask these tokens, or log NaN)",
                evidence.keep(~filled),
            )
        odd, value = _placeholders(evidence)
        alone = _zeros(evidence) & (not zeros_of_truncation(evidence))
        if any(CAUSES[id].found(evidence) is not None for id in OF_ENDS):
            alone &= ~evidence.last
        if (whole := _whole_of_zeros(evidence)).sum() >= FEWEST:
            odd, alone = odd | whole, alone & ~whole
            value = 0.0 if odd.sum() <= 2 * whole.sum() else value
        if (placed := _zeros_of_one_place(evidence)).any():
            odd, alone, value = odd | placed, alone & ~placed, 0.0 if odd.sum() <= placed.sum() else value
        if alone.any() and not _in_runs(evidence, alone) and not _at_edges(evidence, alone):
            odd, value = (odd | alone, value if odd.sum() > alone.sum() else 0.0)
        if (ends := _one_value_of_ends(evidence)).any():
            odd, value = odd | ends, value if odd.sum() > ends.sum() else float(evidence.sampler[ends][0])
        impossible = int((~np.isfinite(evidence.sampler[odd]) | (evidence.sampler[odd] <= IMPOSSIBLE)).sum())
        if not impossible and odd.sum() < FEWEST:
            return None
        values, times = np.unique(evidence.sampler[odd], return_counts=True)  # taken away at likely tokens, too
        share = float(odd.mean())
        # 0 is the log-prob of a token that was left alone, as hardly in every place of a sequence.
        elsewhere = ((evidence.sampler == 0) & ~whole).sum() >= FEWEST
        doubtful = not impossible and value == 0 and (elsewhere or _truncated(evidence.d[~odd]))
        doubtful |= not impossible and value == 0 and _may_be_greedy(evidence)
        said = f"a value from the sampler that cannot be their log-prob, most often {value:g}"
        left = evidence.without_values(~(odd | np.isin(evidence.sampler, values[times >= FEWEST])))
        if doubtful:  # the tokens may have been the only ones to choose from, as the trainer does not know
            exact = "mostly " * bool(evidence.sampler[odd].any()) + "exactly 0"
            said = f"{exact} from the sampler, and {evidence.trainer[odd].mean():.2g} on average from the trainer"
            left = left.unbalanced()
        of_clamps = _many(times, values) or _cut_off(evidence, times, values)
        return Found(
            share,
            float(np.sqrt(share * (1 - share) / len(evidence))),
            (1 if impossible else FEWEST) / len(evidence),
            max(float(odd.sum()) / FEWEST, 3.0 if impossible else 0.0),
            f"{odd.sum()} of {len(evidence)} tokens have {said}",
            left,
            surest=0.5 if doubtful or of_clamps or _differ_above(evidence.sampler[odd]) else 1.0,
            of_zeros=value == 0,
        )


MANY = 4
"""Different values that stand often, from which on they are hardly placeholders, of which there are one or two."""


WRITTEN = 8
"""Tokens that have one round number, from which on it is made up."""

LEAST_WRITTEN = -8.0
"""Log-prob (nats) above which a placeholder is a round number; below, it may be the logarithm of a small one."""


def _differ_above(values: Floats) -> bool:
    """Whether most of the values are finite and above 0, and hardly one is as another: these are no placeholders."""
    above = values[(values > ROUNDED) & np.isfinite(values)]
    return len(above) > 0.5 * len(values) and len(np.unique(above)) > max(2, 0.5 * len(above))


def _many(times: Integers, values: Floats) -> bool:
    """Whether more values than placeholders have stand among these several times each, or one that nobody writes."""
    often = (times >= FEWEST) & (values < 0) & np.isfinite(values)
    written = (values < LEAST_WRITTEN) | (np.abs(values - values.round(1)) < 1e-6)
    return int(often.sum()) >= MANY or bool(often.any() and not written[often].any())


def _cut_off(evidence: Evidence, times: Integers, values: Floats) -> bool:
    """Whether the value that stands most often among these is the least that the sampler has, at unlikely tokens."""
    if not len(times) or not IMPOSSIBLE < (value := values[times.argmax()]) < 0 or evidence.sampler.min() < value:
        return False
    at = evidence.sampler == value
    return bool(at.all() or (evidence.trainer[at] < np.median(evidence.trainer[~at])).mean() > NEARLY_EACH)


NEARLY_EACH = 0.9
"""Share of the tokens with one value that are less likely to the trainer than half of the others, where log-probs were
cut off."""


def _repeats(evidence: Evidence) -> tuple[Integers, Floats]:
    """The number of times that each value stands which cannot be a log-prob of its tokens, and the values."""
    values, times = np.unique(evidence.sampler[_placeholders(evidence)[0]], return_counts=True)
    return times, values


def _zeros_of_the_trainer(evidence: Evidence) -> Booleans:
    """[N] exact zeros of the trainer, where some are at tokens that the sampler finds unlikely; none of a very certain
    policy, which has others near 0.

    Zeros at the first and the last token of a completion, which shifted log-probs leave, do not decide.
    """
    zeros, inside = evidence.trainer == 0, (evidence.position > 0) & ~evidence.last
    rounded = bool((evidence.trainer == evidence.trainer.round()).all())
    if rounded or not zeros.any():
        return np.zeros_like(zeros)
    # Where the others agree, an unlikely token that the trainer is certain of is one that it did not score.
    if (told := zeros & (evidence.sampler < -0.5)).sum() >= max(FEWEST, 0.002 * len(evidence)):
        others = evidence.size[~zeros]
        if len(others) and float(others.mean()) < BEFORE * float(evidence.size[told].mean()):
            return zeros
    doubted = zeros & inside & (evidence.sampler < -0.5)
    nearly = int(((evidence.trainer < 0) & (evidence.trainer > -0.01)).sum())
    few = doubted.sum() < max(FEWEST, 0.002 * len(evidence)) or nearly > doubted.sum() / 2
    return np.zeros_like(zeros) if few or doubted.sum() < 0.25 * zeros.sum() else zeros


def _impossible_of_the_trainer(evidence: Evidence) -> Booleans:
    """[N] values of the trainer that no sampled token has, and that stand often, such as -100 or -9999."""
    impossible = (evidence.trainer <= IMPOSSIBLE) & (evidence.sampler > evidence.trainer / 2)
    values, times = np.unique(evidence.trainer[impossible], return_counts=True)
    return np.isin(evidence.trainer, values[times >= FEWEST]) & impossible


def _nearly_zero(evidence: Evidence) -> bool:
    """Whether some zeros stand among values that are nearly 0, as of a distribution with more and less certain tokens.

    The next number below 1 is 1 - 6e-8 in float32.
    """
    values = evidence.sampler
    return bool((values == 0).any() and ((values < 0) & (values > -1e-6)).sum() >= FEWEST)


def _at_ends(evidence: Evidence) -> bool:
    """Whether most exact zeros at unlikely tokens stand at the ends of completions, and these are of one token id."""
    zeros = _zeros(evidence)
    ends = zeros & evidence.last
    return bool(ends.any()) and float(evidence.last[zeros].mean()) > 0.5 and len(np.unique(evidence.ids[ends])) == 1


def _mostly_above(evidence: Evidence) -> bool:
    """Whether nearly all values above 0 are of sequences without others: probabilities, or -ln p."""
    above = evidence.sampler > 1e-6
    times = np.bincount(evidence.sequence, minlength=len(evidence.records))
    whole = np.bincount(evidence.sequence, above, minlength=len(evidence.records)) > 0.9 * times
    return bool(above.sum() >= FEWEST and (whole[evidence.sequence] & above).sum() > 0.9 * above.sum())


def _truncated(d: Floats) -> bool:
    """Whether d is below 0, or 0, nearly everywhere: a truncation leaves a token alone, too, with a log-prob of 0."""
    return float(np.maximum(d, 0).sum()) < ONE_SIDED * float(np.maximum(-d, 0).sum())


class Mask(Cause):
    """Exact zeros where the trainer finds the tokens unlikely: prompt, tool or pad tokens within the mask."""

    id = "mask"
    stage = "values"
    robust = True
    title = "the mask covers tokens that the model did not sample, or had no choice of"
    advice = (
        "set mask to 0 for tool, prompt and pad tokens, and for those that structured decoding forced, and check that "
        "it is not shifted by one against completion_ids"
    )
    not_told_from = (
        Alternative(
            "tokens that a truncation (top_p) left alone, which the trainer's other weights make unlikely",
            "compare the sampler's options, and look what these tokens are",
            settled=lambda evidence: not _far_policies(evidence),
        ),
        Alternative(
            "log-probs of tokens that the model did sample, in whose place somebody filled in 0",
            "look what these tokens are, and where their log-probs come from",
            ("entropy",),
            settled=lambda evidence: _not_sampled(evidence) > 0,
        ),
        Alternative(
            "rows in another order, whose shorter sequences were padded with 0",
            "compare the rows of one sequence on both sides",
            settled=lambda evidence: not _far_policies(evidence),
        ),
        Alternative(
            "tokens that structured decoding, or a truncation, left alone: all others are likelier to the sampler, too",
            "compare the sampler's options, and look what these tokens are",
            settled=lambda evidence: not _forbids(evidence),
        ),
        NEARLY_GREEDY,
    )

    def found(self, evidence: Evidence) -> Found | None:
        zeros = _zeros(evidence)
        zeros &= ~(evidence.last & (_neighbours(evidence, evidence.sampler == 0) == 0))
        count = int(zeros.sum())
        if count < FEWEST or constant(evidence):
            return None
        in_runs = _in_runs(evidence, zeros)
        if not in_runs and not _at_edges(evidence, zeros):
            return None
        share = count / len(evidence)
        depth = float(evidence.trainer[zeros].mean())
        left = evidence.keep(~_with_neighbours(evidence, zeros) & ~((evidence.sampler == 0) & evidence.beside_masked))
        sampled = _not_sampled(evidence) <= 0
        return Found(
            share,
            float(np.sqrt(share * (1 - share) / len(evidence))),
            FEWEST / len(evidence),
            count / FEWEST,
            f"{count} of {len(evidence)} tokens, mostly {'side by side' if in_runs else 'beside masked ones'}, have a "
            f"log-prob of exactly 0 from the sampler, and of {depth:.1f} nats on average from the trainer",
            left.unbalanced() if sampled else left,  # zeros in place of unlikely tokens leave the likely ones
            surest=0.5 if sampled or _far_policies(evidence) or _forbids(evidence) else 1.0,
            of_zeros=True,
        )


def _whole_of_zeros(evidence: Evidence) -> Booleans:
    """The tokens of sequences of which every log-prob is exactly 0, as of an engine that reported none.

    A truncation leaves short sequences of likely tokens alone, too: these have two tokens at least, one of them
    unlikely.
    """
    several = len(evidence.records)
    zero, unlikely, times = (
        np.bincount(evidence.sequence, which, minlength=several)
        for which in (evidence.sampler == 0, _zeros(evidence), np.ones(len(evidence)))
    )
    return np.asarray(((zero == times) & (times > 1) & (unlikely > 0))[evidence.sequence])


def _may_be_greedy(evidence: Evidence) -> bool:
    """Whether some sequences are 0 throughout, as greedy ones are, and no entropy shows that their tokens were drawn.

    -log p of the likeliest token is never above the entropy, and of draws it often is.
    """
    times, zeros = np.bincount(evidence.sequence), np.bincount(evidence.sequence, evidence.sampler == 0)
    here = (zeros == times)[evidence.sequence]
    if not here.any() or evidence.entropy is None:
        return bool(here.any())
    here &= np.isfinite(evidence.entropy)
    above = -evidence.trainer[here] > evidence.entropy[here] + ABOVE_ENTROPY
    return len(above) < TOLD or float(above.mean()) < OF_DRAWS


ABOVE_ENTROPY, OF_DRAWS = 0.05, 0.1
"""Nats by which -log p is above the entropy, and the share of such tokens from which they were drawn."""


def _not_sampled(evidence: Evidence) -> int:
    """1 where the tokens with an exact 0 are more surprising than draws from the trainer's distributions, as text is
    that the model did not write; -1 where they are not; 0 where too few have an entropy to say."""
    here = _with_neighbours(evidence, _zeros(evidence))
    if evidence.entropy is None or evidence.balance is None:
        return 0
    here &= np.isfinite(evidence.entropy)
    if here.sum() < TOLD:
        return 0
    # Zeros in place of unlikely tokens are surprising by their choice, and all tokens together are not.
    chosen = surprisal_balance(evidence.trainer[here], evidence.entropy[here]).z > 3
    return 1 if chosen and evidence.balance.z > 3 else -1


TOLD = 16
"""Tokens with an entropy that say whether the model sampled them, at least."""

FAR = 0.5
"""Mean |d| (nats) of the tokens without an exact 0, from which a 0 at a token that is unlikely to the trainer may be of
one that was certain to the sampler."""


def _forbids(evidence: Evidence) -> bool:
    """Whether the tokens without an exact 0 are likelier to the sampler, all of them, as where it forbids others."""
    d = evidence.d[(evidence.sampler != 0) & (evidence.size > evidence.floor)]
    return len(d) >= FEWEST and float(np.maximum(d, 0).sum()) < ONE_SIDED * float(np.maximum(-d, 0).sum())


def _far_policies(evidence: Evidence) -> bool:
    others = evidence.size[evidence.sampler != 0]
    return len(others) > 0 and float(others.mean()) > FAR


ROUNDING = 1e-6
"""Nats by which one made-up log-prob differs from another, at most."""


def _cut(evidence: Evidence, ends: Booleans, surely: bool = False) -> bool:
    """Whether the tokens end completions of the greatest length, with the prompt or without.

    Args:
        surely: and others are shorter, so that it is the limit's, and not that of every output.
    """
    own = np.array([len(record.completion_ids) for record in evidence.records])
    whole = own + np.array([len(record.prompt_ids) for record in evidence.records])
    rows = evidence.sequence[ends]
    lengths = [length for length in (own, whole) if np.ptp(length) > 0 or not surely]
    return len(rows) > 0 and any(float((length[rows] == length.max()).mean()) >= 0.8 for length in lengths)


def _far_ends(evidence: Evidence) -> tuple[Booleans, float]:
    """The last tokens whose |d| is far beyond that of the others, or whose value is filled in, and the share of the
    others that are as far off.
    """
    inside = evidence.size[~evidence.last]
    far = evidence.size > max(0.5, 1.5 * float(np.quantile(inside, 0.995)) if len(inside) else 0.0)
    ends = (far & evidence.last) | _filled_ends(evidence)
    return ends, float(far[~evidence.last].mean()) if len(inside) else 0.0


def _filled_ends(evidence: Evidence) -> Booleans:
    """The last tokens of one id that have one value from the sampler and several from the trainer, where the tokens
    before them agree.
    """
    none = np.zeros(len(evidence), bool)
    rows = np.flatnonzero(evidence.last)
    if not len(rows):
        return none
    pairs = np.stack([evidence.ids[rows], evidence.sampler[rows]], 1)
    values, same, times = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    filled = none.copy()
    filled[rows[same.ravel() == times.argmax()]] = True
    if times.max() < max(FEWEST, 0.1 * len(evidence.records)) or np.ptp(evidence.trainer[filled]) < VARIES:
        return none
    others = evidence.size[~evidence.last]
    agree = len(others) > 0 and float(others.mean()) < EXACT_BEFORE * float(evidence.size[filled].mean())
    return filled if agree else none


VARIES, EXACT_BEFORE = 0.01, 0.05
"""Spread (nats) of the trainer's log-probs of end tokens, from which one value of the sampler's is none of its own, and
mean |d| of the tokens before, as a share of theirs, up to which these agree."""


def _one_value_of_ends(evidence: Evidence) -> Booleans:
    """The last tokens, of several ids, that have one value below 0 from the sampler and several from the trainer, where
    the tokens before them are nearer to each other by far.  Of one id they are appended end tokens.
    """
    none = np.zeros(len(evidence), bool)
    ends = evidence.last & np.isfinite(evidence.sampler) & (evidence.sampler < -1e-6)
    if not ends.any() or not evidence.as_logged or on_a_grid(evidence.sampler):
        return none
    values, times = np.unique(evidence.sampler[ends], return_counts=True)
    filled = ends & (evidence.sampler == values[times.argmax()])
    _, ids = np.unique(evidence.ids[filled], return_counts=True)
    if filled.sum() < max(FEWEST, 0.5 * len(evidence.records)) or ids.max() > 0.8 * filled.sum():
        return none
    inside = evidence.size[~evidence.last]
    near = len(inside) > 0 and float(inside.mean()) < BEFORE * float(evidence.size[filled].mean())
    return filled if near and np.ptp(evidence.trainer[filled]) > VARIES else none


BEFORE = 0.2
"""Mean |d| of the tokens before, as a share of that of ends with one made-up value, at most."""


def _made_up(evidence: Evidence, ends: Booleans) -> bool:
    """Whether the sampler has one value for all of them."""
    return bool(np.ptp(evidence.sampler[ends]) <= ROUNDING)


class AppendedEOS(Cause):
    """The last token alone disagrees."""

    id = "appended_eos"
    stage = "values"
    robust = True
    title = "an end token was appended that the model did not sample"
    advice = (
        "take an end token out of the mask that was appended to a completion which the length limit had cut; one that "
        "the model sampled stays in, with NaN where the engine gave no log-prob of it"
    )
    not_told_from = (
        Alternative(
            "an end token that the model sampled, and whose log-prob somebody filled in",
            "look whether these completions were cut by the length limit, and where their last log-prob comes from",
            settled=lambda evidence: _cut(evidence, _far_ends(evidence)[0], surely=True),
        ),
        Alternative(
            "a truncation (top_p, top_k, min_p), or structured decoding, that left the end token alone",
            "compare the sampler's options",
            settled=lambda evidence: _cut(evidence, _far_ends(evidence)[0], surely=True),
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        ends, others = _far_ends(evidence)
        count = int(ends.sum())
        if count < FEWEST or count < 0.1 * len(evidence.records) or (~evidence.last).sum() < count:
            return None  # completions of one token have no others to compare with
        cut = _cut(evidence, ends)
        if not cut and not _made_up(evidence, ends):
            return None  # ends that were sampled, where unlikely tokens are far off as such
        ids, times = np.unique(evidence.ids[ends], return_counts=True)
        same = int(times.max())
        share = count / max(int(evidence.last.sum()), 1)
        if same < max(FEWEST, 0.8 * count) or share < 10 * others:
            return None
        depth = float(evidence.size[ends].mean())
        if depth < 4 * float(evidence.size[~evidence.last].mean()):
            return None
        made_up = f", where the sampler has {evidence.sampler[ends][0] + 0.0:.3g} each time"
        return Found(
            share,
            float(np.sqrt(share * (1 - share) / max(int(evidence.last.sum()), 1))),
            max(10 * others, FEWEST / len(evidence.records)),
            count / FEWEST,
            f"{count} completions, {'' if cut else 'not '}the longest ones, have a |d| of {depth:.2g} nats on average "
            f"at their last token, mostly token id {ids[times.argmax()]}{made_up * _made_up(evidence, ends)}; of all "
            f"other tokens {others:.2%} are as far off",
            evidence.keep(~ends),
            surest=1.0 if _cut(evidence, ends, surely=True) else 0.5,
        )


class Shift(Cause):
    """The sampler's log-probs are those of the next or the previous token."""

    id = "shift"
    stage = "values"
    robust = True
    title = "the log-probs of one side are shifted by one token"
    advice = (
        "the log-prob at index t must be that of the token at index t: check one known sequence by hand, and move the "
        "side that is off by one token"
    )
    not_told_from = (
        Alternative(
            "a shift from some token on, as where text was encoded again: part of a sequence's log-probs fit where "
            "they are",
            "look at one sequence for the first token at which both sides differ",
            settled=lambda evidence: _at_their_place(evidence) < IN_PLACE,
        ),
    )

    def found(self, evidence: Evidence) -> Found | None:
        own = evidence.gap
        if own < 0.1:
            return None
        step = (np.diff(evidence.sequence) == 0) & (np.diff(evidence.position) == 1)
        if step.sum() < 16:
            return None
        trainer, sampler = evidence.trainer, evidence.sampler
        moved = {
            "next": np.abs(trainer[1:] - sampler[:-1])[step],
            "previous": np.abs(trainer[:-1] - sampler[1:])[step],
        }
        which = min(moved, key=lambda name: float(np.median(moved[name])))
        left = float(np.minimum(moved[which], 3).mean())
        size = np.minimum(evidence.size, 3)
        ratio = left / max(min(float(size[1:][step].mean()), float(size[:-1][step].mean())), 1e-12)
        if ratio > 0.6:
            return None
        at, of_trainer = ("t - 1", "previous") if which == "next" else ("t + 1", "next")
        said = (
            f"mean |d| is {own:.2g} nats, and only {left:.2g} where the trainer's log-prob at index t is compared with "
            f"the sampler's at index {at}: the sampler's are those of the {which} token, or the trainer's those of "
            f"the {of_trainer}"
        )
        after = _moved(evidence, step, back=which == "next")
        if which == "previous" and (early := _early_trainer(evidence, step)) is not None:
            said += (
                "; unless its dropout is on, the trainer's are those of the next token: of one token after the same "
                "context they differ from sample to sample, and the sampler's do not"
            )
            after = early
        error = float(moved[which].std() / np.sqrt(step.sum()) / own)
        sure = ratio < SHIFTED and _at_their_place(evidence) < IN_PLACE
        return Found(ratio, error, 0.6, (0.6 - ratio) * 10, said, after, surest=1.0 if sure else 0.5)


IN_PLACE = 0.05
"""Share of the tokens for which the neighbour's log-prob is another that fit their own, from which on not all moved."""


def _at_their_place(evidence: Evidence) -> float:
    """Of the tokens for which neither neighbour's log-prob would do, in sequences that do not agree as a whole, the
    share that agree with their own.
    """
    inside = np.flatnonzero((np.diff(evidence.sequence) == 0) & (np.diff(evidence.position) == 1))
    inside = inside[1:][np.diff(inside) == 1]  # tokens with a neighbour on both sides
    near = np.minimum(*(np.abs(evidence.trainer[inside] - evidence.trainer[inside + by]) for by in (-1, 1)))
    apart = inside[near > 0.1]
    agree, of = evidence.size[apart] < 0.01, evidence.sequence[apart]
    agree = agree[np.isin(of, of[~agree])]
    return float(agree.mean()) if len(agree) else 0.0


def _zeros(evidence: Evidence) -> Booleans:
    """Exact zeros of the sampler where the trainer's log-prob is far below."""
    return (evidence.sampler == 0) & (evidence.trainer < UNLIKELY)


LIKELY, UNLIKELY = (-0.7, -0.02), -1.5
"""Log-probs of the trainer of likely tokens, from and to, and up to which one is unlikely."""


def zeros_of_truncation(evidence: Evidence) -> bool:
    """Whether the sampler's exact zeros are of tokens that a truncation left alone, which makes them probabilities.

    Placeholders, and values of other tokens, stand at likely and unlikely tokens alike.
    """
    zero, trainer = evidence.sampler == 0, evidence.trainer
    likely, unlikely = zero[(trainer > LIKELY[0]) & (trainer < LIKELY[1])], zero[trainer < UNLIKELY]
    return likely.sum() >= 8 and likely.mean() > 4 * (unlikely.mean() if len(unlikely) else 0.0)


ROWS, ELSEWHERE = 8, 0.02
"""Sequences of which each has a 0 at one index, for it to be filled in there, and share of zeros elsewhere up to which
no truncation leaves them."""


def _zeros_of_one_place(evidence: Evidence) -> Booleans:
    """[N] exact zeros at an index of the completions at which every sequence has one, whatever the token, and hardly
    one has any elsewhere.

    A truncation to half of the mass or more leaves no token alone that the trainer gives less.  Several such indices in
    a row, or one beside masked tokens, are of tokens that the model did not sample, and the last one is of end tokens
    that were appended.
    """
    zero, place = evidence.sampler == 0, evidence.position
    if not zero.any():
        return zero
    times, zeros, ends = np.bincount(place), np.bincount(place, zero), np.bincount(place, evidence.last)
    least = np.zeros(len(times))
    np.minimum.at(least, place, evidence.trainer)
    filled = (times >= ROWS) & (zeros == times) & (ends < 0.5 * times)
    filled &= np.bincount(place, evidence.beside_masked) < 0.5 * times
    beside = np.r_[False, filled[:-1]] | np.r_[filled[1:], False]
    here = (filled & ~beside & (least < LIKELY[0]))[place]
    return here & bool(zero[~here].mean() < ELSEWHERE) if not here.all() else ~here


def _in_runs(evidence: Evidence, zeros: Booleans) -> bool:
    """Whether most zeros stand beside another."""
    return float((_neighbours(evidence, evidence.sampler == 0) > 0)[zeros].mean()) > 0.6


def _at_edges(evidence: Evidence, zeros: Booleans) -> bool:
    """Whether most zeros stand beside a masked token, as under a mask that is shifted by one."""
    return float(evidence.beside_masked[zeros].mean()) > 0.8 and float(evidence.beside_masked.mean()) < 0.4


UNCERTAIN = -0.05
"""The trainer's log-prob (nats) below which a token was not certain."""


NOT_SCORED = ", as where old_logp was never filled: log what the trainer computes"
"""The end of the evidence where the one number is the trainer's."""


def constant(evidence: Evidence, side: str = "sampler") -> Found | None:
    """One side's value is the same at every token of nearly every sequence, where the other's is not."""
    filled, other = evidence.sampler, evidence.trainer
    if side == "trainer":
        filled, other = other, filled
    rows = [evidence.of_sequence(at) for at in range(len(evidence.records))]
    rows = [row for row in rows if (other[row] < UNCERTAIN).sum() >= 4]
    same = [row for row in rows if np.ptp(filled[row]) == 0 and np.ptp(other[row]) > 0.1]
    if len(same) < max(2, 0.9 * len(rows)):
        return None
    values = {float(filled[row][0]) for row in same}
    # Where the mean or the sum over the sequence fits, that is another cause, and precedes this one.
    what = f"it is {min(values) + 0.0:g} everywhere" if len(values) == 1 else "an average or a sum, perhaps"
    of_zeros = side == "sampler" and values == {0.0}
    share = len(same) / len(rows)
    return Found(
        share,
        float(np.sqrt(share * (1 - share) / len(rows))),
        0.9,
        3.0,
        f"in {len(same)} of {len(rows)} sequences with uncertain tokens the {side}'s value is the same at every token "
        f"({what}), so it is no log-prob of single tokens" + NOT_SCORED * (side == "trainer"),
        share=1.0,
        surest=0.5 if of_zeros and _may_be_greedy(evidence) else 1.0,
    )


def one_for_each(evidence: Evidence, values: Floats) -> bool:
    """Whether most sequences of several tokens have one value at all of them."""
    starts = np.flatnonzero(np.diff(evidence.sequence, prepend=-1))
    several = np.diff(np.append(starts, len(evidence))) > 1
    same = np.maximum.reduceat(values, starts) == np.minimum.reduceat(values, starts)
    return bool(several.any() and same[several].mean() > 0.5)


def _with_neighbours(evidence: Evidence, zeros: Booleans) -> Booleans:
    """The whole runs of exact zeros that these are in."""
    exact = evidence.sampler == 0
    begins = np.ones(len(evidence), bool)
    begins[1:] = (exact[1:] != exact[:-1]) | (np.diff(evidence.sequence) != 0) | (np.diff(evidence.position) != 1)
    run = begins.cumsum() - 1
    return exact & np.isin(run, run[zeros])


def _neighbours(evidence: Evidence, which: Booleans) -> Floats:
    """[N], the number of the two neighbours in the sequence that are in ``which``."""
    step = (np.diff(evidence.sequence) == 0) & (np.diff(evidence.position) == 1)
    count = np.zeros(len(evidence))
    count[1:] += which[:-1] & step
    count[:-1] += which[1:] & step
    return count


ABOVE = 0.3
"""|d| (nats) from which a value above 0 is a placeholder."""


ROUNDED = 5e-5
"""Log-prob up to which rounding may have raised that of a token that is certain."""


def _placeholders(evidence: Evidence) -> tuple[Booleans, float]:
    """Tokens with a value that stands for none, and the commonest such value."""
    sampler = evidence.sampler
    impossible = (sampler <= IMPOSSIBLE) & (evidence.trainer > sampler / 2)
    if evidence.unrelated and len(np.unique(sampler[impossible])) > max(FEWEST, 0.5 * impossible.sum()):
        impossible[:] = False  # log-probs of other tokens, or of another model
    values, inverse, times = np.unique(sampler, return_inverse=True, return_counts=True)
    # Beside the trainer's, values above 0 are no placeholders: an open question asks about them.
    above = (sampler > ROUNDED) & (np.nan_to_num(evidence.size, posinf=1e3) > ABOVE)
    odd = ~np.isfinite(sampler) | above | impossible
    far = np.bincount(inverse, np.nan_to_num(evidence.size, posinf=1e3) > 0.5) / times
    mean = np.bincount(inverse, evidence.trainer) / times
    spread = np.sqrt(np.bincount(inverse, np.square(evidence.trainer - mean[inverse])) / times)
    ends = np.bincount(inverse, evidence.last) / times
    several = np.bincount(np.unique(np.stack([inverse, evidence.sequence]), axis=1)[0], minlength=len(values)) > 1
    tokens = np.bincount(np.unique(np.stack([inverse, evidence.ids]), axis=1)[0], minlength=len(values))
    # Samples of one prompt share contexts, and log-probs with them; then the trainer's repeat, too, unless its weights
    # moved while the sampler's did not.  Either way the token is the same.
    written = np.abs(values - values.round(1)) < 1e-6  # nearer to the trainer's, if it is an ordinary one
    repeated = (times >= max(FEWEST, 0.002 * len(sampler))) & (spread > 0.3) & (ends < 0.9)
    repeated &= far > np.where(written & (times >= WRITTEN), 0.3, 0.7)
    repeated &= (tokens > 1) & several  # a value of one sequence may be its mean
    # Few numbers are left to bf16 values, which return by chance; and of other tokens any value is far off.
    if not evidence.as_logged or on_a_grid(sampler) or evidence.unrelated:
        repeated[:] = False
    repeated &= values < -1e-6
    odd |= repeated[inverse]
    chosen = sampler[odd]
    if not len(chosen):
        return odd, 0.0
    which, count = np.unique(chosen, return_counts=True)
    return odd, float(which[count.argmax()])


def _moved(evidence: Evidence, step: Booleans, back: bool) -> Evidence:
    """Each token beside the sampler's log-prob of its neighbour."""
    shifted = evidence.sampler.copy()
    known = np.zeros(len(evidence), bool)
    if back:
        shifted[1:][step] = evidence.sampler[:-1][step]
        known[1:] = step
    else:
        shifted[:-1][step] = evidence.sampler[1:][step]
        known[:-1] = step
    return evidence.explained(shifted - evidence.sampler).keep(known)


def _early_trainer(evidence: Evidence, step: Booleans) -> Evidence | None:
    """Each token beside the trainer's numbers of its own, which are logged one token early; None: nothing says so.

    Both sides score one token after one context once for each sample.  If the trainer's log-probs of it do not agree as
    they are logged, and do where they are moved by one token, or no such token is left, they are taken to be early.
    """
    spread, other = evidence.same_context.trainer, evidence.same_context.sampler
    if not len(spread) or not spread.mean() > max(SAME, 5 * other.mean()):
        return None
    moved = dataclasses.replace(evidence, records=[_one_later(record) for record in evidence.records])
    left = moved.same_context.trainer
    if len(left) and not left.mean() < 0.1 * spread.mean():
        return None
    own = np.r_[False, step]
    trainer, entropy = np.roll(evidence.trainer, 1), evidence.entropy
    if entropy is not None:  # logged one token early, too, or in its place
        surprisal = -trainer[own]
        entropy = max(np.roll(entropy, 1), entropy, key=lambda one: _correlation(surprisal, one[own]))
    return dataclasses.replace(moved, trainer=trainer, entropy=entropy).keep(own)


def _correlation(one: Floats, other: Floats) -> float:
    both = np.isfinite(one) & np.isfinite(other)
    return float(np.corrcoef(one[both], other[both])[0, 1]) if both.sum() > 1 else 0.0


def _one_later(record: Record) -> Record:
    """With the trainer's log-probs one token later, NaN at the first."""

    def later(values: Floats) -> Floats:
        return np.concatenate([[np.nan], values[:-1]])

    logp = record.logp if record.logp is None else later(record.logp)
    return dataclasses.replace(record, old_logp=later(record.old_logp), logp=logp)
