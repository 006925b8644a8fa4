"""The report in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from offcorr.diagnose.causes import CAUSES, Finding
from offcorr.diagnose.diagnosis import UNSURE, Report
from offcorr.diagnose.questions import MANY, of_one_side, wanted


def text(report: Report, warnings: Iterable[str] = (), rescored: Iterable[str] = (), notice: str = "") -> str:
    """The report in words.

    Args:
        report: of ``diagnose``.
        warnings: sentences about the data.
        rescored: sentences about the outcome of ``--model``.
        notice: what has to be known before the verdict is read.

    >>> from offcorr.diagnose import Record, diagnose
    >>> rows = [{"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1, -2], "logp": [-1, -2.0000001]}] * 40
    >>> print(text(diagnose(map(Record.of, rows))).splitlines()[0])
    clean: the log-probs of trainer and sampler agree (confidence 0.70)
    """
    lines = [headline(report), *indented(notice)]
    lines += [line for one in to_do(report) for line in indented(one)]
    lines += ["", *_aligned(measured(report))]
    for place, finding in enumerate(report.causes, 1):
        lines += ["", *textwrap.wrap(_numbered(place, finding), 110)]
        lines += indented(f"Evidence: {finding.evidence}.")
        lines += indented(f"To do: {finding.advice}.")
    if rest := unnamed(report):
        lines += ["", *textwrap.wrap(rest, 110)]
    for title, sentences in (
        ("Scored again with --model", rescored),
        ("These data cannot tell", report.cannot_tell),
        ("About the data", warnings),
    ):
        if said := list(sentences):
            lines += ["", f"{title}:"]
            lines += [line for one in said for line in textwrap.wrap(one, 105, **BULLET)]
    return "\n".join([*lines, "", *textwrap.wrap(GLOSSARY, 110)])


BULLET: Any = {"initial_indent": " - ", "subsequent_indent": "   ", "break_long_words": False}

GLOSSARY = (
    "d = the trainer's log-prob of a sampled token (old_logp: under the weights that it takes for the sampler's) minus "
    "the sampler's (rollout_logp), and |d| its size without sign, in nats (natural logarithms: where d is 0.01 nats, "
    "the two probabilities differ by 1 %); p = the token's probability by the trainer. Two models hardly differ about "
    "a token that is nearly certain, so their difference is also given relative to 1 - p: |d| / (1 - p), the relative "
    "difference, of the tokens with p below 0.99, and with 0.01 added to 1 - p. Surprisal balance: how much less "
    "likely the sampled tokens are to the trainer than draws from its own distributions would be, the mean of (- "
    "log-prob - entropy). +- is one standard error. What a fit takes of the mean |d| is what is gone once that is "
    "taken away, one cause after the other: the cause may make more or less of it, as others move the same tokens. "
    "A cause for which nothing can be fitted is put down for all that the others leave, and may make less of it. "
    "Confidence: how clearly the cause is told from the other known ones, those that offcorr has a name for; 0.5: "
    "only just, 1: certainly. It is no probability, and a fault that has no name may leave the numbers of one that "
    "has: before much is changed, compute the log-probs of one short sequence by hand, and compare them with both "
    "sides'."
)


def headline(report: Report) -> str:
    """The verdict in one line."""
    if report.verdict in {one.cause for one in report.causes}:
        count = len(report.causes) - 1
        more = f"; {count} more cause{'s' * (count > 1)} below" if count else ""
        of_d = next((one for one in report.causes if one.part_of_d), None)
        if of_d is not None and not report.causes[0].of_d:
            of = ", and it may as well be another" * (of_d.confidence <= UNSURE)
            more += f", of the gap d itself: {of_d.cause} (confidence {of_d.confidence:.2f}{of})"
        if report.d_unexplained:
            more += f"; no known cause fits the gap d itself, {report.numbers['abs_mean']:.2g} nats"
        else:
            left = _unexplained(report)
            rough = any(one.rough for one in report.causes)
            more += f"; {left:.0%} of the mean |d| is not accounted for" * (left > MOST and not rough)
        among = f" among the {len(CAUSES)} known causes"
        if report.confidence <= UNSURE:
            among = ": it may as well be another, see what these data cannot tell"
        return f"{report.verdict}: {report.causes[0].title} (confidence {report.confidence:.2f}{among}){more}"
    said = {
        "clean": "the log-probs of trainer and sampler agree",
        "unknown": "trainer and sampler disagree, and no known cause fits",
    }
    if report.verdict == "clean" and of_one_side(report.evidence.records)[0] > MANY:
        said["clean"] += " where both are known"
    more = "; below, the trainer's own updates, which are smaller" * bool(report.causes)
    return f"{report.verdict}: {said[report.verdict]} (confidence {report.confidence:.2f}){more}"


def to_do(report: Report) -> list[str]:
    """Sentences about what was checked and what to do next, where no cause was found, or none of d.

    >>> from offcorr.diagnose import Record, diagnose
    >>> rows = [{"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1, -2], "logp": [-1, -2.0000001]}] * 40
    >>> to_do(diagnose(map(Record.of, rows)))[1]
    "To do: nothing about the log-probs. A correction for the engine is not needed for data like these if rollout_logp \
is as the engine reported it; computed afterwards, from the trainer's weights, it says nothing of those that sampled."
    """
    if report.causes and not report.d_unexplained:
        return []
    checked = f"Checked: {len(CAUSES)} causes, each as far as these data show it."
    if report.verdict == "clean":
        floor = (
            f"None was found: the log-probs differ by {report.numbers['abs_mean']:.2g} nats per token, no more than "
            "float32 rounding makes."
        )
        nothing = (
            "To do: nothing about the log-probs. A correction for the engine is not needed for data like these if "
            "rollout_logp is as the engine reported it; computed afterwards, from the trainer's weights, it says "
            "nothing of those that sampled."
        )
        if of_one_side(report.evidence.records)[0] > MANY:
            nothing = "To do: log the log-probs of both sides for every token: the others may differ."
        elif report.evidence.copied:
            nothing = (
                "To do: see that each side computed its log-probs itself, the sampler as it sampled: they are the "
                "same, number for number, as where one side's are a copy of the other's. If each did, a correction for "
                "the engine is not needed for data like these."
            )
        return [f"{checked} {floor}", nothing]
    return [
        f"{checked} None explains {'d, ' * bool(report.causes)}a difference of {report.numbers['abs_mean']:.2g} nats "
        "per token.",
        "It may be another checkpoint, prompt, template or other positions on one side, rows in another order, or a "
        "mistake in how one side computes, rescales or stores its log-probs.",
        "To do: compute the log-probs of one short sequence by hand, and compare them with both sides'; or give "
        "--model, the trainer's model, which scores some sequences again under one hypothesis after the other; or "
        f"{_further(report)}.",
    ]


ENOUGH = 200
"""Sequences from which on more of them would hardly show a cause."""


def _further(report: Report) -> str:
    """The data that would help, as words after "To do"."""
    fields = _with(wanted(report.evidence))
    if report.numbers["sequences"] < ENOUGH:
        return f"dump more sequences (a few hundred){fields}"
    apart = "diagnose a few of the first steps and a few of the last by themselves (what differs may change in a run)"
    return apart + (f", or dump sequences{fields}" if fields else "")


def _with(parts: list[str]) -> str:
    """
    >>> _with(["entropy", "versions"]), _with([])
    (', with entropy and versions', '')
    """
    listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
    return f", with {listed}" if parts else ""


def measured(report: Report) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each number."""
    numbers = report.numbers
    rows = [
        ("data", _data(numbers), ""),
        (
            "mean |d|",
            f"{numbers['abs_mean']:.3g} nats, largest {numbers['abs_max']:.3g}",
            "d: the trainer's old_logp minus the sampler's rollout_logp",
        ),
        (
            "mean ratio e^d",
            _with_error(
                numbers["ratio_mean"], numbers["ratio_mean_se"], ".4f" if numbers["ratio_mean"] < 1e4 else ".3g"
            ),
            "1 if both log-probs are right, even where the weights differ",
        ),
    ]
    if updated(report):
        moved = f"{numbers['updates_abs_mean']:.3g} nats, largest {numbers['updates_abs_max']:.3g}"
        whose = "updates of the trainer since" if updates(report) else "the trainer's own, of the same weights"
        rows.insert(2, (UPDATES, moved, f"{whose}; d leaves them out"))
    if "surprisal_balance" in numbers:
        value, error = numbers["surprisal_balance"], numbers["surprisal_balance_se"]
        some = numbers["surprisal_balance_tokens"]
        of = f" over the {some:,.0f} tokens with entropy" if some < numbers["tokens"] else ""
        rows.append(
            (
                "surprisal balance",
                f"{_with_error(value, error, '+.3f')} nats{of}",
                "0 if the tokens were drawn from the trainer's distributions",
            )
        )
    return rows


UPDATES = "mean |logp - old_logp|"


def updated(report: Report) -> bool:
    """Whether one of the causes is of ``logp`` and ``old_logp``."""
    return not all(one.of_d for one in report.causes)


def updates(report: Report) -> bool:
    """Whether updates of the trainer since the samples were drawn are one of the causes."""
    return any(one.cause == "policy_updates" for one in report.causes)


def _data(numbers: Mapping[str, float]) -> str:
    said = f"{numbers['tokens']:,.0f} tokens of {numbers['sequences']:,.0f} sequences"
    if numbers["sequences"] < numbers["dump_sequences"]:
        said += (
            f", a random sample of the dump's {numbers['dump_tokens']:,.0f} tokens of "
            f"{numbers['dump_sequences']:,.0f} sequences"
        )
    return said


def _with_error(value: float, error: float, digits: str) -> str:
    return f"{value:{digits}} +- {error:.2g}"


def _numbered(place: int, finding: Finding) -> str:
    return f"{place}. {finding.title} [{finding.cause}], {how_sure(finding)}"


def how_sure(finding: Finding) -> str:
    """The confidence in a cause, and its share of mean |d|; of updates and of what neither side logs, d has none."""
    of_gap = finding.part_of_d and finding.share >= 0.005
    takes = "put down for" if finding.remainder else "its fit takes" if finding.rough else "explains"
    share = f", {takes} {finding.share:.0%} of the mean |d|" if of_gap else ""
    return f"confidence {finding.confidence:.2f}{share}"


MOST = 0.5
"""Share of the mean |d| that no cause explains, from which the headline says so."""


def _unexplained(report: Report) -> float:
    """The share of the mean |d| that the causes leave; 0 where none of them is of it."""
    shares = [one.share for one in report.causes if one.part_of_d]
    return 1 - sum(shares) if shares else 0.0


def unnamed(report: Report) -> str:
    """A sentence on the part of mean |d| that the causes leave, where it is a tenth or more; "" else."""
    left = _unexplained(report)
    if left < 0.1:
        return ""
    return (
        f"{left:.0%} of the mean |d| is not accounted for: it has another cause, or is more of one above than its test "
        "can see."
    )


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    name, value = (max(len(row[at]) for row in rows if row[2]) for at in (0, 1))
    return [f"   {row[0]:{name}}  {row[1]:{value}}  ({row[2]})" if row[2] else f"   {row[1]}" for row in rows]


def indented(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="   ", subsequent_indent="   ", break_long_words=False)
