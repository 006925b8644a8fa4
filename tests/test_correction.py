"""Tests of ``Correction``: external weights, sums without a denominator, statistics over ranks, couplings."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import sys
import warnings
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import offcorr
from offcorr import Batch, Statistics, testing, weights
from offcorr.methods.registry import catalogue, illustration
from offcorr.stages.checks import warn_again
from tests.fresh import python

METHODS = [method.name for method in catalogue()]


@dataclasses.dataclass(frozen=True)
class Sums:
    total: Any

    def merge(self, other):
        return Sums(self.total + other.total)


@dataclasses.dataclass(frozen=True)
class NoMerge:
    total: torch.Tensor


def with_length(name, **options):
    return illustration(name, **options).with_max_length(32)


# -- Batch.weight ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_multiplies_the_loss_term(name):
    """It does not multiply the advantage, which gives another gradient where the gate is not proportional to it."""
    batch, loss_fn = testing.example(), with_length(name)
    plain = loss_fn(batch)
    draw = torch.Generator().manual_seed(1)
    per_sequence, per_token = torch.rand(7, generator=draw).double(), torch.rand(7, 12, generator=draw).double()
    for weight, spread in ((per_sequence, per_sequence[:, None]), (per_token, per_token)):
        weighted = loss_fn(dataclasses.replace(batch, weight=weight))
        torch.testing.assert_close(weighted.coefficient, plain.coefficient * spread)
    junk = torch.where(batch.mask, per_token, math.nan)
    torch.testing.assert_close(
        loss_fn(dataclasses.replace(batch, weight=junk)).coefficient, plain.coefficient * per_token
    )


def test_a_weight_of_a_packed_batch():
    batch, loss_fn = testing.example(), with_length("tis")
    keep = torch.ones_like(batch.mask)
    per_token = {name: getattr(batch, name)[keep] for name in ("logp", "old_logp", "rollout_logp", "mask")}
    ends = torch.arange(8) * 12
    packed = Batch.packed(cu_seqlens=ends, advantages=batch.advantages, **per_token)
    weight = torch.rand(7, 12, generator=torch.Generator().manual_seed(0)).double()
    for ours, theirs in ((weight, weight.flatten()), (weight[:, 0], weight[:, 0])):
        wanted = loss_fn(dataclasses.replace(batch, weight=ours)).coefficient
        got = loss_fn(dataclasses.replace(packed, weight=theirs)).coefficient
        torch.testing.assert_close(got.view(7, 12), wanted)
    factor = torch.rand(7, generator=torch.Generator().manual_seed(1)).double()
    both = dataclasses.replace(packed, weight=weight.flatten()).weighted(factor)
    torch.testing.assert_close(both.weight.view(7, 12), weight * factor[:, None])


def test_a_weight_that_is_no_number_is_counted():
    batch = testing.example()
    weight = torch.ones_like(batch.logp)
    weight[0, 0] = math.nan
    out = offcorr.get("ppo")(dataclasses.replace(batch, weight=weight))
    assert out.coefficient[0, 0] == 0 and out.coefficient.isfinite().all()
    with pytest.warns(RuntimeWarning, match="1 valid tokens gave no finite number"):
        assert out.metrics.compute()["offcorr/loss/nonfinite"] == 1


def test_a_weight_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(7,\) or \(7, 12\) to go with logp"):
        dataclasses.replace(testing.example(), weight=torch.ones(3))


# -- aggregate="sum" -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_sum_has_no_denominator(name):
    batch, loss_fn = testing.example(), illustration(name, aggregate="sum")
    mean = illustration(name, aggregate="seq-mean-token-sum")(batch, denominator=1.0)
    torch.testing.assert_close(loss_fn(batch).coefficient, mean.coefficient)
    torch.testing.assert_close(loss_fn(batch).loss, mean.loss)
    with pytest.raises(ValueError, match="denominator is 8, expected None: aggregate 'sum' divides by nothing"):
        loss_fn(batch, denominator=8)
    assert offcorr.from_config(loss_fn.to_config()) == loss_fn


# -- statistics over ranks -------------------------------------------------------------------------------------


def coupled():
    yield "bapo", offcorr.get("bapo")
    yield "m2po", offcorr.get("m2po", tau=0.01)
    yield "asymre", offcorr.get("asymre")
    yield "self-normalised", offcorr.get("ppo", weight=weights.SelfNormalise(weights.Truncate(1.5), over="group"))


def _tensors(statistics):
    for part in statistics.parts.values():
        for field in dataclasses.fields(part):
            yield getattr(part, field.name).reshape(-1)


@pytest.mark.parametrize("name, loss_fn", coupled(), ids=lambda value: value if isinstance(value, str) else "")
def test_statistics_travel_as_tensors(name, loss_fn):
    """Ranks have different numbers of sequences, but every gathered tensor has the same length on all ranks."""
    batch = testing.example()
    parts = [loss_fn.statistics(batch.rows(rows)) for rows in (slice(0, 1), slice(1, 4), slice(4, 7))]
    calls = []

    def gather(vector):
        """Imitates a collective: returns the tensors that all ranks pass in this call."""
        number = len(calls)
        calls.append(vector.dtype)
        columns = [list(_tensors(part))[number // 2] for part in parts]
        if number % 2 == 0:
            assert vector.dtype == torch.int64 and vector.shape == (1,)
            return torch.tensor([[len(column)] for column in columns])
        longest = max(map(len, columns))
        assert vector.shape == (longest,) and vector.dtype == columns[0].dtype
        return torch.stack([torch.nn.functional.pad(column, (0, longest - len(column))) for column in columns])

    everywhere = parts[1].all_reduce(gather)
    alone = reduce(Statistics.merge, parts)
    for part in (batch, batch.rows(slice(2, 5))):
        torch.testing.assert_close(
            loss_fn(part, statistics=everywhere).coefficient, loss_fn(part, statistics=alone).coefficient
        )
    assert not any(dtype == torch.uint8 for dtype in calls)


@pytest.mark.parametrize(
    "statistics, message",
    [
        ([1.0], "Faulty.statistics returned a list, expected a frozen dataclass of tensors with merge"),
        (NoMerge(torch.zeros(2)), "Faulty.statistics returned a NoMerge, expected a frozen dataclass .* with merge"),
        (Sums(1.0), "Faulty.statistics: total is 1.0, expected a tensor of at most one dimension"),
        (
            Sums(torch.zeros(2, 2)),
            "(?s)Faulty.statistics: total is tensor.*, expected a tensor of at most one dimension",
        ),
    ],
)
def test_statistics_that_could_not_be_merged_are_refused(statistics, message):
    class Faulty(offcorr.controllers.Controller):
        becomes, couples = "gate", "batch"

        def statistics(self, tokens):
            return statistics

        def resolve(self, statistics):
            return offcorr.gates.Clip()

    with pytest.raises(TypeError, match=message):
        offcorr.Correction(gate=Faulty()).statistics(testing.example())


@pytest.mark.parametrize(
    "spec, of, message",
    [
        ("m2po", "bapo", "statistics are of gate BalancedClip, but those of 'm2po' are of reject.0 MomentBudget"),
        ("m2po?mode=clip", "bapo", "statistics are of gate BalancedClip, but those of 'm2po' are of gate MomentClip"),
        ("ppo", "bapo", "statistics are of gate BalancedClip, but those of 'ppo' are of no controller"),
        (
            "m2po?mismatch=total",
            "m2po",
            "of reject.0 MomentBudget, but those of 'm2po' are of reject.0 MomentBudget(mismatch='total')",
        ),
    ],
)
def test_statistics_of_another_method_are_refused(spec, of, message):
    loss_fn, batch = offcorr.get(spec), testing.example()
    statistics = offcorr.get(of).statistics(batch)
    for call in (
        loss_fn.resolve,
        lambda given: loss_fn(batch, statistics=given),
        lambda s: loss_fn.kept_units(batch, s),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(statistics)


@pytest.mark.parametrize("statistics", ["junk", {}, 0, ""])
@pytest.mark.parametrize("name", ["ppo", "bapo"])
def test_what_is_no_statistics_is_refused(name, statistics):
    loss_fn, batch = offcorr.get(name), testing.example()
    message = f"statistics is a {type(statistics).__name__}, expected an offcorr.Statistics"
    for call in (lambda: loss_fn(batch, statistics=statistics), lambda: loss_fn.kept_units(batch, statistics)):
        with pytest.raises(TypeError, match=message):
            call()


def test_statistics_of_two_methods_do_not_merge():
    bapo, m2po = (offcorr.get(name).statistics(testing.example()) for name in ("bapo", "m2po"))
    message = "the other statistics are of reject.0 MomentBudget, expected gate BalancedClip, as these are"
    with pytest.raises(ValueError, match=message):
        bapo.merge(m2po)
    with pytest.raises(TypeError, match="statistics is a NoneType"):
        bapo.merge(None)


def test_statistics_of_a_rebuilt_correction_are_taken():
    """One whose aggregation or numbers have changed since: only its controllers count."""
    batch, options = testing.example(), {"aggregate": "seq-mean-token-sum"}
    statistics = offcorr.get("m2po").statistics(batch)
    coefficient = offcorr.get("m2po", tau=0.01, **options)(batch, statistics=statistics).coefficient
    assert torch.equal(coefficient, offcorr.get("m2po", tau=0.01, **options)(batch).coefficient)


# -- controllers and their names -------------------------------------------------------------------------------


def test_two_controllers_that_log_one_name():
    budgets = (offcorr.controllers.MomentBudget(0.01), offcorr.controllers.MomentBudget(0.04, mismatch="engine"))
    logged = [
        {name: value for name, value in offcorr.Correction(reject=reject)(testing.example()).metrics.compute().items()}
        for reject in (budgets, *budgets)
    ]
    name = "offcorr/control/squared_log_ratio"
    both, first, second = logged
    assert both[name] == first[name] and both["offcorr/control/reject.1/squared_log_ratio"] == second[name]


def test_a_resolved_correction_is_named_by_its_method(monkeypatch):
    """A warning that it does not run in the kernel says which method it is."""
    names = []
    monkeypatch.setattr(offcorr.correction.dispatch, "run", lambda plan, *rest: names.append(plan.method))
    for name in ("bapo", "m2po", "tis"):
        offcorr.get(name)(testing.example())
    assert names == ["bapo", "m2po", "tis"]
    resolved = offcorr.get("bapo").resolve(offcorr.get("bapo").statistics(testing.example()))
    assert resolved.weight is resolved.reject is None


def test_a_number_of_a_controller_is_named_by_the_coefficient_too():
    class NoBound(OfRows):
        couples = "batch"

        def resolve(self, statistics):
            return offcorr.gates.Clip(torch.tensor(math.nan), torch.tensor(0.2))

    loss_fn = offcorr.Correction(gate=NoBound(), strict=True)
    for call in (loss_fn, loss_fn.coefficient):
        with pytest.raises(ValueError, match="its number low is nan, which NoBound.resolve computed"):
            call(testing.example())


def test_couplings():
    assert offcorr.get("bapo").couples == offcorr.get("m2po").couples == {"batch"}
    assert offcorr.get("asymre").couples == {"group"}
    both = offcorr.get("bapo", weight=weights.SelfNormalise(weights.Truncate(2.0), over="group"))
    assert both.couples == {"batch", "group"}
    plain = {name for name in METHODS if not illustration(name).couples}
    assert sorted(set(METHODS) - plain) == ["asymre", "bapo", "m2po", "p3o", "sat"]


def test_a_constant_length_keeps_the_name():
    loss_fn = offcorr.get("ppo", aggregate="seq-mean-token-sum-norm")
    assert loss_fn.with_max_length(64).to_config() == {**loss_fn.to_config(), "max_length": 64}
    assert loss_fn.with_max_length(64).with_max_length(32).max_length == 64
    assert offcorr.get("ppo").with_max_length(64) == offcorr.get("ppo")


@pytest.mark.parametrize("name", ["tis", "bapo", "asymre"])
def test_a_correction_is_pickled_after_use(name):
    """Data loaders, launchers and caches pickle what a trainer holds."""
    loss_fn, batch = offcorr.get(name), testing.example()
    out = loss_fn(batch)
    again = pickle.loads(pickle.dumps(loss_fn))
    assert again == loss_fn and again.to_config() == loss_fn.to_config() and again.method == name
    torch.testing.assert_close(again(batch).coefficient, out.coefficient)


def test_one_loss_is_a_short_walk_through_the_library():
    """A reader with a debugger steps through few functions: at most 70 calls for TIS with every metric (140 once)."""
    root, calls = str(Path(offcorr.__file__).parent), []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            calls.append(f"{code.co_filename.removeprefix(root)}:{code.co_name}")

    loss_fn, batch = offcorr.get("tis"), testing.example()
    loss_fn(batch)  # tables that are made once
    batch = dataclasses.replace(batch)
    sys.setprofile(note)
    try:
        loss_fn(batch)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 70, Counter(calls)


# -- inputs that would mislead ---------------------------------------------------------------------------------


@pytest.fixture
def heard():
    """Warnings that are given once are given again."""
    warn_again()
    yield
    warn_again()


@pytest.mark.parametrize("name", ["logp", "old_logp", "rollout_logp"])
def test_probabilities_in_place_of_log_probs(name, heard):
    batch = testing.example()
    with pytest.warns(RuntimeWarning, match=f"^{name} is above 0 on valid tokens.*were probabilities passed"):
        offcorr.get("tis")(dataclasses.replace(batch, **{name: getattr(batch, name).exp()}))
    junk = torch.where(batch.mask, getattr(batch, name), 7.0)  # under the mask it is nobody's business
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offcorr.get("tis")(
            dataclasses.replace(batch, **{"old_logp": batch.logp, "rollout_logp": batch.logp, name: junk})
        )


@pytest.mark.parametrize(
    "values, warns",
    [
        ([0.05, -1.0, -2.0], True),  # noise on a probability, say
        ([0.002, 0.009, 0.0001], True),  # probabilities of tokens that are all unlikely
        ([0.004, -1.0, -2.0], False),  # a rounded bfloat16 log-prob
        ([1e-6, 2e-7, 1e-6], False),  # three sure tokens in float32
        ([0.0, 0.0, 0.0], False),
        ([math.nan, -1.0, -math.inf], False),
    ],
)
def test_small_probabilities_and_rounding_are_told_apart(values, warns, heard):
    mask = torch.tensor([[True, True, True, False]])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        offcorr.Batch(logp=torch.tensor([[*values, 0.0]]), advantages=torch.ones(1), mask=mask)
    said = [str(w.message) for w in seen if "were probabilities passed" in str(w.message)]
    expected = "logp is above 0 on valid tokens, as no log-prob is: were probabilities passed, or -log p?"
    assert said == ([expected] if warns else [])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "field, values, warns",
    [
        ("entropy", [-2.0, 0.0, -0.3], True),
        ("entropy", [-0.002, -0.009, -0.0001], True),  # of tokens that are all nearly sure
        ("entropy", [-0.004, 1.0, 2.0], False),  # rounded bfloat16
        ("entropy", [-1e-4, 0.0, math.nan], False),
        ("entropy", [math.nan, -2.0, 1.0], True),
        ("sum_sq_probs", [-0.5, 0.5, 1.0], True),
        ("weight", [-1.0, 2.0, 1.0], True),
        ("weight", [0.0, 1.0, math.nan], False),
    ],
)
def test_a_field_below_0_that_cannot_be(field, values, warns, packed, heard):
    """Under the mask it may be."""
    given = torch.tensor([[*values, -7.0]])
    mask = torch.tensor([[True, True, True, False]])
    fields = {"logp": torch.full((1, 4), -1.0), "mask": mask, field: given}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if packed:
            fields = {name: value[0] for name, value in fields.items()} | {"cu_seqlens": torch.tensor([0, 4])}
        make = offcorr.Batch.packed if packed else offcorr.Batch
        make(advantages=torch.ones(1), **fields)
    assert [f"{field} is below 0 on valid tokens" in str(one.message) for one in seen] == [True] * warns


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weight, warns", [([1.0, -0.5], True), ([-0.5, 1.0], False)])
def test_a_weight_below_0_of_a_sequence(weight, warns, packed, heard):
    """The first sequence has no valid token."""
    logp, mask = torch.full((2, 3), -1.0), torch.tensor([[False] * 3, [True] * 3])
    fields = {"advantages": torch.ones(2), "weight": torch.tensor(weight)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if packed:
            ends = torch.tensor([0, 3, 6])
            offcorr.Batch.packed(logp=logp.flatten(), mask=mask.flatten(), cu_seqlens=ends, **fields)
        else:
            offcorr.Batch(logp=logp, mask=mask, **fields)
    assert ["weight is below 0 on valid tokens" in str(one.message) for one in seen] == [True] * warns


@pytest.mark.parametrize("length, warns", [(3, True), (6, False), (None, False)])
def test_a_max_length_that_is_exceeded(length, warns, heard, monkeypatch):
    """By valid tokens, not by the width."""
    monkeypatch.setattr("offcorr.stages.checks._WARNED", set())
    logp = torch.full((2, 9), -1.0)
    mask = torch.arange(9) < torch.tensor([[6], [2]])
    batch = offcorr.Batch(logp=logp, old_logp=logp, advantages=torch.ones(2), mask=mask)
    loss_fn = offcorr.get("ppo", aggregate="seq-mean-token-sum-norm", max_length=length)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_fn(batch)
        loss_fn(batch)
    said = [str(one.message) for one in seen if "max_length is" in str(one.message)]
    assert (
        said
        == [
            "max_length is 3, and a sequence has 6 valid tokens: seq-mean-token-sum-norm divides by "
            "max_length, which is to be the longest completion allowed"
        ]
        * warns
    )


CAPS = {
    "cispo?cap=.28": "DetachedClip: cap is 0.28",
    "cispo?low=1.5": "DetachedClip: low is 1.5",
    "aipo?cap=.5": "DetachedClip: cap is 0.5",
    "tis?cap=.5": "Truncate: cap is 0.5",
    "vcpo?cap=.5": "Truncate: cap is 0.5",
    "icepop?low=.1&high=.28": "Mask: high is 0.28",
    "seq_mis?cap=.5": "Mask: high is 0.5",
    "dispo?neg_high=.5": "SignClip: neg_high is 0.5",
    "dispo?pos_low=2": "SignClip: pos_low is 2",
    "geo_rs?low=.1&high=.2": "Geometric: high is 0.2",
    "pnpo?low=1.1&high=1.2": "NarrowingInterval: low is 1.1",
}


@pytest.mark.parametrize("spec", CAPS)
def test_a_bound_on_the_ratio_that_leaves_1_out(spec, heard):
    """A distance from 1 in its place would scale, or drop, the tokens on-policy."""
    with pytest.warns(
        RuntimeWarning, match=f"^{CAPS[spec]}, so that on-policy tokens, whose ratio is 1, are"
    ) as caught:
        loss_fn = offcorr.get(spec)
    (said,) = [str(one.message) for one in caught]
    assert "pass 1 - epsilon_low" in said if "low is" in said else "pass 1 + epsilon_high" in said
    batch = testing.example()
    agree = dataclasses.replace(batch, old_logp=batch.logp, rollout_logp=batch.logp)
    plain = offcorr.get("reinforce", aggregate=loss_fn.aggregate)(agree).coefficient
    made = loss_fn(agree).coefficient
    assert not torch.allclose(made, plain), "on-policy tokens are left alone"
    assert ("are dropped" in said) == (not made.any())


@pytest.mark.parametrize("name", offcorr.available())
def test_published_bounds_have_1_inside(name, heard):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        illustration(name)


@pytest.mark.parametrize("name, warns", [("prefix_is", True), ("sequence_is", True), ("seq_tis", True), ("ppo", False)])
def test_half_precision_log_probs_under_a_product(name, warns, heard):
    batch = testing.example()
    logp = batch.logp.clamp(max=0).bfloat16()
    half = dataclasses.replace(batch, logp=logp, old_logp=logp.float(), rollout_logp=logp.float())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        offcorr.get(name)(half)
    told = [str(w.message) for w in seen if "multiplies the ratios of many tokens" in str(w.message)]
    assert bool(told) == warns and all("logp is torch.bfloat16" in message for message in told)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: weights.Truncate(0.0), "Truncate: cap is 0.0, expected a finite number > 0 or None"),
        (lambda: weights.Truncate(2.0, level="seq"), "Truncate: level is 'seq', did you mean 'sequence'"),
        (lambda: weights.Truncate(2.0, mismatch="rollout"), "Truncate: mismatch is 'rollout', expected one of"),
        (lambda: weights.Mask(0.0, 0.0), "Mask: high is 0.0, expected a finite number > 0"),
        (lambda: weights.Bound(high=0.0), "Bound: high is 0.0, expected a finite number > 0"),
        (lambda: offcorr.get("cispo", cap=0), "cap is 0, expected a finite number > 0"),
        (lambda: offcorr.get("tis", cap=0.0), "Truncate: cap is 0.0, expected a finite number > 0"),
        (lambda: offcorr.get("dispo", pos_high=0.0), "pos_high is 0.0, expected a finite number > 0"),
    ],
)
def test_a_bound_that_trains_nothing(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_contract_check_is_quiet_and_swallows_no_warning(heard):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testing.check("minpro")
    batch = testing.example()
    with pytest.warns(RuntimeWarning, match="logp is above 0"):
        dataclasses.replace(batch, logp=-batch.logp)


def test_words_that_are_as_near():
    with pytest.raises(ValueError, match=re.escape("unknown method 'dappo', did you mean 'dapo' or 'dppo'? offcorr.")):
        offcorr.get("dappo")
    with pytest.raises(ValueError, match=re.escape("ppo has no option 'colour'. It has ['eps_low'")):
        offcorr.get("ppo", colour=1)


def test_a_warning_points_at_the_caller(heard):
    with pytest.warns(UserWarning, match="padded width") as seen:
        offcorr.get("ppo", aggregate="seq-mean-token-sum-norm")(testing.example())
    assert not seen[0].filename.startswith(str(Path(offcorr.__file__).parent))


@dataclasses.dataclass(frozen=True)
class OfRows(offcorr.controllers.Controller):
    becomes = "gate"

    @property
    def couples(self):
        return "rows"

    def statistics(self, tokens):
        return Sums(tokens.logp.sum())

    def resolve(self, statistics):
        return offcorr.gates.Clip()


class NeedsWhatIsNoField(OfRows):
    couples, needs = "batch", frozenset({"rolout_logp"})


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: offcorr.get("ppo")(torch.zeros(2, 3)), TypeError, "batch is a Tensor, expected an offcorr.Batch"),
        (
            lambda: offcorr.get("ppo")(testing.example(), denominator="3"),
            ValueError,
            "denominator is '3', expected a pos",
        ),
        (
            lambda: offcorr.from_config({"method": "ppo", "gate": {"name": "clip"}}),
            ValueError,
            "gate is given beside method 'ppo', whose own it is: write method 'custom'",
        ),
        (
            lambda: offcorr.Correction(gate=NeedsWhatIsNoField()),
            ValueError,
            "NeedsWhatIsNoField.needs has 'rolout_logp'",
        ),
        (lambda: offcorr.Correction(gate=OfRows()), ValueError, "OfRows.couples is 'rows', expected one of"),
        (
            lambda: dataclasses.replace(testing.example(), rollout_logp=None).tokens.log_ratio("engine"),
            ValueError,
            "rollout_logp is None, but log_ratio",
        ),
    ],
)
def test_what_cannot_be_meant(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


COMPILED = """
import dataclasses
import torch
import offcorr

