"""A vLLM in an environment of its own: ``OFFCORR_VLLM_PYTHON`` is that environment's Python (make test-engine)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("OFFCORR_VLLM_PYTHON")
ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="OFFCORR_VLLM_PYTHON names no Python with vLLM: `make test-engine` sets it")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if not PYTHON:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return Path(PYTHON)


@pytest.fixture(scope="session")
def start_server(vllm_python):
    """``recipes/demo_vllm.py``'s own way to start a server."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from demo_vllm import server

    def start(model, log, *arguments, port=None):
        return server(vllm_python, model, log, "--max-model-len", "128", *arguments, port=port)

    return start
