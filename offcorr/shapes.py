"""Shapes, named once.  B sequences, T positions (padded), N tokens (packed), S sequences (packed).

They are jaxtyping's where jaxtyping is installed, so that the tests can check them at run time; else ``Any``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING or find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Int
else:

    class Float:
        def __class_getitem__(cls, shape: Any) -> Any:
            return Any

    Bool = Int = Float

PerToken = Float[Tensor, "B T"]
PerSequence = Float[Tensor, "B"]
TokenMask = Bool[Tensor, "B T"]
TokenIndex = Int[Tensor, "B T"]
Scalar = Float[Tensor, ""]
IntScalar = Int[Tensor, ""]
BoolScalar = Bool[Tensor, ""]

Mismatch = Literal["staleness", "engine", "total"]
"""Which two policies a stage compares.

staleness: logp against old_logp · engine: old_logp against rollout_logp · total: logp against rollout_logp.
"""
