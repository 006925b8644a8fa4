"""The report as one self-contained HTML file: verdict, causes, plots, and the sequences that are furthest off."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable

import numpy as np

from offcorr.diagnose.captions import how_to_read
from offcorr.diagnose.diagnosis import Report
from offcorr.diagnose.evidence import Evidence
from offcorr.diagnose.plots import bounded, by_sequence, figure, plots
from offcorr.diagnose.text import UPDATES, headline, how_sure, measured, to_do, unnamed, updated

Decode = Callable[[int], str]
WORST = 8
"""Sequences shown with their tokens."""
LONGEST_SHOWN = 400
"""Tokens shown of one sequence."""
WITHOUT_TEXT = (
    "The numbers are token ids. The same command with <code>--tokenizer NAME</code>, the folder or hub name of the "
    "model, shows the text of the tokens."
)

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c;
overflow-wrap: anywhere } h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem }
table { border-collapse: collapse } td { padding: .25rem 1.4rem .25rem 0; border-bottom: 1px solid #ddd;
vertical-align: top } img { width: 100% }
@media (min-width: 40.1rem) { td:first-child { white-space: nowrap } td:nth-child(2) { min-width: 11rem } }
@media (max-width: 40rem) { td { display: block; padding: 0; border: 0 } td:first-child { margin-top: .6rem;
font-weight: 600 } }
.note, figcaption { color: #555 } .tokens { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap }
.tokens span { padding: .1rem .05rem } figure { margin: 0 } figcaption { font-size: .9rem }
.plots { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)) }
"""


