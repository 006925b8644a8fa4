"""Hypotheses about a sampler: the log-probs that the sampled tokens have under each, from a model's logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offcorr.diagnose.record import Floats, Integers, Record

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)
TOP_K = (*range(1, 11), 12, 15, 16, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200, 256)
MIN_P = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
REPETITION = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
ADDED = (0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
"""Presence and frequency penalties."""

LIKELIEST = 1024
"""Tokens of a distribution that truncation is looked for among, where they hold enough of the mass."""

Name = tuple[str, str]
"""Id of a cause, and the hypothesis in words."""


def other_prompts(records: Sequence[Record]) -> dict[Name, list[Record]]:
    """Hypotheses about what the sampler read."""

    def changed(rule: Callable[[Any], Any]) -> list[Record]:
        return [dataclasses.replace(record, prompt_ids=rule(record.prompt_ids)) for record in records]

    return {
        ("truncated_prompt", "the later half of the prompt alone"): changed(lambda ids: ids[len(ids) // 2 :]),
        ("chat_template", "the prompt without its first token"): changed(lambda ids: ids[1:] if len(ids) > 1 else ids),
        ("chat_template", "the prompt with its first token twice"): changed(lambda ids: np.r_[ids[:1], ids]),
    }


def without(record: Record, first: int, last: int) -> Record:
    """The record with a prompt that lacks its first and last tokens."""
    ids = record.prompt_ids
    return dataclasses.replace(record, prompt_ids=ids[first : len(ids) - last])


def shared_ends(records: Sequence[Record], most: int) -> tuple[int, int]:
    """The number of first and of last tokens, up to ``most``, that all prompts share and a template may have added.

    >>> rows = [{"prompt_ids": [7, 8, x, 9], "completion_ids": [1], "rollout_logp": [-1], "logp": [-1]} for x in (3, 4)]
    >>> shared_ends([Record.of(row) for row in rows], 16)
    (2, 1)
    """
    prompts = [record.prompt_ids for record in records]
    shortest = min(map(len, prompts))

    def alike(at: int) -> bool:
        return len({int(prompt[at]) for prompt in prompts}) == 1

    first = next((n for n in range(min(most, shortest - 1)) if not alike(n)), min(most, shortest - 1))
    room = min(most, shortest - 1 - first)
    return first, next((n for n in range(room) if not alike(-1 - n)), room)


def shifted(logp: Floats) -> dict[Name, Floats]:
    """Hypotheses about the place of a log-prob; the token that has no neighbour keeps its own."""
    return {
        ("shift", "the log-probs of the next token"): np.r_[logp[1:], logp[-1:]],
        ("shift", "the log-probs of the previous token"): np.r_[logp[:1], logp[:-1]],
    }


def chosen(logits: Tensor, ids: Tensor) -> Floats:
    """[t] log-probs of the token ids."""
    own = logits.gather(-1, ids[:, None])[:, 0].double() - logits.logsumexp(-1).double()
    return np.asarray(own.cpu().numpy())


def transformed(raw: Tensor, ids: Tensor, temperature: float, prompt: Integers, before: Integers) -> dict[Name, Floats]:
    """Hypotheses about what the sampler did to its logits, which need no forward pass of their own.

    Args:
        raw: [t, V] logits.
        ids: [t] the tokens drawn from them, one after the other.
        temperature: the trainer's.
        prompt: ids of the prompt.
        before: ids of the completion up to the first of ``ids``.
    """
    others = [one for one in TEMPERATURES if one != temperature]
    found = {("temperature", f"temperature {one:g}"): chosen(raw / one, ids) for one in others}
    found |= _truncated((raw / temperature).log_softmax(-1), ids)
    return found | _penalised(raw, ids, temperature, prompt, before)


def distributions(
    words: str, raw: Tensor, ids: Tensor, temperature: float, prompt: Integers, before: Integers
) -> Tensor:
    """[t, V] log-probs of all tokens under a hypothesis of ``transformed``, in its words; -inf: a token is left out."""
    kind, size = words.split()[0], float(words.split()[1])
    if kind == "temperature":
        return (raw / size).log_softmax(-1)
    if kind in PENALTIES:
        seen, changed = Seen.of(ids, prompt, before), raw.clone()
        changed[:, seen.words] = seen.penalised(kind, size, raw[:, seen.words])
        return (changed / temperature).log_softmax(-1)
    logp = (raw / temperature).log_softmax(-1)
    values = logp.sort(-1, descending=True).values
    if kind == "top_k":
        smallest = values[:, int(size) - 1]
    elif kind == "min_p":
        smallest = values[:, 0] + float(np.log(size))
    else:
        p = values.exp()
        smallest = values.gather(-1, ((p.cumsum(-1) - p) < size).sum(-1, keepdim=True) - 1)[:, 0]
    return logp.masked_fill(logp < smallest[:, None], -torch.inf).log_softmax(-1)


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True)
class Seen:
    """The tokens of one sequence, which penalties look at.

    Args:
        words: [W] their ids, each once.
        drawn: [t] the place among them of each token.
        counts: [t, W] how often each stood in the completion before.
        anywhere: [t, W] whether it stood there or in the prompt.
    """

    words: Tensor
    drawn: Tensor
    counts: Tensor
    anywhere: Tensor

    @classmethod
    def of(cls, ids: Tensor, prompt: Integers, before: Integers) -> Seen:
        """Args: see ``transformed``."""
        words = torch.from_numpy(np.unique(np.concatenate([prompt, before, ids.cpu().numpy()]))).to(ids.device)
        place = {int(id): at for at, id in enumerate(words.tolist())}
        drawn = torch.tensor([place[int(id)] for id in ids.tolist()], device=ids.device)
        counts = torch.zeros(len(ids), len(words), device=ids.device)
        for id in before.tolist():
            counts[:, place[id]] += 1
        counts[1:] += torch.nn.functional.one_hot(drawn, len(words)).cumsum(0)[:-1]
        anywhere = counts > 0
        anywhere[:, [place[id] for id in set(prompt.tolist())]] = True
        return cls(words, drawn, counts, anywhere)

    def penalised(self, kind: str, size: float, own: Tensor) -> Tensor:
        """[t, W] logits of these tokens under a penalty, as vLLM applies it, before the temperature.

        Args:
            own: [t, W] without it.
        """
        if kind == "repetition_penalty":
            return torch.where(self.anywhere, torch.where(own > 0, own / size, own * size), own)
        return own - size * ((self.counts > 0) if kind == "presence_penalty" else self.counts)


def _penalised(raw: Tensor, ids: Tensor, temperature: float, prompt: Integers, before: Integers) -> dict[Name, Floats]:
    """Log-probs under penalties on tokens seen before.

    Only the logits of tokens of this sequence change, so the others enter as one number per row.
    """
    seen = Seen.of(ids, prompt, before)
    own = raw[:, seen.words]
    rest = (raw / temperature).index_fill(-1, seen.words, -torch.inf).logsumexp(-1).double()
    found = {}
    for kind in PENALTIES:
        for size in REPETITION if kind == "repetition_penalty" else ADDED:
            changed = seen.penalised(kind, size, own).double() / temperature
            normaliser = torch.logaddexp(rest, changed.logsumexp(-1))
            logp = changed.gather(-1, seen.drawn[:, None])[:, 0] - normaliser
            found["repetition_penalty", f"{kind} {size:g}"] = np.asarray(logp.cpu().numpy())
    return found


def _truncated(logp: Tensor, ids: Tensor) -> dict[Name, Floats]:
    """Log-probs renormalised over the tokens that top-p, top-k and min-p keep; -inf: the token is not among them."""
    own = logp.gather(-1, ids[:, None])[:, 0]
    width = min(LIKELIEST, logp.shape[-1])
    top = logp.topk(width).values
    enough = (top.exp().sum(-1) > max(TOP_P) + 1e-4) & (top[:, -1] < top[:, 0] + np.log(min(MIN_P)))
    enough |= width == logp.shape[-1]
    made: dict[Name, Tensor] = {}

    def put(name: Name, rows: Tensor, smallest: Tensor, mass: Tensor) -> None:
        inside = own[rows] >= smallest
        values = torch.where(inside, own[rows].double() - mass.double().log(), -torch.inf)
        made.setdefault(name, torch.empty(len(own), dtype=torch.float64, device=own.device))[rows] = values

    for rows in (enough, ~enough):
        if not rows.any():
            continue
        values = top[rows] if rows is enough else logp[rows].sort(-1, descending=True).values
        p = values.exp()
        held = p.cumsum(-1)
        for share in TOP_P:
            last = ((held - p) < share).sum(-1, keepdim=True) - 1
            put(("top_p", f"top_p {share:g}"), rows, values.gather(-1, last)[:, 0], held.gather(-1, last)[:, 0])
        for count in (count for count in TOP_K if count < logp.shape[-1]):
            put(("top_k", f"top_k {count}"), rows, values[:, count - 1], held[:, count - 1])
        for least in MIN_P:
            smallest = values[:, 0] + float(np.log(least))
            mass = (p * (values >= smallest[:, None])).sum(-1)
            put(("min_p", f"min_p {least:g}"), rows, smallest, mass)
    return {name: np.asarray(values.cpu().numpy()) for name, values in made.items()}
