"""Where the kernels run: on a CPU under Triton's interpreter (TRITON_INTERPRET=1), else on the GPU that there is.

Triton reads the variable when it is imported, so these tests have a process of their own (see the Makefile).  On a GPU
they are the same: tensors and generators are made there unless they say otherwise.
"""

import pytest
import torch

from tests.kernels.cases import INTERPRETED


def pytest_configure(config):
    if not INTERPRETED and not torch.cuda.is_available():
        raise pytest.UsageError("there is no GPU: run tests/kernels with TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The device that everything is made on."""
    if INTERPRETED:
        yield torch.device("cpu")
        return
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": make(device))
    with torch.device("cuda"):
        yield torch.device("cuda")
