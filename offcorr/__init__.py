"""offcorr: off-policy correction for reinforcement learning of language models."""

import importlib
from typing import TYPE_CHECKING, Any

from offcorr import metrics, testing, tokens, training
from offcorr.batch import Batch
from offcorr.correction import Correction, Output, Statistics
from offcorr.kernels.dispatch import backend
from offcorr.kernels.dispatch import use as use_backend
from offcorr.kernels.logprob import LogProbs, linear_logprob, logits_logprob, out_of_support, out_of_vocabulary
from offcorr.methods.registry import available, from_config, get, register, resolve, unregister
from offcorr.metrics import Metrics
from offcorr.stages import advantages, controllers, gates, ops, ratios, rejections, spans, weights
from offcorr.training.monitor import Monitor

if TYPE_CHECKING:
    from offcorr import data as data
    from offcorr import exact as exact
    from offcorr import extras as extras
    from offcorr import integrations as integrations
    from offcorr import rollout as rollout
    from offcorr import toy as toy
    from offcorr import trl as trl

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Correction",
    "LogProbs",
    "Metrics",
    "Monitor",
    "Output",
    "Statistics",
    "advantages",
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
    "out_of_support",
    "out_of_vocabulary",
    "ratios",
    "register",
    "rejections",
    "resolve",
    "spans",
    "testing",
    "tokens",
    "training",
    "unregister",
    "use_backend",
    "weights",
]

_ON_FIRST_USE = ("data", "exact", "extras", "integrations", "rollout", "toy", "trl")
"""Subpackages that `import offcorr` leaves out: most of them need packages that the core does without."""

if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return importlib.import_module(f"offcorr.{name}")
        raise AttributeError(f"module 'offcorr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
