"""Records with known values, and their equality to the last bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from offcorr.diagnose import Record, read


def record(seed: int, tokens: int = 6, **changes: Any) -> Record:
    """All fields; log-probs that are float32, and one that the sampler did not score."""
    rng = np.random.default_rng(seed)
    rollout, old, logp = -rng.exponential(size=(3, tokens)).astype(np.float32).astype(np.float64)
    rollout[1:2] = np.nan
    mask = np.ones(tokens, bool)
    mask[2:3] = False
    of = {
        "prompt_ids": rng.integers(0, 150_000, 3 + seed % 3),
        "completion_ids": rng.integers(0, 150_000, tokens),
        "rollout_logp": rollout,
        "old_logp": old,
        "logp": logp,
        "entropy": rng.random(tokens).astype(np.float32).astype(np.float64),
        "mask": mask,
        "reward": float(rng.random()),
        "advantage": float(np.float32(rng.normal())),
        "group_id": seed // 2,
        "turn_ids": np.arange(tokens) // 4,
        "rollout_version": 3,
        "trainer_version": 5 + seed,
        "step": 6 + seed,
    }
    return Record(**{**of, **changes})


def row(seed: int, tokens: int = 6, **changes: Any) -> dict[str, Any]:
    """The same as Python's lists and numbers, for JSON."""
    one = record(seed, tokens)
    values = {field.name: getattr(one, field.name) for field in fields(Record) if field.name != "where"}
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    plain["rollout_logp"] = [None if value != value else value for value in plain["rollout_logp"]]
    return {**plain, **changes}


def assert_same(found: Record, wanted: Record) -> None:
    """Every field, with the kind of its values; ``where`` apart."""
    for field in fields(Record):
        if field.name == "where":
            continue
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert type(one) is type(other), (field.name, one, other)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        else:
            assert one == other or one != one and other != other, (field.name, one, other)


def read_all(*paths: Any) -> tuple[list[Record], list[str]]:
    """The records and the warnings."""
    warnings: list[str] = []
    return list(read(paths, warn=warnings.append)), warnings
