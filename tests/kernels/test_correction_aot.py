"""The composed kernels compile for real GPUs, spill nothing and fit: what the interpreter cannot tell.

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
