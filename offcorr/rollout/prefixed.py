"""``Prefixed``: prompts whose completions may begin with given tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offcorr.rollout.decode import Decoded


class Prefixed:
    """Prompts, each with the first tokens of its completion, which are given rather than sampled.

    Args:
        prompt_ids: token ids of the prompts.
        prefixes: for each prompt, token ids, of any number; None: none has any.
        longest: tokens of a completion, its prefix included.

    Raises:
        ValueError: the numbers of prompts and prefixes differ, or a prefix leaves no token to sample.

    >>> request = Prefixed([[5], [6]], [[7, 8], []], longest=4)
    >>> request.contexts, request.limits
    ([[5, 7, 8], [6]], [2, 4])
    >>> request.output(Decoded([[9], [9, 1]], [[-0.5], [-1.0, -2.0]]), [[-0.5], [-1.0, -2.0]], version=3)["env_mask"]
    [[0, 0, 1], [1, 1]]
    """

    def __init__(
        self, prompt_ids: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]] | None, longest: int
    ) -> None:
        if prefixes is not None and len(prefixes) != len(prompt_ids):
            raise ValueError(f"prefixes has {len(prefixes)} entries, expected {len(prompt_ids)}, one for each prompt")
        for row, prefix in enumerate(prefixes or []):
            if len(prefix) >= longest:
                raise ValueError(
                    f"prefixes[{row}] has {len(prefix)} tokens, expected fewer than max_completion_length={longest}, "
                    "so that one at least is sampled"
                )
        self._given = prefixes is not None
        self.prompt_ids = [list(ids) for ids in prompt_ids]
        self.prefixes = [list(ids) for ids in prefixes or [[]] * len(prompt_ids)]
        self.longest = longest

    @property
    def contexts(self) -> list[list[int]]:
        """The tokens that a completion is sampled after: the prompt and its prefix."""
        return [prompt + prefix for prompt, prefix in zip(self.prompt_ids, self.prefixes, strict=True)]

    @property
    def limits(self) -> list[int]:
        """The number of tokens to sample for each prompt, at most."""
        return [self.longest - len(prefix) for prefix in self.prefixes]

    def output(self, decoded: Decoded, old_logp: list[list[float]], version: int) -> dict[str, list[Any]]:
        """The result of a ``rollout_func``.

        Prefixes stand at the beginning of the completions, with log-probs NaN and ``env_mask`` 0, a key that is there
        only where prefixes were given.

        Args:
            decoded: what was sampled after ``contexts``.
            old_logp: its log-probs (nats) in the trainer's precision.
            version: of the weights that sampled.
        """

        def after(start: list[Any], rows: list[list[Any]]) -> list[list[Any]]:
            return [start * len(prefix) + row for prefix, row in zip(self.prefixes, rows, strict=True)]

        rows = decoded.completion_ids
        output: dict[str, list[Any]] = {
            "prompt_ids": self.prompt_ids,
            "completion_ids": [prefix + row for prefix, row in zip(self.prefixes, rows, strict=True)],
            "logprobs": after([math.nan], decoded.logp),
            "old_logp": after([math.nan], old_logp),
            "rollout_version": [version] * len(rows),
        }
        if self._given:
            output["env_mask"] = after([0], [[1] * len(row) for row in rows])
        return output
