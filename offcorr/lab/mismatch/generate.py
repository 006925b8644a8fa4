"""``generate``: the logs of a trainer and a sampler between which the named causes, and no others, stand."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from offcorr.diagnose.record import Floats, Integers, Record
from offcorr.lab.mismatch import logs, numerics, tokens, transforms, weights  # noqa: F401  (they register causes)
from offcorr.lab.mismatch.decode import Decoded, Transform, decode, score
from offcorr.lab.mismatch.language import EOS
from offcorr.lab.mismatch.models import KEPT, VARIANTS, Recipe, advantages, policy_gradient, subject
from offcorr.lab.mismatch.setup import CAUSES, KINDS, STRENGTHS, Log, Setup

GROUP = 4
"""Samples per prompt."""


@dataclass(frozen=True)
class Dump:
    """Records with the truth about them.

    Args:
        records: one per sequence.
        causes: the names of what was made.
        architecture: of the model.
        seed: of all choices.
        strength: "weak", "usual" or "strong".
        settings: what was chosen; and ``drawn_gap``, the mean distance (nats) of ``old_logp`` from the log-probs
            of the distribution that the tokens were drawn from, whatever was logged.
    """

    records: list[Record]
    causes: tuple[str, ...]
    architecture: str
    seed: int
    strength: str
    settings: dict[str, Any]


Sample = Callable[[Setup, list[list[int]], int], Decoded]
"""Samples a completion for each prompt, of so many tokens at most, as the setup's sampler does."""


def generate(
    causes: Sequence[str], *, architecture: str, seed: int, sequences: int = 32, strength: str = "usual"
) -> list[Record]:
    """The records of ``make``, where arguments and errors are described."""
    return make(causes, architecture=architecture, seed=seed, sequences=sequences, strength=strength).records


def make(
    causes: Sequence[str],
    *,
    architecture: str,
    seed: int,
    sequences: int = 32,
    strength: str = "usual",
    recipe: Recipe | None = None,
) -> Dump:
    """Samples and scores sequences with the causes at work, several together, and nothing else apart.

    Args:
        causes: names of ``CAUSES``; none, or "clean": trainer and sampler agree.
        architecture: one of ``ARCHITECTURES``.
        seed: of every choice: the model (``VARIANTS`` per architecture), prompts, tokens, the causes' settings.
        sequences: number of sequences; four per prompt.
        strength: "weak", "usual" or "strong".
        recipe: of the training of the model; None: the default.

    Raises:
        ValueError: an unknown name, causes that cannot be made together or not with this architecture.
    """
    chosen = check(causes, architecture, strength)
    if sequences < 1:
        raise ValueError(f"sequences is {sequences}, expected at least 1")
    setup = prepare(chosen, architecture=architecture, seed=seed, strength=strength, recipe=recipe)
    records = logged(setup, sequences)
    return Dump(records, chosen, architecture, seed, strength, setup.settings)


def prepare(
    causes: Sequence[str], *, architecture: str, seed: int, strength: str = "usual", recipe: Recipe | None = None
) -> Setup:
    """The trainer and the sampler of ``make``, before anything is sampled; arguments and errors as there."""
    chosen = check(causes, architecture, strength)
    # Different causes get different choices even with the same seed.
    rng = np.random.default_rng([seed, zlib.crc32(" ".join([*chosen, architecture, strength]).encode())])
    setup = Setup(subject(architecture, seed % VARIANTS, recipe), rng, strength)
    # Settings that vary even where trainer and sampler agree.
    setup.temperature = setup.trainer_temperature = float(rng.choice([1.0, 1.0, 1.0, 0.8, 0.7]))
    setup.tools = bool(rng.random() < 0.25)
    setup.placeholder = float(rng.choice([0.0, 0.0, np.nan]))
    for name in chosen:
        CAUSES[name].apply(setup)
    setup.settings |= {name: getattr(setup, name) for name in ("temperature", "trainer_temperature", "tools")}
    return setup


def trainer_model(causes: Sequence[str], *, architecture: str, seed: int, strength: str = "usual") -> nn.Module:
    """The model that somebody has who made the dump of ``make``, with the trainer's weights.

    A LoRA is apart, so that it can be switched off.  What the trainer does wrong with these weights, such as dropout
    or wrong positions, is not part of them.  Arguments and errors as there.
    """
    setup = prepare(causes, architecture=architecture, seed=seed, strength=strength)
    return setup.saved or setup.trainer


