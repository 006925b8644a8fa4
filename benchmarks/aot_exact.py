"""Ahead-of-time compilation of offcorr.exact's kernels: registers, spills and shared memory, without a GPU.

    python benchmarks/aot_exact.py [--output benchmarks/results/aot_exact] [--targets sm_90]

The tile sizes, warps and stages are those of a launch.  The numbers are those that ptxas or LLVM reports; no kernel
runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))
from aot_common import DIVISIBLE_BY_16, arguments, report, resources  # noqa: E402

from offcorr.kernels.invariant import (  # noqa: E402
    COLUMNS,
    STAGES,
    TILES,
    WARPS,
    matmul_kernel,
    row_sum_kernel,
    softmax_kernel,
)

AMD_STAGES = 2


def variants() -> list[dict[str, Any]]:
    """Returns name, kernel, types and constants of every variant."""
    listed = []
    for kind in ("fp32", "bf16"):
        block_m, block_n, block_k = TILES[4 if kind == "fp32" else 2]
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        for bias in (None, f"*{kind}"):
            listed.append(
                {
                    "kernel": matmul_kernel,
                    "variant": f"{kind}{', bias' if bias else ''}",
                    "types": {"a_ptr": f"*{kind}", "b_ptr": f"*{kind}", "bias_ptr": bias, "c_ptr": f"*{kind}"},
                    "constants": tile | {"stride_bk": 1},
                }
            )
        listed.append(
            {
                "kernel": row_sum_kernel,
                "variant": f"{kind}, squared",
                "types": {"x_ptr": f"*{kind}", "out_ptr": "*fp32", "divisor": "fp32"},
                "constants": {"SQUARED": True, "BLOCK": COLUMNS},
            }
        )
        for log in (False, True):
            listed.append(
                {
                    "kernel": softmax_kernel,
                    "variant": f"{kind}{', log' if log else ''}",
                    "types": {"x_ptr": f"*{kind}", "out_ptr": "*fp32"},
                    "constants": {"LOG": log, "BLOCK": COLUMNS},
                }
            )
    return listed


def compile_for(target: str, one: dict[str, Any]) -> dict[str, int]:
    """Returns registers per thread, spilled bytes per thread and bytes of shared memory."""
    types, constants, attributes = {}, dict(one["constants"]), {}
    for place, name in enumerate(one["kernel"].arg_names):
        kind = one["types"].get(name, "i32")
        if name in constants or kind is None:
            types[name] = "constexpr"
            constants.setdefault(name, None)
            continue
        types[name] = kind
        if kind.startswith("*") or name in ("N", "K", "stride_bn", "stride_bz", "columns"):
            attributes[(place,)] = DIVISIBLE_BY_16
    options = {"num_warps": WARPS}
    if one["kernel"] is matmul_kernel:
        options["num_stages"] = STAGES if target.startswith("sm_") else AMD_STAGES
    return resources(target, one["kernel"], types, constants, attributes, options)


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = [
        {
            "kernel": one["kernel"].__name__,
            "variant": one["variant"],
            "target": target,
            **compile_for(target, one),
        }
        for one in variants()
        for target in options.targets
    ]
    head = (
        f"Registers per thread / spilled bytes per thread / bytes of shared memory, {WARPS} warps; triton "
        f"{triton.__version__}.\nCompiled ahead of time by `python benchmarks/aot_exact.py`; no kernel has run."
    )
    report(rows, head, ("kernel", "variant"), options.output, warps=WARPS)


if __name__ == "__main__":
    main()
