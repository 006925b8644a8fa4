"""The names under which other frameworks log the mismatch between trainer and engine, always from raw ratios.

d = ours - theirs (nats): the trainer's log-prob of a sampled token less the engine's.  The formulas were read in each
framework's code; accumulators that the core's series do not have are added here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offcorr.batch import ORIGINS, Batch
from offcorr.metrics import Accumulator, Max, Mean, Metrics
from offcorr.shapes import TokenMask

ENGINE, STALENESS, FIELD = "offcorr/engine/", "offcorr/staleness/", "field/"

LEFT_OUT, SKIPPED = FIELD + "left_out", "offcorr/loss/skipped"
"""Share of the sequences without a valid token, and of those that were skipped before the forward pass."""

DEMONSTRATION = ORIGINS.index("demonstration")
"""The number in ``Batch.origin`` of a sequence that another model or a person wrote."""


class Alias(NamedTuple):
    """Another framework's name.

    source: the name of a metric of the engine series here, or a function of these metrics; None: not measured.
    formula: where it is none of the metrics that this library logs.
    note: what is otherwise there.
    """

    framework: str
    source: str | Callable[[Mapping[str, float]], float | None]
    formula: str = ""
    note: str = ""


class StandardError(Accumulator):
    """Standard error of a mean of uncorrelated terms: (their squares, their smallest variances, their number)."""

    size = 3

    @staticmethod
    def of(values: Tensor, where: Tensor, start: int = 0) -> Tensor:
        """The sums over ``where``; ``values`` [2, ...] holds the squares and the smallest variances of the terms."""
        squares, least = (Mean.of(part, where, start) for part in values)
        return torch.stack([squares[..., 0], least[..., 0], squares[..., 1]], -1)

    @staticmethod
    def values(numbers: list[float]) -> tuple[float, ...] | None:
        """The square root of the larger sum, over the number of terms."""
        squares, least, n = numbers
        return (math.sqrt(max(squares, least)) / n,) if n else None


def least_variance(entropy: Tensor) -> Tensor:
    """Variance of -logp that a distribution of this entropy (nats) is taken to have at least: that of two outcomes.

    Most of the variance comes from rare tokens, which may be absent from a sample.
    """
    return torch.where(entropy < 1, entropy * (1 - entropy.clamp(min=1e-6).log()), 1)


def _std(v: Mapping[str, float]) -> float | None:
    if "ess_token" not in v:  # a single token has no spread
        return None
    # chi2_token is at least 0, so it says nothing of a mean square below 1; ess_token is mean^2 / mean square.
    return v["ratio_mean"] * math.sqrt(max(1 / v["ess_token"] - 1, 0.0))


BOUNDED_THERE = "here of raw ratios; verl bounds them by its threshold first"
BOUNDED_LATELY = "here of raw ratios; newer versions of verl bound them by its threshold first"

ALIASES = {
    "rollout_corr/kl": Alias("verl", "k1"),
    "rollout_corr/k3_kl": Alias("verl", "k3"),
    "rollout_corr/chi2_token": Alias("verl", "chi2_token"),
    "rollout_corr/chi2_seq": Alias("verl", "chi2_seq"),
    "rollout_corr/ppl_ratio": Alias("verl", "ppl_ratio"),
    "rollout_corr/log_ppl_diff": Alias("verl", "log_ppl_diff", "mean over sequences of -(mean d)"),
    "rollout_corr/rollout_is_mean": Alias("verl", "ratio_mean", note=BOUNDED_LATELY),
    "rollout_corr/rollout_is_std": Alias("verl", _std, "standard deviation of e^d (divided by n)", BOUNDED_THERE),
    "rollout_corr/rollout_is_min": Alias("verl", "ratio_min"),
    "rollout_corr/rollout_is_max": Alias("verl", "ratio_max", note=BOUNDED_LATELY),
    "rollout_corr/rollout_is_eff_sample_size": Alias("verl", "ess_token", note=BOUNDED_THERE),
    "train_rollout_logprob_abs_diff": Alias("slime", "abs_mean"),
    "mismatch_kl": Alias("prime-rl", "k3"),
    "token_mult_prob_error": Alias("NeMo-RL", "mult_error", "mean e^|d|"),
    "gen_kl_error": Alias("NeMo-RL", "k3"),
    "kl_sample_train_v1": Alias("Tinker", "k1"),
    "kl_sample_train_v2": Alias("Tinker", "k2", "mean d^2 / 2"),
    # With vLLM TRL logs these itself, and the ratio after truncation; what it logs itself stands.
    "sampling/sampling_logp_difference/mean": Alias("TRL", "abs_mean"),
    "sampling/sampling_logp_difference/max": Alias("TRL", "abs_max"),
    "sampling/importance_sampling_ratio/min": Alias("TRL", "ratio_min"),
    "sampling/importance_sampling_ratio/mean": Alias("TRL", "ratio_mean"),
    "sampling/importance_sampling_ratio/max": Alias("TRL", "ratio_max"),
}
"""The names of other frameworks, as ``log_metrics="aliases"`` logs them."""


@torch.no_grad()
def field_metrics(batch: Batch, *, contains_rollout: bool) -> Metrics:
    """Entropy, lag, and the accumulators that ``ALIASES`` and monitors need beside the core's, of a padded batch.

    Args:
        contains_rollout: ``old_logp`` comes from the engine, so d is taken from ``logp`` instead.
    """
    mask = batch.mask.bool()
    data: dict[str, Accumulator] = {}
    if batch.entropy is not None:
        data["entropy"] = Mean(Mean.of(batch.entropy, mask))  # nats
        surprise = -batch.logp.detach() - batch.entropy
        # Read by the monitor alone.  Given their contexts the terms are uncorrelated, with the mean 0.
        finite, spread = mask & surprise.isfinite(), torch.stack([surprise.square(), least_variance(batch.entropy)])
        data[FIELD + "surprise"] = Mean(Mean.of(surprise, finite))
        data[LEFT_OUT] = Mean(Mean.of(~mask.any(1), torch.ones_like(mask[:, 0])))
        data[FIELD + "surprise_error"] = StandardError(StandardError.of(spread, finite))
    if batch.rollout_version is not None and batch.trainer_version is not None:
        data |= lag_series(batch, (batch.trainer_version - batch.rollout_version).double())
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
        }
    return Metrics(data)


def aged(batch: Batch) -> TokenMask:
    """[B, T] bool, the valid tokens of a padded batch that have an age: all but those of demonstrations.

    Age counts updates since the weights of this run that sampled a token, and none of these wrote a demonstration.
    """
    mask = batch.mask.bool()
    return mask if batch.origin is None else mask & (batch.origin != DEMONSTRATION)[:, None]


def lag_series(batch: Batch, lag: Tensor) -> dict[str, Accumulator]:
    """The mean and the largest lag of the tokens of a padded batch that have an age.

    Args:
        lag: [B, T] optimizer steps.
    """
    seen = aged(batch)
    return {STALENESS + "lag": Mean(Mean.of(lag, seen)), STALENESS + "lag_max": Max(Max.of(lag, seen))}


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
    for name, alias in ALIASES.items():
        value = short.get(alias.source) if isinstance(alias.source, str) else alias.source(short)
        if value is not None:
            logged[name] = value
    return logged
