"""Off-policy sampling with transformers: weights of k updates ago, in a chosen precision.

>>> from offcorr.rollout import OffPolicy
>>> OffPolicy(lag=16, precision="int8")  # GRPOTrainer(..., rollout_func=...)
OffPolicy(lag=16, precision='int8', temperature=None, top_p=None, top_k=None, seed=None)

``OffPolicy`` joins ``decode`` with ``Sampling`` (tokens and their log-probs) and ``score`` (log-probs of given tokens)
to ``SnapshotRing`` (weights by version), ``Replica`` and ``Precision`` (the sampler's model) of ``offcorr.training``.
"""

from offcorr.optional import require

require("offcorr.rollout", ["transformers", "accelerate"], extra="trl")

from offcorr.rollout.decode import Decoded, Sampling, decode, score  # noqa: E402
from offcorr.rollout.off_policy import OffPolicy  # noqa: E402

__all__ = ["Decoded", "OffPolicy", "Sampling", "decode", "score"]
