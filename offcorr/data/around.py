"""``Around``: a sampler that adds data to what another one samples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

Rollout = dict[str, list[Any]]
"""Result of a ``rollout_func``: TRL's keys and those of ``offcorr.trl.trainer.SAMPLED``, each with one row a prompt."""

RolloutFunc = Callable[[list[Any], Any], Rollout]


class Around(ABC):
    """A ``rollout_func`` for TRL's GRPOTrainer around another one.

    It follows the trainer, and is saved with its checkpoints, as ``offcorr.rollout.OffPolicy`` is.

    Args:
        sampler: samples what is not taken from elsewhere: ``OffPolicy``, ``VLLMServer``, another class of this
            package, or any function of prompts and trainer.

    Raises:
        TypeError: ``sampler`` is not such a function, or is a class in place of an instance.
    """

    def __init__(self, sampler: RolloutFunc) -> None:
        if isinstance(sampler, type) or not callable(sampler):
            raise TypeError(f"sampler is {sampler!r}, expected an instance such as offcorr.rollout.OffPolicy()")
        self.sampler = sampler

    @abstractmethod
    def __call__(self, prompts: list[Any], trainer: Any) -> Rollout:
        """One completion for each prompt; the completions of a prompt are neighbours."""

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
