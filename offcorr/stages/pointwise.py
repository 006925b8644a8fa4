"""The pointwise semantics of a correction, written once over ``ops`` for torch and for Triton.

The stages have their own functions; these say what a correction does with their values: which tokens it can train on,
what the weight of a dropped token is, what share of a gradient the gate removed, the weight of a row, and the terms of
the metrics.  The torch reference calls them as they stand; ``kernels/rebind.py`` binds ``ops`` to
Triton.  Masks are bool, everything else is floating point.
"""

from __future__ import annotations

from typing import Any

from offcorr.stages import ops


def finite(x: Any) -> Any:
    """Neither NaN nor infinite."""
    return ops.abs(x) < float("inf")


def trainable(mask: Any, logp: Any, old_logp: Any, advantage: Any) -> Any:
    """Valid tokens whose log-probs and advantage are numbers; the others get log-ratio 0 and advantage 0."""
    return mask & finite(logp + old_logp + advantage)  # a sum is finite where all of its terms are


def dropped_to_zero(factor: Any, kept: Any) -> Any:
    """The factor of a weight or a rejection, 0 where it drops the token."""
    return ops.where(kept, factor, 0.0)


def truncated(factor: Any, value: Any, kept: Any) -> Any:
    """Kept tokens whose factor is another number than the ratio exp(value) itself."""
    return kept & (factor != ops.exp(value))


def held_back(derivative: Any, log_ratio: Any, slope: Any, advantage: Any) -> Any:
    """The share of the unclipped gradient, ratio * slope * |A|, that the gate removes; between 0 and 1."""
    unclipped = ops.exp(log_ratio) * slope * ops.abs(advantage)
    return ops.where(unclipped > 0, ops.clamp(1 - ops.abs(derivative) / unclipped, 0.0, 1.0), 0.0)


def changed(weighted_derivative: Any, advantage: Any, ratio: Any) -> Any:
    """The effect on tokens with an advantage: (|c|, damped, amplified).

    c is the factor on the advantage in the gradient, weight included; damped and amplified: by more than 1 % smaller,
    but not 0, or larger than the plain ratio.
    """
    c = ops.abs(weighted_derivative) / (ops.abs(advantage) + 1e-12)  # else 0 / 0
    return c, (c > 0) & (c < 0.99 * ratio), c > 1.01 * ratio


def row_weight(count: Any, constant: Any, divides_by_count: Any) -> Any:
    """The weight of a sequence's sum, for a sequence with ``count`` tokens; see ``Aggregation``."""
    if divides_by_count:
        return constant / ops.maximum(count, 1.0)
    return constant + 0 * count


def nonnegative_kl(d: Any) -> Any:
    """k3: e^d - 1 - d, with d limited so that the result is finite."""
    return ops.expm1_minus(ops.minimum(d, ops.LARGEST_EXPONENT))
