"""Recorder of host synchronisations that needs no GPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Records every operation that would make the host wait for a GPU.

    On a CPU it sees lists that become tensors, which on a GPU are copies to the device. On the device "meta" it sees
    copies between devices, and torch raises an error when a value is read.
    """

    READS = {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "lift_fresh"),
    }

    def __init__(self):
        super().__init__()
        self.seen, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        self.seen.append(name)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        copies = name in ("_to_copy", "copy_")
        if (
            name in self.READS
            or (
                name in ("index", "index_put", "index_put_")
                and any(i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None)
            )
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (copies and len({x.device.type for x in tensors} | {kwargs.get("device", tensors[0].device).type}) > 1)
        ):
            self.waits.append(str(func))
        return func(*args, **kwargs)
