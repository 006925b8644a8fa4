"""Ahead-of-time compilation of every kernel, no GPU needed: registers, spills and shared memory.

    python benchmarks/aot.py [--output benchmarks/results/aot_correction] [--methods ppo minpro] [--targets sm_90]

Every method of ``offcorr.available()`` is composed for a batch with all three policies, padded, packed and in rows so
long that several programs share one, and compiled for sm_80, sm_90 and gfx942 with the block and warps that a launch
uses.  Methods with the same source share a row; where rows are split, "summary" is the launch before.  The table says
what the assembler reports; nothing here has run.  Exits with 1 where a kernel spills.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import triton
from aot_common import DIVISIBLE_BY_16, arguments, report, resources

import offcorr
from offcorr import gates, rejections, weights
from offcorr.kernels import correction as fused
from offcorr.kernels.compose import numbers
from offcorr.kernels.metrics import divide_by_kept

EVERYTHING = "(minprefix, truncated by turn, four rejections)"

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def batch(
    packed: bool, dtype: torch.dtype = torch.float32, rows: int = 64, width: int = 2048, **fields: Any
) -> offcorr.Batch:
    """Tokens with everything that a method may ask for."""
    logp = -torch.rand(rows, width).to(dtype)
    per_token: dict[str, Any] = {
        "logp": logp,
        "old_logp": logp + 0.1,
        "rollout_logp": logp - 0.1,
        "mask": logp < 0,
    }
    per_sequence = {"advantages": torch.ones(rows), "rewards": torch.ones(rows), "group_ids": torch.arange(rows) // 8}
    per_token |= {name: value for name, value in fields.items() if value.shape == logp.shape}
    per_sequence = {name: value for name, value in per_sequence.items() if name not in fields}
    if not packed:
        return offcorr.Batch(**per_token, **per_sequence)
    flat = {name: value.flatten() for name, value in per_token.items()}
    return offcorr.Batch.packed(**flat, **per_sequence, cu_seqlens=torch.arange(rows + 1) * width)


def everything_at_once() -> offcorr.Correction:
    """A running ratio, a weight by turn and four rejections: about as much as a row may carry."""
    reject = (
        rejections.Veto(1e-4),
        rejections.K3(0.1, level="seq-max"),
        rejections.Geometric(0.9, 1.1),
        rejections.BinaryKL(0.1, mismatch="engine"),
    )
    ratio, weight = offcorr.ratios.MinPrefix(), weights.Truncate(2.0, level="turn")
    return offcorr.Correction(ratio, gates.Unclipped(), weight, reject, aggregate="seq-mean-token-mean")


def launches(given: offcorr.Batch, names: list[str]) -> dict[str, dict[str, Any]]:
    """Every distinct composition by its methods' names: kernels, arguments, constants."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        loss_fn = everything_at_once() if name == EVERYTHING else offcorr.get(name)
        if loss_fn.aggregate == "seq-mean-token-sum-norm":
            loss_fn = dataclasses.replace(loss_fn, max_length=2048)
        with fused.use("triton"):
            call = fused._prepare(loss_fn.resolve(loss_fn.statistics(given)), given, None)
        source = call.composition.writer.text() + repr(sorted(map(str, call.composition.functions.items())))
        if source in found:
            found[source]["methods"].append(name)
            continue
        arguments = [*call.arguments(call.outputs()), *numbers(call.loss_fn, given.logp.device)]
        found[source] = {"methods": [name], "kernels": call.kernels.launches, "arguments": arguments}
        found[source] |= {"BLOCK": call.block, "options": call.options}
    return {", ".join(one["methods"]): one for one in found.values()}


def signature(
    kernel: Any, arguments: list[Any], block: int, **constexprs: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """(types, constants, attributes), as a launch with these arguments specialises them."""
    constexprs["BLOCK"] = block
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, [*arguments, *constexprs.values()], strict=True)):
        if value is None or name in constexprs:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            attributes[(place,)] = DIVISIBLE_BY_16
        elif isinstance(value, tuple):
            types[name] = type(value)(
                *("*" + _TYPES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" for x in value)
            )
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name == "width" and value % 16 == 0:
                attributes[(place,)] = DIVISIBLE_BY_16
    return types, constants, attributes


def measure(targets: list[str], names: list[str]) -> list[dict[str, Any]]:
    """A row for each composition, layout and target."""
    rows = []
    varied = {"turn_ids": torch.zeros(64, 2048, dtype=torch.int64), "advantages": torch.ones(64, 2048)}
    long = {name: value.reshape(2, -1) for name, value in varied.items()}
    turns = [name for name in ("turn_ppo",) if name in names] + [EVERYTHING]
    layouts = {
        "padded": (batch(False), [*names, EVERYTHING]),
        "packed": (batch(True), [*names, EVERYTHING]),
        "split": (batch(False, rows=2, width=2**15), [*names, EVERYTHING]),
        "packed, bf16, turn ids, advantages of tokens": (
            batch(True, torch.bfloat16, **varied),
            [name for name in ("dapo", "gspo") if name in names] + turns,
        ),
        "packed, split, turn ids, advantages of tokens": (batch(True, rows=2, width=2**16, **long), turns),
    }
    for layout, (given, wanted) in layouts.items():
        for methods, one in launches(given, wanted).items():
            for kernel, target in itertools.product(one["kernels"], targets):
                specialised = signature(kernel, one["arguments"], one["BLOCK"])
                found = resources(target, kernel, *specialised, one["options"])
                step = "" if kernel is one["kernels"][-1] else ", summary"
                rows.append({"methods": methods, "layout": layout + step, "target": target, **found})
    for target, divides in itertools.product(targets, (False, True)):
        given = [torch.empty(1), torch.empty(1), torch.empty(1), None, 2048, 1, 2048]
        specialised = signature(divide_by_kept, given, fused.BLOCK, SERIES=2, DIVIDES=divides)
        found = resources(target, divide_by_kept, *specialised, {"num_warps": fused.WARPS})
        layout = "by Z and each row's count" if divides else "by Z"
        rows.append({"methods": "(count_rejected=False: dividing)", "layout": layout, "target": target, **found})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="+", default=[m.name for m in offcorr.registry.catalogue()])
    options = parser.parse_args()
    rows = measure(options.targets, options.methods)
    head = (
        "Registers a thread / bytes spilled / bytes of shared memory; float32 unless said.\n"
        f"Block {fused.BLOCK}, {fused.WARPS} warps, on NVIDIA GPUs at most {fused.REGISTERS} registers for up to "
        f"{fused.CROWDED} stages, triton {triton.__version__}.  Compiled ahead of time by "
        "`python benchmarks/aot.py`; nothing has run."
    )
    report(rows, head, ("methods", "layout"), options.output, block=fused.BLOCK, warps=fused.WARPS)


if __name__ == "__main__":
    main()
