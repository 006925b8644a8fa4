"""``read``: the records of dumps, one after the other, in bounded memory."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offcorr.diagnose.formats import CONTAINERS, LAYOUTS, Container, DumpError, Layout, ReadWith, Row, Rows, Unreadable
from offcorr.diagnose.record import LOGPS, NAMES, Record, RecordError

__all__ = ["DumpError", "read"]

A_DUMP = (
    "A dump has the token ids of sampled sequences, each token with its log-prob by the sampler and by the trainer. "
    "`offcorr train --dump_rollouts FOLDER` writes one, and GRPOConfig(dump_rollouts='FOLDER') in your own script; "
    "docs/mismatch.md lists the dumps of other trainers"
)
EXPECTED = (
    f"expected {', '.join(c.name for c in CONTAINERS)}, which hold {', or '.join(layout.name for layout in LAYOUTS)}. "
    f"{A_DUMP}"
)
UNASKED = ("prompt_ids", "completion_ids", "rollout_logp", "old_logp", "origin")
OPTIONAL = tuple(name for name in NAMES if name not in UNASKED)
"""Fields that a record may lack; where only some records do, a warning says so."""
WITHOUT = {
    ("logp",): "how far the trainer's later updates moved its log-probs is not known. Where one of the two is logged, "
    "it is taken for old_logp: if it was computed after the updates, they look like older weights of the sampler",
    ("entropy",): "what is missing in both sides' log-probs, such as a temperature, cannot be seen",
    ("mask",): "every token of the completions is taken for one that the model sampled",
    ("rollout_version", "trainer_version"): "older weights cannot be told from an update that never arrived",
}
"""Fields that tests read, and what follows where no record has them."""
PARTLY = {
    "entropy": "a trainer's dump leaves it out where the weights have moved since old_logp, and the tests that need it "
    "read the other records",
}
"""Explanations of fields that only some records lack."""
OF_STEP = re.compile(r"(?P<step>step_\d+\.rank_\d+)(\.(?P<times>\d+))?\.parquet")
"""A file of ``StepDumps``: its step and rank, and how many times the step has been written, from the second on."""
NUMBERS = (*LOGPS, "entropy", "reward", "advantage")
ABOVE = 0.01
"""Log-prob (nats) above which a value is none: rounding leaves up to .004 above 0."""
FOREIGN = "demonstration"
"""The origin of rows that are left out: no sampler of the run drew them, so there is nothing to compare."""


def read(
    paths: Sequence[str | Path], *, warn: Callable[[str], None], report: Callable[[int, int], None] | None = None
) -> Iterator[Record]:
    """The records of any number of files, in the order of the paths; of a folder's files at any depth, by name.

    Where a run that was restarted wrote a step again (``StepDumps``), the last file of that step and rank is read, and
    a warning says so.

    A file is read as a stream: memory holds a line of jsonl, a batch of rows of parquet, the arrays of an npz (mapped
    from the file where it is not compressed), or one of slime's files with its partner.  Kinds of file are recognised
    by their first bytes, layouts by the names in the first row (``offcorr.diagnose.formats``).  Rows that are no
    record are left out, as are demonstrations; values that are not finite are kept, as is every sentinel.

    Args:
        paths: files and folders.  A file of a folder that is no dump is skipped with a warning.
        warn: receives one sentence for each kind of problem, with the first file and row, and how often it occurred;
            after the last record, or when reading is given up.
        report: receives the bytes read and the bytes of all files, at most a thousand times.

    Raises:
        DumpError: a path does not exist, a file that was named is empty or no dump (before the first record), or no
            record was found in any file (after the last); the message says what was found and what was expected.

    >>> import json, tempfile
    >>> row = {"prompt_ids": [5], "completion_ids": [7, 8], "rollout_logp": [-1.0, -0.5], "old_logp": [-1.1, -0.5]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "dump.jsonl")
    ...     _ = file.write_text(json.dumps(row) + "\\n" + json.dumps({**row, "old_logp": [-1.1]}) + "\\n")
    ...     records = list(read([file], warn=lambda text: print(text.replace(folder, "FOLDER"))))
    FOLDER/dump.jsonl, row 2: old_logp has shape (1,), expected (2,), a value per token of ...; 1 row left out
    no record has both old_logp and logp: how far the trainer's later updates moved its log-probs is not known. ...
    no record has entropy: what is missing in both sides' log-probs, such as a temperature, cannot be seen
    ...
    >>> len(records), records[0].old_logp.tolist()
    (1, [-1.1, -0.5])
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths is the single path {str(paths)!r}, expected a list of paths")
    problems = Problems()
    files = _files([Path(path) for path in paths], problems)
    if several := _several_runs(files):
        warn(several)
    return _records(files, problems, warn, report)


