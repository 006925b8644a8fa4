"""The correction kernel against the float64 reference, within the budget of ``cases``.

Every buffer that it writes to starts as NaN.
"""

import dataclasses
import importlib
import math
import random
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import offcorr
from offcorr import Batch, gates, ops, ratios, rejections, weights
from offcorr import ops as vocabulary
from offcorr.kernels import dispatch, launch
from offcorr.kernels import spans as twins
from offcorr.methods.registry import illustration
from offcorr.stages import spans
from offcorr.stages.aggregate import AGGREGATIONS
from tests.kernels.cases import INTERPRETED, METHODS, PER_TOKEN, cast, packed, padded, prepared, run, within_budget

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_blocks_and_poisoned_buffers(monkeypatch):
    monkeypatch.setattr(launch, "BLOCK", 64)
    empty = torch.empty

    def poisoned(*size, dtype=None, **options):
        made = empty(*size, dtype=dtype, **options)
        return made.fill_(math.nan if made.is_floating_point() else -(2**30))

    monkeypatch.setattr(launch.torch, "empty", poisoned)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_padded_and_packed(name):
    loss_fn = illustration(name).with_max_length(32)
    batch = padded()
    within_budget(loss_fn, batch)
    within_budget(loss_fn, packed(batch, [1, 0, 63]))


@pytest.mark.parametrize("name", ["dapo", "gspo", "minpro", "turn_ppo", "holderpo", "veto"])
def test_twice_the_same_bits(name):
    batch = padded(rows=4)
    (first, gradient), (again, gradient_again) = (run(offcorr.get(name), batch, "triton") for _ in range(2))
    assert torch.equal(first.loss, again.loss)
    assert torch.equal(first.coefficient, again.coefficient) and torch.equal(gradient, gradient_again)
    assert torch.equal(first.metrics.pack(), again.metrics.pack())


@pytest.mark.parametrize("width", [1, 63, 65, 130])
@pytest.mark.parametrize("name", ["dapo", "ctpo", "seq_tis", "turn_ppo"])
def test_odd_sizes(name, width):
    within_budget(offcorr.get(name), padded(rows=2, width=width, seed=width))


OTHER_FORMS = {
    "ipo": {"threshold": 0.05, "kl_tau": 0.3},
    "drpo": {"delta": 0.2, "divergence": "chi2"},
    "pspo": {"alpha": 0.4},
    "glm5": {"eps_low": 0.5, "eps_high": 1.5},
    "pnpo": {"low": 0.97, "high": 1.03},
    "geo_mis": {"low": 0.9, "high": 1.1},
    "ctpo": {"level": "prefix_geometric", "power": -0.5, "log_low": 0.3},
    "opsm": {"level": "sequence", "delta": 0.0},
    "cppo": {"delta": 0.05, "w_min": 0.5, "budget_low": 0.005},
    "p3o": {},
    "mu_grpo": {"threshold": 0.8},
    "sat": {"quantile": 0.5},
    "sat?level=geometric": {"eps_low": 0.06, "eps_high": 0.06, "quantile": 0.5},
    "estr": {"tau": 0.03, "floor": 0.1},
    "m2po": {"mode": "clip", "tau": 0.01},
}
"""Methods with other options than their own; pnpo and opsm look at the length of a row and its mean advantage."""


@pytest.mark.parametrize("width", [1, 65, 130])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms_of_methods(name, split, width, request):
    """Odd sizes, advantages of tokens, and rows that several programs share."""
    if split:
        request.getfixturevalue("split_rows")
    loss_fn = illustration(name, **OTHER_FORMS[name])
    batch = padded(rows=4, width=width, seed=width, spread=0.2)
    draw = torch.Generator().manual_seed(width)
    advantages = torch.where(batch.mask, torch.randn(batch.mask.shape, generator=draw), math.nan)
    batch = dataclasses.replace(batch, advantages=advantages)
    assert is_split(loss_fn, batch) == (split and width > 32)
    out = within_budget(loss_fn, batch)
    if width > 1:
        assert out.coefficient.any()
    within_budget(
        loss_fn, packed(dataclasses.replace(batch, advantages=padded(rows=4).advantages), [width, 0, 1, width])
    )


@pytest.mark.parametrize("name", ["dapo", "minpro", "tis", "kimi"])
def test_tokens_without_an_advantage(name):
    batch = padded(rows=4)
    advantages = batch.advantages.clone()
    advantages[..., ::2] = 0
    out = within_budget(offcorr.get(name), dataclasses.replace(batch, advantages=advantages))
    assert 0 < out.metrics.compute()["offcorr/loss/no_advantage"] < 1


def test_many_blocks_a_row():
    within_budget(
        offcorr.get("ctpo", weight=weights.Truncate(5.0, level="sequence")), padded(rows=1, width=1000, spread=0.03)
    )


