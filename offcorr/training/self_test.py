"""The self-test of a run's first batch: the reason not to begin the training, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from offcorr.stages.checks import one_of
from offcorr.training.semantics import MENDS, TRUNCATED, Kind, Semantics

SELF_TESTS = ("stop", "warn", "off")

OVERRIDE = (
    'To train all the same, set Monitor(self_test="warn"), or "off"; in a trainer\'s configuration '
    'monitor={"self_test": "warn"}'
)


DOUBT = "Another fault may leave the same numbers: compute the log-probs of one sequence by hand before much is changed"


def check_self_test(choice: str) -> None:
    """Raise ``ValueError`` for anything but one of ``SELF_TESTS``."""
    if choice not in SELF_TESTS:
        raise ValueError(f"self_test is {choice!r}{one_of(choice, SELF_TESTS)}")


NOISY: tuple[Kind, ...] = (*TRUNCATED, "temperature", "raw", "old_logp")
"""The kinds that the trainer's dropout can be taken for, whose noise makes its log-probs smaller on average."""


def refusal(found: Semantics | None, sampling: Mapping[str, float], dropout: float = 0.0) -> str:
    """The reason not to begin the training; "" where there is none, or where the trainer's dropout may be all of it.

    Args:
        sampling: settings of the sampler that change its distribution, as the configuration has them.
        dropout: the largest that is on where the trainer's log-probs are computed.
    """
    if found is None or not found.fatal or (dropout and found.kind in NOISY):
        return ""
    return (
        f"the training was not begun: in the first batch {found.sentence}: {mend(found, sampling)}. {DOUBT}. {OVERRIDE}"
    )


def warning(found: Semantics, sampling: Mapping[str, float], dropout: float = 0.0) -> str:
    """The finding of the first batch in words, and the change to make; arguments as in ``refusal``."""
    if dropout and found.kind in NOISY:
        return (
            f"in the first batch the engine's log-probs, or old_logp, are not the trainer's logp (mean |d| "
            f"{found.gap:.2g} over {found.tokens} tokens), and the trainer's dropout is on (up to {dropout:g}), which "
            "alone can make that: set it to 0 (disable_dropout=True); what differs then has another cause"
        )
    return f"in the first batch {found.sentence}: {mend(found, sampling)}. {DOUBT}"


def mend(found: Semantics, sampling: Mapping[str, float]) -> str:
    """The change to make after the first batch, with the settings that the configuration is known to have."""
    if not sampling or found.kind not in TRUNCATED:
        return found.mend
    settings = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
    return f"the configuration sets {settings}; {MENDS['kept_mass']}"
