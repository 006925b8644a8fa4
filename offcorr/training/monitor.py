"""``Monitor``: watches the mismatch between trainer and sampler over a run, names its cause, and acts."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offcorr.batch import Batch, check_batch
from offcorr.diagnose import Record, Report, diagnose
from offcorr.metrics import Gather, Mean, Metrics, measure
from offcorr.stages.checks import check_value, outside
from offcorr.training.alarms import HARD, Alarm, MismatchError, checked_actions, write_dump
from offcorr.training.arrivals import Arrivals
from offcorr.training.cusum import Cusum
from offcorr.training.field_metrics import ENGINE, STALENESS, field_metrics
from offcorr.training.first_batch import batch_semantics
from offcorr.training.last_batches import (
    STEPS_KEPT,
    Ids,
    LastBatches,
    against_old_logp,
    check_comparable,
    of_updates,
    without_ids,
)
from offcorr.training.masking import unmasked
from offcorr.training.named_cause import NamedCause, named_cause, stays, still
from offcorr.training.origins import watched
from offcorr.training.own_updates import by_updates_alone
from offcorr.training.self_test import check_self_test, refusal, warning
from offcorr.training.semantics import Semantics
from offcorr.training.series import (
    CONDITIONS,
    LAG,
    LIMITS,
    SAMPLERS_WEIGHTS,
    SURPRISE,
    Limit,
    Series,
    Severity,
    checked_limits,
)

__all__ = ["Monitor"]

logger = logging.getLogger("offcorr")

PREFIX = "offcorr/monitor/"

LAGS = 2
"""Multiple of the lag that the sampler is set to, up to which newer weights are not overdue."""

SMALLEST_LOG_K3, SMALLEST_SURPRISE = 0.7, 1.0
"""Smallest standard deviations that are assumed: of log k3, a factor of 2, since learning alone changes it by as much
from one phase of a run to the next; of surprise, in its own standard errors."""


ENDS = ", or stop the run: 'stop' among the actions of this alarm's own severity ends it"
"""The end of a warning about the action "mask"."""


class Monitor:
    """Watches three series, engine mismatch, staleness and surprise, and raises an alarm where one leaves its range.

    The first ``warmup`` steps give mean and standard deviation of log k3 (for surprise: of the mean of -logp - entropy
    in standard errors, which each step has of its own); steps under alarm or beyond a fixed limit are not among them.
    Where those of surprise are off, by .05 nats and five standard errors, 0 is its baseline.  From then on a CUSUM
    chart of each series (``Cusum``) and the fixed ``LIMITS`` are looked at in every step, a step being one ``end`` (a
    trainer's logging step).  The chart, or a limit, has to be exceeded in ``persistence`` steps in a row. The cause is
    named by ``offcorr.diagnose.diagnose`` on the last batches. One alarm is raised until the series is back in its
    range for ``persistence`` steps. While it is on, the cause is looked at again where k3 has grown by a factor of four
    or 20 steps have passed, and said again if it is another; where k3 has fallen to less than half, only if two looks
    in a row find it, with no less confidence.

    A reported lag that rises by 1 in each optimizer step for longer than newer weights took to come before
    (``Arrivals``) is an alarm, however small the gap.

    Surprise is not watched while staleness is in the gap (a mean |d| of staleness above .01 nats; where ``old_logp`` is
    not of the weights that sampled, of the engine at a lag): tokens drawn from older weights are surprising in a
    healthy run, too.

    Of a batch with ``origin`` only the sequences are looked at that were sampled for this generation ("fresh" and
    "prefix"), by the self-test as well: replayed ones and demonstrations are off-policy by intent.

    Nothing is transferred from the device but the packed metrics, once per ``end``; with ``Step(monitor=...)``, and so
    in the trainers, these are the metrics that are transferred for the log.

    Args:
        warning, critical: the actions of each severity, one or several of

            - "log": a line of the logger "offcorr"; every other action also warns;
            - "warn": a warning;
            - "dump": write the last batches' records to ``folder``, one JSON object per line;
            - "mask": until the alarm ends, give sequences the weight 0 in the loss (``masked``) whose mean k3 is above
              the lowest of ``limits`` for k3, and above e^(mean + 3 sd) of the baseline, as they are when the alarm
              begins; where that masks no sequence in ``persistence`` steps, a warning says so once;
            - "stop": raise ``MismatchError``; the trainers save a checkpoint and end the training.

            Where the last sequences show no cause at all, nothing is masked or stopped.
        self_test: on the first batch, as ``logprob_semantics`` finds it.  "stop": raise ``MismatchError`` before the
            first update where the log-probs are not the sampler's probabilities; "warn": warn; "off": do nothing.
        warmup, drift, threshold, persistence: as in ``Cusum``.
        limits: the fixed bounds.
        folder: for "dump"; None: "offcorr_mismatch".
        temperature: the trainer's, for the self-test.
        gather: as in ``Step``, where the monitor is not part of one.
        name_cause: names the cause of an alarm from the records of the last batches.

    Raises:
        ValueError: an unknown action, or a number out of range.

    A loop whose sampler stops receiving weights at step 30:

    >>> import torch, offcorr
    >>> monitor = offcorr.Monitor(warning="log", critical="log", self_test="off")
    >>> draw = torch.Generator().manual_seed(0)
    >>> for step in range(1, 41):
    ...     rollout_logp = -1 - torch.rand(8, 64, generator=draw)
    ...     noise = 0.003 if step < 30 else 0.01 * (step - 29)
    ...     logp = rollout_logp + noise * torch.randn(8, 64, generator=draw)
    ...     monitor.observe(offcorr.Batch(logp=logp, old_logp=logp, rollout_logp=rollout_logp,
    ...                                   advantages=torch.ones(8), mask=torch.ones(8, 64).bool()))
    ...     for alarm in monitor.end(step):
    ...         print(alarm.step, alarm.series, alarm.severity, alarm.cause)
    32 engine warning adapter_not_synced
    """

    def __init__(
        self,
        *,
        warning: str | Iterable[str] = "warn",
        critical: str | Iterable[str] = "warn",
        self_test: str = "stop",
        warmup: int = 20,
        drift: float = 1.0,
        threshold: float = 8.0,
        persistence: int = 3,
        limits: Iterable[Limit] = LIMITS,
        folder: str | Path | None = None,
        temperature: float = 1.0,
        gather: Gather | None = None,
        name_cause: Callable[[list[Record]], Report] = diagnose,
    ) -> None:
        self.actions = {
            "warning": checked_actions("warning", warning),
            "critical": checked_actions("critical", critical),
        }
        check_self_test(self_test)
        check_value("Monitor", "temperature", temperature, low=0.0, above=True)
        self.self_test = self_test
        self.persistence = persistence
        self.folder = Path("offcorr_mismatch" if folder is None else folder)
        self.temperature = temperature
        self._limits = checked_limits(limits)
        if folder is not None and not any("dump" in actions for actions in self.actions.values()):
            warnings.warn(
                f"folder={str(folder)!r} of the monitor does nothing without the action 'dump': name it in warning or "
                "critical",
                stacklevel=outside(),
            )
        self._chart = (warmup, drift, threshold, persistence)
        self.learning_rate: float | None = None
        """The learning rate, where the loop sets it: where it rises during the warm-up, the baselines start again."""
        self.tested: bool
        """The first batch has been tested."""
        self.on_main = True
        """False on ranks that neither warn nor write; they decide alike."""
        self.raises = True
        """False: "stop" sets ``stopped`` in place of raising."""
        self.stopped: bool
        """An alarm asked to stop."""
        self.measures = True
        """False: a ``Step`` measures the batches."""
        self.alarms: list[Alarm]
        """All alarms of the run on this process."""
        self.gather: Gather = gather or (lambda vector: vector[None])
        """As in ``Step``, which sets its own."""
        self.sampling: dict[str, float] = {}
        """Settings of the sampler that change its distribution, such as top_p, where a trainer's configuration has
        them."""
        self.dropout = 0.0
        """The largest dropout that is on where the trainer's log-probs are computed, where a trainer says it."""
        self.precision: str | None = None
        """The precision of the sampler's weights, such as "int4", where the sampler says it."""
        self.lag: int | None = None
        """The lag that the sampler is set to, in optimizer steps, where the sampler says it."""
        self.same_weights = False
        """``old_logp`` is of the weights that sampled: their age then explains no gap of the engine."""
        self.holds_lag = False
        """``old_logp`` is of later weights than those that sampled, or missing: the engine's gap then holds the lag."""
        self._name_cause = name_cause
        self.restart()

    def restart(self) -> None:
        """Begin a run: baselines, alarms and the self-test start anew."""

        def chart(smallest: float) -> Cusum:
            return Cusum(*self._chart, smallest)

        self._series = {
            "engine": Series("engine", self._limits, {"above": chart(SMALLEST_LOG_K3)}),
            "staleness": Series("staleness", self._limits, {"above": chart(SMALLEST_LOG_K3)}),
            "surprise": Series(
                "surprise", self._limits, {"above": chart(SMALLEST_SURPRISE), "below": chart(SMALLEST_SURPRISE)}
            ),
        }
        self._arrivals = Arrivals()
        self._measured = Metrics()
        self._last = LastBatches()
        self.alarms = []
        self.tested = self.stopped = self._all_masked = False
        self._none_masked = 0

    # -- batches -------------------------------------------------------------------------------------------------

    def observe(
        self,
        batch: Batch,
        *,
        step: int | None = None,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Measure a micro-batch, and keep it for a diagnosis; the first one is tested.

        Args:
            batch: ``old_logp``, if any, under the weights that sampled.
            step: the optimizer step that it belongs to.
            prompt_ids, completion_ids: one list of token ids per sequence, for the records; without them every id is
                0, and a completion ends at its last valid token.

        Raises:
            MismatchError: the first batch fails the self-test.
        """
        check_batch(batch)
        self.holds_lag = batch.old_logp is None and batch.rollout_version is not None
        if not self.tested and self.self_test != "off":
            self.test(batch_semantics(batch, temperature=self.temperature))
        if self.measures:
            seen = watched(batch.tokens.batch)
            self._measured = self._measured.merge(
                Metrics({**measure(seen).data, **field_metrics(seen, contains_rollout=False).data})
            )
        ids: dict[str, Any] = {"completion_ids": completion_ids, "prompt_ids": prompt_ids}
        self.keep(batch, lambda batch: without_ids(batch) | {name: own for name, own in ids.items() if own}, step)

    def keep(self, batch: Batch, ids: Ids | None = None, step: int | None = None) -> None:
        """Keep a micro-batch for a diagnosis, without its graph.

        Args:
            ids: called with the batch when its records are needed.
        """
        self._last.keep(batch, ids or without_ids, step)

    def masked(self, batch: Batch) -> Batch:
        """The batch for the loss, weight 0 on sequences whose mean k3 is above the limit while "mask" is in force."""
        keep = unmasked(self._series.values(), batch)
        return batch if keep is None else batch.weighted(keep.to(batch.tokens.dtype))

    def masking(self, batch: Batch) -> Metrics:
        """The share of the sequences that ``masked`` gives the weight 0, as a metric; empty while none is."""
        keep = unmasked(self._series.values(), batch)
        if keep is None:
            return Metrics()
        return Metrics({PREFIX + "masked": Mean(Mean.of(~keep, torch.ones_like(keep)))})

    def say_masked(self, metrics: Mapping[str, float]) -> None:
        """Warn where every sequence since the last log was masked, once until that ends; and where the mask of an alarm
        masked none in ``persistence`` steps out of the range, once.
        """
        all_masked = metrics.get(PREFIX + "masked") == 1.0
        if all_masked and not self._all_masked and self.on_main:
            warnings.warn(
                "the monitor masks every sequence, as its action 'mask' asks: while it does, the loss and its gradient "
                "are 0, and the run goes on without learning; only the optimizer's momentum and "
                f"weight decay move the weights. Mend the cause that its alarm names{ENDS}",
                stacklevel=outside(),
            )
        self._all_masked = all_masked
        self._say_none_masked(metrics.get(PREFIX + "masked"))

    def _say_none_masked(self, share: float | None) -> None:
        masking = [one for one in self._series.values() if one.maskable and one.mask_above is not None]
        if not masking:
            self._none_masked = 0
        if share is None or self._none_masked >= self.persistence or all(one.calm for one in masking):
            return
        self._none_masked = self._none_masked + 1 if share == 0 else 0
        if self._none_masked == self.persistence and self.on_main:
            limits = " or ".join(f"{one.mask_above:.2g} ({one.name})" for one in masking)
            warnings.warn(
                f"the monitor's action 'mask' masked no sequence in {self.persistence} steps under alarm, and all are "
                f"trained on: the mean k3 of none is above {limits}. Mend the cause that its alarm "
                f"names{ENDS}",
                stacklevel=outside(),
            )

    # -- the self-test -------------------------------------------------------------------------------------------

    def test(self, found: Semantics | None) -> None:
        """Judge the first batch.

        Raises:
            MismatchError: ``self_test`` is "stop", and the log-probs are not the sampler's probabilities.
        """
        self.tested = True
        if reason := self.refusal(found):
            raise MismatchError(reason)
        if found is not None and found.wrong and self.self_test != "off" and self.on_main:
            warnings.warn(self.warning(found), stacklevel=outside())

    def refusal(self, found: Semantics | None) -> str:
        """The reason not to begin the training; "" where there is none, or ``self_test`` is not "stop"."""
        return refusal(found, self.sampling, self.dropout) if self.self_test == "stop" else ""

    def warning(self, found: Semantics) -> str:
        """The finding in words, and the change to make, with the settings that the configuration is known to have."""
        return warning(found, self.sampling, self.dropout)

    # -- steps ---------------------------------------------------------------------------------------------------

    def end(self, step: int, metrics: Mapping[str, float] | None = None) -> list[Alarm]:
        """End an optimizer step, or several; returns its alarms, after their actions.

        Args:
            step: number of optimizer steps so far.
            metrics: as ``Step`` computes them; None: those of the batches observed since the last call, by one
                transfer to the host.  Every rank must call it then.

        Raises:
            MismatchError: an alarm with the action "stop".
        """
        if metrics is None:
            measured, self._measured = self._measured, Metrics()
            metrics = measured.all_reduce(self.gather).compute()
        if self.holds_lag and metrics.get(LAG) and metrics.get(ENGINE + "abs_mean", math.inf) > SAMPLERS_WEIGHTS:
            metrics = {name: value for name, value in metrics.items() if name != SURPRISE}
        conditions = [metrics.get(name, 0.0) for name in CONDITIONS]
        if self.learning_rate is not None:
            conditions[CONDITIONS.index("learning_rate")] = self.learning_rate
        overdue = {self._of_age(metrics): self._arrivals.add(metrics.get(LAG), step, LAGS * (self.lag or 0))}
        judged = [
            (one, one.add(metrics, conditions, self.persistence, step, overdue.get(name, "")))
            for name, one in self._series.items()
        ]
        new = [self._alarm(step, series, severity) for series, severity in judged if severity is not None]
        for series, severity in judged:
            if severity is None and series.looks_again():
                new += self._revised(step, series)
        self.alarms += new
        if self.raises and any("stop" in alarm.actions for alarm in new):
            raise MismatchError("; ".join(str(alarm) for alarm in new))
        return new

    def _of_age(self, metrics: Mapping[str, float]) -> str:
        """The series that holds the age of the sampler's weights: staleness, or where it is not measured the engine."""
        return "staleness" if STALENESS + "k3" in metrics else "engine"

    def numbers(self) -> dict[str, float]:
        """The numbers to log: for every series under alarm how far it is out of its range (``Series.excess``), and the
        number of alarms so far.
        """
        found = {f"{PREFIX}{series.name}": series.excess for series in self._series.values() if series.active}
        if found:
            found[PREFIX + "alarms"] = float(sum(series.alarms for series in self._series.values()))
        return found

    def _alarm(self, step: int, series: Series, severity: Severity) -> Alarm:
        """A new alarm, or one that has become critical, after its actions."""
        records = self._last.records(step) if self._diagnoses(severity) else []
        named, clean = self._named(series, records, self.actions[severity])
        series.looked(step, first=not series.cause)
        series.named(named.cause, named.confidence)
        series.held_back = clean
        evidence = (*series.evidence, *named.evidence)
        alarm = Alarm(step, series.name, severity, named.cause, named.confidence, evidence, named.advice, ())
        alarm = replace(alarm, moved=series.moved, overdue=bool(series.overdue))
        return self._act(alarm, series, records, self.actions[severity])

    def _revised(self, step: int, series: Series) -> list[Alarm]:
        """The alarm that is on, with its cause as it looks by now, if that is another; empty otherwise."""
        assert series.active is not None
        given = self.actions[series.active]
        since = max(series.first_step - self.persistence, step - STEPS_KEPT)
        records = self._last.records(step, since) if self._diagnoses(series.active) else []
        named, clean = self._named(series, records, given)
        series.looked(step, first=False)
        acts = series.held_back and not clean  # on every rank alike, whatever each has found
        if not acts and stays(series, named):
            return []
        grown = f"k3 {series.size:.2g}, {series.growth:.3g} times that" if series.size else "the same series"
        alarm = Alarm(
            step,
            series.name,
            series.active,
            named.cause,
            named.confidence,
            (f"{grown} at the alarm of step {series.first_step}", *named.evidence),
            named.advice,
            (),
            moved=series.moved,
            overdue=bool(series.overdue),
            revises=series.cause,
        )
        series.named(named.cause, named.confidence)
        series.held_back = series.held_back and clean
        # What changes the training is in force since the alarm, unless that was held back.
        actions = given if acts else tuple(action for action in given if action not in HARD) or ("warn",)
        return [self._act(alarm, series, records, actions)]

    def _act(self, alarm: Alarm, series: Series, records: list[Record], actions: tuple[str, ...]) -> Alarm:
        """Take the actions, less those that are held back; returns the alarm with what was done, and says it."""
        if series.held_back:
            actions = tuple(action for action in actions if action not in HARD) or ("warn",)
        dump = None
        if "dump" in actions and self.on_main:
            dump = write_dump(records, self.folder / f"step_{alarm.step:06d}_{series.name}.jsonl")
        if "mask" in actions:
            series.mask()
        self.stopped |= "stop" in actions
        alarm = replace(alarm, actions=actions, dump=dump)
        if self.on_main:
            if set(actions) == {"log"}:
                logger.warning("offcorr: %s", alarm)
            else:
                warnings.warn(str(alarm), stacklevel=outside())
        return alarm

    def _diagnoses(self, severity: Severity) -> bool:
        """Whether this rank looks for the cause: the main one does, and all where what they do depends on it."""
        return self.on_main or any(action in HARD for action in self.actions[severity])

    def _named(self, series: Series, records: list[Record], actions: tuple[str, ...]) -> tuple[NamedCause, bool]:
        """The cause by this rank's records, and whether no rank finds any: asked where actions depend on it."""
        compared, by_updates = records, False
        if series.name == "staleness":
            by_updates = by_updates_alone(records, self.same_weights)
            compared, records = of_updates(records), against_old_logp(records)
        report = self._diagnosed(compared)
        named = named_cause(
            series,
            report,
            self.sampling,
            same_weights=self.same_weights,
            precision=self.precision,
            lag=self.lag,
            records=records,
            by_updates=by_updates,
        )
        named = still((series, *(one for one in self._series.values() if one.active and one is not series)), named)
        clean = named.cause == "clean"
        if any(action in HARD for action in actions):
            own = 1.0 if clean else 0.0 if report is None else -1.0  # a rank without records says neither
            ranks = self.gather(torch.tensor([own], device=self._last.device))
            clean = bool((ranks.min() >= 0) & (ranks.max() > 0))
        return named, clean

    def _diagnosed(self, records: list[Record]) -> Report | Exception | None:
        """The report on the records, None without any; or the error, as a diagnosis must not end a training."""
        if not records:
            return None
        try:
            check_comparable(records)
            return self._name_cause(records)
        except Exception as error:
            return error

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Baselines and charts for a checkpoint, as plain numbers; the same on every rank."""
        return {"arrivals": self._arrivals.state_dict()} | {
            name: series.state_dict() for name, series in self._series.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        self._arrivals.load_state_dict(state.get("arrivals", {}))  # an older checkpoint has none
        for name, series in self._series.items():
            series.load_state_dict(state[name])
