"""Prompt groups in a folder of parquet files, in the format that ``offcorr diagnose`` reads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from offcorr.data.rollouts import PromptGroup
from offcorr.diagnose import DumpWriter, Record, read
from offcorr.stages.checks import outside
from offcorr.training import ORIGINS


class GroupFolder:
    """Writes each generation's new groups to a file of its own: ``generation_000001.rank_0.parquet``.

    Args:
        folder: made where it does not exist.
        rank: of this process.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.folder, self.rank = Path(folder), rank

    def begin(self) -> None:
        """Start a run, which is not resumed.

        Raises:
            FileExistsError: the folder holds the groups of another run.
        """
        there = sorted(self.folder.glob(f"generation_*.rank_{self.rank}.parquet"))
        if there:
            raise FileExistsError(
                f"{self.folder} holds {there[0].name}, of another run, expected a new or empty folder: move it away, "
                "or read it with Replay.load"
            )

    def write(
        self, generation: int, groups: Sequence[tuple[int, PromptGroup]], totals: Sequence[float], now: int
    ) -> None:
        """Write the groups of a generation; a resumed run leaves a file that is there as it is.

        Args:
            groups: each with its id.
            totals: the weighted rewards of all their sequences, end to end.
            now: the version that is trained on them.
        """
        path = self.folder / f"generation_{generation:06d}.rank_{self.rank}.parquet"
        if path.exists() or not groups:
            return
        rewards = iter(totals)
        with DumpWriter(path) as writer:
            for number, group in groups:
                name = f"{generation}.{self.rank}.{number}"
                writer.write([_record(group, i, name, next(rewards), now) for i in range(len(group))])


def read_groups(paths: Sequence[str | Path]) -> list[list[Record]]:
    """The records of dumps by their prompt groups, in the order in which the groups begin.

    Raises:
        DumpError: a path is no dump.
        ValueError: a record without a group or a reward.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in read(paths, warn=_warn_of_rows):
        for name in ("group_id", "reward"):
            if getattr(record, name) is None:
                raise ValueError(
                    f"{record.where}: {name} is missing, expected it in rollouts to replay: whole prompt groups with "
                    "their rewards, as Replay(folder=...) and dump_rollouts= write them"
                )
        folder = Path(record.where.rpartition(", row ")[0]).parent  # ids are those of a run
        groups.setdefault((folder, record.group_id, *record.prompt_ids.tolist()), []).append(record)
    return list(groups.values())


def _warn_of_rows(text: str) -> None:
    """Pass on a sentence about files and rows that were not read; fields that only a diagnosis needs may be absent."""
    if text.partition("; ")[2] and not text.startswith("no record has"):
        warnings.warn(text, stacklevel=outside())


def whole_groups(groups: Sequence[list[Record]], size: int) -> list[list[Record]]:
    """The groups of that many sequences; of others a warning says how many were left out.

    Raises:
        ValueError: there is none.
    """
    whole = [group for group in groups if len(group) == size]
    if not whole:
        found = sorted({len(group) for group in groups})
        raise ValueError(f"the loaded groups have {found} sequences, expected num_generations, {size}")
    if len(whole) < len(groups):
        warnings.warn(
            f"{len(groups) - len(whole)} of {len(groups)} loaded groups are left out: they do not have {size} "
            "sequences (num_generations). A dump of some steps (dump_every), or of several updates on the same samples "
            "(num_iterations), holds groups in part or several times",
            stacklevel=outside(),
        )
    return whole


def _record(group: PromptGroup, i: int, name: str, reward: float, now: int) -> Record:
    columns = group.columns
    completion = _array(columns["completion_ids"][i], np.int64)
    unknown = np.full(len(completion), np.nan)
    rollout_logp = _array(columns["logprobs"][i], np.float64) if "logprobs" in columns else unknown
    old_logp = _array(columns["old_logp"][i], np.float64) if "old_logp" in columns else rollout_logp
    version = columns["rollout_version"][i] if "rollout_version" in columns else None
    return Record(
        prompt_ids=_array(columns["prompt_ids"][i], np.int64),
        completion_ids=completion,
        rollout_logp=rollout_logp,
        old_logp=old_logp,
        mask=_array(columns["env_mask"][i], np.bool_) if "env_mask" in columns else None,
        reward=reward,
        advantage=float(group.advantages[i]),
        group_id=name,
        rollout_version=_array(version, np.int64) if isinstance(version, torch.Tensor) else version,
        trainer_version=now,
        step=now + 1,
        origin=ORIGINS[columns["origin"][i]],  # type: ignore[index]
    )


def _array(values: object, dtype: type) -> np.ndarray:
    return torch.as_tensor(values).numpy().astype(dtype)
