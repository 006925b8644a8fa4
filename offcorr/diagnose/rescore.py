"""``rescore``: the sampled tokens scored again with a model at hand, once under each hypothesis about the sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.diagnose.evidence import SAME
from offcorr.diagnose.record import Floats, Record
from offcorr.training.precision import Precision
from offcorr.training.replica import Replica
from offcorr.training.snapshots import changing_weights

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
TOP_K = (*range(2, 11), 12, 15, 16, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200, 256)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
PRECISIONS = ("bf16", "fp16", "int8", "fp8_e4m3")
FARTHEST = 5.0
"""|d| (nats) that a token counts at most; a token that a hypothesis makes impossible counts this much."""

PIECE = 2**29
"""Bytes of the arrays of one piece of a sequence, about, each of [tokens, vocabulary] numbers."""
COPIES = 24
"""Bytes per number of such an array: logits, log-probs, probabilities, and what sorting them takes."""
LIKELIEST = 1024
"""Tokens of a distribution that truncation is looked for among, where they hold enough of the mass."""

Name = tuple[str, str]
"""Id of a cause, and the hypothesis in words."""


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis about the sampler, and the part of the gap that it explains.

    Args:
        cause: the id of the cause that it belongs to.
        words: the hypothesis.
        gap: mean |d| that is left (nats).
        before: mean |d| without the hypothesis (nats).
        share: 1 - gap / before; below 0: the hypothesis makes the gap wider.
    """

    cause: str
    words: str
    gap: float
    before: float
    share: float


@dataclass(frozen=True)
class Rescored:
    """Result of ``rescore``.

    Args:
        sequences: number of sequences that were scored.
        gap: mean |d| between the model's log-probs and the sampler's (nats).
        logged: mean |d| between the trainer's logged log-probs and the sampler's.
        trainer: mean |d| between the model's log-probs and the trainer's logged ones; large: another model.
        hypotheses: the one that explains most first.
        left_out: hypotheses that could not be tried, and why.
    """

    sequences: int
    gap: float
    logged: float
    trainer: float
    hypotheses: Sequence[Hypothesis]
    left_out: Sequence[str] = ()


