"""Whether the micro-batches of an optimizer step have the tokens, or sequences, that its ``Step`` was told."""

from __future__ import annotations

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.metrics import Mean, Metrics
from offcorr.stages.checks import warn_first

PREFIX = "counted/"
"""Of the metrics that ``warn_of_wrong_number`` takes out again."""
UNITS = ("tokens", "sequences")


class Counted:
    """The number that a step was told, and what its micro-batches had; no host synchronisation.

    Attributes:
        told: over all micro-batches and ranks; None: not known, so that nothing is compared.
        unit: of ``told``, "tokens" or "sequences".
        micro_batches: their number so far.
    """

    def __init__(self) -> None:
        self.told: float | Tensor | None = None
        self.unit = ""
        self.micro_batches = 0
        self._total: Tensor | None = None

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Count a micro-batch.

        A sequence without a valid token may be counted or not, so there are two numbers of sequences.
        """
        self.micro_batches += 1
        if self.told is None:
            return
        if self.unit == "tokens":
            own = batch.mask.bool().sum(dtype=torch.float64).expand(2)
        else:
            fewest = (batch.tokens.mask.bool().any(1)).sum(dtype=torch.float64)
            own = torch.stack([fewest, torch.full_like(fewest, batch.sequences)])
        self._total = own if self._total is None else self._total + own

    def metrics(self) -> Metrics:
        """The number told, the fewest and the most that the micro-batches had, each with 1 for this rank's step."""
        if self.told is None or self._total is None:
            return Metrics()
        told, total = self.told, self._total
        if isinstance(told, Tensor) and told.device == total.device:
            number = told.detach().to(torch.float64).reshape(())
        else:
            number = torch.full_like(total[0], float(told))
        step = torch.ones_like(number)
        first = torch.stack([number, step])
        counts = torch.stack([total, step.expand(2)], -1)
        names = (f"{PREFIX}{self.unit}/{name}" for name in ("told", "fewest", "most"))
        return Metrics({name: Mean(vector) for name, vector in zip(names, (first, *counts), strict=True)})


def warn_of_wrong_number(computed: dict[str, float], ranks: int = 1) -> None:
    """Takes the metrics of ``Counted`` out of ``computed``, and warns once where they differ.

    Args:
        ranks: over which they were reduced: each was told the number of all of them.
    """
    for unit in UNITS:
        told, fewest, most = (computed.pop(f"{PREFIX}{unit}/{name}", None) for name in ("told", "fewest", "most"))
        if told is None or fewest is None or most is None:
            continue
        fewest, most, room = ranks * fewest, ranks * most, 1e-6 * max(told, 1.0)
        if fewest - room <= told <= most + room:
            continue
        counted = fewest if told < fewest else most
        world = torch.distributed.get_world_size() if _distributed() else 1
        if ranks < world:
            warn_first(
                "Step: gather",
                f"{unit} is {told:g} and the micro-batches of this rank have {counted:g}; there are {world} ranks, and "
                "without gather= a Step's metrics and statistics are those of one rank: pass it, for instance "
                "Step(gather=lambda vector: accelerator.gather(vector[None]))",
            )
            continue
        warn_first(
            f"Step: {unit}",
            f"{unit} is {told:g}, but the micro-batches of an optimizer step have {counted:g} over all ranks (means "
            "over the steps since the metrics were last read), so the gradient is "
            f"{counted / max(told, 1.0):.3g} times that of their mean: pass begin() or count() the {unit} of all "
            "micro-batches and ranks. Only rows without a gradient may be counted and left out",
        )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
