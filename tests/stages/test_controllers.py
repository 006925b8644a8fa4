"""Tests of controllers: every split of the global batch gives the same bounds and the same update."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import warnings
from functools import reduce
from pathlib import Path

import pytest
import torch

import offcorr
from offcorr import Batch, Statistics, gates, ops, rejections, weights
from offcorr.methods.p3o import EssCap, EssCapped
from offcorr.methods.registry import catalogue
from offcorr.methods.sat import NarrowingClip, TailClip
from offcorr.stages.checks import quietly
from offcorr.stages.controllers import Balance, BalancedClip, Joined, MomentBudget, MomentClip
from tests.waits import Waits

METHODS = {
    "bapo": {"target": 0.76},
    "m2po": {},
    "m2po?tokens=all": {},
    "m2po?mode=clip": {},
    "p3o": {},
    "sat": {"quantile": 0.3},
    "sat?level=geometric": {"quantile": 0.3},
    "asymre": {},
    "self-normalised": {},
}


EXACT = ("bapo", "m2po", "m2po?tokens=all", "m2po?mode=clip", "sat", "sat?level=geometric")
"""Methods whose statistics are joined and sorted, or added up in float64 to one of a few bounds."""


def correction(name):
    if name == "self-normalised":
        weight = offcorr.weights.SelfNormalise(offcorr.weights.Truncate(1.5), over="group")
        return offcorr.get("ppo", weight=weight, aggregate="token-mean")
    return dataclasses.replace(offcorr.get(name, **METHODS[name]), aggregate="token-mean")


def batch_of(sequences=64, width=24, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    logp = -normal(sequences, width).abs()
    old_logp = logp + 0.4 * normal(sequences, width)
    fields = {
        "logp": logp,
        "entropy": logp.abs(),
        "old_logp": old_logp,
        "rollout_logp": old_logp + 0.1 * normal(sequences, width),
        "advantages": normal(sequences) - 0.05,
        "rewards": normal(sequences).sign(),
    }
    mask = torch.rand((sequences, width), generator=draw) > 0.3
    # Groups of eight, dealt out so that every split divides them.
    return Batch(**{k: v.to(dtype) for k, v in fields.items()}, mask=mask, group_ids=torch.arange(sequences) % 8)


def through_bytes(statistics):
    """Pickles and unpickles statistics, as when they are sent between ranks."""
    written = io.BytesIO()
    torch.save(statistics, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=False)


def merged(loss_fn, parts, ranks=1):
    """Merges the micro-batches of each rank, then the ranks."""
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
    if name in EXACT:  # the resolved numbers are the same bit for bit
        alone, together = (loss_fn.resolve(s) for s in (loss_fn.statistics(batch), statistics))
        assert (alone.gate, alone.reject) == (together.gate, together.reject)


@pytest.mark.parametrize("name", METHODS)
def test_a_micro_batch_alone_is_not_the_global_batch(name):
    """Otherwise the test above would pass on statistics that are never used."""
    loss_fn, batch = correction(name), batch_of()
    z = float(batch.mask.sum())
    whole = loss_fn(batch, denominator=z).coefficient
    alone = torch.cat([loss_fn(batch.rows(slice(i, i + 4)), denominator=z).coefficient for i in range(0, 64, 4)])
    assert (whole - alone).abs().max() > 1e-5


# -- BAPO ----------------------------------------------------------------------------------------------------


def bounds_by_hand(gate, batch):
    """The authors' search: one bound at a time, with new sums at every step."""
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