DEMONSTRATIONS = "demonstrations (origin), whose tokens no sampler of this run drew"


@dataclass
class Problem:
    """A kind of problem: the first sentence about it, its outcome, and how often it occurred in which files."""

    message: str
    outcome: str
    count: int = 0
    files: set[Path] = field(default_factory=set)

    def sentence(self) -> str:
        """For the user."""
        outcome = self.outcome.format(rows=f"{self.count} row{'s' * (self.count != 1)}", files=len(self.files))
        where = f" in {len(self.files)} files" if len(self.files) > 1 and "{files}" not in self.outcome else ""
        return f"{self.message}; {outcome}{where}"


@dataclass
class Problems:
    """The problems of the data by kind, and the fields that records lack."""

    kinds: dict[Any, Problem] = field(default_factory=dict)
    records: int = 0
    demonstrations: int = 0
    lacking: dict[str, int] = field(default_factory=dict)

    def add(self, kind: Any, path: Path, message: str, outcome: str = "{rows} left out") -> None:
        """Count one more of a kind."""
        problem = self.kinds.setdefault(kind, Problem(message, outcome))
        problem.count += 1
        problem.files.add(path)

    def merge(self, other: Problems) -> None:
        """Add those of a file."""
        for kind, problem in other.kinds.items():
            mine = self.kinds.setdefault(kind, Problem(problem.message, problem.outcome))
            mine.count += problem.count
            mine.files |= problem.files

    def check(self, record: Record, path: Path) -> None:
        """Count a record: the fields that it lacks, and values that are not finite where the mask is set."""
        self.records += 1
        for name in OPTIONAL:
            if getattr(record, name) is None:
                self.lacking[name] = self.lacking.get(name, 0) + 1
        for name in NUMBERS:
            value = getattr(record, name)
            if value is None:
                continue
            odd = ~np.isfinite(value)
            if np.ndim(value) and record.mask is not None:
                odd &= record.mask
            if odd.any():
                first = np.asarray(value)[odd].flat[0]
                share = f" at {odd.sum()} of {len(record)} tokens" if np.ndim(value) else ""
                message = f"{record.where}: {name} is {first}{share}, expected a finite number"
                self.add(("not finite", name), path, message, "{rows} like this, which are kept")
            above = np.isfinite(value) & (value > ABOVE)
            if name in LOGPS and record.mask is not None:
                above &= record.mask
            if name in LOGPS and above.any():
                share = f"{np.asarray(value)[above].flat[0]:.3g} at {above.sum()} of {len(record)} tokens"
                message = f"{record.where}: {name} is {share}, and a log-prob is not above 0"
                self.add(("above", name), path, message, "{rows} like this, which are kept")

    def tell(self, warn: Callable[[str], None]) -> None:
        """One sentence per kind."""
        if self.demonstrations and self.records:
            warn(f"{self.demonstrations} of {self.demonstrations + self.records} rows are {DEMONSTRATIONS}: left out")
        for problem in self.kinds.values():
            warn(problem.sentence())
        for names, consequence in WITHOUT.items():
            absent = [name for name in names if self.records and self.lacking.get(name) == self.records]
            if absent:
                lacked = "both old_logp and logp" if absent == ["logp"] else " or ".join(absent)
                warn(f"no record has {lacked}: {consequence}")
        for name, count in self.lacking.items():
            if count < self.records:
                meaning = f": {PARTLY[name]}" if name in PARTLY else ""
                warn(f"{name} is missing in {count} of {self.records} records{meaning}")


