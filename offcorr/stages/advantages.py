"""Advantages: what takes the place of the batch's advantages before the other stages see them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.shapes import Mismatch
from offcorr.stages import spans
from offcorr.stages.base import Controller, Number, Stage
from offcorr.stages.checks import check_mismatch, check_number

__all__ = ["Advantages", "Centred"]


class Advantages(Stage, kind="advantages"):
    """Base class.  ``prepare`` gives the batch with other advantages."""

    scales_with_advantage: bool = True
    """Whether advantage 0 stays 0."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Batch:
        """The batch with other advantages."""


@dataclass(frozen=True, eq=False)
class OverlapSums:
    """Sums over the tokens of a batch; merges by adding."""

    sums: Tensor  # [4] float64: of c A, of c, of A, of 1

    def merge(self, other: OverlapSums) -> OverlapSums:
        """Both batches."""
        return OverlapSums(self.sums + other.sums)


@dataclass(frozen=True)
class Centred(Controller):
    """A - (sum c A / sum c - mean A): the advantages centred under the policy that is trained.  Experimental.

    c = 2 s(d) 2 s(D - d) is a bounded importance weight of a token, with s the logistic function, d the token's
    log-ratio and D their sum over its sequence.  GRPO's advantages have mean 0 under the sampler; under the policy that
    is trained their mean is about sum c A / sum c, which is subtracted.  The sums are over the valid tokens of the
    optimizer batch; on-policy nothing changes.  The statistics of other controllers see the advantages as they came.

    Args:
        mismatch: the pair of policies; None: total where ``rollout_logp`` is given, else staleness.

    >>> import torch, offcorr
    >>> old = torch.full((2, 1), -2.0)
    >>> batch = offcorr.Batch(
    ...     logp=old + torch.tensor([[1.0], [-1.0]]), old_logp=old, advantages=torch.tensor([1.0, -1.0]), mask=old < 0
    ... )
    >>> centred = offcorr.get("reinforce", advantages="centred")
    >>> -2 * centred(batch).coefficient.flatten()  # c is 1.46 and .54, so the advantages' mean under it is .46
    tensor([ 0.5379, -1.4621])
    """

    mismatch: Mismatch | None = None  # type: ignore[assignment]

    becomes, couples = "advantages", "batch"
    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_mismatch(self, optional=True)

    def statistics(self, tokens: Tokens) -> OverlapSums:
        """The four sums."""
        pair: Mismatch = self.mismatch or ("staleness" if tokens.batch.rollout_logp is None else "total")
        d = torch.where(tokens.trainable, tokens.log_ratio(pair).clamped, 0)
        rest = spans.sequence(d, tokens.rows) - d
        c = torch.where(tokens.trainable, 4 * d.sigmoid() * rest.sigmoid(), 0)
        terms = torch.stack([c * tokens.advantages, c, tokens.advantages, tokens.trainable.to(c.dtype)])
        return OverlapSums(terms.sum((1, 2), dtype=torch.float64))

    def resolve(self, statistics: OverlapSums) -> Shifted:
        """The shift."""
        weighted, weight, plain, count = statistics.sums
        return Shifted(weighted / weight.clamp(min=1e-30) - plain / count.clamp(min=1))

    def logged(self, resolved: Shifted) -> dict[str, Number]:
        """The number that is subtracted from every advantage."""
        return {"advantage_shift": resolved.shift}


@dataclass(frozen=True, eq=False)
class Shifted(Advantages):
    """The advantages minus one number.

    Args:
        shift: what is subtracted.
    """

    shift: Number = field(default=0.0)

    scales_with_advantage = False

    def __post_init__(self) -> None:
        check_number(self, "shift")

    def prepare(self, batch: Batch) -> Batch:
        """The batch with every advantage lower by ``shift``."""
        return batch.replaced(advantages=(batch.advantages.detach() - self.shift).to(batch.advantages.dtype))