def test_more_rows_than_one_program_merges(monkeypatch):
    monkeypatch.setattr(launch, "ALONE", 5)
    within_budget(offcorr.get("reinforce"), padded(rows=20, width=3, seed=3))


# -- spans ---------------------------------------------------------------------------------------------------


class Lam(NamedTuple):
    lam: float


class Numbers(NamedTuple):
    """The numbers of every span that has some."""

    lam: float
    delta: float = 0.2
    w_min: float = 0.5
    budget_low: float = 0.01
    budget_high: float = 0.1
    quantile: float = 0.9


@dataclass(frozen=True)
class _Spanned(ratios.Ratio):
    """A ratio over any span; some ask for numbers."""

    over: str = "token"
    lam: float = 0.9

    @property
    def span(self) -> str:
        return self.over

    @property
    def params(self) -> Numbers:
        return Numbers(self.lam)


@pytest.mark.parametrize("span", spans.SPANS)
def test_every_span_over_many_blocks(span, monkeypatch):
    monkeypatch.setattr(launch, "BLOCK", 16)
    within_budget(offcorr.Correction(_Spanned(over=span), gates.Unclipped()), padded(rows=3, width=70, spread=0.1))


def test_the_same_spans_on_both_sides():
    assert twins.TWINS.keys() == set(spans.SPANS.values())


def near_one(value: Any, p: Any) -> Any:
    return ops.zeros_like(value) + 1, ops.abs(value) < 2


@dataclass(frozen=True)
class Close(rejections.Rejection):
    """Keeps tokens around which little has moved."""

    lam: float = 0.5

    span = "nearby"
    rule = staticmethod(near_one)

    @property
    def params(self) -> Lam:
        return Lam(self.lam)


# -- spans of a user's own -----------------------------------------------------------------------------------


class Decay(NamedTuple):
    decay: float


@dataclass(frozen=True)
class _Decaying(ratios.Ratio):
    """A ratio over a span that has a parameter."""

    over: str = "token"
    decay: Any = 0.9

    @property
    def span(self) -> str:
        return self.over

    @property
    def params(self) -> Decay:
        return Decay(self.decay)


def decayed_trace(x, rows, p):
    total, trace = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        total = torch.where(rows.mask[:, t], p.decay * total + x[:, t], total)
        trace.append(total)
    return torch.stack(trace, 1)


@triton.jit
def _joined(x, decay, next_x, next_decay):
    return next_x + next_decay * x, decay * next_decay


@triton.jit
def trace_step(x, mask, position, carry, p):
    total, decay = tl.associative_scan((x, tl.where(mask, p.decay, 1.0)), 0, _joined)
    total += decay * carry
    return total, tl.sum(tl.where(tl.arange(0, x.shape[0]) == x.shape[0] - 1, total, 0.0), 0)


def root_mean_square(x, rows, p):
    return spans.over_row(p.decay * (x.square().sum(1) / rows.count.clamp(min=1)).sqrt(), rows)


@triton.jit
def squares_step(state, x, mask, p):
    return (state[0] + x * x,)


@triton.jit
def root_end(numbers, count, p):
    return p.decay * tl.sqrt(numbers[0] / tl.maximum(count, 1.0))


def mean_before(x, rows):
    return (x.cumsum(1) - x) / rows.position.clamp(min=1)


@triton.jit
def mean_before_step(x, mask, position, carry, p):
    return (carry + tl.cumsum(x, 0) - x) / tl.maximum(position, 1.0), carry + tl.sum(x, 0)


OWN = {
    "trace": (decayed_trace, twins.Running(trace_step)),
    "root_mean_square": (root_mean_square, twins.Reduction((0.0,), squares_step, twins.total_fold, root_end)),
    "mean_before": (mean_before, twins.Running(mean_before_step, carry="sequence")),
}


@pytest.fixture
def own_span(request):
    """A span that is registered with its torch function alone."""
    torch_function, twin = OWN[request.param]
    spans.register(request.param)(torch_function)
    yield request.param, twin
    spans.unregister(request.param)
    twins.TWINS.pop(torch_function, None)


@pytest.mark.parametrize("own_span", OWN, indirect=True)
def test_a_span_of_ones_own_is_fused_once_it_has_a_twin(own_span, monkeypatch):
    name, twin = own_span
    monkeypatch.setattr(launch, "BLOCK", 16)
    batch = padded(rows=3, width=70, spread=0.1)
    for decay in (0.9, torch.tensor(0.5)):
        loss_fn = offcorr.Correction(_Decaying(over=name, decay=decay), gates.Unclipped())
        if name not in (known.__name__ for known in twins.TWINS) and decay == 0.9:
            falls_back(loss_fn, batch, f"the span '{name}' has no Triton twin")
            twins.register(name, twin)
        within_budget(loss_fn, batch)
        within_budget(loss_fn, packed(batch, [70, 0, 33]))


