"""Hypotheses about earlier weights, of which a checkpoint is at hand: who read what with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from offcorr.diagnose.adapters import adapter_alone, has_adapter
from offcorr.diagnose.causes.versions import age
from offcorr.diagnose.hypotheses import Name
from offcorr.diagnose.passes import Before
from offcorr.diagnose.record import Floats, Record

BLOCKS = (1, 16)
"""Tokens of a block of the prefix cache; the last block of a prompt is full only by chance, and read anew."""

PARTS = (0.1, 0.2, 0.35, 0.5, 0.7)
"""Parts of the way from the model's weights to the checkpoint's, at which the sampler's may lie."""

CLEARLY = 0.1
"""Share of the gap by which a change within the sequences has to explain more than the checkpoint throughout."""

EDGE = 3
"""Tokens at the ends of a sequence at which a change of the weights is none within it."""

REACH = 4
"""Tokens by which the place of such a change may be found too late at first."""

Score = Callable[..., list[Floats]]
"""Takes the hypothesis in words, a model, and arguments of ``passes``; returns [T] log-probs of each record."""


def earlier(
    named: str, checkpoint: nn.Module, model: nn.Module, records: Sequence[Record], ours: list[Floats], score: Score
) -> Iterator[tuple[Name, list[Floats]]]:
    """Log-probs of a sampler that had the checkpoint's weights throughout, for the prompt, or up to some token.

    Where the sampler's weights lie between the two, its log-probs do, roughly; so no checkpoint of just the right
    optimizer step is needed.

    Args:
        named: the checkpoint, in words.
        ours: the model's log-probs.
    """
    cause = _cause(model, checkpoint, records)
    words = f"the weights of {named}"
    throughout = score(words, checkpoint)
    yield from _on_the_way(cause, words, ours, throughout)
    for block in BLOCKS:
        words = f"the prompt read with the weights of {named} (prefix cache of {block}-token blocks)"
        places = [max(0, (len(record.prompt_ids) - 1) // block * block) for record in records]
        if any(places):
            cached = score(words, model, before=Before(checkpoint, places))
            yield from _on_the_way("stale_prefix_cache", words, ours, cached)
    for words, first, last, modules in (
        (f"the weights of {named}, then the model's", throughout, ours, (checkpoint, model)),
        (f"the model's weights, then those of {named}", ours, throughout, (model, checkpoint)),
    ):
        changes = [_change(*three) for three in zip(records, first, last, strict=True)]
        within = [EDGE <= at <= len(record) - EDGE for at, record in zip(changes, records, strict=True)]
        either = [
            np.where(np.arange(len(record)) < at, one, other)
            for record, one, other, at in zip(records, first, last, changes, strict=True)
        ]
        alone = min(_far(records, ours), _far(records, throughout))
        if _far(records, either) >= alone - CLEARLY * _far(records, ours):
            continue
        if sum(within) < 0.25 * len(records):  # whole sequences, as in a buffer that holds samples of two ages
            if first is throughout:
                older = sum(at > len(record) / 2 for at, record in zip(changes, records, strict=True))
                yield (cause, f"the weights of {named} in {older} of {len(records)} sequences"), either
        else:
            # The keys and values of the first weights stay, so what follows is not the last weights' own.
            for reach in (REACH, 0):
                begin = [max(0, at - reach) for at in changes]
                places = [len(record.prompt_ids) - 1 + at for record, at in zip(records, begin, strict=True)]
                after = score(words, modules[1], before=Before(modules[0], places))
                if reach:
                    changes = [_change(*four) for four in zip(records, first, after, begin, strict=True)]
            yield ("weights_swapped", words), after


def _cause(model: nn.Module, checkpoint: nn.Module, records: Sequence[Record]) -> str:
    """The cause of a sampler with the checkpoint's weights: a checkpoint that lacks the model's adapter, or has another
    one although the versions of both sides are the same, shows that the adapter was not synced.
    """
    if not adapter_alone(model, checkpoint):
        return "stale_weights"
    unsynced = not has_adapter(checkpoint) or all(age(record) == 0 for record in records)
    return "adapter_not_synced" if unsynced else "stale_weights"


def _on_the_way(
    cause: str, words: str, ours: list[Floats], theirs: list[Floats]
) -> Iterator[tuple[Name, list[Floats]]]:
    yield (cause, words), theirs
    for part in PARTS:
        between = [one + part * (other - one) for one, other in zip(ours, theirs, strict=True)]
        yield (cause, f"{words}, {part:.0%} of the way there"), between


def _change(record: Record, first: Floats, last: Floats, least: int = 0) -> int:
    """The number of tokens, ``least`` or more, that follow ``first``; the rest follows ``last``."""
    off = [np.nan_to_num(np.abs(logp - record.rollout_logp), nan=0.0, posinf=0.0) for logp in (first, last)]
    costs = np.r_[0.0, off[0].cumsum()] + np.r_[off[1][::-1].cumsum()[::-1], 0.0]
    return least + int(costs[least:].argmin())


def _far(records: Sequence[Record], logps: Sequence[Any]) -> float:
    """Sum of |d|."""
    off = [np.abs(logp - record.rollout_logp) for record, logp in zip(records, logps, strict=True)]
    return float(sum(np.nan_to_num(one, nan=0.0, posinf=0.0).sum() for one in off))
