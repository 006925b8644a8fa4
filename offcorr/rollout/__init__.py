"""Off-policy sampling: weights of k updates ago in a chosen precision, or a running vLLM server.

>>> from offcorr.rollout import OffPolicy
>>> OffPolicy(lag=16, precision="int8")  # GRPOTrainer(..., rollout_func=...)
OffPolicy(lag=16, precision='int8', temperature=None, top_p=None, top_k=None, seed=None)

``OffPolicy`` joins ``decode`` with ``Sampling`` (tokens and their log-probs) and ``score`` (log-probs of given tokens)
to ``SnapshotRing`` (weights by version), ``Replica`` and ``Precision`` (the sampler's model) of ``offcorr.training``.
``VLLMServer`` does the same through an ``Engine``, the client of a vLLM server.
"""

from offcorr.optional import require

require("offcorr.rollout", ["transformers", "accelerate"], extra="trl")

from offcorr.rollout.decode import Decoded, Sampling, decode, score  # noqa: E402
from offcorr.rollout.engine import Engine, EngineError  # noqa: E402
from offcorr.rollout.off_policy import OffPolicy  # noqa: E402
from offcorr.rollout.served import save_for_engine  # noqa: E402
from offcorr.rollout.vllm_server import VLLMServer  # noqa: E402

__all__ = [
    "Decoded",
    "Engine",
    "EngineError",
    "OffPolicy",
    "Sampling",
    "VLLMServer",
    "decode",
    "save_for_engine",
    "score",
]
