"""The names under which other frameworks log the mismatch between trainer and engine, always from raw ratios.

d = ours - theirs (nats): the trainer's log-prob of a sampled token less the engine's.  The formulas were read in each
framework's code; accumulators that the core's series do not have are added here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from offcorr.batch import Batch
from offcorr.metrics import Accumulator, Max, Mean, Metrics

ENGINE, STALENESS, FIELD = "offcorr/engine/", "offcorr/staleness/", "field/"

ALIASES: dict[str, str | Callable[[Mapping[str, float]], float]] = {
    # verl
    "rollout_corr/kl": "k1",
    "rollout_corr/k3_kl": "k3",
    "rollout_corr/chi2_token": "chi2_token",
    "rollout_corr/chi2_seq": "chi2_seq",
    "rollout_corr/ppl_ratio": "ppl_ratio",
    "rollout_corr/log_ppl_diff": "log_ppl_diff",
    "rollout_corr/rollout_is_mean": "ratio_mean",
    "rollout_corr/rollout_is_std": lambda v: math.sqrt(max(v["chi2_token"] + 1 - v["ratio_mean"] ** 2, 0.0)),
    "rollout_corr/rollout_is_min": lambda v: 1 / v["inverse_max"],
    "rollout_corr/rollout_is_max": "ratio_max",
    "rollout_corr/rollout_is_eff_sample_size": "ess_token",
    # slime
    "train_rollout_logprob_abs_diff": "abs_mean",
    # prime-rl
    "mismatch_kl": "k3",
    # NeMo-RL
    "token_mult_prob_error": "mult_error",
    "gen_kl_error": "k3",
    # Tinker
    "kl_sample_train_v1": "k1",
    "kl_sample_train_v2": "k2",
    # TRL, which logs these with vLLM only, and the ratio after truncation
    "sampling/sampling_logp_difference/mean": "abs_mean",
    "sampling/sampling_logp_difference/max": "abs_max",
    "sampling/importance_sampling_ratio/min": lambda v: 1 / v["inverse_max"],
    "sampling/importance_sampling_ratio/mean": "ratio_mean",
    "sampling/importance_sampling_ratio/max": "ratio_max",
}
"""Each framework's name, and the short name of the same metric here or a function of these metrics."""


@torch.no_grad()
def field_metrics(batch: Batch, *, contains_rollout: bool) -> Metrics:
    """Entropy, lag, and the accumulators that ``ALIASES`` needs beside the core's, of a padded batch.

    Args:
        contains_rollout: ``old_logp`` comes from the engine, so d is taken from ``logp`` instead.
    """
    mask = batch.mask.bool()
    data: dict[str, Accumulator] = {}
    if batch.entropy is not None:
        data["entropy"] = Mean(Mean.of(batch.entropy, mask))  # nats
    if batch.rollout_version is not None and batch.trainer_version is not None:
        lag = (batch.trainer_version - batch.rollout_version).double()  # optimizer steps
        data[STALENESS + "lag"] = Mean(Mean.of(lag, mask))
        data[STALENESS + "lag_max"] = Max(Max.of(lag, mask))
    if batch.rollout_logp is not None:
        ours = batch.logp if contains_rollout or batch.old_logp is None else batch.old_logp
        d = ours.double() - batch.rollout_logp
        seen = mask & d.isfinite()
        d = torch.where(seen, d, 0).clamp(-700, 700)
        count = seen.sum(1)
        data |= {
            FIELD + "k2": Mean(Mean.of(d.square() / 2, seen)),
            FIELD + "mult_error": Mean(Mean.of(d.abs().exp(), seen)),
            FIELD + "log_ppl_diff": Mean(Mean.of(-d.sum(1) / count.clamp(min=1), count > 0)),
            FIELD + "ratio_max": Max(Max.of(d.exp(), seen)),
            FIELD + "inverse_max": Max(Max.of((-d).exp(), seen)),
        }
    return Metrics(data)


def with_aliases(computed: Mapping[str, float]) -> dict[str, float]:
    """This library's names, and the other frameworks' names for the mismatch between trainer and engine, if any."""
    logged = {name: value for name, value in computed.items() if not name.startswith(FIELD)}
    if FIELD + "k2" not in computed:
        return logged
    gap = ENGINE if ENGINE + "k1" in computed else STALENESS
    short = {
        name.removeprefix(prefix): value
        for prefix in (gap, FIELD)
        for name, value in computed.items()
        if name.startswith(prefix)
    }
    for alias, source in ALIASES.items():
        logged[alias] = short[source] if isinstance(source, str) else source(short)
    return logged
