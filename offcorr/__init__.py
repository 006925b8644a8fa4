"""offcorr: off-policy correction for reinforcement learning of language models."""

from offcorr import contract, controllers, gates, metrics, ratios, rejections, weights
from offcorr.batch import Batch
from offcorr.correction import Correction, Output, Statistics
from offcorr.kernels.correction import backend
from offcorr.kernels.correction import use as use_backend
from offcorr.kernels.logprob import LogProbs, linear_logprob, logits_logprob, out_of_vocabulary
from offcorr.metrics import Metrics
from offcorr.registry import available, from_config, get, register, resolve, unregister

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Correction",
    "LogProbs",
    "Metrics",
    "Output",
    "Statistics",
    "available",
    "backend",
    "contract",
    "controllers",
    "from_config",
    "gates",
    "get",
    "linear_logprob",
    "logits_logprob",
    "metrics",
    "out_of_vocabulary",
    "ratios",
    "register",
    "rejections",
    "resolve",
    "unregister",
    "use_backend",
    "weights",
]