@pytest.mark.parametrize("own_span", OWN, indirect=True)
def test_a_row_is_split_only_where_the_span_says_how(own_span, split_rows):
    name, twin = own_span
    twins.register(name, twin)
    loss_fn = offcorr.Correction(_Decaying(over=name), gates.Unclipped(), weights.Truncate(2.0, level="prefix"))
    batch = padded(rows=2, width=100, spread=0.1)
    assert is_split(loss_fn, batch) == (name != "trace")
    within_budget(loss_fn, batch)


def test_what_is_no_twin_is_refused():
    running = twins.Running(trace_step)
    for name, twin, message in (
        ("nowhere", running, "there is no span 'nowhere'"),
        ("prefix", running, "has a Triton twin already"),
        ("own", 3, "expected a Reduction or a Running"),
        ("own", twins.Running(trace_step, carry="prefix"), "the carry of 'own' is 'prefix'"),
        ("own", twins.Running(decayed_trace), r"step of the twin of 'own' takes \(no @triton.jit function\)"),
        ("own", twins.Running(squares_step), r"takes \(state, x, mask, p\), expected \(x, mask, position, carry, p\)"),
    ):
        spans.register("own")(mean_before)
        with pytest.raises(ValueError, match=message):
            twins.register(name, twin)
        spans.unregister("own")


# -- sums over nearby tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("split", [False, True])
def test_nearby_tokens_of_other_blocks_and_parts(lam, split, request, monkeypatch):
    monkeypatch.setattr(launch, "BLOCK", 16)
    if split:
        request.getfixturevalue("split_rows")
    batch = padded(rows=3, width=100, spread=0.1)
    mask = batch.mask.clone()
    mask[0, 15:50] = False  # a tool span over whole blocks and parts: the tokens around it are neighbours
    mask[2, :40] = False
    batch = dataclasses.replace(batch, mask=mask)
    near = offcorr.get("near_overlap", lam=lam)
    twice = offcorr.Correction(
        ratios.Nearby(lam, mismatch="staleness"),
        gates.Unclipped(),
        aggregate="seq-mean-token-mean",
        reject=(Close(0.5), rejections.Geometric(0.5, 2.0)),
    )
    for loss_fn, given in ((near, batch), (twice, packed(batch, [100, 0, 83]))):
        assert is_split(loss_fn, given) == split
        within_budget(loss_fn, given)


# -- rows that several programs share ------------------------------------------------------------------------


@pytest.fixture
def split_rows(monkeypatch):
    """Every row longer than 32 tokens is split, in parts of 16 or more."""
    for name, value in {"BLOCK": 16, "PART": 16, "FILL": 12}.items():
        monkeypatch.setattr(launch, name, value)


def is_split(loss_fn: offcorr.Correction, batch: Batch) -> bool:
    return prepared(loss_fn, batch).parts > 1


@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_split_rows(name, split_rows):
    loss_fn = illustration(name).with_max_length(32)
    batch = padded(spread=0.1)
    assert is_split(loss_fn, batch)
    within_budget(loss_fn, batch)


@pytest.mark.parametrize("span", spans.SPANS)
def test_every_span_on_split_rows(span, split_rows):
    loss_fn = offcorr.Correction(_Spanned(over=span), gates.Unclipped(), aggregate="seq-mean-token-mean")
    late = padded(rows=3, width=70, spread=0.1)
    mask = late.mask.clone()
    mask[0, :40] = False  # the first valid token is in a later part, and so is where a running span starts
    for batch in (late, packed(dataclasses.replace(late, mask=mask), [70, 0, 63])):
        assert is_split(loss_fn, batch)
        within_budget(loss_fn, batch)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("span", ["sequence", "prefix"])
def test_a_sum_that_goes_far_and_returns(span, split, request, monkeypatch):
    """A sum that goes to -1500 nats and returns to 0."""
    monkeypatch.setattr(launch, "BLOCK", 16)
    if split:
        request.getfixturevalue("split_rows")
    draw = torch.Generator().manual_seed(0)
    # 21 bits at most: every log-ratio is exact in float32, the sum of a lane or of the row is not
    away = torch.randint(2**20, 2**21, (1, 256), generator=draw) / 2**18
    back = away[:, torch.randperm(256, generator=draw)]
    logp, old_logp = torch.cat([-away, 0 * away], 1), torch.cat([0 * away, -back], 1)
    batch = Batch(logp=logp, old_logp=old_logp, advantages=torch.ones(1), mask=logp <= 0)
    loss_fn = offcorr.Correction(_Spanned(over=span), gates.Unclipped())
    assert is_split(loss_fn, batch) == split
    exact, _ = run(loss_fn, cast(batch, torch.float64), "reference")
    largest = exact.coefficient.abs().max()
    assert largest > 0.9 / 512
    for backend in ("reference", "triton"):
        out, _ = run(loss_fn, batch, backend)
        assert (out.coefficient - exact.coefficient).abs().max() <= 5e-7 * largest, backend
        assert abs(out.loss - exact.loss) <= 5e-7 * abs(exact.loss), backend


