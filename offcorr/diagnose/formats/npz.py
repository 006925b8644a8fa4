"""NumPy's npz: one array per field, of all sequences; ragged end to end with lengths, or padded with a mask."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcorr.diagnose.formats.base import Container, DumpError, Row
from offcorr.diagnose.record import NAMES, PER_TOKEN

Array = NDArray[Any]

GEOMETRY = ("lengths", "prompt_lengths", "prompt_mask")
"""The arrays beside the fields of a record."""


def _recognises(path: Path, head: bytes) -> bool:
    if not head.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile:
        return path.suffix == ".npz"


def rows(path: Path) -> Iterator[Row]:
    """The sequences of a file.

    S sequences lie in one of two ways.  End to end: ``completion_ids`` and the other per-token fields are [N], and
    ``lengths`` [S] says how many tokens each has.  Padded on the right: they are [S, T], with ``lengths`` [S], or with
    ``mask`` [S, T], whose last set token ends each sequence.  ``prompt_ids`` is [M] with ``prompt_lengths`` [S], or
    [S, P] with ``prompt_lengths`` (padded on the right) or ``prompt_mask`` [S, P] (padded anywhere).  All other fields
    are [S]; ``advantage`` and the versions may also lie as the tokens do (where S = N they are one per sequence).

    Raises:
        DumpError: an array of Python objects, which only pickle could load, running any code that it holds; or shapes
            that do not fit.
    """
    arrays = {name: array for name, array in _arrays(path).items() if name in (*NAMES, *GEOMETRY)}
    completions = arrays.get("completion_ids")
    if completions is None:
        # Without completions there are no sequences to cut out: one row, whose missing fields are named.
        yield Row(1, arrays, path.stat().st_size)
        return
    cuts = _cuts(path, arrays)
    sequences, size = len(next(iter(cuts.values()))), path.stat().st_size
    per_token = {name for name, array in arrays.items() if name in PER_TOKEN or name == "completion_ids"}
    per_token |= {
        name
        for name in ("advantage", "rollout_version", "trainer_version")
        if name in arrays and arrays[name].shape == completions.shape and arrays[name].shape != (sequences,)
    }
    getters: dict[str, Callable[[int], Any]] = {}
    for name in arrays.keys() - {*GEOMETRY}:
        if name in per_token or name == "prompt_ids":
            getters[name] = _cutter(arrays[name], cuts["prompt_ids" if name == "prompt_ids" else "completion_ids"])
            continue
        if arrays[name].shape != (sequences,):
            raise DumpError(f"{path}: {name} has shape {arrays[name].shape}, expected ({sequences},), one per sequence")
        getters[name] = partial(_number, arrays[name])
    for i in range(sequences):
        yield Row(i + 1, {name: get(i) for name, get in getters.items()}, size * (i + 1) // sequences)


def _number(array: Array, i: int) -> Any:
    return array[i].item()


def _cutter(array: Array, cuts: Sequence[Any]) -> Callable[[int], Array]:
    if array.ndim == 1:
        return lambda i: array[cuts[i]]
    return lambda i: array[i][cuts[i]]


def _cuts(path: Path, arrays: Mapping[str, Array]) -> dict[str, Sequence[Any]]:
    """The index of each sequence's tokens, for completions and prompts: slices, or rows of a mask."""
    completions = arrays["completion_ids"]
    found: dict[str, Sequence[Any]] = {}
    tokens = {name: array for name, array in arrays.items() if name in PER_TOKEN}
    for name, array in tokens.items():
        if array.shape != completions.shape:
            raise DumpError(f"{path}: {name} has shape {array.shape}, expected {completions.shape} as completion_ids")
    lengths = arrays.get("lengths")
    if lengths is None and completions.ndim == 2 and "mask" in arrays:
        set_ = arrays["mask"] != 0
        lengths = np.where(set_.any(1), set_.shape[1] - set_[:, ::-1].argmax(1), 0)
    found["completion_ids"] = _slices(path, "completion_ids", completions, "lengths", lengths)
    prompts = arrays.get("prompt_ids")
    if prompts is not None:
        if "prompt_mask" in arrays and prompts.ndim == 2:
            mask = arrays["prompt_mask"]
            if mask.shape != prompts.shape:
                raise DumpError(f"{path}: prompt_mask has shape {mask.shape}, expected {prompts.shape} as prompt_ids")
            found["prompt_ids"] = [row != 0 for row in mask]
        else:
            lengths = arrays.get("prompt_lengths")
            found["prompt_ids"] = _slices(path, "prompt_ids", prompts, "prompt_lengths", lengths)
        if len(found["prompt_ids"]) != len(found["completion_ids"]):
            raise DumpError(
                f"{path}: prompt_ids has {len(found['prompt_ids'])} sequences, expected "
                f"{len(found['completion_ids'])} as completion_ids"
            )
    return found


def _slices(path: Path, field: str, array: Array, name: str, lengths: Array | None) -> list[slice]:
    if lengths is None:
        mask = {"lengths": "mask", "prompt_lengths": "prompt_mask"}[name]
        raise DumpError(
            f"{path}: {field} has shape {array.shape} and nothing says where a sequence ends: expected {name}, one "
            f"number of tokens per sequence" + (f", or {mask} {array.shape}" if array.ndim == 2 else "")
        )
    whole = lengths.ndim == 1 and lengths.dtype.kind in "iu" and (lengths >= 0).all()
    if array.ndim == 1:
        ends = np.cumsum(lengths) if whole else np.zeros(1, np.int64)
        if not whole or (int(ends[-1]) if len(ends) else 0) != len(array):
            raise DumpError(
                f"{path}: {name} has shape {lengths.shape} and sum {lengths.sum()}, expected whole numbers whose sum "
                f"is {len(array)}, the tokens of {field}"
            )
        return [slice(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
    if not whole or array.ndim != 2 or len(lengths) != len(array) or (lengths > array.shape[1]).any():
        raise DumpError(
            f"{path}: {name} has shape {lengths.shape} and {field} {array.shape}, expected a number of tokens for each "
            "row, no larger than the row"
        )
    return [slice(0, int(length)) for length in lengths]


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays by name: mapped from the file where it is not compressed, else in memory."""
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in (*NAMES, *GEOMETRY):
                    found[name] = np.empty(0)  # named in messages, never read
                    continue
                with archive.open(member) as stream:
                    found[name] = _array(path, member, stream, name)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DumpError(f"{path} cannot be read as npz, most likely because it is truncated: {error}") from error
    if not found.keys() & {*NAMES}:
        raise DumpError(f"{path} holds the arrays {', '.join(found) or 'of nothing'}; expected {', '.join(NAMES)}")
    return found


def _array(path: Path, member: zipfile.ZipInfo, stream: Any, name: str) -> Array:
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise DumpError(f"{path}: {name} is stored in version {version} of npy, expected (1, 0) or (2, 0)")
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise DumpError(
            f"{path}: {name} is an array of Python objects, which is stored as a pickle and could run any code when it "
            "is loaded: expected arrays of numbers, the sequences end to end with their lengths in an array 'lengths' "
            "(of the prompts: 'prompt_lengths')"
        )
    if member.compress_type == zipfile.ZIP_STORED and not fortran and shape and 0 not in shape:
        header = stream.tell()
        with open(path, "rb") as file:
            file.seek(member.header_offset + 26)  # the lengths of the member's name and extra field
            start = member.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())
        return np.memmap(path, dtype, "r", start + header, shape)
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


NPZ = Container(name="npz", suffixes=(".npz",), recognises=_recognises, opened=lambda files, columns: rows)
"""One array per field, of all sequences."""
