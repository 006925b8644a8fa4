"""Comparisons of float64 results, whose errors say in words what differs and by how much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RTOL, ATOL = 1e-9, 1e-12

FLOAT32 = 1e-5
"""Relative difference below which numbers may be equal but for rounding in float32."""


def check_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Raise AssertionError where two tensors differ by more than rounding; ``what`` they are begins the message."""
    got, wanted = got.detach(), wanted.detach()
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise AssertionError(
            f"{what} has shape {tuple(got.shape)} and {got.dtype}, expected {tuple(wanted.shape)} and {wanted.dtype}"
        )
    differ = ~torch.isclose(got, wanted, rtol=RTOL, atol=ATOL)
    if not differ.any():
        return
    if not got.ndim:
        raise AssertionError(f"{what} is {float(got):.6g}, expected {float(wanted):.6g}")
    distance = torch.where(differ, (got - wanted).abs().nan_to_num(math.inf), -1)
    at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), got.shape))
    most, least = float(distance[at]), FLOAT32 * float(wanted[at].abs())
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {got.numel()} numbers differ, the most at {list(at)}: "
        f"{float(got[at]):.6g}, expected {float(wanted[at]):.6g}"
        + (f". They differ by {most:.1g}: is a part of it computed in float32?" if most < least else "")
    )


def check_equal_numbers(got: dict[str, float], wanted: dict[str, float], what: str) -> None:
    """The same of numbers by name."""
    assert got.keys() == wanted.keys(), f"{what}: {sorted(got.keys() ^ wanted.keys())} on one side only"
    for name, value in wanted.items():
        assert math.isclose(got[name], value, rel_tol=RTOL, abs_tol=ATOL), (
            f"{what}: {name} is {got[name]:.6g}, expected {value:.6g}"
        )
