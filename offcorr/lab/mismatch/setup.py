"""``Setup``: how a trainer and a sampler work, which causes change; and the table of causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offcorr.lab.mismatch.decode import Round, Transform
from offcorr.lab.mismatch.models import ARCHITECTURES, Subject

Value = TypeVar("Value")
Prompts = list[list[int]]

STRENGTHS = ("weak", "usual", "strong")
"""Degrees of a cause that has a setting; a weak one may be too small to be seen."""

KINDS = ("transforms", "weights", "numerics", "tokens", "logs")
"""The files of causes, in the order in which causes that are made together are applied."""


@dataclass
class Log:
    """One sequence as both sides log it, before it becomes a ``Record``; causes of the kind "logging" edit it.

    Args:
        row: number of the sequence.
        completion_ids: [T] token ids as the trainer has them.
        rollout_logp: [T] log-probs (nats) that the sampler reports.
        sampled: [T] whether the model sampled the token (a tool's answer and padding it did not).
        mask: [T] the mask that is logged.
        ended: whether the sampler stopped at an EOS.
    """

    row: int
    completion_ids: list[int]
    rollout_logp: list[float]
    sampled: list[bool]
    mask: list[bool]
    ended: bool


@dataclass
class Setup:
    """A trainer and a sampler that agree, until causes change their fields.

    Args:
        subject: the model, with the weights of its updates.
        rng: for the choices of the causes.
        strength: "weak", "usual" or "strong".
        settings: what was chosen, for the one who reads the dump.
        temperature: of the sampler.
        trainer_temperature: the trainer divides its logits by it.
        penalties: changes of the sampler's logits before the temperature, as engines apply them.
        transforms: changes of the sampler's logits after the temperature.
        reported: which log-probs the sampler logs: of the distribution drawn from, of the untransformed logits, or the
            latter over the temperature.
        trainer: the trainer's weights when it computes ``old_logp``.
        saved: the trainer's model as ``save_pretrained`` would write it, where that is not ``trainer``: with its
            adapter apart, or without the dropout.
        sampler: the sampler's modules, and ``boundaries`` between them as ``decode`` takes them, made from the lengths
            of the prompts.
        wrap: changes each of the sampler's modules last, such as its precision.
        stored: rounds the sampler's keys and values.
        prefill: tokens of a prompt that the sampler reads at once.
        tools: most sequences have one or two spans that a tool wrote.
        placeholder: the sampler's log-prob of tokens that it did not sample: 0, or NaN (unscored).
        trainer_prompts: the trainer's prompts made from the sampler's.
        padding_seen: the trainer's attention sees padding.
        positions: changes the trainer's positions.
        updates: policy-gradient updates on the batch itself before ``logp``.
        version_lag: optimizer steps by which the logged ``rollout_version`` is behind; None: no versions are logged.
        version_ahead: optimizer steps by which the logged ``trainer_version`` is ahead of the weights of ``old_logp``.
        token_lags: made from a sequence's number and the places of its tokens: the lag of each, where the sampler logs
            a version per token.
        edits: changes of the logs, in order.
    """

    subject: Subject
    rng: np.random.Generator
    strength: str = "usual"
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    trainer_temperature: float = 1.0
    penalties: list[Transform] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)
    reported: Literal["processed", "raw", "divided"] = "processed"
    trainer: nn.Module = field(init=False)
    saved: nn.Module | None = None
    sampler: list[nn.Module] = field(init=False)
    boundaries: Callable[[Sequence[int]], list[list[int]]] = lambda lengths: []
    wrap: list[Callable[[nn.Module], nn.Module]] = field(default_factory=list)
    stored: Round | None = None
    prefill: int = 1024
    tools: bool = False
    placeholder: float = 0.0
    trainer_prompts: Callable[[Prompts], Prompts] = lambda prompts: prompts
    padding_seen: bool = False
    positions: Callable[[Tensor, int], Tensor] | None = None
    updates: int = 0
    version_lag: int | None = 0
    version_ahead: int = 0
    token_lags: Callable[[int, NDArray[np.int64]], NDArray[np.int64]] | None = None
    edits: list[Callable[[Log], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trainer = self.subject.module
        self.sampler = [self.subject.module]

    def pick(self, name: str, *, weak: Sequence[Value], usual: Sequence[Value], strong: Sequence[Value]) -> Value:
        """One of the values of the strength, which ``settings[name]`` then says."""
        values = {"weak": weak, "usual": usual, "strong": strong}[self.strength]
        return self.one_of(name, values)

    def one_of(self, name: str, values: Sequence[Value]) -> Value:
        """One of the values, which ``settings[name]`` then says."""
        value = values[int(self.rng.integers(len(values)))]
        self.settings[name] = value
        return value

    def generator(self) -> torch.Generator:
        """A new random state for torch."""
        return torch.Generator().manual_seed(int(self.rng.integers(2**62)))


@dataclass(frozen=True)
class Cause:
    """A cause of mismatch that ``generate`` can make.

    Args:
        name: its id in the reports of ``offcorr.diagnose``.
        kind: one of ``KINDS``, the file that it stands in.
        made: a sentence that says how it is made.
        apply: changes a setup.
        architectures: those that it can be made with.
        changes: parts of the setup that only one cause at a time can change.
        keeps: parts of the setup that no other cause may change, lest this one become another.
    """

    name: str
    kind: str
    made: str
    apply: Callable[[Setup], None]
    architectures: tuple[str, ...]
    changes: frozenset[str]
    keeps: frozenset[str]


CAUSES: dict[str, Cause] = {}
"""Every cause by name."""


def cause(
    *,
    changes: Sequence[str] = (),
    keeps: Sequence[str] = (),
    only: Sequence[str] = ARCHITECTURES,
    but: Sequence[str] = (),
) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Registers a function as the cause of its name; the first sentence of its docstring says how it is made.

    Args:
        changes: parts of the setup that two causes cannot both change.
        keeps: parts of the setup that no other cause may change.
        only: the architectures that it can be made with.
        but: architectures that it cannot be made with.
    """

    def register(function: Callable[[Setup], None]) -> Callable[[Setup], None]:
        name = function.__name__
        if name in CAUSES or not function.__doc__:
            raise ValueError(f"cause {name!r} is registered twice, or has no docstring")
        kind = function.__module__.rpartition(".")[2]
        if kind not in KINDS:
            raise ValueError(
                f"cause {name!r} stands in {function.__module__}, expected a file named {', '.join(KINDS)}"
            )
        made = " ".join(function.__doc__.split("\n\n")[0].split())
        fits = tuple(one for one in ARCHITECTURES if one in only and one not in but)
        CAUSES[name] = Cause(name, kind, made, function, fits, frozenset(changes), frozenset(keeps))
        return function

    return register
