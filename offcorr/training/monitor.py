"""``Monitor``: watches the mismatch between trainer and sampler over a run, names its cause, and acts."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch, check_batch
from offcorr.diagnose import Record, Report, diagnose, records_of
from offcorr.metrics import Gather, Mean, Metrics, measure
from offcorr.shapes import Mismatch
from offcorr.stages import pointwise
from offcorr.stages.checks import check_value, one_of, outside
from offcorr.training.alarms import HARD, Alarm, MismatchError, checked_actions, write_dump
from offcorr.training.cusum import Cusum
from offcorr.training.field_metrics import field_metrics
from offcorr.training.named_cause import NO_CAUSE, OF_AGE, NamedCause, named_cause
from offcorr.training.origins import WATCHED, watched, watched_rows
from offcorr.training.semantics import MENDS, TRUNCATED, Semantics, batch_semantics
from offcorr.training.series import CONDITIONS, LIMITS, Limit, Series, Severity

__all__ = ["Monitor"]

logger = logging.getLogger("offcorr")

Ids = Callable[[Batch], Mapping[str, Any]]
"""The token ids of a micro-batch, as keyword arguments of ``offcorr.diagnose.records_of``."""

SELF_TESTS = ("stop", "warn", "off")

PREFIX = "offcorr/monitor/"

SMALLEST_LOG_K3, SMALLEST_SURPRISE = 0.7, 1.0
"""Smallest standard deviations that are assumed: of log k3, a factor of 2, since learning alone changes it by as much
from one phase of a run to the next; of surprise, in its own standard errors."""

SEQUENCES = 64
"""Number of sequences that are kept for the diagnosis."""

STEPS_KEPT, SEQUENCES_OF_STEP = 8, 8
"""Number of optimizer steps of which the first micro-batch is kept, and of its sequences that are looked at: whether d
grows from step to step is seen in these."""

OVERRIDE = (
    'To train all the same, set Monitor(self_test="warn"), or "off"; in a trainer\'s configuration '
    'monitor={"self_test": "warn"}'
)


class Monitor:
    """Watches three series, engine mismatch, staleness and surprise, and raises an alarm where one leaves its range.

    The first ``warmup`` steps give mean and standard deviation of log k3 (for surprise: of the mean of -logp - entropy
    in standard errors, which each step has of its own).  From then on a CUSUM chart of each series (``Cusum``) and the
    fixed ``LIMITS`` are looked at in every step, a step being one ``end`` (a trainer's logging step).  The chart, or a
    limit, has to be exceeded in ``persistence`` steps in a row.  The cause is named by ``offcorr.diagnose.diagnose`` on
    the last batches.  One alarm is raised until the series is back in its range for ``persistence`` steps.  While it is
    on, the cause is looked at again where k3 has grown by a factor of four or 20 steps have passed, and said again if
    it is another.

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
              the lowest of ``limits`` for k3, and above e^(mean + 3 sd) of the baseline;
            - "stop": raise ``MismatchError``; the trainers save a checkpoint and end the training.

            Where the last sequences show no cause at all, nothing is masked or stopped.
        self_test: on the first batch, as ``logprob_semantics`` finds it.  "stop": raise ``MismatchError`` before the
            first update where the log-probs are not the sampler's probabilities; "warn": warn; "off": do nothing.
        warmup, drift, threshold, persistence: as in ``Cusum``.
        limits: the fixed bounds.
        folder: for "dump".
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
    32 engine warning precision
    36 engine warning stale_weights
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
        folder: str | Path = "offcorr_mismatch",
        temperature: float = 1.0,
        gather: Gather | None = None,
        name_cause: Callable[[list[Record]], Report] = diagnose,
    ) -> None:
        self.actions = {
            "warning": checked_actions("warning", warning),
            "critical": checked_actions("critical", critical),
        }
        if self_test not in SELF_TESTS:
            raise ValueError(f"self_test is {self_test!r}{one_of(self_test, SELF_TESTS)}")
        for name, count in (("warmup", warmup), ("persistence", persistence)):
            if isinstance(count, bool) or not isinstance(count, int) or count < (2 if name == "warmup" else 1):
                raise ValueError(f"{name} is {count!r}, expected a whole number >= {2 if name == 'warmup' else 1}")
        check_value("Monitor", "drift", drift, low=0.0)
        check_value("Monitor", "threshold", threshold, low=0.0)
        self.self_test = self_test
        self.persistence = persistence
        self.folder = Path(folder)
        self.temperature = temperature
        self._limits = tuple(limits)
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
        self._measured = Metrics()
        self._batches: deque[tuple[Batch, Ids, int | None]] = deque()
        self._earlier: deque[tuple[Batch, Ids, int | None]] = deque(maxlen=STEPS_KEPT)
        self.alarms = []
        self.tested = self.stopped = False

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
        if not self.tested and self.self_test != "off":
            self.test(batch_semantics(batch, temperature=self.temperature))
        if self.measures:
            seen = watched(batch.tokens.batch)
            self._measured = self._measured.merge(
                Metrics({**measure(seen).data, **field_metrics(seen, contains_rollout=False).data})
            )
        ids: dict[str, Any] = {"completion_ids": completion_ids, "prompt_ids": prompt_ids}
        self.keep(batch, lambda batch: _without_ids(batch) | {name: own for name, own in ids.items() if own}, step)

    def keep(self, batch: Batch, ids: Ids | None = None, step: int | None = None) -> None:
        """Keep a micro-batch for a diagnosis, without its graph.

        Args:
            ids: called with the batch when its records are needed.
        """
        kept = (batch.replaced(logp=batch.logp.detach()), ids or _without_ids, step)
        if step is not None and (not self._earlier or self._earlier[-1][2] != step):
            self._earlier.append(kept)
        self._batches.append(kept)
        while sum(kept.sequences for kept, *_ in self._batches) - self._batches[0][0].sequences >= SEQUENCES:
            self._batches.popleft()

    def masked(self, batch: Batch) -> Batch:
        """The batch for the loss, weight 0 on sequences whose mean k3 is above the limit while "mask" is in force."""
        keep = self._kept(batch)
        return batch if keep is None else batch.weighted(keep.to(batch.tokens.dtype))

    def masking(self, batch: Batch) -> Metrics:
        """The share of the sequences that ``masked`` gives the weight 0, as a metric; empty while none is."""
        keep = self._kept(batch)
        if keep is None:
            return Metrics()
        return Metrics({PREFIX + "masked": Mean(Mean.of(~keep, torch.ones_like(keep)))})

    @torch.no_grad()
    def _kept(self, batch: Batch) -> Tensor | None:
        """[B] bool, False for the sequences to mask; None where no mask is in force."""
        keep = None
        for name, series in self._series.items():
            if series.mask_above is None or name == "surprise":
                continue
            of: Mismatch = "engine" if name == "engine" else "staleness"
            if of == "engine" and batch.rollout_logp is None:
                continue
            pair = batch.tokens.log_ratio(of)
            k3 = torch.where(pair.compared, pointwise.nonnegative_kl(pair.raw), 0)
            own = k3.sum(1) <= series.mask_above * pair.compared.sum(1)
            keep = own if keep is None else keep & own
        rows = watched_rows(batch)
        return keep if keep is None or rows is None else keep | ~rows

    # -- the self-test -------------------------------------------------------------------------------------------

    def test(self, found: Semantics | None) -> None:
        """Judge the first batch.

        Raises:
            MismatchError: ``self_test`` is "stop", and the log-probs are not the sampler's probabilities.
        """
        self.tested = True
        if refusal := self.refusal(found):
            raise MismatchError(refusal)
        if found is not None and found.wrong and self.self_test != "off" and self.on_main:
            warnings.warn(f"in the first batch {found.sentence}: {self.mend(found)}", stacklevel=outside())

    def refusal(self, found: Semantics | None) -> str:
        """The reason not to begin the training; "" where there is none, or ``self_test`` is not "stop"."""
        if found is None or self.self_test != "stop" or not found.fatal:
            return ""
        return f"the training was not begun: in the first batch {found.sentence}: {self.mend(found)}. {OVERRIDE}"

    def mend(self, found: Semantics) -> str:
        """The change to make after the first batch, with the settings that the configuration is known to have."""
        if not self.sampling or found.kind not in TRUNCATED:
            return found.mend
        settings = ", ".join(f"{name}={value:g}" for name, value in self.sampling.items())
        return f"the configuration sets {settings}; {MENDS['kept_mass']}"

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
        conditions = [metrics.get(name, 0.0) for name in CONDITIONS]
        if self.learning_rate is not None:
            conditions[CONDITIONS.index("learning_rate")] = self.learning_rate
        judged = [(one, one.add(metrics, conditions, self.persistence)) for one in self._series.values()]
        new = [self._alarm(step, series, severity) for series, severity in judged if severity is not None]
        for series, severity in judged:
            if severity is None and series.looks_again():
                new += self._revised(step, series)
        self.alarms += new
        if self.raises and any("stop" in alarm.actions for alarm in new):
            raise MismatchError("; ".join(str(alarm) for alarm in new))
        return new

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
        records = self._records(step) if self._diagnoses(severity) else []
        named, clean = self._named(series, records, self.actions[severity])
        series.looked(step, first=not series.cause)
        series.cause, series.held_back = named.cause, clean
        evidence = (*series.evidence, *named.evidence)
        alarm = Alarm(step, series.name, severity, named.cause, named.confidence, evidence, named.advice, ())
        return self._act(replace(alarm, moved=series.moved), series, records, self.actions[severity])

    def _revised(self, step: int, series: Series) -> list[Alarm]:
        """The alarm that is on, with its cause as it looks by now, if that is another; empty otherwise."""
        assert series.active is not None
        given = self.actions[series.active]
        since = max(series.first_step - self.persistence, step - STEPS_KEPT)
        records = self._records(step, since) if self._diagnoses(series.active) else []
        named, clean = self._named(series, records, given)
        series.looked(step, first=False)
        acts = series.held_back and not clean  # on every rank alike, whatever each has found
        # Weights that drift apart have other names as they do, and first that of a lower precision.
        alike = ("precision", *OF_AGE) if series.cause in OF_AGE else (series.cause,)
        if not acts and named.cause in (*alike, *NO_CAUSE):
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
            revises=series.cause,
        )
        series.cause, series.held_back = named.cause, series.held_back and clean
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
        report = self._diagnosed(series, records)
        named = named_cause(series, report, self.sampling)
        clean = named.cause == "clean"
        if any(action in HARD for action in actions):
            device = self._batches[-1][0].logp.device if self._batches else None
            own = 1.0 if clean else 0.0 if report is None else -1.0  # a rank without records says neither
            ranks = self.gather(torch.tensor([own], device=device))
            clean = bool((ranks.min() >= 0) & (ranks.max() > 0))
        return named, clean

    def _records(self, step: int, since: int | None = None) -> list[Record]:
        """Those of the last sequences, and of some of the steps after ``since``."""
        last = {id(batch) for batch, *_ in self._batches}
        found: list[Record] = []
        for batch, ids, own in self._earlier:
            if since is not None and own is not None and own > since and id(batch) not in last:
                found += records_of(batch, **ids(batch), step=own)[:SEQUENCES_OF_STEP]
        for batch, ids, own in self._batches:
            if since is None or own is None or own > since:
                found += records_of(batch, **ids(batch), step=own or step)
        return [record for record in found if record.origin in (None, *WATCHED)]

    def _diagnosed(self, series: Series, records: list[Record]) -> Report | Exception | None:
        """The report on the records, None without any; or the error, as a diagnosis must not end a training."""
        if series.name == "staleness":  # the gap in question is that of logp
            records = [
                replace(record, old_logp=record.logp, logp=None) for record in records if record.logp is not None
            ]
        if not records:
            return None
        try:
            return self._name_cause(records)
        except Exception as error:
            return error

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Baselines and charts for a checkpoint, as plain numbers; the same on every rank."""
        return {name: series.state_dict() for name, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        for name, series in self._series.items():
            series.load_state_dict(state[name])


def _without_ids(batch: Batch) -> dict[str, Any]:
    """Stand-ins for the ids of a batch: empty prompts, and 0 up to the last valid token of each sequence."""
    mask = batch.padded().mask.bool()
    lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).tolist()
    return {"prompt_ids": [[] for _ in lengths], "completion_ids": [[0] * length for length in lengths]}
