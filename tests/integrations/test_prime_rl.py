"""The adapter for prime-rl against offcorr's own loss and, where its source is there, against prime-rl's code.

The second part runs where OFFCORR_PRIME_RL names a checkout of prime-rl; its one module of losses is loaded alone.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import offcorr
from offcorr.integrations import prime_rl
from tests.integrations.cases import assert_same, carried, case, refused

OPTIONS = {"dppo_mask_high": 0.28, "dppo_mask_low": 0.1, "adv_tau": 1.0, "kl_tau": 0.0}


def sequences(batch, weights=None):
    for row in range(len(batch.mask)):
        yield SimpleNamespace(
            trainer_logprobs=batch.logp[row],
            inference_logprobs=batch.rollout_logp[row],
            ref_logprobs=None,
            advantages=batch.advantages[row],
            loss_mask=batch.mask[row],
            loss_weights=None if weights is None else weights[row],
        )


@pytest.mark.parametrize("name", carried(prime_rl.HOOK))
def test_each_method_is_offcorrs_own_with_the_engine_as_anchor(name):
    batch = case(1)
    own = batch.replaced(old_logp=batch.rollout_logp)
    expected = offcorr.get(name, aggregate="token-mean")(own)
    outs = [prime_rl.loss(inputs, f"offcorr:{name}") for inputs in sequences(batch)]
    assert_same(sum(out.loss for out in outs) / batch.mask.sum(), expected.loss, batch)
    k1 = (
        sum(
            out.metrics["offcorr/staleness/k1"] * out_mask.sum()
            for out, out_mask in zip(outs, batch.mask, strict=True)
            if out_mask.any()
        )
        / batch.mask.sum()
    )
    assert float(k1) == pytest.approx(expected.metrics.compute()["offcorr/staleness/k1"])
    assert not any(name.startswith("offcorr/engine/") for name in outs[0].metrics)


def test_loss_weights_multiply_each_token():
    batch = case(2)
    weights = torch.rand(batch.logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = batch.replaced(old_logp=batch.rollout_logp, weight=weights)
    loss = sum(prime_rl.loss(inputs, "minpro", eps_high=0.3).loss for inputs in sequences(batch, weights))
    assert_same(loss, offcorr.get("minpro", eps_high=0.3, aggregate="sum")(own).loss, batch)


def test_refused_methods():
    engine = {"binary_kl", "decoupled_ppo", "geo_rs", "icepop", "seq_mis", "seq_tis", "tis", "veto"}
    assert refused(prime_rl.HOOK) == engine | {"asymre", "bapo", "estr", "m2po", "p3o", "sat", "topr"}
    inputs = next(sequences(case(0)))
    with pytest.raises(ValueError, match="loss 'tis' cannot run in prime-rl: Truncate.* compares the engine with"):
        prime_rl.loss(inputs, "tis")
    with pytest.raises(ValueError, match="loss 'm2po' cannot run in prime-rl: .*one sequence at a time"):
        prime_rl.loss(inputs, "m2po")
    with pytest.raises(ValueError, match="aggregate is 'token-mean', but prime-rl divides by"):
        prime_rl.loss(inputs, "minpro", aggregate="token-mean")


# -- prime-rl's own code -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs():
    """The module prime_rl.trainer.rl.loss of a checkout, with its configuration classes as plain objects."""
    folder = os.environ.get("OFFCORR_PRIME_RL")
    if not folder:
        pytest.skip("OFFCORR_PRIME_RL names no checkout of prime-rl: `make test-integrations` gets one")
    configs = types.ModuleType("prime_rl.configs.trainer")
    for name in ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"):
        setattr(configs, name, type(name, (SimpleNamespace,), {}))
    utils = types.ModuleType("prime_rl.utils.utils")
    utils.import_object = lambda path: getattr(
        importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]
    )
    packages = {name: types.ModuleType(name) for name in ("prime_rl", "prime_rl.configs", "prime_rl.utils")}
    with pytest.MonkeyPatch.context() as patched:
        for name, module in (packages | {configs.__name__: configs, utils.__name__: utils}).items():
            patched.setitem(sys.modules, name, module)
        patched.setattr(torch, "compile", lambda *_, **__: lambda function: function)  # of helpers not used here
        place = Path(folder) / "src" / "prime_rl" / "trainer" / "rl" / "loss.py"
        spec = importlib.util.spec_from_file_location("prime_rl_loss", place)
        module = importlib.util.module_from_spec(spec)
        patched.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def computed(theirs, config, batch, weights=None):
    """prime-rl's ``compute_loss`` of a packed row of several sequences, with the loss that ``config`` names."""
    loss, metrics = theirs.compute_loss(
        trainer_logprobs=list(batch.logp),
        inference_logprobs=list(batch.rollout_logp),
        ref_logprobs=None,
        advantages=list(batch.advantages),
        loss_mask=list(batch.mask),
        rl_weights=None if weights is None else list(weights),
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=theirs.setup_rl_loss_fn(config),
        rl_scale=211,
        ce_scale=1,
        ref_kl_scale=1,
    )
    return loss, metrics


@pytest.mark.parametrize("weighted", [False, True])
def test_dppo_is_prime_rls_default_loss(theirs, weighted):
    """Without its KL penalty.  The value differs (sg(ratio) log pi here, the ratio there), the gradient does not."""
    for seed in range(4):
        batch = case(seed)
        weights = (torch.arange(batch.logp.numel()) % 3).view_as(batch.logp).double() if weighted else None
        default = theirs.DefaultLossConfig(**OPTIONS)
        kwargs = {"spec": "dppo?low=0.1&high=0.28&cap=None"}
        custom = theirs.CustomLossConfig(import_path="offcorr.integrations.prime_rl.loss", kwargs=kwargs)
        (their_loss, _), (our_loss, metrics) = (
            computed(theirs, config, batch, weights) for config in (default, custom)
        )
        grads = [torch.autograd.grad(loss, batch.logp)[0] for loss in (their_loss, our_loss)]
        # prime-rl drops nothing where the advantage is 0 or the shift is exactly at the bound: neither occurs here.
        torch.testing.assert_close(*grads)
        assert metrics["offcorr/loss/kept"].ndim == 1


def test_every_carried_method_runs_in_compute_loss(theirs):
    batch = case(4)
    own = batch.replaced(old_logp=batch.rollout_logp)
    for name in carried(prime_rl.HOOK):
        custom = theirs.CustomLossConfig(import_path="offcorr.integrations.prime_rl.loss", kwargs={"spec": name})
        loss, _ = computed(theirs, custom, batch)
        expected = offcorr.get(name, aggregate="token-mean")(own, denominator=211).loss
        assert_same(loss, expected, batch)
