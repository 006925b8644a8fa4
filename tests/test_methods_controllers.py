"""Controllers see the global batch: whatever the split, the same bounds and the same update."""

from __future__ import annotations

import dataclasses
import io
import math
from functools import reduce

import pytest
import torch

import offcorr
from offcorr import Batch, Statistics
from offcorr.controllers import BalancedClip, MomentBudget, SquaredLogRatios

METHODS = {
    "bapo": {"target": 0.76},
    "m2po": {},
    "asymre": {},
    "self-normalised": {},
}


def correction(name):
    if name == "self-normalised":
        weight = offcorr.weights.SelfNormalise(offcorr.weights.Truncate(1.5), over="group")
        return offcorr.get("ppo", weight=weight, aggregate="token-mean")
    return offcorr.get(name, **METHODS[name])


def batch_of(sequences=64, width=24, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    logp = -normal(sequences, width).abs()
    old_logp = logp + 0.4 * normal(sequences, width)
    fields = {
        "logp": logp,
        "old_logp": old_logp,
        "rollout_logp": old_logp + 0.1 * normal(sequences, width),
        "advantages": normal(sequences) - 0.05,
        "rewards": normal(sequences).sign(),
    }
    mask = torch.rand((sequences, width), generator=draw) > 0.3
    # Groups of eight, dealt out so that every split tears them apart.
    return Batch(**{k: v.to(dtype) for k, v in fields.items()}, mask=mask, group_ids=torch.arange(sequences) % 8)


def through_bytes(statistics):
    """As they travel between ranks."""
    written = io.BytesIO()
    torch.save(statistics, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=False)


def merged(loss_fn, parts, ranks=1):
    """Each rank merges its micro-batches, then the ranks are merged."""
    own = [reduce(Statistics.merge, map(loss_fn.statistics, parts[rank::ranks])) for rank in range(ranks)]
    return reduce(Statistics.merge, map(through_bytes, own))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
@pytest.mark.parametrize("name", METHODS)
def test_the_split_changes_nothing(name, micro_batches, ranks, dtype):
    loss_fn, batch = correction(name), batch_of(dtype=dtype)
    z = float(batch.mask.sum())
    whole = loss_fn(batch, denominator=z)
    size = 64 // micro_batches // ranks
    parts = [batch.rows(slice(i, i + size)) for i in range(0, 64, size)]
    statistics = merged(loss_fn, parts, ranks)
    outs = [loss_fn(part, denominator=z, statistics=statistics) for part in parts]

    exact = {"rtol": 1e-12, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([out.coefficient for out in outs]), whole.coefficient, **exact)
    torch.testing.assert_close(torch.stack([out.loss for out in outs]).sum(), whole.loss, rtol=1e-5, atol=1e-7)
    if name in ("bapo", "m2po"):  # the numbers found are the same to the last bit
        alone, together = (loss_fn.resolve(s) for s in (loss_fn.statistics(batch), statistics))
        assert (alone.gate, alone.reject) == (together.gate, together.reject)


@pytest.mark.parametrize("name", METHODS)
def test_a_micro_batch_alone_is_not_the_global_batch(name):
    """Else the test above would pass on statistics that nobody looks at."""
    loss_fn, batch = correction(name), batch_of()
    z = float(batch.mask.sum())
    whole = loss_fn(batch, denominator=z).coefficient
    alone = torch.cat([loss_fn(batch.rows(slice(i, i + 4)), denominator=z).coefficient for i in range(0, 64, 4)])
    assert (whole - alone).abs().max() > 1e-5


# -- BAPO ----------------------------------------------------------------------------------------------------


def bounds_by_hand(gate, batch):
    """The search as the authors write it: one bound at a time, the sums taken anew at every step."""
    tokens = [
        (math.exp(float(d)), float(a))
        for d, a, m in zip(
            (batch.logp - batch.old_logp).flatten(),
            batch.advantages[:, None].expand_as(batch.logp).flatten(),
            batch.mask.flatten(),
            strict=True,
        )
        if m
    ]

    def balanced(low, high):
        praise = math.fsum(min(r, high) * a for r, a in tokens if a >= 0)
        blame = math.fsum(-max(r, low) * a for r, a in tokens if a < 0)
        return blame == 0 or praise / blame >= gate.target

    low, high = gate.low_start, gate.high_start
    while not balanced(low, high) and low < gate.low_max - 1e-9:
        low = min(low + gate.low_step, gate.low_max)
    while not balanced(low, high) and high < gate.high_max - 1e-9:
        high = min(high + gate.high_step, gate.high_max)
    return low, high


@pytest.mark.parametrize("target", [0.0, 0.41, 0.43, 0.58, 0.61, 0.65, 0.73, 0.76, 0.79, 9.0])
@pytest.mark.parametrize("seed", range(4))
def test_bapo_finds_the_bounds_of_the_authors_search(target, seed):
    gate, batch = BalancedClip(target=target, low_step=0.07, high_step=0.3), batch_of(seed=seed)
    loss_fn = offcorr.Correction(gate=gate)
    found = loss_fn.resolve(loss_fn.statistics(batch)).gate
    low, high = bounds_by_hand(gate, batch)
    assert (1 - found.eps_low, 1 + found.eps_high) == pytest.approx((low, high), abs=1e-12)
    assert found.dual_clip == 3.0


def test_bapo_stops_part_of_the_way():
    loss_fn, batch = offcorr.get("bapo", target=0.76), batch_of()
    gate = loss_fn.resolve(loss_fn.statistics(batch)).gate
    assert (1 - gate.eps_low, 1 + gate.eps_high) == pytest.approx((0.8, 1.45))
    assert bounds_by_hand(BalancedClip(target=0.76), batch) == pytest.approx((0.8, 1.45))


def test_bapo_raising_the_lower_bound_never_helps_the_balance():
    """As said in its docstring: a token clipped at c_low still counts, with c_low |A|."""
    blame = BalancedClip().statistics(offcorr.batch.Tokens(batch_of())).blame
    assert (blame.diff() > 0).all()


def test_bapo_tries_every_step_up_to_the_maximum():
    gate = BalancedClip()
    assert gate.lows == pytest.approx([0.6, 0.65, 0.7, 0.75, 0.8]) and gate.lows[-1] == 0.8
    assert len(gate.highs) == 17 and gate.highs[-1] == 2.0
    uneven = BalancedClip(high_start=1.0, high_max=1.25, high_step=0.1)
    assert uneven.highs == pytest.approx([1.0, 1.1, 1.2, 1.25])
    assert BalancedClip(low_start=0.8).lows == [0.8]


@pytest.mark.parametrize("sign, bounds", [(1.0, (0.6, 1.2)), (-1.0, (0.8, 2.0))])
def test_bapo_with_one_kind_of_advantage(sign, bounds):
    """Nothing to balance keeps the first bounds; nothing to praise goes to the last."""
    batch = batch_of()
    batch = dataclasses.replace(batch, advantages=sign * batch.advantages.abs())
    loss_fn = offcorr.get("bapo")
    gate = loss_fn.resolve(loss_fn.statistics(batch)).gate
    assert (1 - gate.eps_low, 1 + gate.eps_high) == pytest.approx(bounds)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"low_step": 0.0}, "low_step is 0.0, expected a finite number > 0"),
        ({"low_max": 0.5}, "low_start = 0.6 is above low_max = 0.5"),
        ({"low_max": 1.1}, "low_max is 1.1, expected a lower bound on the ratio <= 1"),
        ({"high_start": 0.9}, "high_start is 0.9, expected a finite number >= 1"),
        ({"high_max": 1.1}, "high_start = 1.2 is above high_max = 1.1"),
        ({"target": -1.0}, "target is -1.0, expected a finite number >= 0"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5, expected a finite number >= 1 or None"),
    ],
)
def test_bapo_refuses(options, said):
    with pytest.raises(ValueError, match=said):
        offcorr.get("bapo", **options)


