"""A pytest plugin for TRL's own tests: this library's trainers under TRL's names, and every outcome in a file.

``run.py`` starts pytest with it; two environment variables choose what is swapped and where the outcomes go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.errors
import pytest
import torch
import trl

try:
    from trl.experimental import async_grpo
except ImportError:  # its worker needs aiohttp
    async_grpo = None

TRAINER = os.environ["OFFCORR_CONFORMANCE_TRAINER"]
"""``stock``: TRL's; ``offcorr``: this library's with TRL's losses; ``corrected``: where a test names no loss, a
correction."""

OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """Before TRL's test modules are imported, and take the names with them."""
    torch.set_num_threads(1)
    for marker in ("slow", "low_priority", "invariant"):
        config.addinivalue_line("markers", f"{marker}: TRL's")
    if OFFLINE:
        from stand_ins import load_dataset

        datasets.load_dataset = load_dataset
    if TRAINER == "stock":
        return
    import corrected

    import offcorr.trl

    trl.GRPOTrainer = offcorr.trl.GRPOTrainer
    trl.GRPOConfig = corrected.GRPOConfig if TRAINER == "corrected" else offcorr.trl.GRPOConfig
    if async_grpo is not None and corrected.async_grpo is not None:
        ours = corrected if TRAINER == "corrected" else corrected.async_grpo
        async_grpo.AsyncGRPOConfig = ours.AsyncGRPOConfig
        async_grpo.AsyncGRPOTrainer = corrected.async_grpo.AsyncGRPOTrainer


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A test that asks for a model or data set of which there is no stand-in is skipped."""
    causes = [] if call.excinfo is None else [*_causes(call.excinfo.value)]
    report = yield
    absent = (LookupError, huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.OfflineModeIsEnabled)
    for cause in causes:
        if OFFLINE and isinstance(cause, absent) and not isinstance(cause, (KeyError, IndexError)):
            report.outcome, report.longrepr = "skipped", ("", 0, f"Skipped: not on this machine: {cause}"[:300])
    return report


class Outcomes:
    """``{test: [outcome, reason]}``: the worst of a test's set-up, call and tear-down."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("tests/")[2]
        if report.when == "call" or not report.passed:
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            self.of[name] = (outcome, _reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported
            last = str(report.longrepr).strip().splitlines()[-1]
            self.of[report.nodeid.partition("tests/")[2]] = ("error", last.removeprefix("E").strip()[:300])

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["OFFCORR_CONFORMANCE_OUTCOMES"]).write_text(json.dumps(self.of))


def _reason(report: pytest.TestReport) -> str:
    if report.skipped:
        return getattr(report, "wasxfail", "") or str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(getattr(crash, "message", report.longrepr)).splitlines()[0][:300]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Outcomes())