@torch.no_grad()
def rescore(
    records: Sequence[Record],
    model: nn.Module,
    *,
    checkpoints: Iterable[tuple[str, nn.Module]] = (),
    temperature: float = 1.0,
    report: Callable[[str, int, int], None] = lambda words, done, of: None,
) -> Rescored:
    """Scores the completions under each hypothesis and says how much of the gap each explains.

    The model's weights are not changed, and each of its modules is left in the mode that it was in.  A sequence is
    scored in pieces where the logits of all its tokens would take more than about 500 MB.

    Args:
        records: some tens of sequences; each costs about nine forward passes, and one per checkpoint.
        model: a causal language model of transformers, with the weights that the trainer held.
        checkpoints: names and models that the sampler may have had in its place; taken one after the other.
        temperature: the trainer's.
        report: called with a hypothesis, the number of sequences scored under it and their total.

    Raises:
        ValueError: there is no sequence or no token that both sides scored, a prompt is empty, a token id lies outside
            the model's vocabulary, or a sequence needs pieces and the model keeps no keys and values.
    """
    if not records:
        raise ValueError("there is no sequence to score again")
    if not (np.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}, expected a number > 0")
    scored: dict[Name, list[Floats]] = {}
    base: list[Floats] = []
    with _mode(model, training=False):
        for done, record in enumerate(records, 1):
            found = _joined(
                {("", ""): _chosen(raw / temperature, ids), **_of_logits(raw, ids, temperature)}
                for raw, ids in _pieces(model, record)
            )
            base.append(found.pop(("", "")))
            for name, logp in (found | _shifted(base[-1])).items():
                scored.setdefault(name, []).append(logp)
            report("as it is", done, len(records))

    def rescored(words: str, module: nn.Module, changed: Sequence[Record], training: bool = False) -> list[Floats]:
        logps = []
        with _mode(module, training):
            for done, record in enumerate(changed, 1):
                parts = [_chosen(raw / temperature, ids) for raw, ids in _pieces(module, record)]
                logps.append(np.concatenate(parts))
                report(words, done, len(records))
        return logps

    for name, changed in _other_prompts(records).items():
        scored[name] = rescored(name[1], model, changed)
    left_out = []
    for precision in PRECISIONS:
        words = f"weights in {precision}"
        try:
            scored["precision", words] = rescored(words, _cast(model, precision), records)
        except ValueError as error:
            left_out.append(f"{words}: {error}")
    for named, module in checkpoints:
        words = f"the weights of {named}"
        scored["stale_weights", words] = rescored(words, module, records)
    dropped = np.concatenate(rescored("dropout on", model, records, training=True))

    chosen = np.concatenate([_valid(record) for record in records])
    if not chosen.any():
        raise ValueError("no token of the sequences to score again has a finite log-prob of both sides")
    ours = np.concatenate(base)[chosen]
    sampler = np.concatenate([record.rollout_logp for record in records])[chosen]
    trainer = np.concatenate([record.old_logp for record in records])[chosen]
    gap, logged = _gap(ours, sampler), _gap(trainer, sampler)
    hypotheses = [
        _hypothesis(*name, _gap(np.concatenate(logps)[chosen], sampler), gap) for name, logps in scored.items()
    ]
    noise = _gap(dropped[chosen], ours)
    if noise > SAME and logged / 3 < noise < logged * 3:  # the trainer is off by as much as dropout makes
        hypotheses.append(_hypothesis("dropout", "dropout off", gap, logged))
    hypotheses.sort(key=lambda one: -one.share)
    return Rescored(len(records), gap, logged, _gap(ours, trainer), hypotheses, left_out)


def described(rescored: Rescored, most: int = 6) -> list[str]:
    """Sentences about the outcome: whether the model fits the log, then the hypotheses that explain most.

    >>> half = Hypothesis("temperature", "temperature 0.7", 0.01, 0.1, 0.9)
    >>> described(Rescored(32, 0.1, 0.1, 0.0, [half]))[1]
    'temperature 0.7 [temperature] explains 90% of it; 0.01 nats are left'
    """
    said = [
        f"the model's log-probs of {rescored.sequences} sequences differ from the sampler's by {rescored.gap:.2g} nats "
        "per token on average"
    ]
    if rescored.trainer > max(0.02, 0.5 * rescored.logged):
        said.append(
            f"they differ from the trainer's logged ones by {rescored.trainer:.2g} nats: the model has other weights "
            "than the trainer had, or --temperature is not the trainer's, or the trainer's log-probs are wrong"
        )
    if rescored.gap < 0.1 * rescored.logged:
        said.append(
            f"the trainer's logged ones differ from the sampler's by {rescored.logged:.2g} nats, so the sampler did "
            "what the model does: look for the cause in how the trainer computes log-probs"
        )
    telling = [one for one in rescored.hypotheses[:most] if one.share > 0.05]
    said += [
        f"{one.words} [{one.cause}] explains {one.share:.0%} of it; {one.gap:.2g} nats are left" for one in telling
    ]
    if not telling and rescored.gap > SAME:
        said.append(f"none of the {len(rescored.hypotheses)} hypotheses explains more than 5% of it")
    said += [f"not tried: {one}" for one in rescored.left_out]
    return said


def _hypothesis(cause: str, words: str, gap: float, before: float) -> Hypothesis:
    """Where there is no gap, nothing is explained."""
    return Hypothesis(cause, words, gap, before, 1 - gap / before if before > SAME else 0.0)


def _valid(record: Record) -> Any:
    valid = np.isfinite(record.rollout_logp) & np.isfinite(record.old_logp)
    return valid if record.mask is None else valid & record.mask


