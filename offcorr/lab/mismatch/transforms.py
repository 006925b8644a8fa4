"""Causes in how the sampler changes its logits before it draws, and in which log-probs it then reports."""

from __future__ import annotations

import torch
from torch import Tensor

from offcorr.lab.mismatch.decode import Transform
from offcorr.lab.mismatch.language import EOS
from offcorr.lab.mismatch.setup import Setup, cause


@cause()
def clean(setup: Setup) -> None:
    """Sampler and trainer agree: the same fp32 weights, prompts and temperature."""


def _sampler_temperature(setup: Setup) -> float:
    # Two that raise the entropy among more that lower it, as people use them.
    return setup.pick("temperature", weak=[0.9, 1.1], usual=[0.6, 0.7, 0.8, 1.2], strong=[0.4, 0.5, 1.4])


@cause(changes=["temperature"], keeps=["reported"])
def temperature(setup: Setup) -> None:
    """The sampler draws at a temperature, which the trainer does not apply."""
    setup.temperature, setup.trainer_temperature = _sampler_temperature(setup), 1.0


@cause(changes=["temperature", "reported"])
def temperature_silent(setup: Setup) -> None:
    """The sampler draws at a temperature and logs log-probs at temperature 1, as the trainer does."""
    setup.temperature, setup.trainer_temperature = _sampler_temperature(setup), 1.0
    setup.reported = "raw"


@cause(changes=["temperature", "reported"])
def raw_logprobs(setup: Setup) -> None:
    """Both sides use a temperature, but the sampler logs the log-probs from before it."""
    setup.temperature = setup.trainer_temperature = _sampler_temperature(setup)
    setup.reported = "raw"


@cause(changes=["temperature", "reported"])
def unnormalised(setup: Setup) -> None:
    """Both sides use a temperature, but the sampler divides log-probs by it and does not normalise them again."""
    setup.temperature = setup.trainer_temperature = _sampler_temperature(setup)
    setup.reported = "divided"


def _untempered(setup: Setup) -> None:
    """Raw log-probs are the trainer's only where no temperature is in use."""
    setup.temperature = setup.trainer_temperature = 1.0
    setup.reported = "raw"


def _top_p(setup: Setup) -> Transform:
    share = setup.pick("top_p", weak=[0.95, 0.98], usual=[0.9, 0.95, 0.8], strong=[0.6, 0.7, 0.8])

    def transform(logits: Tensor, seen: list[list[int]]) -> Tensor:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        dropped = p.cumsum(-1) - p >= share  # the likelier tokens before it already hold the share
        return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)

    return transform


@cause(changes=["top_p"], keeps=["reported"])
def top_p(setup: Setup) -> None:
    """The sampler draws from the likeliest tokens that together hold a share top_p."""
    setup.transforms.append(_top_p(setup))


@cause(changes=["top_p", "temperature", "reported"])
def top_p_silent(setup: Setup) -> None:
    """The sampler draws with top-p and logs the log-probs from before it."""
    _untempered(setup)
    setup.transforms.append(_top_p(setup))


@cause(changes=["top_k"], keeps=["reported"])
def top_k(setup: Setup) -> None:
    """The sampler draws from the k likeliest tokens."""
    kept = setup.pick("top_k", weak=[8, 10, 20], usual=[3, 4, 5], strong=[2, 3])

    def transform(logits: Tensor, seen: list[list[int]]) -> Tensor:
        smallest = logits.topk(min(kept, logits.shape[-1]), dim=-1).values[..., -1:]
        return logits.masked_fill(logits < smallest, -torch.inf)

    setup.transforms.append(transform)


@cause(changes=["min_p"], keeps=["reported"])
def min_p(setup: Setup) -> None:
    """The sampler draws from the tokens whose probability is at least a share of the likeliest one's."""
    share = setup.pick("min_p", weak=[0.02, 0.03], usual=[0.05, 0.1, 0.15], strong=[0.2, 0.3])

    def transform(logits: Tensor, seen: list[list[int]]) -> Tensor:
        p = logits.softmax(-1)
        return logits.masked_fill(p < share * p.amax(-1, keepdim=True), -torch.inf)

    setup.transforms.append(transform)


def _penalty(setup: Setup) -> Transform:
    """Repetition penalty over prompt and completion, presence or frequency penalty over the completion, as in vLLM."""
    kind = setup.one_of("penalty_kind", ["repetition", "repetition", "presence", "frequency"])
    if kind == "repetition":
        size = setup.pick("penalty", weak=[1.05, 1.08], usual=[1.1, 1.15, 1.2], strong=[1.25, 1.3])
    else:
        size = setup.pick("penalty", weak=[0.1, 0.2], usual=[0.3, 0.5, 0.8], strong=[1.0, 1.5])
    lengths: list[int] = []

    def transform(logits: Tensor, seen: list[list[int]]) -> Tensor:
        lengths.extend(map(len, seen) if not lengths else [])
        counts = torch.zeros_like(logits)
        for row, ids in enumerate(seen):
            told = torch.tensor(ids if kind == "repetition" else ids[lengths[row] :], dtype=torch.long)
            counts[row].scatter_add_(0, told, torch.ones(len(told)))
        if kind == "repetition":
            changed = torch.where(logits > 0, logits / size, logits * size)
            return torch.where(counts > 0, changed, logits)
        return logits - size * (counts if kind == "frequency" else (counts > 0).float())

    return transform


@cause(changes=["penalty"], keeps=["reported"])
def repetition_penalty(setup: Setup) -> None:
    """The sampler lowers the logits of tokens that were seen before (repetition, presence or frequency penalty)."""
    setup.penalties.append(_penalty(setup))


@cause(changes=["penalty", "temperature", "reported"])
def penalty_silent(setup: Setup) -> None:
    """The sampler draws with a penalty on tokens seen before and logs the log-probs from before it."""
    _untempered(setup)
    setup.penalties.append(_penalty(setup))


@cause(changes=["logit_mask"], keeps=["reported"])
def logit_mask(setup: Setup) -> None:
    """The sampler forbids a fixed set of tokens, as structured decoding does, and the trainer does not."""
    share = setup.pick("forbidden", weak=[0.02, 0.05], usual=[0.1, 0.2], strong=[0.3, 0.4])
    forbidden = torch.from_numpy(setup.rng.random(setup.subject.task.vocabulary) < share)
    # min_tokens and ignore_eos forbid the end.
    forbidden[EOS] = bool(setup.rng.random() < 0.3)
    setup.settings["forbidden_ids"] = forbidden.nonzero()[:, 0].tolist()

    def transform(logits: Tensor, seen: list[list[int]]) -> Tensor:
        return logits.masked_fill(forbidden, -torch.inf)

    setup.transforms.append(transform)
