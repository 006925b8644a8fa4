"""docs/mismatch.md: its tables are those of the committed result, and its sections are the causes of the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from offcorr.diagnose import diagnose
from offcorr.diagnose.causes import CAUSES, STAGES
from offcorr.diagnose.text import headline, text
from offcorr.lab.mismatch import make

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "mismatch.md").read_text()


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> Any:
    return script("diagnose_page")


def test_every_table_is_that_of_the_committed_result(tables):
    assert tables.filled(PAGE) == PAGE, "docs/mismatch.md is out of date: python benchmarks/diagnose_page.py"
    assert sorted(match[2] for match in tables.BLOCK.finditer(PAGE)) == sorted(tables.TABLES)


def test_every_cause_has_a_section_in_the_order_of_the_stages():
    headings = re.findall(r"^### `(\w+)`$", PAGE, flags=re.M)
    assert sorted(headings) == sorted([*CAUSES, "clean", "unknown"])
    stages = [STAGES.index(CAUSES[name].stage) for name in headings if name in CAUSES]
    assert stages == sorted(stages)
    for name, section in re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##)", PAGE, flags=re.M | re.S):
        if name in CAUSES:
            assert [
                part for part in ("- **Signature**:", "- **How it happens**:", "- **Fix**:") if part not in section
            ] == [], name


def test_the_tables_count_every_dump_once(tables):
    dumps = tables.result()["dumps"]
    held_out = [row for row in dumps if row["part"] == "held-out"]
    single, pairs = tables.dumps("held-out", "single"), tables.dumps("held-out", "pair")
    assert single and len(single) + len(pairs) == len(held_out)
    names = [name for rows in (single, pairs) for row in rows for name in row["causes"]]
    made = {"clean", *CAUSES} - {"other_quantity", "stored_rounded", "logit_bias"}
    assert {name for row in single for name in row["causes"]} == made and set(names) <= made
    verdicts = [int(times) for times in re.findall(r"`\w+` (\d+)", tables.confusion().partition("\n")[2])]
    assert sum(verdicts) == len(single)
    assert tables.count(single, 32) == sum(row["named"]["32"]["verdict"] == row["causes"][0] for row in single)


def row(*causes: str, verdict: str, informed: tuple[str, ...] = ()) -> dict[str, Any]:
    found = {"verdict": verdict, "causes": [verdict]}
    better = {"verdict": informed[0], "causes": list(informed)} if informed else found
    return {
        "part": "held-out",
        "causes": list(causes),
        "named": {str(size): found for size in (32, 16, 8)},
        "informed": {str(size): better for size in (32, 16, 8)},
        "with_checkpoint": {str(size): found for size in (32, 16, 8)},
    }


def test_targets_are_met_by_the_numbers(tables, monkeypatch):
    """2 of 3 single causes by id, 3 of 3 by family; the pair lacks one cause without a model; clean data are named."""
    rows = [
        row("clean", verdict="clean"),
        row("shift", verdict="shift"),
        row("stale_weights", verdict="adapter_not_synced"),
        row("mask", "stale_weights", verdict="mask", informed=("stale_weights", "mask")),
    ]
    monkeypatch.setattr(tables, "result", lambda: {"dumps": rows, "sizes": [32, 16, 8]})
    lines = {line.split(" | ")[0].strip("| "): line for line in tables.targets().splitlines()}
    assert "66.7%, 2 of 3" in lines["single causes, 32 sequences"] and "100.0%" in lines["single causes, 32 sequences"]
    assert lines["single causes, 32 sequences"].endswith("| 98%: as families |")
    assert "0.0%, 0 of 1" in lines["pairs, both named, 32 sequences"]
    assert lines["pairs, both named, 32 sequences"].endswith("| 85%: with `--model` |")
    assert lines["clean data, 32 sequences"].endswith("| 99%: yes |")
    said = tables.verdict()
    assert "met from the logs: clean data at 32 sequences (99%); met with `--model`: pairs" in said
    assert "met as families: single causes at 32 sequences (98%) and single causes at 8 sequences (90%)." in said
    assert "too few dumps of clean data (1 of 1)" in said


@pytest.mark.slow
def test_the_example_is_what_the_command_finds():
    """The digits may differ with the machine; the causes, their order and the words do not."""
    shown = PAGE.partition("<!-- example -->\n```text\n")[2].partition("\n```")[0]
    report = diagnose(make(["temperature", "stale_weights"], architecture="llama", seed=0).records)
    assert shown.splitlines()[0].partition(" (confidence")[0] == headline(report).partition(" (confidence")[0]

    def words(said: str) -> str:
        causes = re.split(r"About the data|d = the trainer's", said)[0]  # the first is about the file that was read
        return " ".join(re.sub(r"[-+]?\d[\d.,%e-]*", "N", causes).split())

    assert words(shown) == words(text(report))


def test_the_picture_shows_causes_that_the_page_explains():
    pictures = script("mismatch_pictures")
    assert pictures.DRAWN.keys() <= CAUSES.keys()
    assert "](mismatch.png)" in PAGE and "benchmarks/mismatch_pictures.py" in PAGE
    assert (ROOT / "docs" / "mismatch.png").stat().st_size < 300_000
