"""``rescore``: the sampled tokens scored again with a model at hand, once under each hypothesis about the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.diagnose.evidence import SAME
from offcorr.diagnose.hypotheses import Name, chosen, other_prompts, shifted, transformed
from offcorr.diagnose.record import Floats, Record
from offcorr.diagnose.variants import cast, has_adapter, rounded_caches, without_adapter

PRECISIONS = ("bf16", "fp16", "int8", "fp8_e4m3")
FARTHEST = 5.0
"""|d| (nats) that a token counts at most; a token that a hypothesis makes impossible counts this much."""

SLIPS = 1e-3
"""Share of the tokens that a hypothesis about the draws leaves to the model as it is: rounding moves a bound."""

AS_IT_IS: Name = ("", "")

PIECE = 2**29
"""Bytes of the arrays of one piece of a sequence, about, each of [tokens, vocabulary] numbers."""
COPIES = 24
"""Bytes per number of such an array: logits, log-probs, probabilities, and what sorting them takes."""


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis about the sampler: the part of the gap that it explains, and how well the tokens agree with it.

    Args:
        cause: the id of the cause that it belongs to.
        words: the hypothesis.
        gap: mean |d| that is left (nats).
        before: mean |d| without the hypothesis (nats).
        share: 1 - gap / before; below 0: the hypothesis makes the gap wider.
        drawn: log-likelihood of all tokens under the hypothesis, less that of the model as it is (nats); above 0: the
            tokens look as if they were drawn so.
    """

    cause: str
    words: str
    gap: float
    before: float
    share: float
    drawn: float = 0.0


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
        drawn_as_logged: log-likelihood of all tokens by the sampler's log-probs, less that of the model as it is
            (nats).  If these are of the distributions that the tokens were drawn from, no hypothesis that was chosen
            beforehand exceeds it by log(1 / a) with a probability of more than a.
    """

    sequences: int
    gap: float
    logged: float
    trainer: float
    hypotheses: Sequence[Hypothesis]
    left_out: Sequence[str] = ()
    drawn_as_logged: float = 0.0


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
        records: some tens of sequences; each costs about fifteen forward passes, and one per checkpoint.
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
    base: list[Floats] = []
    scored: dict[Name, list[Floats]] = {}
    with _mode(model, training=False):
        for done, record in enumerate(records, 1):
            found = _as_it_is(model, record, temperature)
            base.append(found.pop(AS_IT_IS))
            for name, logp in found.items():
                scored.setdefault(name, []).append(logp)
            report("as it is", done, len(records))

    def again(words: str, module: nn.Module, changed: Sequence[Record] = records, **how: Any) -> list[Floats]:
        logps = []
        with _mode(module, how.pop("training", False)):
            for done, record in enumerate(changed, 1):
                pieces = _pieces(module, record, **how)
                logps.append(np.concatenate([chosen(raw / temperature, ids) for raw, ids in pieces]))
                report(words, done, len(records))
        return logps

    for name, changed in other_prompts(records).items():
        scored[name] = again(name[1], model, changed)
    left_out = []
    for precision in PRECISIONS:
        words = f"weights in {precision}"
        try:
            scored["precision", words] = again(words, cast(model, precision))
        except ValueError as error:
            left_out.append(f"{words}: {error}")
    for words, cache in rounded_caches().items():
        try:
            scored["kv_cache", words] = again(words, model, cache=cache)
        except ValueError as error:
            left_out.append(f"{words}: {error}")
    if has_adapter(model):
        words = "the weights without the adapter"
        with without_adapter(model):
            scored["adapter_not_synced", words] = again(words, model)
    for named, module in checkpoints:
        words = f"the weights of {named}"
        scored["stale_weights", words] = again(words, module)
    dropped = np.concatenate(again("dropout on", model, training=True))

    valid = np.concatenate([_valid(record) for record in records])
    if not valid.any():
        raise ValueError("no token of the sequences to score again has a finite log-prob of both sides")
    ours = np.concatenate(base)[valid]
    sampler = np.concatenate([record.rollout_logp for record in records])[valid]
    trainer = np.concatenate([record.old_logp for record in records])[valid]
    gap, logged = _gap(ours, sampler), _gap(trainer, sampler)
    hypotheses = []
    for (cause, words), logps in scored.items():
        logp = np.concatenate(logps)[valid]
        drawn = 0.0 if cause == "shift" else _likelier(logp, ours)
        hypotheses.append(_hypothesis(cause, words, _gap(logp, sampler), gap, drawn))
    noise = _gap(dropped[valid], ours)
    if noise > SAME and logged / 3 < noise < logged * 3:  # the trainer is off by as much as dropout makes
        hypotheses.append(_hypothesis("dropout", "dropout off", gap, logged))
    hypotheses.sort(key=lambda one: -one.share)
    return Rescored(
        len(records), gap, logged, _gap(ours, trainer), hypotheses, left_out, _likelier(sampler, ours, slips=0.0)
    )


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


def _hypothesis(cause: str, words: str, gap: float, before: float, drawn: float = 0.0) -> Hypothesis:
    """Where there is no gap, nothing is explained."""
    return Hypothesis(cause, words, gap, before, 1 - gap / before if before > SAME else 0.0, drawn)


def _likelier(logp: Floats, base: Floats, slips: float = SLIPS) -> float:
    """Log-likelihood ratio (nats) of the tokens; ``slips``: the share of them that ``base`` drew."""
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log1p(-slips) + logp, np.log(slips) + base).sum() - base.sum())


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


def _pieces(
    model: nn.Module, record: Record, cache: Callable[[int], Any] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [t, V] (float32) and token ids [t] of the completion's tokens, a piece at a time.

    Args:
        cache: makes an empty cache from the length of the prompt, which is read first, by itself.
    """
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
    cuts = {*range(0, last, size), last} | ({first + 1} if cache else set())
    whole = len(cuts) == 2
    kept: Any = cache(first + 1) if cache else None
    for start, stop in pairwise(sorted(cuts)):
        output = model(input_ids=ids[None, start:stop], past_key_values=kept, use_cache=not whole or cache is not None)
        returned = getattr(output, "past_key_values", None)
        if (returned is None and not whole) or (cache and not kept.get_seq_length()):
            pieces = "" if cache else f"a sequence of {last + 1} tokens is scored in pieces of {size}, and "
            advice = "" if cache else ": leave longer sequences out"
            raise ValueError(f"{place}{pieces}{type(model).__name__} keeps no keys and values between them{advice}")
        kept = returned
        begin = max(first, start)
        if begin < stop:
            yield output.logits[0, begin - start :].float(), ids[begin + 1 : stop + 1]


def _as_it_is(model: nn.Module, record: Record, temperature: float) -> dict[Name, Floats]:
    """[T] log-probs of the model as it is, and of each hypothesis that needs no forward pass of its own."""
    parts: list[dict[Name, Floats]] = []
    done = 0
    for raw, ids in _pieces(model, record):
        before = record.completion_ids[:done]
        parts.append(transformed(raw, ids, temperature, record.prompt_ids, before))
        parts[-1][AS_IT_IS] = chosen(raw / temperature, ids)
        done += len(ids)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return found | shifted(found[AS_IT_IS])
