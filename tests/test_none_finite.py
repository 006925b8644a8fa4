"""A field without a finite number on any token that counts is an error that names it; single ones are harmless."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.kernels import dispatch
from offcorr.metrics import Metrics
from offcorr.training import Step

FIELDS = ("logp", "old_logp", "advantages", "weight")


def fields(**changes):
    logp = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    named = dict(logp=logp, old_logp=logp - 0.1, rollout_logp=logp - 0.2, advantages=torch.ones(2), mask=mask)
    return named | changes


def bad(name, value=math.nan):
    return torch.full_like(fields()[name] if name != "weight" else torch.ones(2), value)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (-math.inf, "infinite")])
@pytest.mark.parametrize("name", FIELDS)
def test_none_finite_is_an_error(name, value, word, strict):
    with pytest.raises(ValueError, match=rf"{name} is {word} on all 3 valid tokens, expected finite numbers"):
        offcorr.get("tis", strict=strict)(Batch(**fields(**{name: bad(name, value)})))


@pytest.mark.parametrize("shape", [(5,), (2,)])
def test_of_a_packed_batch(shape):
    logp = torch.full((5,), -1.0)
    with pytest.raises(ValueError, match="advantages is NaN on all 5 valid tokens"):
        Batch.packed(
            logp=logp, advantages=torch.full(shape, math.nan), mask=logp < 0, cu_seqlens=torch.tensor([0, 2, 5])
        )


def test_only_the_rows_that_count_are_looked_at():
    logp = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    with pytest.raises(ValueError, match="advantages is NaN on all 3 valid tokens"):
        Batch(logp=logp, advantages=torch.tensor([math.nan, 1.0]), mask=mask)
    Batch(logp=logp, advantages=torch.tensor([1.0, math.nan]), mask=mask)
    Batch(logp=logp * math.nan, advantages=torch.ones(2), mask=torch.zeros_like(mask))  # no token counts


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_nan_under_the_mask_is_harmless(name, strict):
    clean = fields(advantages=torch.ones(2, 3), weight=torch.ones(2, 3))
    given = clean[name].clone()
    given[~clean["mask"]] = math.nan
    loss_fn = offcorr.get("tis", strict=strict)
    assert torch.equal(loss_fn(Batch(**clean | {name: given})).coefficient, loss_fn(Batch(**clean)).coefficient)


def test_a_single_one_is_counted_and_told_by_the_metrics():
    logp = fields()["logp"].clone()
    logp[0, 0] = math.nan
    out = offcorr.get("tis")(Batch(**fields(logp=logp)))
    with pytest.warns(RuntimeWarning, match="1 valid tokens gave no finite number") as caught:
        out.metrics.compute()
    assert caught[0].filename == __file__


def on_a_device(**changes):
    """A batch whose values were not looked at, as on a GPU."""
    batch = Batch(**fields())
    return batch.replaced(**changes)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("read", [Metrics.compute, Metrics.means])
def test_where_no_value_is_read_the_metrics_say_it(name, read):
    out = offcorr.get("tis")(on_a_device(**{name: bad(name)}))
    with pytest.raises(ValueError, match="not one of 3 valid tokens gave a finite number to train on: logp, old_logp"):
        read(out.metrics)


@pytest.mark.parametrize("name", FIELDS)
def test_a_step_says_it_too(name):
    step = Step(offcorr.get("tis"))
    step.begin(tokens=3)
    step.loss(step.place(on_a_device(**{name: bad(name)})))
    with pytest.raises(ValueError, match="not one of 3 valid tokens"):
        step.metrics()


def test_none_scored_is_told_by_the_metrics_and_refused_where_strict():
    batch = Batch(**fields(rollout_logp=bad("rollout_logp")))
    with pytest.warns(RuntimeWarning, match="rollout_logp is NaN or infinite on all 3 valid tokens") as caught:
        offcorr.get("tis")(batch).metrics.compute()
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="rollout_logp is NaN on all 3 valid tokens"):
        offcorr.get("tis", strict=True)(batch)
    offcorr.get("ppo", strict=True)(batch)  # which does not look at it


def test_a_call_reads_no_value(monkeypatch):
    """So that a call on a GPU has no synchronisation."""
    batch = Batch(**fields())

    def refuse(*_):
        raise AssertionError("a value was read")

    with dispatch.use("reference"):
        for name in ("__bool__", "item", "tolist", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        offcorr.get("tis")(batch)


def test_ordinary_batches_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offcorr.get("tis")(Batch(**fields())).metrics.compute()


# -- rewards ---------------------------------------------------------------------------------------------------


def rewarded(rewards, mask=None):
    """A batch off-policy whose second sequence, with a finite reward that is not above 0, would be tapered."""
    logp = torch.full((len(rewards), 4), -1.0)
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    return Batch(
        logp=logp,
        old_logp=logp + 0.3,
        advantages=torch.ones(len(rewards)),
        mask=mask,
        rewards=torch.tensor(rewards),
        group_ids=torch.arange(len(rewards)) // 2,
    )


@dataclasses.dataclass(frozen=True)
class OfRewarded(offcorr.rejections.Rejection):
    """Keeps sequences with a reward."""

    span, mismatch = "token", "staleness"
    rule = staticmethod(lambda value, reward: (offcorr.ops.zeros_like(value) + 1, ~(reward <= 0)))


READERS = {
    "topr": offcorr.get("topr"),
    "topr per token": offcorr.get("topr", level="token"),
    "asymre": offcorr.get("asymre"),
    "a rejection": offcorr.get("ppo", reject=OfRewarded()),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", READERS)
def test_a_reward_that_is_not_finite_is_counted_where_it_is_read(name, value):
    """The kernel: tests/kernels/test_correction.py."""
    out = READERS[name](rewarded([1.0, 0.0, 1.0, value]))
    assert not out.coefficient[3].any() and out.coefficient[0].any() and out.loss.isfinite()
    tokens = 8 if name == "asymre" else 4  # the mean of its group is not finite either
    with pytest.warns(RuntimeWarning, match=f"{tokens} valid tokens gave no finite number .*advantages or rewards"):
        assert out.metrics.compute()["offcorr/loss/nonfinite"] == tokens


def test_strict_names_the_reward():
    with pytest.raises(ValueError, match="4 valid tokens gave .* at sequence 1, position 0: rewards nan"):
        offcorr.get("topr", strict=True)(rewarded([1.0, math.nan]))
    offcorr.get("ppo", strict=True)(rewarded([1.0, math.nan]))  # which does not read it


@pytest.mark.parametrize("name", READERS)
def test_the_reward_of_a_sequence_without_valid_tokens_does_not_matter(name):
    mask = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    outs = [READERS[name](rewarded([1.0, 0.0, reward], mask)) for reward in (0.0, math.nan)]
    assert torch.equal(outs[0].coefficient, outs[1].coefficient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outs[1].metrics.compute()["offcorr/loss/nonfinite"] == 0


def test_a_group_leaves_out_the_reward_of_a_sequence_without_valid_tokens():
    batch = rewarded([1.0, math.nan], torch.tensor([[True] * 4, [False] * 4]))
    assert -4 * offcorr.get("asymre")(batch).coefficient[0, 0] == pytest.approx(0.1)  # V is its own reward
