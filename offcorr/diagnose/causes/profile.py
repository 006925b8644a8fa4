"""The size of d of each token relative to what any cause leaves of it, over the positions of the sequences."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from offcorr.diagnose.evidence import Evidence, mean_by_sequence
from offcorr.diagnose.record import Floats, Integers

EARLY = 8
"""Tokens of a completion that ``Profile.course`` tells from those after them."""

CERTAIN = 0.01
"""1 - p of a token below which no cause leaves enough of d to be seen."""

LEAST_MEAN = 1e-5
"""Mean |d| / (1 - p) below which its course over the positions is that of float32's rounding."""

FITTED = 100_000
"""Tokens that a fade is fitted to, at most."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Tokens of which the trainer is not certain, with |d| / (1 - p): noise on the logits has about one such size.

    Args:
        size: [N] |d| / (1 - p + .01).
        position, sequence: [N] of each token.
        prompt: [sequences] lengths of the prompts.
        ids: [N] of each token.
        prompts: [sequences] equal for equal prompts.
        weights: [sequences] equal where the same weights sampled, and the same scored, as far as is logged.
        gaps: [sequences] mean size; NaN without a token.
    """

    size: Floats
    position: Integers
    sequence: Integers
    ids: Integers
    prompt: Integers
    prompts: Integers
    weights: Integers

    @classmethod
    def of(cls, evidence: Evidence) -> Profile:
        """Of the tokens in ``evidence``."""
        doubt = 1 - np.exp(np.minimum(evidence.trainer, 0))
        chosen = doubt > CERTAIN
        return cls(
            (evidence.size / (doubt + CERTAIN))[chosen],
            evidence.position[chosen],
            evidence.sequence[chosen],
            evidence.ids[chosen],
            np.array([len(record.prompt_ids) for record in evidence.records]),
            np.array([zlib.crc32(record.prompt_ids.tobytes()) for record in evidence.records]),
            _weights(evidence),
        )

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def median(self) -> float:
        """Median size."""
        return float(np.median(self.size)) if len(self) else 0.0

    @cached_property
    def mean(self) -> float:
        """Mean size."""
        return float(self.size.mean()) if len(self) else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean size."""
        return mean_by_sequence(self.size, self.sequence).error

    @property
    def course(self) -> str:
        """The mean size of the first tokens and of those after them, to end a sentence; "" where one of them lacks."""
        early = self.position < EARLY
        if early.all() or not early.any():
            return ""
        first, then = self.size[early].mean(), self.size[~early].mean()
        return f", {first:.2g} in the first {EARLY} tokens of the completions and {then:.2g} after them"

    @property
    def early(self) -> float:
        """The typical size of the first tokens over that of those after them (geometric means); 1 if one lacks."""
        early = self.position < EARLY
        if early.all() or not early.any():
            return 1.0
        return float(np.exp(self.logs[early].mean() - self.logs[~early].mean()))

    @cached_property
    def logs(self) -> Floats:
        """[N] logarithm of the size, of 1 % of the mean at least."""
        return np.log(np.maximum(self.size, 0.01 * self.mean) + 1e-12)

    @cached_property
    def within_ids(self) -> Profile:
        """The same with each size relative to the mean size of its token id (both as logarithms).

        Where text has an order of its own, say digits and then a sign, what rounding makes has it, too.
        """
        _, same = np.unique(self.ids, return_inverse=True)
        return replace(self, size=np.exp(self.logs - (np.bincount(same, self.logs) / np.bincount(same))[same]))

    def level(self, first: int, last: int) -> tuple[float, float, int]:
        """Mean log-size of the positions from ``first`` to ``last``, less that of all; its standard error; tokens."""
        inside = (self.position >= first) & (self.position < last)
        count = int(inside.sum())
        if count < 4:
            return 0.0, np.inf, count
        values = self.logs[inside]
        # Samples of one prompt share their first context, and what differs in it.
        apart = len(np.unique(self.prompts[self.sequence[inside]])) if last == 1 else count
        return float(values.mean() - self.logs.mean()), float(values.std() / np.sqrt(apart) + 1e-9), count

    @cached_property
    def gaps(self) -> Floats:
        """[sequences] mean size; NaN without a token."""
        count = np.bincount(self.sequence, minlength=len(self.prompt))
        total = np.bincount(self.sequence, self.size, minlength=len(self.prompt))
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    @cached_property
    def whole(self) -> tuple[float, float]:
        """Share of the sequences that agree as a whole, and how often their prompts are longer than the others'.

        The second is the probability that the longer prompt of one of each kind, of the same weights, is that of the
        one that agrees; NaN where fewer than a tenth of the sequences are of one kind, the others agree at their
        beginning, or no weights are of both kinds: then the weights decide, and not the prompts.
        """
        known = np.flatnonzero(~np.isnan(self.gaps))
        quiet = self.gaps[known] < 0.02 * self.mean
        early = self.position < 8
        begins = self.size[early & np.isin(self.sequence, known[~quiet])]
        share = float(quiet.mean()) if len(quiet) else 0.0
        if not 0.1 <= share <= 0.9 or len(begins) < 8 or np.median(begins) < 0.02 * self.mean:
            return share, np.nan
        together = self.weights[known[quiet]][:, None] == self.weights[known[~quiet]][None]
        if not together.any():
            return share, np.nan
        longer = np.sign(self.prompt[known[quiet]][:, None] - self.prompt[known[~quiet]][None])[together]
        return share, float(0.5 + 0.5 * longer.mean())

    @cached_property
    def longest_of_batch(self) -> tuple[int, float]:
        """A number of neighbouring rows, and how well "has their longest prompt" tells which sequences agree.

        The second is 0 where ``whole`` has no answer.
        """
        if np.isnan(self.whole[1]):
            return 0, 0.0
        known = ~np.isnan(self.gaps)
        quiet = self.gaps < 0.02 * self.mean
        found = {}
        for size in (2, 4, 8, 16, 32, 64):
            rows = np.arange(len(self.prompt)) // size
            longest = np.zeros(rows[-1] + 1)
            np.maximum.at(longest, rows, self.prompt)
            found[size] = float((quiet == (self.prompt == longest[rows]))[known].mean())
        best = max(found, key=found.__getitem__)
        return best, found[best]

    @cached_property
    def tail(self) -> float:
        """Mean over median size of the tokens that differ at all; two policies leave 1 to 3."""
        differ = self.size[self.size > 0.01 * self.mean]
        return float(differ.mean() / np.median(differ)) if len(differ) else 1.0

    @cached_property
    def smoothness(self) -> float:
        """Correlation of the log-sizes of neighbours in a sequence."""
        if len(self) < 16:
            return 0.0
        together = np.diff(self.sequence) == 0
        if together.sum() < 16 or self.logs.std() == 0:
            return 0.0
        return float(np.corrcoef(self.logs[:-1][together], self.logs[1:][together])[0, 1])

    @cached_property
    def split(self) -> Split:
        """The best change of level within each sequence."""
        gains, levels, places, sharp = [], [], [], []
        for at in range(len(self.prompt)):
            begin, end = np.searchsorted(self.sequence, [at, at + 1])
            x, where = self.logs[begin:end], self.position[begin:end]
            if len(x) < 8:
                continue
            n = np.arange(1, len(x))
            before = x.cumsum()[:-1] / n
            after = (x.sum() - x.cumsum()[:-1]) / (len(x) - n)
            gain = n * (len(x) - n) / len(x) * (before - after) ** 2
            gain[:1] = gain[-1:] = 0
            best = int(gain.argmax())
            near = x[max(0, best - 3) : best + 1].mean() - x[best + 1 : best + 5].mean()
            rise = after[best] - before[best]
            within = np.concatenate([x[: best + 1] - before[best], x[best + 1 :] - after[best]])
            gains.append(gain[best] / max(float(within.var()), 0.3))
            levels.append(rise)
            places.append(where[best + 1])
            sharp.append(-near / rise if rise else 0.0)
        return Split(*map(np.array, (gains, levels, places, sharp)))

    @cached_property
    def common_step(self) -> Step:
        """The best change of level at one position of all sequences, beyond a fade along the completion.

        The fade is a polynomial of the logarithm of the position; the first token is left out, as it has no cache.
        """
        later = np.flatnonzero(self.position > 0)
        chosen = later[:: -(-len(later) // FITTED) or 1]
        chosen = chosen[self.position[chosen].argsort(kind="stable")]
        where, x = self.position[chosen], self.logs[chosen]
        if len(x) < 64:
            return Step(0.0, 0.0, 0)
        along = np.log1p(where)
        fade = np.linalg.qr(np.stack([np.ones_like(along), along, along**2], 1))[0]
        left = x - fade @ (fade.T @ x)
        starts = np.flatnonzero(np.diff(where, prepend=-1))
        starts = starts[(starts >= 8) & (starts <= len(x) - 8) & (where[starts] >= 4)]
        shared = np.square(fade[::-1].cumsum(0)[::-1][starts]).sum(1)
        apart = len(x) - starts - shared  # squared norm of each step without what the fade has of it
        starts, apart = starts[apart > 1], apart[apart > 1]
        if not len(starts):
            return Step(0.0, 0.0, 0)
        rise = left[::-1].cumsum()[::-1][starts] / apart
        gain = rise**2 * apart / max(float(left.var()), 1e-12)
        best = int(gain.argmax())
        return Step(float(gain[best]), float(rise[best]), int(where[starts[best]]))

    @cached_property
    def halves(self) -> tuple[float, float, Floats]:
        """Sequences in two parts, one that agrees and one that does not, among those that have both.

        Returns their share of all sequences with 6 tokens, the share of those in which the part that agrees comes
        first, and the index of the first token of the second part.
        """
        quiet = self.size < 0.01 * self.mean
        whole, first, places = 0, 0, []
        for at in range(len(self.prompt)):
            begin, end = np.searchsorted(self.sequence, [at, at + 1])
            x = quiet[begin:end].astype(float)
            if len(x) < 6:
                continue
            whole += 1
            n = np.arange(1, len(x))
            right = x.cumsum()[:-1] + (len(x) - n) - (x.sum() - x.cumsum()[:-1])  # quiet before and loud after
            best = max((right, len(x) - right), key=lambda one: one.max())
            cut = int(best.argmax()) + 1
            if best.max() >= 0.92 * len(x) and 2 <= cut <= len(x) - 2 and 0.1 < x.mean() < 0.9:
                places.append(self.position[begin + cut])
                first += bool(x[0])
        count = len(places)
        return count / max(whole, 1), first / max(count, 1), np.array(places, dtype=np.float64)


@dataclass(frozen=True)
class Step:
    """A change of level at one position of all sequences.

    Args:
        gain: squared error that it takes away, over the variance.
        rise: of the log-size.
        place: position of the first token after it.
    """

    gain: float
    rise: float
    place: int


@dataclass(frozen=True, eq=False)
class Split:
    """The best change of level in each sequence that has 8 tokens.

    Args:
        gain: squared error that it takes away, over the variance that is left.
        rise: mean log-size after it less before it.
        place: position of the first token after it.
        sharpness: the rise within four tokens over the whole rise; 1 for a step.
    """

    gain: Floats
    rise: Floats
    place: Integers
    sharpness: Floats


def _weights(evidence: Evidence) -> Integers:
    """[sequences] equal where the version of the sampler's weights, and that of the trainer's, or the step, are."""
    of = [one.step if one.trainer_version is None else np.mean(one.trainer_version) for one in evidence.records]
    scored = np.array([-1.0 if one is None else float(one) for one in of])
    both = np.stack([evidence.weights, scored], 1)
    return np.unique(both, axis=0, return_inverse=True)[1].ravel().astype(np.int64)