given, loss_fn = offcorr.testing.example(), offcorr.get("minpro")

def loss(logp):
    return 2 * loss_fn(dataclasses.replace(given, logp=logp)).loss + 1

gradients = []
for compute in (loss, torch.compile(loss, backend="eager")):
    logp = given.logp.clone().requires_grad_()
    compute(logp).backward()
    gradients.append(logp.grad)
assert gradients[0].any() and torch.equal(*gradients)
"""


def test_a_compiled_loss_has_the_same_gradient():
    """torch.compile hides the tensors of a tuple from autograd.  In a process without the checks of shapes."""
    done = python(COMPILED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["ppo", "m2po", "geo_rs", "asymre", "drpo"])
def test_the_coefficient_alone_is_that_of_a_call(method):
    correction, batch = offcorr.get(method), offcorr.testing.example()
    torch.testing.assert_close(correction.coefficient(batch), correction(batch).coefficient, rtol=0, atol=0)


def test_the_coefficient_alone_refuses_what_a_call_refuses():
    correction = offcorr.get("geo_rs", count_rejected=False)
    with pytest.raises(ValueError, match="count_rejected=False"):
        correction.coefficient(offcorr.testing.example(), denominator=8.0)


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("ppo", {}, "no weight or rejection drops a token"),
        ("icepop", {"aggregate": "sum"}, "'sum' divides by no count"),
        ("icepop", {}, None),
        ("icepop", {"aggregate": "seq-mean-token-mean"}, None),
    ],
)
def test_a_denominator_of_what_is_kept_that_changes_nothing_is_told(name, options, said, heard):
    batch = testing.example()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        divided = offcorr.get(name, count_rejected=False, **options)
    counted = offcorr.get(name, **options)
    assert divided.divides_by_kept == (said is None)
    if said is None:
        assert not told and not torch.equal(divided(batch).loss, counted(batch).loss)
    else:
        assert str(told[0].message) == f"count_rejected=False changes nothing here: {said}" and len(told) == 1
        assert torch.equal(divided(batch).loss, counted(batch).loss)
