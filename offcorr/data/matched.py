"""``Matched``: the number of prompts of a training dataset that have a trace, so that none is ignored in silence."""

from __future__ import annotations

from typing import Any

from offcorr.data.traces import Traces
from offcorr.rollout.sampler import tokenize
from offcorr.stages.checks import warn_once

LOOKED_AT = 64
"""Groups of a dataset without a length after which it is said that no prompt has a trace."""

AT_ONCE = 1000
"""Number of prompts that are tokenised together."""

CURE = (
    "A prompt is looked up by its token ids, as the trainer makes them: check the texts, and for messages "
    "chat_template and chat_template_kwargs of Traces"
)


class Matched:
    """The prompts that have a trace: counted in the training dataset, or, where it has no length, as they come."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self.prompts: int | None = None
        """Number of different prompts of the training dataset; None: it has no length."""
        self.with_trace = 0
        """Number of these that have a trace."""
        self._looked_at = 0

    def count(self, trainer: Any) -> None:
        """Count those of the trainer's dataset.

        Raises:
            ValueError: none has a trace.
        """
        self.prompts, self.with_trace, self._looked_at = None, 0, 0
        dataset = trainer.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            return
        different = list({repr(prompt): prompt for prompt in dataset["prompt"]}.values())
        parts = [different[start : start + AT_ONCE] for start in range(0, len(different), AT_ONCE)]
        self.with_trace = sum(bool(self.traces.of(ids)) for part in parts for ids in tokenize(part, trainer))
        self.prompts = len(different)
        if not self.with_trace:
            raise ValueError(
                f"none of the {self.prompts} prompts of the training dataset has a trace; there are {self.traces!r}. "
                + CURE
            )

    def note(self, groups: int, with_trace: int) -> None:
        """Warn, of a dataset without a length, where none of its first prompts has a trace."""
        if self.prompts is not None or self.with_trace or self._looked_at >= LOOKED_AT:
            return
        self._looked_at += groups
        self.with_trace += with_trace
        if self._looked_at >= LOOKED_AT and not self.with_trace:
            warn_once(f"none of the first {self._looked_at} prompts has a trace; there are {self.traces!r}. {CURE}")

    def said(self, what: str) -> str:
        """The number in words, with a name for the traces; "" where the number of prompts is not known."""
        return "" if self.prompts is None else f"{self.with_trace} of {self.prompts} prompts have a {what}"
