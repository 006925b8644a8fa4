"""The plots of the report, each one picture with its caption."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from offcorr.diagnose.captions import caption
from offcorr.diagnose.diagnosis import Report
from offcorr.diagnose.evidence import SAME, Evidence
from offcorr.diagnose.record import Record

Draw = Callable[[Evidence, Any], None]
DRAWN = 5000
"""Points in a plot, at most."""
FARTHEST = 50.0
"""|d| (nats) in a plot, at most: placeholders and infinite values are drawn there."""
COLOUR = "#3b6ea5"
LAGS = range(-4, 5)
"""Tokens by which the two series of log-probs are shifted against each other."""


class Plot(NamedTuple):
    """A plot: its name in ``captions``, the function that draws it, and one that says what these data show."""

    name: str
    draw: Draw
    here: Callable[[Evidence], str] = lambda evidence: ""


def plots(report: Report) -> list[tuple[str, Any]]:
    """Caption and finished picture (a matplotlib figure) of every plot that the data allow.

    Args:
        report: its evidence is drawn; values beyond 50 nats are drawn at 50.
    """
    evidence = report.evidence
    made = [
        Plot("histogram", _histogram, _sides),
        Plot("quantiles", _quantiles),
        Plot("against_logp", _against_logp),
        Plot("positions", _positions, _first_token),
        Plot("lags", _lags, _highest_lag),
    ]
    if np.abs(_updates(evidence)).max(initial=0.0) > SAME:
        made.append(Plot("updates", _update_histogram, _update_size))
    if len(_halves(evidence)[0]):
        made.append(Plot("token_ids", _token_ids, _agreement))
    if len(_turns(evidence)[0]) > 1:
        made.append(Plot("turns", _by_turn, _first_and_last_turn))
    if len(set(_ages(evidence)[0])) > 1:
        made.append(Plot("ages", _by_age))
    return [(caption(plot.name, report, plot.here(evidence)), _drawn(evidence, plot.draw)) for plot in made]


def figure(words: str, picture: Any) -> str:
    """A picture and its caption as HTML, with the picture's bytes inside."""
    written = io.BytesIO()
    picture.savefig(written, format="png")
    data, said = base64.b64encode(written.getvalue()).decode(), html.escape(words)
    return f'<figure><img alt="{said}" src="data:image/png;base64,{data}"><figcaption>{said}</figcaption></figure>'


def _drawn(evidence: Evidence, draw: Draw) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.4, 3.3), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    draw(evidence, axes)
    axes.locator_params(axis="x", nbins=5)  # more labels overlap where the numbers are small
    return picture


def bounded(values: Any) -> Any:
    """The values within +-50 nats."""
    return np.clip(np.nan_to_num(values, posinf=FARTHEST, neginf=-FARTHEST), -FARTHEST, FARTHEST)


def _histogram(evidence: Evidence, axes: Any) -> None:
    axes.hist(bounded(evidence.d), bins=80, log=True, color=COLOUR)
    axes.set(xlabel="d (nats)", ylabel="tokens")


def _quantiles(evidence: Evidence, axes: Any) -> None:
    d = np.sort(bounded(evidence.d))
    chosen = _thinned(len(d))
    axes.plot(_normal((chosen + 0.5) / len(d)), d[chosen], ".", ms=3, color=COLOUR)
    axes.set(xlabel="standard normal quantile", ylabel="d (nats)")


def _against_logp(evidence: Evidence, axes: Any) -> None:
    chosen = _thinned(len(evidence))
    axes.plot(bounded(evidence.trainer)[chosen], bounded(evidence.d)[chosen], ".", ms=2, alpha=0.5, color=COLOUR)
    axes.axhline(0, color="#999", lw=0.8)
    axes.set(xlabel="trainer's log-prob (nats)", ylabel="d (nats)")


def _positions(evidence: Evidence, axes: Any) -> None:
    count = np.bincount(evidence.position)
    total = np.bincount(evidence.position, bounded(evidence.size))
    known = np.flatnonzero(count >= min(2, count.max()))
    axes.plot(known, total[known] / count[known], marker="." if len(known) < 30 else "", color=COLOUR)
    axes.set(xlabel="position in the completion (tokens)", ylabel="mean |d| (nats)", ylim=(0, None))


def _lags(evidence: Evidence, axes: Any) -> None:
    axes.bar(LAGS, [_lagged(evidence, lag) for lag in LAGS], color=COLOUR)
    axes.set(xlabel="lag (tokens)", ylabel="correlation", ylim=(-0.2, 1.05))


def _update_histogram(evidence: Evidence, axes: Any) -> None:
    axes.hist(_updates(evidence), bins=80, log=True, color=COLOUR)
    axes.set(xlabel="logp - old_logp (nats)", ylabel="tokens")


def _token_ids(evidence: Evidence, axes: Any) -> None:
    axes.plot(*_halves(evidence), ".", color=COLOUR)
    axes.axline((0, 0), slope=1, color="#999", lw=0.8)
    axes.set(xlabel="mean d of a token id, one half (nats)", ylabel="other half (nats)")


def _by_turn(evidence: Evidence, axes: Any) -> None:
    axes.plot(*_turns(evidence), marker=".", color=COLOUR)
    axes.set(xlabel="turn", ylabel="mean |d| (nats)", ylim=(0, None))


