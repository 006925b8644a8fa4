"""``Around``: a sampler that adds data to what another one samples."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

Rollout = dict[str, list[Any]]
"""Result of a ``rollout_func``: TRL's keys and those of ``offcorr.trl.returned.KEYS``, each with one row a prompt."""

RolloutFunc = Callable[[list[Any], Any], Rollout]

Rows = list[dict[str, Any]]
"""Rows of the training set with all their columns, each repeated for the completions of its prompt."""


def check_sampler(name: str, sampler: Any) -> None:
    """Raises ``TypeError`` for a ``rollout_func`` that is a class, or that cannot be called with prompts and trainer.

    Args:
        name: of the argument, for the message.

    >>> check_sampler("rollout_func", lambda prompts: {})
    Traceback (most recent call last):
    TypeError: rollout_func is <lambda>(prompts), expected a function of two arguments, prompts and trainer
    """
    if isinstance(sampler, type):
        kind = sampler.__name__
        raise TypeError(f"{name} is the class {kind}, expected an instance: {kind}(...)")
    if not callable(sampler):
        raise TypeError(
            f"{name} is {sampler!r}, expected a function of prompts and trainer, or an instance such as "
            "offcorr.rollout.OffPolicy()"
        )
    try:
        signature = inspect.signature(sampler)
    except (TypeError, ValueError):  # a function of C has none
        return
    try:
        signature.bind([], None)
    except TypeError as error:
        said = getattr(sampler, "__name__", type(sampler).__name__)
        wanted = "expected a function of two arguments, prompts and trainer"
        raise TypeError(f"{name} is {said}{signature}, {wanted}") from error


class Around(ABC):
    """A ``rollout_func`` for TRL's GRPOTrainer around another one.

    It follows the trainer, and is saved with its checkpoints, as ``offcorr.rollout.OffPolicy`` is.

    A ``rollout_func`` of TRL sees prompts alone.  ``offcorr.trl.GRPOTrainer`` calls three further methods of a sampler
    that has them, in training: ``exchange`` before each generation, ``finished`` after it is scored, and ``trained``
    with each micro-batch.  Here they pass on to ``sampler``, where it has them; a subclass that overrides one calls
    ``super()``.

    Args:
        sampler: samples what is not taken from elsewhere: ``OffPolicy``, ``VLLMServer``, another class of this
            package, or any function of prompts and trainer.

    Raises:
        TypeError: ``sampler`` is not such a function, or is a class in place of an instance.
    """

    def __init__(self, sampler: RolloutFunc) -> None:
        check_sampler("sampler", sampler)
        self.sampler: Any = sampler
        inner = getattr(sampler, "__name__", type(sampler).__name__)
        self.__name__ = f"{type(self).__name__}({inner})"  # for messages

    @abstractmethod
    def __call__(self, prompts: list[Any], trainer: Any) -> Rollout:
        """One completion for each prompt; the completions of a prompt are neighbours."""

    def exchange(self, rows: Rows, trainer: Any) -> Rows:
        """The rows to generate and score, as many, in place of those that the dataset gives.

        Called on every rank before each generation of training; the prompts of the result are those of the next call.
        """
        return self.sampler.exchange(rows, trainer) if hasattr(self.sampler, "exchange") else rows

    def finished(self, rows: Rows, output: dict[str, Any], rewards: Tensor, trainer: Any) -> None:
        """Note a generation that has been scored.

        Args:
            rows: as ``exchange`` returned them, with the columns that TRL has added since.
            output: this rank's batch, tensors with one row for each of ``rows``; ``advantages`` may be written to.
            rewards: [B, functions] of the reward functions, unweighted; NaN: not scored by this one.
        """
        if hasattr(self.sampler, "finished"):
            self.sampler.finished(rows, output, rewards, trainer)

    def trained(self, places: Tensor, log_ratio: Tensor) -> None:
        """Note a micro-batch of training; no host synchronisation.

        Args:
            places: [b] of its sequences, in the rows of the last ``exchange``.
            log_ratio: [b] log-probability (nats) of each completion under the weights being trained, less the recorded.
        """
        if hasattr(self.sampler, "trained"):
            self.sampler.trained(places, log_ratio)

    def remark(self) -> str:
        """Half a sentence for the first line of a run; "" where there is nothing to say."""
        return self.sampler.remark() if hasattr(self.sampler, "remark") else ""

    def attach(self, trainer: Any) -> None:
        """Follow ``trainer`` from now on; a second call does nothing."""
        if hasattr(self.sampler, "attach"):
            self.sampler.attach(trainer)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Read the state from a checkpoint folder.

        Raises:
            FileNotFoundError: the folder has none.
        """
        if hasattr(self.sampler, "restore"):
            self.sampler.restore(folder)
