"""``Cause``: what can make trainer and sampler disagree, how it is told from logged data, and what to change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from offcorr.diagnose.evidence import Evidence

Stage = Literal["values", "sampling", "unlogged", "policies", "updates"]
STAGES: tuple[Stage, ...] = ("values", "sampling", "unlogged", "policies", "updates")
"""The order in which causes are looked for: values that are no log-probs of these tokens; distributions that one side
transformed; those that neither logged; two policies that differ; updates on the batch itself."""


class Found(NamedTuple):
    """A cause that a test found.

    Args:
        statistic: what the test computed; ``error``: its standard error; ``threshold``: beyond it the cause is named.
        margin: how far beyond, in units in which 1 is convincing and 3 is certain.
        sentence: the evidence in words, with the numbers.
        left: the evidence without what the cause explains; None: nothing that a further cause could explain.
        share: of the mean |d|, what the cause explains; None: the part that is missing in ``left``.
        surest: the confidence at most, where another cause can leave the same.
        rough: the share is that of a fit, which takes some of what other causes make, or leaves some of this one's.
        of_d: False: the cause leaves a difference of ``logp`` and ``old_logp``, which the share compares with d.
        of_zeros: it is read of log-probs that are exactly 0, as those of tokens are that a truncation leaves alone.
    """

    statistic: float
    error: float
    threshold: float
    margin: float
    sentence: str
    left: Evidence | None = None
    share: float | None = None
    surest: float = 1.0
    rough: bool = False
    of_d: bool = True
    of_zeros: bool = False


def _never(evidence: Evidence) -> bool:
    return False


class Alternative(NamedTuple):
    """A cause that leaves the same traces in logged data as another.

    Args:
        words: the alternative.
        how: the way to find out that needs no further field.
        fields: of a record; they would decide, where the dump lacks them.
        settled: whether the evidence excludes the alternative.
        cause: the id of the cause that it is; where that is named, too, there is no question.
    """

    words: str
    how: str
    fields: tuple[str, ...] = ()
    settled: Callable[[Evidence], bool] = _never
    cause: str = ""


NEARLY_GREEDY = Alternative(
    "a temperature near 0, at which the sampler is nearly certain of the likeliest token",
    "compare the temperatures of both sides",
    settled=lambda evidence: not evidence.nearly_greedy or not bool((evidence.sampler != 0).any()),
)


class Cause(ABC):
    """One cause.  A subclass has the three texts and ``found``; it is known once its module is imported.

    Class attributes:
        id: its name in reports.
        stage: when it is looked for.
        title: what happened, in a few words.
        advice: what to change, with the option's name in TRL and vLLM.
        not_told_from: causes that leave the same traces in logged data.
        robust: no noise, such as dropout's, leaves its traces.
        of_passes: it can make the trainer's log-probs of one context differ from one forward pass to the next.
    """

    id: ClassVar[str]
    stage: ClassVar[Stage]
    title: ClassVar[str]
    advice: ClassVar[str]
    not_told_from: ClassVar[tuple[Alternative, ...]] = ()
    robust: ClassVar[bool] = False
    of_passes: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        for name in ("id", "stage", "title", "advice"):
            if not isinstance(getattr(cls, name, None), str):
                raise TypeError(f"{cls.__name__}.{name} is missing, expected a string")
        if cls.stage not in STAGES:
            raise ValueError(f"{cls.__name__}.stage is {cls.stage!r}, expected one of {', '.join(STAGES)}")
        if cls.id in CAUSES:
            raise ValueError(f"{cls.__name__}.id is {cls.id!r}, which {type(CAUSES[cls.id]).__name__} has already")
        CAUSES[cls.id] = cls()

    @abstractmethod
    def found(self, evidence: Evidence) -> Found | None:
        """Whether the evidence shows this cause."""


CAUSES: dict[str, Cause] = {}
"""Every cause by its id."""


@dataclass(frozen=True)
class Finding:
    """A named cause, as it is reported.

    Args:
        cause: the id.
        confidence: between 0 and 1, among the known causes.
        statistic, se, threshold: of the test that found it.
        share: of the mean |d|, what is gone once the cause is taken away.
        rough: the cause makes more or less of mean |d| than that: it was put down for all that others leave, or what
            is taken away is a fit of it, and other causes move the same tokens.
        of_d: False: it is of no d, but of ``logp`` and ``old_logp``.
        remainder: nothing was fitted: the share is all that other causes leave, and it may make less of it.
        title, evidence, advice: in words.
    """

    cause: str
    confidence: float
    statistic: float
    se: float
    threshold: float
    share: float
    title: str
    evidence: str
    advice: str
    rough: bool = False
    of_d: bool = True
    remainder: bool = False

    @property
    def part_of_d(self) -> bool:
        """Whether it explains a part of mean |d|; the trainer's updates and what neither side logs do not."""
        return self.of_d and CAUSES[self.cause].stage != "unlogged"

    def as_dict(self) -> Mapping[str, Any]:
        """For JSON."""
        return asdict(self)


def confidence(margin: float) -> float:
    """Between .5, at the threshold, and 1."""
    return 1 - 0.5 * math.exp(-max(margin, 0.0))
