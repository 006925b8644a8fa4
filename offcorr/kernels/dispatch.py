"""Which implementation a correction runs on: the torch reference, which is the definition, or the Triton kernel.

``run`` gives what ``Correction`` needs of a batch, or None where the reference has to do it; ``backend`` says which it
is and why.  Nothing of Triton is imported before a batch is found to be one for the kernel; float64 never is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offcorr.batch import Batch, check_batch
from offcorr.kernels.rebind import NotFused
from offcorr.metrics import Accumulator
from offcorr.optional import require
from offcorr.stages.base import Plan
from offcorr.stages.checks import outside

if TYPE_CHECKING:
    from offcorr.correction import Correction

Choice = Literal["auto", "reference", "triton"]

_choice: contextvars.ContextVar[Choice] = contextvars.ContextVar("offcorr_backend", default="auto")


class Fused(NamedTuple):
    """The results of the kernel: a scalar, dL/dlogp in the layout of ``logp``, the accumulators of the metrics."""

    loss: Tensor
    coefficient: Tensor
    metrics: dict[str, Accumulator]


@contextlib.contextmanager
def use(choice: Choice) -> Iterator[None]:
    """Which implementation corrections run on: "auto" (Triton on CUDA and ROCm tensors), "reference" or "triton".

    On a CPU ``torch.compile`` of the reference takes nearly as long as the reference itself, after seconds of compiling
    for each width (benchmarks/results/cpu_correction.md), so "auto" leaves it alone.

    >>> with use("reference"):
    ...     chosen()
    'reference'
    """
    if choice not in get_args(Choice):
        raise ValueError(f"backend is {choice!r}, expected one of {list(get_args(Choice))}")
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def chosen() -> Choice:
    """The choice that ``use`` has made."""
    return _choice.get()


def backend(loss_fn: Correction, batch: Batch) -> str:
    """ "triton", or "reference: " and the reason, for a correction on a batch like this one.

    For a batch that is not on a GPU it says what would run on one, too, as far as this machine can tell: Triton's
    compiler has not seen the functions yet.

    Raises:
        TypeError: ``loss_fn`` is no ``Correction`` (a name, say), or ``batch`` no ``Batch``.

    >>> import offcorr
    >>> backend(offcorr.get("minpro"), offcorr.testing.example())
    'reference: logp is on cpu; on a GPU it would be: reference: logp is torch.float64'
    """
    if not hasattr(loss_fn, "stages"):  # the class itself is defined on top of this module
        shown = repr(loss_fn) if isinstance(loss_fn, str) else f"a {type(loss_fn).__name__}"
        raise TypeError(f"loss_fn is {shown}, expected an offcorr.Correction, for instance offcorr.get('minpro')")
    check_batch(batch)
    reason = _why_off_device(batch)
    on_device = _said(_why_unfit(batch) or _why_not_fused(loss_fn, batch)) if _choice.get() != "reference" else ""
    if reason is None:
        return on_device
    return _said(reason) + (f"; on a GPU it would be: {on_device}" if on_device else "")


def _said(reason: str | None) -> str:
    return "triton" if reason is None else f"reference: {reason}"


def _why_not_fused(loss_fn: Correction, batch: Batch) -> str | None:
    """Why Triton cannot run this correction on a batch that is one for the kernel."""
    from offcorr.kernels import launch

    resolved = loss_fn.resolve(loss_fn.statistics(batch))
    batch = resolved.prepared(batch)
    try:
        launch.prepare(resolved.plan(batch), batch, None)
    except NotFused as refused:
        return str(refused)
    return None


def run(plan: Plan, batch: Batch, denominator: float | Tensor | None) -> Fused | None:
    """A plan by the kernel, without host synchronisation; None: the reference has to run."""
    if _why_off_device(batch):
        return None
    if reason := _why_unfit(batch):
        if reason == why_no_triton():
            _warn_once(f"{plan.method!r} runs on the torch reference: {reason}")
        return None
    if batch.logp.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "backend 'triton' was asked for and logp is on the CPU: expected a GPU, or TRITON_INTERPRET=1 in the "
            "environment before triton is imported"
        )
    from offcorr.kernels import launch

    try:
        fused = launch.prepare(plan, batch, denominator)()
    except NotFused as refused:
        _warn_once(f"{plan.method!r} runs on the torch reference: {refused}")
        return None
    if plan.strict and fused.metrics["offcorr/loss/nonfinite"].vector.item():
        return None  # the reference says which token it is
    return fused


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=outside())


def _why_off_device(batch: Batch) -> str | None:
    """Why the reference runs on the device of this batch."""
    choice = _choice.get()
    if choice == "reference":
        return "it was asked for"
    if choice == "auto" and not batch.logp.is_cuda:
        return f"logp is on {batch.logp.device}"
    return None


def _why_unfit(batch: Batch) -> str | None:
    """Why the kernel could run on this batch on no device."""
    if torch.promote_types(batch.logp.dtype, torch.float32) != torch.float32:
        return f"logp is {batch.logp.dtype}"
    if not batch.logp.numel():
        return "the batch is empty"
    return why_no_triton() or None


@functools.cache
def why_no_triton() -> str:
    """Why the kernels cannot run with the Triton of this environment, such as torch 2.6's 3.2; "" where they can."""
    try:
        require("the kernel", ["triton>=3.6"], extra="triton")
    except ModuleNotFoundError:
        return "triton is not installed"
    except ImportError as error:
        return str(error)
    return ""
