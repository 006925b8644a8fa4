"""Mismatch between trainer and sampler with a known cause, made for real with small models.

    from offcorr.lab.mismatch import CAUSES, generate

    records = generate(["top_p"], architecture="llama", seed=3)

Tokens are drawn from the sampler's own distribution by its own decode loop; the trainer's numbers come from forward
passes of the trainer.  `python -m offcorr.lab.mismatch` writes such records to files.
"""

from offcorr.lab.mismatch.generate import (
    Dump,
    apart,
    check,
    generate,
    logged,
    make,
    other_model,
    pairs,
    prepare,
    trainer_model,
)
from offcorr.lab.mismatch.models import ARCHITECTURES, VARIANTS, Recipe
from offcorr.lab.mismatch.setup import CAUSES, STRENGTHS, Cause, Log, Setup, cause

__all__ = [
    "ARCHITECTURES",
    "CAUSES",
    "STRENGTHS",
    "VARIANTS",
    "Cause",
    "Dump",
    "Log",
    "Recipe",
    "Setup",
    "apart",
    "cause",
    "check",
    "generate",
    "logged",
    "make",
    "other_model",
    "pairs",
    "prepare",
    "trainer_model",
]
