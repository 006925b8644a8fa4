"""Whether sampled tokens are draws from given distributions as a whole, and not only likelier than from others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FEWEST = 10.0
"""Draws of a token id, or of a range of probabilities, that are there or expected, for their number to tell."""

SURPRISING, BY_MUCH = 5.0, 0.15
"""Standard errors, and share of what is expected, from which on a number of draws is another than expected."""

EDGES = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Probabilities between which draws are counted together."""

AT_ONCE = 2**20
"""Numbers of [tokens, vocabulary] that are looked at together."""

ALL = -1
"""The number of the places that are all of them; others are those from 2 ** number - 1 up to twice as far."""

Key = tuple[str, int]
"""The kind of count, and the number of its places."""


@dataclass
class Draws:
    """The tokens beside what the distributions expect, over all places of the completions and over some.

    Counted are the draws of each token id and of each range of probabilities; summed is how surprising the tokens are.

    >>> draws, fair = Draws(), torch.tensor([0.5, 0.5]).log().expand(100, 2)
    >>> draws.add(fair, torch.arange(100) % 2, torch.arange(100))
    >>> draws.misfit()
    ''
    >>> draws.add(fair, torch.zeros(100, dtype=torch.long), torch.arange(100))
    >>> draws.misfit()
    'token id 1 was drawn 50 times, where 100 are expected'
    """

    drawn: dict[Key, Tensor] = field(default_factory=dict)
    expected: dict[Key, Tensor] = field(default_factory=dict)
    variance: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, logq: Tensor, ids: Tensor, places: Tensor) -> None:
        """Adds tokens [t], drawn at these places of a completion from distributions with these log-probs [t, V]."""
        rows = max(1, AT_ONCE // logq.shape[-1])
        for some, drawn, where in zip(logq.split(rows), ids.split(rows), places.split(rows), strict=True):
            number = (where + 1).log2().floor().long()
            for at in (ALL, *number.unique().tolist()):
                these = torch.ones_like(drawn, dtype=torch.bool) if at == ALL else number == at
                self._add(at, some[these].double(), drawn[these])

    def _add(self, at: int, logq: Tensor, ids: Tensor) -> None:
        q, width, several = logq.exp(), logq.shape[-1], len(EDGES) + 1
        ranges = torch.bucketize(q, torch.tensor(EDGES, dtype=q.dtype, device=q.device))
        of_ids = torch.bincount(ids, minlength=width).double(), q.sum(0)
        in_range = torch.bincount(ranges.gather(-1, ids[:, None])[:, 0], minlength=several).double()
        of_ranges = in_range, torch.bincount(ranges.flatten(), q.flatten(), several)
        surprisal = -logq.masked_fill(q == 0, 0.0)
        entropy = (q * surprisal).sum(-1)
        spread = (q * surprisal.square()).sum(-1) - entropy.square()
        of_surprise = -logq.gather(-1, ids[:, None])[:, 0].clamp(min=-100).sum()[None], entropy.sum()[None]
        found = {
            "ids": (*of_ids, of_ids[1]),
            "ranges": (*of_ranges, of_ranges[1]),
            "surprise": (*of_surprise, spread.sum()[None]),
        }
        for name, numbers in found.items():
            for kept, value in zip((self.drawn, self.expected, self.variance), numbers, strict=True):
                kept[name, at] = kept.get((name, at), torch.zeros(())) + value.cpu()

    def misfit(self) -> str:
        """The most surprising count, in words; empty: none is."""
        worst, said = SURPRISING, ""
        for (name, at), drawn in self.drawn.items():
            expected = self.expected[name, at]
            much = (drawn - expected).abs() > BY_MUCH * expected
            if name == "surprise":
                off = (drawn - expected).abs() / self.variance[name, at].clamp(min=1e-9).sqrt()
            else:  # the square root of a count has one variance, 1/4, whatever the count
                off = 2 * ((drawn + 3 / 8).sqrt() - (expected + 3 / 8).sqrt()).abs()
                much &= torch.maximum(drawn, expected) >= FEWEST
            off = off.where(much, 0.0)
            which = int(off.argmax())
            if off[which] > worst:
                worst = float(off[which])
                said = _said(name, which, float(drawn[which]), float(expected[which])) + _where(at)
        return said


def _said(name: str, which: int, drawn: float, expected: float) -> str:
    """
    >>> _said("surprise", 0, 3.0, 2.0), _said("surprise", 0, 3.0, 0.0)
    ('the tokens are 50% more surprising than they should be', 'the tokens are more surprising than they should be')
    """
    if name == "surprise":
        more = "more" if drawn > expected else "less"
        by = f"{abs(drawn / expected - 1):.0%} " if expected > 0 else ""  # 0: every token is certain
        return f"the tokens are {by}{more} surprising than they should be"
    what = f"token id {which} was" if name == "ids" else f"tokens of a probability {_range(which)} were"
    return f"{what} drawn {drawn:.0f} times, where {expected:.0f} are expected"


def _where(at: int) -> str:
    """
    >>> _where(ALL), _where(0), _where(2)
    ('', ' at the first place', ' at the places 3 to 6')
    """
    if at <= 0:
        return "" if at == ALL else " at the first place"
    return f" at the places {2**at - 1} to {2 ** (at + 1) - 2}"


def _range(at: int) -> str:
    """
    >>> _range(0), _range(1), _range(12)
    ('below 0.0001', 'from 0.0001 to 0.001', 'above 0.97')
    """
    if at == 0:
        return f"below {EDGES[0]:g}"
    return f"above {EDGES[-1]:g}" if at == len(EDGES) else f"from {EDGES[at - 1]:g} to {EDGES[at]:g}"
