"""Beyond the loss: what changes the model's forward, mixes in other data, or makes the advantages.

Not imported by ``import offcorr``: ``from offcorr.model import LayerPerturbation, CHORD, distillation_advantages``.
"""

from offcorr.extras.alp import LayerPerturbation
from offcorr.extras.chord import CHORD, Mixed, scheduled_mu
from offcorr.extras.distillation import distillation_advantages

__all__ = ["CHORD", "LayerPerturbation", "Mixed", "distillation_advantages", "scheduled_mu"]
