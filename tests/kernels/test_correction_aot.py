"""The correction kernel compiles for real GPUs, spills nothing and fits: what the interpreter cannot tell.

Each compilation is a process of its own, since this one has TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcorr.methods.registry import catalogue

ROOT = Path(__file__).parents[2]
METHODS = {method.name for method in catalogue()}


def compiled(folder: Path, *options: str) -> dict:
    """The report of ``benchmarks/aot.py``, which exits with 1 where a kernel spills or does not fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, ROOT / "benchmarks" / "aot.py", "--output", folder / "aot", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "aot.json").read_text())


def methods_in(report: dict) -> set[str]:
    return {name for row in report["rows"] for name in row["methods"].split(", ")} & METHODS


def no_spills(report: dict) -> None:
    for row in report["rows"]:
        assert row["spills"] == 0 and row["shared"] <= report["limits"][row["target"]], row


def test_a_composition_compiles(tmp_path):
    report = compiled(tmp_path, "--methods", "dapo", "--targets", "sm_90")
    assert methods_in(report) == {"dapo"}
    no_spills(report)


TWO_OF_A_NAME = """
import importlib.util, sys
sys.path.insert(0, {benchmarks!r})
import aot, triton
from aot_common import TARGETS
from dataclasses import dataclass
from triton.compiler import ASTSource
import offcorr
from offcorr.kernels import launch

def load(number):
    path = {folder!r} + f"/of_{{number}}.py"
    with open(path, "w") as file:
        file.write(f"def rule(value):\\n    return value * 0 + 1, value < {{number}}\\n")
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rule

def own(function, base=offcorr.weights.Weight):
    @dataclass(frozen=True)
    class _Own(base):
        mismatch: str = "engine"
        span = "token"
        rule = staticmethod(function)
    return _Own()

def compiled(weight, reject=None):
    loss_fn = offcorr.Correction(offcorr.ratios.Token(), offcorr.gates.ScoreFunction(), weight, reject)
    batch = aot.batch(False, rows=2, width=32)
    call = launch.prepare(loss_fn.plan(batch), batch, None)
    (kernel,) = call.functions
    constants = dict(PLAN=call.composition, BLOCK=call.block)
    types, held, attributes = aot.signature(kernel, call.arguments(call.buffers()), **constants)
    source = ASTSource(kernel, types, constexprs=held, attrs=attributes)
    return source.hash(), triton.compile(source, target=TARGETS["sm_90"]).asm["ttir"]

first, second = load(1234.5), load(2345.5)
assert first.__qualname__ == second.__qualname__ and first.__module__ == second.__module__
(hash_a, text_a), (hash_b, text_b) = compiled(own(first)), compiled(own(second))
assert hash_a != hash_b and "1.234500e+03" in text_a and "2.345500e+03" in text_b
_, both = compiled(own(first), own(second, offcorr.rejections.Rejection))
assert "1.234500e+03" in both and "2.345500e+03" in both, "one of two functions was taken for the other"
print("told apart")
"""


def test_functions_of_one_name_are_told_apart(tmp_path):
    """In one kernel, and in the cache of compiled kernels."""
    script = tmp_path / "script.py"
    script.write_text(TWO_OF_A_NAME.format(benchmarks=str(ROOT / "benchmarks"), folder=str(tmp_path)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "told apart" in done.stdout, done.stdout + done.stderr


def test_the_committed_table_has_every_method_and_no_spill():
    report = json.loads((ROOT / "benchmarks" / "results" / "aot_correction.json").read_text())
    assert methods_in(report) == METHODS, "run python benchmarks/aot.py --output benchmarks/results/aot_correction"
    assert {row["target"] for row in report["rows"]} == {"sm_80", "sm_90", "gfx942"}
    assert {"padded", "packed", "split", "split, summary"} <= {row["layout"] for row in report["rows"]}
    no_spills(report)


@pytest.mark.slow
def test_every_composition_compiles_for_every_target(tmp_path):
    report = compiled(tmp_path)
    assert methods_in(report) == METHODS
    no_spills(report)
