"""Beyond the loss: what changes the model's forward, mixes in other data, or makes the advantages.

Not imported by ``import offcorr``: ``from offcorr.model import LayerPerturbation, CHORD, distillation_advantages``.
"""

from offcorr.model.alp import LayerPerturbation
from offcorr.model.chord import CHORD, Mixed, scheduled_mu
from offcorr.model.distillation import distillation_advantages

__all__ = ["CHORD", "LayerPerturbation", "Mixed", "distillation_advantages", "scheduled_mu"]