@pytest.mark.parametrize("low_start, high_start", [(0.6, 1.5), (0.8, 1.5), (0.6, 2.0), (0.8, 2.0)])
def test_bapo_takes_the_first_bounds_that_balance(low_start, high_start):
    """Arbitrary sums, including ties; the last bounds if none balance."""
    gate = BalancedClip(target=2.0, low_start=low_start, high_start=high_start, low_step=0.1, high_step=0.25)
    path = [(i, 0) for i in range(len(gate.lows))] + [(-1, j) for j in range(1, len(gate.highs))]
    draw, places = torch.Generator().manual_seed(0), set()
    for _ in range(100):
        praise, blame = (
            torch.randint(9, (len(bounds),), generator=draw).double() / part
            for bounds, part in ((gate.highs, 1), (gate.lows, 2))
        )
        balanced = [p for p in path if praise[p[1]] >= 2 * blame[p[0]]]
        i, j = (balanced or path[-1:])[0]
        found = gate.resolve(Balance(praise, blame))
        assert (found.eps_low, found.eps_high) == (1 - gate.lows[i], gate.highs[j] - 1)
        places.add((i, j))
    assert places == set(path)


def test_bapo_stops_part_of_the_way():
    loss_fn, batch = offcorr.get("bapo", target=0.76), batch_of()
    gate = loss_fn.resolve(loss_fn.statistics(batch)).gate
    assert (1 - gate.eps_low, 1 + gate.eps_high) == pytest.approx((0.8, 1.45))
    assert bounds_by_hand(BalancedClip(target=0.76), batch) == pytest.approx((0.8, 1.45))


def test_bapo_raising_the_lower_bound_never_helps_the_balance():
    """A token clipped at c_low still counts, with c_low |A|."""
    blame = BalancedClip().statistics(offcorr.batch.Tokens(batch_of())).negative
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
    """Without negative terms the first bounds stay; without positive ones the last are taken."""
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


def outward(batch):
    """Valid tokens that moved in the direction of their advantage."""
    return batch.mask & ((batch.logp - batch.old_logp) * batch.advantages[:, None] > 0)


def largest_kept_by_hand(squares, tau):
    """The paper's loop: drops the largest until the mean over the remaining tokens is at most tau."""
    left = sorted(float(s) for s in squares)
    while left and math.fsum(left) / len(left) > tau:
        left.pop()
    return left


