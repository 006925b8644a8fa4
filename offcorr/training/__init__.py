"""Parts of a training loop, with torch alone: step, anchors, snapshots, schedules, the ESS rate, baselines, checks."""

from offcorr.training.alarms import Alarm, MismatchError
from offcorr.training.anchors import (
    ANCHORS,
    EWMA,
    Anchor,
    LogLinear,
    Recomputed,
    Rollout,
    Snapshots,
    Supplied,
    make_anchor,
)
from offcorr.training.baselines import OPOB, token_baseline
from offcorr.training.cusum import Cusum
from offcorr.training.ess_lr import ESSLearningRate
from offcorr.training.monitor import Monitor
from offcorr.training.origins import ORIGINS, origin_ids, origin_metrics
from offcorr.training.parallel import gather_over, gather_sequences
from offcorr.training.precision import PRECISIONS, Precision
from offcorr.training.replica import Replica
from offcorr.training.schedules import Annealed, Linear, share_done
from offcorr.training.semantics import Estimate, Semantics, logprob_semantics
from offcorr.training.series import LIMITS, Limit
from offcorr.training.snapshots import MissingVersion, SnapshotRing, changing_weights
from offcorr.training.step import Step

__all__ = [
    "ANCHORS",
    "LIMITS",
    "EWMA",
    "OPOB",
    "ORIGINS",
    "PRECISIONS",
    "Alarm",
    "Anchor",
    "Cusum",
    "Annealed",
    "ESSLearningRate",
    "Estimate",
    "Limit",
    "Linear",
    "LogLinear",
    "MismatchError",
    "MissingVersion",
    "Monitor",
    "Precision",
    "Recomputed",
    "Replica",
    "Rollout",
    "Semantics",
    "SnapshotRing",
    "Snapshots",
    "Step",
    "Supplied",
    "changing_weights",
    "gather_over",
    "gather_sequences",
    "logprob_semantics",
    "make_anchor",
    "origin_ids",
    "origin_metrics",
    "share_done",
    "token_baseline",
]