def test_split_rows_and_their_options(split_rows):
    batch = padded(rows=2, width=100, spread=0.1)
    kept_only = offcorr.get("ctpo", reject=rejections.K3(0.005), aggregate="seq-mean-token-mean", count_rejected=False)
    normalised = offcorr.get("minpro", weight=weights.SelfNormalise(weights.Truncate(2.0, level="sequence")))
    for loss_fn in (kept_only, normalised):
        assert is_split(loss_fn, batch)
        within_budget(loss_fn, batch)
        within_budget(loss_fn, packed(batch, [100, 17]))
    (first, _), (again, _) = (run(kept_only, batch, "triton") for _ in range(2))
    assert torch.equal(first.coefficient, again.coefficient) and torch.equal(first.metrics.pack(), again.metrics.pack())


def test_short_rows_are_not_split():
    with dispatch.use("triton"):
        for rows, width, parts in ((64, 2048, 1), (1, 8192, 1), (1, 8193, 3), (4, 2**17, 32), (64, 2**17, 8)):
            like = torch.zeros(()).expand(rows, width)
            batch = Batch(logp=like, advantages=torch.zeros(rows), mask=like == 0)
            assert launch._parts(batch) == parts, (rows, width)


@pytest.mark.parametrize("split", [False, True])
def test_turn_ids_that_come_back(split, request):
    if split:
        request.getfixturevalue("split_rows")
    draw = torch.Generator().manual_seed(5)
    turn_ids = torch.randint(-2, 3, (3, 65), generator=draw)
    loss_fn = offcorr.get("turn_ppo", weight=weights.Truncate(2.0, level="turn"))
    batch = padded(turn_ids=turn_ids)
    joined = packed(batch, [65, 0, 60])
    ends = torch.stack([joined.cu_seqlens, -joined.cu_seqlens], 1)[:, 0]
    others = padded(turn_ids=turn_ids.T.contiguous().T), dataclasses.replace(joined, cu_seqlens=ends)
    for one in (batch, *others):
        assert is_split(loss_fn, one) == split
        within_budget(loss_fn, one)


