"""The sampler's decode loop and the trainer's forward pass, with the places where the two can come apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.lab.mismatch.language import EOS, PAD

Transform = Callable[[Tensor, list[list[int]]], Tensor]
"""Changes logits [B, V] before a token is drawn; also takes each row's tokens so far, prompt included."""

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Decoded:
    """Completions with the log-probs (nats) that the sampler reports: ``processed`` those of the distributions drawn
    from, ``raw`` those of the untransformed logits."""

    completion_ids: list[list[int]]
    processed: list[list[float]]
    raw: list[list[float]]


@torch.no_grad()
def decode(
    modules: Sequence[nn.Module],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    generator: torch.Generator,
    boundaries: Sequence[Sequence[int]] = (),
    transforms: Sequence[Transform] = (),
    stored: Round | None = None,
    prefill: int = 1024,
    forced: Sequence[dict[int, int]] | None = None,
) -> Decoded:
    """Samples a completion for each prompt, token by token, with a KV cache that all the modules share.

    Args:
        modules: the weights.  A token that is fed at place i, where the completion begins at 0 and the prompt ends at
            -1, is read by ``modules[n]``, n being the number of ``boundaries`` with ``boundaries[n][row] <= i``.
        max_new_tokens: of a completion that EOS does not end.
        boundaries: a list fewer than modules, each with a place per row.
        transforms: applied in order.
        stored: rounds keys and values when they are stored; the tokens that are fed at once see each other's exact.
        prefill: tokens of the prompt that are fed at once.
        forced: per row, tokens that stand at given places of the completion without having been sampled.
    """
    from transformers import DynamicCache

    batch, width = len(prompts), max(map(len, prompts))
    ids, real = torch.full((batch, width), PAD), torch.zeros(batch, width + max_new_tokens, dtype=torch.long)
    real[:, width:] = 1
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        real[row, width - len(prompt) : width] = 1
    places = (real.cumsum(-1) - 1).clamp_min(0)
    edges = torch.tensor([list(edge) for edge in boundaries]).reshape(len(boundaries), batch)
    cache: Any = DynamicCache()

    def feed(tokens: Tensor, start: int) -> Tensor:
        """Logits [B, V] after tokens [B, n] in the columns from ``start``, by the weights of each row's place."""
        end = start + tokens.shape[1]
        which = (edges <= start - width).sum(0)
        logits = torch.empty(0)
        new: list[tuple[Tensor, Tensor]] = []
        for number in which.unique().tolist():
            output = modules[number](
                input_ids=tokens,
                attention_mask=real[:, :end],
                position_ids=places[:, start:end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            rows = which == number
            logits = output.float() if not len(logits) else torch.where(rows[:, None], output.float(), logits)
            for at, layer in enumerate(cache.layers):
                pair = (layer.keys[..., start:, :], layer.values[..., start:, :])
                if len(new) <= at:
                    new.append(pair)
                else:
                    keep = rows[:, None, None, None]
                    new[at] = (torch.where(keep, pair[0], new[at][0]), torch.where(keep, pair[1], new[at][1]))
                layer.keys, layer.values = layer.keys[..., :start, :], layer.values[..., :start, :]
        for layer, (keys, values) in zip(cache.layers, new, strict=True):
            if stored is not None:
                keys, values = stored(keys), stored(values)
            layer.keys, layer.values = torch.cat([layer.keys, keys], -2), torch.cat([layer.values, values], -2)
        return logits

    # The prompt is cut where the weights of a row change.
    cuts = {*range(0, width, prefill), width, *(int(edge) + width for edge in edges.flatten() if -width < edge < 0)}
    columns = sorted(cuts)
    for start, end in zip(columns, columns[1:], strict=False):
        logits = feed(ids[:, start:end], start)

    completions: list[list[int]] = [[] for _ in prompts]
    processed: list[list[float]] = [[] for _ in prompts]
    raw: list[list[float]] = [[] for _ in prompts]
    going = np.ones(batch, dtype=bool)
    for t in range(max_new_tokens):
        plain = logits.log_softmax(-1)
        changed = logits
        if transforms:
            seen = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
            for transform in transforms:
                changed = transform(changed, seen)
        logp = changed.log_softmax(-1)
        race = torch.empty_like(logp).exponential_(generator=generator).clamp_min_(torch.finfo(logp.dtype).tiny)
        chosen = (logp.exp() / race).argmax(-1)
        for row, at in enumerate(forced or ()):
            if t in at:
                chosen[row] = at[t]
        tokens = chosen.tolist()
        drawn = zip(
            tokens,
            logp.gather(-1, chosen[:, None])[:, 0].tolist(),
            plain.gather(-1, chosen[:, None])[:, 0].tolist(),
            strict=True,
        )
        for row, (token, sampled, untransformed) in enumerate(drawn):
            if going[row]:
                completions[row].append(token)
                processed[row].append(sampled)
                raw[row].append(untransformed)
                going[row] = token != EOS
        if t + 1 == max_new_tokens or not going.any():
            break
        logits = feed(chosen[:, None], width + t)
    return Decoded(completions, processed, raw)


def score(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    padding_seen: bool = False,
    positions: Callable[[Tensor, int], Tensor] | None = None,
    micro_batch: int = 8,
    grad: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies (nats) of each completion's tokens, by full forward passes, as a trainer computes them.

    Prompts are padded on the left and completions on the right, in micro-batches.

    Args:
        temperature: the logits are divided by it.
        padding_seen: the attention mask is left out.
        positions: changes the positions [B, width]; also takes the column where the completions begin.
    """
    logps: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(prompts), micro_batch):
        chunk = list(zip(prompts[start : start + micro_batch], completions[start : start + micro_batch], strict=True))
        left, right = max(len(prompt) for prompt, _ in chunk), max(len(completion) for _, completion in chunk)
        ids = torch.full((len(chunk), left + right), PAD)
        real = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(chunk):
            begin, end = left - len(prompt), left + len(completion)
            ids[row, begin:end] = torch.tensor([*prompt, *completion])
            real[row, begin:end] = 1
        places = (real.cumsum(-1) - 1).clamp_min(0)
        with nullcontext() if grad else torch.no_grad():
            logits = module(
                input_ids=ids,
                attention_mask=torch.ones_like(real) if padding_seen else real,
                position_ids=places if positions is None else positions(places, left),
                use_cache=False,
            ).logits[:, left - 1 : -1]
            logp = (logits.float() / temperature).log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            logp = logp.gather(-1, ids[:, left:, None])[..., 0]
        for row, (_, completion) in enumerate(chunk):
            logps.append(logp[row, : len(completion)])
            entropies.append(entropy[row, : len(completion)])
    return logps, entropies
