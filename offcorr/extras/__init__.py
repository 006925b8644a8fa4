"""Techniques outside the loss: perturbed layers (ALP), a supervised term (CHORD), advantages from a teacher.

``import offcorr`` does not import them.

>>> from offcorr.extras import CHORD, LayerPerturbation, distillation_advantages
"""

from offcorr.extras.alp import LayerPerturbation
from offcorr.extras.chord import CHORD, Mixed, scheduled_mu
from offcorr.extras.distillation import distillation_advantages

__all__ = ["CHORD", "LayerPerturbation", "Mixed", "distillation_advantages", "scheduled_mu"]
