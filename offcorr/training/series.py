"""A series that a ``Monitor`` watches: what is charted of it, the limits of its metrics, its state of alarm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from offcorr.training.cusum import RISES, Cusum
from offcorr.training.field_metrics import ENGINE, FIELD, LEFT_OUT, SKIPPED, STALENESS

__all__ = ["LIMITS", "Limit"]

Severity = Literal["warning", "critical"]

SURPRISE, SURPRISE_ERROR = FIELD + "surprise", FIELD + "surprise_error"

SMALLEST_K3 = 1e-7
"""k3 below which a mismatch counts as none: a mean |d| of about 4e-4 nats."""

LARGEST_K3 = 1e300
"""k3 in place of infinity and NaN."""

SMALLEST_ERROR = 0.02
"""Smallest standard error of the mean of -logp - entropy that is assumed, in nats."""

SAMPLERS_WEIGHTS = 0.01
"""Mean |d| of staleness (nats) up to which ``logp`` stands for the log-probs of the weights that sampled."""

SURPRISED, SURPRISED_ERRORS = 0.05, 5.0
"""Mean of -logp - entropy (nats) over the steps of the warm-up, beyond the engine's own mean |d|, which may make as
much, and its distance from 0 in standard errors, from which these steps are no baseline."""

LAG, LAG_MAX = STALENESS + "lag", STALENESS + "lag_max"

CONDITIONS = (LAG, "learning_rate")
"""Numbers with which a mismatch grows in a healthy run: where one rises during the warm-up, it starts again."""

LONG = 8
"""Number of steps from which a k3 that has only grown says that updates never reached the sampler: a constant lag
levels off."""

SEVERAL = 3
"""Number of steps without a gap from which updates have reached the sampler: a first step, and one more where the
learning rate begins at 0, have none in any case."""

BEGINS = 1e-5
"""k3 (a mean |d| of about .004 nats) of a gap that begins in the warm-up, after steps without any."""

UNSYNCED, BEHIND = 0.03, 16
"""k3 from which a sampler that looks as if it was never updated is an alarm of its own, the critical limit of the
engine's k3; and the number of steps in a row that k3 is above it, after none at the first step and at a reported lag of
0, from which it is one even where a noisy k3 has not grown from step to step."""

GAP_BEGINS = 16.0
"""Factor of k3 (4 in |d|) by which a gap is another than before."""

WITHOUT_AGE = 0.1
"""k3 of samples that are reported to be of the weights of now, over that of the last step, from which their age does
not explain it."""

GROWN, STEPS = 4.0, 20
"""While an alarm is on, its cause is looked at again where k3 is ``GROWN`` times that at the last look, or after
``STEPS`` steps."""

WEAKER = 0.5
"""k3 over that at which a cause was named, below which a look at the gap is at a weaker one."""

LARGEST_EXCESS = 1000.0
"""Largest ``excess``, in place of infinity and NaN."""


class Limit(NamedTuple):
    """A bound that a metric of a series must not cross, whatever its baseline.

    low, high: the metric is in order from ``low`` to ``high``.
    said: the metric in words.
    """

    series: str
    metric: str
    low: float
    high: float
    severity: Severity
    said: str

    def excess(self, number: float) -> float:
        """The factor by which the bound is exceeded; above 1 where it is crossed."""
        if math.isnan(number) or number <= 0:
            return LARGEST_EXCESS
        return min(max(number / self.high, self.low / number), LARGEST_EXCESS)


LIMITS = (
    Limit("engine", FIELD + "mult_error", 0.0, 1.05, "warning", "mean e^|d|"),
    Limit("engine", ENGINE + "k3", 0.0, 0.015, "warning", "k3"),
    Limit("engine", ENGINE + "k3", 0.0, 0.03, "critical", "k3"),
    Limit("engine", ENGINE + "ess_token", 0.3, math.inf, "critical", "the effective sample size of the tokens"),
    Limit("engine", ENGINE + "ratio_mean", 0.5, 2.0, "critical", "the mean ratio"),
    Limit("staleness", STALENESS + "ess_token", 0.3, math.inf, "critical", "the effective sample size of the tokens"),
    Limit("staleness", STALENESS + "ratio_mean", 0.5, 2.0, "critical", "the mean ratio"),
)
"""The bounds that other projects use: NeMo-RL (mean e^|d|), merge bars on the KL divergence, verl (the rest)."""


def checked_limits(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The limits, or an error that names the bound that is no number or the wrong way round."""
    limits = tuple(limits)
    for i, limit in enumerate(limits):
        if not isinstance(limit, Limit):
            raise ValueError(f"limits[{i}] is {limit!r}, expected a Limit")
        for name in ("low", "high"):  # which may be infinite
            bound = getattr(limit, name)
            if not isinstance(bound, int | float) or isinstance(bound, bool) or math.isnan(bound):
                raise ValueError(f"limits[{i}]: {name} is {bound!r}, expected a number")
        if limit.low > limit.high:
            raise ValueError(f"limits[{i}]: low = {limit.low!r} is above high = {limit.high!r}, expected low <= high")
    return limits


