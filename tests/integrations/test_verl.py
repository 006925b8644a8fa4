"""The adapter for verl, called as verl calls a policy loss, against offcorr's own loss; verl itself is not needed."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.integrations import verl
from offcorr.stages import checks
from tests.integrations.cases import assert_same, carried, case, refused

NUMBERS = [
    {},
    {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None},
    {"dp_size": 4, "batch_num_tokens": 211, "global_batch_size": 24, "loss_scale_factor": 50},
]
"""verl's ``config.global_batch_info``."""


@pytest.fixture(autouse=True)
def warn_again():
    checks.warn_again()


def called(spec, batch, info, mode="token-mean", weights=None):
    """The loss and metrics of verl's hook."""
    config = SimpleNamespace(global_batch_info=info)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*aggregates by")
        return verl.policy_loss(spec)(
            old_log_prob=batch.old_logp,
            log_prob=batch.logp,
            advantages=batch.advantages,
            response_mask=batch.mask.double(),
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=weights,
        )


def engine_ratio(batch):
    """rollout_is=token, rollout_is_threshold=1e9; 0 under the mask, as verl makes it."""
    return torch.where(batch.mask, (batch.old_logp - batch.rollout_logp).exp(), 0)


@pytest.mark.parametrize("info", NUMBERS)
@pytest.mark.parametrize("name", carried(verl.HOOK))
def test_each_method_is_offcorrs_own(name, info):
    batch = case(1)
    loss_fn = offcorr.get(name)
    ranks = info.get("dp_size") or 1
    tokens, sequences = batch.mask.sum(), batch.mask.any(1).sum()
    if ranks > 1:
        tokens, sequences = 211, 24
    loss_fn = loss_fn.with_max_length(info.get("loss_scale_factor") or 9)
    z = (tokens if loss_fn.aggregate == "token-mean" else sequences) / ranks
    needs = "rollout_logp" in loss_fn.needs
    own = Batch(
        logp=batch.logp,
        old_logp=batch.old_logp,
        advantages=batch.advantages,
        mask=batch.mask,
        rollout_logp=batch.rollout_logp if needs else None,
    )
    loss, metrics = called(f"offcorr:{name}", batch, info, weights=engine_ratio(batch) if needs else None)
    expected = loss_fn(own, denominator=z)
    assert_same(loss, expected.loss, batch)
    assert metrics["offcorr/loss/kept"] == pytest.approx(expected.metrics.compute()["offcorr/loss/kept"])
    assert ("offcorr/engine/k1" in metrics) == needs
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    "aggregate, mode", [("sum", "token-sum"), ("seq-mean-token-sum-norm", "token-mean"), ("token-mean", "token-sum")]
)
def test_the_aggregation_in_the_string_wins(aggregate, mode):
    batch, info = case(2), NUMBERS[2]
    loss, _ = called(f"offcorr:minpro?aggregate={aggregate}", batch, info, mode=mode)
    loss_fn = offcorr.get("minpro", aggregate=aggregate).with_max_length(50)
    z = {"sum": None, "token-mean": 211 / 4, "seq-mean-token-sum-norm": 24 / 4}[aggregate]
    expected = loss_fn(batch, denominator=z).loss * (4 if z is None else 1)
    assert_same(loss, expected, batch)


def test_a_loss_agg_mode_that_is_not_the_methods_is_named_once():
    batch = case(0)
    said = re.escape(
        "loss 'gspo' aggregates by 'seq-mean-token-mean', its own default; verl's loss_agg_mode='token-sum'"
    )
    with pytest.warns(RuntimeWarning, match=said + ".*'offcorr:gspo.aggregate=sum'") as warned:
        for _ in range(2):
            verl.policy_loss("gspo")(batch.old_logp, batch.logp, batch.advantages, batch.mask, "token-sum")
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verl.policy_loss("gspo")(batch.old_logp, batch.logp, batch.advantages, batch.mask, "seq-mean-token-mean")


def test_weights_of_verl_multiply_a_method_without_an_engine_stage():
    batch = case(3)
    weights = engine_ratio(batch).clamp(max=1.1)
    loss, _ = called("minpro", batch, {}, weights=weights)
    expected = offcorr.get("minpro")(batch.replaced(rollout_logp=None, weight=weights)).loss
    assert_same(loss, expected, batch)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w, mask: None, "verl hands over no rollout_is_weights"),
        (lambda w, mask: torch.where(w > 1.2, 0, w), "are 0 on some valid tokens"),
        (lambda w, mask: torch.where(mask, w[:, :1], 0), "are constant within every sequence"),
    ],
)
def test_weights_that_do_not_give_the_engines_log_probs(change, said):
    batch = case(0)
    weights = change(engine_ratio(batch), batch.mask)
    with pytest.raises(ValueError, match=f"loss 'tis' .*{said}.*rollout_is=token.*rollout_is_threshold=1e9"):
        called("tis", batch, {}, weights=weights)


def test_truncated_weights_are_noticed():
    batch = case(0)
    with pytest.warns(RuntimeWarning, match="several of verl's rollout_is_weights equal their maximum, 1.1,"):
        called("icepop", batch, {}, weights=engine_ratio(batch).clamp(max=1.1))


def test_global_numbers_are_needed_on_several_ranks():
    with pytest.raises(ValueError, match="batch_num_tokens of verl's global_batch_info is None with dp_size=2"):
        called("minpro", case(0), {"dp_size": 2})


def test_refused_methods():
    assert refused(verl.HOOK) == {"asymre", "bapo", "estr", "m2po", "p3o", "sat", "topr"}
    with pytest.raises(ValueError, match="loss 'bapo' cannot run in verl: it couples"):
        verl.Registry()["offcorr:bapo"]


def test_the_registry_keeps_verls_names():
    registry = verl.Registry(vanilla="theirs")
    assert registry["vanilla"] == "theirs" and list(registry) == ["vanilla"]
    assert "offcorr:minpro?eps_high=0.3" in registry and "minpro" not in registry
    with pytest.raises(KeyError, match="nothing"):
        registry["nothing"]
    with pytest.raises(ValueError, match="did you mean 'minpro'"):
        registry["offcorr:minprop"]


def test_a_batch_without_a_valid_token_gives_zero():
    batch = case(0)
    loss, _ = verl.policy_loss("minpro")(batch.old_logp, batch.logp, batch.advantages, batch.mask & False)
    assert loss == 0
