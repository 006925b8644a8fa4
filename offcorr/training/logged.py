"""The metrics that a training loop logs: by default those of ``SHORT``, each of which answers a question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from offcorr.stages.checks import one_of
from offcorr.training.field_metrics import ENGINE, FIELD, STALENESS, with_aliases
from offcorr.training.origins import PREFIX as ORIGIN

LOSS = "offcorr/loss/"

CHOICES = ("short", "full", "aliases")
"""The choices of what is logged: ``SHORT``, every metric, every metric also under other frameworks' names."""

ROUNDING = 1e-5
"""Mean |log-ratio| (nats) up to which two computations of the same float32 log-probs differ."""


class Answer(NamedTuple):
    """A metric, or several (``*`` is any text), and the question that it answers.

    logged: when; "not 0": only where it is not; "in force": where an option asks for it, which alone measures it;
        "full": in the long logs alone.
    option: that one, where it has a name of its own.
    formula: of those that have none with their metric.
    """

    name: str
    question: str
    logged: str = "always"
    option: str = ""
    formula: str = ""


SHORT = (
    Answer(STALENESS + "lag", "How many optimizer updates old are the samples?"),
    Answer(STALENESS + "abs_mean", "How far has the policy moved since it sampled?"),
    Answer(
        STALENESS + "ess_seq",
        "How many of the sequences still count, as a share, once each is weighted by how far the policy moved?",
    ),
    Answer(ENGINE + "abs_mean", "How far is the engine from the trainer, with the anchor's weights?"),
    Answer(
        ENGINE + "ess_seq",
        "How many of the sequences still count, as a share, once each is weighted by the engine's error?",
    ),
    Answer(
        LOSS + "multiplier_vs_ratio", "How large is a token's multiplier on average, compared with the plain ratio?"
    ),
    Answer(LOSS + "dropped", "What share of the tokens did the correction drop?"),
    Answer(LOSS + "damped", "What share of the tokens did the correction damp?"),
    Answer(LOSS + "amplified", "What share of the tokens did the correction amplify?"),
    Answer(LOSS + "ess_after", "How many of the tokens still count, as a share, after the correction?"),
    Answer(ORIGIN + "*/share", "What share of the sequences has this origin?", "in force"),
    Answer(ORIGIN + "*/lag", "How many optimizer updates old are the sequences of this origin?", "in force"),
    Answer(
        ORIGIN + "*/ess_seq",
        "How many sequences of this origin still count, as a share, once each is weighted by its ratio?",
        "in force",
    ),
    Answer(ORIGIN + "*/kept", "What share of the tokens of this origin does the loss learn from?", "in force"),
    Answer("entropy", "How certain is the policy?"),
    Answer(LOSS + "unscored", "How many tokens could the engine not score?", "not 0"),
    Answer(LOSS + "nonfinite", "How many tokens gave no finite number to train on?", "not 0"),
    Answer(LOSS + "skipped", "What share of the sequences was left out of the forward pass?", "not 0"),
    Answer("offcorr/monitor/*", "Which series is out of its range, by how much, and what is masked?", "in force"),
    Answer(
        "lr_scale",
        "What is the logged learning_rate multiplied by in the step?",
        "in force",
        "ess_lr",
        "min(1, ESS / n / ess_base), its square root under ess_lr='sqrt'; ESS / n = (sum w)^2 / (n sum w^2) over "
        "sequences, w = e^(sum of logp - rollout_logp), staleness and engine together, so that the ess_seq of either "
        "is another number; of a log that covers several optimizer steps, the mean of their factors",
    ),
    Answer(
        "ess_base",
        "Which effective sample size counts as healthy?",
        "in force",
        "ess_base='auto'",
        "mean of ESS / n, as lr_scale has it, over the optimizer steps on samples of the weights of now",
    ),
    Answer("offcorr/control/*", "Which bounds did the controllers choose?", "in force"),
    Answer("offcorr/schedule/*", "Which values do the scheduled options have?", "in force"),
    Answer("offcorr/anchor/*", "How much is trained on, and was the anchor started anew?", "in force"),
)
"""The metrics of ``log_metrics="short"``."""


LONG = (
    Answer(
        STALENESS + "lag_max",
        "How many optimizer updates old is the oldest sample?",
        "full",
        formula="max over tokens of the trainer's version minus the version that sampled, counted as lag is",
    ),
)
"""Those that the loop adds to the long logs alone."""


def logged(computed: Mapping[str, float], choice: str, train: bool = True) -> dict[str, float]:
    """The metrics to log, of those that were computed.

    Args:
        choice: one of ``CHOICES``.
        train: False: of an evaluation, which makes no update: without the metrics of a loss, a controller or a
            schedule, and without the series of two policies that agree to rounding.

    Raises:
        ValueError: an unknown choice.

    >>> logged({"offcorr/staleness/lag": 3.0, "offcorr/loss/kept": 1.0, "offcorr/loss/unscored": 0.0}, "short")
    {'offcorr/staleness/lag': 3.0}
    """
    if choice not in CHOICES:
        raise ValueError(f"choice is {choice!r}{one_of(choice, CHOICES)}")
    if not train:
        computed = dict(_of_evaluation(computed))
    if choice == "aliases":
        return with_aliases(computed)
    full = {name: value for name, value in computed.items() if not name.startswith(FIELD)}
    return full if choice == "full" else {name: value for name, value in full.items() if _in_short(name, value)}


def _in_short(name: str, value: float) -> bool:
    answer = _answer(name)
    return answer is not None and (value != 0 or answer.logged != "not 0")


@cache
def _answer(name: str) -> Answer | None:
    return next((answer for answer in SHORT if fnmatchcase(name, answer.name)), None)


def _of_evaluation(computed: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    differs = {gap: computed.get(gap + "abs_mean", 0.0) > ROUNDING for gap in (ENGINE, STALENESS)}
    differs[FIELD] = differs[ENGINE if ENGINE + "abs_mean" in computed else STALENESS]
    for name, value in computed.items():
        of = next((prefix for prefix in differs if name.startswith(prefix)), None)
        if differs[of] if of else not name.startswith("offcorr/"):
            yield name, value
