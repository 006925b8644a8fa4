"""Log-probabilities under a language-model head, without all logits in memory."""

from offcorr.kernels.logprob.linear import (
    LogProbs,
    linear_logprob,
    logits_logprob,
    naive_logprob,
    out_of_support,
    out_of_vocabulary,
)

__all__ = ["LogProbs", "linear_logprob", "logits_logprob", "naive_logprob", "out_of_support", "out_of_vocabulary"]