@pytest.mark.parametrize("tau", [0.0, 0.001, 0.04, 0.1, 0.2, 10.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", ["outward", "all"])
def test_m2po_keeps_what_the_papers_loop_keeps(tokens, tau, seed):
    batch = batch_of(seed=seed)
    loss_fn = offcorr.get("m2po", tau=tau, tokens=tokens)
    squares = (batch.logp - batch.old_logp).square()
    judged = outward(batch) if tokens == "outward" else batch.mask
    left = largest_kept_by_hand(squares[judged], tau)
    kept = (loss_fn(batch).coefficient != 0) & batch.mask
    assert kept[batch.mask & ~judged].all()  # whatever has not moved outward stays
    kept &= judged
    assert int(kept.sum()) == len(left)
    assert sorted(squares[kept].tolist()) == pytest.approx(left, abs=1e-15)
    assert squares[kept].mean() <= tau + 1e-12 if left else not kept.any()
    assert (0 < len(left) < int(judged.sum())) == (tau in (0.001, 0.04, 0.1))  # all three regimes are reached


def test_m2po_keeps_unmoved_tokens_and_ties():
    def bound(values, tau):
        return MomentBudget(tau).resolve(Joined(torch.tensor(values))).bound

    assert bound([0.0, 0.0, 1.0], 0.0) == 0.0
    assert bound([1.0, 4.0], 0.5) == 0.0  # no token fits: only unchanged tokens would, and there are none
    assert bound([], 0.04) == 0.0
    assert bound([4.0, 1.0, 1.0], 1.0) == 1.0
    assert bound([4.0, 1.0, 1.0], 2.0) == 4.0


def test_m2po_shows_its_threshold():
    loss_fn, batch = offcorr.get("m2po"), batch_of()
    (found,) = loss_fn.resolve(loss_fn.statistics(batch)).reject
    left = largest_kept_by_hand((batch.logp - batch.old_logp).square()[outward(batch)], 0.04)
    assert found == rejections.SquareBound(found.bound) and found.bound == pytest.approx(left[-1], rel=1e-12)


def test_m2po_sees_log_ratios_that_are_not_clamped():
    """Of 25 and 30 nats, both clamped to 20, the larger goes first."""
    old = torch.full((1, 2), -40.0, dtype=torch.float64)
    batch = Batch(logp=old + torch.tensor([[25.0, 30.0]]), old_logp=old, advantages=torch.ones(1), mask=old < 0)
    kept = offcorr.get("m2po", tau=26.0**2)(batch).coefficient != 0
    assert kept.tolist() == [[True, False]]


@pytest.mark.parametrize("tau", [0.0, 0.001, 0.04, 0.1, 0.2, 10.0])
def test_m2pos_clip_caps_the_second_moment_at_tau(tau):
    batch = batch_of()
    clip = found_by(offcorr.get("m2po", mode="clip", tau=tau), batch).gate
    low, high = 1 - clip.eps_low, 1 + clip.eps_high
    squares = (batch.logp - batch.old_logp).square()[outward(batch)]
    cap = float(high.log()) ** 2
    mean = squares.clamp(max=cap).mean()
    assert mean == pytest.approx(min(tau, float(squares.mean())), abs=1e-12)
    assert (cap > squares.max()) == (tau >= squares.mean()) == (tau in (0.2, 10.0))
    assert low == pytest.approx(1 / float(high))
    kept = offcorr.get("m2po", tau=tau)(batch).coefficient != 0
    uncut = offcorr.get("m2po", mode="clip", tau=tau)(batch).coefficient != 0
    assert not (uncut & ~kept).any()  # it cuts at least the tokens that the mask drops


def test_m2pos_floors_are_not_clipped():
    def bounds(**floors):
        clip = found_by(offcorr.get("m2po", mode="clip", tau=0.0, **floors), batch_of()).gate
        return 1 - clip.eps_low, 1 + clip.eps_high

    assert bounds() == (1, 1)
    assert bounds(floor_low=0.3) == pytest.approx((0.7, 1))
    assert bounds(floor_low=0.3, floor_high=0.5) == pytest.approx((0.7, 1.5))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"mode": "cut"}, "mode is 'cut', expected 'mask' or 'clip'"),
        ({"mode": "clip", "tokens": "all"}, "tokens is 'all' with mode 'clip', expected 'outward'"),
        ({"floor_high": 0.5}, "floor_low is None and floor_high is 0.5 with mode 'mask', expected None"),
        ({"tokens": "inward"}, "tokens is 'inward', did you mean 'outward'"),
        ({"mode": "clip", "floor_low": -1.0}, "floor_low is -1.0, expected a finite number >= 0 or None"),
        ({"mismatch": "both"}, "mismatch is 'both', expected one of"),
    ],
)
def test_m2po_refuses(options, said):
    with pytest.raises(ValueError, match=said):
        offcorr.get("m2po", **options)


def test_m2po_joins_parts_of_any_width():
    """A masked token has an entry in the statistics but does not count; nor does a part with masked tokens only."""
    loss_fn, batch = offcorr.get("m2po"), batch_of()
    alone = loss_fn.resolve(loss_fn.statistics(batch)).reject
    fields = {name: getattr(batch, name) for name in ("logp", "old_logp", "mask")}
    parts = [
        Batch(**{name: field[rows, :width] for name, field in fields.items()}, advantages=batch.advantages[rows])
        for rows, width in ((slice(0, 40), 24), (slice(40, 64), 24), (slice(0, 0), 24), (slice(0, 8), 0))
    ]
    nothing = dataclasses.replace(parts[0], mask=torch.zeros_like(parts[0].mask))
    joined = reduce(Statistics.merge, map(loss_fn.statistics, [nothing, *parts]))
    assert loss_fn.resolve(joined).reject == alone
    assert loss_fn.resolve(loss_fn.statistics(nothing)).reject[0].bound == 0
    assert not loss_fn(nothing).coefficient.any()


# -- P3O and SAT ---------------------------------------------------------------------------------------------


