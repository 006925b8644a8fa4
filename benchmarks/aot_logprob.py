"""Ahead-of-time compilation of the log-prob kernels: registers, spills and shared memory, without a GPU.

    python benchmarks/aot_logprob.py [--output benchmarks/results/aot_logprob] [--targets sm_90]

The variants are every combination of soft-cap, entropy, squares and bias, for float32 tiles and for bfloat16 logits,
and, for float32 tiles with a bias, the same within the support of truncated sampling.  Block size and number of warps
are those of a launch.  The numbers are those that ptxas or LLVM reports; no kernel runs.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the tests import this file by its path
from aot_common import DIVISIBLE_BY_16, TARGETS, arguments, bad, report, resources  # noqa: E402

from offcorr.kernels.logprob.fold import BLOCK, WARPS, fold_kernel, grad_kernel  # noqa: E402

__all__ = ["TARGETS", "bad", "compile_for", "variants"]

_TYPES = {
    "target_ptr": "*i64",
    "state_ptr": "*fp32",
    "rows_ptr": "*fp32",
    "scale": "fp32",
    "soft_cap": "fp32",
    "inverse_temperature": "fp32",
}


def variants() -> list[dict[str, Any]]:
    """Returns name, kernel, pointer types and constants of every variant for half-precision and float32 inputs."""
    listed = []
    for capped, entropy in itertools.product((False, True), repeat=2):
        flags = {"CAPPED": capped, "ENTROPY": entropy}
        prefix = ("soft-cap " if capped else "") + ("entropy " if entropy else "")
        for tile, bias, kept in (
            ("*fp32", None, None),
            ("*fp32", "*bf16", None),
            ("*fp32", "*bf16", "*i1"),
            ("*bf16", None, None),
        ):
            if tile == "*bf16":
                where = "bf16 logits"
            else:
                where = "fp32 tile" + (", bias" if bias else "") + (", support" if kept else "")
            for squares in (False, True):
                for weights in (None, "*bf16") if tile == "*fp32" else (None,):
                    name = prefix + ("squares " if squares else "") + ("U " if weights else "")
                    listed.append(
                        {
                            "kernel": fold_kernel,
                            "variant": name.strip() or "plain",
                            "reads": where,
                            "types": {"tile_ptr": tile, "bias_ptr": bias, "weights_ptr": weights, "kept_ptr": kept},
                            "constants": {**flags, "SQUARES": squares},
                        }
                    )
            listed.append(
                {
                    "kernel": grad_kernel,
                    "variant": prefix.strip() or "plain",
                    "reads": where,
                    "types": {"tile_ptr": tile, "bias_ptr": bias, "out_ptr": "*bf16", "kept_ptr": kept},
                    "constants": flags,
                }
            )
    return listed


def signature(one: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """Returns (types, constants, attributes) as a launch specialises them."""
    types, constants, attributes = {}, {**one["constants"], "BLOCK": BLOCK}, {}
    for place, name in enumerate(one["kernel"].arg_names):
        kind = one["types"].get(name, _TYPES.get(name, "i32"))
        if name in constants or kind is None:
            types[name] = "constexpr"
            constants.setdefault(name, None)
            continue
        types[name] = kind
        if kind.startswith("*") or name in ("tile_stride", "weights_stride", "out_stride", "kept_stride", "columns"):
            attributes[(place,)] = DIVISIBLE_BY_16
    return types, constants, attributes


def compile_for(target: str, one: dict[str, Any]) -> dict[str, int]:
    """Returns registers per thread, spilled bytes per thread and bytes of shared memory."""
    return resources(target, one["kernel"], *signature(one), {"num_warps": WARPS})


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


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = measure(options.targets)
    head = (
        f"Registers per thread / spilled bytes per thread / bytes of shared memory, block {BLOCK}, {WARPS} warps; "
        f"triton {triton.__version__}.\n"
        "Compiled ahead of time by `python benchmarks/aot_logprob.py`; no kernel has run."
    )
    report(rows, head, ("kernel", "variant", "reads"), options.output, block=BLOCK, warps=WARPS)


if __name__ == "__main__":
    main()
