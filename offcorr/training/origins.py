"""``ORIGINS``: the names of where a sequence came from; ``Batch.origin`` holds their indices."""

from __future__ import annotations

from collections.abc import Iterable

from offcorr.stages.checks import one_of

ORIGINS = ("fresh", "replay", "demonstration", "prefix")
"""Names of where a sequence came from, at the index that stands for each in ``Batch.origin``:

- "fresh": sampled for this generation;
- "replay": sampled for an earlier one, by this run or another, with the log-probs that were recorded then;
- "demonstration": written by another model or by a person;
- "prefix": sampled for this generation after the first tokens of a stored trace, which are masked.
"""


def origin_ids(names: Iterable[str]) -> list[int]:
    """The indices of names of ``ORIGINS``.

    Raises:
        ValueError: an unknown name.

    >>> origin_ids(["fresh", "demonstration"])
    [0, 2]
    """
    names = list(names)
    for name in names:
        if name not in ORIGINS:
            raise ValueError(f"origin is {name!r}{one_of(name, ORIGINS)}")
    return [ORIGINS.index(name) for name in names]
