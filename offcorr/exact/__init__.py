"""Bitwise agreement between the log-probs of a sampler and those of its trainer, with torch and transformers.

>>> import torch
>>> from offcorr import exact
>>> logits = torch.tensor([[[2.0, 0.0, -1.0]]])
>>> round(exact.logprob(logits, torch.tensor([[0]]), temperature=0.5).item(), 4)
-0.0206

``logprob`` is the one log-prob function of both sides, ``fp32_head`` computes a model's logits in float32,
``batch_invariant`` makes a row's result independent of the batch around it, and ``check`` measures what is left.
"""

from offcorr.exact.agreement import Agreement, check
from offcorr.exact.invariant import batch_invariant
from offcorr.exact.logprob import fp32_head, log_probs, logprob
from offcorr.exact.scoring import score

__all__ = ["Agreement", "batch_invariant", "check", "fp32_head", "log_probs", "logprob", "score"]
