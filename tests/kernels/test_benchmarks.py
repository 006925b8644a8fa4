"""Runs every section of the GPU benchmarks on tiny shapes, under the interpreter.

The times mean nothing here; the tests make sure that a benchmark does not fail when a GPU is available for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def smoke(script: str, folder: Path, *options: str) -> dict:
    output = folder / "report.json"
    command = [sys.executable, ROOT / "benchmarks" / script, "--smoke", "--output", output, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())


def all_done(report: dict) -> None:
    assert report["sections"] and {one["status"] for one in report["sections"].values()} == {"done"}, report["sections"]
    assert not report["wrong"] and all(row["ok"] for row in report["checks"])


@pytest.mark.slow
def test_the_correction_benchmark(tmp_path):
    report = smoke("gpu.py", tmp_path, "--budget", "600")
    all_done(report)
    assert {row["method"] for row in report["checks"]} == {"dapo", "gspo", "minpro"}
    for series in ("usual", "large"):
        assert all(row["kernel_wall"] > 0 and row["eager_wall"] > 0 for row in report[series]), series
        assert len({row["method"] for row in report[series]}) == 3
    assert all(row["compile_wall"] > 0 for row in report["compiled"]) and report["compiled"]
    assert all(row["kernel_replay"] > 0 for row in report["sweep"])
    assert {name for row in report["sweep"] for name in row["setting"]} == {"BLOCK", "WARPS", "PART"}
    for row in report["others"]:  # TRL is installed, Liger perhaps
        assert row["gradient_differs"] < 1e-3 if row["who"].startswith("TRL") else "wall" in row or "failed" in row, row
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"report_{name}.png" for name in ("times", "bandwidth", "losses", "settings")}


@pytest.mark.slow
def test_the_logprob_benchmark(tmp_path):
    report = smoke("gpu_logprob.py", tmp_path, "--budget", "600")
    all_done(report)
    ours = [row for row in report["cases"] if row["name"].startswith("linear_logprob")]
    assert all(row["total_ms"] > row["forward_ms"] > 0 for row in ours if row["kept"] == 1 and not row.get("frozen"))
    assert {"naive", "TRL"} <= {row["name"] for row in report["cases"] if "total_ms" in row}
    assert {row["name"]: row for row in report["accuracy"]}["linear_logprob"]["largest"] < 1e-4
    assert all(row["gradient_differs"] < 0.02 for row in report["losses"] if row["who"] == "TRL")
    assert len(report["tiles"]) == 2
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"report_{name}.png" for name in ("floors", "memory", "kept", "shapes")}


@pytest.mark.slow
def test_out_of_time_loses_nothing(tmp_path):
    report = smoke("gpu.py", tmp_path, "--budget", "0", "--methods", "dapo")
    assert {one["status"] for one in report["sections"].values()} == {"left out: no time"}
    report = smoke("gpu.py", tmp_path, "--budget", "3", "--methods", "dapo", "--sections", "checks", "usual")
    assert report["sections"]["usual"]["status"] == "left out: no time" and len(report["checks"]) == 3