# -- M2PO ----------------------------------------------------------------------------------------------------


def largest_kept_by_hand(squares, tau):
    """The paper's loop: drop the largest until the mean over what is left is at most tau."""
    left = sorted(float(s) for s in squares)
    while left and math.fsum(left) / len(left) > tau:
        left.pop()
    return left


@pytest.mark.parametrize("tau", [0.0, 0.001, 0.04, 0.1, 0.2, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_m2po_keeps_what_the_papers_loop_keeps(tau, seed):
    batch = batch_of(seed=seed)
    loss_fn = offcorr.get("m2po", tau=tau)
    squares = (batch.logp - batch.old_logp).square()
    left = largest_kept_by_hand(squares[batch.mask], tau)
    kept = (loss_fn(batch).coefficient != 0) & batch.mask
    assert int(kept.sum()) == len(left)
    assert sorted(squares[kept].tolist()) == pytest.approx(left, abs=1e-15)
    assert squares[kept].mean() <= tau + 1e-12 if left else not kept.any()
    assert (0 < len(left) < int(batch.mask.sum())) == (tau in (0.001, 0.04, 0.1))  # all three regimes are reached


def test_m2po_keeps_unmoved_tokens_and_ties():
    def bound(values, tau):
        return MomentBudget(tau).resolve(SquaredLogRatios(torch.tensor(values))).bound * 2

    assert bound([0.0, 0.0, 1.0], 0.0) == 0.0
    assert bound([1.0, 4.0], 0.5) == 0.0  # nothing fits: only tokens that did not move, of which there are none
    assert bound([], 0.04) == 0.0
    assert bound([4.0, 1.0, 1.0], 1.0) == 1.0
    assert bound([4.0, 1.0, 1.0], 2.0) == 4.0


def test_m2po_shows_its_threshold():
    loss_fn, batch = offcorr.get("m2po"), batch_of()
    (found,) = loss_fn.resolve(loss_fn.statistics(batch)).reject
    assert isinstance(found, offcorr.rejections.K2) and found.level == "token" and found.of == "staleness"
    left = largest_kept_by_hand((batch.logp - batch.old_logp).square()[batch.mask], 0.04)
    assert 2 * found.bound == pytest.approx(left[-1], rel=1e-12)


# -- both ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bapo", "m2po"])
def test_tokens_that_are_no_number_are_not_counted(name):
    loss_fn, batch = offcorr.get(name), batch_of()
    hole = torch.zeros_like(batch.mask)
    hole[::3, ::2] = True
    broken = dataclasses.replace(batch, logp=torch.where(hole, math.nan, batch.logp))
    without = dataclasses.replace(batch, mask=batch.mask & ~hole)
    one, other = (loss_fn.resolve(loss_fn.statistics(b)) for b in (broken, without))
    assert (one.gate, one.reject) == (other.gate, other.reject)


@pytest.mark.parametrize("name", ["bapo", "m2po", "asymre"])
def test_what_was_found_is_a_plain_correction(name):
    """Resolved, it needs no statistics and gives the same numbers."""
    loss_fn, batch = offcorr.get(name), batch_of()
    found = loss_fn.resolve(loss_fn.statistics(batch))
    assert loss_fn.statistics(batch) is not None and found.statistics(batch) is None
    torch.testing.assert_close(found(batch).coefficient, loss_fn(batch).coefficient, rtol=0, atol=0)


def test_what_was_found_is_logged():
    """As the mean over micro-batches and ranks of a number that is the same in each."""
    batch = batch_of()
    parts = [batch.rows(slice(i, i + 16)) for i in range(0, 64, 16)]
    for loss_fn, wanted in (
        (offcorr.get("bapo", target=0.76), {"c_low": 0.8, "c_high": 1.45}),
        (offcorr.get("m2po"), {"squared_log_ratio": 2 * found_by(offcorr.get("m2po"), batch).reject[0].bound}),
        (offcorr.get("ppo"), {}),
    ):
        statistics = merged(loss_fn, parts) if wanted else None
        seen = [loss_fn(part, statistics=statistics).metrics for part in parts]
        everything = reduce(offcorr.Metrics.merge, seen).all_reduce(lambda vector: torch.stack([vector, vector]))
        logged = {k.removeprefix("offcorr/control/"): v for k, v in everything.compute().items() if "/control/" in k}
        assert logged == pytest.approx(wanted)


def found_by(loss_fn, batch):
    return loss_fn.resolve(loss_fn.statistics(batch))
