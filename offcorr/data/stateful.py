"""``Stateful``: an ``Around`` with a state of its own, which is saved with the trainer's checkpoints; and ``Turns``."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object

from offcorr.data.around import Around, RolloutFunc
from offcorr.rollout.sampler import recorder

Prompt = tuple[int, ...]


class Stateful(Around):
    """Base class: follows one run, begins anew with the next, and continues from a checkpoint.

    The state must be the same on every rank.
    """

    STATE_FILE: ClassVar[str]
    """The file of a checkpoint folder with the state."""

    def __init__(self, sampler: RolloutFunc) -> None:
        super().__init__(sampler)
        self._trainer: weakref.ref[Any] | None = None
        self._loaded: int | None = None  # the optimizer step of the state that was loaded

    def attach(self, trainer: Any) -> None:
        """Follow ``trainer`` from now on; a second call does nothing.

        Raises:
            ValueError: a setting of the trainer that does not go with this sampler.
        """
        if self._trainer is not None and self._trainer() is trainer:
            return
        self.check(trainer)
        super().attach(trainer)
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(recorder(self, trainer))
        self.begin(trainer)  # the first call attaches to TRL's own trainer, which is after on_train_begin

    def check(self, trainer: Any) -> None:  # noqa: B027  (not all have something to check)
        """Raise ``ValueError`` for a setting of the trainer that does not go with this sampler."""

    @abstractmethod
    def forget(self) -> None:
        """Begin anew."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, the same on every rank."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""

    def begin(self, trainer: Any) -> None:
        """Start, or resume, at the trainer's current step; called by ``on_train_begin``."""
        now = trainer.state.global_step
        saved = Path(trainer.args.output_dir, f"checkpoint-{now}")
        if now == 0:
            self.forget()
        elif self._loaded != now and (saved / self.STATE_FILE).exists():
            self._load(saved)

    def record(self, trainer: Any) -> None:  # noqa: B027  (not all have something to note)
        """Note an optimizer step."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state into a checkpoint folder, ``checkpoint-STEP``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        trainer = None if self._trainer is None else self._trainer()
        step = None if trainer is None else trainer.state.global_step
        torch.save({"step": step, **self.state_dict()}, Path(folder, self.STATE_FILE))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Read the state, and that of the sampler inside, from a checkpoint folder.

        Raises:
            FileNotFoundError: the folder has none.
        """
        if Path(folder, self.STATE_FILE).exists():
            self._load(folder)
        super().restore(folder)

    def _load(self, folder: str | os.PathLike[str]) -> None:
        state = torch.load(Path(folder, self.STATE_FILE), weights_only=True)
        self._loaded = state.pop("step")
        self.load_state_dict(state)


class Turns:
    """The number of traces of each prompt that were taken so far, by all ranks: each trace gets its turn.

    >>> turns = Turns()
    >>> turns.take([((5, 6), 2), ((7,), 1)]), turns.take([((5, 6), 2)])
    ([0, 0], [2])
    """

    def __init__(self) -> None:
        self.taken: dict[Prompt, int] = {}

    def take(self, wanted: Sequence[tuple[Prompt, int]], rank: int = 0) -> list[int]:
        """For each prompt and number of traces, the number of those that were taken before; every rank must call it."""
        mine: list[int] = []
        for index, of_rank in enumerate(gather_object([list(wanted)])):
            for prompt, number in of_rank:
                before = self.taken.get(prompt, 0)
                self.taken[prompt] = before + number
                if index == rank:
                    mine.append(before)
        return mine


def check_lengths(traces: Any, trainer: Any) -> None:
    """Raise ``ValueError`` for traces that are longer than a completion may be."""
    longest = trainer.args.max_completion_length
    for trace in traces:
        if len(trace) > longest:
            raise trace.error(
                f"the trace has {len(trace)} tokens, and max_completion_length is {longest}: raise it, or leave such "
                f"traces out (keep=lambda trace: len(trace) <= {longest})"
            )


def check_whole_groups(trainer: Any) -> None:
    """Raise ``ValueError`` where the completions of a prompt are split over ranks."""
    args, size = trainer.args, trainer.num_generations
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % size:
        raise ValueError(
            f"a rank generates per_device_train_batch_size={args.per_device_train_batch_size} times "
            f"steps_per_generation={args.steps_per_generation} = {rows} completions, expected a multiple of "
            f"num_generations={size}, so that no group of a prompt is split over ranks"
        )
