"""``Replay``: trains again on the groups of earlier generations."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback

from offcorr.data.around import Around, Rollout, RolloutFunc, Rows
from offcorr.data.folder import GroupFolder, read_groups, whole_groups
from offcorr.data.rollouts import FRESH, PromptGroup, columns_of, group_of_records, mixed
from offcorr.data.sources import check_anchor, check_rows, check_sources, check_trainer
from offcorr.data.store import Entry, Store
from offcorr.diagnose import Record
from offcorr.folders import check_writable
from offcorr.optional import require
from offcorr.rollout.sampler import check_seed
from offcorr.stages.checks import check_value, check_word, warn_once

STATE_FILE = "offcorr_replay.rank_{}.pt"
"""The file of a checkpoint folder with the groups of a rank."""

ADVANTAGES = ("recomputed", "recorded")


class Generation(NamedTuple):
    """The rows of a generation: fresh ones of the dataset, then those of the replayed groups.

    number: from 1.
    fresh: copies, as TRL writes to the rows.
    """

    number: int
    fresh: Rows
    replayed: list[Entry[PromptGroup]]

    @property
    def sequences(self) -> int:
        """Number of its rows."""
        return len(self.fresh) + sum(len(entry.group) for entry in self.replayed)


class Replay(Around):
    """A ``rollout_func`` that replaces a share of every generation's prompt groups by stored ones.

    ``GRPOTrainer(..., rollout_func=Replay(OffPolicy(lag=4), share=0.75))`` samples a quarter as much, and trains on
    each group four times on average, with the log-probs that were recorded when it was sampled.

    Each rank keeps its own groups, in host memory, and draws from these: those with the fewest uses first, among equals
    by (seed, rank, generation), none twice in a generation.  A replayed group is whole, with the columns of its dataset
    row, and takes the place of the generation's last prompts, which are left out of the epoch.  It is not sampled
    again, and its reward functions are not called again: TRL recomputes the advantages from the recorded rewards.
    Where too few groups are stored, the rest is sampled.  Evaluation is never touched.

    Args:
        sampler: samples the other groups; its ``old_logp``, or under ``anchor="rollout"`` its ``logprobs``, are
            recorded.
        share: of the groups of a generation, from 0 to 1; a fraction of a group is carried over to the next.  1 goes
            with ``load``, ``max_age`` or ``min_ess``: without these no group would be sampled after the first
            generation.
        max_groups: number of stored groups per rank; the oldest give way.
        max_age: the oldest replayed group, in optimizer updates since the weights that sampled it (where the sampler
            reports no ``rollout_version``, since it was sampled); None: any.
        min_ess: groups whose effective sample size is lower are evicted, from 0 to 1: (sum w)^2 / (n sum w^2) over
            their sequences, w = e^(sum of logp - recorded log-prob), with logp of the last update that trained on the
            group, which costs no forward pass.  None: none are.
        advantages: "recomputed" by TRL from the rewards; "recorded": those of the time of sampling.  The two are equal
            unless TRL scales over the batch (``scale_rewards="batch"``, "normalize_then_sum").
        seed: None: the trainer's.
        folder: groups are also written there when they are sampled, one parquet file per generation and rank, which
            ``offcorr diagnose`` and ``load`` read.

    Raises:
        ValueError: a number out of range; when a trainer is made, a per-rank batch that would tear groups, or an anchor
            that reads no recorded log-probs; at the first generation, a sampler without those that are read.

    A group is trained on ``update_to_data`` times on average, times TRL's ``num_iterations``:

    >>> Replay(lambda prompts, trainer: {}, share=0.75).update_to_data
    4.0
    """

    def __init__(
        self,
        sampler: RolloutFunc,
        share: float = 0.5,
        *,
        max_groups: int = 1024,
        max_age: int | None = None,
        min_ess: float | None = None,
        advantages: str = "recomputed",
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(sampler)
        refuse_replay("Replay", sampler)
        check_value("Replay", "share", share, low=0.0, high=1.0)
        check_word("Replay", "advantages", advantages, ADVANTAGES)
        if seed is not None:
            check_seed(seed)
        if folder is not None:
            require("Replay(folder=...)", ["pyarrow"], install="pip install pyarrow")
            check_writable("folder of Replay", folder)
        self.share, self.advantages, self.seed, self.folder = share, advantages, seed, folder
        self.store: Store[PromptGroup] = Store(max_groups, max_age, min_ess)
        self._records: list[list[Record]] = []
        self._trainer: weakref.ref[Any] | None = None
        self._forget()

    def __repr__(self) -> str:
        return f"Replay({self.sampler!r}, share={self.share})"

    def _forget(self) -> None:
        self.store.clear()
        self._generation = 0
        self._carry = 0.0
        self._loaded = False
        self._current: Generation | None = None
        self._rollout: Mapping[str, Any] | None = None
        self._keys: list[int] = []
        self._log_ratios: list[tuple[Tensor, Tensor]] = []

    @property
    def update_to_data(self) -> float:
        """Number of times that a sampled group is trained on, on average, times TRL's ``num_iterations``."""
        return math.inf if self.share == 1 else 1 / (1 - self.share)

    def load(self, *paths: str | os.PathLike[str]) -> Replay:
        """Begin a run with the groups of a dump, such as yesterday's ``folder``; returns itself.

        Each rank takes its share of the groups.  A dump has no dataset: a loaded row is the decoded prompt without
        other columns, and the weighted sum of the rewards stands for the first reward function that has a weight.  Its
        versions are of another run, so age and lag count from the first update of this one.

        Raises:
            DumpError: a path is no dump.
            ValueError: a record without a group or a reward; when the run begins, no group of ``num_generations``.
        """
        self._records += read_groups([Path(path) for path in paths])
        return self

    # ---- following a trainer

    def attach(self, trainer: Any) -> None:
        """Follow ``trainer`` from now on; a second call does nothing.

        Raises:
            TypeError: it is TRL's own trainer, which does not hand over the rows of the dataset.
            ValueError: a setting of the trainer that groups cannot be replayed under.
        """
        if self._trainer is not None and self._trainer() is trainer:
            return
        check_trainer(self.__name__, trainer)
        self._check_bounds(trainer)
        if self.share > 0:
            check_anchor(self.__name__, trainer)
        super().attach(trainer)
        self._forget()
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(_Follower(self, trainer))

    def _check_bounds(self, trainer: Any) -> None:
        """Raise ``ValueError`` where nothing would be replayed, or nothing sampled after the first generation."""
        args = trainer.args
        uses = args.steps_per_generation * trainer.num_iterations
        if self.store.max_age == 0 and uses >= args.gradient_accumulation_steps:
            raise ValueError(
                "max_age is 0, expected 1 or more: with one optimizer step or more per generation every stored group "
                "is older, so that nothing would be replayed"
            )
        self.check_options()

    def check_options(self) -> None:
        """Raise ``ValueError`` where no run can begin; called before a trainer loads its model.

        ``load`` may follow the constructor, so that this cannot be known there.
        """
        bounded = self._records or self.store.max_age is not None or self.store.min_ess
        if self.share == 1 and not bounded:
            raise ValueError(
                "share is 1, expected a number below 1: all steps would train on the groups of the first generation. "
                "Groups that load(...) has read may be all of the data, and max_age=100 or min_ess=0.3, say, lets new "
                "ones in"
            )

    def begin(self, trainer: Any) -> None:
        """Start a run, or resume it; called by ``on_train_begin``."""
        if trainer.state.global_step == 0:
            self._forget()
            if (files := self._files(trainer)) is not None:
                files.begin()

    def exchange(self, rows: Rows, trainer: Any) -> Rows:
        """The fresh rows, then those of the groups that are replayed; see ``Around``."""
        self.attach(trainer)
        size, number = trainer.num_generations, len(rows) // trainer.num_generations
        check_rows(self.__name__, rows, size)
        self._read_log_ratios()
        self._fill(trainer, rows[0])
        replayed = self._draw(trainer, number)
        fresh = rows[: (number - len(replayed)) * size]
        if fresh:
            fresh = super().exchange(fresh, trainer)
        self._current, self._rollout = Generation(self._generation, [dict(row) for row in fresh], replayed), None
        return [*fresh, *(dict(row) for entry in replayed for row in entry.group.rows)]

    def _draw(self, trainer: Any, number: int) -> list[Entry[PromptGroup]]:
        """The stored groups that take part in a generation of ``number`` groups; every rank draws equally many."""
        self.store.evict(trainer.state.global_step)
        self._carry += self.share * number
        wanted = min(number, math.floor(self._carry + 1e-9))
        self._carry -= wanted
        self._generation += 1
        count = _agreed(trainer, min(wanted, len(self.store)))
        seed = trainer.args.seed if self.seed is None else self.seed
        self._keys = self.store.choose(count, [seed, trainer.accelerator.process_index, self._generation])
        return [self.store.entries[key] for key in self._keys]

    def __call__(self, prompts: list[Any], trainer: Any) -> Rollout:
        """One completion for each prompt; the completions of a prompt are neighbours."""
        self.attach(trainer)
        if not trainer.model.training:
            return self.sampler(prompts, trainer)
        current = self._current
        expected = None if current is None else current.sequences
        if current is None or len(prompts) != expected:
            raise ValueError(
                f"{self.__name__} was called with {len(prompts)} prompts, expected {expected}, those of the rows that "
                "it exchanged: make Replay the outermost sampler, Replay(Demonstrations(...))"
            )
        fresh = None
        if current.fresh:
            fresh = self.sampler(prompts[: len(current.fresh)], trainer)
            if not isinstance(fresh, Mapping):
                return fresh  # the trainer says what is wrong with it
            if self.share > 0:
                check_sources(self.__name__, fresh, trainer)
            fresh = {**fresh, "origin": fresh.get("origin") or [FRESH] * len(current.fresh)}
        self._rollout = fresh
        return mixed(fresh, [entry.group for entry in current.replayed])

    def finished(self, rows: Rows, output: dict[str, Any], rewards: Tensor, trainer: Any) -> None:
        """Store the fresh groups; see ``Around``."""
        current, size = self._current, trainer.num_generations
        assert current is not None
        first = len(current.fresh)
        if first:
            own = {name: value[:first] for name, value in output.items() if _has_rows(value, len(rows))}
            super().finished(rows[:first], own, rewards[:first], trainer)
        now = trainer.state.global_step
        if current.replayed:
            self._mark_replayed(output, first, current.replayed)
        rewards, advantages = rewards.cpu(), output["advantages"].detach().cpu()
        new = []
        for start in range(0, first, size) if self._rollout is not None else ():
            part = slice(start, start + size)
            columns = columns_of(self._rollout or {}, start, start + size)
            group = PromptGroup(current.fresh[part], columns, rewards[part].clone(), advantages[part].clone())
            new.append((self.store.add(group, group.version(now)), group))
        self._keys = [*(key for key, _ in new), *self._keys]
        if new and (files := self._files(trainer)) is not None:
            files.write(current.number, new, output["rewards"][:first].double().tolist(), now)
        self._current = self._rollout = None

    def trained(self, places: Tensor, log_ratio: Tensor) -> None:
        """Keep the newest log-ratios, on the device until the next generation; see ``Around``."""
        super().trained(places, log_ratio)
        if self.store.min_ess is not None:
            self._log_ratios.append((places, log_ratio))

    def _mark_replayed(self, output: dict[str, Any], first: int, replayed: list[Entry[PromptGroup]]) -> None:
        """Write the versions and the recorded advantages of the replayed sequences to the batch, from row ``first``."""
        versions = [entry.version for entry in replayed for _ in range(len(entry.group))]
        output["generated_at"][first:] = torch.tensor(versions).to(output["generated_at"])
        if self.advantages == "recorded":
            advantages = output["advantages"]
            recorded = torch.cat([entry.group.advantages for entry in replayed]).to(advantages)
            advantages[first:] = torch.where(recorded.isnan(), advantages[first:], recorded)

    def _read_log_ratios(self) -> None:
        """Give each group the effective sample size of its last training; one transfer to the host."""
        if not self._log_ratios:
            return
        places, log_ratios = (torch.cat(parts).cpu().tolist() for parts in zip(*self._log_ratios, strict=True))
        self._log_ratios = []
        newest = dict(zip(places, log_ratios, strict=True))
        start = 0
        for key in self._keys:
            entry = self.store.entries.get(key)
            size = self._trainer().num_generations  # type: ignore[union-attr, misc]
            own = [newest[place] for place in range(start, start + size) if place in newest]
            start += size
            if entry is not None and len(own) == size:
                self.store.note(key, own)

    # ---- rollouts of another run

    def _fill(self, trainer: Any, row: dict[str, Any]) -> None:
        """Store the loaded groups, once in a run: each rank every so many."""
        if self._loaded or not self._records:
            return
        self._loaded = True
        groups = whole_groups(self._records, trainer.num_generations)
        own = groups[trainer.accelerator.process_index :: trainer.accelerator.num_processes]
        if len(own) > self.store.max_groups:
            warn_once(f"{len(own)} groups were loaded, and max_groups is {self.store.max_groups}: the last are kept")
        weights = trainer.reward_weights.tolist()
        first = next((i for i, weight in enumerate(weights) if weight), None)
        if first is None:
            raise ValueError(f"reward_weights is {weights}, expected one that is not 0: loaded groups have one reward")
        for records in own[-self.store.max_groups :]:
            text = trainer.processing_class.decode(records[0].prompt_ids.tolist())
            prompt = text if isinstance(row["prompt"], str) else [{"role": "user", "content": text}]
            self.store.add(group_of_records(records, {"prompt": prompt}, len(weights), (first, weights[first])), 0)

    def _files(self, trainer: Any) -> GroupFolder | None:
        return None if self.folder is None else GroupFolder(self.folder, trainer.accelerator.process_index)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The stored groups and the position in the stream of draws, of this rank."""
        self._read_log_ratios()
        numbers = {"generation": self._generation, "carry": self._carry, "loaded": self._loaded}
        return {**numbers, "store": self.store.state_dict(vars)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        self._forget()
        self._generation, self._carry, self._loaded = state["generation"], state["carry"], state["loaded"]
        self.store.load_state_dict(state["store"], lambda group: PromptGroup(**group))

    def save(self, folder: str | os.PathLike[str], rank: int = 0) -> None:
        """Write the state of this rank into a checkpoint folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder, STATE_FILE.format(rank)))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Read the state of this rank from a checkpoint folder.

        Raises:
            FileNotFoundError: the folder has none.
            ValueError: the groups have another size than ``num_generations``, or are of another number of ranks.
        """
        try:
            super().restore(folder)
        finally:
            self._restore(Path(folder))

    def _restore(self, folder: Path) -> None:
        trainer = None if self._trainer is None else self._trainer()
        accelerator = getattr(trainer, "accelerator", None)
        rank, ranks = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        there = len(list(folder.glob(STATE_FILE.format("*"))))
        if there and there != ranks:
            raise ValueError(
                f"{folder} holds the replayed groups of {there} ranks, and this run has {ranks}: resume with {there}, "
                f"or delete its files {STATE_FILE.format('*')} to begin with none"
            )
        self.load_state_dict(torch.load(folder / STATE_FILE.format(rank), weights_only=True))
        sizes = {len(entry.group) for entry in self.store.entries.values()}
        if trainer is not None and sizes - {trainer.num_generations}:
            raise ValueError(f"{folder} holds groups of {sizes} sequences, expected {trainer.num_generations}")


def refuse_replay(name: str, sampler: Any) -> None:
    """Raise ``ValueError`` for a sampler that is a ``Replay``, or that goes around one."""
    while isinstance(sampler, Around):
        if isinstance(sampler, Replay):
            raise ValueError(
                f"sampler is {sampler!r}, which {name} cannot go around: Replay stores and replays whole generations, "
                "so it is the outermost sampler, and there is one, for instance Replay(Demonstrations(...))"
            )
        sampler = sampler.sampler


class _Follower(TrainerCallback):
    """Starts a ``Replay`` with a run, and saves it, on every rank, with the checkpoints."""

    def __init__(self, replay: Replay, trainer: Any) -> None:
        self.replay = replay
        self._trainer = weakref.ref(trainer)

    @property
    def _seen(self) -> Any:
        """The trainer, while the ``Replay`` still samples for it."""
        trainer, followed = self._trainer(), self.replay._trainer
        return trainer if followed is not None and followed() is trainer else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._seen is not None:
            self.replay.begin(self._seen)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._seen is not None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            self.replay.save(folder, self._seen.accelerator.process_index)


def _agreed(trainer: Any, count: int) -> int:
    """The smallest count of all ranks, which call the inner sampler for equally many groups."""
    if trainer.accelerator.num_processes == 1:
        return count
    return int(trainer.accelerator.gather(torch.tensor([count], device=trainer.accelerator.device)).min())


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
