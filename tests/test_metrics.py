"""Tests of the metrics against their formulas in numpy, and of merging and packing."""

import ast
import dataclasses
import functools
import math
import pickle

import numpy as np
import pytest
import torch

import offcorr
from offcorr import Batch, Correction, Metrics, gates, ratios, rejections, testing, weights
from offcorr.metrics import LOSS, MISMATCH, Count, Extremes, Histogram, LogSumExp, Max, Mean, Moments
from tests.fresh import python


def valid_log_ratios(batch, ours, theirs):
    """Returns the log-ratios of the valid, scored tokens of each sequence."""
    d = (getattr(batch, ours) - getattr(batch, theirs)).numpy()
    return [row[mask & np.isfinite(row)] for row, mask in zip(d, batch.mask.numpy(), strict=True)]


@pytest.mark.parametrize(
    "series, ours, theirs", [("engine", "old_logp", "rollout_logp"), ("staleness", "logp", "old_logp")]
)
def test_mismatch_series(series, ours, theirs):
    batch = testing.example(seed=3)
    rows = [row for row in valid_log_ratios(batch, ours, theirs) if len(row)]
    d, total = np.concatenate(rows), np.array([row.sum() for row in rows])
    mean = np.array([row.mean() for row in rows])
    expected = {
        "abs_mean": np.abs(d).mean(),
        "abs_max": np.abs(d).max(),
        "ratio_min": np.exp(d.min()),
        "ratio_max": np.exp(d.max()),
        "k1": -d.mean(),
        "k3": (np.exp(d) - 1 - d).mean(),
        "ratio_mean": np.exp(d).mean(),
        "ratio_mean_seq": np.exp(total).mean(),
        "chi2_token": np.exp(2 * d).mean() - 1,
        "chi2_seq": np.exp(2 * total).mean() - 1,
        "ess_token": np.exp(d).sum() ** 2 / (len(d) * np.exp(2 * d).sum()),
        "ess_seq": np.exp(total).sum() ** 2 / (len(total) * np.exp(2 * total).sum()),
        "ppl_ratio": np.exp(-mean).mean(),
    }
    got = offcorr.metrics.measure(batch).compute()
    for name, value in expected.items():
        assert got[f"offcorr/{series}/{name}"] == pytest.approx(value, rel=1e-10), name
    p99 = np.quantile(np.abs(d), 0.99, method="inverted_cdf")
    assert 10 ** (-9 / 62) <= got[f"offcorr/{series}/abs_p99"] / p99 <= 10 ** (9 / 62)


@pytest.mark.parametrize("scale", np.geomspace(0.01, 0.014, 5))  # over the width of a bin
@pytest.mark.parametrize("draw", ["standard_normal", "standard_cauchy", "standard_exponential"])
def test_the_percentile_is_near_the_true_one(draw, scale):
    d = scale * np.abs(getattr(np.random.default_rng(0), draw)(50_000))
    parts = [Histogram(Histogram.of(part, torch.ones(len(part)).bool())) for part in torch.from_numpy(d).split(7_000)]
    [got] = functools.reduce(Histogram.merge, parts).read()
    assert got == pytest.approx(np.quantile(d, 0.99), rel=0.1)


def test_first_token_is_the_first_valid_one():
    zeros = torch.zeros(2, 3)
    batch = Batch(
        logp=zeros,
        old_logp=zeros,
        rollout_logp=torch.tensor([[9.0, 0.5, 0.0], [0.1, 9.0, 9.0]]),
        advantages=torch.ones(2),
        mask=torch.tensor([[0, 1, 1], [1, 0, 1]]),
    )
    assert offcorr.metrics.measure(batch).compute()["offcorr/engine/first_token"] == pytest.approx(0.3)


def test_what_the_correction_did():
    """One sequence of four tokens: a truncated weight, a clipped ratio, an unchanged token and an unscored one."""
    zeros = torch.zeros(1, 4)
    batch = Batch(
        logp=torch.tensor([[0.0, 1.0, 0.0, 0.0]]),
        old_logp=zeros,
        rollout_logp=torch.tensor([[-1.0, 0.0, 0.0, math.nan]]),
        advantages=torch.ones(1),
        mask=torch.ones(1, 4),
    )
    got = offcorr.get("tis", cap=2.0)(batch).metrics.compute()
    wanted = {"truncated": 0.25, "clipped": 0.25, "coefficient_zero": 0.25, "kept": 1, "rejected": 0, "unscored": 1}
    assert {name: got[f"offcorr/loss/{name}"] for name in wanted} == pytest.approx(wanted)
    assert got["offcorr/loss/weight_mean"] == pytest.approx((2 + 1 + 1 + 1) / 4)
    assert got["offcorr/engine/ratio_mean"] == pytest.approx((math.e + 1 + 1) / 3)  # raw, not truncated at 2
    vetoed = offcorr.get("veto", threshold=3.0)(batch).metrics.compute()
    assert vetoed["offcorr/loss/vetoed"] == vetoed["offcorr/loss/rejected"] == 1


