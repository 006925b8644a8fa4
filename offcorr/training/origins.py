"""Where sequences came from: their names, the metrics of each origin, and the part of a batch that is monitored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from offcorr.batch import ORIGINS, Batch, check_batch
from offcorr.metrics import MISMATCH, Accumulator, LogSumExp, Mean, Metrics, Share, measure
from offcorr.shapes import PerToken
from offcorr.stages.checks import one_of
from offcorr.training.field_metrics import ENGINE, FIELD, SKIPPED, STALENESS, aged, field_metrics

__all__ = ["ORIGINS", "origin_ids", "origin_metrics"]

PREFIX = "offcorr/origin/"

WATCHED = ("fresh", "prefix")
"""The origins that a monitor looks at: sampled for this generation.  Old and foreign data is off-policy by intent."""

WATCHED_PREFIX = FIELD + "watched/"
"""Prefix of the series that the monitor reads in place of those of the whole batch; never logged."""

LAG = STALENESS + "lag"

OUTPUTS = {metric.name: metric.outputs for metric in MISMATCH}


def origin_ids(names: Iterable[str]) -> list[int]:
    """The indices of names of ``ORIGINS``.

    Raises:
        ValueError: an unknown name.

    >>> origin_ids(["fresh", "demonstration"])
    [0, 2]
    """
    names = list(names)
    for name in names:
        if name not in ORIGINS:
            raise ValueError(f"origin is {name!r}{one_of(name, ORIGINS)}")
    return [ORIGINS.index(name) for name in names]


@torch.no_grad()
def origin_metrics(batch: Batch, coefficient: Tensor | None = None, *, engine: bool = True) -> Metrics:
    """The metrics of each origin, ``offcorr/origin/NAME/...``; empty where the batch has no ``origin``.

    share (of the sequences), reward, lag, abs_mean, ess_token and ess_seq (of staleness), engine_abs_mean, and kept:
    the share of the tokens with an advantage whose ``coefficient`` is not 0.  Every rank has the same ones, whatever
    it holds; an origin without a sequence is left out when they are computed, and so is the effective sample size of
    one token or one sequence.  A demonstration has no lag, because no weights of this run wrote it.  No host
    synchronisation for padded batches.

    Args:
        coefficient: dL/dlogp, as ``Output.coefficient``; None: without "kept".
        engine: False: without the series of the engine, where ``old_logp`` contains its log-probs.

    >>> logp = torch.zeros(4, 3)
    >>> batch = Batch(logp=logp, old_logp=logp - 0.1, advantages=torch.ones(4), mask=torch.ones(4, 3).bool(),
    ...               origin=torch.tensor(origin_ids(["fresh", "fresh", "fresh", "replay"])))
    >>> {name: round(value, 2) for name, value in origin_metrics(batch).compute().items() if "replay" in name}
    {'offcorr/origin/replay/share': 0.25, 'offcorr/origin/replay/abs_mean': 0.1, ...}
    """
    check_batch(batch)
    if batch.origin is None:
        return Metrics()
    if coefficient is not None:
        coefficient = batch.replaced(logp=coefficient).padded().logp
    return Metrics(
        {
            f"{PREFIX}{name}/{metric}": value
            for index, name in enumerate(ORIGINS)
            for metric, value in _of_rows(batch, batch.origin == index, coefficient, engine)
        }
    )


def origin_lag(batch: Batch, lag: Tensor) -> Metrics:
    """The lag of each origin of a padded batch without versions; empty where the batch has no ``origin``.

    Args:
        lag: [B, T] optimizer steps.
    """
    if batch.origin is None:
        return Metrics()
    seen = aged(batch)
    rows = {name: seen & (batch.origin == index)[:, None] for index, name in enumerate(ORIGINS)}
    lags = {f"{PREFIX}{name}/lag": Mean(Mean.of(lag, own)) for name, own in rows.items()}
    return Metrics({**lags, WATCHED_PREFIX + LAG: Mean(Mean.of(lag, watched(batch).mask.bool()))})


def _of_rows(
    batch: Batch, rows: Tensor, coefficient: PerToken | None, engine: bool
) -> Iterator[tuple[str, Accumulator]]:
    tokens = batch.tokens
    padded = tokens.batch
    own = rows[:, None]
    yield "share", Share(Mean.of(rows, torch.ones_like(rows)))
    if padded.rewards is not None:
        yield "reward", Mean(Mean.of(padded.rewards, rows & padded.rewards.isfinite()))
    if padded.rollout_version is not None and padded.trainer_version is not None:
        lag = (padded.trainer_version - padded.rollout_version).double()  # optimizer steps
        yield "lag", Mean(Mean.of(lag, aged(padded) & own))
    if padded.old_logp is not None:
        pair = tokens.log_ratio("staleness")
        seen = pair.compared & own
        of_row = torch.where(seen, pair.raw, 0).sum(1, dtype=torch.float64)
        yield "abs_mean", Mean(Mean.of(pair.raw.abs(), seen))
        yield "token", LogSumExp(LogSumExp.of(pair.raw, seen), OUTPUTS["token"])
        yield "seq", LogSumExp(LogSumExp.of(of_row, seen.any(1)), OUTPUTS["seq"])
    if engine and padded.rollout_logp is not None:
        pair = tokens.log_ratio("engine")
        yield "engine_abs_mean", Mean(Mean.of(pair.raw.abs(), pair.compared & own))
    if coefficient is not None:
        yield "kept", Mean(Mean.of(coefficient != 0, (tokens.advantages != 0) & own))


# -- what is monitored -------------------------------------------------------------------------------------------


def watched_rows(batch: Batch) -> Tensor | None:
    """[B] bool, the sequences that a monitor looks at; None: all of them."""
    if batch.origin is None:
        return None
    found = torch.zeros_like(batch.origin, dtype=torch.bool)
    for index in origin_ids(WATCHED):
        found |= batch.origin == index
    return found


def watched(padded: Batch) -> Batch:
    """A padded batch whose mask leaves out what a monitor does not look at."""
    rows = watched_rows(padded)
    return padded if rows is None else padded.replaced(mask=padded.mask.bool() & rows[:, None])


@torch.no_grad()
def watched_metrics(padded: Batch, measured: Batch, *, contains_rollout: bool) -> Metrics:
    """The series of the watched sequences, for the monitor alone; arguments as in ``field_metrics``.

    Args:
        measured: the batch with the ``old_logp`` that staleness is measured against.
    """
    field = field_metrics(watched(padded), contains_rollout=contains_rollout)
    found = {**measure(watched(measured)).data, **field.data}
    kept = {name: value for name, value in found.items() if not (contains_rollout and name.startswith(ENGINE))}
    return Metrics({WATCHED_PREFIX + name: value for name, value in kept.items()})


def watched_numbers(computed: Mapping[str, float]) -> dict[str, float]:
    """The numbers for the monitor, of those that were computed: the watched ones where origins are known."""
    if not any(name.startswith(PREFIX) for name in computed):
        return dict(computed)
    return {
        name.removeprefix(WATCHED_PREFIX): value
        for name, value in computed.items()
        if name.startswith(WATCHED_PREFIX) or name == SKIPPED
    }
