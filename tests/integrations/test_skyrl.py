"""The adapter for SkyRL, called as SkyRL calls a policy loss, against offcorr's own loss; SkyRL is not needed."""

import pickle
from types import SimpleNamespace

import pytest
import torch

import offcorr
from offcorr.integrations import skyrl
from tests.integrations.cases import assert_same, carried, case, gradient, refused


def called(spec, batch, advantages, off_policy_correction=None):
    return skyrl.policy_loss(spec)(
        batch.logp,
        batch.old_logp,
        advantages,
        config=SimpleNamespace(off_policy_correction=off_policy_correction),
        loss_mask=batch.mask.double(),
        rollout_logprobs=batch.rollout_logp,
    )


@pytest.mark.parametrize("name", carried(skyrl.HOOK))
def test_each_method_is_offcorrs_own(name):
    """token_mean: SkyRL divides the advantages by the tokens, and adds up the losses of the micro-batches."""
    batch = case(1)
    own = offcorr.get(name, aggregate="token-mean")(batch)
    scaled = batch.advantages / batch.mask.sum()
    loss, metrics = called(f"offcorr:{name}", batch, scaled)
    assert_same(loss, own.loss, batch)
    assert metrics["offcorr/staleness/k1"] == pytest.approx(own.metrics.compute()["offcorr/staleness/k1"])
    parts = [slice(0, 2), slice(2, 6)]
    halves = [called(name, batch.rows(part), scaled[part])[0] for part in parts]
    torch.testing.assert_close(gradient(sum(halves), batch), own.coefficient)


def test_refused_methods():
    assert refused(skyrl.HOOK) == {"asymre", "bapo", "estr", "kimi", "m2po", "p3o", "sat", "topr"}
    with pytest.raises(
        ValueError, match="loss 'kimi' cannot run in SkyRL: its gradient is not proportional to the adv"
    ):
        skyrl.register("kimi")
    with pytest.raises(ValueError, match="aggregate is 'token-mean', but SkyRL divides by the denominator of its own"):
        skyrl.policy_loss("minpro?aggregate=token-mean")


def test_skyrls_own_correction_is_refused():
    batch = case(0)
    theirs = SimpleNamespace(tis_ratio_type="token", sequence_mask_metric=None)
    with pytest.raises(ValueError, match="off_policy_correction.tis_ratio_type is 'token', expected None"):
        called("minpro", batch, batch.advantages, theirs)


def test_the_engines_log_probs_are_needed_by_an_engine_stage():
    batch = case(0)
    with pytest.raises(ValueError, match="rollout_logp is None, but .* of 'tis' needs it"):
        skyrl.policy_loss("tis")(batch.logp, batch.old_logp, batch.advantages, None, batch.mask)


def test_a_loss_travels_to_a_worker_by_its_name():
    sent = pickle.dumps(skyrl.policy_loss("minpro?eps_high=0.28"))
    assert len(sent) < 200
    batch = case(0)
    loss = pickle.loads(sent)(batch.logp, batch.old_logp, batch.advantages, None, batch.mask)[0]
    torch.testing.assert_close(loss, offcorr.get("minpro", eps_high=0.28, aggregate="sum")(batch).loss)


def test_a_loss_without_a_mask_sees_every_token():
    batch = case(0)
    everything = batch.replaced(mask=torch.ones_like(batch.mask))
    loss = skyrl.policy_loss("minpro")(batch.logp, batch.old_logp, batch.advantages, None)[0]
    torch.testing.assert_close(loss, offcorr.get("minpro", aggregate="sum")(everything).loss)
