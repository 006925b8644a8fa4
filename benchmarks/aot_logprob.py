"""Ahead-of-time compilation of the log-prob kernels, no GPU needed: registers, spills and shared memory.

    python benchmarks/aot_logprob.py [--output benchmarks/results/aot_logprob] [--targets sm_90]

Every combination of soft-cap, entropy, squares and bias, for float32 tiles and (from logits) bfloat16 ones, with the
block and warps that a launch uses.  The table says what the assembler reports; nothing here has run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offcorr.kernels.logprob_triton import BLOCK, WARPS, fold_kernel, grad_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes a block may have; the compiler does not check."""

_TYPES = {
    "target_ptr": "*i64",
    "state_ptr": "*fp32",
    "rows_ptr": "*fp32",
    "scale": "fp32",
    "soft_cap": "fp32",
    "inverse_temperature": "fp32",
}


def variants() -> list[dict[str, Any]]:
    """Name, kernel, pointer types and constants of everything that is launched on half-precision or float32 inputs."""
    found = []
    for capped, entropy in itertools.product((False, True), repeat=2):
        flags = {"CAPPED": capped, "ENTROPY": entropy}
        said = ("soft-cap " if capped else "") + ("entropy " if entropy else "")
        for tile, bias in (("*fp32", None), ("*fp32", "*bf16"), ("*bf16", None)):
            if tile == "*bf16":
                where = "bf16 logits"
            else:
                where = "fp32 tile" + (", bias" if bias else "")
            for squares in (False, True):
                for weights in (None, "*bf16") if tile == "*fp32" else (None,):
                    name = said + ("squares " if squares else "") + ("U " if weights else "")
                    found.append(
                        {
                            "kernel": fold_kernel,
                            "variant": name.strip() or "plain",
                            "reads": where,
                            "types": {"tile_ptr": tile, "bias_ptr": bias, "weights_ptr": weights},
                            "constants": {**flags, "SQUARES": squares},
                        }
                    )
            found.append(
                {
                    "kernel": grad_kernel,
                    "variant": said.strip() or "plain",
                    "reads": where,
                    "types": {"tile_ptr": tile, "bias_ptr": bias, "out_ptr": "*bf16"},
                    "constants": flags,
                }
            )
    return found


def compile_for(target: str, one: dict[str, Any]) -> dict[str, int]:
    """Registers a thread, spilled bytes or registers, shared memory in bytes."""
    types, constants, attributes = {}, {**one["constants"], "BLOCK": BLOCK}, {}
    for place, name in enumerate(one["kernel"].arg_names):
        kind = one["types"].get(name, _TYPES.get(name, "i32"))
        if name in constants or kind is None:
            types[name] = "constexpr"
            constants.setdefault(name, None)
            continue
        types[name] = kind
        if kind.startswith("*") or name in ("tile_stride", "weights_stride", "out_stride", "columns"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one["kernel"], types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=TARGETS[target], options={"num_warps": WARPS})
    if target.startswith("sm_"):
        return {**_cubin(built.asm["cubin"]), "shared": built.metadata.shared}
    text = built.asm["amdgcn"]
    vector, vector_spilled, scalar_spilled = (
        int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return {"registers": vector, "spills": vector_spilled + scalar_spilled, "shared": built.metadata.shared}


def _cubin(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spills": stack + local}


def measure(targets: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "kernel": one["kernel"].__name__,
            "variant": one["variant"],
            "reads": one["reads"],
            "target": target,
            **compile_for(target, one),
        }
        for one in variants()
        for target in targets
    ]


def bad(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that spill, or have more shared memory than there is."""
    return [row for row in rows if row["spills"] or row["shared"] > SHARED_LIMIT[row["target"]]]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each kernel variant, ``registers / spills / shared`` for each target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines = [f"| kernel | variant | reads | {' | '.join(targets)} |", "|---|---|---|" + "---|" * len(targets)]
    by_place: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        place = row["kernel"], row["variant"], row["reads"]
        by_place.setdefault(place, []).append(f"{row['registers']} / {row['spills']} / {row['shared']}")
    lines += [f"| {' | '.join((*place, *cells))} |" for place, cells in by_place.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="without a suffix; writes .md and .json")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    options = parser.parse_args()
    rows = measure(options.targets)
    text = (
        f"Registers a thread / spills / bytes of shared memory, block {BLOCK}, {WARPS} warps; "
        f"triton {triton.__version__}.\n"
        "Compiled ahead of time by `python benchmarks/aot_logprob.py`; nothing has run.\n\n"
    )
    print(text + table(rows))
    if options.output:
        options.output.with_suffix(".md").write_text(text + table(rows))
        about = {"triton": triton.__version__, "block": BLOCK, "warps": WARPS, "limits": SHARED_LIMIT}
        options.output.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if found := bad(rows):
        raise SystemExit(f"{len(found)} kernels spill or have too much shared memory, the first: {found[0]}")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    main()
