"""``rescore``: the sampled tokens scored again with a model at hand, once under each hypothesis about the sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offcorr.diagnose.adapters import has_adapter, without_adapter
from offcorr.diagnose.causes.over_steps import ranges
from offcorr.diagnose.draws import Draws
from offcorr.diagnose.earlier import earlier
from offcorr.diagnose.evidence import SAME
from offcorr.diagnose.hypotheses import (
    TEMPERATURES,
    Name,
    chosen,
    distributions,
    other_prompts,
    shared_ends,
    shifted,
    transformed,
    without,
)
from offcorr.diagnose.passes import passes
from offcorr.diagnose.record import Floats, Record
from offcorr.diagnose.variants import cast, rounded_caches

PRECISIONS = ("bf16", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
FARTHEST = 5.0
"""|d| (nats) that a token counts at most; a token that a hypothesis makes impossible counts this much."""

FITS = 0.02
"""Mean |difference| (nats) from the trainer's log-probs up to which a model may be the one that computed them."""

SLIPS = 1e-3
"""Share of the tokens that a hypothesis about the draws leaves to the model as it is: rounding moves a bound."""

TRANSFORMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Causes by which a sampler changes a model's distributions before it draws."""

OF_CHECKPOINTS = ("stale_weights", "stale_prefix_cache")
"""Causes whose hypotheses need a checkpoint."""

FALSE_ALARMS = 1e-3
"""Share of the dumps, at most, whose tokens were drawn as they were logged and would be said not to be."""

OF_EITHER = ("truncated_prompt", "chat_template", "precision", "stale_weights", "adapter_not_synced")
"""Causes whose hypotheses are about the trainer, too, where the sampler's log-probs are the model's own."""

EXPLAINS = 0.6
"""A hypothesis is named as the cause if it explains more than this share of the gap."""

NEARLY_ALL = 0.9
"""Share of the gap from which no other template is looked for."""

FEW = 8
"""Sequences that the trainer's temperature, and another template, are found from."""

TEMPLATE = 16
"""First and last tokens of a prompt, at most, that are tried as another template's."""

AS_IT_IS: Name = ("", "")