def test_soft_gates_report_how_much_they_held_back():
    batch = Batch(
        logp=torch.full((1, 1), 1.0), old_logp=torch.zeros(1, 1), advantages=torch.ones(1), mask=torch.ones(1, 1)
    )
    ratio, p = math.e, 1 / (1 + math.exp(-(math.e - 1)))
    held = offcorr.get("sapo")(batch).metrics.compute()["offcorr/loss/clipped"]
    assert held == pytest.approx(1 - 4 * p * (1 - p) * ratio / ratio)


@pytest.mark.parametrize("name", ["minpro", "tis", "sapo?aggregate=token-mean", "icepop", "prefix_is", "reinforce"])
def test_how_the_update_differs_from_that_with_the_plain_ratio(name):
    """c is read off the gradient, and compared with the plain token ratio where there is an advantage."""
    batch = dataclasses.replace(testing.example(seed=5), advantages=torch.tensor([1.5, 0.0, -0.7, 2.0, 0.0, -1.0, 0.5]))
    out = offcorr.resolve(name)(batch)
    valid = int(batch.mask.sum())
    d = (batch.logp - batch.old_logp).detach().numpy()
    a = np.broadcast_to(batch.advantages.numpy()[:, None], d.shape)
    counts = batch.mask.numpy() & (a != 0)
    c = np.abs(out.coefficient.numpy()[counts] / a[counts]) * valid  # token-mean divides by the valid tokens
    r = np.exp(np.clip(d[counts], -20, 20))
    wanted = {
        "no_advantage": 1 - counts.sum() / valid,
        "dropped": (c == 0).mean(),
        "damped": ((c > 0) & (c < 0.99 * r)).mean(),
        "amplified": (c > 1.01 * r).mean(),
        "multiplier": c.mean(),
        "ratio": r.mean(),
        "multiplier_vs_ratio": c.sum() / r.sum(),
        "ess_after": c.sum() ** 2 / (len(c) * (c**2).sum()),
        "ess_before": r.sum() ** 2 / (len(r) * (r**2).sum()),
    }
    got = out.metrics.compute()
    assert {name: got[f"offcorr/loss/{name}"] for name in wanted} == pytest.approx(wanted)
    assert wanted["damped"] + wanted["amplified"] + wanted["dropped"] > 0


def test_an_update_without_a_correction_changes_nothing():
    batch = testing.example(seed=5)
    got = Correction(gate=gates.Unclipped())(batch).metrics.compute()
    same = {"multiplier_vs_ratio": 1, "dropped": 0, "damped": 0, "amplified": 0, "no_advantage": 0}
    assert {name: got[f"offcorr/loss/{name}"] for name in same} == pytest.approx(same)
    assert got["offcorr/loss/ess_after"] == pytest.approx(got["offcorr/loss/ess_before"])


def test_a_batch_without_any_advantage_has_no_multiplier():
    batch = testing.example(seed=5)
    got = offcorr.get("dapo")(dataclasses.replace(batch, advantages=torch.zeros(len(batch.logp)))).metrics.compute()
    assert got["offcorr/loss/no_advantage"] == 1
    assert not {"offcorr/loss/multiplier", "offcorr/loss/dropped", "offcorr/loss/ess_after"} & got.keys()


def test_pack_and_ranks():
    parts = [offcorr.get("tis")(testing.example(seed)).metrics for seed in range(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2]).compute()
    stacked = torch.stack([part.pack() for part in parts])
    assert stacked.ndim == 2 and parts[0].unpack(stacked[0]).compute() == pytest.approx(parts[0].compute())
    assert parts[0].all_reduce(lambda vector: stacked).compute() == pytest.approx(merged)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 300])
def test_many_ranks_merge_in_few_steps(ranks, monkeypatch):
    """Some ranks have seen no token; the host's work grows with the logarithm of the ranks."""
    made = [offcorr.get("tis")(testing.example(seed)).metrics for seed in range(4)]
    empty = dataclasses.replace(testing.example(), mask=torch.zeros_like(testing.example().mask))
    made.append(offcorr.get("tis")(empty).metrics)
    parts = [made[rank % len(made)] for rank in range(ranks)]
    together = functools.reduce(Metrics.merge, parts).compute()
    calls, merged_packed = [], offcorr.metrics._merged_packed
    monkeypatch.setattr(offcorr.metrics, "_merged_packed", lambda *args: calls.append(1) or merged_packed(*args))
    merged = parts[0].all_reduce(lambda vector: torch.stack([part.pack() for part in parts]))
    assert merged.compute() == pytest.approx(together, rel=1e-12)
    assert len(calls) <= 2 * math.log2(ranks)


