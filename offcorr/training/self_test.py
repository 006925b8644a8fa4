"""The self-test of a run's first batch: the reason not to begin the training, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from offcorr.stages.checks import one_of
from offcorr.training.semantics import MENDS, TRUNCATED, Semantics

SELF_TESTS = ("stop", "warn", "off")

OVERRIDE = (
    'To train all the same, set Monitor(self_test="warn"), or "off"; in a trainer\'s configuration '
    'monitor={"self_test": "warn"}'
)


def check_self_test(choice: str) -> None:
    """Raise ``ValueError`` for anything but one of ``SELF_TESTS``."""
    if choice not in SELF_TESTS:
        raise ValueError(f"self_test is {choice!r}{one_of(choice, SELF_TESTS)}")


def refusal(found: Semantics | None, sampling: Mapping[str, float]) -> str:
    """The reason not to begin the training; "" where there is none.

    Args:
        sampling: settings of the sampler that change its distribution, as the configuration has them.
    """
    if found is None or not found.fatal:
        return ""
    return f"the training was not begun: in the first batch {found.sentence}: {mend(found, sampling)}. {OVERRIDE}"


def mend(found: Semantics, sampling: Mapping[str, float]) -> str:
    """The change to make after the first batch, with the settings that the configuration is known to have."""
    if not sampling or found.kind not in TRUNCATED:
        return found.mend
    settings = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
    return f"the configuration sets {settings}; {MENDS['kept_mass']}"