@dataclass(frozen=True)
class File:
    """A file with the function that reads its rows."""

    path: Path
    rows: Rows
    size: int


def _files(paths: Sequence[Path], problems: Problems) -> list[File]:
    """The files of all paths."""
    found: dict[Path, Container] = {}
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist; expected a file or a folder of dumps")
        found |= _of_folder(path, problems) if path.is_dir() else {path: _container(path)}
    if not found:
        raise DumpError("no path was given; expected files or folders of dumps")
    columns: Set[str] = frozenset().union(*(layout.columns for layout in LAYOUTS))
    of_container = {c.name: [path for path, its in found.items() if its is c] for c in CONTAINERS}
    opened = {c.name: c.opened(of_container[c.name], columns) for c in CONTAINERS if of_container[c.name]}
    return [File(path, opened[its.name], path.stat().st_size) for path, its in found.items()]


def _of_folder(folder: Path, problems: Problems) -> dict[Path, Container]:
    inside = sorted((file for file in folder.rglob("*") if file.is_file()), key=_by_number)
    replaced = _replaced(inside)
    found: dict[Path, Container] = {}
    for file in inside:
        try:
            if file in replaced:
                message = f"{file} is of a step that was trained again after a restart: {replaced[file].name} is read"
                problems.add(("replaced", folder), file, message, "{files} such files are left out")
                continue
            container = _container(file)
            if file.name.endswith(container.suffixes):
                found[file] = container
                continue
        except DumpError:
            pass
        problems.add(("skipped", folder), file, f"{file} is no dump", "{files} such files of the folder were skipped")
    if not found:
        names = ", ".join(file.name for file in inside[:5]) + (", ..." if len(inside) > 5 else "")
        raise DumpError(f"the folder {folder} holds {names or 'nothing'}, and no dump; {EXPECTED}")
    return found


def _replaced(files: Sequence[Path]) -> dict[Path, Path]:
    """The files of ``StepDumps`` whose step a restarted run wrote again, and the last file of that step and rank."""
    times: dict[tuple[Path, str], dict[int, Path]] = {}
    for file in files:
        if named := OF_STEP.fullmatch(file.name):
            times.setdefault((file.parent, named["step"]), {})[int(named["times"] or 1)] = file
    return {file: own[max(own)] for own in times.values() for number, file in own.items() if number < max(own)}


def _container(path: Path) -> Container:
    """The kind of a file, by its first bytes."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise DumpError(f"{path} cannot be opened: {error.strerror}") from error
    if not head:
        raise DumpError(f"{path} is empty (0 bytes); {EXPECTED}")
    for container in CONTAINERS:
        if container.recognises(path, head):
            return container
    raise DumpError(f"{path} begins with {head[:16]!r}, which is no dump; {EXPECTED}")


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    """A key by which step_9 comes before step_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def _several_runs(files: Sequence[File]) -> str:
    """A sentence where files of one optimizer step and rank lie in more than one folder; "": they do not."""
    folders: dict[str, list[Path]] = {}
    for file in files:
        if step := OF_STEP.fullmatch(file.path.name):
            folders.setdefault(step["step"], []).append(file.path.parent)
    runs = next((names for found in folders.values() if len(names := sorted({*map(str, found)})) > 1), [])
    if not runs:
        return ""
    return (
        f"{' and '.join(runs)} hold dumps of the same steps, so these are several runs, which are diagnosed as one; "
        "name one folder to diagnose one run"
    )


OF_DUMP_ROLLOUTS = "expected the folder that its option dump_rollouts named"


def _of_training(files: Sequence[File]) -> Path | None:
    """The folder of a training whose checkpoints are among the files; None: none are."""
    return next(
        (file.path.parents[1] for file in files if re.fullmatch(r"checkpoint-\d+", file.path.parent.name)), None
    )