@pytest.mark.parametrize("kind", [Max, Extremes, LogSumExp])
def test_a_kind_of_ones_own_merges_as_its_base(kind):
    own = type("Mine", (kind,), {})
    values = (torch.tensor([1.0, 3.0]), torch.tensor([2.0]))
    for packed in (lambda a, b: a.merge(b), lambda a, b: a.all_reduce(lambda _: torch.stack([a.pack(), b.pack()]))):
        parts = [[Metrics({"x": made(made.of(one, one > 0))}) for one in values] for made in (kind, own)]
        theirs, ours = (packed(*part).pack() for part in parts)
        torch.testing.assert_close(ours, theirs)


def test_merging_with_nothing_seen_changes_nothing():
    some = LogSumExp(LogSumExp.of(torch.tensor([-1000.0, -1001.0]), torch.tensor([True, True])))
    none = LogSumExp(LogSumExp.of(torch.tensor([5.0]), torch.tensor([False])))
    for merged in (some.merge(none), none.merge(some)):
        assert merged.read() == pytest.approx(some.read())
    assert none.merge(none).read() is None


def test_one_value_has_no_effective_sample_size():
    seen = torch.tensor([True])
    ratio = [LogSumExp(LogSumExp.of(d, seen), ("mean", "chi2", "ess")) for d in torch.tensor([[0.5], [2.0]])]
    size = [Moments(torch.tensor([c, c * c, 1.0]), ("mean", "ess")) for c in (0.5, 2.0)]
    for one, other in (ratio, size):
        alone = Metrics({"x": one}).compute()
        assert "mean" in alone and "ess" not in alone
        assert 0.5 < Metrics({"x": one.merge(other)}).compute()["ess"] < 1


@pytest.mark.parametrize("values", [[0.5, 2.0], [-0.5, -2.0], [-1.0, 3.0, 0.0], [0.0], [-0.25]])
def test_both_tails_of_a_ratio(values):
    """Ratios that are all above 1, all below 1, or on both sides of it, in parts as well as together."""
    d = torch.tensor(values)
    made = [Extremes(Extremes.of(part, torch.ones_like(part).bool())) for part in (d, d[:1], d[1:])]
    wanted = (max(map(abs, values)), math.exp(min(values)), math.exp(max(values)))
    for extremes in (made[0], made[1].merge(made[2]), made[2].merge(made[1])):
        assert extremes.read() == pytest.approx(wanted)


def test_no_ratio_has_no_tails():
    nothing = Extremes(Extremes.of(torch.tensor([5.0]), torch.tensor([False])))
    assert nothing.read() is nothing.merge(nothing).read() is None
    assert Extremes(Extremes.of(torch.zeros(0), torch.zeros(0).bool())).read() is None


def test_a_masked_token_is_in_no_tail():
    logp = torch.tensor([[0.3, 9.0, -9.0, 0.2]])
    batch = Batch(logp=logp, old_logp=0 * logp, advantages=torch.ones(1), mask=torch.tensor([[1, 0, 0, 1]]))
    got = offcorr.metrics.measure(batch).compute()
    tails = [got["offcorr/staleness/" + name] for name in ("abs_max", "ratio_min", "ratio_max")]
    assert tails == pytest.approx([0.3, math.exp(0.2), math.exp(0.3)])


def test_every_metric_says_what_it_is():
    for metric in (*MISMATCH, *LOSS):
        assert metric.formula and "/" not in metric.name
    assert Histogram.size == 64


def test_the_clip_of_gmpo_alone_is_not_in_clipped():
    """As docs/metrics.md says: it is in the ratio, and ``dropped`` has it."""
    silent = set()
    for name in offcorr.available():
        loss_fn, _ = testing._resolve(name)
        for seed in range(3):
            of_loss = loss_fn(testing.example(seed=seed, spread=1.0)).metrics.compute()
            clipped, rejected, dropped = (of_loss[f"offcorr/loss/{one}"] for one in ("clipped", "rejected", "dropped"))
            if not clipped and not rejected and dropped:
                silent.add(name)
    assert silent == {"gmpo"}


def test_metrics_of_any_name_are_computed_wherever_they_are_unpickled():
    """Accumulators are pickled with their types, so the other process needs no table of names."""
    made = Metrics({"somewhere/mine": Mean(torch.tensor([3.0, 4.0])), "somewhere/many": Count(torch.tensor([2.0]))})
    done = python(f"import pickle; print(pickle.loads({pickle.dumps(made)!r}).compute())")
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {"somewhere/mine": 0.75, "somewhere/many": 2.0}


def test_one_name_has_one_kind():
    with pytest.raises(TypeError, match="mine is a Mean and a Count, expected one kind"):
        Metrics({"mine": Mean(torch.zeros(2))}).merge(Metrics({"mine": Count(torch.zeros(1))}))


