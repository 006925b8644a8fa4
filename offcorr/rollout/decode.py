"""Sampling from a causal language model, with the log-probs of the distributions that were sampled from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from offcorr.exact.logprob import log_probs, logprob

# Tokens between two checks for finished rows, because each check is a host synchronisation.
_CHECK_EVERY = 4


@dataclass(frozen=True)
class Sampling:
    """Transformation of the logits before a token is drawn: temperature, then top-k, then top-p.

    ``top_k=0`` and ``top_p=1`` switch those two off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature!r}, expected a number > 0 (greedy: top_k=1)")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}, expected 0 < top_p <= 1")
        if not (_is_number(self.top_k) and self.top_k >= 0 and self.top_k == int(self.top_k)):
            raise ValueError(f"top_k is {self.top_k!r}, expected 0 (off) or more tokens")

    def logp(self, logits: Tensor) -> Tensor:
        """Log-probs (nats, float32) of the distribution that is sampled from; [..., V] -> [..., V].

        They are renormalised over the tokens that top-k and top-p keep, and -inf elsewhere: vLLM's
        ``processed_logprobs``, the mode in which TRL runs vLLM.
        """
        return log_probs(self._kept(logits), self.temperature)

    def _kept(self, logits: Tensor) -> Tensor:
        """The logits, -inf for tokens that top-k and top-p drop."""
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            p = log_probs(ordered, self.temperature).exp()
            # Dropped once the likelier tokens before it already hold top_p: the first always stays.
            dropped = p.cumsum(dim=-1) - p >= self.top_p
            logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        return logits


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Decoded:
    """Completions, EOS included where it was sampled, and the log-prob (nats) of each token."""

    completion_ids: list[list[int]]
    logp: list[list[float]]


@torch.inference_mode()
def decode(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_token_ids: Sequence[int],
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Sample one completion for each prompt, token by token, with a KV cache.

    The log-probs are those of the distributions that the tokens were drawn from (``Sampling.logp``), as an engine
    reports them, without a second pass.  Equal prompts are prefilled once.  Prompts are padded on the left, positions
    count real tokens only, and finished rows leave the batch.

    A model in training is switched to evaluation mode and its gradient checkpointing off for the time of the decode,
    because checkpointing drops the KV cache; both are restored, module by module.

    Args:
        max_new_tokens: of every completion, or one number for each prompt.
        generator: on the model's device; None: torch's global one.

    Raises:
        ValueError: an empty prompt, ``max_new_tokens`` below 1, or a model that computes with another one's weights,
            as a copy of a trainer's model does.
        FloatingPointError: the model's logits are not finite.
        RuntimeError: the model does not write to the KV cache.
    """
    _check_own_forward(model)
    limits = limits_of(max_new_tokens, len(prompt_ids))
    if min(limits, default=1) < 1:
        raise ValueError(f"max_new_tokens is {min(limits)}, expected at least 1")
    longest = max(limits, default=1)
    if empty := [row for row, prompt in enumerate(prompt_ids) if not len(prompt)]:
        raise ValueError(f"prompt_ids[{empty[0]}] is empty, expected at least one token")
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    unique = list(dict.fromkeys(map(tuple, prompt_ids)))
    row_of = {prompt: row for row, prompt in enumerate(unique)}
    rows = torch.tensor([row_of[tuple(ids)] for ids in prompt_ids], device=device)
    batch, width = len(prompt_ids), max(map(len, unique))
    ids = torch.zeros(len(unique), width, dtype=torch.long)
    real = torch.zeros(len(unique), width + longest, dtype=torch.long)
    real[:, width:] = 1
    for row, prompt in enumerate(unique):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) : width] = 1
    ids, real = ids.to(device), real.to(device)
    padded = len(set(map(len, unique))) > 1

    def step(tokens: Tensor, positions: Tensor, seen: int) -> Tensor:
        output = model(
            input_ids=tokens,
            attention_mask=real[:, :seen] if padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        _check_grown(cache, seen, checkpointing)
        return output.logits[:, -1]

    cache, checkpointing = _roomy_cache(model, longest), checkpoints_activations(model)
    with _evaluating(model), torch.autocast(device.type, enabled=False):
        prompt_positions = (real[:, :width].cumsum(dim=-1) - 1).clamp_min_(0)
        logits = step(ids, prompt_positions, width)
        if batch > len(unique):
            logits = logits[rows]
            cache.batch_select_indices(rows)
        real, position = real[rows], prompt_positions[rows, -1:]
        eos = torch.tensor(list(eos_token_ids), device=device)
        tokens = torch.zeros(batch, longest, dtype=torch.long, device=device)
        logps = torch.zeros(batch, longest, device=device)
        running = torch.arange(batch, device=device)  # rows of the result still being written
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        limit = torch.tensor(limits, device=device)
        for t in range(longest):
            logp = sampling.logp(logits)
            chosen = _draw(logp, generator)
            tokens[running, t] = chosen[:, 0]
            logps[running, t] = logp.gather(-1, chosen)[:, 0]
            finished |= torch.isin(chosen[:, 0], eos) | (limit[running] <= t + 1)
            if t + 1 == longest:
                break
            if t % _CHECK_EVERY == _CHECK_EVERY - 1:
                going = (~finished).nonzero()[:, 0]
                if not len(going):
                    break
                # Removing rows copies the cache, which pays off for a quarter of the batch.
                if len(going) <= 0.75 * len(finished):
                    cache.batch_select_indices(going)
                    running, real, position = running[going], real[going], position[going]
                    chosen, finished = chosen[going], finished[going]
            position = position + 1
            logits = step(chosen, position, width + t + 1)

    is_eos = torch.isin(tokens, eos)
    ends = torch.where(is_eos.any(-1), is_eos.int().argmax(-1) + 1, longest).minimum(limit)
    lengths = ends.tolist()
    written = torch.arange(longest, device=device) < ends[:, None]
    if not torch.isfinite(torch.where(written, logps, 0.0)).all():
        raise FloatingPointError(
            "the sampler's log-probs are not finite: its weights are NaN or infinite, or overflow at this precision"
        )
    return Decoded(
        [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)],
        [row[:length] for row, length in zip(logps.tolist(), lengths, strict=True)],
    )


def limits_of(max_new_tokens: int | Sequence[int], prompts: int) -> list[int]:
    """``max_new_tokens`` of ``decode``: one number for each prompt."""
    return [max_new_tokens] * prompts if isinstance(max_new_tokens, int) else list(max_new_tokens)


@torch.inference_mode()
def score(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Log-probs (nats) of given completions by one forward pass, as a trainer computes them: logits over temperature,
    without top-k and top-p.
    """
    device = next(model.parameters()).device
    rows = [[*p, *c] for p, c in zip(prompt_ids, completion_ids, strict=True)]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    real = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row)
        real[index, width - len(row) :] = 1
    ids, real = ids.to(device), real.to(device)
    positions = (real.cumsum(dim=-1) - 1).clamp_min_(0)
    logits = model(input_ids=ids, attention_mask=real, position_ids=positions).logits
    logp = logprob(logits[:, :-1], ids[:, 1:], temperature).tolist()
    return [row[len(row) - len(c) :] for row, c in zip(logp, completion_ids, strict=True)]


