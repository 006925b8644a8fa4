"""``offcorr metrics``: a list of all metrics, or all about one."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from offcorr.cli.guide import GUIDE, HINTS
from offcorr.cli.output import PAGES, Refusal, listing, paragraph, terminal_width
from offcorr.cli.tables import markdown, metrics_table
from offcorr.lab.text import listed
from offcorr.metrics import LOSS, MISMATCH, Metric
from offcorr.stages.checks import nearest
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import LONG, SHORT, Answer

SERIES = {"offcorr/staleness/": MISMATCH, "offcorr/engine/": MISMATCH, "offcorr/loss/": LOSS}
SYMBOLS = {
    "offcorr/staleness/": "d = logp - old_logp of a token, in nats; the first policy is the trainer's now, the "
    "second the one of the anchor, which is the one that sampled where the anchor is a snapshot",
    "offcorr/engine/": "d = old_logp - rollout_logp of a token, in nats; the first policy is the anchor's, computed by "
    "the trainer, the second the engine's",
    "offcorr/loss/": "c: the factor on a token's advantage in the gradient, weights included; r = e^(logp - old_logp): "
    "the plain ratio",
}
LEGEND = (
    "d: a token's log-ratio in nats, logp - old_logp for staleness and old_logp - rollout_logp for the engine; r = "
    "e^d of staleness; c: the factor on a token's advantage in the gradient; ESS / n: effective sample size, as a "
    "share. Names with the same formula column are joined by commas, in the order of its parts. values: raw ones "
    "come before any weight, gate or rejection, applied ones are what the correction made of them; the training loop "
    "adds the last ones, of which the formula is a question and * any text. accumulator: how "
    "the values of several "
    'micro-batches and ranks are merged. The trainers log about ten of these (log_metrics="short"), or all ("full").'
)
NEXT = "`offcorr metrics NAME` explains one: `offcorr metrics ess_seq`."
_OF_TRL = re.compile(
    r"rewards?(_std|/.*)?|frac_reward_zero_std|completions?/.*|num_tokens|step_time|grad_norm|learning_rate|sampling/.*"
)
_CLIPPED = re.compile(r"clip_?(ratio|frac)")  # TRL's clip_ratio/..., verl's pg_clipfrac


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``metrics``."""
    parser = commands.add_parser(
        "metrics",
        help="list every metric; with a NAME, all about one",
        description="Lists the metrics that offcorr logs, with their formulas. With a NAME: its meaning, its formula, "
        "its healthy range and what to do outside it.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a metric, as it is logged (offcorr/loss/dropped), or the end of a name",
    )
    parser.add_argument("--markdown", action="store_true", help="print the list as a Markdown table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    if options.names:
        if options.markdown:
            raise Refusal("--markdown prints the table of all metrics and takes no NAME")
        print("\n\n".join(about(name, terminal_width() or 100) for name in options.names))
    elif options.markdown:
        print(markdown(metrics_table()))
    else:
        width = terminal_width()
        print(listing(metrics_table(), width))
        print(paragraph("", LEGEND, NEXT), file=sys.stdout if width else sys.stderr)
    return 0


class Entry(NamedTuple):
    """A metric by its full name: of a series, or one that only the short log names, whose name may hold ``*``."""

    name: str
    metric: Metric | None = None


def entries() -> list[Entry]:
    """Every metric that this library can log, under its own name."""
    found = [
        Entry(prefix + output, metric)
        for prefix, series in SERIES.items()
        for metric in series
        for output in metric.outputs or (metric.name,)
    ]
    known = {entry.name for entry in found}
    return [*found, *(Entry(answer.name) for answer in (*SHORT, *LONG) if answer.name not in known)]


def find(name: str) -> list[Entry]:
    """The metrics with this name, or whose names end with it, in front of which a tracker may have put "train/".

    Raises:
        Refusal: there is none; the message names the nearest.
    """
    name = name.removeprefix("train/").strip("/")
    every = entries()
    if found := [one for one in every if f"/{one.name}".endswith(f"/{name}") or fnmatchcase(name, one.name)]:
        return found
    if ends := [one.name.removeprefix(f"offcorr/{name}/") for one in every if one.name.startswith(f"offcorr/{name}/")]:
        raise Refusal(f"{name!r} is a series of metrics, name one: {listed(ends)}")
    if _CLIPPED.search(name):
        raise Refusal(
            f"{name!r} is of a loss of the trainer's own, and a correction does not log it; the nearest to it are "
            "clipped and dropped: `offcorr metrics clipped dropped`"
        )
    if _OF_TRL.fullmatch(name):
        raise Refusal(
            f'{name!r} is logged by the trainer, not by offcorr: TRL explains its own under "Logged metrics" of '
            "https://huggingface.co/docs/trl/grpo_trainer"
        )
    if by_option := [answer.name for answer in SHORT if name and answer.option == name]:
        raise Refusal(
            f"{name!r} is an option, which logs {listed(by_option)}: `offcorr metrics {' '.join(by_option)}` "
            "explains it"
        )
    last = {one.name.rpartition("/")[2] for one in every} - {"*"}
    series = [prefix.split("/")[1] for prefix in SERIES]
    known = [one.name for one in every] if "/" in name else [*last, *ALIASES, *series]
    of_it = [one.name for one in every if one.metric and re.search(rf"\b{re.escape(name)}\b", one.metric.formula, re.I)]
    found_in = f", a word in the formula of {listed(of_it)};" if 0 < len(of_it) < 8 else ""
    raise Refusal(f"unknown metric {name!r}{found_in or nearest(name, known, ';')} `offcorr metrics` lists all")


def about(name: str, width: int) -> str:
    """Pages about the metrics of a name: meaning, formula, healthy range, what to do outside it, when it is logged.

    Raises:
        Refusal: the name is unknown.
    """
    alias = ALIASES.get(name)
    if alias is None:
        return "\n\n".join(_page(entry, width) for entry in find(name))
    if alias.formula:
        noted = f"; {alias.note}" * bool(alias.note)
        return f"{name}\n" + _labelled("formula", f"{alias.formula}; d = {_ENGINE}{noted}", width)
    noted = f" ({alias.note})" * bool(alias.note)
    head = f'{name}: {alias.framework}\'s name of this one{noted}, logged with log_metrics="aliases"'
    return f"{head}\n" + about(f"offcorr/engine/{alias.source}", width)


_ENGINE = SYMBOLS["offcorr/engine/"].removeprefix("d = ")


def _page(entry: Entry, width: int) -> str:
    prefix, _, last = entry.name.rpartition("/")
    advice, answer = GUIDE.get(entry.name), next((one for one in (*SHORT, *LONG) if one.name == entry.name), None)
    parts = {"meaning": answer.question if answer else "", "formula": answer.formula if answer else ""}
    if advice is not None:
        symbols = SYMBOLS.get(prefix + "/", "") if re.search(r"\b[cdr]\b", advice.formula) else ""
        parts |= {"formula": advice.formula, "where": symbols}
        parts |= {"healthy": advice.healthy, "if outside": advice.outside}
    elif entry.metric is not None:
        parts |= {"formula": _formula(entry.metric, last), "where": SYMBOLS[prefix + "/"]}
        parts["healthy"] = HINTS.get(last, "No source names a range: compare it with the start of the run.")
    said = f"{advice.healthy} {advice.outside}" if advice else ""
    if re.search(r"\b([Oo]urs?|table)\b", said):
        parts["ours"] = "means over our runs of the demo, two that learned and one that collapsed: docs/metrics.md"
    parts["logged"] = 'log_metrics="full"'
    if answer is not None and answer.logged != "full":
        parts["logged"] = f"{_when(answer)}, in the short log and the full one"
    parts["more"] = f"{PAGES}/metrics.md"
    return "\n".join([entry.name, *(_labelled(label, text, width) for label, text in parts.items() if text)])


def _when(answer: Answer) -> str:
    return f"where the option {answer.option} asks for it" if answer.option else _LOGGED[answer.logged]


_LOGGED = {
    "always": "wherever the number exists",
    "not 0": "where it is not 0",
    "in force": "where an option asks for it",
}


def _formula(metric: Metric, output: str) -> str:
    """A metric's formula; where several share one, as "of e^d: mean, ESS / n", the part that is its own."""
    if len(metric.outputs) < 2:
        return metric.formula
    of, _, parts = metric.formula.rpartition(": ")
    own = dict(zip(metric.outputs, parts.split(", "), strict=True))[output]
    return f"{own} {of}".rstrip()


def _labelled(label: str, text: str, width: int) -> str:
    """Markdown as plain text, after a label: of a link the words, and its address where that is a page."""
    text = re.sub(r"\[([^\]]+)\]\((https?:[^)]+)\)", r"\1 (\2)", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)#]+\.md)\)", r"\1 (docs/\2)", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return textwrap.fill(
        text,
        max(40, width),
        initial_indent=f"  {label:12}",
        subsequent_indent=" " * 14,
        break_long_words=False,
        break_on_hyphens=False,
    )