class Series:
    """One series of a monitor: its charts, the limits of its metrics, and whether it is under alarm.

    Args:
        name: "engine", "staleness" or "surprise".
        limits: those of all series.
        charts: "above", and "below" where the series may also fall.
    """

    def __init__(self, name: str, limits: tuple[Limit, ...], charts: dict[str, Cusum]) -> None:
        self.name = name
        self.limits = [limit for limit in limits if limit.series == name]
        self.charts = charts
        self.exceeded = [0] * len(self.limits)
        self.active: Severity | None = None
        self.calm = 0
        self.alarms = 0
        self.mask_above: float | None = None
        """The mean k3 of a sequence above which the action "mask" masks it; None: it is not in force."""
        self.mask_limit = 0.0
        """The same as it was when the alarm began."""
        self.evidence: tuple[str, ...] = ()
        self.moved = False
        """The evidence has a chart's verdict: the series has left its own baseline."""
        self.aged = False
        """The reported lag is more than in the first steps."""
        self.cause = ""
        """The cause that was said last, of the alarm that is on."""
        self.confidence = self.named_size = 0.0
        """The confidence in it, and k3 when it was named."""
        self.rival = ""
        """Another cause that the last look found, in a weaker gap."""
        self.held_back = False
        """The alarm took no action, as the diagnosis found nothing."""
        self.size: float | None = None
        """k3 of the last step; None where it was not measured, and of surprise."""
        self.first_size = self.looked_size = 0.0
        """k3 at the alarm, and when its cause was last looked at."""
        self.first_step = 0
        """The optimizer step of the alarm."""
        self.looked_steps = 0
        """Number of steps since the cause was last looked at."""
        self.steps = self.highs = 0
        """Number of steps with a k3, and of those since the first whose k3 exceeded all before."""
        self.start = self.highest = 0.0
        """k3 of the first step, and the largest so far."""
        self.agreed_steps = self.agreed_until = 0
        """Number of steps without a gap, and the optimizer step of the last of them."""
        self.nats: list[float] = []
        """Of surprise: the mean of -logp - entropy of each step of the warm-up."""
        self.overdue = ""
        """That newer weights are overdue at the sampler, where the reported versions say so."""
        self.left_out = False
        """Of surprise: in the warm-up whole sequences were left out, so that its mean need not be 0."""
        self.start_lag = 0.0
        """The reported lag of the first step; 0 where it is not known."""
        self.left_size = 0.0
        """k3 of the first of the steps in a row that are out of the range."""
        self.new_size: float | None = None
        """k3 of the last step on samples of the weights of now (reported lag 0); None: there was none."""
        self.lag: float | None = None
        """The reported lag of the last step, in optimizer steps; None: it is not known."""
        self.lag_max = 0.0
        """The largest reported lag of the last step."""
        self.behind = 0
        """Number of steps in a row with a reported lag of 0 and a k3 above ``UNSYNCED``, after none at the first."""
        self.never_synced = False
        """``unsynced`` held in the last step."""
        self._crossed: list[float] = []

    @property
    def excess(self) -> float:
        """The CUSUM statistic over its threshold, or a metric over its limit, whichever is more; above 1 the series is
        out of its range.
        """
        charted = (chart.score / chart.threshold if chart.threshold else chart.score for chart in self.charts.values())
        return max(*charted, *self._crossed, 0.0)

    @property
    def maskable(self) -> bool:
        """Whether its sequences have a k3 of their own, by which they can be masked."""
        return self.name != "surprise"

    @property
    def never_fell(self) -> bool:
        """Whether k3 was none at the first step and has grown ever since: no update has reached the sampler."""
        return self.steps >= LONG and self.keeps_growing

    @property
    def keeps_growing(self) -> bool:
        """Whether k3 was none at the first step, and most steps since had the largest so far."""
        return self.steps >= SEVERAL and self.start <= SMALLEST_K3 and 2 * self.highs >= self.steps

    @property
    def unsynced(self) -> bool:
        """Whether the samples are reported to be of the weights of now, and look as if these never reached the sampler,
        by enough to matter.

        It holds until k3 falls: where the gap grows more slowly than its noise, no step has the largest k3 any more.
        """
        grew = self.never_fell or self.never_synced or self.behind >= BEHIND
        return self.name != "surprise" and self.behind > 0 and grew

    @property
    def agreed(self) -> bool:
        """Whether k3 was none in the first steps: both sides computed the same."""
        chart = self.charts["above"]
        return (math.exp(chart.mean) if chart.ready else self.start) <= 2 * SMALLEST_K3

    @property
    def risen(self) -> float:
        """k3 over that when it left its range; 1 where either is not known."""
        return self.size / self.left_size if self.size and self.left_size else 1.0

    @property
    def grown_in_generation(self) -> bool:
        """Whether k3 was less by ``GAP_BEGINS`` when the samples in use were new."""
        if not self.lag or self.new_size is None or self.size is None:
            return False
        return self.size >= GAP_BEGINS * self.new_size

    @property
    def without_age(self) -> bool:
        """Whether samples of the weights of now, by the reported lag, have much of k3, which was none at first: then
        these weights are not those that sampled.
        """
        if self.new_size is None or self.size is None or self.start > SMALLEST_K3:
            return False
        return self.new_size >= WITHOUT_AGE * self.size

    @property
    def growth(self) -> float:
        """k3 over that at the alarm; 1 where either is not known."""
        return self.size / self.first_size if self.size and self.first_size else 1.0

    def add(
        self,
        metrics: Mapping[str, float],
        conditions: Sequence[float],
        persistence: int,
        step: int = 0,
        overdue: str = "",
    ) -> Severity | None:
        """The severity of a new alarm, or of one that has become critical; None where there is none.

        A step under alarm or beyond a limit is no part of the baseline.

        Args:
            overdue: what the reported versions say, where newer weights are overdue at the sampler.
        """
        values = self._values(metrics)
        if values is None:
            return None
        found: dict[str, str] = {}
        severity: Severity | None = None
        above = moved = False
        over = list(self._over(metrics))
        if self._begins(values["above"], metrics):
            chart = self.charts["above"]
            chart.values = [math.log(SMALLEST_K3)] * chart.warmup
        warming = not self.charts["above"].ready
        for side, value in values.items():
            chart = self.charts[side]
            if warming and (self.active or over):
                continue
            if chart.add(value, conditions):
                severity, moved = "warning", any(chart.values)
                found[side] = self._said(chart, value, metrics) + self._risen(chart, conditions)
            above |= chart.above > 0
            self.aged = bool(self._risen(chart, conditions))
        if self.name == "surprise" and warming and not (self.active or over):
            self._check_baseline(metrics)
        self._crossed = []
        for i, limit, number in over:
            above = True
            self._crossed.append(limit.excess(number))
            if self.exceeded[i] >= persistence:
                bound = f"below {limit.low:g}" if number < limit.low else f"above {limit.high:g}"
                found[limit.metric] = f"{limit.said} {number:.3g}, {bound} in {self.exceeded[i]} logged steps in a row"
                severity = limit.severity if severity != "critical" else severity
        self.size = math.exp(values["above"]) if self.name != "surprise" else None
        self._count(self.size, metrics, step)
        self.never_synced = self.unsynced
        if self.never_synced:
            above, severity = True, severity or "warning"
            found.setdefault("k3", f"the KL divergence of the two (k3) is {self.size:.2g} nats")
            self._crossed.append(min((self.size or 0.0) / UNSYNCED, LARGEST_EXCESS))
        self.overdue = overdue
        if overdue:
            above, severity = True, severity or "warning"
            found["lag"] = overdue
            self._crossed.append(1.0)
        self.left_size = (self.left_size or self.size or 0.0) if above else 0.0
        self.calm = 0 if above else self.calm + 1
        self.looked_steps += 1
        if self.calm >= persistence and self.active:
            self._end()
        if severity is None or self.active in (severity, "critical"):
            return None
        if self.active is None:
            self.mask_limit = self._mask_limit()
        self.active, self.evidence, self.moved = severity, tuple(found.values()), moved
        self.alarms += 1
        return severity

    def _begins(self, log_size: float, metrics: Mapping[str, float]) -> bool:
        """Whether a gap begins in the warm-up, where none was before and the samples are new.

        The steps before are then the baseline.  After a step with a smaller gap, as updates that reach the sampler late
        make it, the warm-up goes on.
        """
        if self.name == "surprise" or self.charts["above"].ready or metrics.get(LAG):
            return False
        return self.agreed_steps == self.steps >= SEVERAL and log_size > math.log(BEGINS)

    def _check_baseline(self, metrics: Mapping[str, float]) -> None:
        """At the end of the warm-up of surprise, put 0, the mean of a healthy run, in place of steps that are off.

        A fault that began in these steps would be the baseline otherwise.
        """
        chart = self.charts["above"]
        self.nats.append(metrics[SURPRISE])
        self.left_out |= metrics.get(LEFT_OUT, 0.0) > 0 or metrics.get(SKIPPED, 0.0) > 0
        if not chart.ready or self.left_out:
            return
        errors = abs(chart.mean) * math.sqrt(len(chart.values))
        least = SURPRISED + metrics.get(ENGINE + "abs_mean", 0.0)
        if errors > SURPRISED_ERRORS and abs(self._warm_up_mean) > least:
            for one in self.charts.values():
                one.values = [0.0] * len(one.values)

    @property
    def _warm_up_mean(self) -> float:
        """Of surprise: the mean of -logp - entropy over the steps of the baseline."""
        steps = self.nats[-len(self.charts["above"].values) :]
        return sum(steps) / max(len(steps), 1)

    def _count(self, size: float | None, metrics: Mapping[str, float], step: int) -> None:
        """Count a step for ``never_fell``, and keep its lag."""
        if size is None:
            return
        self.lag, self.lag_max = metrics.get(LAG), metrics.get(LAG_MAX, metrics.get(LAG, 0.0))
        if self.lag == 0 == self.lag_max:
            self.new_size = size
        if not self.steps:
            self.start, self.start_lag = size, self.lag or 0.0
        if size <= 2 * SMALLEST_K3:
            self.agreed_steps, self.agreed_until = self.agreed_steps + 1, step
        self.highs += self.steps > 0 and size > self.highest
        self.highest = max(self.highest, size)
        self.steps += 1
        behind = self.lag == 0 and self.start <= SMALLEST_K3 and size >= UNSYNCED
        self.behind = self.behind + 1 if behind else 0

    def looks_again(self) -> bool:
        """Whether the cause of the alarm that is on is to be looked at again."""
        grown = self.size is not None and self.size >= GROWN * self.looked_size > 0
        return self.active is not None and (grown or self.looked_steps >= STEPS)

    def looked(self, step: int, *, first: bool) -> None:
        """The cause was looked at now; ``first``: at an alarm."""
        self.looked_size, self.looked_steps = self.size or 0.0, 0
        if first:
            self.first_size, self.first_step = self.looked_size, step

    def named(self, cause: str, confidence: float) -> None:
        """The cause is said now."""
        self.cause, self.confidence, self.named_size, self.rival = cause, confidence, self.size or 0.0, ""

    def outweighs(self, cause: str, confidence: float) -> bool:
        """Whether another cause that was found now takes the place of the one that was named.

        Of a gap that has become weaker since, less can be told: there two looks in a row have to find the same cause,
        with no less confidence.
        """
        if self.size is None or self.size >= WEAKER * self.named_size:
            return True
        again, self.rival = self.rival == cause, cause
        return again and confidence >= self.confidence

    def mask(self) -> None:
        """Mask until the alarm ends, above the limit as it was when the alarm began."""
        self.mask_above = self.mask_limit

    def _mask_limit(self) -> float:
        """The lowest limit of k3, or what the baseline rarely reaches, if that is more."""
        fixed = [limit.high for limit in self.limits if limit.metric.endswith("/k3")]
        chart = self.charts["above"]
        usual = [math.exp(min(chart.mean + 3 * chart.sd, 700.0))] if chart.ready else []
        return max([min(fixed, default=0.0), *usual])

    def _end(self) -> None:
        """The alarm is over."""
        self.active = self.mask_above = None
        self.cause, self.rival, self.held_back = "", "", False
        for chart in self.charts.values():
            chart.reset()

    def _over(self, metrics: Mapping[str, float]) -> Iterator[tuple[int, Limit, float]]:
        """The limits that are crossed: index, limit and metric; counts the steps in a row."""
        for i, limit in enumerate(self.limits):
            number = metrics.get(limit.metric)
            if number is None or limit.low <= number <= limit.high:
                self.exceeded[i] = 0
            else:
                self.exceeded[i] += 1
                yield i, limit, number

    def _values(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """The values to chart: log k3, or the mean of -logp - entropy in its own standard errors."""
        if self.name != "surprise":
            k3 = metrics.get(f"offcorr/{self.name}/k3")
            return (
                None if k3 is None else {"above": math.log(max(k3, SMALLEST_K3) if math.isfinite(k3) else LARGEST_K3)}
            )
        if SURPRISE not in metrics or metrics.get(STALENESS + "abs_mean", 0.0) > SAMPLERS_WEIGHTS:
            return None
        errors = metrics[SURPRISE] / _error(metrics)
        return {"above": errors, "below": -errors}

    def _said(self, chart: Cusum, value: float, metrics: Mapping[str, float]) -> str:
        """The chart's verdict in words."""
        alarm = f"an alarm from {chart.threshold:g} on"
        chart_said = f"{chart.above} logged steps in a row; CUSUM {chart.score:.1f}, {alarm}"
        if self.name == "surprise":
            usual = "that of the first logged steps"
            if not any(chart.values):
                usual = f"0; the first logged steps are off by {self._warm_up_mean:.3g}, so that they are no baseline"
            return (
                f"mean of -logp - entropy {metrics[SURPRISE]:.3g} +- {_error(metrics):.2g} nats, "
                f"{abs(value - chart.mean):.1f} standard errors from {usual} ({chart_said})"
            )
        times = f"{math.exp(value - chart.mean):.3g} times"
        if chart.mean < math.log(1.001 * SMALLEST_K3):  # less counts as this
            times = f"more than {times}"
        return (
            f"the KL divergence of the two (k3) is {math.exp(value):.2g} nats, {times} that of the first logged steps "
            f"({chart_said})"
        )

    def _risen(self, chart: Cusum, conditions: Sequence[float]) -> str:
        """The reported lag, where it is more than in the first steps."""
        if not chart.usual:  # under alarm from the first step on
            return ""
        lag, usual = conditions[0], chart.usual[0]
        return f"; the reported lag is {lag:.3g}, {usual:.3g} in the first logged steps" if lag > RISES * usual else ""

    def state_dict(self) -> dict[str, Any]:
        """Its state for a checkpoint, as plain numbers."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _STATE}
        return state | {"charts": {side: chart.state_dict() for side, chart in self.charts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``."""
        for name in _STATE:
            value = state.get(name, getattr(self, name))  # of an older checkpoint
            setattr(self, name, list(value) if isinstance(value, list) else value)
        for side, chart in self.charts.items():
            chart.load_state_dict(state["charts"][side])


def _error(metrics: Mapping[str, float]) -> float:
    """Standard error of the mean of -logp - entropy, at least ``SMALLEST_ERROR``."""
    return max(metrics.get(SURPRISE_ERROR, 0.0), SMALLEST_ERROR)


_STATE = (
    "exceeded",
    "active",
    "calm",
    "alarms",
    "mask_above",
    "mask_limit",
    "cause",
    "confidence",
    "named_size",
    "rival",
    "held_back",
    "first_size",
    "looked_size",
    "first_step",
    "looked_steps",
    "steps",
    "highs",
    "start",
    "start_lag",
    "agreed_steps",
    "agreed_until",
    "nats",
    "left_out",
    "highest",
    "left_size",
    "new_size",
    "behind",
    "never_synced",
)
