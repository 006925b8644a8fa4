"""The vocabulary of pointwise functions: what it says to a number in a tensor's place."""

from __future__ import annotations

import pytest
import torch

from offcorr.stages import ops


@pytest.mark.parametrize("name", ["exp", "log", "abs", "sqrt", "sigmoid", "zeros_like"])
def test_a_plain_number_is_computed_in_params(name):
    with pytest.raises(TypeError, match=rf"ops\.{name} takes a tensor, and got 2\.0; a number is computed in params"):
        getattr(ops, name)(2.0)
    x = torch.full((2,), 0.5, dtype=torch.float64)
    assert torch.equal(getattr(ops, name)(x), getattr(torch, name)(x))


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_the_number_comes_second(name):
    x = torch.tensor([0.0, 3.0])
    with pytest.raises(TypeError, match=rf"ops\.{name} takes a tensor first, and got 1\.0; put the number second"):
        getattr(ops, name)(1.0, x)
    assert getattr(ops, name)(x, 1.0).tolist() == ([0.0, 1.0] if name == "minimum" else [1.0, 3.0])
