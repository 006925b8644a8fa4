"""Controlled off-policy sampling: weights of k updates ago, in a chosen precision.

>>> from offcorr.rollout import OffPolicy
>>> OffPolicy(lag=16, precision="int8")  # GRPOTrainer(..., rollout_func=...)
OffPolicy(lag=16, precision='int8', temperature=None, top_p=None, top_k=None, seed=None)

`OffPolicy` joins parts that also stand alone: `SnapshotRing` (weights by version), `Replica` with
`Precision` (the sampler's model), `decode` with `Sampling` (tokens and their log-probs), `score`
(log-probs of given tokens).
"""

from offcorr.training.precision import PRECISIONS, Precision
from offcorr.training.replica import Replica
from offcorr.training.snapshots import MissingVersion, SnapshotRing, changing_weights

from .decode import Decoded, Sampling, decode, score
from .off_policy import OffPolicy

__all__ = [
    "PRECISIONS",
    "Decoded",
    "MissingVersion",
    "OffPolicy",
    "Precision",
    "Replica",
    "Sampling",
    "SnapshotRing",
    "changing_weights",
    "decode",
    "score",
]