def test_empty_metrics():
    assert Metrics().compute() == {}
    batch = testing.example()
    nothing = offcorr.get("tis")(Batch(**{**vars(batch), "mask": torch.zeros_like(batch.mask)})).metrics.compute()
    assert all(math.isfinite(value) for value in nothing.values())
    assert not [name for name in nothing if "/engine/" in name or "/staleness/" in name]


def test_self_normalised_weights_have_mean_one():
    batch = testing.example()
    for inner in (weights.Truncate(2.0), weights.Truncate(2.0, level="prefix")):
        loss_fn = offcorr.Correction(ratio=ratios.Token(), gate=gates.Clip(), weight=weights.SelfNormalise(inner))
        assert loss_fn(batch).metrics.compute()["offcorr/loss/weight_mean"] == pytest.approx(1)


def test_needs_and_compares():
    assert offcorr.get("tis").needs == {"rollout_logp", "old_logp"}
    assert offcorr.get("reinforce").needs == frozenset()
    assert offcorr.get("seq_tis").compares == {"staleness", "engine"}
    assert offcorr.get("opsm").needs == {"old_logp"}  # total if rollout_logp is given, otherwise staleness
    loss_fn = offcorr.Correction(reject=(rejections.K2(0.1), rejections.DPPO()))
    assert loss_fn.compares == {"staleness", "engine", "total"}


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.3, 3.0, 2000.0])
def test_no_quantile_above_the_maximum_and_no_chi_square_below_0(scale):
    generator = torch.Generator().manual_seed(0)
    for width in (1, 3, 50):
        d = scale * torch.randn(4, width, generator=generator)
        batch = Batch(logp=d, old_logp=torch.zeros_like(d), advantages=torch.ones(4), mask=torch.ones(4, width))
        got = offcorr.metrics.measure(batch).compute()
        got = {name.removeprefix("offcorr/staleness/"): value for name, value in got.items()}
        assert 0 <= got["abs_p99"] <= got["abs_max"]
        assert got["chi2_token"] >= 0 and got["chi2_seq"] >= 0
        assert 0 <= got["ratio_min"] <= got["ratio_mean"] * (1 + 1e-12) and got["ratio_mean"] <= got["ratio_max"] * (
            1 + 1e-12
        )


def test_readings_that_no_distribution_has():
    """A quantile above the maximum, by the width of a bin, and a chi-square below 0, of a sample with small ratios."""
    logp = torch.full((4, 3), -1.0, dtype=torch.float64)
    batch = Batch(logp=logp - 0.3, old_logp=logp, advantages=torch.ones(4), mask=torch.ones(4, 3))
    got = offcorr.metrics.measure(batch).compute()
    assert got["offcorr/staleness/abs_p99"] == got["offcorr/staleness/abs_max"] == pytest.approx(0.3)
    assert got["offcorr/staleness/chi2_token"] == got["offcorr/staleness/chi2_seq"] == 0


def test_narrow_bounds_drop_much_where_there_is_hardly_a_gap():
    """docs/quickstart.md: above .99 a correction is not needed, and some drop much all the same."""
    d = 0.022 * torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    old_logp, advantages = torch.full_like(d, -1.0), torch.tensor([1.0, -1.0]).repeat(128)
    batch = Batch(
        logp=old_logp + d, old_logp=old_logp, rollout_logp=old_logp - d, advantages=advantages, mask=torch.ones_like(d)
    )
    measured = {name: offcorr.get(name)(batch).metrics.compute() for name in ("gspo", "geo_rs", "minpro")}
    assert all(measured["gspo"][f"offcorr/{series}/ess_seq"] > 0.99 for series in ("staleness", "engine"))
    dropped = {name: numbers["offcorr/loss/dropped"] for name, numbers in measured.items()}
    assert 0.4 < dropped["gspo"] < 0.6 and 0.75 < dropped["geo_rs"] < 0.9 and dropped["minpro"] == 0


def test_length_alone_lowers_the_effective_sample_size():
    """`offcorr metrics ess_seq`: no token is far off, and ESS / n is e^(-T s^2)."""
    d = 0.02 * torch.randn(512, 2000, generator=torch.Generator().manual_seed(0))
    old_logp = torch.full_like(d, -1.0)
    batch = Batch(logp=old_logp, old_logp=old_logp, rollout_logp=old_logp - d, advantages=torch.ones(512), mask=d < 9)
    got = offcorr.metrics.measure(batch).compute()
    assert got["offcorr/engine/ess_seq"] == pytest.approx(math.exp(-2000 * 0.02**2), rel=0.15)
    assert got["offcorr/engine/abs_mean"] == pytest.approx(0.016, abs=1e-3)
    assert 0.89 < got["offcorr/engine/ratio_min"] < got["offcorr/engine/ratio_max"] < 1.12