def test_p3o_takes_the_effective_share_of_ratios_that_are_not_clamped():
    batch = batch_of()
    ratio = (batch.logp - batch.rollout_logp)[batch.mask].exp()
    share = float(ratio.sum() ** 2 / ratio.square().sum() / len(ratio))
    assert 0.1 < share < 0.9
    assert float(found_by(offcorr.get("p3o"), batch).gate.share) == pytest.approx(share, rel=1e-12)
    far = torch.where(torch.arange(64)[:, None] == 0, -800.0, batch.rollout_logp)  # e^800 is no float64
    share = float(found_by(offcorr.get("p3o"), dataclasses.replace(batch, rollout_logp=far)).gate.share)
    assert 0 < share <= int(batch.mask[0].sum()) / int(batch.mask.sum())


def test_p3o_on_policy_is_reinforce_and_its_penalty_needs_no_advantage():
    batch = batch_of()
    same = dataclasses.replace(batch, rollout_logp=batch.logp)
    assert float(found_by(offcorr.get("p3o"), same).gate.share) == pytest.approx(1)
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    pulled = -offcorr.get("p3o", aggregate="sum")(idle).coefficient
    share = float(found_by(offcorr.get("p3o"), idle).gate.share)
    d = (batch.logp - batch.rollout_logp)[batch.mask]
    torch.testing.assert_close(pulled[batch.mask], -(1 - share) * (1 - (-d).exp()))  # towards the sampler