def _draw(logp: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row, [B, V] -> [B, 1], by an exponential race: argmax p / e, e ~ Exp(1)."""
    race = torch.empty_like(logp).exponential_(generator=generator)
    # Bounded below so that a token of probability 0 never meets 0 / 0.
    return (logp.exp() / race.clamp_min_(torch.finfo(logp.dtype).tiny)).argmax(-1, keepdim=True)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which every module is in evaluation mode, without gradient checkpointing; then as it was."""
    flags = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in ("training", "gradient_checkpointing")
        if name in vars(module)
    ]
    try:
        for module, name, _ in flags:
            setattr(module, name, False)
        yield
    finally:
        for module, name, value in flags:
            setattr(module, name, value)


def checkpoints_activations(model: nn.Module) -> bool:
    """Whether a module of the model has gradient checkpointing on, under which layers may keep no cache.

    >>> checkpoints_activations(nn.Linear(2, 2))
    False
    """
    return any(vars(module).get("gradient_checkpointing") is True for module in model.modules())


def _check_own_forward(model: nn.Module) -> None:
    """Raise where ``forward``, replaced in another model and copied from it, calls that model's.

    TRL does so in the model that it trains, and ``copy.deepcopy`` copies no function.
    """
    replaced = vars(model).get("forward")
    cells = getattr(getattr(replaced, "__func__", replaced), "__closure__", None) or ()
    owners = [getattr(_contents(cell), "__self__", None) for cell in cells]
    if any(isinstance(owner, type(model)) and owner is not model for owner in owners):
        raise ValueError(
            "model is a copy whose forward is still that of the model it was copied from, as TRL replaces it there, so "
            "that it computes with that model's weights: `del copy.forward` before its first use, or load the state "
            "dict into a model that was made before the trainer"
        )


def _contents(cell: CellType) -> object:
    """None where it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _check_grown(cache: DynamicCache, seen: int, checkpointing: bool) -> None:
    """Raise if a cache that should hold ``seen`` tokens holds fewer: the model saw only the last token.

    Args:
        checkpointing: gradient checkpointing was on before the decode.
    """
    # Layers of linear attention have no length.
    lengths = [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]
    if (lengths or not cache.layers) and max(lengths, default=0) < seen:
        mend = "Decode with a module that takes use_cache=True"
        if checkpointing:
            mend = (
                "Gradient checkpointing is on, for which models leave out the cache, and this one does so outside "
                "training, too: set gradient_checkpointing=False, or decode with a copy of the model without it"
            )
        raise RuntimeError(
            f"the KV cache holds {max(lengths, default=0)} tokens after {seen}: the model ignored past_key_values, so "
            f"each token would be drawn without its context. {mend}"
        )


class _RoomyLayer(DynamicLayer):
    """A cache layer that reserves room for the whole decode, so that no token copies the past."""

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._stored: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
        held = 0 if self.keys is None else self.keys.shape[-2]
        end = held + key_states.shape[-2]
        if self._stored is None or end > self._stored[0].shape[-2]:
            self._stored = (
                self._moved(self.keys, key_states, end),
                self._moved(self.values, value_states, end),
            )
        for stored, new in zip(self._stored, (key_states, value_states), strict=True):
            stored[..., held:end, :] = new
        self.keys, self.values = (stored[..., :end, :] for stored in self._stored)
        return self.keys, self.values

    def _moved(self, past: Tensor | None, new: Tensor, end: int) -> Tensor:
        stored = new.new_empty(*new.shape[:-2], end + self.room, new.shape[-1])
        if past is not None:
            stored[..., : past.shape[-2], :] = past
        return stored

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._stored = None


def _roomy_cache(model: nn.Module, room: int) -> DynamicCache:
    """The model's own kind of cache, with plain layers replaced by ``_RoomyLayer``."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoomyLayer(room) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache
