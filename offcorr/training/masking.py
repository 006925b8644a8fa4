"""The sequences that a monitor gives the weight 0, while an alarm with the action "mask" is on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.shapes import Mismatch
from offcorr.stages import pointwise
from offcorr.training.origins import watched_rows
from offcorr.training.series import Series


@torch.no_grad()
def unmasked(watched: Iterable[Series], batch: Batch) -> Tensor | None:
    """[B] bool, False for the sequences whose mean k3 is above a series' limit; None where no mask is in force."""
    keep = None
    for series in watched:
        if series.mask_above is None or not series.maskable:
            continue
        of: Mismatch = "engine" if series.name == "engine" else "staleness"
        if of == "engine" and batch.rollout_logp is None:
            continue
        pair = batch.tokens.log_ratio(of)
        k3 = torch.where(pair.compared, pointwise.nonnegative_kl(pair.raw), 0)
        own = k3.sum(1) <= series.mask_above * pair.compared.sum(1)
        keep = own if keep is None else keep & own
    rows = watched_rows(batch)
    return keep if keep is None or rows is None else keep | ~rows
