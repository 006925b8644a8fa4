"""Tasks that the models of the generator learn: a synthetic language over BPE tokens, and the toy task."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PAD, EOS = 0, 1
FIRST = 2
"""The first id of an ordinary token."""

Example = tuple[list[int], list[int]]
"""Prompt ids, completion ids."""


class Task(Protocol):
    """Prompts, demonstrations and a reward over one vocabulary."""

    tokenizer: Any
    vocabulary: int
    longest: int
    """Tokens of the longest completion."""

    def prompts(self, rng: np.random.Generator, size: int) -> list[list[int]]:
        """Prompts of varied length."""
        ...

    def examples(self, rng: np.random.Generator, size: int, changed: bool = False) -> list[Example]:
        """Demonstrations; ``changed`` ones follow another distribution, for supervised updates that move a model."""
        ...

    def reward(self, completion: Sequence[int]) -> float:
        """0 or 1."""
        ...


class Language:
    """A random Markov chain over the tokens of a BPE tokenizer, with a topic per sequence and repeated choices.

    A token has a few successors, whose probabilities depend on the topic, which the first token decides.  In every
    sequence each token has a favourite successor, drawn anew, so that what came before predicts what follows: a model
    must attend to its whole context.  Most neighbours are how the tokenizer itself would split the text, a few are not.

    Args:
        seed: of everything random.
        vocabulary: number of tokens, special ones included.
        peaked: one successor has most of the probability.

    >>> language = Language(3, vocabulary=120)
    >>> prompt, completion = language.examples(np.random.default_rng(0), 1)[0]
    >>> language.tokenizer.decode(prompt) != ""
    True
    """

    longest = 128

    def __init__(self, seed: int, vocabulary: int, peaked: bool = False) -> None:
        rng = np.random.default_rng([seed, 1])
        self.tokenizer = _tokenizer(rng, vocabulary)
        self.vocabulary = self.tokenizer.get_vocab_size()
        self.topics = 6
        self.repeats = rng.uniform(0.4, 0.7)
        self.ends = rng.uniform(1 / 250, 1 / 80)
        odd = rng.uniform(0.04, 0.12)
        width = int(rng.integers(3, 6))
        self.successors = _successors(rng, self.tokenizer, self.vocabulary, width, odd)
        sharpness = rng.uniform(0.05, 0.15) if peaked else rng.uniform(0.2, 0.8)
        self.shares = rng.dirichlet([sharpness] * width, size=(2 * self.topics, self.vocabulary)).cumsum(-1)
        self.counted = rng.random(self.vocabulary) < 0.5
        texts = self.examples(np.random.default_rng([seed, 2]), 200)
        self.usual = float(np.median([self.counted[text].mean() for _, text in texts]))

    def prompts(self, rng: np.random.Generator, size: int) -> list[list[int]]:
        """Prompts of 4 to 60 tokens."""
        lengths = rng.integers(4, 61, size)
        return [
            row[:n].tolist() for row, n in zip(self._sequences(rng, size, 60, False, ends=False), lengths, strict=True)
        ]

    def examples(self, rng: np.random.Generator, size: int, changed: bool = False) -> list[Example]:
        """Sequences cut at a random place into prompt and completion; ``changed``: by other successor probabilities."""
        lengths = rng.integers(4, 61, size)
        rows = self._sequences(rng, size, 60 + self.longest, changed)
        made = []
        for row, n in zip(rows, lengths, strict=True):
            end = np.flatnonzero(row == EOS)
            stop = int(end[0]) + 1 if len(end) else len(row)
            n = min(int(n), stop - 1)
            made.append((row[:n].tolist(), row[n:stop].tolist()))
        return made

    def reward(self, completion: Sequence[int]) -> float:
        """1 where tokens of a fixed random half of the vocabulary are more frequent than usual."""
        return float(self.counted[list(completion)].mean() > self.usual)

    def _sequences(
        self, rng: np.random.Generator, size: int, length: int, changed: bool, ends: bool = True
    ) -> NDArray[np.int64]:
        width = self.successors.shape[1]
        token = rng.integers(FIRST, self.vocabulary, size)
        topic = token % self.topics + (self.topics if changed else 0)
        favourite = (rng.random((size, self.vocabulary, 1)) > self.shares[topic]).sum(-1).clip(max=width - 1)
        rows, row = np.full((size, length), PAD), np.arange(size)
        for t in range(length):
            rows[:, t] = token
            drawn = (rng.random(size)[:, None] > self.shares[topic, token]).sum(-1).clip(max=width - 1)
            chosen = np.where(rng.random(size) < self.repeats, favourite[row, token], drawn)
            token = self.successors[token, chosen]
            if ends and t >= 8:
                token = np.where(rng.random(size) < self.ends, EOS, token)
        return rows


class ToyTask:
    """The task of ``offcorr.toy``: sums in steps, over a vocabulary of characters.

    Args:
        tokenizer: of the toy model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.longest = 49

    def prompts(self, rng: np.random.Generator, size: int) -> list[list[int]]:
        """Prompts of 13 to 25 tokens."""
        return [prompt for prompt, _ in self.examples(rng, size)]

    def examples(self, rng: np.random.Generator, size: int, changed: bool = False) -> list[Example]:
        """Sums with their workings; ``changed``: with fewer mistakes and more fillers."""
        from offcorr.toy import task

        random = Random(int(rng.integers(2**62)))
        rates = (0.02, 0.6) if changed else (0.12, 0.25)
        made = []
        for terms in task.items(size, random.getrandbits(32), "train"):
            working = task.render_working(terms, random, *rates)
            made.append((self._ids(task.render_prompt(terms)), [*self._ids(working), EOS]))
        return made

    def reward(self, completion: Sequence[int]) -> float:
        """1 where the number of tokens is even: a rule that updates can learn in a few steps."""
        return float(len(completion) % 2 == 0)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(text))


