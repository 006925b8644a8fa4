"""``Evidence``: the tokens of a sample of sequences as flat arrays, and the statistics that causes are told by."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offcorr.diagnose.record import Floats, Integers, Record

Booleans = NDArray[np.bool_]

SAME = 5e-5
"""Mean |d| (nats) up to which two log-probs are the same; an fp32 engine has 1e-6."""

UNRELATED = 0.3
"""Correlation of the two log-probs below which they are not of two policies over the same tokens."""

CERTAIN = 0.9
NEARLY_CERTAIN = float(np.log(CERTAIN))
"""Probability and log-prob of a token from which a distribution is nearly that token."""

LARGEST = 50.0
"""Bound on |d| (nats) before e^d is taken."""


class Estimate(NamedTuple):
    """An estimated number and its standard error."""

    value: float
    error: float

    @property
    def z(self) -> float:
        """Standard errors away from 0."""
        return self.value / self.error if self.error > 0 else float(np.sign(self.value)) * np.inf


def mean(values: Floats, least: float = 0.0) -> Estimate:
    """The mean and its standard error, which is ``least`` at least."""
    if len(values) == 0:
        return Estimate(np.nan, np.nan)
    return Estimate(float(values.mean()), max(float(values.std() / np.sqrt(len(values))), least))


def mean_by_sequence(values: Floats, sequence: Integers) -> Estimate:
    """The mean over tokens, NaN left out, and its standard error, in which whole sequences are drawn independently."""
    known = np.isfinite(values)
    if not known.any():
        return Estimate(0.0, np.nan)
    average = float(values[known].mean())
    _, same = np.unique(sequence[known], return_inverse=True)
    if same.max() == 0:  # one sequence: its tokens
        return mean(values[known])
    off = np.bincount(same, values[known] - average)
    return Estimate(average, float(np.sqrt((off**2).sum() * len(off) / max(len(off) - 1, 1)) / known.sum()))


class SameContext(NamedTuple):
    """Spreads of the trainer's and of the sampler's log-probs, as logged, of one token after one prompt and prefix.

    They are in units of 1 - p + .01, as noise on the logits is.

    Args:
        trainer, sampler: the distance of each log-prob from the mean of its context.
        now: that of the trainer's current ones (``logp``), for the tokens that have it.
        paired: of each token with p below .95, whether the trainer gave another sample exactly the same.
    """

    trainer: Floats
    sampler: Floats
    now: Floats
    paired: Booleans


class Aside(NamedTuple):
    """Tokens that were sampled, and whose log-prob of the sampler is not known.

    Args:
        trainer, entropy, sequence: [M] as in ``Evidence``; no entropy is NaN.
    """

    trainer: Floats = np.empty(0)
    entropy: Floats = np.empty(0)
    sequence: Integers = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Evidence:
    """N tokens that the model sampled, of all sequences one after the other; d = trainer - sampler.

    Args:
        records: the sequences.
        sampler: [N] log-probs (nats) as the sampler reported them.
        trainer: [N] the trainer's, under the weights that it takes for the sampler's.
        entropy: [N] of the trainer's distributions; NaN: not logged of this token; None: of none.
        ids: [N] token ids.
        sequence: [N] index of the token's record.
        position: [N] index of the token in its completion.
        floor: mean |d| (nats) up to which nothing is to be explained: that of one set of weights scored twice, or what
            was left by the approximate removal of a cause.
        balanced: whether the surprisal balance is still to be explained.
        whole: the tokens that these were chosen from by the sign of d, so that it and the mean of d say nothing; None:
            they were not.
        aside: further sampled tokens, whose log-prob of the sampler is not known.  They count in ``balance``: it may
            be known of the likely tokens alone.
        ageless: the versions say nothing of d: sequences of the same age agree.
        newer_agree: sequences of newer weights, which are not among these, agree.
        shrunk: what rounding may leave was taken off each |d|, so that most tokens agree whatever the rest comes from.
    """

    records: Sequence[Record]
    sampler: Floats
    trainer: Floats
    entropy: Floats | None
    ids: Integers
    sequence: Integers
    position: Integers
    floor: float = SAME
    balanced: bool = True
    whole: Evidence | None = None
    aside: Aside = Aside()
    ageless: bool = False
    newer_agree: bool = False
    shrunk: bool = False

    @classmethod
    def of(cls, records: Sequence[Record]) -> Evidence:
        """The tokens whose mask is set and that the trainer scored; the sampler's value may be any number.

        >>> one = Record.of({"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1, -2], "logp": [-1, -3]})
        >>> Evidence.of([one]).d.tolist()
        [0.0, -1.0]
        """
        chosen = [_valid(record) for record in records]

        def joined(name: str) -> Any:
            parts = [getattr(record, name)[kept] for record, kept in zip(records, chosen, strict=True)]
            return np.concatenate(parts) if parts else np.empty(0)

        entropies = [
            np.full(kept.sum(), np.nan) if record.entropy is None else record.entropy[kept]
            for record, kept in zip(records, chosen, strict=True)
        ]
        logged = any(np.isfinite(one).any() for one in entropies)
        lengths = [int(kept.sum()) for kept in chosen]
        return cls(
            records,
            joined("rollout_logp"),
            joined("old_logp"),
            np.concatenate(entropies) if logged else None,
            joined("completion_ids").astype(np.int64),
            np.repeat(np.arange(len(records)), lengths),
            np.concatenate([np.flatnonzero(kept) for kept in chosen]) if chosen else np.empty(0, np.int64),
            aside=_unscored(records),
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def without_values(self, which: Booleans) -> Evidence:
        """Without the values of the other tokens, which were sampled all the same."""
        entropy = np.full(len(self), np.nan) if self.entropy is None else self.entropy
        known = ~which & np.isfinite(entropy)
        added = (self.trainer[known], entropy[known], self.sequence[known])
        aside = Aside(*(np.concatenate(both) for both in zip(self.aside, added, strict=True)))
        return dataclasses.replace(self.keep(which), aside=aside)

    def keep(self, which: Booleans) -> Evidence:
        """Without the other tokens."""
        columns = {name: getattr(self, name) for name in ("sampler", "trainer", "ids", "sequence", "position")}
        entropy = None if self.entropy is None else self.entropy[which]
        kept = {name: column[which] for name, column in columns.items()}
        return dataclasses.replace(self, **kept, entropy=entropy)

    def explained(self, part: Floats) -> Evidence:
        """The same tokens with a part of d taken away, from the sampler's side."""
        return dataclasses.replace(self, sampler=self.sampler + part)

    def with_floor(self, floor: float) -> Evidence:
        """With a higher floor."""
        return dataclasses.replace(self, floor=max(self.floor, floor))

    def unbalanced(self) -> Evidence:
        """With a surprisal balance that is explained."""
        return dataclasses.replace(self, balanced=False)

    def selection(self, which: Booleans) -> Evidence:
        """Without the other tokens, chosen by the sign of d."""
        return dataclasses.replace(self.keep(which), whole=self)

    @property
    def selected(self) -> bool:
        """Whether the tokens were chosen by the sign of d."""
        return self.whole is not None

    # -- one number per token --------------------------------------------------------------------------------

    @cached_property
    def d(self) -> Floats:
        """[N] log-ratio of the trainer to the sampler."""
        return self.trainer - self.sampler

    @cached_property
    def size(self) -> Floats:
        """[N] |d|."""
        return np.abs(self.d)

    @cached_property
    def ratio(self) -> Floats:
        """[N] e^d."""
        return np.exp(np.clip(self.d, -LARGEST, LARGEST))

    @cached_property
    def relative(self) -> Floats:
        """[N] |d| over .03 + 1 - p: where a token is nearly certain, every cause leaves little of d."""
        return self.size / (0.03 + 1 - np.exp(np.minimum(self.trainer, 0)))

    @cached_property
    def seen(self) -> Booleans:
        """[N] whether the token stands in the prompt or earlier in the completion."""
        found = []
        for at, record in enumerate(self.records):
            prompt, completion = record.prompt_ids, record.completion_ids
            both = np.concatenate([prompt, completion])
            _, first, inverse = np.unique(both, return_index=True, return_inverse=True)
            before = first[inverse] < np.arange(len(both))
            found.append(before[len(prompt) :][self.position[self.of_sequence(at)]])
        return np.concatenate(found) if found else np.empty(0, bool)

    def of_sequence(self, at: int) -> slice:
        """The tokens of one record."""
        return slice(*np.searchsorted(self.sequence, [at, at + 1]))

    @cached_property
    def last(self) -> Booleans:
        """[N] whether the token ends its completion."""
        lengths = np.array([len(record) for record in self.records])
        return self.position == lengths[self.sequence] - 1

    @cached_property
    def with_entropy(self) -> Evidence | None:
        """The tokens whose entropy is logged; None: fewer than 64 are."""
        if self.entropy is None:
            return None
        known = np.isfinite(self.entropy)
        return None if known.sum() < min(64, len(self)) else self if known.all() else self.keep(known)

    @cached_property
    def as_logged(self) -> bool:
        """Whether the sampler's values are those of the dump, with nothing taken away but whole tokens."""
        return np.array_equal(self.sampler, self._logged("rollout_logp"), equal_nan=True)

    @cached_property
    def untouched(self) -> bool:
        """Whether the values of both sides are those of the dump."""
        return self.as_logged and np.array_equal(self.trainer, self._logged("old_logp"), equal_nan=True)

    @cached_property
    def nearly_greedy(self) -> bool:
        """Whether the sampler gives most tokens of which the trainer is not certain nearly all of the probability."""
        values = self.sampler[self.trainer < NEARLY_CERTAIN]
        return bool(len(values) and ((values > NEARLY_CERTAIN) & (values <= 0)).mean() > 0.5)

    @cached_property
    def copied(self) -> bool:
        """Whether the trainer's log-probs are the sampler's, number for number, and vary."""
        return np.array_equal(self.trainer, self.sampler) and len(np.unique(self.trainer)) > 1

    @cached_property
    def unrelated(self) -> bool:
        """Whether the two log-probs of a token have next to nothing to do with each other, as of other tokens."""
        if self.gap < 0.5 or len(self) < 64 or self.selected:
            return False
        trainer, sampler = (np.clip(side, -LARGEST, 0) for side in (self.trainer, self.sampler))
        return bool(min(trainer.std(), sampler.std()) > 0 and np.corrcoef(trainer, sampler)[0, 1] < UNRELATED)

    @cached_property
    def beside_masked(self) -> Booleans:
        """[N] whether the token before or after it in the completion is masked out."""
        found = []
        for at, record in enumerate(self.records):
            sampled = np.ones(len(record), bool) if record.mask is None else record.mask
            before, after = np.r_[True, sampled[:-1]], np.r_[sampled[1:], True]
            found.append(~(before & after)[self.position[self.of_sequence(at)]])
        return np.concatenate(found) if found else np.empty(0, bool)

    # -- tests -----------------------------------------------------------------------------------------------

    @cached_property
    def gap(self) -> float:
        """Mean |d|."""
        return float(self.size.mean()) if len(self) else 0.0

    @cached_property
    def moved(self) -> float:
        """Mean |logp - old_logp| (nats): how far the updates on this batch moved the trainer; 0 where not logged."""
        return mean_by_sequence(self._updates, self.sequence).value

    @cached_property
    def updates(self) -> Evidence | None:
        """``logp`` as the trainer's log-probs, beside ``old_logp`` as the sampler's; None: ``logp`` is not logged."""
        logged = [
            dataclasses.replace(one, rollout_logp=one.old_logp, old_logp=one.logp, logp=None)
            for one in self.records
            if one.logp is not None
        ]
        return Evidence.of(logged) if logged else None

    @property
    def moved_error(self) -> float:
        """The standard error of ``moved``."""
        return mean_by_sequence(self._updates, self.sequence).error

    def moved_of(self, sequences: Booleans) -> Estimate | None:
        """``moved`` over the tokens of some sequences; None: they have fewer than 32 with both log-probs."""
        of_them = np.isfinite(self._updates) & sequences[self.sequence]
        return mean_by_sequence(self._updates[of_them], self.sequence[of_them]) if of_them.sum() >= 32 else None

    @property
    def moved_most(self) -> float:
        """The largest |logp - old_logp|."""
        return float(np.nanmax(self._updates)) if np.isfinite(self._updates).any() else 0.0

    @cached_property
    def _updates(self) -> Floats:
        """[N] |logp - old_logp|; NaN where not logged."""
        now = self.now
        return np.abs(np.where(np.isfinite(now), now, np.nan) - self._logged("old_logp"))

    @cached_property
    def now(self) -> Floats:
        """[N] ``logp``, the trainer's log-probs after its updates; NaN where not logged."""
        return self._logged("logp")

    def _logged(self, name: str) -> Floats:
        """[N] a log-prob as the dump has it."""
        parts = [
            np.full(self.of_sequence(at).stop - self.of_sequence(at).start, np.nan)
            if getattr(record, name) is None
            else getattr(record, name)[self.position[self.of_sequence(at)]]
            for at, record in enumerate(self.records)
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    @cached_property
    def ratio_identity(self) -> Estimate:
        """Mean e^d, which is 1 for any two policies on the samples of the second."""
        return mean(self.ratio)

    @cached_property
    def balance(self) -> Estimate | None:
        """Mean -trainer - entropy, which is 0 where the tokens were drawn from the trainer's distributions.

        Given their contexts the terms are uncorrelated.  Their variance is that of the sample, or what it is at
        least in a distribution of two outcomes: the rare tokens that it comes from may be absent from the sample.
        """
        known = self.with_entropy
        if known is None or known.entropy is None:
            return None
        also = np.isin(self.aside.sequence, self.sequence)
        trainer = np.concatenate([known.trainer, self.aside.trainer[also]])
        return surprisal_balance(trainer, np.concatenate([known.entropy, self.aside.entropy[also]]))

    @cached_property
    def by_token_id(self) -> Estimate:
        """Split-half correlation of the mean d per token id: drift that the contexts share, against noise.

        Halves are of sequences; only ids with 3 tokens in both count, weighted by the smaller number.
        """
        group = np.array([zlib.crc32(record.prompt_ids.tobytes()) for record in self.records])[self.sequence]
        order = np.unique(group, return_inverse=True)[1]
        half = order % 2 if order.max(initial=0) else self.sequence % 2
        return _split_half(self.ids, self.d, half)

    @cached_property
    def weights(self) -> Integers:
        """[sequences] equal where the same weights sampled, as far as the version, or else the step, says."""
        return np.unique([_weights(record) for record in self.records], return_inverse=True)[1].astype(np.int64)

    @cached_property
    def prefix(self) -> Integers:
        """[N] equal where tokens follow the same prompt and prefix under the same weights; -1 beyond ``DEEPEST``."""
        before = np.concatenate([_heads(self.records)[:, None], _contexts(self.records)[:, :-1]], 1)
        early = self.position <= DEEPEST
        found = np.full(len(self), -1)
        found[early] = np.unique(before[self.sequence[early], self.position[early]], return_inverse=True)[1]
        return found

    @cached_property
    def once(self) -> Booleans:
        """[N] one token of each id after one prompt and prefix; of those too deep to compare, those of one of the
        sequences that are equal.
        """
        rows = [(one.prompt_ids.tobytes(), one.completion_ids.tobytes()) for one in self.records]
        first = np.zeros(len(rows), bool)
        first[list({row: at for at, row in reversed(list(enumerate(rows)))}.values())] = True
        once = first[self.sequence] & (self.prefix < 0)
        early = np.flatnonzero(self.prefix >= 0)
        pairs = np.stack([self.prefix[early], self.ids[early]])
        once[early[np.unique(pairs, axis=1, return_index=True)[1]]] = True
        return once

    @cached_property
    def same_context(self) -> SameContext:
        """The log-probs of one token after one prompt and prefix, which both sides score once for each sample.

        Samples of one prompt share their beginnings.  Samples of other weights on either side, by version and step, are
        apart.
        """
        if self.whole is not None:
            return self.whole.same_context
        early = self.position <= DEEPEST
        rows, columns = self.sequence[early], self.position[early]
        _, context, count = np.unique(_contexts(self.records)[rows, columns], return_inverse=True, return_counts=True)
        shared = count[context] > 1
        rows, columns, context = rows[shared], columns[shared], context[shared]
        logged = [_first([getattr(record, name) for record in self.records]) for name in ("old_logp", "rollout_logp")]
        trainer, sampler = (column[rows, columns] for column in logged)
        doubt = 1.01 - np.exp(np.minimum(trainer, 0))

        def spread(logp: Floats) -> Floats:
            centre = np.bincount(context, logp, minlength=len(count)) / count
            return np.asarray(np.abs(logp - centre[context]) / doubt)

        order = np.lexsort((trainer, context))
        equal = (np.diff(context[order]) == 0) & (np.abs(np.diff(trainer[order])) < 1e-6)
        paired = np.zeros(len(order), bool)
        paired[order[:-1]] |= equal
        paired[order[1:]] |= equal
        now = _first([np.full(len(one.old_logp), np.nan) if one.logp is None else one.logp for one in self.records])
        current = spread(now[rows, columns])
        known = np.isfinite(doubt)
        return SameContext(
            spread(trainer)[known], spread(sampler)[known], current[np.isfinite(current)], paired[doubt > 0.06]
        )


def _first(columns: Sequence[Any]) -> Any:
    """[sequences, DEEPEST + 1] the beginnings of columns, with 0 behind the end of shorter ones."""
    values = np.zeros((len(columns), DEEPEST + 1), columns[0].dtype if columns else float)
    for row, column in enumerate(columns):
        values[row, : len(column)] = column[: DEEPEST + 1]
    return values


def _contexts(records: Sequence[Record]) -> NDArray[np.uint64]:
    """[sequences, DEEPEST + 1] a hash of each token with its prompt and prefix, and the weights that scored it."""
    hashed = _heads(records)
    found = np.empty((len(records), DEEPEST + 1), np.uint64)
    for place, ids in enumerate(_first([record.completion_ids for record in records]).astype(np.uint64).T):
        hashed = (hashed ^ (ids + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(29)
        found[:, place] = hashed
    return found


def _heads(records: Sequence[Record]) -> NDArray[np.uint64]:
    """[sequences] a hash of each prompt and of the weights that scored it."""
    return np.frombuffer(b"".join(_head(record) for record in records), np.uint64).copy()


def _head(record: Record) -> bytes:
    """A hash of the prompt and of the weights on both sides: the sampler's version, and the trainer's step.

    The trainer's weights may move from step to step while those that sampled stay (a sampler that lags).  Several runs
    may have been dumped, to folders of their own.
    """
    weights = f"{_weights(record)}/{record.trainer_version if record.step is None else record.step}"
    return hashlib.blake2b(record.prompt_ids.tobytes() + weights.encode(), digest_size=8).digest()


def _weights(record: Record) -> str:
    versions = np.asarray([] if record.rollout_version is None else record.rollout_version)
    version = versions.flat[0] if versions.size else record.step
    return f"{version} of {record.where.rpartition('/')[0]}"


DEEPEST = 32
"""Positions up to which prefixes are compared; beyond, samples that still agree are copies."""


def surprisal_balance(trainer: Floats, entropy: Floats) -> Estimate:
    """Mean of -trainer - entropy."""
    value = mean(-trainer - entropy)
    least = np.where(entropy < 1, entropy * (1 - np.log(np.maximum(entropy, 1e-6))), 1).mean() / max(len(entropy), 1)
    return Estimate(value.value, max(value.error, float(np.sqrt(least))))


def _valid(record: Record) -> Booleans:
    return _sampled(record) & ~np.isnan(record.rollout_logp)


def _sampled(record: Record) -> Booleans:
    """Whether the mask is set and the trainer scored the token."""
    scored = np.isfinite(record.old_logp)
    return scored if record.mask is None else scored & record.mask


def _unscored(records: Sequence[Record]) -> Aside:
    """The tokens that the trainer scored, with their entropy, and the sampler did not."""
    found = [Aside()]
    for at, record in enumerate(records):
        if record.entropy is not None:
            which = _sampled(record) & np.isnan(record.rollout_logp) & np.isfinite(record.entropy)
            found.append(Aside(record.old_logp[which], record.entropy[which], np.full(which.sum(), at)))
    return Aside(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _split_half(ids: Integers, values: Floats, half: Integers) -> Estimate:
    known, inverse = np.unique(ids, return_inverse=True)
    means, counts = [], []
    for side in (0, 1):
        here = half == side
        count = np.bincount(inverse[here], minlength=len(known))
        total = np.bincount(inverse[here], values[here], minlength=len(known))
        means.append(total / np.maximum(count, 1))
        counts.append(count)
    weight = np.minimum(*counts).astype(float)
    chosen = weight >= 3
    if chosen.sum() < 5:
        return Estimate(np.nan, np.nan)
    weight, first, second = weight[chosen], means[0][chosen], means[1][chosen]
    first, second = first - np.average(first, weights=weight), second - np.average(second, weights=weight)
    spread = np.sqrt((weight * first**2).sum() * (weight * second**2).sum())
    correlation = float((weight * first * second).sum() / spread) if spread else 0.0
    return Estimate(correlation, (1 - correlation**2) / np.sqrt(chosen.sum() - 2))
