"""offcorr: off-policy correction for reinforcement learning of language models."""

from offcorr import metrics, testing, training
from offcorr.batch import Batch
from offcorr.correction import Correction, Output, Statistics
from offcorr.kernels.dispatch import backend
from offcorr.kernels.dispatch import use as use_backend
from offcorr.kernels.logprob import LogProbs, linear_logprob, logits_logprob, out_of_vocabulary
from offcorr.methods.registry import available, from_config, get, register, resolve, unregister
from offcorr.metrics import Metrics
from offcorr.stages import controllers, gates, ops, ratios, rejections, spans, weights

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
    "controllers",
    "from_config",
    "gates",
    "get",
    "linear_logprob",
    "logits_logprob",
    "metrics",
    "ops",
    "out_of_vocabulary",
    "ratios",
    "register",
    "rejections",
    "resolve",
    "spans",
    "testing",
    "training",
    "unregister",
    "use_backend",
    "weights",
]
