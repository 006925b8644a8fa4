"""``passes``: the logits of sequences, in batches and pieces that bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.diagnose.record import Integers, Record

PIECE = 2**29
"""Bytes of the arrays of one piece of a batch, about, each of [tokens, vocabulary] numbers."""

COPIES = 24
"""Bytes per number of such an array: logits, log-probs, probabilities, and what sorting them takes."""

ROWS = 16
"""Sequences of a batch, at most."""


@dataclass(frozen=True)
class Before:
    """Other weights that read the first tokens of each sequence; their keys and values stay.

    Args:
        model: with these weights.
        places: number of tokens, prompt included, that it reads of each record.
    """

    model: nn.Module
    places: Sequence[int]


def passes(
    model: nn.Module,
    records: Sequence[Record],
    *,
    training: bool = False,
    cache: Callable[[int], Any] | None = None,
    before: Before | None = None,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """The logits of every token of the completions, a piece at a time, as the model gives them.

    Sequences whose prompts have one length are read together; a sequence that is too long for one pass is read in
    pieces, by itself.

    Args:
        model: in whatever mode; its modules are in the mode that they were in afterwards.
        training: the mode of the passes.
        cache: makes an empty cache from the length of the prompt, which is then read first, by itself.
        before: what reads the first tokens in place of the model.

    Yields:
        number of a record, place of the first token in its completion, logits [t, V] (float32), token ids [t].

    Raises:
        ValueError: a prompt is empty, a token id lies outside the vocabulary, or keys and values are needed and the
            model keeps none.
    """
    vocabulary: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr, assignment]
    rows = [_ids(record, vocabulary) for record in records]
    size = max(1, PIECE // (COPIES * vocabulary))
    other = model if before is None else before.model
    places = [0] * len(records) if before is None else before.places
    with _mode(model, training), _mode(other, training):
        for batch in _batches(records, places, size):
            prompt = len(records[batch[0]].prompt_ids)
            ids = np.zeros((len(batch), max(len(rows[row]) for row in batch)), dtype=np.int64)
            for at, row in enumerate(batch):
                ids[at, : len(rows[row])] = rows[row]  # a causal model does not look at what follows
            tokens = torch.from_numpy(ids).to(next(model.parameters()).device)
            where, first = records[batch[0]].where, (other, places[batch[0]])
            for start, logits in _pieces(model, tokens, prompt, size, cache, first, where):
                for at, row in enumerate(batch):
                    stop = min(start + logits.shape[1], len(rows[row]) - 1)
                    begin = max(start, prompt - 1)
                    if begin < stop:
                        own = logits[at, begin - start : stop - start].float()
                        yield row, begin - (prompt - 1), own, tokens[at, begin + 1 : stop + 1]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Every module in one mode, and in its own again afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _ids(record: Record, vocabulary: int) -> Integers:
    """Prompt and completion."""
    place = f"{record.where}: " if record.where else ""
    if not len(record.prompt_ids):
        raise ValueError(f"{place}prompt_ids is empty; a model scores what follows one token at least")
    ids = np.concatenate([record.prompt_ids, record.completion_ids])
    if ids.min() < 0 or ids.max() >= vocabulary:
        odd = int(ids[(ids < 0) | (ids >= vocabulary)][0])
        raise ValueError(
            f"{place}token id {odd} is not in the model's vocabulary of {vocabulary}: the dump is of another model"
        )
    return ids


def _batches(records: Sequence[Record], places: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of records with prompts of one length, and one place.

    A batch has at most ``size`` tokens, or is one record.
    """
    lengths = [
        ((len(record.prompt_ids), place), len(record.prompt_ids) + len(record))
        for record, place in zip(records, places, strict=True)
    ]
    batch: list[int] = []
    for row in sorted(range(len(records)), key=lambda row: lengths[row]):
        full = len(batch) == ROWS or (len(batch) + 1) * lengths[row][1] > size
        if batch and (full or lengths[row][0] != lengths[batch[0]][0]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _pieces(
    model: nn.Module,
    tokens: Tensor,
    prompt: int,
    size: int,
    cache: Callable[[int], Any] | None,
    first: tuple[nn.Module, int],
    where: str,
) -> Iterator[tuple[int, Tensor]]:
    """First place and logits [B, t, V] of each piece; ``first``: what reads the first tokens, and how many."""
    other, place = first
    last = tokens.shape[1] - 1
    piece = last if len(tokens) > 1 else size
    cuts = sorted({*range(0, last, piece), last, min(place, last)} | ({prompt} if cache else set()))
    keep = len(cuts) > 2 or cache is not None
    kept: Any = cache(prompt) if cache else None
    for start, stop in pairwise(cuts):
        reader = other if stop <= place else model
        output = reader(input_ids=tokens[:, start:stop], past_key_values=kept, use_cache=keep)
        kept = getattr(output, "past_key_values", None)
        if keep and (kept is None or not kept.get_seq_length()):
            said = "" if cache else f"a sequence of {last + 1} tokens is scored in pieces of {piece}, and "
            advice = "" if cache else ": leave longer sequences out"
            named = f"{where}: " if where else ""
            raise ValueError(f"{named}{said}{type(model).__name__} keeps no keys and values between them{advice}")
        yield start, output.logits