def _by_age(evidence: Evidence, axes: Any) -> None:
    axes.plot(*_ages(evidence), ".", color=COLOUR)
    axes.set(xlabel="age of the sampler's weights (optimizer steps)", ylabel="mean |d| (nats)", ylim=(0, None))


# -- what these data show -------------------------------------------------------------------------------------


def _sides(evidence: Evidence) -> str:
    return f"Here {np.mean(evidence.d < 0):.0%} of the d are below 0 and {np.mean(evidence.d > 0):.0%} above."


def _first_token(evidence: Evidence) -> str:
    first, size = evidence.position == 0, bounded(evidence.size)
    if first.all() or not first.any():
        return ""
    return f"Here it is {size[first].mean():.2g} nats at the first token and {size[~first].mean():.2g} after it."


def _highest_lag(evidence: Evidence) -> str:
    bars = {lag: _lagged(evidence, lag) for lag in LAGS}
    return f"Here the highest bar is at a lag of {max(LAGS, key=bars.__getitem__)}." if any(bars.values()) else ""


def _update_size(evidence: Evidence) -> str:
    size, gap = np.abs(_updates(evidence)).mean(), bounded(evidence.size).mean()
    return f"Here its mean size is {size:.2g} nats, and that of d is {gap:.2g}."


def _agreement(evidence: Evidence) -> str:
    one, other = _halves(evidence)
    if len(one) < 3 or not np.std(one) or not np.std(other):
        return ""
    return f"Here the correlation of the two halves is {np.corrcoef(one, other)[0, 1]:.2f}."


def _first_and_last_turn(evidence: Evidence) -> str:
    _, sizes = _turns(evidence)
    return f"Here it is {sizes[0]:.2g} nats in the first turn and {sizes[-1]:.2g} in the last."


# -- the numbers of a plot ------------------------------------------------------------------------------------


def _updates(evidence: Evidence) -> Any:
    """logp - old_logp (nats) of the tokens that have both."""
    moved = [
        record.logp[places] - record.old_logp[places]
        for at, record in enumerate(evidence.records)
        if record.logp is not None and len(places := evidence.position[evidence.of_sequence(at)])
    ]
    values = np.concatenate(moved) if moved else np.empty(0)
    return bounded(values[~np.isnan(values)])


def _turns(evidence: Evidence) -> tuple[Any, Any]:
    """Turns and their mean |d|, of the sequences that have turn_ids."""
    turns, sizes = [], []
    for at, record in enumerate(evidence.records):
        if record.turn_ids is not None:
            tokens = evidence.of_sequence(at)
            turns.append(record.turn_ids[evidence.position[tokens]])
            sizes.append(bounded(evidence.size[tokens]))
    if not turns:
        return [], []
    known, inverse = np.unique(np.concatenate(turns), return_inverse=True)
    return known, np.bincount(inverse, np.concatenate(sizes)) / np.bincount(inverse)


def _ages(evidence: Evidence) -> tuple[Any, Any]:
    """Age and mean |d| of the sequences with versions."""
    ages = [_lag(record) for record in evidence.records]
    counted = np.bincount(evidence.sequence, minlength=len(ages)) > 0
    known = [at for at, age in enumerate(ages) if age is not None and counted[at]]
    return [ages[at] for at in known], by_sequence(evidence, evidence.size)[known] if known else []


def by_sequence(evidence: Evidence, sizes: Any) -> Any:
    """[sequences] mean of [N] sizes; 0: none of its tokens was scored."""
    total = np.bincount(evidence.sequence, bounded(sizes), minlength=len(evidence.records))
    return total / np.maximum(np.bincount(evidence.sequence, minlength=len(evidence.records)), 1)


def _thinned(count: int) -> Any:
    return np.unique(np.linspace(0, count - 1, min(count, DRAWN)).astype(int))


def _normal(quantiles: Any) -> Any:
    from statistics import NormalDist

    grid = np.linspace(1e-7, 1 - 1e-7, 4001)
    return np.interp(quantiles, grid, [NormalDist().inv_cdf(float(one)) for one in grid])


def _lagged(evidence: Evidence, lag: int) -> float:
    ours, theirs = evidence.trainer, evidence.sampler
    if lag:
        early, late = (slice(None, -abs(lag)), slice(abs(lag), None))
        together = evidence.sequence[early] == evidence.sequence[late]
        ours, theirs = (ours[late], theirs[early]) if lag > 0 else (ours[early], theirs[late])
        ours, theirs = ours[together], theirs[together]
    known = np.isfinite(ours) & np.isfinite(theirs)
    if known.sum() < 3 or not np.std(ours[known]) or not np.std(theirs[known]):
        return 0.0
    return float(np.corrcoef(ours[known], theirs[known])[0, 1])


def _halves(evidence: Evidence) -> tuple[Any, Any]:
    """Mean d per token id in the even and in the odd sequences, of ids with 3 tokens in both."""
    known, inverse = np.unique(evidence.ids, return_inverse=True)
    d = bounded(evidence.d)
    means, counts = [], []
    for side in (0, 1):
        here = evidence.sequence % 2 == side
        counts.append(np.bincount(inverse[here], minlength=len(known)))
        means.append(np.bincount(inverse[here], d[here], minlength=len(known)) / np.maximum(counts[-1], 1))
    enough = np.minimum(*counts) >= 3
    return means[0][enough], means[1][enough]


def _lag(record: Record) -> float | None:
    if record.rollout_version is None or record.trainer_version is None:
        return None
    return float(np.mean(record.trainer_version) - np.mean(record.rollout_version))
