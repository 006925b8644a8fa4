"""The report of ``offcorr bench arena``: accuracy, collapses, paired differences, early warnings, and pictures."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any, NamedTuple

from offcorr.lab import results
from offcorr.lab.text import aligned

__all__ = ["METRICS", "WARNINGS", "Curve", "Warning", "collapse", "pictures", "report", "text", "trained"]

COLLAPSE = "held-out accuracy at an evaluation below half of its peak so far and below that of the first evaluation"
"""The definition of a collapse."""

GAPS = (0.05, 0.03)
"""The differences in AUC for which the number of seeds is computed."""

POWER = statistics.NormalDist().inv_cdf(0.975) + statistics.NormalDist().inv_cdf(0.8)
"""Standard errors that a difference needs: 5 % two-sided, found in 80 % of the repetitions."""


class Warning(NamedTuple):
    """A metric that warns where it crosses a threshold.

    Args:
        above: whether it warns above the threshold, rather than below.
    """

    metric: str
    above: bool
    thresholds: tuple[float, ...]


WARNINGS = (
    Warning("offcorr/staleness/abs_mean", True, (0.06, 0.12, 0.24)),
    Warning("offcorr/staleness/k3", True, (0.02, 0.05, 0.1)),
    Warning("offcorr/staleness/ess_seq", False, (0.5, 0.3, 0.1)),
    Warning("offcorr/staleness/ess_token", False, (0.9, 0.7, 0.5)),
    Warning("offcorr/engine/abs_mean", True, (0.01, 0.05, 0.1)),
    Warning("offcorr/engine/ess_seq", False, (0.9, 0.7, 0.5)),
    Warning("entropy", False, (0.1, 0.05, 0.02)),
    Warning("entropy", True, (0.3, 0.5, 1.0)),
    Warning("reward", False, (0.35, 0.25, 0.1)),
    Warning("grad_norm", True, (0.3, 0.6, 1.2)),
    Warning("offcorr/loss/dropped", True, (0.02, 0.1, 0.3)),
    Warning("offcorr/loss/damped", True, (0.5, 0.7, 0.9)),
    Warning("frac_reward_zero_std", True, (0.3, 0.5, 0.8)),
)
"""The early warnings that the report counts."""

METRICS = tuple(
    dict.fromkeys(
        [warning.metric for warning in WARNINGS]
        + ["offcorr/staleness/lag", "offcorr/loss/amplified", "offcorr/loss/multiplier_vs_ratio"]
        + ["offcorr/loss/ess_before", "offcorr/loss/ess_after", "completions/mean_length", "lr_scale"]
    )
)
"""The logged metrics that a run's record keeps."""


def trained(setting: Mapping[str, Any]) -> str:
    """The name of what a run trains with: its method, and the rule of the learning rate where it has one.

    >>> trained({"method": "minpro", "ess_lr": "sqrt"})
    'minpro + ess_lr=sqrt'
    """
    rule = setting.get("ess_lr")
    return setting["method"] + (f" + ess_lr={rule}" if rule else "")


def collapse(steps: Sequence[float], accuracy: Sequence[float]) -> float | None:
    """The update of the first evaluation that is below half of the peak so far and below the first; else None.

    >>> collapse([0, 16, 32, 48], [0.4, 0.9, 0.5, 0.3])
    48
    """
    peak = 0.0
    for step, value in zip(steps, accuracy, strict=True):
        peak = max(peak, value)
        if value < peak / 2 and value < accuracy[0]:
            return step
    return None


class Curve(NamedTuple):
    """Held-out accuracy of one run.

    Args:
        auc: the mean over the updates, by the trapezoidal rule.
        fall: the largest difference between an evaluation and an earlier, higher one.
        collapse: the update of the collapse; None: there was none.
    """

    auc: float
    final: float
    peak: float
    fall: float
    collapse: float | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Curve:
        """The summary of a run's record.

        >>> Curve.of({"held_out": {"step": [0, 10, 20], "value": [0.25, 0.5, 0.75]}})
        Curve(auc=0.5, final=0.75, peak=0.75, fall=0.0, collapse=None)
        """
        steps, accuracy = record["held_out"]["step"], record["held_out"]["value"]
        area = sum(
            (after - before) * (high + low) / 2
            for before, after, low, high in zip(steps, steps[1:], accuracy, accuracy[1:], strict=False)
        )
        auc = area / (steps[-1] - steps[0]) if len(steps) > 1 else accuracy[0]
        fall = max(peak - value for peak, value in zip(accumulate(accuracy, max), accuracy, strict=True))
        return cls(auc, accuracy[-1], max(accuracy), fall, collapse(steps, accuracy))


