"""SkyRL 0.3.0 itself: its losses against ours in value and gradient, its reductions, its registry."""

import sys
import typing

import pytest
import torch
import typing_extensions

import offcorr
from offcorr.integrations import skyrl as adapter
from tests.integrations.cases import assert_same, case, gradient, skip

with pytest.MonkeyPatch.context() as patched:
    if sys.version_info < (3, 12):  # where pydantic refuses the TypedDict of SkyRL's configuration
        patched.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    try:
        from skyrl.backends.skyrl_train.utils.ppo_utils import (
            PolicyLossRegistry,
            apply_loss_reduction_to_advantages_minibatch,
        )
        from skyrl.train.config import AlgorithmConfig
    except ImportError as error:
        skip(f"skyrl is not installed ({error})")

PLACES = 1e-6
"""SkyRL takes the exponential of a ratio in float32."""

REDUCTIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}


def config(policy_loss_type, **options):
    made = AlgorithmConfig(policy_loss_type=policy_loss_type, eps_clip_low=0.1, eps_clip_high=0.28, clip_ratio_c=1.4)
    made.cispo.cispo_eps_clip_low, made.cispo.cispo_eps_clip_high = 0.1, 0.28
    made.sapo.tau_pos, made.sapo.tau_neg = 1.0, 1.05
    made.dppo.dppo_type, made.dppo.delta_low, made.dppo.delta_high = "binary_tv", 0.1, 0.28
    for name, value in options.items():
        setattr(made.off_policy_correction, name, value)
    return made


def called(name, batch, advantages, **options):
    kind = name if not name.startswith("offcorr:") else "regular"
    loss, _ = PolicyLossRegistry.get(name)(
        batch.logp,
        batch.old_logp,
        advantages,
        config=config(kind, **options),
        loss_mask=batch.mask.double(),
        rollout_logprobs=batch.rollout_logp,
    )
    return loss


def scaled(batch, reduction):
    return apply_loss_reduction_to_advantages_minibatch(batch.advantages, batch.mask, reduction, 2, 50)


SHARED = {
    "regular": "ppo?eps_low=0.1&eps_high=0.28",
    "dual_clip": "ppo?eps_low=0.1&eps_high=0.28&dual_clip=1.4",
    "gspo": "gspo?eps_low=0.1&eps_high=0.28",
    "sapo": "sapo?tau_pos=1.0&tau_neg=1.05",
    "cispo": "cispo?low=0.9&cap=1.28",
    "rollout_is": "reinforce?weight={'name': 'mask', 'low': 0.9, 'high': 1.28, 'mismatch': 'total'}",
}
"""Losses of the same value and gradient (two more, below: of the same gradient)."""


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("theirs", SHARED)
def test_shared_losses_agree(theirs, reduction):
    ours = adapter.register(SHARED[theirs])
    for seed in range(4):
        batch = case(seed)
        advantages = scaled(batch, reduction)
        assert_same(called(ours, batch, advantages), called(theirs, batch, advantages), batch, PLACES)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_reduction_is_the_aggregation_here(reduction):
    """SkyRL's scaled advantages and our sum give what our own aggregation gives."""
    batch, aggregate = case(3), REDUCTIONS[reduction]
    length = {"max_length": 50} if "norm" in aggregate else {}
    expected = offcorr.get("minpro", aggregate=aggregate, **length)(
        batch, denominator=None if "token-mean" == aggregate else len(batch.mask)
    )
    loss = called(adapter.register("minpro"), batch, scaled(batch, reduction))
    assert_same(loss, expected.loss, batch)


@pytest.mark.parametrize(
    "spec, options",
    [
        ("tis?cap=1.3", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3}),
        ("seq_tis?cap=1.3", {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3}),
    ],
)
def test_engine_weights_agree(spec, options):
    ours = adapter.register(f"{spec}&eps_low=0.1&eps_high=0.28")
    for seed in range(4):
        batch = case(seed)
        assert_same(
            called(ours, batch, batch.advantages), called("regular", batch, batch.advantages, **options), batch, PLACES
        )


@pytest.mark.parametrize(
    "theirs, spec", [("dppo", "dppo?low=0.1&high=0.28&cap=None"), ("importance_sampling", "token_is")]
)
def test_the_same_gradient_of_another_value(theirs, spec):
    """The surrogate is the ratio in SkyRL, sg(ratio) log pi here."""
    ours = adapter.register(spec)
    for seed in range(4):
        batch = case(seed)
        one, other = (gradient(called(name, batch, batch.advantages), batch) for name in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=PLACES, atol=PLACES)


def test_registering_twice_is_no_error_and_the_default_losses_stay():
    assert adapter.register("minpro") == adapter.register("offcorr:minpro") == "offcorr:minpro"
    assert {"regular", "dppo", "offcorr:minpro"} <= set(PolicyLossRegistry.list_available())


def test_a_registered_loss_survives_cloudpickle():
    """SkyRL sends losses to its workers so."""
    import cloudpickle

    batch = case(0)
    name = adapter.register("minpro")
    sent = cloudpickle.loads(cloudpickle.dumps(PolicyLossRegistry.get(name)))
    loss, _ = sent(batch.logp, batch.old_logp, batch.advantages, config("regular"), batch.mask)
    torch.testing.assert_close(loss, called(name, batch, batch.advantages))