def _records(
    files: Sequence[File], problems: Problems, warn: Callable[[str], None], report: Callable[[int, int], None] | None
) -> Iterator[Record]:
    total, before, told = sum(file.size for file in files), 0, -1
    failures: list[tuple[Path, str]] = []
    try:
        for file in files:
            try:
                for record, position in _of_file(file, problems):
                    now = before + min(position, file.size)
                    if report is not None and now * 1000 // total > told:
                        told = now * 1000 // total
                        report(now, total)
                    yield record
            except ReadWith:
                pass  # its records come with another file
            except DumpError as error:
                failures.append((file.path, str(error)))
            before += file.size
        if report is not None and told < 1000:
            report(total, total)
        if not problems.records and problems.demonstrations and not failures:
            raise DumpError(f"all {problems.demonstrations} rows are {DEMONSTRATIONS}, so there is nothing to compare")
        if not problems.records and (run := _of_training(files)):
            raise DumpError(f"{run} holds the checkpoints of a training, and no dump; {OF_DUMP_ROLLOUTS}")
        if not problems.records:
            raise DumpError("\n".join(message for _, message in failures) or f"no file has a record; {EXPECTED}")
        for path, message in failures:
            problems.add("unusable", path, message, "nothing more is read of {files} such files")
    finally:
        problems.tell(warn)


def _misspelt(row: Any, record: Record) -> dict[str, str]:
    """Names in a row that are nearly those of fields which its record lacks, and these.

    >>> row = {"prompt_ids": [5], "completion_ids": [7], "rollout_logp": [-1.0], "logp": [-1.5], "enrtopy": [1.0]}
    >>> _misspelt(row, Record.of(row))
    {'enrtopy': 'entropy'}
    """
    lacking = [name for name in OPTIONAL if getattr(record, name) is None]
    others = [name for name in row if isinstance(name, str) and name not in NAMES] if isinstance(row, Mapping) else []
    near = {name: difflib.get_close_matches(name, lacking, 1, cutoff=0.8) for name in others}
    return {name: meant[0] for name, meant in near.items() if meant}


def _of_file(file: File, problems: Problems) -> Iterator[tuple[Record, int]]:
    """The records of a file, each with the bytes that have been read.

    Raises:
        DumpError: there is none; what was wrong with its rows is then told by the error, and else counted.
    """
    path, layout, rows, found = file.path, None, 0, 0
    own = Problems()
    try:
        for row in file.rows(path):
            rows += 1
            where = f"{path}, row {row.number}"
            if isinstance(row.fields, Unreadable):
                own.add(row.fields.kind, path, f"{where}: {row.fields.message}")
                continue
            layout = layout or _layout(row, path)
            try:
                record = Record.of(layout.fields(row.fields, path), where)
            except RecordError as error:
                own.add((error.kind, error.field), path, f"{where}: {error.message}")
                continue
            except (TypeError, ValueError, IndexError) as error:
                own.add("shape", path, f"{where} is not as {layout.name} has it: {error}")
                continue
            if not len(record):
                own.add("no token", path, f"{where}: no token of the sequence was sampled, expected one at least")
                continue
            found += 1
            if found == 1:
                for name, meant in _misspelt(row.fields, record).items():
                    own.add(
                        ("name", name), path, f"{where}: {name!r} is no field of a dump", f"did you mean {meant!r}?"
                    )
            if record.origin == FOREIGN:
                problems.demonstrations += 1
                continue
            problems.check(record, path)
            yield record, row.position
    finally:
        if found:
            problems.merge(own)
    if not found:
        first = next(iter(own.kinds.values()), None)
        reason = "it has no row" if first is None else f"none of its {rows} rows is one. {first.sentence()}"
        if first is None or own.kinds.keys() <= {"json"}:  # what may be another kind of file, such as a summary
            reason += f". {A_DUMP}"
        raise DumpError(f"{path} has no usable record: {reason}")


def _layout(row: Row, path: Path) -> Layout:
    names = {*row.fields}
    for layout in LAYOUTS:
        if layout.recognises(names):
            return layout
    raise DumpError(
        f"{path}, row {row.number} is no row of a dump: it has {', '.join(map(str, row.fields)) or 'no columns'}. "
        f"A row of a dump has prompt_ids, completion_ids, rollout_logp, and old_logp or logp; {EXPECTED}"
    )