def _gap(first: Floats, second: Floats) -> float:
    return float(np.minimum(np.nan_to_num(np.abs(first - second), nan=FARTHEST, posinf=FARTHEST), FARTHEST).mean())


# -- forward passes ------------------------------------------------------------------------------------------


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


def _pieces(model: nn.Module, record: Record) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [t, V] (float32) and token ids [t] of the completion's tokens, a piece at a time."""
    place = f"{record.where}: " if record.where else ""
    if not len(record.prompt_ids):
        raise ValueError(f"{place}prompt_ids is empty; a model scores what follows one token at least")
    both = np.concatenate([record.prompt_ids, record.completion_ids])
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    if both.min() < 0 or both.max() >= vocabulary:
        odd = int(both[(both < 0) | (both >= vocabulary)][0])
        raise ValueError(
            f"{place}token id {odd} is not in the model's vocabulary of {vocabulary}: the dump is of another model"
        )
    ids = torch.from_numpy(both).to(next(model.parameters()).device)
    first, last = len(record.prompt_ids) - 1, len(both) - 1
    size = max(1, PIECE // (COPIES * vocabulary))
    whole, cache = last <= size, None
    for start in range(0, last, size):
        stop = min(start + size, last)
        output = model(input_ids=ids[None, start:stop], past_key_values=cache, use_cache=not whole)
        if not whole and (cache := getattr(output, "past_key_values", None)) is None:
            raise ValueError(
                f"{place}a sequence of {last + 1} tokens is scored in pieces of {size}, and {type(model).__name__} "
                "keeps no keys and values between them: leave longer sequences out"
            )
        begin = max(first, start)
        if begin < stop:
            yield output.logits[0, begin - start :].float(), ids[begin + 1 : stop + 1]


def _chosen(logits: Tensor, ids: Tensor) -> Floats:
    """[t] log-probs of the token ids."""
    own = logits.gather(-1, ids[:, None])[:, 0].double() - logits.logsumexp(-1).double()
    return np.asarray(own.cpu().numpy())


def _joined(pieces: Iterable[dict[Name, Floats]]) -> dict[Name, Floats]:
    parts = list(pieces)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _cast(model: nn.Module, precision: str) -> nn.Module:
    """A copy of the model with weights in another precision."""
    weights = dict(model.named_parameters())
    replica = Replica(model, next(model.parameters()).device)
    return replica.load({key: weights[key] for key, _ in changing_weights(model)}, Precision.named(precision))


# -- hypotheses ----------------------------------------------------------------------------------------------


def _other_prompts(records: Sequence[Record]) -> dict[Name, list[Record]]:
    """Hypotheses about what the sampler read."""

    def changed(rule: Callable[[Any], Any]) -> list[Record]:
        return [dataclasses.replace(record, prompt_ids=rule(record.prompt_ids)) for record in records]

    return {
        ("truncated_prompt", "the later half of the prompt alone"): changed(lambda ids: ids[len(ids) // 2 :]),
        ("chat_template", "the prompt without its first token"): changed(lambda ids: ids[1:] if len(ids) > 1 else ids),
        ("chat_template", "the prompt with its first token twice"): changed(lambda ids: np.r_[ids[:1], ids]),
    }


def _shifted(logp: Floats) -> dict[Name, Floats]:
    """Hypotheses about the place of a log-prob; the token that has no neighbour keeps its own."""
    return {
        ("shift", "the log-probs of the next token"): np.r_[logp[1:], logp[-1:]],
        ("shift", "the log-probs of the previous token"): np.r_[logp[:1], logp[:-1]],
    }


def _of_logits(raw: Tensor, ids: Tensor, temperature: float) -> dict[Name, Floats]:
    """Hypotheses that need no forward pass of their own."""
    others = [one for one in TEMPERATURES if one != temperature]
    found = {("temperature", f"temperature {one:g}"): _chosen(raw / one, ids) for one in others}
    return found | _truncated((raw / temperature).log_softmax(-1), ids)


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
