"""Runs the kernel tests on a CPU under Triton's interpreter (TRITON_INTERPRET=1), or on a GPU.

Triton reads the variable when it is imported, so these tests have a process of their own (see the Makefile).  On a GPU
the tests are the same; tensors and generators are made there unless a device is given.
"""

import pytest
import torch

from tests.kernels.cases import INTERPRETED


def pytest_configure(config):
    if not INTERPRETED and not torch.cuda.is_available():
        raise pytest.UsageError("there is no GPU: run tests/kernels with TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The default device of tensors and generators."""
    if INTERPRETED:
        yield torch.device("cpu")
        return
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": make(device))
    with torch.device("cuda"):
        yield torch.device("cuda")