# -- the numbers ----------------------------------------------------------------------------------------------


def report(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that the tables and pictures show, as plain data; of runs that ended without an error, but ``failed``.

    Nothing in it depends on how long a run took, or in which order or process.
    """
    ended = [record for record in records if record["exit_code"] == 0]
    return {
        "definitions": {"collapse": COLLAPSE, "auc": "mean held-out accuracy over the updates, trapezoidal rule"},
        "rows": rows(records),
        "seeds_needed": seeds_needed(ended),
        "warnings": warnings(ended),
        "failed": [
            {"setting": record["setting"], "exit_code": record["exit_code"], "error": record["error"]}
            for record in records
            if record["exit_code"]
        ],
    }


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per method, learning rate and sampler; sampler by sampler, the highest mean AUC first.

    ``difference`` is the mean over the seeds of AUC minus that of the best method of the same sampler, with its
    standard error; over the seeds that both have.
    """
    cells: dict[Any, dict[Any, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        setting = record["setting"]
        cells[setting["lag"], setting["precision"]][trained(setting), setting["learning_rate"]].append(record)
    found = []
    for (lag, precision), methods in cells.items():
        summaries = [
            {"method": method, "lag": lag, "precision": precision, "learning_rate": rate, **_summary(runs)}
            for (method, rate), runs in methods.items()
        ]
        summaries.sort(key=lambda row: -row["auc"]["mean"] if row["auc"] else math.inf)
        best = summaries[0]
        for row in summaries:
            row["difference"] = _paired(row, best) if row is not best else None
        found += summaries
    return found


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ended = sorted((run for run in runs if run["exit_code"] == 0), key=lambda run: run["setting"]["seed"])
    curves = [Curve.of(run) for run in ended]
    means = {
        name: _interval([getattr(curve, name) for curve in curves]) if curves else None
        for name in ("auc", "final", "peak", "fall")
    }
    values = list(zip(*(run["held_out"]["value"] for run in ended), strict=True))
    return {
        **means,
        "collapsed": sum(curve.collapse is not None for curve in curves),
        "runs": len(ended),
        "failed": len(runs) - len(ended),
        "seeds": [run["setting"]["seed"] for run in ended],
        "auc_of_seeds": [curve.auc for curve in curves],
        "final_of_seeds": [curve.final for curve in curves],
        "collapse_of_seeds": [curve.collapse for curve in curves],
        "curve": {"step": ended[0]["held_out"]["step"], **_band(values)} if ended else None,
    }


def _interval(values: Sequence[float]) -> dict[str, float]:
    low, high = results.bootstrap(values)
    return {"mean": statistics.fmean(values), "low": low, "high": high}


def _band(values: Iterable[Sequence[float]]) -> dict[str, list[float]]:
    """Mean and bootstrap interval at every evaluation."""
    intervals = [_interval(at) for at in values]
    return {name: [interval[name] for interval in intervals] for name in ("mean", "low", "high")}


def _paired(row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float] | None:
    """The paired difference in AUC of two rows; None: they share no seed."""
    values, others = (dict(zip(each["seeds"], each["auc_of_seeds"], strict=True)) for each in (row, other))
    shared = sorted(values.keys() & others.keys())
    if not shared:
        return None
    mean, error = results.difference([values[seed] for seed in shared], [others[seed] for seed in shared])
    return {"mean": mean, "error": error, "seeds": len(shared)}


def seeds_needed(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per sampler: the median over all pairs of methods of the standard deviation of their paired difference in AUC,
    and the number of seeds that tells two methods apart by each of ``GAPS``.

    The number is (2.8 sd / gap)^2, at least 2: a two-sided test at 5 % then finds the gap in 80 % of the repetitions.
    """
    found = []
    by_cell: dict[Any, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        setting = record["setting"]
        method = trained(setting), setting["learning_rate"]
        by_cell[setting["lag"], setting["precision"]][method][setting["seed"]] = Curve.of(record).auc
    for (lag, precision), methods in by_cell.items():
        deviations = []
        for one, other in combinations(methods.values(), 2):
            if len(shared := sorted(one.keys() & other.keys())) > 1:
                deviations.append(statistics.stdev(one[seed] - other[seed] for seed in shared))
        if deviations:
            sd = statistics.median(deviations)
            seeds = {f"{gap:g}": max(2, math.ceil((POWER * sd / gap) ** 2)) for gap in GAPS}
            found.append({"lag": lag, "precision": precision, "pairs": len(deviations), "sd": sd, "seeds": seeds})
    return found


def warnings(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per metric and threshold: of the collapses, how many it warned of and how many updates before (median);
    of the runs without a collapse, in how many it warned all the same.

    A warning counts from the first update at which the logged metric is past the threshold, and of a collapse only if
    that is before the evaluation which found it.
    """
    runs = [(Curve.of(record).collapse, record["metrics"]) for record in records]
    found = []
    for metric, above, thresholds in WARNINGS:
        logged = [(collapsed, metrics[metric]) for collapsed, metrics in runs if metric in metrics]
        for threshold in thresholds if logged else ():
            leads, false_alarms = [], 0
            for collapsed, series in logged:
                step = _crossing(series, threshold, above)
                if step is not None and collapsed is None:
                    false_alarms += 1
                elif step is not None and collapsed is not None and step < collapsed:
                    leads.append(collapsed - step)
            collapses = sum(collapsed is not None for collapsed, _ in logged)
            found.append(
                {
                    "metric": metric,
                    "above": above,
                    "threshold": threshold,
                    "warned": len(leads),
                    "collapses": collapses,
                    "updates_before": statistics.median(leads) if leads else None,
                    "false_alarms": false_alarms,
                    "without_collapse": len(logged) - collapses,
                }
            )
    return found


def _crossing(series: Mapping[str, Sequence[float | None]], threshold: float, above: bool) -> float | None:
    """The first update at which the metric is past the threshold; a value that was not finite (None) is past none."""
    for step, value in zip(series["step"], series["value"], strict=True):
        if step is not None and value is not None and (value > threshold if above else value < threshold):
            return step
    return None


# -- the tables -----------------------------------------------------------------------------------------------


def text(report: Mapping[str, Any]) -> str:
    """The report as tables of plain text."""
    several = _several_rates(report)
    parts = [f"Sampler: {cell}\n{aligned(_accuracies(rows, several))}" for cell, rows in _cells(report["rows"]).items()]
    parts.append(
        "AUC: mean held-out accuracy over the updates. Means over the seeds; interval: 95 %, bootstrap over seeds.\n"
        "Fall: the largest from an evaluation to a later one.\n"
        "To the best: difference in AUC to the first row, mean over the seeds that both have and its standard error.\n"
        f"Collapsed: {COLLAPSE}."
    )
    if report["seeds_needed"]:
        lines = [
            {"sampler": _cell(row), "pairs": str(row["pairs"]), "sd": f"{row['sd']:.3f}"}
            | {f"seeds for {gap}": str(count) for gap, count in row["seeds"].items()}
            for row in report["seeds_needed"]
        ]
        parts.append(
            f"How many seeds tell two methods apart\n{aligned(lines)}\n"
            "sd: of the paired difference in AUC, the median over all pairs of methods. Seeds: for that difference,\n"
            "at 5 % two-sided and a power of 80 %."
        )
    lines = [
        {
            "metric": row["metric"].removeprefix("offcorr/"),
            "warns": f"{'>' if row['above'] else '<'} {row['threshold']:g}",
            "collapses found": f"{row['warned']} of {row['collapses']}",
            "updates before": "-" if row["updates_before"] is None else f"{row['updates_before']:g}",
            "false alarms": f"{row['false_alarms']} of {row['without_collapse']}",
        }
        for row in report["warnings"]
        if row["warned"] or row["false_alarms"]
    ]
    if lines and any(row["collapses"] for row in report["warnings"]):
        parts.append(
            f"Early warning\n{aligned(lines)}\n"
            "Updates before: from the first value past the threshold to the collapse's evaluation; median.\n"
            "False alarms: runs without a collapse in which the metric was past the threshold. Metrics and thresholds\n"
            "that never warned are in the JSON file alone."
        )
    else:
        parts.append("Early warning: no run collapsed, or no metric warned before.")
    for failed in report["failed"]:
        setting = failed["setting"]
        name = f"{trained(setting)}, {_cell(setting)}, seed {setting['seed']}"
        parts.append(f"FAILED with exit code {failed['exit_code']}: {name}: {failed['error']}")
    return "\n\n".join(parts)


def _accuracies(rows: Sequence[Mapping[str, Any]], several: bool) -> list[dict[str, str]]:
    failures = any(row["failed"] for row in rows)
    lines = []
    for row in rows:
        auc = row["auc"]
        line = {"method": row["method"]} | ({"rate": _rate(row)} if several else {})
        line |= {"AUC": f"{auc['mean']:.3f}" if auc else "-"}
        line |= {"interval": f"{auc['low']:.3f} to {auc['high']:.3f}" if auc else "-"}
        line |= {name: f"{row[name]['mean']:.3f}" if auc else "-" for name in ("final", "peak", "fall")}
        line |= {"to the best": _difference(row), "collapsed": f"{row['collapsed']} of {row['runs']}"}
        lines.append(line | ({"failed": str(row["failed"])} if failures else {}))
    return lines


def _several_rates(report: Mapping[str, Any]) -> bool:
    return len({row["learning_rate"] for row in report["rows"]}) > 1


def _cells(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        cells.setdefault(_cell(row), []).append(row)
    return cells


def _cell(row: Mapping[str, Any]) -> str:
    return f"lag {row['lag']}, {row['precision']}"


def _rate(row: Mapping[str, Any]) -> str:
    return "-" if row["learning_rate"] is None else f"{row['learning_rate']:g}"


def _difference(row: Mapping[str, Any]) -> str:
    found = row["difference"]
    if found is None:
        return "-"
    error = "" if found["error"] is None or math.isnan(found["error"]) else f" +- {found['error']:.3f}"
    return f"{found['mean']:+.3f}{error}"


# -- the pictures ---------------------------------------------------------------------------------------------


def pictures(report: Mapping[str, Any], file: Path) -> list[Path]:
    """Draws AUC by method and sampler as a heat map, and the curves with their intervals; returns both files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = _several_rates(report)
    drawn = [(row["method"] + (f" {_rate(row)}" if several else ""), row) for row in report["rows"] if row["auc"]]
    if not drawn:
        return []
    cells, methods = (list(dict.fromkeys(names)) for names in ([_cell(row) for _, row in drawn], [n for n, _ in drawn]))
    auc = {(name, _cell(row)): row["auc"]["mean"] for name, row in drawn}
    methods.sort(key=lambda name: -statistics.fmean([auc[name, cell] for cell in cells if (name, cell) in auc]))

    figure, axis = plt.subplots(figsize=(2.5 + 1.2 * len(cells), 1.2 + 0.35 * len(methods)), constrained_layout=True)
    grid = [[auc.get((name, cell), math.nan) for cell in cells] for name in methods]
    axis.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            if not math.isnan(value):
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
    axis.set_xticks(range(len(cells)), cells, fontsize=8)
    axis.set_yticks(range(len(methods)), methods, fontsize=8)
    axis.set_title("AUC of held-out accuracy", fontsize=10)
    heat = file.with_suffix(".png")
    figure.savefig(heat, dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(
        1, len(cells), figsize=(4.5 * len(cells), 4), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, cell in zip(axes[0], cells, strict=True):
        for name, row in drawn:
            if _cell(row) == cell:
                place = methods.index(name)
                curve, style = row["curve"], "-" if place < 10 else "--"
                (line,) = axis.plot(curve["step"], curve["mean"], style, color=f"C{place % 10}", label=name)
                axis.fill_between(curve["step"], curve["low"], curve["high"], alpha=0.12, color=line.get_color())
        axis.set(title=cell, xlabel="optimizer update")
    axes[0][0].set_ylabel("held-out sampled accuracy; mean and 95 % interval")
    axes[0][-1].legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    curves = file.with_name(f"{file.stem}_curves.png")
    figure.savefig(curves, dpi=120)
    plt.close(figure)
    return [heat, curves]
