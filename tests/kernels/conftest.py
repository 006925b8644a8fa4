"""The device of the kernel tests: a CPU under Triton's interpreter, or the GPU that there is (see tests/conftest.py).

On a GPU the tests are the same: tensors and generators are made there unless they say otherwise.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The device that everything is made on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield torch.device("cpu")
        return
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": make(device))
    with torch.device("cuda"):
        yield torch.device("cuda")
