"""The lab's pages hold the tables of the committed results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages() -> Any:
    spec = importlib.util.spec_from_file_location("lab_pages", ROOT / "benchmarks" / "lab_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_that_of_the_committed_results(pages):
    used = []
    for name in pages.PAGES:
        page = (ROOT / name).read_text()
        used += [match[2] for match in pages.BLOCK.finditer(page)]
        assert page == pages.filled(page), f"{name} is out of date: python benchmarks/lab_pages.py"
    assert sorted(used) == sorted(pages.TABLES), "each table stands on one page"


def test_a_result_says_how_it_was_made(pages):
    for row in pages.sources():
        assert row["command"].startswith("`offcorr bench ") and "torch" in row["machine"]


@pytest.mark.parametrize(
    ("relative", "error", "shown"), [(1.0, 0.0, "**1.00**"), (0.96, 0.02, "**0.96**"), (0.95, 0.02, "0.95")]
)
def test_bold_is_within_two_standard_errors(pages, relative, error, shown):
    assert pages._level(relative, error) == shown


def test_a_situation_names_settings_that_were_run(pages):
    known = {setting["name"] for setting in pages.result("loop")["settings"]}
    listed = [name for settings, _ in pages.SITUATIONS.values() for name in settings]
    assert sorted(listed) == sorted(known)


def test_prose_has_no_numbers_of_runs_outside_the_tables():
    """A number in the decision page stands in a table that is generated; the settings' own numbers are few."""
    page = (ROOT / "docs" / "which.md").read_text().partition("## A baseline")[0]
    prose = re.sub(r"<!-- lab \w+ -->.*?<!-- end -->", "", page, flags=re.DOTALL)
    assert not re.findall(r"\b0?\.\d{3}\b", prose)
