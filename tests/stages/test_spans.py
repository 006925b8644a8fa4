"""Tests of user-defined spans: a torch function suffices, and its parameters are those of the stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import offcorr
from offcorr import ops, ratios, spans, testing


class Decay(NamedTuple):
    decay: float


def decayed_trace(x, rows, p):
    """s_t = decay * s_(t-1) + x_t over valid tokens."""
    total, trace = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        total = torch.where(rows.mask[:, t], p.decay * total + x[:, t], total)
        trace.append(total)
    return torch.stack(trace, 1) if trace else x


@pytest.fixture
def trace():
    spans.register("test_decayed_trace")(decayed_trace)
    yield "test_decayed_trace"
    spans.unregister("test_decayed_trace")


def traced(value, log_ratio):
    return value, ops.zeros_like(log_ratio) + 1


@dataclass(frozen=True)
class Traced(ratios.Ratio):
    """Exponential of a decaying trace of the log-ratio."""

    decay: float = 0.9
    span = property(lambda self: "test_decayed_trace")  # which is registered in the tests alone
    rule = staticmethod(traced)

    @property
    def params(self) -> Decay:
        return Decay(self.decay)


def test_a_span_with_a_parameter(trace):
    loss_fn = offcorr.Correction(ratio=Traced(0.5), gate=offcorr.gates.DetachedRatio())
    assert len(testing.check(loss_fn)) == len(testing.CHECKS)
    old = torch.zeros(1, 3)
    moved = torch.tensor([[0.4, 9.0, 0.2]])
    mask = torch.tensor([[True, False, True]])
    out = loss_fn(offcorr.Batch(logp=moved, old_logp=old, advantages=torch.ones(1), mask=mask))
    expected = torch.tensor([[0.4, 0.0, 0.5 * 0.4 + 0.2]]).exp()
    torch.testing.assert_close(-2 * out.coefficient, torch.where(mask, expected, 0))


def test_no_decay_is_the_prefix_ratio(trace):
    batch = testing.example()
    ours = offcorr.Correction(ratio=Traced(1.0))(batch).coefficient
    torch.testing.assert_close(ours, offcorr.Correction(ratio=ratios.Prefix())(batch).coefficient)


def test_what_is_refused(trace):
    with pytest.raises(TypeError, match=r"takes \('x', 'mask'\), expected \(x, rows\) or \(x, rows, p\)"):
        spans.register("other")(lambda x, mask: x)
    with pytest.raises(ValueError, match="a span named 'prefix' exists already"):
        spans.register("prefix")(decayed_trace)
    with pytest.raises(ValueError, match="span is 'prefixx', did you mean 'prefix'"):
        spans.unregister("prefixx")


def test_a_span_that_changes_the_shape():
    spans.register("test_summed")(lambda x, rows: x.sum(1))
    try:
        stage = type("Summed", (ratios.Ratio,), {"span": "test_summed", "__module__": __name__})()
        with pytest.raises(ValueError, match=r"span 'test_summed' of Summed returned \(7,\), expected \(7, 12\)"):
            offcorr.Correction(ratio=stage)(testing.example())
    finally:
        spans.unregister("test_summed")


def test_a_sum_that_goes_far_and_returns_loses_no_digits():
    """A sum that goes to -6000 nats and returns to 0, in float32."""
    draw = torch.Generator().manual_seed(0)
    away = torch.rand((1, 20000), generator=draw) * 0.6
    x = torch.cat([-away, away[:, torch.randperm(20000, generator=draw)]], 1)
    rows = offcorr.Batch(logp=-x.abs(), advantages=torch.ones(1), mask=x == x).tokens.rows
    got, exact = (spans.sequence(one, rows) for one in (x, x.double()))
    assert got.dtype == torch.float32 and (got - exact).abs().max() <= 1e-6
