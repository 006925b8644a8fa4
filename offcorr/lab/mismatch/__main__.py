"""The command ``python -m offcorr.lab.mismatch``: dumps with known causes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from offcorr.diagnose.writer import DumpWriter
from offcorr.flags import Parser
from offcorr.folders import check_writable
from offcorr.lab.mismatch import ARCHITECTURES, CAUSES, STRENGTHS, Dump, check, make
from offcorr.lab.text import Progress


def file_of(causes: Sequence[str], architecture: str, seed: int, strength: str, folder: Path) -> Path:
    """The file of a dump.

    >>> file_of(["top_p", "shift"], "llama", 3, "usual", Path("dumps")).as_posix()
    'dumps/top_p+shift.llama.usual.3.jsonl.gz'
    """
    return folder / f"{'+'.join(causes)}.{architecture}.{strength}.{seed}.jsonl.gz"


def write(dump: Dump, folder: Path) -> Path:
    """Writes a dump to the file of ``file_of``, and the truth about it beside it, to a .json.

    Returns:
        the dump's file.

    Raises:
        FileExistsError: the file exists.
    """
    file = file_of(dump.causes, dump.architecture, dump.seed, dump.strength, folder)
    truth = {"causes": dump.causes, "architecture": dump.architecture, "strength": dump.strength, "seed": dump.seed}
    folder.mkdir(parents=True, exist_ok=True)
    with DumpWriter(file) as writer:
        writer.write(dump.records)
    beside = file.with_name(file.name.replace(".jsonl.gz", ".json"))
    beside.write_text(json.dumps(truth | {"settings": dump.settings}, indent=2) + "\n")
    return file


def counted(dumps: int) -> str:
    """A number of dumps, in words.

    >>> counted(1), counted(2)
    ('1 dump', '2 dumps')
    """
    return f"{dumps} dump" + "s" * (dumps != 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser(prog="python -m offcorr.lab.mismatch", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the files")
    parser.add_argument(
        "--causes",
        nargs="+",
        default=list(CAUSES),
        metavar="CAUSE",
        help="names, or several joined by + to be made together (default: each by itself)",
    )
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--strengths", nargs="+", default=["usual"], choices=STRENGTHS)
    given = parser.parse_args(arguments)

    try:
        check_writable("--output", given.output)
    except ValueError as error:
        parser.error(str(error))
    known = [name for text in given.causes for name in text.split("+")]
    if unknown := [name for name in known if name not in CAUSES]:
        parser.error(f"--causes has {', '.join(unknown)}, expected some of {', '.join(CAUSES)}")
    jobs, skipped, there = [], 0, 0
    for architecture, seed, strength, text in product(given.architectures, given.seeds, given.strengths, given.causes):
        if not all(architecture in CAUSES[name].architectures for name in text.split("+")):
            skipped += 1
            continue
        try:
            causes = check(text.split("+"), architecture, strength)
        except ValueError as error:
            parser.error(str(error))
        if file_of(causes, architecture, seed, strength, given.output).exists():
            there += 1
        else:
            jobs.append((causes, architecture, seed, strength))
    plan = f"{counted(len(jobs))} to {given.output}"
    plan += f"; {skipped} cannot be made with their architecture" if skipped else ""
    plan += f"; {there} are there already and stay as they are" if there else ""
    with Progress(len(jobs), plan) as progress:
        for done, (causes, architecture, seed, strength) in enumerate(jobs, 1):
            dump = make(causes, architecture=architecture, seed=seed, sequences=given.sequences, strength=strength)
            progress(done, write(dump, given.output).name)
    print(f"{counted(len(jobs))} in {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
