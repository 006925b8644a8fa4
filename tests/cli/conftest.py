"""What the tests of the commands share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offcorr import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a process of its own."""

    def process(*words: str, **options) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("COLUMNS", None)
        command = [sys.executable, "-m", "offcorr", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=570, **options)

    return process


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """What the command says where it cannot run as it was given."""

    def said(*words: str) -> str:
        assert cli.main(list(words)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return said