def other_model(causes: Sequence[str], *, architecture: str, seed: int, strength: str = "usual") -> nn.Module:
    """A checkpoint that somebody has beside ``trainer_model``: of the sampler's weights, or of no policy of the dump.

    The latter where the sampler has the trainer's weights.  Arguments and errors as there.
    """
    setup = prepare(causes, architecture=architecture, seed=seed, strength=strength)
    own = (setup.saved or setup.trainer).state_dict()
    for module in setup.sampler:
        others = module.state_dict()
        if others.keys() != own.keys() or any(not torch.equal(others[key], own[key]) for key in own):
            return module
    return setup.subject.at("rl", KEPT[-1])


def check(causes: Sequence[str], architecture: str, strength: str = "usual") -> tuple[str, ...]:
    """The causes in the order in which they are applied.

    Raises:
        ValueError: an unknown name, causes that cannot be made together or not with this architecture.
    """
    unknown = [name for name in causes if name not in CAUSES]
    if unknown:
        raise ValueError(f"causes has {', '.join(map(repr, unknown))}, expected some of {', '.join(CAUSES)}")
    if strength not in STRENGTHS:
        raise ValueError(f"strength is {strength!r}, expected one of {', '.join(STRENGTHS)}")
    named = [name for name in CAUSES if name in causes and name != "clean"]
    chosen = tuple(sorted(named, key=_order)) or ("clean",)
    for name in chosen:
        if architecture not in CAUSES[name].architectures:
            fits = ", ".join(CAUSES[name].architectures)
            raise ValueError(f"{name} cannot be made with architecture {architecture!r}, expected one of {fits}")
    for first, second in combinations(chosen, 2):
        if shared := apart(first, second):
            raise ValueError(f"{first} and {second} cannot be made together: both need {', '.join(shared)}")
    return chosen


def apart(first: str, second: str) -> list[str]:
    """The parts of a setup for which two causes exclude each other; none: they can be made together.

    >>> apart("top_p", "precision"), apart("top_p", "top_p_silent")
    ([], ['reported', 'top_p'])
    """
    one, other = CAUSES[first], CAUSES[second]
    shared = (one.changes & (other.changes | other.keeps)) | (one.keeps & other.changes)
    return sorted(shared)


def pairs(architecture: str) -> list[tuple[str, str]]:
    """The pairs of causes that can be made together with an architecture.

    >>> ("moe_routing", "shift") in pairs("mixtral"), ("moe_routing", "shift") in pairs("llama")
    (True, False)
    """
    fitting = [name for name, one in CAUSES.items() if architecture in one.architectures and name != "clean"]
    return [pair for pair in combinations(sorted(fitting, key=_order), 2) if not apart(*pair)]


def _order(name: str) -> int:
    return KINDS.index(CAUSES[name].kind)


