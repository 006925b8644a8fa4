"""slime's debug dumps: the ``.pt`` files of ``--dump-details``, one pair per rollout.

``--save-debug-train-data`` writes what was trained on, with the log-probs of both sides, and
``--save-debug-rollout-data`` the samples as they were generated, with their groups and the versions of the weights.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offcorr.diagnose.formats.base import Container, DumpError, Layout, ReadWith, Row, Rows, needed

EXPECTED = "expected slime's dump, {'rollout_id': ..., 'samples': [...]}"

NUMPY: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bBhHiIqQefd"}]
NUMPY += [
    (value.__reduce__()[0], f"numpy.{package}.multiarray.{name}")
    for name, value in {"_reconstruct": np.zeros(1), "scalar": np.float64(0)}.items()
    for package in ("core", "_core")
]
"""Names of arrays and numbers of NumPy in a pickle, which samples may hold beside tensors; they run no code."""


def _recognises(path: Path, head: bytes) -> bool:
    if head.startswith(b"\x80"):
        return path.suffix in (".pt", ".pth")  # a pickle, from before torch wrote archives
    if not head.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return path.suffix in (".pt", ".pth")


def _loaded(path: Path) -> Mapping[str, Any]:
    """The content of a file, without running what it holds; tensors are mapped from the file."""
    try:
        with torch.serialization.safe_globals(NUMPY):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise DumpError(
            f"{path} holds {name[1] if name else 'objects'} beside tensors, numbers and text, and is not loaded, since "
            f"that could run any code; {EXPECTED}"
        ) from error
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0]
        raise DumpError(
            f"{path} cannot be read as a file of torch, most likely because it is truncated: {reason}"
        ) from error
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list) or not all(isinstance(sample, Mapping) for sample in samples):
        keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise DumpError(f"{path} holds {keys[:200] or 'nothing'}; {EXPECTED}")
    return content


def _is_train(content: Mapping[str, Any]) -> bool:
    return any("response_lengths" in sample for sample in content["samples"])


def _opened(files: Sequence[Path], columns: Set[str]) -> Rows:
    partners: dict[Any, Path] | None = None  # the rollout dumps by rollout_id
    trained: set[Any] = set()

    def index() -> dict[Any, Path]:
        found = {}
        for file in files:
            try:
                content = _loaded(file)
            except DumpError:
                continue  # raised again when it is its turn
            if _is_train(content):
                trained.add(content.get("rollout_id"))
            else:
                found[content.get("rollout_id")] = file
        return found

    def rows(path: Path) -> Iterator[Row]:
        nonlocal partners
        if partners is None:
            partners = index()
        content, size = _loaded(path), path.stat().st_size
        number, samples = content.get("rollout_id"), content["samples"]
        if not _is_train(content):
            if number not in trained and samples:
                raise DumpError(
                    f"{path} is the rollout dump of slime's rollout {number}, which has no log-probs of the trainer: "
                    "expected its train dump beside it (--save-debug-train-data or --dump-details)"
                )
            raise ReadWith  # its samples come with those of the train dump
        generated = _loaded(partners[number])["samples"] if number in partners else []
        rewards = content.get("raw_reward") or []
        for i, sample in enumerate(samples):
            place = sample.get("rollout_position", i if len(generated) == len(samples) else None)
            extra: dict[str, Any] = {"rollout_id": number}
            if place is not None and place < len(generated):
                extra["generated"] = generated[place]
            if place is not None and place < len(rewards):
                extra["raw_reward"] = rewards[place]
            yield Row(i + 1, {**sample, **extra}, size * (i + 1) // len(samples))

    return rows


def fields(row: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The record of a sample of a train dump, with what the rollout dump of the same rollout adds where it was given.

    =================== =========================================================================================
    ``prompt_ids``      ``tokens`` but the last ``response_lengths``
    ``completion_ids``  the last ``response_lengths`` of ``tokens``
    ``rollout_logp``    ``rollout_log_probs``; without them the rollout dump's
    ``old_logp``        ``log_probs``: before the update, or where slime skips that pass, of the update's own
    ``entropy``         ``entropy``
    ``mask``            ``loss_masks``
    ``reward``          ``raw_reward`` of the sample's place; without it the rollout dump's ``reward`` if it is a number
    ``advantage``       ``advantages``
    ``group_id``        the rollout dump's ``group_index``
    ``rollout_version`` the rollout dump's ``weight_versions`` where they are one whole number
    ``step``            ``rollout_id``
    =================== =========================================================================================

    The two are paired by ``rollout_id``, and their samples by the train dump's ``rollout_position``.
    """
    tokens, length, old = needed(row, "tokens", "response_lengths", "log_probs")
    start = len(tokens) - int(length)
    generated = row.get("generated") or {}
    rollout = row.get("rollout_log_probs")
    reward = row.get("raw_reward", generated.get("reward"))
    versions = {str(version) for version in generated.get("weight_versions") or []}
    version = versions.pop() if len(versions) == 1 else ""
    found = {
        "prompt_ids": tokens[:start],
        "completion_ids": tokens[start:],
        "rollout_logp": generated.get("rollout_log_probs") if rollout is None else rollout,
        "old_logp": old,
        "entropy": row.get("entropy"),
        "mask": row.get("loss_masks"),
        "advantage": row.get("advantages"),
        "reward": reward if isinstance(reward, int | float) else None,
        "group_id": generated.get("group_index"),
        "rollout_version": int(version) if version.isdigit() else None,
        "step": row.get("rollout_id"),
    }
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    return value.to(torch.float64 if value.is_floating_point() else torch.int64).numpy() if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


SLIME = Layout(
    name="slime's train dump",
    recognises=lambda names: {"tokens", "response_lengths"} <= names,
    columns=frozenset(),
    fields=fields,
)
"""``tokens response_lengths log_probs rollout_log_probs loss_masks advantages entropy``."""

TORCH = Container(name="slime's .pt", suffixes=(".pt", ".pth"), recognises=_recognises, opened=_opened)
"""A dict of samples, saved by torch."""
