"""Prepares docstrings for the API page: examples become code blocks, ``low, high: ...`` becomes an entry for each name.

Loaded by mkdocstrings (``mkdocs.yml``); the docstrings themselves stay readable where they are written.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

JOINT = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", flags=re.M)


class Prepared(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that griffe has loaded."""
        if obj.docstring:
            obj.docstring.value = prepared(obj.docstring.value)


def prepared(docstring: str) -> str:
    """The docstring as the Google style has it.

    >>> prepared("Args:\\n    low, high: bounds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Args:', '    low: bounds.', '    high: bounds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    docstring = JOINT.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), docstring)
    paragraphs = re.split(r"\n{2,}", docstring)
    return "\n\n".join(f"```pycon\n{p}\n```" if p.startswith(">>> ") else p for p in paragraphs)
