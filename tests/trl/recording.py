"""A trainer that keeps the batches that its loss was made of."""

from __future__ import annotations

from offcorr.trl import GRPOTrainer


class Recording(GRPOTrainer):
    """``batches``: TRL's inputs and the ``Batch`` of each micro-batch."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _batch(self, inputs, forward):
        batch = super()._batch(inputs, forward)
        self.batches.append((dict(inputs), batch))
        return batch