def test_a_denominator_without_the_statistics_warns_once():
    loss_fn, batch = offcorr.get("bapo"), batch_of()
    z = float(batch.mask.sum())
    part = batch.rows(slice(0, 4))
    statistics = loss_fn.statistics(batch)
    with quietly(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(part)
        loss_fn(batch, denominator=z)  # the whole batch
        loss_fn(part, denominator=z, statistics=statistics)
        offcorr.get("ppo")(part, denominator=z)
        step = offcorr.training.Step(loss_fn)
        step.begin([step.place(batch)], tokens=z)
        step.loss(step.place(part), last=False)
    with pytest.warns(RuntimeWarning) as given:
        for _ in range(2):
            loss_fn(part, denominator=z)
    (said,) = [str(one.message) for one in given if "denominator" in str(one.message)]
    assert "denominator is given without statistics=, and Balance" in said and "'bapo' depends on the whole" in said
    assert "docs/extending.md, 5. A controller" in said


def test_p3os_penalty_is_limited_at_10_nats_as_its_notes_and_the_page_say():
    d = torch.tensor([[12.0, 11.0, -11.0, -12.0, -3.0]], dtype=torch.float64)
    batch = Batch(logp=d - 20, rollout_logp=torch.full_like(d, -20), advantages=torch.zeros(1), mask=d != 0)
    share = float(found_by(offcorr.get("p3o"), batch).gate.share)
    multiplier = -offcorr.get("p3o", aggregate="sum")(batch).coefficient
    torch.testing.assert_close(multiplier, -(1 - share) * (1 - (-d.clamp(-10, 10)).exp()))
    method = next(method for method in catalogue() if method.name == "p3o")
    assert "limited to +-10" in method.notes and "limited to +-10" in method.multiplier
    page = (
        Path(__file__).parents[2].joinpath("docs/math.md").read_text().partition("## Clamps")[2].partition("\n## ")[0]
    )
    assert "CTPO" in page and "P3O" in page


@pytest.mark.parametrize("numbers, quantile, tail", [(10, 0.9, 9.0), (10, 0.91, 10.0), (7, 0.5, 4.0), (1, 0.1, 1.0)])
def test_sats_tail_begins_at_an_order_statistic(numbers, quantile, tail):
    values = torch.cat([torch.arange(1.0, numbers + 1), torch.full((5,), math.inf)])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    assert TailClip(quantile=quantile).resolve(Joined(values[order])).tail == tail


def test_sat_without_a_tail_is_ppo():
    """No tokens, or a quantile of 0."""
    assert TailClip().resolve(Joined(torch.tensor([]))).tail == 0
    assert TailClip().resolve(Joined(torch.tensor([0.0, 0.0, math.inf]))).tail == 0
    batch = batch_of()
    without = offcorr.Correction(gate=NarrowingClip(0.2, 0.2, tail=0.0, power=2.0))(batch).coefficient
    torch.testing.assert_close(without, offcorr.Correction()(batch).coefficient, rtol=0, atol=0)


def of_means(*means):
    """One sequence per mean of the log-ratio, of 1, 2, 3 ... tokens."""
    rows, width = len(means), len(means)
    old = torch.full((rows, width), -2.0, dtype=torch.float64)
    mask = torch.arange(width) <= torch.arange(rows)[:, None]
    moved = old + torch.tensor(means, dtype=torch.float64)[:, None]
    return Batch(logp=moved, rollout_logp=old, advantages=torch.ones(rows), mask=mask)


def test_sats_quantile_of_means_counts_every_token_once():
    batch = of_means(0.4, 0.1, 0.2)  # of 1, 2 and 3 tokens: in order .1 .1 .2 .2 .2 .4
    for quantile, tail in ((0.3, 0.1), (0.4, 0.2), (5 / 6, 0.2), (0.9, 0.4)):
        gate = found_by(offcorr.get("sat", level="geometric", quantile=quantile), batch).gate
        assert float(gate.tail) == pytest.approx(tail, rel=1e-12) and gate.level == "geometric"
    # The bounds are e^.3 and, in the tail, where .2 < .4, 1 + (e^.3 - 1) / (1 + 2^2), which e^.2 exceeds.
    options = {"level": "geometric", "eps_high": math.exp(0.3) - 1, "aggregate": "sum"}
    c = -offcorr.get("sat", quantile=0.5, **options)(batch).coefficient
    assert c[:, 0].tolist() == pytest.approx([0, math.exp(0.1), math.exp(0.2)])
    c = -offcorr.get("sat", quantile=0.3, **options)(batch).coefficient
    assert c[:, 0].tolist() == pytest.approx([0, math.exp(0.1), 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_last_bit_of_a_mean_does_not_gate_the_sequence_at_sats_quantile(dtype):
    batch = batch_of(sequences=9, dtype=dtype)
    means = offcorr.spans.geometric(batch.tokens.log_ratio("total").clamped, batch.tokens.rows)[:, 0]
    batch = dataclasses.replace(batch, advantages=means.sign())
    found = found_by(offcorr.get("sat", level="geometric", quantile=0.5), batch)
    tail = found.gate.tail
    at = (means.abs() == tail).nonzero().item()  # inside the clip, and outside of a clip half as wide

    def kept(tail):
        gate = NarrowingClip(1.4 * float(tail), 1.4 * float(tail), tail, 2.0, "geometric")
        return bool(dataclasses.replace(found, gate=gate)(batch).coefficient[at].any())

    below, above = (torch.nextafter(tail, torch.tensor(end, dtype=dtype)) for end in (0.0, 1.0))
    assert [kept(each) for each in (below, tail, above)] == [True] * 3
    assert not kept(tail * (1 - 1e-5))


# -- all of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bapo", "m2po", "m2po?mode=clip", "p3o", "sat"])
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
    """The resolved correction needs no statistics and gives the same numbers."""
    loss_fn, batch = offcorr.get(name), batch_of()
    found = loss_fn.resolve(loss_fn.statistics(batch))
    assert loss_fn.statistics(batch) is not None and found.statistics(batch) is None
    torch.testing.assert_close(found(batch).coefficient, loss_fn(batch).coefficient, rtol=0, atol=0)


def test_what_was_found_is_logged():
    """The logged mean over micro-batches and ranks is of a number that is the same in each."""
    batch = batch_of()
    parts = [batch.rows(slice(i, i + 16)) for i in range(0, 64, 16)]
    for loss_fn, wanted in (
        (offcorr.get("bapo", target=0.76), {"c_low": 0.8, "c_high": 1.45}),
        (offcorr.get("m2po"), {"squared_log_ratio": float(found_by(offcorr.get("m2po"), batch).reject[0].bound)}),
        (offcorr.get("sat"), {"tail": float(found_by(offcorr.get("sat"), batch).gate.tail)}),
        (offcorr.get("p3o"), {"ess_share": float(found_by(offcorr.get("p3o"), batch).gate.share)}),
        (offcorr.get("ppo"), {}),
    ):
        statistics = merged(loss_fn, parts) if wanted else None
        seen = [loss_fn(part, statistics=statistics).metrics for part in parts]
        everything = reduce(offcorr.Metrics.merge, seen).all_reduce(lambda vector: torch.stack([vector, vector]))
        logged = {k.removeprefix("offcorr/control/"): v for k, v in everything.compute().items() if "/control/" in k}
        assert logged == pytest.approx(wanted)


def found_by(loss_fn, batch):
    return loss_fn.resolve(loss_fn.statistics(batch))


# -- no host synchronisation ---------------------------------------------------------------------------------


def on(device, batch):
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[0].tolist(),
        lambda x: float(x[0, 0]),
        lambda x: max(x[0, 0], 1),
        lambda x: x[:, (x[0] > 0).sum() - 1],
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x.unique(),
        lambda x: x[0].repeat_interleave((x[0] > 0).long()),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([0.2, 0.3], device=x.device),
        lambda x: x.new_tensor([0.2, 0.3]),
        lambda x: torch.as_tensor(3).to(x),
        lambda x: x.cpu() + x.cpu(),
    ],
)
def test_what_waits_is_seen(wait):
    """Every synchronisation is seen on the CPU or on "meta", by the recorder or by an error of torch."""
    waits = 0
    for device in ("cpu", "meta"):
        with Waits() as recorder:
            try:
                wait(torch.ones(2, 3, device=device))
            except (RuntimeError, NotImplementedError):
                assert device == "meta"
                waits += 1
        waits += len(recorder.waits)
    assert waits


@pytest.mark.parametrize("dtype, aggregate", [(torch.float64, "token-mean"), (torch.float32, "seq-mean-token-mean")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_waits_for_the_device(name, device, dtype, aggregate):
    loss_fn = dataclasses.replace(correction(name), aggregate=aggregate)
    batch = on(device, batch_of(dtype=dtype))
    parts = [batch.rows(slice(i, i + 16)) for i in range(0, 64, 16)]
    logp = torch.zeros_like(batch.logp[:16], requires_grad=True)
    train = dataclasses.replace(parts[0], logp=logp)

    def step():
        statistics = reduce(Statistics.merge, map(loss_fn.statistics, parts))
        found = loss_fn.resolve(statistics)
        alone = loss_fn(batch)
        out = loss_fn(train, denominator=100.0, statistics=statistics)
        out.loss.backward()
        return found, alone.metrics.merge(out.metrics)

    step()  # tables that are made once for a device
    with Waits() as recorder:
        found, metrics = step()
    assert recorder.waits == []
    assert logp.grad.shape == logp.shape and found.statistics(batch) is None
    assert {"where", "sum"} <= set(recorder.seen)
    control = {name for name in metrics.data if "/control/" in name}
    assert len(control) == {"asymre": 0, "self-normalised": 0, "bapo": 2, "m2po?mode=clip": 2}.get(name, 1)


@pytest.mark.parametrize("name", METHODS)
def test_statistics_of_packed_rows_wait_only_for_a_length_that_is_not_known(name):
    loss_fn, batch = correction(name), batch_of(sequences=8)
    per_token = {k: getattr(batch, k).flatten() for k in ("logp", "old_logp", "rollout_logp", "mask")}
    rest = {k: getattr(batch, k) for k in ("advantages", "rewards", "group_ids")}
    packed = Batch.packed(**per_token, **rest, cu_seqlens=torch.arange(9) * 24)
    known = dataclasses.replace(packed, max_seqlen=30)
    expected = loss_fn(batch, denominator=9.0).coefficient.flatten()
    for given in (packed, known):
        torch.testing.assert_close(loss_fn(given, denominator=9.0).coefficient, expected, rtol=0, atol=0)
    for device in ("cpu", "meta"):
        given = on(device, known)  # a CPU reads it
        loss_fn.resolve(loss_fn.statistics(given))  # tables that are made once for a device
        with Waits() as recorder:
            loss_fn.resolve(loss_fn.statistics(given))
        assert recorder.waits == []
    with pytest.raises(RuntimeError, match="item"):
        loss_fn.statistics(on("meta", packed))


# -- numbers that are tensors --------------------------------------------------------------------------------

STATIONS = [
    gates.Clip(0.1, 0.15, dual_clip=1.5),
    gates.DetachedClip(1.2, 0.8),
    gates.SoftClip(),
    gates.PositionClip(log_dual=0.2),
    weights.Bound(0.8, 1.2),
    weights.Truncate(1.1),
    weights.Mask(0.8, 1.2, level="sequence"),
    rejections.Geometric(),
    rejections.K1(0.9, 1.1, level="token"),
    rejections.K1(0.9, 1.1, level="seq-max"),
    rejections.K2(0.01, level="token"),
    rejections.K3(0.01),
    rejections.Veto(0.8),
    rejections.OPSM(0.01),
    rejections.BinaryKL(0.001),
    rejections.DPPO(low=0.02, high=0.02),
    rejections.DPPO("kl", delta=0.001),
    rejections.VACO(0.3),
    rejections.SuffixVeto(0.8),
    rejections.CPPO(0.02, budget_low=0.001, budget_high=0.002),
    rejections.ESTR(0.01),
    rejections.SquareBound(0.01),
    EssCapped(0.5),
    NarrowingClip(0.2, 0.2, tail=0.1, power=2.0),
    NarrowingClip(0.2, 0.2, tail=0.1, power=2.0, level="geometric"),
]


def with_tensors(stage, device="cpu"):
    values = {f.name: getattr(stage, f.name) for f in dataclasses.fields(stage)}
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items() if isinstance(v, float)}
    assert numbers
    return dataclasses.replace(stage, **{name: number.to(device) for name, number in numbers.items()})


def with_station(stage):
    place = {gates.Gate: "gate", weights.Weight: "weight", rejections.Rejection: "reject"}
    return offcorr.Correction(**{next(name for kind, name in place.items() if isinstance(stage, kind)): stage})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("stage", STATIONS, ids=repr)
def test_numbers_may_be_tensors(stage, dtype):
    """The update and its precision are the same: a 0-dim float64 does not turn float32 into float64."""
    batch = batch_of(dtype=dtype)
    plainly, loss_fn = with_station(stage), with_station(with_tensors(stage))
    wanted, out = (one(batch, denominator=1000.0) for one in (plainly, loss_fn))
    exact = {"rtol": 0, "atol": 0} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-9}
    torch.testing.assert_close(out.coefficient, wanted.coefficient, **exact)
    torch.testing.assert_close(out.loss, wanted.loss, **exact)
    without = offcorr.Correction()(batch, denominator=1000.0).coefficient
    assert not torch.equal(out.coefficient, without)  # the stage changes something here


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("stage", STATIONS, ids=repr)
def test_numbers_that_are_tensors_are_not_read(stage, device):
    batch = on(device, batch_of())
    with_station(stage)(batch)  # tables that are made once for a device
    tensors = with_tensors(stage, device)
    with Waits() as recorder:
        with_station(dataclasses.replace(tensors))(batch)
    assert recorder.waits == []


def test_a_clip_of_tensors_is_a_clip():
    clip, one = with_tensors(gates.Clip(0.25, 0.5)), torch.tensor(1.0)
    assert clip == gates.Clip(0.25, 0.5) != with_tensors(gates.Clip(0.25, 0.75))
    assert clip.params is clip.params == (0.75, 1.5, ops.UNBOUNDED)
    assert dataclasses.replace(clip, eps_low=one).params == (0, 1.5, ops.UNBOUNDED)
    assert hash(clip) == hash(dataclasses.replace(clip))
    sent = pickle.loads(pickle.dumps(clip))
    assert sent == clip and sent.params == clip.params


def test_a_configuration_of_what_was_found_is_plain():
    batch = batch_of()
    for gate in (BalancedClip(target=0.76), MomentClip(), EssCap(mismatch="staleness"), TailClip(mismatch="staleness")):
        found = found_by(offcorr.Correction(gate=gate, reject=MomentBudget()), batch)
        config = json.loads(json.dumps(found.to_config()))
        if isinstance(gate, BalancedClip):
            assert config["gate"] == pytest.approx({"name": "clip", "eps_low": 0.2, "eps_high": 0.45, "dual_clip": 3.0})
        again = offcorr.from_config(config)
        torch.testing.assert_close(again(batch).coefficient, found(batch).coefficient, rtol=0, atol=0)
    assert offcorr.get("ppo", eps_low=torch.tensor(0.25)).to_config()["eps_low"] == 0.25
    assert json.dumps(offcorr.get("ppo", eps_low=torch.tensor(0.25)).to_config())


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1)])
def test_a_number_is_no_vector(shape):
    shown = ", ".join(map(str, shape))
    said = rf"Clip: eps_low has shape \({shown},?\), expected a finite number >= 0 and <= 1, or a 0-dim tensor"
    with pytest.raises(ValueError, match=said):
        gates.Clip(torch.zeros(shape))


