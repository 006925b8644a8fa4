"""Log-probs of given completions: in one forward pass, as a trainer, or token by token, as a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.exact.logprob import logprob


class Trace:
    """The inputs and outputs of a model's innermost modules, for the tokens of one sequence of the batch.

    ``values`` has a list of tensors, [tokens, ...] each, per (module, "input" or "output", place in the tuple, number
    of the call within a pass), in the order of execution.
    """

    def __init__(self, model: nn.Module, row: int) -> None:
        self.row = row
        self.values: dict[tuple[str, str, int, int], list[Tensor]] = {}
        self._shape: tuple[int, int] = (0, 0)
        self._window = slice(0)
        self._calls: dict[tuple[str, str], int] = {}
        leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
        self._hooks = [module.register_forward_pre_hook(self._hook(name, "input")) for name, module in leaves]
        self._hooks += [module.register_forward_hook(self._hook(name, "output")) for name, module in leaves]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, shape: torch.Size, window: slice) -> None:
        """A pass over token ids of this shape begins, in which the sequence's tokens lie in ``window``."""
        self._shape, self._window, self._calls = (shape[0], shape[1]), window, {}

    def _hook(self, name: str, side: str) -> Any:
        def record(module: nn.Module, *found: Any) -> None:
            call = self._calls[name, side] = self._calls.get((name, side), -1) + 1
            values = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
            for place, value in enumerate(values):
                if isinstance(value, Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == self._shape:
                    kept = value[self.row, self._window].detach()
                    self.values.setdefault((name, side, place, call), []).append(kept)

        return record


def score(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    cached: bool = False,
    trace: Trace | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs (nats, ``logprob``) of completions under a causal language model of transformers.

    The gradient flows into the model.  Rows are padded on the right, so that no token sees padding.

    Args:
        prompt_ids: B prompts of at least one token each.
        completion_ids: B completions, in the same order.
        cached: in the way of a sampler instead: prompts padded on the left, then one token at a time with a KV cache.
        trace: records what the modules compute.

    Returns:
        log-probs [B, T] and mask [B, T], T the longest completion's length; 0 where the mask is False.

    Raises:
        ValueError: the numbers of prompts and completions differ, or a prompt or all completions are empty.
        RuntimeError: ``cached``, but the model returns no KV cache.

    >>> class Uniform(nn.Module):
    ...     def forward(self, input_ids, attention_mask=None):
    ...         return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 4)})
    >>> logp, mask = score(Uniform(), [[1, 2], [3]], [[0], [1, 2]])
    >>> logp
    tensor([[-1.3863,  0.0000],
            [-1.3863, -1.3863]])
    """
    if len(prompt_ids) != len(completion_ids):
        raise ValueError(f"{len(prompt_ids)} prompts came with {len(completion_ids)} completions, expected as many")
    for row, prompt in enumerate(prompt_ids):
        if not len(prompt):
            raise ValueError(f"prompt_ids[{row}] is empty, expected at least one token")
    if not any(map(len, completion_ids)):
        raise ValueError("completion_ids holds no token, expected at least one")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    longest = max(map(len, completion_ids))
    tokens = torch.zeros(len(prompt_ids), longest, dtype=torch.long)
    mask = torch.zeros(len(prompt_ids), longest, dtype=torch.bool)
    for row, completion in enumerate(completion_ids):
        tokens[row, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        mask[row, : len(completion)] = True
    tokens, mask = tokens.to(device), mask.to(device)
    logits = (_token_by_token if cached else _one_pass)(model, prompt_ids, tokens, mask, trace)
    return torch.where(mask, logprob(logits, tokens, temperature), 0.0), mask


def _one_pass(
    model: nn.Module, prompt_ids: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor, trace: Trace | None
) -> Tensor:
    lengths = [len(prompt) for prompt in prompt_ids]
    ids = tokens.new_zeros(len(tokens), max(lengths) + tokens.shape[1])
    for row, prompt in enumerate(prompt_ids):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : len(prompt) + tokens.shape[1]] = tokens[row]
    if trace is not None:
        trace.begin(ids.shape, slice(0, lengths[trace.row] + int(mask[trace.row].sum())))
    logits = model(input_ids=ids).logits
    before = torch.tensor(lengths, device=ids.device)[:, None] - 1 + torch.arange(tokens.shape[1], device=ids.device)
    return logits.gather(1, before[..., None].expand(*before.shape, logits.shape[-1]))


def _token_by_token(
    model: nn.Module, prompt_ids: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor, trace: Trace | None
) -> Tensor:
    width = max(map(len, prompt_ids))
    ids = tokens.new_zeros(len(tokens), width)
    real = tokens.new_zeros(len(tokens), width + tokens.shape[1])
    real[:, width:] = 1
    for row, prompt in enumerate(prompt_ids):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) : width] = 1
    positions = (real.cumsum(-1) - 1).clamp_min_(0)
    padded = not bool(real.all())
    cache, logits = None, []
    for t in range(tokens.shape[1]):
        seen = width + t
        step = ids if t == 0 else tokens[:, t - 1 : t]
        if trace is not None:
            start = width - len(prompt_ids[trace.row]) if t == 0 else 0
            trace.begin(step.shape, slice(start, None) if bool(mask[trace.row, t]) else slice(0))
        output = model(
            input_ids=step,
            attention_mask=real[:, :seen] if padded else None,
            position_ids=positions[:, seen - step.shape[1] : seen],
            past_key_values=cache,
            use_cache=True,
        )
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise RuntimeError(
                f"{type(model).__name__} returned no past_key_values: its cache is off, as under gradient "
                "checkpointing; score it in evaluation mode"
            )
        logits.append(output.logits[:, -1])
    return torch.stack(logits, dim=1)
