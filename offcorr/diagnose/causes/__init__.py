"""The causes of a mismatch, one class each, in files by the stage in which they are looked for."""

from offcorr.diagnose.causes import (
    bias,
    contexts,
    other_tokens,
    policies,
    quantities,
    sampling,
    stored,
    swapped,
    truncation,
    unlogged,
    updates,
    values,
)
from offcorr.diagnose.causes.base import CAUSES, STAGES, Cause, Finding, Found, confidence

__all__ = [
    "CAUSES",
    "STAGES",
    "Cause",
    "Finding",
    "Found",
    "bias",
    "confidence",
    "contexts",
    "other_tokens",
    "policies",
    "quantities",
    "sampling",
    "stored",
    "swapped",
    "truncation",
    "unlogged",
    "updates",
    "values",
]
