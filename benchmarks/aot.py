"""Ahead-of-time compilation of every kernel, no GPU needed: registers, spills and shared memory.

    python benchmarks/aot.py [--output benchmarks/results/aot_correction] [--methods ppo minpro] [--targets sm_90]

Every method of ``offcorr.available()`` is composed for a batch with all three policies, padded and packed, and
compiled for sm_80, sm_90 and gfx942 with the block and warps that a launch uses.  Methods with the same source share
a row.  The table says what the assembler reports; nothing here has run.  Exits with 1 where a kernel spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import offcorr
from offcorr import gates, rejections, weights
from offcorr.kernels import correction as fused
from offcorr.kernels.compose import numbers
from offcorr.kernels.metering_triton import merge_rows

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes a block may have; the compiler does not check."""

EVERYTHING = "(minprefix, truncated by turn, four rejections)"

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def batch(packed: bool, dtype: torch.dtype = torch.float32, **fields: Any) -> offcorr.Batch:
    """64 x 2048 tokens with everything that a method may ask for."""
    logp = -torch.rand(64, 2048).to(dtype)
    per_token: dict[str, Any] = {
        "logp": logp,
        "old_logp": logp + 0.1,
        "rollout_logp": logp - 0.1,
        "mask": logp < 0,
    }
    per_sequence = {"advantages": torch.ones(64), "rewards": torch.ones(64), "group_ids": torch.arange(64) // 8}
    per_token |= {name: value for name, value in fields.items() if value.shape == logp.shape}
    per_sequence = {name: value for name, value in per_sequence.items() if name not in fields}
    if not packed:
        return offcorr.Batch(**per_token, **per_sequence)
    flat = {name: value.flatten() for name, value in per_token.items()}
    return offcorr.Batch.packed(**flat, **per_sequence, cu_seqlens=torch.arange(65) * 2048)


def everything_at_once() -> offcorr.Correction:
    """A running ratio, a weight by turn and four rejections: about as much as a row may carry."""
    reject = (
        rejections.Veto(1e-4),
        rejections.K3(0.1, level="seq-max"),
        rejections.Geometric(0.9, 1.1),
        rejections.BinaryKL(0.1, of="engine"),
    )
    ratio, weight = offcorr.ratios.MinPrefix(), weights.Truncate(2.0, level="turn")
    return offcorr.Correction(ratio, gates.Unclipped(), weight, reject, aggregate="seq-mean-token-mean")


def launches(given: offcorr.Batch, names: list[str]) -> dict[str, dict[str, Any]]:
    """Every distinct composition by its methods' names: kernel, arguments, constants."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        loss_fn = everything_at_once() if name == EVERYTHING else offcorr.get(name)
        if loss_fn.aggregate == "seq-mean-token-sum-norm":
            loss_fn = dataclasses.replace(loss_fn, max_length=2048)
        with fused.use("triton"):
            call = fused._prepare(loss_fn, given, None, None)
        source = call.composition.source + repr(sorted(map(str, call.composition.functions.items())))
        if source in found:
            found[source]["methods"].append(name)
            continue
        rows = call.batch.sequences
        partials, coefficient = torch.empty(1, rows), torch.empty(call.batch.logp.numel())
        arguments = [*call.arguments(coefficient, partials), *numbers(call.loss_fn)]
        found[source] = {"methods": [name], "kernel": call.kernel, "arguments": arguments, "BLOCK": call.block}
    return {", ".join(one["methods"]): one for one in found.values()}


def signature(kernel: Any, arguments: list[Any], block: int) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """(signature, constants, attributes), as a launch with these arguments specialises them."""
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, [*arguments, block], strict=True)):
        if value is None or name == "BLOCK":
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            types[name] = type(value)(*["fp32"] * len(value))
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name == "width" and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def compile_for(target: str, kernel: Any, arguments: list[Any], block: int, warps: int) -> dict[str, int]:
    """Registers a thread; bytes a thread that spill to memory; bytes of shared memory."""
    types, constants, attributes = signature(kernel, arguments, block)
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    if target.startswith("sm_"):
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


def measure(targets: list[str], names: list[str]) -> list[dict[str, Any]]:
    """A row for each composition, layout and target."""
    rows = []
    varied = {"turn_ids": torch.zeros(64, 2048, dtype=torch.int64), "advantages": torch.ones(64, 2048)}
    layouts = {
        "padded": (batch(False), [*names, EVERYTHING]),
        "packed": (batch(True), [*names, EVERYTHING]),
        "packed, bf16, turn ids, advantages of tokens": (
            batch(True, torch.bfloat16, **varied),
            [name for name in ("dapo", "gspo", "turn_ppo") if name in names] + [EVERYTHING],
        ),
    }
    for layout, (given, wanted) in layouts.items():
        for methods, one in launches(given, wanted).items():
            for target in targets:
                found = compile_for(target, one["kernel"], one["arguments"], one["BLOCK"], fused.WARPS)
                rows.append({"methods": methods, "layout": layout, "target": target, **found})
    merging = [torch.empty(1), torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.float64), torch.empty(1)]
    for target in targets:
        found = compile_for(target, merge_rows, [*merging, 64], 256, 4)
        rows.append({"methods": "(merging the rows' metrics)", "layout": "both", "target": target, **found})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each composition and layout, ``registers / spills / shared`` for each target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines = [f"| methods | layout | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    by_place: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells = by_place.setdefault((row["methods"], row["layout"]), {})
        cells[row["target"]] = f"{row['registers']} / {row['spills']} / {row['shared']}"
    lines += [f"| {m} | {layout} | {' | '.join(cells.values())} |" for (m, layout), cells in by_place.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="without a suffix; writes .md and .json")
    parser.add_argument("--methods", nargs="+", default=[m.name for m in offcorr.registry.catalogue()])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    options = parser.parse_args()
    rows = measure(options.targets, options.methods)
    text = (
        "Registers a thread / bytes spilled / bytes of shared memory; float32 unless said.\n"
        f"Block {fused.BLOCK}, {fused.WARPS} warps, triton {triton.__version__}.  "
        "Compiled ahead of time by `python benchmarks/aot.py`; nothing has run.\n\n"
    )
    print(text + table(rows))
    if options.output:
        options.output.with_suffix(".md").write_text(text + table(rows))
        about = {"triton": triton.__version__, "block": fused.BLOCK, "warps": fused.WARPS, "limits": SHARED_LIMIT}
        options.output.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    bad = [r for r in rows if r["spills"] or r["shared"] > SHARED_LIMIT[r["target"]]]
    if bad:
        raise SystemExit(f"{len(bad)} kernels spill or have too much shared memory, the first: {bad[0]}")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    main()
