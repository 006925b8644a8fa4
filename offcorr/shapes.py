"""Shapes, named once.  B sequences, T positions (padded), N tokens (packed), S sequences (packed)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    PerToken = Float[Tensor, "B T"]
    PerSequence = Float[Tensor, "B"]
    TokenMask = Bool[Tensor, "B T"]
    TokenIndex = Int[Tensor, "B T"]
    Scalar = Float[Tensor, ""]
else:
    PerToken = PerSequence = TokenMask = TokenIndex = Scalar = Any

Mismatch = Literal["staleness", "engine", "total"]
"""Which two policies a stage compares.

staleness: logp against old_logp · engine: old_logp against rollout_logp · total: logp against rollout_logp.
"""
