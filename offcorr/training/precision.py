"""The precision of a sampler's weights: a cast, or quantising and dequantising the matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offcorr.stages.checks import nearest


def quantise_int(weight: Tensor, bits: int) -> Tensor:
    """Symmetric integers, one scale per output channel.  w -> round(w / s) * s, s = max|w_row| / (2^(bits - 1) - 1)

    Takes ``weight`` [..., out, in], float; returns the nearest weights that integers of ``bits`` can hold, in the same
    shape and dtype.
    """
    largest = 2 ** (bits - 1) - 1
    scale = _absmax(weight) / largest
    return (weight / scale).round_().clamp_(-largest, largest).mul_(scale)


def quantise_fp8(weight: Tensor, storage: str) -> Tensor:
    """8-bit float, one scale per output channel (row): the row's largest |w| is the format's largest number.

    Takes ``weight`` [..., out, in], float, and a torch dtype by name, such as "float8_e4m3fn"; returns the nearest
    weights that it can hold, in the same shape and dtype.
    """
    dtype = getattr(torch, storage)
    largest = torch.finfo(dtype).max
    scale = _absmax(weight) / largest
    scaled = (weight / scale).clamp_(-largest, largest)  # a cast of 448.0001 to e4m3 would be NaN
    return scaled.to(dtype).to(weight.dtype).mul_(scale)


def _absmax(weight: Tensor) -> Tensor:
    # A row of zeros must stay a row of zeros, not become 0 / 0.
    return weight.abs().amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(weight.dtype).tiny * 1024)


@dataclass(frozen=True)
class Precision:
    """Precision of a sampler's weights.

    Every floating-point weight is cast to ``compute``, the dtype of the forward pass.  ``quantise`` then rounds the
    matrices (see ``Replica``) to the numbers that a format can hold: weight-only quantisation, where activations and KV
    cache stay in ``compute``.  ``storage`` names the torch dtype that it requires, which an old torch may lack.
    """

    name: str
    compute: torch.dtype
    quantise: Callable[[Tensor], Tensor] | None = None
    storage: str | None = None

    @staticmethod
    def named(name: str) -> Precision:
        """The precision of this name.

        Raises:
            ValueError: the name is unknown, or this torch has no such dtype.
        """
        if not isinstance(name, str) or name not in PRECISIONS:
            near = nearest(name, PRECISIONS, ",") if isinstance(name, str) else ","
            raise ValueError(f"precision is {name!r}{near} expected one of {', '.join(PRECISIONS)}")
        precision = PRECISIONS[name]
        if precision.storage is not None and not hasattr(torch, precision.storage):
            raise ValueError(
                f"precision {name!r} needs torch.{precision.storage}, which torch "
                f"{torch.__version__} does not have: upgrade torch or choose another precision"
            )
        return precision


def _fp8(name: str, storage: str) -> Precision:
    return Precision(name, torch.float32, partial(quantise_fp8, storage=storage), storage)


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16),
        Precision("int8", torch.float32, partial(quantise_int, bits=8)),
        Precision("int4", torch.float32, partial(quantise_int, bits=4)),
        _fp8("fp8_e4m3", "float8_e4m3fn"),
        _fp8("fp8_e5m2", "float8_e5m2"),
    )
}
"""Every precision, by name."""