def logged(setup: Setup, sequences: int, sample: Sample | None = None) -> list[Record]:
    """The records that a setup leaves.

    Args:
        sequences: number of sequences; four per prompt.
        sample: another sampler than the setup's own, which then applies the setup's temperature, transforms, weights
            and precision by its own means, and reports the setup's kind of log-probs; tools cannot write in between.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(setup.rng.integers(2**62)))
        return _records(setup, sequences, sample)


def _records(setup: Setup, sequences: int, sample: Sample | None) -> list[Record]:
    rng, task = setup.rng, setup.subject.task
    groups = -(-sequences // GROUP)
    prompts = [prompt for prompt in task.prompts(rng, groups) for _ in range(GROUP)]
    longest = int(rng.integers(min(64, task.longest), task.longest + 1))
    forced: list[dict[int, int]] = [{} if sample else _tools(setup, longest) for _ in prompts]
    sampled = sample(setup, prompts, longest) if sample else _sample(setup, prompts, longest, forced)
    reported = {
        "processed": sampled.processed,
        "raw": sampled.raw,
        "divided": [[logp / setup.temperature for logp in row] for row in sampled.raw],
    }[setup.reported]
    # Rewards are of what was sampled; everything after is about how it is logged.
    rewards = [task.reward(completion) for completion in sampled.completion_ids]
    written = []
    for row, completion in enumerate(sampled.completion_ids):
        own = [t not in forced[row] for t in range(len(completion))]
        logp = [value if mine else setup.placeholder for value, mine in zip(reported[row], own, strict=True)]
        log = Log(row, list(completion), logp, own, list(own), completion[-1] == EOS)
        for edit in setup.edits:
            edit(log)
        written.append(log)

    prompts = setup.trainer_prompts(prompts)
    completions = [log.completion_ids for log in written]
    old, entropy = _score(setup, setup.trainer, prompts, completions)
    distances = [
        np.abs(old[row][:same] - sampled.processed[row][:same])[np.array(log.sampled[:same], dtype=bool)]
        for row, log in enumerate(written)
        for same in [_common(log.completion_ids, sampled.completion_ids[row])]
    ]
    if sample is None:  # another sampler knows only what it reports
        setup.settings["drawn_gap"] = float(np.concatenate(distances).mean())
    gains = advantages(rewards, GROUP)
    new = None
    if setup.updates or rng.random() < 2 / 3:
        updated = _updated(setup, prompts, completions, gains)
        new, _ = _score(setup, updated, prompts, completions)
    version = int(rng.integers(20, 200))
    lag = setup.version_lag if rng.random() < 2 / 3 else None
    masked = any(not all(log.mask) for log in written) or rng.random() < 0.5
    return [
        Record(
            prompt_ids=np.array(prompts[row], dtype=np.int64),
            completion_ids=np.array(log.completion_ids, dtype=np.int64),
            rollout_logp=np.array(log.rollout_logp, dtype=np.float64),
            old_logp=old[row],
            logp=None if new is None else new[row],
            entropy=entropy[row],
            mask=np.array(log.mask, dtype=bool) if masked else None,
            reward=rewards[row],
            advantage=gains[row],
            group_id=row // GROUP,
            turn_ids=_turns(log) if setup.tools else None,
            rollout_version=_rollout_version(setup, log, version, lag),
            trainer_version=None if lag is None and setup.token_lags is None else version + setup.version_ahead,
            step=version,
            where=f"sequence {row}",
        )
        for row, log in enumerate(written[:sequences])
    ]


def _sample(setup: Setup, prompts: list[list[int]], longest: int, forced: list[dict[int, int]]) -> Decoded:
    modules: list[nn.Module] = setup.sampler
    for wrap in setup.wrap:
        modules = [wrap(module) for module in modules]
    heat: list[Transform] = []
    if setup.temperature != 1:
        heat.append(lambda logits, seen: logits / setup.temperature)
    return decode(
        modules,
        prompts,
        max_new_tokens=longest,
        generator=setup.generator(),
        boundaries=setup.boundaries([len(prompt) for prompt in prompts]),
        transforms=[*setup.penalties, *heat, *setup.transforms],
        stored=setup.stored,
        prefill=setup.prefill,
        forced=forced,
    )


def _score(
    setup: Setup, module: nn.Module, prompts: list[list[int]], completions: list[list[int]]
) -> tuple[list[Floats], list[Floats]]:
    logp, entropy = score(
        module,
        prompts,
        completions,
        temperature=setup.trainer_temperature,
        padding_seen=setup.padding_seen,
        positions=setup.positions,
    )
    return [row.double().numpy() for row in logp], [row.double().numpy() for row in entropy]


def _updated(setup: Setup, prompts: list[list[int]], completions: list[list[int]], gains: list[float]) -> nn.Module:
    """The trainer's module after the setup's updates on the batch itself."""
    if not setup.updates:
        return setup.trainer
    module = copy.deepcopy(setup.trainer)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-4)
    for _ in range(setup.updates):
        policy_gradient(module, prompts, completions, torch.tensor(gains, dtype=torch.float32)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module


def _common(one: list[int], other: list[int]) -> int:
    """The number of first ids that are the same."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _rollout_version(setup: Setup, log: Log, version: int, lag: int | None) -> int | Integers | None:
    if setup.token_lags is not None:
        return version - setup.token_lags(log.row, np.arange(len(log.completion_ids)))
    return None if lag is None else version - lag


def _tools(setup: Setup, longest: int) -> dict[int, int]:
    """Places and tokens of what a tool answers in one sequence: none, or one or two spans."""
    rng, task = setup.rng, setup.subject.task
    places: dict[int, int] = {}
    if setup.tools:
        for _ in range(int(rng.integers(0, 3))):
            answer = task.prompts(rng, 1)[0][: int(rng.integers(3, 13))]
            start = int(rng.integers(4, max(5, longest - len(answer))))
            places |= {start + t: token for t, token in enumerate(answer)}
    return places


def _turns(log: Log) -> Integers:
    """A turn begins with every change between what the model and what a tool wrote."""
    changed = np.diff(np.array(log.sampled, dtype=np.int64), prepend=int(log.sampled[0])) != 0
    return np.cumsum(changed)
