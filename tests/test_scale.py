"""Tests of benchmarks/scale.py: it counts what the page says, and writes nothing unasked."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "scale.json", ROOT / "docs" / "scale.md"


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scale")


def test_the_page_has_the_tables_of_the_committed_result(scale):
    report = json.loads(RESULT.read_text())
    assert scale.on_page(PAGE.read_text(), scale.table(report)) == PAGE.read_text()
    assert not scale.wrong(report["rows"])


def test_two_ranks_exchange_what_the_formulas_say(scale, tmp_path, monkeypatch, capsys):
    before = RESULT.read_bytes(), PAGE.read_bytes()
    small = ["--ranks", "2", "--widths", "8", "16", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *small])
    monkeypatch.setattr(scale, "merging", lambda *_: [])
    scale.main()  # exits where a count is not its formula's
    assert "| statistics of m2po | 2 | 4 x positions of the rank + 8 | 1,032 | 2,056 |" in capsys.readouterr().out
    assert before == (RESULT.read_bytes(), PAGE.read_bytes())


def test_a_wrong_count_is_found(scale):
    report = json.loads(RESULT.read_text())
    row = next(row for row in report["rows"] if row["part"] == "ESS learning rate")
    row["bytes"] += 8
    (said,) = scale.wrong(report["rows"])
    assert said.startswith("ESS learning rate, ") and said.endswith("40 bytes, expected (1, 32)")


def test_a_collective_that_no_part_has_is_an_error(scale):
    import torch.distributed as dist

    with scale.counted([]), pytest.raises(AssertionError, match="no part has"):
        dist.broadcast(None)
