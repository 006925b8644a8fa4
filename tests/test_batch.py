"""Tests of the errors for bad input: they name the field, the value given and the value expected."""

import dataclasses
import math
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offcorr
from offcorr import Batch, cli, gates, ratios, rejections, testing, weights
from offcorr.batch import rises_to
from offcorr.cli import tables
from offcorr.methods.registry import illustration
from offcorr.stages.checks import quietly, warn_again

LOGP = torch.zeros(4, 128)
GOOD = {"logp": LOGP, "advantages": torch.ones(4), "mask": torch.ones(4, 128, dtype=torch.bool)}


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"advantages": torch.ones(3)}, ValueError, "advantages has shape (3,), expected (4,) or (4, 128)"),
        ({"advantages": torch.ones(4, 1)}, ValueError, "advantages has shape (4, 1), expected (4,) or (4, 128)"),
        ({"mask": torch.ones(1, 128)}, ValueError, "mask has shape (1, 128), expected (4, 128)"),
        ({"old_logp": torch.ones(4)}, ValueError, "old_logp has shape (4,), expected (4, 128)"),
        ({"rewards": LOGP}, ValueError, "rewards has shape (4, 128), expected (4,)"),
        ({"logp": torch.zeros(4)}, ValueError, "logp has shape (4,), expected (B, T)"),
        ({"logp": [0.0]}, TypeError, "logp is a list, expected a torch.Tensor"),
        ({"logp": LOGP.long()}, TypeError, "logp has dtype torch.int64, expected floating point"),
        ({"group_ids": torch.ones(4)}, TypeError, "group_ids has dtype torch.float32, expected integers"),
        ({"mask": 2 * torch.ones(4, 128)}, ValueError, "mask holds 2.0, expected bool or only 0 and 1"),
        ({"mask": math.nan * LOGP}, ValueError, "mask holds nan"),
        ({"logp": None}, TypeError, "logp is None, expected a torch.Tensor"),
        ({"advantages": None}, TypeError, "advantages is None, expected a torch.Tensor"),
        ({"mask": None}, TypeError, "mask is None, expected a torch.Tensor"),
        ({"trainer_version": "4"}, TypeError, "trainer_version is '4', expected a whole number or None"),
        ({"trainer_version": torch.tensor(4)}, TypeError, "trainer_version is tensor(4), expected a whole number"),
        ({"trainer_version": True}, TypeError, "trainer_version is True, expected a whole number"),
        (
            {"origin": torch.tensor([0, 1, 9, 0])},
            ValueError,
            "origin holds 9, expected indices from 0 to 3, of ('fresh'",
        ),
        ({"origin": torch.tensor([0, -2, 3, -1])}, ValueError, "origin holds -2, expected indices from 0 to 3"),
        ({"old_logp": LOGP.to("meta")}, ValueError, "old_logp is on meta, expected cpu"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "logp has shape (4, 128), expected (N,)"),
    ],
)
def test_refused(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Batch(**GOOD | fields)


@pytest.mark.parametrize(
    "ends, message",
    [
        ([0, 3], "cu_seqlens goes from 0 to 3, expected to rise from 0 to 5"),
        ([1, 5], "cu_seqlens goes from 1 to 5"),
        ([0, 4, 2, 5], "cu_seqlens goes from 0 to 5 and falls at 2, expected to rise"),
    ],
)
def test_refused_packed(ends, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch.packed(
            logp=torch.zeros(5),
            advantages=torch.ones(len(ends) - 1),
            mask=torch.ones(5),
            cu_seqlens=torch.tensor(ends),
        )


@pytest.mark.parametrize(
    "ends, rises",
    [
        ([0, 2, 5], True),
        ([0, 0, 5, 5], True),
        ([0, 3], False),
        ([1, 5], False),
        ([0, 4, 2, 5], False),
        ([0, 6], False),
        ([0, 6, 5], False),
        ([-1, 5], False),
        ([0], False),
    ],
)
def test_what_cu_seqlens_must_do(ends, rises):
    """The condition is checked by the host on a CPU, and by an assertion on the device on a GPU."""
    assert bool(rises_to(5, torch.tensor(ends, dtype=torch.int32))) == rises
    assert bool(rises_to(0, torch.tensor([0])))


def test_cu_seqlens_are_not_looked_at_where_that_would_wait():
    """On the device "meta" there are no values, and reading one is an error."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asserted.extend([args[1]] if func is torch.ops.aten._assert_async.msg else [])
            return func(*args, **kwargs or {})

    asserted, tokens = [], torch.zeros(5, device="meta")
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    with Seen():
        batch = Batch.packed(logp=tokens, advantages=tokens[:2], mask=tokens, cu_seqlens=ends)
        dataclasses.replace(batch, max_seqlen=4)
    assert batch.sequences == 2
    rises = "cu_seqlens does not rise from 0 to 5, the number of tokens in logp"
    assert asserted == [rises, rises, "max_seqlen is 4, which a sequence of cu_seqlens is longer than"]


def test_max_seqlen():
    ends, logp = torch.tensor([0, 2, 5]), torch.arange(5.0)
    packed = Batch.packed(logp=logp, advantages=logp[:2], mask=torch.ones(5), cu_seqlens=ends, max_seqlen=4)
    padded = packed.padded()
    assert padded.logp.shape == (2, 4) and padded.max_seqlen is None
    assert torch.equal(packed.repack(padded.logp), logp)
    for wrong, message in ((2, "is 2, expected at least 3, the longest sequence"), (3.0, "is 3.0, expected a number")):
        with pytest.raises(ValueError, match=f"max_seqlen {message}"):
            dataclasses.replace(packed, max_seqlen=wrong)
    with pytest.raises(ValueError, match="max_seqlen is 4 without cu_seqlens, expected None"):
        dataclasses.replace(padded, max_seqlen=4)


def test_packed_per_token_advantages():
    ends = torch.tensor([0, 2, 5])
    logp = torch.zeros(5, requires_grad=True)
    batch = Batch.packed(logp=logp, advantages=torch.arange(5.0), mask=torch.ones(5), cu_seqlens=ends)
    out = offcorr.get("reinforce")(batch)
    torch.testing.assert_close(out.coefficient, -torch.arange(5.0) / 5)
    out.loss.backward()
    torch.testing.assert_close(logp.grad, out.coefficient)


def test_a_ratios_own_options_come_first():
    assert ratios.PowerMean(2.0) == ratios.PowerMean(power=2.0, mismatch="staleness")
    assert ratios.MinPrefix(True, mismatch="total").bounded
    assert ratios.Token(mismatch="total").mismatch == "total"


def test_masks_of_numbers_are_masks():
    mask = (torch.rand(4, 128, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    numbers, flags = (offcorr.get("ppo")(Batch(**GOOD | {"mask": m})) for m in (mask, mask.bool()))
    assert torch.equal(numbers.coefficient, flags.coefficient)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: offcorr.get("minpo"), "unknown method 'minpo', did you mean 'minpro'?"),
        (
            lambda: offcorr.get("offcorr:cispo"),
            "the prefix is for GRPOConfig, where TRL has names of its own; write 'cispo'",
        ),
        (lambda: offcorr.get("minpro", eps_hi=0.2), "minpro has no option 'eps_hi', did you mean 'eps_high'?"),
        (lambda: offcorr.get("ppo", eps_low=-0.1), "eps_low is -0.1, expected a finite number >= 0"),
        (lambda: offcorr.get("ppo", eps_low="0.2"), "eps_low is '0.2', expected a finite number"),
        (lambda: offcorr.get("ppo", eps_low=math.nan), "eps_low is nan, expected a finite number"),
        (lambda: offcorr.get("icepop", low=6.0), "low = 6.0 is above high = 5.0"),
        (lambda: offcorr.get("ppo", dual_clip=0.5), "dual_clip is 0.5, expected a finite number >= 1 or None"),
        (lambda: offcorr.get("ppo", aggregate="token_mean"), "did you mean 'token-mean'"),
        (lambda: offcorr.get("ppo", max_length=8), "divides by no constant length"),
        (lambda: weights.Truncate(2.0, level="word"), "level is 'word', expected one of"),
        (lambda: weights.Truncate(2.0, mismatch="engin"), "mismatch is 'engin', did you mean 'engine'"),
        (lambda: weights.SelfNormalise(rejections.Veto()), "inner is Veto"),
        (lambda: rejections.Veto(0.0), "threshold is 0.0, expected a finite number > 0"),
        (lambda: offcorr.Correction(ratio=None), "ratio is None, but gate Clip"),
        (lambda: offcorr.Correction(gate=None), "gate is None"),
        (lambda: offcorr.Correction(weight=rejections.Veto()), "weight is Veto"),
        (lambda: offcorr.Correction(ratio=ratios.Token(mismatch="engine")), "would have no gradient"),
        (lambda: offcorr.from_config({"eps_low": 0.2}), "expected a mapping with a 'method'"),
        (
            lambda: offcorr.from_config({"method": "ppo", "weight": {"name": "trunc"}}),
            "unknown weight 'trunc', did you",
        ),
        (lambda: offcorr.from_config({"method": "ppo", "weight": {"name": "truncate", "kap": 2}}), "no option 'kap'"),
        (lambda: offcorr.from_config({"method": "custom", "gait": "clip"}), "no option 'gait', did you mean 'gate'"),
        (lambda: offcorr.resolve("nowhere.py:Loss"), "nowhere.py is not a file"),
        (
            lambda: offcorr.get("ppo", reject="k1"),
            "rejection 'k1' requires low and high, without a default, expected {'name': 'k1', 'low': ..., 'high': ...}",
        ),
        (lambda: offcorr.get("ppo", reject={"name": "k2"}), "rejection 'k2' requires bound, without a default"),
        (lambda: offcorr.get("ppo", reject={"name": 3}), "rejection is {'name': 3}, expected an object, a name, or a"),
        (lambda: offcorr.get("ppo", aggregate=["x"]), "aggregate is ['x'], expected one of"),
        (lambda: ratios.MinPrefix(bounded="false"), "MinPrefix: bounded is 'false', expected True or False"),
        (lambda: rejections.VACO(increase_only=1), "VACO: increase_only is 1, expected True or False"),
    ],
)
def test_refused_configuration(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: offcorr.Correction(ratio=ratios.Token(mismatch="total"), weight=weights.Truncate(2.0)),
        lambda: offcorr.Correction(ratio=ratios.Token(), weight=weights.Truncate(2.0, mismatch="total")),
        lambda: offcorr.get("ppo", weight=(weights.Truncate(2.0), weights.Mask(0.5, 2.0, level="sequence"))),
    ],
)
def test_a_ratio_counted_twice_is_refused_naming_both(build):
    with pytest.raises(ValueError, match=r"(Token|Truncate)\(.*and weight (Truncate|Mask)\(.*both count the"):
        build()


def test_what_is_missing_is_named():
    batch = Batch(**GOOD)
    with pytest.raises(
        ValueError, match=r"rollout_logp is None, but Truncate\(.* of 'tis' needs it; pass rollout_logp=old"
    ):
        offcorr.get("tis")(batch)
    grouped = offcorr.get("tis", weight=weights.SelfNormalise(weights.Truncate(2.0), over="group"))
    with pytest.raises(ValueError, match="group_ids is None"):
        grouped(Batch(**GOOD, rollout_logp=LOGP))


def test_a_total_ratio_without_the_engines_log_probs_is_that_of_staleness():
    old_logp = -torch.ones(2, 1)
    columns = dict(logp=old_logp / 2, advantages=torch.ones(2), mask=torch.ones(2, 1).bool())
    warn_again()
    with pytest.warns(RuntimeWarning, match=r"so a total ratio .* the staleness alone.* rollout_logp=old_logp says"):
        raw = Batch(old_logp=old_logp, **columns).tokens.log_ratio("total").raw
    assert raw.tolist() == [[0.5], [0.5]]


def test_another_line_that_makes_the_mistake_again_is_warned_again():
    """As another cell of a notebook is; a loop is warned once."""
    warn_again()
    probabilities = GOOD | {"logp": torch.full_like(GOOD["logp"], 0.5)}
    with pytest.warns(RuntimeWarning, match="logp is above 0") as first:
        for _ in range(3):
            Batch(**probabilities)
    with pytest.warns(RuntimeWarning, match="logp is above 0") as second:
        Batch(**probabilities)
    assert len(first) == len(second) == 1


@pytest.mark.parametrize(
    ("values", "warned"), [([0.0] * 4, True), ([-9999.0] * 4, True), ([-4.5] * 4, False), ([float("nan")] * 4, False)]
)
def test_placeholders_for_the_engines_log_probs_are_warned_of(values, warned):
    columns = dict(logp=torch.full((2, 20), -4.0), advantages=torch.ones(2), mask=torch.ones(2, 20, dtype=torch.bool))
    rollout_logp = torch.full((2, 20), -4.1)
    rollout_logp[0, :4] = torch.tensor(values)
    warn_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Batch(rollout_logp=rollout_logp, **columns)
    assert any("are these placeholders?" in str(one.message) for one in caught) == warned


def test_sums_over_sequences_and_an_old_logp_of_zeros_are_warned_of():
    """Where every field has the sums, no comparison of two fields shows it."""
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 3:] = False
    logp = -torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) - 1
    sums = (logp * mask).sum(1, keepdim=True).expand(3, 12)
    padded = {"logp": sums, "old_logp": sums, "mask": mask}
    packed = {"logp": sums[mask], "mask": mask[mask], "cu_seqlens": torch.tensor([0, 3, 15, 27])}
    for columns, make in ((padded, Batch), (packed, Batch.packed)):
        warn_again()
        with pytest.warns(RuntimeWarning, match="logp is the same at every token of each sequence"):
            make(advantages=torch.ones(3), **columns)
    for name in ("logp", "old_logp", "rollout_logp"):
        columns = {"logp": logp, "advantages": torch.ones(3), "mask": mask, name: (logp * mask).cumsum(1)}
        warn_again()
        with pytest.warns(RuntimeWarning, match=f"^{name} never rises .* running sums"):
            Batch(**columns)
        warn_again()
        with pytest.warns(RuntimeWarning, match=f"^{name} is the same at every token .* sums or means over"):
            Batch(**columns | {name: sums})
    warn_again()
    with pytest.warns(RuntimeWarning, match="old_logp is 0 on valid tokens that are unlikely"):
        Batch(logp=logp, old_logp=torch.zeros(3, 12), advantages=torch.ones(3), mask=mask)
    warn_again()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Batch(logp=logp, old_logp=logp, advantages=torch.ones(3), mask=mask)
        Batch(logp=torch.full((3, 12), -1.0), advantages=torch.ones(3), mask=mask)  # one number everywhere: made up


def test_a_field_that_a_batch_does_not_have():
    batch = Batch(**GOOD)
    with pytest.raises(TypeError, match="Batch has no field 'advantage', did you mean 'advantages'"):
        batch.replaced(advantage=torch.ones(4))
    assert batch.replaced(rewards=torch.ones(4), trainer_version=3).trainer_version == 3


@pytest.mark.parametrize("denominator", [0, -1, math.nan, math.inf, torch.tensor(0.0)])
def test_denominator(denominator):
    with pytest.raises(ValueError, match="expected a positive number"):
        offcorr.get("ppo")(Batch(**GOOD), denominator=denominator)


@pytest.mark.parametrize(
    "denominator, message",
    [
        (torch.full((2,), 4.0), "denominator has shape (2,), expected one number"),
        (torch.tensor(True), "denominator has dtype torch.bool, expected a positive number"),
        (True, "denominator is True, expected a positive number"),
    ],
)
def test_a_denominator_is_one_number(denominator, message):
    square = Batch(logp=LOGP[:, :4], advantages=torch.arange(4.0), mask=torch.ones(4, 4).bool())
    with pytest.raises(ValueError, match=re.escape(message)):
        offcorr.get("reinforce")(square, denominator=denominator)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_denominator_decides_neither_precision_nor_shape(dtype, shape):
    out = offcorr.get("reinforce")(Batch(**GOOD), denominator=torch.full(shape, 8, dtype=dtype))
    assert out.coefficient.dtype == out.loss.dtype == torch.float32
    assert torch.equal(out.coefficient, offcorr.get("reinforce")(Batch(**GOOD), denominator=8).coefficient)


def test_a_denominator_far_below_the_batchs_own_tokens_warns_once():
    logp = torch.full((4, 8), -1.0)
    batch = Batch(logp=logp, old_logp=logp, advantages=torch.ones(4), mask=logp < 0)
    said = "denominator is 4, and this batch alone has 32 tokens: aggregate 'token-mean'"
    with quietly(), warnings.catch_warnings():
        warnings.simplefilter("error")
        offcorr.get("dapo")(batch, denominator=16)  # 32 of 48 tokens in all, on the larger of 3 ranks
        offcorr.get("dapo", aggregate="seq-mean-token-sum")(batch, denominator=4)
        offcorr.get("dapo")(batch, denominator=1.0)  # a sum
    with pytest.warns(RuntimeWarning) as given:
        for denominator in (4, torch.tensor(4), 3):
            offcorr.get("dapo")(batch, denominator=denominator)
    assert [str(one.message)[: len(said)] for one in given] == [said]


@pytest.mark.parametrize("method", ["ppo", "gspo"])
def test_a_denominator_of_tokens_for_a_mean_over_sequences_warns_once(method):
    logp, loss_fn = torch.full((4, 6), -1.0), offcorr.get(method)
    batch = Batch(logp=logp, old_logp=logp, advantages=torch.ones(4), mask=logp < 0)
    one_token_each = Batch(logp=logp[:, :1], old_logp=logp[:, :1], advantages=torch.ones(4), mask=logp[:, :1] < 0)
    said = (
        "denominator is 24, as many as this batch has tokens, and it has 4 sequences: aggregate 'seq-mean-token-mean'"
    )
    with quietly(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for denominator in (4, torch.tensor(8), 512):
            loss_fn(batch, denominator=denominator)
        loss_fn(one_token_each, denominator=4)
        loss_fn(batch.replaced(mask=torch.arange(24).view(4, 6) < 1), denominator=1.0)  # a sum
        offcorr.get("dapo")(batch, denominator=24)
    with pytest.warns(RuntimeWarning) as given:
        for denominator in (24, torch.tensor(24)):
            loss_fn(batch, denominator=denominator)
    assert [str(one.message)[: len(said)] for one in given] == [said]


def test_denominator_or_kept_count_not_both():
    with pytest.raises(ValueError, match="count_rejected=False"):
        offcorr.get("ppo", count_rejected=False)(Batch(**GOOD), denominator=8)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_denominator_counts_what_is_kept(aggregate):
    """Halves over the kept units of both add up to the whole, which divides by its own."""
    batch = offcorr.testing.example()
    loss_fn = offcorr.get("geo_rs", low=0.9, high=1.1, aggregate=aggregate, count_rejected=False)
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, None))]
    tokens, sequences = sum(loss_fn.kept_units(part) for part in parts).tolist()
    assert 0 < tokens < int(batch.mask.sum()) and 0 < sequences < batch.sequences
    z = tokens if aggregate == "token-mean" else sequences
    halves = torch.cat([loss_fn(part, denominator=z, kept=True).coefficient for part in parts])
    torch.testing.assert_close(halves, loss_fn(batch).coefficient)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "sum"])
def test_without_a_denominator_the_kept_units_are_the_batchs_own(aggregate):
    batch = offcorr.testing.example()
    loss_fn = offcorr.get("icepop", count_rejected=False, low=0.9, high=1.1, aggregate=aggregate)
    assert torch.equal(loss_fn(batch, kept=True).coefficient, loss_fn(batch).coefficient)


@pytest.mark.parametrize("field", ["count_rejected", "strict"])
def test_yes_is_not_true(field):
    with pytest.raises(ValueError, match=f"{field} is 'no', expected True or False"):
        offcorr.get("ppo", **{field: "no"})


def test_strict_raises_where_it_says():
    logp = LOGP.clone()
    logp[2, 5] = math.nan
    with pytest.raises(ValueError, match="1 valid tokens gave no finite number.*sequence 2, position 5: logp nan"):
        offcorr.get("ppo", strict=True)(Batch(**GOOD | {"logp": logp}))


@pytest.mark.parametrize("field", ["old_logp", "advantages"])
def test_strict_names_the_field_that_is_not_finite(field):
    values = {"old_logp": LOGP.clone(), "advantages": torch.ones(len(LOGP))}
    values[field][2] = math.nan
    with pytest.raises(ValueError, match=f"sequence 2, position 0: {field} nan$"):
        offcorr.get("ppo", strict=True)(Batch(**GOOD | values))


def test_nonfinite_is_dropped_counted_and_warned_about():
    logp = LOGP.clone()
    logp[2, 5] = math.nan
    out = offcorr.get("ppo")(Batch(**GOOD | {"logp": logp}))
    assert out.coefficient[2, 5] == 0 and out.coefficient[2, 6] != 0 and out.loss.isfinite()
    with pytest.warns(RuntimeWarning, match="1 valid tokens gave no finite number"):
        assert out.metrics.compute()["offcorr/loss/nonfinite"] == 1


def test_constant_length_warns_without_one():
    with pytest.warns(UserWarning, match="padded width, 128 here"):
        offcorr.get("ppo", aggregate="seq-mean-token-sum-norm")(Batch(**GOOD))


def test_a_name_of_the_library_is_taken_before_it_is_asked_for_one():
    code = (
        "import offcorr\n@offcorr.register('ppo')\ndef mine() -> offcorr.Correction:\n    return offcorr.Correction()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "ValueError: a method named 'ppo' exists already" in ended.stderr


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="a method named 'ppo' exists already"):

        @offcorr.register("ppo")
        def mine() -> offcorr.Correction:
            return offcorr.Correction()


def test_options_without_a_default_are_required_and_illustrated(capsys):
    def banded(low: float, high: float, cap: float = 2.0) -> offcorr.Correction:
        """A narrow band.

        Args:
            low, high: bounds on the ratio.
            cap: of the weight.
        """
        return offcorr.Correction(gate=offcorr.gates.DetachedClip(high, low), weight=offcorr.weights.Truncate(cap))

    with pytest.raises(
        ValueError, match=r"example of 'banded' gives \['low'\].* each option without a default: \['low'"
    ):
        offcorr.register("banded", example={"low": 0.9})(banded)
    offcorr.register("banded", example={"low": 0.9, "high": 1.1})(banded)
    try:
        with pytest.raises(ValueError, match=r"banded requires high, without a default: pass a value, for instance hi"):
            offcorr.get("banded", low=0.5)
        with pytest.raises(ValueError, match=r"banded requires low and high,.*low=0.9, high=1.1 \(an illustration"):
            offcorr.get("banded")
        assert illustration("banded") == offcorr.get("banded", low=0.9, high=1.1)
        assert illustration("banded?low=0.5", cap=3.0) == offcorr.get("banded", low=0.5, high=1.1, cap=3.0)
        assert testing.check("banded", on_policy=False) == testing.check(banded, on_policy=False)
        assert cli.main(["methods", "banded"]) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert "low (required), high (required) bounds on the ratio" in page and "an illustration" in page
        assert "offcorr.get('banded', low=0.9, high=1.1)" in page
        assert "| `banded(low, high, cap=2.0)` |" in tables.markdown(tables.options_table())
        assert "band" in tables.markdown(tables.trainers_table()) and "band" in tables.markdown(tables.methods_table())
    finally:
        offcorr.unregister("banded")


def test_pointwise_parts_ask_for_known_inputs():
    with pytest.raises(TypeError, match=r"Odd.surrogate asks for 'colour', which is no input.*It may ask for"):
        type("Odd", (gates.Gate,), {"surrogate": staticmethod(lambda colour: colour)})


def test_a_loss_from_a_file(tmp_path):
    (tmp_path / "my_file.py").write_text(
        "import offcorr\n\n"
        "def MyLoss(eps: float = 0.1):\n"
        "    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))\n"
    )
    loss_fn = offcorr.resolve(f"{tmp_path}/my_file.py:MyLoss", eps=0.3, aggregate="seq-mean-token-mean")
    assert loss_fn.gate.eps_high == 0.3 and loss_fn.aggregate == "seq-mean-token-mean"
    assert offcorr.from_config(loss_fn.to_config()) == loss_fn
    with pytest.raises(ValueError, match="defines no 'MyLos', did you mean 'MyLoss'"):
        offcorr.resolve(f"{tmp_path}/my_file.py:MyLos")
    assert offcorr.resolve("offcorr:dapo", eps_high=0.3) == offcorr.get("dapo", eps_high=0.3)


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: offcorr.backend(offcorr.get("ppo"), batch),
        lambda batch: offcorr.get("ppo")(batch),
        lambda batch: offcorr.metrics.measure(batch),
        lambda batch: offcorr.training.Step(offcorr.get("ppo")).place(batch),
        lambda batch: offcorr.training.Step().observe(batch),
        lambda batch: offcorr.training.ESSLearningRate(torch.optim.SGD([torch.zeros(1)], 0.1)).add(batch),
    ],
)
def test_what_is_no_batch_is_refused_by_name(call):
    with pytest.raises(TypeError, match="batch is a dict, expected an offcorr.Batch"):
        call(dict(GOOD))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda batch: offcorr.backend("minpro", batch), r"loss_fn is 'minpro', expected an offcorr.Correction, for"),
        (
            lambda batch: offcorr.backend(offcorr.get, batch),
            r"loss_fn is a function, expected an offcorr.Correction",
        ),
        (lambda batch: offcorr.training.Step("minpro"), r"loss is 'minpro', expected an offcorr.Correction"),
        (
            lambda batch: offcorr.testing.check(3),
            r"method is 3, expected a name, FILE.py:NAME, an offcorr.Correction, or a function",
        ),
    ],
)
def test_what_is_no_correction_is_refused_by_name(call, said):
    with pytest.raises(TypeError, match=said):
        call(Batch(**GOOD))