def page(
    report: Report,
    warnings: Iterable[str] = (),
    decode: Decode | None = None,
    rescored: Iterable[str] = (),
    notice: str = "",
) -> str:
    """The report as HTML with the plots inside; it loads nothing from elsewhere.

    Args:
        warnings: sentences about the data.
        decode: the text of a token id; None: the ids are shown.
        rescored: sentences about the outcome of ``--model``.
        notice: what has to be known before the verdict is read.
    """
    parts = [
        f"<h1>{_said(headline(report))}</h1>",
        *(f"<p>{_said(one)}</p>" for one in (notice, *to_do(report)) if one),
    ]
    parts += [_numbers(report)]
    if report.causes:
        parts += ["<h2>Causes and what to do</h2>", _causes(report)]
    for title, sentences in (
        ("Scored again with --model", rescored),
        ("These data cannot tell", report.cannot_tell),
        ("About the data", warnings),
    ):
        if listed := [f"<li>{_said(one)}</li>" for one in sentences]:
            parts += [f"<h2>{title}</h2>", "<ul>", *listed, "</ul>"]
    parts += ["<h2>Plots</h2>", f'<p class="note">{_said(how_to_read(report))}</p>']
    parts += ['<div class="plots">', *(figure(*plot) for plot in plots(report)), "</div>"]
    parts += ["<h2>Sequences that are furthest off</h2>", _worst(report, decode)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>offcorr diagnose: {_said(report.verdict)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _said(text: object) -> str:
    return html.escape(str(text))


MEANINGS = {
    "mean |d|": "d is the trainer's log-prob of a sampled token, under the weights that it takes for the sampler's "
    "(old_logp), minus the sampler's own (rollout_logp), and |d| its size without sign. A log-prob is the natural "
    "logarithm of a token's probability, in nats; where d is 0.01 nats, the two probabilities differ by 1 %. 0 "
    "everywhere would be exact agreement.",
    UPDATES: "How far the trainer's own updates have moved its log-probs since the tokens were sampled: staleness, "
    "which is not part of d.",
    "mean ratio e^d": "e^d is the trainer's probability of a token divided by the sampler's. Its mean is 1 if both "
    "log-probs are right, even where the weights differ.",
    "k3": "The mean of e^d - 1 - d, an estimate of how far the two distributions are apart (the KL divergence): 0 if "
    "they are the same, and never negative.",
    "surprisal balance": "How much less likely the sampled tokens are to the trainer than draws from its own "
    "distributions would be: the mean of (- log-prob - entropy). It is 0 if the tokens were drawn from them.",
}
"""One or two plain sentences for each number of the report."""

ERRORS = (
    "± is one standard error: by about this much a number differs by chance between two dumps of this size from the "
    "same weights. A number that is several standard errors away from its usual value there is hardly chance; over the "
    "steps of a run it may well change by more."
)
READING = (
    "p is the probability that the trainer gives a token. Two models hardly differ about one that is nearly certain (p "
    "close to 1), so their difference is also given relative to 1 - p: |d| / (1 - p), the relative difference, of the "
    "tokens with p below 0.99, and with 0.01 added to 1 - p. A confidence of 0.5 means that a cause is only just "
    "told from the other known ones, those that offcorr has a name for, and 1 that it certainly is. It is no "
    "probability, and a fault that has no name may leave the numbers of one that has."
)


def _numbers(report: Report) -> str:
    rows = [(name, value) for name, value, _ in measured(report)]
    rows.insert(4 if updated(report) else 3, ("k3", f"{report.numbers['k3']:.3g} nats"))
    lines = "".join(
        f"<tr><td>{_said(name)}</td><td>{_said(value).replace('+-', '±')}</td>"
        f"<td>{_said(MEANINGS.get(name, ''))}</td></tr>"
        for name, value in rows
    )
    return f'<table>{lines}</table><p class="note">{_said(ERRORS)}</p>'


def _causes(report: Report) -> str:
    parts = [f'<p class="note">{_said(READING)}</p>']
    parts += [
        f"<h3>{place}. {_said(one.title)}</h3>\n<p><code>{one.cause}</code>, {_said(how_sure(one))}</p>\n"
        f"<p><b>Evidence:</b> {_said(one.evidence)}.</p>\n<p><b>To do:</b> {_said(one.advice)}.</p>\n"
        f'<p class="note">Test statistic, the number by which this cause is told: {one.statistic:.3g} ± {one.se:.1g}; '
        f"threshold, the value beyond which it is named: {one.threshold:.3g}.</p>"
        for place, one in enumerate(report.causes, 1)
    ]
    if said := unnamed(report):
        parts.append(f"<p>{_said(said)}</p>")
    return "\n".join(parts)


# -- sequences -----------------------------------------------------------------------------------------------


def _worst(report: Report, decode: Decode | None) -> str:
    """By d, or where updates of the trainer are the verdict, by the whole difference between trainer and sampler."""
    evidence = report.evidence
    with_updates = report.verdict == "policy_updates"
    off = np.nan_to_num(evidence.now - evidence.sampler) if with_updates else evidence.d
    name = "logp - rollout_logp" if with_updates else "d"
    scale = min(max(float(np.quantile(bounded(np.abs(off)), 0.99)), 1e-6), 1.0)
    sizes = by_sequence(evidence, np.abs(off))
    shown = np.argsort(-sizes, kind="stable")[:WORST].tolist()
    parts = [
        f'<p class="note">The largest mean |{name}| first; a heading names the file and the row in it, counted from 1. '
        "Each token of the completion; red where the trainer "
        f"{'now finds' if with_updates else 'finds'} it less likely than the sampler did, blue where more; full colour "
        f"at a difference of {scale:.2g} nats. Point at one for its numbers.</p>"
    ]
    if decode is None:
        parts.insert(0, f"<p>{WITHOUT_TEXT}</p>")
    for at in shown:
        record, tokens = evidence.records[at], evidence.of_sequence(at)
        where = record.where or f"sequence {at + 1}"
        pieces = []
        for place in range(tokens.start, min(tokens.stop, tokens.start + LONGEST_SHOWN)):
            id = int(evidence.ids[place])
            word = decode(id) if decode is not None else str(id)
            colour = "220,40,40" if off[place] < 0 else "40,80,220"
            strength = min(abs(bounded(off[place])) / scale, 1.0)
            pieces.append(
                f'<span style="background:rgba({colour},{strength:.2f})" title="{_of_token(evidence, place)}">'
                f"{_said(word)}</span>"
            )
        if (more := tokens.stop - tokens.start - LONGEST_SHOWN) > 0:
            pieces.append(f" … and {more:,} more tokens")
        gap = "" if decode is not None else " "
        parts.append(
            f"<h3>{_said(where)}: mean |{name}| {sizes[at]:.3g} nats</h3><p class=tokens>{gap.join(pieces)}</p>"
        )
    return "\n".join(parts)


def _of_token(evidence: Evidence, place: int) -> str:
    """The numbers of one token, by the names that the dump has for them."""
    now = "" if np.isnan(evidence.now[place]) else f", logp {evidence.now[place]:.3f} (after the trainer's updates)"
    return (
        f"id {evidence.ids[place]}: old_logp {evidence.trainer[place]:.3f}, rollout_logp "
        f"{evidence.sampler[place]:.3f}, d {evidence.d[place]:+.3f}{now}"
    )