Work = Callable[[Tensor, Tensor, Record, int], dict[Name, Floats]]
"""Takes logits [t, V], token ids [t], their record and the place of the first of them in its completion."""


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
        temperature: of the trainer.
        versions: ``rollout_version`` of the tokens that were scored, each once; empty: not logged.
        of_trainer: hypotheses about the trainer, whose gap is from its logged log-probs; empty where the sampler's are
            not the model's own.
        dropout: mean |change| of the model's log-probs where its dropout is on (nats).
        experts: the model has experts, between which a router chooses.
        steps: optimizer steps of the sequences that were scored, each once; empty: not logged.
        misfit: what speaks against the transform that fits the tokens best, or against the model as it is where none
            was found, in words; empty: nothing.
    """

    sequences: int
    gap: float
    logged: float
    trainer: float
    hypotheses: Sequence[Hypothesis]
    left_out: Sequence[str] = ()
    drawn_as_logged: float = 0.0
    temperature: float = 1.0
    versions: Sequence[int] = ()
    of_trainer: Sequence[Hypothesis] = ()
    dropout: float = 0.0
    experts: bool = True
    steps: Sequence[int] = ()
    misfit: str = ""

    @property
    def threshold(self) -> float:
        """Nats by which some transform fits the tokens better than what was logged by chance, once in 1000 dumps."""
        return float(np.log((1 + sum(one.cause in TRANSFORMS for one in self.hypotheses)) / FALSE_ALARMS))

    @property
    def as_the_model(self) -> bool:
        """Whether the sampler did what the model does, so that the trainer's log-probs are what differs.

        Where those are noisy, the trainer's temperature is found roughly, and the model at it is the sampler's nearly.
        """
        if self.logged <= SAME:
            return False
        return self.gap < 0.1 * self.logged or self.gap < 0.5 * self.logged < self.trainer

    @property
    def other_model(self) -> bool:
        """Whether the model is not the one that scored: it fits the trainer's log-probs no better than the sampler's.

        Where it fits the sampler's, or does under a hypothesis, the trainer's log-probs are what is wrong.
        """
        explained = self.hypotheses[0].gap if self.hypotheses else self.gap
        return self.trainer > max(FITS, 0.5 * self.logged) and min(self.gap, explained) > 0.1 * self.trainer

    @property
    def best_drawn(self) -> tuple[Hypothesis | None, float]:
        """The transform that fits the tokens best, and by how much better (nats) than the log and the model do."""
        fits = [one for one in self.hypotheses if one.cause in TRANSFORMS]
        best = max(fits, key=lambda one: one.drawn, default=None)
        return best, -np.inf if best is None else best.drawn - max(0.0, self.drawn_as_logged)


@torch.no_grad()
def rescore(
    records: Sequence[Record],
    model: nn.Module,
    *,
    checkpoints: Iterable[tuple[str, nn.Module]] = (),
    temperature: float | None = None,
    report: Callable[[str, int, int], None] = lambda words, done, of: None,
) -> Rescored:
    """Scores the completions under each hypothesis and says how much of the gap each explains.

    The model's weights are not changed, and each of its modules is left in the mode that it was in.  What is computed
    at a time takes about 500 MB at most, beside the model.

    Args:
        records: some tens of sequences; each costs about twenty forward passes, and three to five per checkpoint; some
            more where another template is looked for.
        model: a causal language model of transformers, with the weights that ``old_logp`` is of.
        checkpoints: names and models whose weights the sampler may have had in place of the model's, throughout, for
            the prompt, or up to some token; taken one after the other.
        temperature: the trainer's; None: the one at which the model's log-probs are nearest to the trainer's.
        report: called with a hypothesis, the number of sequences scored under it and their total.

    Raises:
        ValueError: there is no sequence or no token that both sides scored, a prompt is empty, a token id lies outside
            the model's vocabulary, or a sequence needs pieces and the model keeps no keys and values.
    """
    if not records:
        raise ValueError("there is no sequence to score again")
    if temperature is None:
        temperature, _ = fit(records[:FEW], model)
    elif not (np.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}, expected a number > 0")

    scorer = _Scorer(records, model, temperature, report)
    base, scored = scorer.as_it_is()
    left_out = []
    for words, make in scorer.variants(checkpoints, base):
        try:
            scored |= make()
        except ValueError as error:
            left_out.append(f"{words}: {error}")
    dropped = np.concatenate(scorer.again("dropout on", model, training=True))

    valid = np.concatenate([_valid(record) for record in records])
    if not valid.any():
        raise ValueError("no token of the sequences to score again has a finite log-prob of both sides")
    ours = np.concatenate(base)[valid]
    sampler = np.concatenate([record.rollout_logp for record in records])[valid]
    trainer = np.concatenate([record.old_logp for record in records])[valid]
    gap, logged = _gap(ours, sampler), _gap(trainer, sampler)

    def hypothesis(name: Name, logps: list[Floats]) -> Hypothesis:
        logp = np.concatenate(logps)[valid]
        return _hypothesis(*name, _gap(logp, sampler), gap, 0.0 if name[0] == "shift" else _likelier(logp, ours))

    def of_trainer(name: Name, logps: list[Floats]) -> Hypothesis:
        return _hypothesis(*name, _gap(np.concatenate(logps)[valid], trainer), logged)

    hypotheses = [hypothesis(name, logps) for name, logps in scored.items()]
    noise = _gap(dropped[valid], ours)
    if noise > SAME and logged / 3 < noise < logged * 3:  # the trainer is off by as much as dropout makes
        hypotheses.append(_hypothesis("dropout", "dropout off", gap, logged))
    hypotheses.sort(key=lambda one: -one.share)
    if gap > SAME and hypotheses[0].share <= NEARLY_ALL:
        hypotheses += [hypothesis(*found) for found in scorer.other_template("rollout_logp")]
        hypotheses.sort(key=lambda one: -one.share)
    trainers: list[Hypothesis] = []
    if logged > SAME and gap < 0.1 * logged:
        trainers = [of_trainer(name, logps) for name, logps in scored.items() if name[0] in OF_EITHER]
        if max(one.share for one in trainers) <= NEARLY_ALL:
            trainers += [of_trainer(*found) for found in scorer.other_template("old_logp")]
        trainers.sort(key=lambda one: -one.share)
    as_logged = _likelier(sampler, ours, slips=0.0)
    trained = _gap(ours, trainer)
    held = rollout_versions(records)
    experts = any("expert" in name.lower() for name, _ in model.named_modules())
    steps = sorted({record.step for record in records if record.step is not None})
    numbers = (gap, logged, trained, hypotheses, left_out, as_logged, temperature, held, trainers, noise, experts)
    rescored = Rescored(len(records), *numbers, steps)
    best, ahead = rescored.best_drawn
    words = f"temperature {temperature:g}" if best is None or ahead <= rescored.threshold else best.words
    return dataclasses.replace(rescored, misfit=scorer.drawn_under(words).misfit())


def rollout_versions(records: Iterable[Record]) -> list[int]:
    """The versions of the sampler's weights in the records, each once: those of the tokens that both sides scored.

    >>> row = {"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1, None], "logp": [-1, -2]}
    >>> rollout_versions([Record.of(row | {"rollout_version": version}) for version in (7, [4, 5])])
    [4, 7]
    """
    found: set[int] = set()
    for record in records:
        if record.rollout_version is not None:
            found.update(np.broadcast_to(record.rollout_version, len(record))[_valid(record)].tolist())
    return sorted(found)


@dataclass(frozen=True)
class _Scorer:
    """Log-probs of the records under hypotheses; see ``rescore``."""

    records: Sequence[Record]
    model: nn.Module
    temperature: float
    report: Callable[[str, int, int], None]

    def again(self, words: str, module: nn.Module, records: Sequence[Record] | None = None, **how: Any) -> list[Floats]:
        """[T] log-probs of each record; ``how``: see ``passes``."""
        changed = self.records if records is None else records
        return _scored(module, changed, self._plain, lambda done: self._said(words, done), **how)[AS_IT_IS]

    def as_it_is(self) -> tuple[list[Floats], dict[Name, list[Floats]]]:
        """The model's log-probs, and those under the hypotheses that need no other pass."""
        scored = _scored(self.model, self.records, self._transforms, lambda done: self._said("as it is", done))
        base = scored.pop(AS_IT_IS)
        for name in shifted(base[0]):
            scored[name] = [shifted(logp)[name] for logp in base]
        return base, scored

    def variants(
        self, checkpoints: Iterable[tuple[str, nn.Module]], base: list[Floats]
    ) -> Iterator[tuple[str, Callable[[], dict[Name, list[Floats]]]]]:
        """Hypotheses in words, and what scores each; it raises ValueError where the model cannot be changed so."""
        for name, changed in other_prompts(self.records).items():
            yield name[1], partial(self._one, name, lambda: self.model, records=changed)
        for precision in PRECISIONS:
            words = f"weights in {precision}"
            yield words, partial(self._one, ("precision", words), partial(cast, self.model, precision))
        for words, cache in rounded_caches().items():
            yield words, partial(self._one, ("kv_cache", words), lambda: self.model, cache=cache)
        if has_adapter(self.model):
            words = "the weights without the adapter"
            with without_adapter(self.model):
                yield words, partial(self._one, ("adapter_not_synced", words), lambda: self.model)
        for named, module in checkpoints:
            found = earlier(named, module, self.model, self.records, base, self.again)
            yield f"the weights of {named}", partial(dict, found)

    def other_template(self, side: str) -> Iterator[tuple[Name, list[Floats]]]:
        """The log-probs after the prompts without the first and last tokens that one side most likely did not read.

        Args:
            side: the field of its log-probs.
        """

        def gap(some: Sequence[Record]) -> float:
            logps = self.again("other templates", self.model, some)
            valid = np.concatenate([_valid(record) for record in some])
            logged = np.concatenate([getattr(record, side) for record in some])
            return _gap(np.concatenate(logps)[valid], logged[valid])

        first, last = template(self.records, gap)
        if first or last:
            words = f"the prompt without its first {first} and last {last} tokens"
            cut = [without(record, first, last) for record in self.records]
            yield ("chat_template", words), self.again(words, self.model, cut)

    def drawn_under(self, words: str) -> Draws:
        """The draws of tokens that count, beside what a hypothesis of ``transformed`` expects."""
        draws = Draws()

        def work(raw: Tensor, ids: Tensor, record: Record, start: int) -> dict[Name, Floats]:
            logq = distributions(words, raw, ids, self.temperature, record.prompt_ids, record.completion_ids[:start])
            valid = torch.from_numpy(_valid(record)[start : start + len(ids)]).to(ids.device)
            places = torch.arange(start, start + len(ids), device=ids.device)
            draws.add(logq[valid], ids[valid], places[valid])
            return {}

        _scored(self.model, self.records, work, lambda done: self._said(f"draws under {words}", done))
        return draws

    def _one(self, name: Name, module: Callable[[], nn.Module], **how: Any) -> dict[Name, list[Floats]]:
        return {name: self.again(name[1], module(), **how)}

    def _plain(self, raw: Tensor, ids: Tensor, record: Record, start: int) -> dict[Name, Floats]:
        return {AS_IT_IS: chosen(raw / self.temperature, ids)}

    def _transforms(self, raw: Tensor, ids: Tensor, record: Record, start: int) -> dict[Name, Floats]:
        found = transformed(raw, ids, self.temperature, record.prompt_ids, record.completion_ids[:start])
        return found | self._plain(raw, ids, record, start)

    def _said(self, words: str, done: int) -> None:
        self.report(words, done, len(self.records))


def template(records: Sequence[Record], gap: Callable[[Sequence[Record]], float]) -> tuple[int, int]:
    """The first and last tokens of the prompts that one side most likely did not read: of those that all share.

    Args:
        gap: mean |d| of records.
    """
    some = records[:: max(1, len(records) // FEW)][:FEW]
    most_first, most_last = shared_ends(records, TEMPLATE)
    first = last = 0
    for _ in range(2):  # what stands next to the completion weighs most
        last = min(range(most_last + 1), key=lambda n: gap([without(record, first, n) for record in some]))
        first = min(range(most_first + 1), key=lambda n: gap([without(record, n, last) for record in some]))
    return first, last


@torch.no_grad()
def fit(records: Sequence[Record], model: nn.Module) -> tuple[float, float]:
    """The temperature at which the model's log-probs are nearest to the trainer's, and mean |difference| there (nats).

    The temperature is 1 where no other makes less than half of the difference, from the trainer's log-probs or, beside
    noise in these, from the sampler's: what else the trainer does differently flattens or sharpens its distributions,
    too.
    """
    valid = np.concatenate([_valid(record) for record in records])
    trainer, sampler = (
        np.concatenate([getattr(record, side) for record in records])[valid] for side in ("old_logp", "rollout_logp")
    )

    def gaps(grid: Sequence[float], side: Floats = trainer) -> dict[float, float]:
        def work(raw: Tensor, ids: Tensor, record: Record, start: int) -> dict[Name, Floats]:
            return {("temperature", f"{one:g}"): chosen(raw / one, ids) for one in grid}

        logps = _scored(model, records, work, lambda done: None)
        return {one: _gap(np.concatenate(logps["temperature", f"{one:g}"])[valid], side) for one in grid}

    if not valid.any():
        return 1.0, np.inf
    found = gaps(TEMPERATURES)
    for step in (0.05, 0.01):
        near = min(found, key=lambda one: found[one])
        grid = [round(near + count * step, 2) for count in range(-5, 6)]
        found |= gaps([one for one in grid if one > 0 and one not in found])
    best = min(found, key=lambda one: found[one])
    if found[best] > 0.5 * found[1.0]:
        engine = gaps([best, 1.0], sampler)
        if found[best] > 0.9 * found[1.0] or engine[best] > 0.5 * engine[1.0]:
            best = 1.0
    return best, found[best]


def steps_in_words(steps: Sequence[int]) -> str:
    """Optimizer steps, at least one, in rising order.

    >>> steps_in_words([3]), steps_in_words([1, 2, 5])
    ('step 3', 'steps 1 to 5')
    """
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def described(rescored: Rescored, versions: Sequence[int] = (), most: int = 6) -> list[str]:
    """Sentences about the outcome: whether the model fits the log, then the hypotheses that explain most.

    Args:
        versions: ``rollout_versions`` of the dump.

    >>> half = Hypothesis("temperature", "temperature 0.7", 0.01, 0.1, 0.9)
    >>> described(Rescored(32, 0.1, 0.1, 0.0, [half]))[1]
    'temperature 0.7 [temperature] explains 90% of it; 0.01 nats are left'
    """
    of_steps = f" of {steps_in_words(rescored.steps)}" if rescored.steps else ""
    said = [
        f"the model's log-probs of {rescored.sequences} sequences{of_steps} differ from the sampler's "
        f"by {rescored.gap:.2g} nats per token on average"
    ]
    if rescored.temperature != 1 and not rescored.other_model:
        said.append(
            f"the model's log-probs are taken at a temperature of {rescored.temperature:g}, as old_logp is nearest to "
            "them there: the trainer's, or the model's weights are of another step (--temperature says another)"
        )
    if rescored.other_model:
        said.append(
            f"they differ from the trainer's logged ones (old_logp) by {rescored.trainer:.2g} nats, so this is not the "
            "model that computed them, and the hypotheses say nothing: give the weights that old_logp is of, or the "
            "trainer's --temperature. Where the sampler supplies old_logp, as OffPolicy(lag=...) does, they are the "
            "weights that sampled; elsewhere those that the trainer had when the generation of these samples began "
            "(with steps_per_generation or num_iterations above 1 that is before the last step). A dump of many "
            "steps has log-probs of as many weights: give the file of one step, and the checkpoint of the step before"
        )
        if versions:
            said.append(f"the records were sampled by {_versions(versions)}")
        return said
    if rescored.as_the_model and rescored.best_drawn[1] <= rescored.threshold:
        said.append(
            f"the trainer's logged ones differ from the sampler's by {rescored.logged:.2g} nats, so the sampler did "
            "what the model does: look for the cause in how the trainer computes log-probs, or, where the model has "
            "the weights that sampled, in the trainer's own, which may be newer"
        )
        said += [
            f"{one.words} [{one.cause}], of the trainer, explains {one.share:.0%} of that; {one.gap:.2g} nats are left"
            for one in rescored.of_trainer[:most]
            if one.share > 0.05
        ]
    elif rescored.trainer > max(SAME, 2 * rescored.logged):
        said.append(
            f"they differ from the trainer's logged ones (old_logp) by {rescored.trainer:.2g} nats, more than these "
            f"from the sampler's ({rescored.logged:.2g}): too much to explain so small a gap. The weights of a step "
            "near these leave such a difference, and so does another precision" + _of_versions(rescored)
        )
    elif rescored.trainer > max(10 * SAME, 0.1 * rescored.logged):
        said.append(
            f"they differ from the trainer's logged ones (old_logp) by {rescored.trainer:.2g} nats, as dropout would, "
            "the weights of a step beside that of old_logp, or another precision"
        )
    telling = [one for one in rescored.hypotheses[:most] if one.share > 0.05]
    said += [
        f"{one.words} [{one.cause}] explains {one.share:.0%} of it; {one.gap:.2g} nats are left" for one in telling
    ]
    if not telling and rescored.gap > SAME:
        said.append(f"none of the {len(rescored.hypotheses)} hypotheses explains more than 5% of it")
    if _no_checkpoint_explains(rescored):
        said.append(f"no --checkpoint explains more than {EXPLAINS:.0%} of it")
        said[-1] += _of_versions(rescored)
    best, ahead = rescored.best_drawn
    if best is not None and ahead <= 0:
        said.append("no temperature, truncation or penalty fits the sampled tokens better than what was logged")
    elif best is not None and ahead <= FAINT:
        said.append(
            "no temperature, truncation or penalty was found in how the tokens were drawn; one that is too slight for "
            "these sequences may be there: score more (--rescored)"
        )
    elif best is not None and ahead <= rescored.threshold:
        said.append(
            f"of all temperatures, truncations and penalties '{best.words}' fits the sampled tokens best: they are "
            f"e^{ahead:.1f} times likelier so than as logged. By chance the best of so many reaches "
            f"e^{rescored.threshold:.0f} in one of 1000 dumps, so it may be there or not: score more (--rescored)"
        )
    said += [f"not tried: {one}" for one in rescored.left_out]
    return said


FAINT = 4.0
"""Log-likelihood ratio (nats) of a transform to what was logged, up to which its name says nothing."""


def _no_checkpoint_explains(rescored: Rescored) -> bool:
    """Whether a checkpoint was tried, there is a gap of the sampler's, and no hypothesis explains enough of it."""
    tried = any(one.cause in OF_CHECKPOINTS for one in rescored.hypotheses)
    found = rescored.hypotheses and rescored.hypotheses[0].share > EXPLAINS
    return tried and not found and rescored.gap > SAME and not rescored.as_the_model


def _of_versions(rescored: Rescored) -> str:
    if not rescored.versions:
        return ""
    return f". The sequences that were scored were sampled by {_versions(rescored.versions)}"


def _versions(versions: Sequence[int]) -> str:
    """
    >>> _versions([4, 5, 6])
    "versions 4 to 6 (rollout_version, in optimizer steps: version 6 is that of TRL's checkpoint-6)"
    >>> _versions([0])
    'version 0 (rollout_version, in optimizer steps: version 0 is the model that the run began with)'
    """
    known = np.array(versions, dtype=float)
    last = versions[-1]
    of = f"that of TRL's checkpoint-{last}" if last else "the model that the run began with"
    return (
        f"version{'s' * (len(versions) > 1)} {ranges(known, np.arange(known[0], last + 1))} (rollout_version, in "
        f"optimizer steps: version {last} is {of})"
    )


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


def _scored(
    model: nn.Module, records: Sequence[Record], work: Work, report: Callable[[int], None], **how: Any
) -> dict[Name, list[Floats]]:
    """By name, [T] numbers of each record, which ``work`` makes of the logits; ``how``: see ``passes``."""
    parts: list[list[dict[Name, Floats]]] = [[] for _ in records]
    done = 0
    for row, start, raw, ids in passes(model, records, **how):
        parts[row].append(work(raw, ids, records[row], start))
        if start + len(ids) == len(records[row]):
            done += 1
            report(done)
    names = next(iter(filter(None, parts)), [{}])[0]
    nothing = np.empty(0)  # of a completion without tokens
    return {name: [np.concatenate([nothing, *(part[name] for part in row)]) for row in parts] for name in names}