def test_where_of_two_numbers_has_no_precision():
    """Neither of two Python numbers nor of tensors: the result would be float64 for float32 tokens."""
    mask, number = torch.ones(2, 3).bool(), torch.tensor(0.5, dtype=torch.float64)
    for a, b in ((0.5, 1.0), (number, 1.0), (0.5, number), (number, number)):
        with pytest.raises(TypeError, match="ops.where of two plain numbers"):
            ops.where(mask, a, b)
    assert ops.where(mask, torch.zeros(2, 3), number).dtype == torch.float32


def test_a_token_that_the_engine_could_not_score_is_in_the_budget_that_judges_it():
    """Its total ratio is its staleness ratio: a large one may not hide behind a missing score."""
    logp = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    old = logp + torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    rollout = torch.where(torch.tensor([[True, True, True, False]]), old, math.nan)
    batch = Batch(logp=logp, old_logp=old, rollout_logp=rollout, advantages=torch.ones(1), mask=torch.ones(1, 4))
    for tau, kept in ((0.2, 3), (0.3, 4)):  # the mean over all four squares is 1 / 4
        loss_fn = offcorr.Correction(reject=MomentBudget(tau, "all", mismatch="total"))
        assert loss_fn(batch).metrics.compute()["offcorr/loss/kept"] == kept / 4


def test_statistics_that_join_are_copied_a_few_times_whatever_the_number_of_ranks():
    """One rank after another, the first rank's values would be copied once for every rank."""
    copied = []

    @dataclasses.dataclass(frozen=True)
    class Joined:
        values: torch.Tensor

        def merge(self, other):
            copied.append(len(self.values) + len(other.values))
            return Joined(torch.cat([self.values, other.values]))

    for ranks in (1, 2, 7, 64, 100):
        copied.clear()
        numbers = torch.arange(3.0 * ranks).view(ranks, 3)

        def gather(vector, numbers=numbers):  # [1]: the lengths
            return vector.expand(len(numbers), 1) if len(vector) == 1 else numbers

        merged = offcorr.correction.Statistics({"gate": Joined(numbers[0])}).all_reduce(gather)
        assert torch.equal(merged.parts["gate"].values, numbers.flatten())  # in the order of the ranks
        assert sum(copied) <= 3 * ranks * math.ceil(math.log2(ranks))