@pytest.mark.parametrize("split", [False, True])
def test_more_turns_than_are_joined_together(split, request):
    """Forty and more runs in a part of a row, and turns that go on over several parts."""
    if split:
        request.getfixturevalue("split_rows")
    loss_fn = offcorr.Correction(_Spanned(over="turn"), gates.Unclipped())
    every = torch.arange(90).expand(2, -1)
    for turn_ids in (every % 37, every // 40, every):
        within_budget(loss_fn, padded(rows=2, width=90, spread=0.1, turn_ids=turn_ids.contiguous()))
    batch = padded(rows=2, width=90, spread=0.1)
    mask = batch.mask & torch.stack([every[0] % 2 == 0, every[0] > 3])  # short turns, and an empty row
    whole = torch.where(batch.mask, batch.logp, -1.0)  # one turn over all parts
    one_turn = dataclasses.replace(batch, logp=whole, old_logp=whole - 0.1, rollout_logp=None, mask=every >= 0)
    for one in (dataclasses.replace(batch, mask=mask), one_turn):
        within_budget(loss_fn, one)


def test_power_near_zero_and_far():
    for power in (0.0, 1e-3, -3.0):
        within_budget(offcorr.get("holderpo", power=power), padded(rows=2, spread=1.0))


# -- everything together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_compositions_at_random(seed, monkeypatch):
    pick = random.Random(seed).choice
    for name, values in {"BLOCK": (16, 32), "PART": (16, 16, 4096), "FILL": (5, 40), "ALONE": (1, 4, 300)}.items():
        monkeypatch.setattr(launch, name, pick(values))
    levels = ("token", "turn", "prefix", "geometric", "sequence")
    number = pick((torch.tensor, float))
    loss_fn = offcorr.Correction(
        _Spanned(over=pick(sorted(spans.SPANS))),
        pick((gates.Unclipped(), gates.PositionClip(0.2, 0.3), gates.DetachedClip(number(1.5)))),
        pick((None, weights.Truncate(number(1.2), level=pick(levels)), weights.SelfNormalise(over="group"))),
        (
            rejections.K3(number(0.2), level=pick(("token", "seq-sum", "seq-mean", "seq-max")), mismatch="total"),
            rejections.Veto(0.3, mismatch=pick(("engine", "staleness"))),
        ),
        aggregate=pick(("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")),
        count_rejected=pick((True, False)),
    )
    rows, width = pick(((1, 70), (2, 50), (8, 10), (12, 5)))
    turn_ids = pick((None, torch.arange(width).expand(rows, -1) // 4 % 3))
    batch = padded(rows, width, seed, 0.1, turn_ids=turn_ids)
    batch = cast(batch, pick((torch.float32, torch.float32, torch.bfloat16)))
    if pick((True, False)):
        batch = packed(batch, [pick((0, 1, width // 2, width)) for _ in range(rows - 1)] + [width])
    within_budget(loss_fn, batch)


# -- what a batch may look like ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs(dtype):
    within_budget(offcorr.get("tis"), cast(padded(), dtype))
    mixed = dataclasses.replace(padded(), logp=padded().logp.to(dtype))
    within_budget(offcorr.get("tis"), mixed)


def test_float64_runs_on_the_reference():
    batch = cast(padded(), torch.float64)
    with dispatch.use("triton"):
        assert dispatch.backend(offcorr.get("ppo"), batch) == "reference: logp is torch.float64"
        assert offcorr.get("ppo")(batch).coefficient.dtype == torch.float64


def test_strided_and_expanded_fields():
    batch = padded(rows=3, width=40)
    advantages = batch.advantages[:, None].expand(-1, 20)
    every_other = {name: getattr(batch, name)[:, ::2] for name in PER_TOKEN if name != "turn_ids"}
    within_budget(offcorr.get("icepop"), dataclasses.replace(batch, **every_other, advantages=advantages))


def test_advantages_of_tokens_and_of_one_token_sequences():
    batch = padded(rows=4, width=17)
    tokens = torch.randn(4, 17, generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = math.nan
    per_token = dataclasses.replace(batch, advantages=tokens)
    assert within_budget(offcorr.get("ppo"), per_token).metrics.compute()["offcorr/loss/nonfinite"] == 1
    single = packed(padded(rows=6, width=2, seed=4), [1] * 6)
    within_budget(offcorr.get("ppo"), single)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_masks_of_numbers(dtype):
    batch = padded()
    within_budget(offcorr.get("ppo"), dataclasses.replace(batch, mask=batch.mask.to(dtype)))


def test_fields_left_out():
    batch = padded()
    within_budget(offcorr.get("ppo"), dataclasses.replace(batch, rollout_logp=None))
    within_budget(offcorr.get("opsm"), dataclasses.replace(batch, rollout_logp=None))
    within_budget(offcorr.get("reinforce"), dataclasses.replace(batch, rollout_logp=None, old_logp=None))
    within_budget(offcorr.get("tis"), dataclasses.replace(batch, old_logp=None))


def test_nothing_valid():
    batch = padded()
    out = within_budget(offcorr.get("gspo"), dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)))
    assert out.loss == 0 and not out.coefficient.any()


def test_empty_batch_runs_on_the_reference():
    batch = padded().rows(slice(0, 0))
    with dispatch.use("triton"):
        assert dispatch.backend(offcorr.get("ppo"), batch) == "reference: the batch is empty"
        assert offcorr.get("ppo")(batch).loss == 0


def test_extreme_ratios_stay_finite():
    batch = padded()
    far = torch.where(torch.arange(65) % 2 == 0, 1e4, -1e4)
    wild = dataclasses.replace(batch, old_logp=batch.logp + far, rollout_logp=batch.logp - 2 * far)
    for name in ("ppo", "seq_tis", "holderpo", "veto"):
        out, gradient = run(offcorr.get(name), wild, "triton")
        assert out.loss.isfinite() and gradient.isfinite().all(), name
        assert all(math.isfinite(value) for value in out.metrics.compute().values()), name


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("gap", [0.5, -0.5])
def test_both_tails_of_ratios_on_one_side_of_1(gap, split, request):
    """No ratio of 1 comes in from masked tokens, empty lanes or empty rows."""
    if split:
        request.getfixturevalue("split_rows")
    batch = padded()
    rollout_logp = batch.old_logp - gap - 0.1 * torch.rand(batch.logp.shape, generator=torch.Generator().manual_seed(0))
    loss_fn, batch = offcorr.get("tis"), dataclasses.replace(batch, rollout_logp=rollout_logp)
    assert is_split(loss_fn, batch) == split
    got = within_budget(loss_fn, batch).metrics.compute()
    d = (batch.old_logp - rollout_logp)[batch.mask]
    assert got["offcorr/engine/ratio_min"] == pytest.approx(math.exp(d.min()), rel=1e-5)
    assert got["offcorr/engine/ratio_max"] == pytest.approx(math.exp(d.max()), rel=1e-5)
    assert got["offcorr/engine/abs_max"] == pytest.approx(float(d.abs().max()), rel=1e-5)


def test_moments_of_ratios_that_are_all_tiny():
    batch = padded()
    far = dataclasses.replace(batch, rollout_logp=torch.where(batch.mask, batch.old_logp + 200.0, math.nan))
    assert within_budget(offcorr.get("ppo"), far).metrics.compute()["offcorr/engine/ess_token"] == pytest.approx(1)


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_an_external_weight(per):
    batch = padded(rows=4, width=33)
    given = torch.rand((4, 33) if per == "token" else 4, generator=torch.Generator().manual_seed(1)) * 2
    given = torch.where(batch.mask, given, math.nan) if per == "token" else given
    for loss_fn in (offcorr.get("tis"), offcorr.get("gspo", weight=weights.SelfNormalise(weights.Truncate(2.0)))):
        weighted = dataclasses.replace(batch, weight=given)
        within_budget(loss_fn, weighted)
        flat = given[torch.arange(33) < torch.tensor([33, 0, 20, 17])[:, None]] if per == "token" else given
        within_budget(loss_fn, dataclasses.replace(packed(batch, [33, 0, 20, 17]), weight=flat))


def test_an_external_weight_that_is_not_finite():
    batch = padded(rows=2, width=9)
    given = torch.ones(2, 9)
    given[0, 0] = math.nan
    out = within_budget(offcorr.get("ppo"), dataclasses.replace(batch, weight=given))
    assert out.metrics.compute()["offcorr/loss/nonfinite"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["topr", "asymre"])
def test_a_reward_that_is_not_finite(name, value):
    batch = padded(rows=4, width=9)  # the second sequence has no valid token
    one, empty = torch.tensor([0, 0, 0, 1]).bool(), torch.tensor([0, 1, 0, 0]).bool()
    loss_fn, valid = offcorr.get(name), int(batch.mask[3].sum())
    for where, tokens in ((one, valid), (empty, 0), (one | empty, valid)):
        given = dataclasses.replace(batch, rewards=torch.where(where, value, batch.rewards))
        for layout, counted in ((given, tokens), (packed(given, [9, 9, 9, 9]), tokens)):
            assert within_budget(loss_fn, layout).metrics.data["offcorr/loss/nonfinite"].vector.item() == counted


# -- denominators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_aggregations_and_denominators(aggregate):
    length = {"max_length": 50} if AGGREGATIONS[aggregate].constant_length else {}
    loss_fn = offcorr.get("cispo", aggregate=aggregate, **length)
    given = (37, torch.tensor(12.5), torch.tensor([9])) if AGGREGATIONS[aggregate].unit != "none" else ()
    for denominator in (None, *given):
        within_budget(loss_fn, padded(), denominator=denominator)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_rejected_tokens_may_leave_the_denominator(aggregate):
    length = {"max_length": 50} if AGGREGATIONS[aggregate].constant_length else {}
    reject = (rejections.K1(0.7, 1.4, level="token"), rejections.Veto(0.2))
    loss_fn = offcorr.get("ppo", reject=reject, count_rejected=False, aggregate=aggregate, **length)
    batch = padded(rows=4)
    out = within_budget(loss_fn, batch)
    within_budget(loss_fn, packed(batch, [65, 0, 33, 9]))
    assert 0 < out.metrics.compute()["offcorr/loss/kept"] < 1
    if AGGREGATIONS[aggregate].divides_by_count:  # and by what the caller counted: not in the kernel
        dispatch._warn_once.cache_clear()
        with dispatch.use("triton"), pytest.warns(RuntimeWarning, match="reference: seq-mean-token-mean over kept"):
            loss_fn(batch, denominator=12.0, kept=True)
    elif AGGREGATIONS[aggregate].unit != "none":
        within_budget(loss_fn, batch, denominator=12.0, kept=True)


def test_constant_length_left_out_warns_and_takes_the_width():
    loss_fn = offcorr.get("ppo", aggregate="seq-mean-token-sum-norm")
    for batch in (padded(), packed(padded(), [9, 0, 33])):
        with pytest.warns(UserWarning, match="without max_length"):
            within_budget(loss_fn, batch)


def test_strict_says_where():
    batch = padded()
    logp = torch.where(batch.mask, batch.logp, 0.0)
    logp[0, 0] = math.nan
    with dispatch.use("triton"), pytest.raises(ValueError, match="the first at sequence 0, position 0"):
        offcorr.get("ppo", strict=True)(dataclasses.replace(batch, logp=logp))


def test_merged_statistics_are_used():
    loss_fn = offcorr.get("m2po")
    batch = padded(rows=4, spread=1.0)
    halves = [batch.rows(slice(0, 2)), batch.rows(slice(2, 4))]
    merged = loss_fn.statistics(halves[0]).merge(loss_fn.statistics(halves[1]))
    whole, _ = run(loss_fn, batch, "triton", denominator=10.0)
    parts = [run(loss_fn, half, "triton", denominator=10.0, statistics=merged)[0].coefficient for half in halves]
    torch.testing.assert_close(torch.cat(parts), whole.coefficient, rtol=0, atol=0)


# -- a user's own method, and what cannot be fused -----------------------------------------------------------


def leaning(log_ratio, logp, advantage, p):
    gradient = ops.exp(p.lean * ops.minimum(log_ratio, 0.0)) * advantage
    return gradient * logp, gradient


class Lean(NamedTuple):
    lean: float


@dataclass(frozen=True)
class _Leaning(gates.Gate):
    """sg(ratio^lean where below 1) A log pi."""

    lean: float = 1.0
    surrogate = staticmethod(leaning)
    detached = True

    @property
    def params(self) -> Lean:
        return Lean(self.lean)


def test_a_gate_of_ones_own_runs_fused_and_its_numbers_recompile_nothing():
    composition = set()
    for lean in (0.5, 1, 2.0):
        loss_fn = offcorr.Correction(gate=_Leaning(lean))
        within_budget(loss_fn, padded())
        composition.add(prepared(loss_fn, padded()).composition)
    assert len(composition) == 1


def falls_back(loss_fn, batch, match):
    dispatch._warn_once.cache_clear()
    expected, _ = run(loss_fn, batch, "reference")
    with pytest.warns(RuntimeWarning, match=match):
        out, _ = run(loss_fn, batch, "triton")
    assert torch.equal(out.coefficient, expected.coefficient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loss_fn, batch, "triton")  # said once


def gated(function: Any) -> offcorr.Correction:
    """A correction with a surrogate of one's own, which takes no ratio."""

    @dataclass(frozen=True)
    class _Own(gates.Gate):
        detached, uses_ratio = True, False
        surrogate = staticmethod(function)

    return offcorr.Correction(None, _Own())


def capped_exp(x):
    return ops.minimum(vocabulary.exp(x), 0.5)


def with_helpers(logp: torch.Tensor, advantage: Any) -> tuple[Any, "torch.Tensor"]:
    gradient: torch.Tensor = capped_exp(logp) * advantage
    return gradient * logp, gradient


def test_helpers_and_annotations_are_a_users_own():
    within_budget(gated(with_helpers), padded(rows=2, width=9))


CAP = 2.0


def capped(x):
    return ops.minimum(x, CAP)


def with_a_number_of_the_module(logp, advantage):
    gradient = capped(ops.exp(logp)) * advantage
    return gradient * logp, gradient


def test_a_number_of_the_module_runs_on_the_reference(monkeypatch):
    """The kernel would keep the number that it was compiled with."""
    loss_fn, batch = gated(with_a_number_of_the_module), padded(rows=2, width=9)
    falls_back(loss_fn, batch, "it reads the number CAP of its module, .* put it into params")
    before, _ = run(loss_fn, batch, "triton")
    monkeypatch.setitem(globals(), "CAP", 0.01)
    after, _ = run(loss_fn, batch, "triton")
    assert not torch.equal(before.coefficient, after.coefficient)


def by_a_method(logp, advantage):
    gradient = logp.exp() * advantage
    return gradient * logp, gradient


def test_a_method_of_a_value_is_named():
    falls_back(gated(by_a_method), padded(rows=2, width=9), r"by_a_method .*it calls the method logp.exp: use ops.exp")


WRITTEN = """
from offcorr import ops

def surrogate(logp, advantage):
    gradient = 1.5 * advantage
    return gradient * logp, gradient
"""


def test_a_file_edited_after_it_was_imported_is_not_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "written_by_a_user.py"
    path.write_text(WRITTEN)
    imported = importlib.import_module("written_by_a_user")
    path.write_text(WRITTEN.replace("1.5", "-2.5"))
    falls_back(gated(imported.surrogate), padded(rows=2, width=9), "its source has changed since it was imported")


def test_a_function_without_a_source_file_runs_on_the_reference():
    scope: dict[str, Any] = {}
    exec("def typed_in(logp, advantage):\n    return advantage * logp, advantage", scope)
    falls_back(gated(scope["typed_in"]), padded(), "typed_in cannot run in Triton")


def torch_only(logp, advantage):
    return advantage * logp, torch.special.erf(advantage) * 0 + advantage


def assigned_twice(logp, advantage):
    gradient = derivative = advantage * 2
    return gradient * logp, derivative


def test_a_function_that_triton_refuses_runs_on_the_reference():
    factor = 2.0

    def closing(logp, advantage):
        return factor * advantage * logp, factor * advantage

    batch = padded(rows=2, width=9)
    falls_back(gated(torch_only), batch, "torch_only cannot run in Triton")
    falls_back(gated(assigned_twice), batch, "Triton cannot compile it" if INTERPRETED else "assigned_twice")
    falls_back(gated(closing), batch, "takes factor from the function around it")
    falls_back(gated(lambda logp, advantage: (advantage * logp, advantage)), batch, "is no def of its own")


@pytest.mark.parametrize("of", ["staleness", "engine", "total"])
@pytest.mark.parametrize(
    "rejection",
    [
        partial(rejections.BinaryKL, 0.05),
        partial(rejections.DPPO, "tv", 0.05, 0.05),
        partial(rejections.DPPO, "kl", delta=0.02),
        partial(rejections.VACO, 0.1),
        partial(rejections.OPSM, 0.0),
        partial(rejections.K2, 0.02, level="token"),
    ],
    ids=lambda made: made.func.__name__ + str(made.args[:1]),
)
def test_every_pair_of_policies(rejection, of):
    """A stage sees the two policies that it compares, whatever the ratio compares."""
    batch = padded(rows=6, width=17, seed=2)
    kept = within_budget(offcorr.get("ppo", reject=rejection(mismatch=of)), batch).metrics.compute()[
        "offcorr/loss/kept"
    ]
    assert 0 < kept < 1


@pytest.mark.parametrize("mode", ["one-side", "two-side", "ring"])
def test_every_mode_of_rec(mode):
    within_budget(offcorr.get("rec", mode=mode), padded(rows=2, width=17, spread=0.6))


@pytest.mark.parametrize("over", ["batch", "group"])
def test_self_normalised_weights(over):
    inner = weights.Mask(0.5, 2.0, level="turn")
    both = (weights.SelfNormalise(inner, over=over), weights.SelfNormalise(weights.Truncate(1.2, mismatch="staleness")))
    loss_fn = offcorr.Correction(ratio=None, gate=gates.ScoreFunction(), weight=both)
    batch = padded(rows=5)
    within_budget(loss_fn, batch)
    within_budget(loss_fn, packed(batch, [65, 0, 9, 33, 1]), denominator=torch.tensor(40.0))


def over_torch(log_ratio, advantage):
    ratio = torch.exp(log_ratio)
    return ratio * advantage, ratio * advantage


@dataclass(frozen=True)
class _TorchGate(gates.Gate):
    surrogate = staticmethod(over_torch)


def test_the_choice():
    batch = padded()
    assert dispatch.backend(offcorr.get("ppo"), batch) == "reference: logp is on cpu; on a GPU it would be: triton"
    of_torch = offcorr.Correction(gate=_TorchGate())
    reason = "reference: over_torch cannot run in Triton"
    assert dispatch.backend(of_torch, batch).startswith(
        f"reference: logp is on cpu; on a GPU it would be: {reason} (it"
    )
    with dispatch.use("reference"):
        assert dispatch.backend(offcorr.get("ppo"), batch) == "reference: it was asked for"
    with pytest.raises(ValueError, match="backend is 'cuda', expected one of"), dispatch.use("cuda"):
        pass


def not_a_number_below(log_ratio, logp, advantage, p):
    gradient = ops.minimum(ops.log(log_ratio), p.lean) * advantage
    return gradient * logp, gradient


def test_what_is_not_a_number_is_not_trained_on():
    """A bound does not hide it: the smaller of NaN and a number is NaN."""

    @dataclass(frozen=True)
    class _NotANumber(_Leaning):
        surrogate = staticmethod(not_a_number_below)

    out = within_budget(offcorr.Correction(gate=_NotANumber()), padded(rows=2, width=9))
    assert out.metrics.data["offcorr/loss/nonfinite"].vector > 0


@pytest.mark.parametrize("build", [lambda: offcorr.get("holderpo"), lambda: offcorr.get("gmpo", eps_high=30.0)])
def test_ratios_whose_span_leaves_the_limits(build):
    """A span's value may be beyond +-20 where the log-ratio that the rule makes of it is not."""
    batch = padded(rows=3, width=40)
    far = torch.where(torch.arange(40) % 9 == 0, 15.0, 0.6)
    batch = dataclasses.replace(batch, old_logp=torch.where(batch.mask, batch.logp - far, batch.old_logp))
    within_budget(build(), batch)


def tenth(value):
    return value / 10, ops.zeros_like(value) + 1


def test_a_rule_sees_the_value_of_its_span_unclamped():
    Tenth = type("TenthOfTheSum", (offcorr.ratios.Ratio,), {"span": "sequence", "rule": staticmethod(tenth)})
    logp = torch.full((1, 64), -2.0)
    batch = Batch(logp=logp, old_logp=logp - 0.6, advantages=torch.ones(1), mask=logp < 0)  # the sum is 38.4
    loss_fn = offcorr.Correction(ratio=Tenth(), gate=offcorr.gates.DetachedRatio())
    for backend in ("reference", "triton"):
        out, _ = run(loss_fn, batch, backend)
        torch.testing.assert_close(-64 * out.coefficient, torch.full_like(logp, 3.84).exp())
    within_budget(loss_fn, batch)
