"""Techniques outside the loss: perturbed layers, supervised terms, a teacher's advantages, a KL to two references.

``import offcorr`` does not import them.

>>> from offcorr.extras import CHORD, LayerPerturbation, convex_reference, distillation_advantages
"""

from offcorr.extras.alp import LayerPerturbation
from offcorr.extras.chord import CHORD, Mixed, Supervised, scheduled_mu
from offcorr.extras.convex_kl import convex_reference
from offcorr.extras.distillation import distillation_advantages

__all__ = [
    "CHORD",
    "LayerPerturbation",
    "Mixed",
    "Supervised",
    "convex_reference",
    "distillation_advantages",
    "scheduled_mu",
]
