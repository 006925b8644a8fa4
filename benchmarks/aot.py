"""Ahead-of-time compilation of every kernel, no GPU needed: registers, spills and shared memory.

    python benchmarks/aot.py [--output benchmarks/results/aot_correction] [--methods ppo minpro] [--targets sm_90]

Every method of ``offcorr.available()`` is composed for a batch with all three policies, padded, packed and in rows so
long that several programs share one, and compiled for sm_80, sm_90 and gfx942 with the block and warps that a launch
uses.  Methods with the same source share a row; where rows are split, "summary" is the launch before.  The table says
what the assembler reports; nothing here has run.  Exits with 1 where a kernel spills.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import flags
import torch
import triton
from aot_common import DIVISIBLE_BY_16, arguments, report, resources

import offcorr
from offcorr import gates, rejections, weights
from offcorr.kernels import launch
from offcorr.kernels.metrics import divide_by_kept, entry_size
from offcorr.methods import registry

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
        "entropy": -logp,
    }
    per_sequence = {"advantages": torch.ones(rows), "rewards": torch.ones(rows), "group_ids": torch.arange(rows) // 8}
    per_token |= {name: value for name, value in fields.items() if value.shape == logp.shape}
    per_sequence = {name: value for name, value in per_sequence.items() if name not in fields}
    if not packed:
        return offcorr.Batch(**per_token, **per_sequence)
    flat = {name: value.flatten() for name, value in per_token.items()}
    return offcorr.Batch.packed(**flat, **per_sequence, cu_seqlens=torch.arange(rows + 1) * width)


OTHER_FORMS = ("opsm?level=sequence", "ctpo?level=prefix_geometric", "drpo?divergence=chi2")
"""Methods with options that make another composition of them."""


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


def launches(given: offcorr.Batch, names: list[str]) -> dict[str, launch.Launch]:
    """A launch for each distinct composition, by the names of its methods."""
    found: dict[str, tuple[list[str], launch.Launch]] = {}
    for name in names:
        loss_fn = everything_at_once() if name == EVERYTHING else registry.illustration(name).with_max_length(2048)
        resolved = loss_fn.resolve(loss_fn.statistics(given))
        batch = resolved.prepared(given)
        call = launch.prepare(resolved.plan(batch), batch, None)
        found.setdefault(repr(call.composition), ([], call))[0].append(name)
    return {", ".join(methods): call for methods, call in found.values()}


def signature(
    kernel: Any, arguments: Sequence[Any], **constants: Any
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """(types, constants, attributes), as a launch with these arguments specialises them."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types: dict[str, Any] = {}
    held: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, [*arguments, *constants.values()], strict=True)):
        types[name] = _type(value, (place,), name in constants, held, attributes)
        if name == "width" and value % 16 == 0:
            attributes[(place,)] = DIVISIBLE_BY_16
    return types, held, attributes


def _type(value: Any, path: tuple[int, ...], constant: bool, held: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    if value is None or constant:
        held[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = DIVISIBLE_BY_16
        return "*" + _TYPES[value.dtype]
    if isinstance(value, tuple):
        inner = [_type(item, (*path, k), False, held, attributes) for k, item in enumerate(value)]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return "fp32" if isinstance(value, float) else "i32"


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
        calls = launches(given, wanted)
        for number, (methods, call) in enumerate(calls.items(), 1):
            print(f"{layout}: {number} of {len(calls)}, {methods}", file=sys.stderr)
            arguments = call.arguments(call.buffers())
            for kernel, target in itertools.product(call.functions, targets):
                specialised = signature(kernel, arguments, PLAN=call.composition, BLOCK=call.block)
                found = resources(target, kernel, *specialised, call.options)
                step = "" if kernel is call.functions[-1] else ", summary"
                rows.append({"methods": methods, "layout": layout + step, "target": target, **found})
    for target, divides in itertools.product(targets, (False, True)):
        given = [torch.empty(1), torch.empty(1), torch.empty(1), None, 2048, 1, 2048]
        specialised = signature(divide_by_kept, given, SIZE=entry_size(2), DIVIDES=divides, BLOCK=launch.BLOCK)
        found = resources(target, divide_by_kept, *specialised, {"num_warps": launch.WARPS})
        layout = "by Z and each row's count" if divides else "by Z"
        rows.append({"methods": "(count_rejected=False: dividing)", "layout": layout, "target": target, **found})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    every = [*(method.name for method in registry.catalogue()), *OTHER_FORMS]
    parser.add_argument("--methods", nargs="+", type=flags.method, default=every)
    options = parser.parse_args()
    rows = measure(options.targets, options.methods)
    head = (
        "Registers a thread / bytes spilled / bytes of shared memory; float32 unless said.\n"
        f"Block {launch.BLOCK}, {launch.WARPS} warps, on NVIDIA GPUs at most {launch.REGISTERS} registers for up to "
        f"{launch.CROWDED} stages without turns, running spans or split rows, triton {triton.__version__}.  "
        "Compiled ahead of time by `python benchmarks/aot.py`; nothing has run."
    )
    report(rows, head, ("methods", "layout"), options.output, block=launch.BLOCK, warps=launch.WARPS)


if __name__ == "__main__":
    main()
