"""Without Triton, or with one that lacks what the kernels use, everything runs on the reference and says why."""

from __future__ import annotations

import pytest
import torch

import offcorr
from offcorr import optional, testing
from offcorr.kernels import dispatch


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("3.2.0", "the kernel needs triton 3.6 or later, but triton 3.2.0 is installed"),
        ("3.6.1", ""),
        (None, "triton is not installed"),
    ],
)
def test_a_triton_that_is_too_old_is_a_reason_and_no_error(monkeypatch, installed, reason):
    """torch 2.6 brings Triton 3.2."""
    monkeypatch.setattr(optional, "_version", lambda name: installed)
    if installed is None:
        find = optional.importlib.util.find_spec
        monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    dispatch.why_no_triton.cache_clear()
    try:
        assert dispatch.why_no_triton().startswith(reason) and bool(dispatch.why_no_triton()) == bool(reason)
        batch, loss_fn = testing.example(dtype=torch.float32), offcorr.get("ppo")
        if reason:
            assert reason in offcorr.backend(loss_fn, batch)
            dispatch._warn_once.cache_clear()
            with offcorr.use_backend("triton"), pytest.warns(RuntimeWarning, match=f"on the torch reference: {reason}"):
                loss_fn(batch)
    finally:
        dispatch.why_no_triton.cache_clear()
