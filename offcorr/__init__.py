"""offcorr: off-policy correction for reinforcement learning of language models."""

from offcorr import contract, controllers, gates, metrics, ratios, rejections, weights
from offcorr.batch import Batch
from offcorr.correction import Correction, Output, Statistics
from offcorr.metrics import Metrics
from offcorr.registry import available, from_config, get, register, resolve, unregister

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Correction",
    "Metrics",
    "Output",
    "Statistics",
    "available",
    "contract",
    "controllers",
    "from_config",
    "gates",
    "get",
    "metrics",
    "ratios",
    "register",
    "rejections",
    "resolve",
    "unregister",
    "weights",
]
