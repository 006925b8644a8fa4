"""Batches for the correction kernel, and the error budget of its results.

The kernel's error may be a small multiple of the error of the float32 reference plus the rounding of float32.
"""

import dataclasses
import math
import os
import warnings
from typing import Any

import torch

import offcorr
from offcorr import Batch
from offcorr.kernels import dispatch, launch
from offcorr.methods.registry import catalogue

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Else there is a GPU."""

TIMES_REFERENCE, ROUNDING = 4.0, 2e-6
METHODS = [method.name for method in catalogue()]
FLOATS = ("logp", "old_logp", "rollout_logp", "advantages", "rewards", "entropy")
PER_TOKEN = ("logp", "old_logp", "rollout_logp", "entropy", "mask", "turn_ids")


def padded(rows: int = 3, width: int = 65, seed: int = 0, spread: float = 0.3, **fields: Any) -> Batch:
    """A float32 batch with tool spans, an empty sequence, unscored tokens and garbage under the mask."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw)  # noqa: E731
    logp = -normal(rows, width).abs() - 0.05
    old_logp = logp + spread * normal(rows, width)
    rollout_logp = old_logp + spread * normal(rows, width)
    mask = torch.rand((rows, width), generator=draw) > 0.3
    mask[0, 0] = True
    mask[1:2] = False
    rollout_logp[-1, ::5] = math.nan
    garbage = {"logp": math.nan, "old_logp": math.inf, "rollout_logp": -1e30, "entropy": math.nan}
    known = {"logp": logp, "old_logp": old_logp, "rollout_logp": rollout_logp, "entropy": logp.abs()}
    known = {name: torch.where(mask, value, garbage[name]) for name, value in known.items()}
    per_sequence = {"advantages": normal(rows), "rewards": normal(rows).sign(), "group_ids": torch.arange(rows) % 2}
    return Batch(**({**known, "mask": mask, **per_sequence} | fields))


def packed(batch: Batch, lengths: list[int]) -> Batch:
    """A packed batch of the first ``lengths`` tokens of each row."""
    length = torch.tensor(lengths)
    inside = torch.arange(batch.logp.shape[1]) < length[:, None]
    present = {name: getattr(batch, name) for name in PER_TOKEN if getattr(batch, name) is not None}
    per_token = {name: value[inside] for name, value in present.items()}
    rest = {name: getattr(batch, name) for name in ("advantages", "rewards", "group_ids")}
    return Batch.packed(**per_token, **rest, cu_seqlens=torch.nn.functional.pad(length.cumsum(0), (1, 0)))


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    present = {name: getattr(batch, name) for name in FLOATS if getattr(batch, name) is not None}
    return dataclasses.replace(batch, **{name: value.to(dtype) for name, value in present.items()})


def run(loss_fn: offcorr.Correction, batch: Batch, backend: str, **options: Any):
    """Returns (output, gradient of 3 * loss)."""
    logp = batch.logp.clone().requires_grad_()
    with dispatch.use(backend):
        out = loss_fn(dataclasses.replace(batch, logp=logp), **options)
        (gradient,) = torch.autograd.grad(3 * out.loss, logp)
    return out, gradient


def within_budget(loss_fn: offcorr.Correction, batch: Batch, **options: Any) -> offcorr.Output:
    """Runs kernel and reference, compares all results, and returns the kernel's output."""
    with dispatch.use("triton"):
        assert dispatch.backend(loss_fn, batch) == "triton"
    wide = {n: v.double() if isinstance(v, torch.Tensor) and n == "denominator" else v for n, v in options.items()}
    exact, exact_gradient = run(loss_fn, cast(batch, torch.float64), "reference", **wide)
    single, _ = run(loss_fn, batch, "reference", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs on the torch reference")
        out, gradient = run(loss_fn, batch, "triton", **options)

    def check(what, got, wanted, reference, size):
        assert got.shape == wanted.shape and got.isfinite().all(), what
        allowed = TIMES_REFERENCE * (reference.double() - wanted).abs().max() + ROUNDING * size + 1e-12
        off = (got.double() - wanted).abs().max()
        assert off <= allowed, f"{what} is off by {off:.3g}, allowed {allowed:.3g}"

    sizes = exact.coefficient.abs()
    # the terms of the loss may cancel, so the tolerance is relative to their size
    check("loss", out.loss, exact.loss, single.loss, sizes.sum())
    check("coefficient", out.coefficient, exact.coefficient, single.coefficient, sizes.max())
    assert out.coefficient.dtype == torch.float32 and gradient.dtype == batch.logp.dtype
    rtol, atol = (1e-6, 0) if batch.logp.dtype == torch.float32 else (2**-8, 1e-7)
    torch.testing.assert_close(gradient.float(), 3 * out.coefficient, rtol=rtol, atol=atol)
    got, wanted, reference = (one.metrics.compute() for one in (out, exact, single))
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        allowed = TIMES_REFERENCE * abs(reference[name] - value) + 2 * ROUNDING * max(1.0, abs(value))
        assert abs(got[name] - value) <= allowed, f"{name} is {got[name]}, expected {value} +- {allowed:.2g}"
    # A wrong count does not show in a mean whose sum is 0, but would after merging: compare the vectors.
    assert [type(kind) for kind in out.metrics.data.values()] == [type(kind) for kind in single.metrics.data.values()]
    torch.testing.assert_close(vectors(out), vectors(single), rtol=1e-4, atol=1e-4)
    for name in ("offcorr/engine/abs_histogram", "offcorr/staleness/abs_histogram"):
        if name in single.metrics.data:
            assert torch.equal(vectors(out)[name], vectors(single)[name]), name
    return out


def vectors(out: offcorr.Output) -> dict[str, torch.Tensor]:
    return {name: accumulator.vector for name, accumulator in out.metrics.data.items()}


def prepared(loss_fn: offcorr.Correction, batch: Batch, denominator: Any = None) -> launch.Launch:
    """Prepares a correction on a batch for its launch."""
    with dispatch.use("triton"):
        resolved = loss_fn.resolve(loss_fn.statistics(batch))
        batch = resolved.prepared(batch)
        return launch.prepare(resolved.plan(batch), batch, denominator)