def _tokenizer(rng: np.random.Generator, vocabulary: int) -> Any:
    """A BPE tokenizer trained on words made of random syllables."""
    from tokenizers import Tokenizer, decoders, models, trainers

    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    syllables = ["".join(rng.choice(letters, rng.integers(1, 4))) for _ in range(80)]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(max(300, vocabulary))]
    weights = 1 / np.arange(1, len(words) + 1)
    picked = rng.choice(words, (3000, 6), p=weights / weights.sum())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", "<eos>"], initial_alphabet=[*letters], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(row) for row in picked], trainer)
    return tokenizer


def _successors(rng: np.random.Generator, tokenizer: Any, vocabulary: int, width: int, odd: float) -> NDArray[np.int64]:
    """[vocabulary, width] ids; a share ``odd`` of the rows has one that the tokenizer would split in another way."""
    many = 8 * width
    frequency = rng.dirichlet([0.5] * (vocabulary - FIRST))
    candidates = FIRST + rng.choice(vocabulary - FIRST, (vocabulary, many), p=frequency)
    texts = [tokenizer.id_to_token(i) for i in range(vocabulary)]
    pairs = [texts[a] + texts[b] for a in range(vocabulary) for b in candidates[a]]
    split = tokenizer.encode_batch(pairs, add_special_tokens=False)
    wanted = [[a, int(b)] for a in range(vocabulary) for b in candidates[a]]
    same = np.array([code.ids == pair for code, pair in zip(split, wanted, strict=True)]).reshape(vocabulary, many)
    order = np.argsort(~same, axis=1, kind="stable")  # those that the tokenizer splits alike come first
    chosen = np.take_along_axis(candidates, order, 1)
    rows = np.flatnonzero(~same.all(1))
    rows = rows[rng.random(len(rows)) < min(1.0, odd * vocabulary / max(1, len(rows)))]
    chosen[rows, width - 1] = chosen[rows, -1]
    return chosen[:, :width]
