"""What the tables of ahead-of-time compilation share: targets, what the assembler reports, the files."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import flags
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes a block may have; the compiler does not check."""

DIVISIBLE_BY_16 = [["tt.divisibility", 16]]
"""What a launch says of a pointer or a number that is."""

Row = dict[str, Any]


def resources(
    target: str,
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    attributes: dict[Any, Any],
    options: dict[str, int],
) -> dict[str, int]:
    """Registers a thread; bytes a thread that spill to memory; bytes of shared memory."""
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    nvidia = target.startswith("sm_")
    known = {name: value for name, value in options.items() if nvidia or name != "maxnreg"}
    built = triton.compile(source, target=TARGETS[target], options=known)
    if nvidia:
        return {**_cubin(built.asm["cubin"]), "shared": built.metadata.shared}
    # Scalar registers that did not fit lie in a vector register's lanes; what is in memory is the private segment.
    words = {"registers": "vgpr_count", "spills": "private_segment_fixed_size", "scalars_moved": "sgpr_spill_count"}
    found = {name: int(re.search(rf"\.{word}:\s+(\d+)", built.asm["amdgcn"])[1]) for name, word in words.items()}
    return {**found, "shared": built.metadata.shared}


def _cubin(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spills": stack + local}


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags of every such script."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    parser = argparse.ArgumentParser(allow_abbrev=False, description=description.split("\n")[0])
    parser.add_argument("--output", type=flags.output, help="without a suffix; writes .md and .json")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    return parser


def table(rows: list[Row], places: tuple[str, ...]) -> str:
    """Markdown: one line for each place (the named entries of a row), ``registers / spills / shared`` a target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines = [f"| {' | '.join((*places, *targets))} |", "|---" * (len(places) + len(targets)) + "|"]
    by_place: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells = by_place.setdefault(tuple(row[place] for place in places), [])
        cells.append(f"{row['registers']} / {row['spills']} / {row['shared']}")
    return "\n".join(lines + [f"| {' | '.join((*place, *cells))} |" for place, cells in by_place.items()]) + "\n"


def bad(rows: list[Row]) -> list[Row]:
    """Those that spill, or have more shared memory than there is."""
    return [row for row in rows if row["spills"] or row["shared"] > SHARED_LIMIT[row["target"]]]


def report(rows: list[Row], head: str, places: tuple[str, ...], output: Path | None, **about: Any) -> None:
    """Print the table and write it.

    Raises:
        SystemExit: a kernel spills, or asks for more shared memory than there is.
    """
    text = f"{head}\n\n{table(rows, places)}"
    print(text)
    if output:
        output.with_suffix(".md").write_text(text)
        about = {"triton": triton.__version__, **about, "limits": SHARED_LIMIT}
        output.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if found := bad(rows):
        raise SystemExit(f"{len(found)} kernels spill or have too much shared memory, the first: {found[0]}")
