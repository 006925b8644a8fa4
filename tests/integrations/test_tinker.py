"""The adapter for Tinker against offcorr's own loss and, where it is installed, through Tinker's client code."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.integrations import tinker
from tests.integrations.cases import carried, case, refused

REWARDS, GROUPS = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0], [0, 0, 1, 1, 2, 2]


def data(batch, tensor=lambda values: values):
    return [
        SimpleNamespace(
            loss_fn_inputs={
                "logprobs": tensor(batch.rollout_logp[row]),
                "advantages": tensor(batch.advantages[row].contiguous()),
                "mask": tensor(batch.mask[row].float()),
            }
        )
        for row in range(len(batch.mask))
    ]


def own(name, batch, **options):
    """Our loss with the sampler as anchor, rewards and groups included."""
    return offcorr.get(name, **options)(
        Batch(
            logp=batch.logp,
            old_logp=batch.rollout_logp,
            rollout_logp=batch.rollout_logp,
            advantages=batch.advantages,
            mask=batch.mask,
            rewards=torch.tensor(REWARDS, dtype=torch.float64),
            group_ids=torch.tensor(GROUPS),
        )
    )


@pytest.mark.filterwarnings("ignore:.*max_length")
@pytest.mark.parametrize("name", carried(tinker.HOOK))
def test_each_method_is_offcorrs_own_with_the_sampler_as_anchor(name):
    batch = case(1)
    leaves = [row.detach().clone().requires_grad_() for row in batch.logp]
    loss, metrics = tinker.loss(f"offcorr:{name}", rewards=REWARDS, group_ids=GROUPS)(data(batch), leaves)
    loss.backward()
    expected = own(name, batch)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(torch.stack([leaf.grad for leaf in leaves]), expected.coefficient)
    assert metrics["offcorr/staleness/ess_seq"] == pytest.approx(
        expected.metrics.compute()["offcorr/staleness/ess_seq"]
    )
    assert not any(key.startswith("offcorr/engine/") for key in metrics)


def test_refused_methods():
    assert refused(tinker.HOOK) == {
        *("binary_kl", "decoupled_ppo", "estr", "geo_rs", "icepop", "seq_mis", "seq_tis", "tis", "veto")
    }
    with pytest.raises(ValueError, match="loss 'icepop' cannot run in Tinker: Mask.* compares the engine with"):
        tinker.loss("icepop", high=3.0)


def test_what_is_missing_in_a_datum_is_named():
    batch = case(0)
    datums = data(batch)
    del datums[2].loss_fn_inputs["advantages"]
    with pytest.raises(ValueError, match="datum 2 has no 'advantages' in loss_fn_inputs"):
        tinker.loss("minpro")(datums, list(batch.logp))
    with pytest.raises(ValueError, match=r"logprobs has \[9, .* numbers in loss_fn_inputs, expected \[8, "):
        tinker.loss("minpro")(data(batch), [row[:-1] for row in batch.logp])
    with pytest.raises(ValueError, match="rewards is None, but .* of 'topr' needs it"):
        tinker.loss("topr")(data(batch), list(batch.logp))


def test_several_calls_add_up_to_one_optimizer_step():
    batch = case(2)
    parts = [slice(0, 2), slice(2, 6)]
    loss_fn = tinker.loss("minpro", denominator=float(batch.mask.sum()))
    total = sum(loss_fn(data(batch)[part], list(batch.logp[part]))[0] for part in parts)
    torch.testing.assert_close(total, own("minpro", batch).loss)


def test_a_datum_without_a_mask_is_trained_on_whole():
    batch = case(0)
    datums = data(batch)
    for datum in datums:
        del datum.loss_fn_inputs["mask"]
    loss, _ = tinker.loss("minpro")(datums, list(batch.logp))
    torch.testing.assert_close(loss, own("minpro", batch.replaced(mask=torch.ones_like(batch.mask))).loss)


# -- Tinker's own code ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("tinker") is None, reason="tinker is not installed: `make test-integrations` gets it")
@pytest.mark.parametrize("name", ["minpro", "dppo", "ctpo", "bapo"])
@pytest.mark.filterwarnings("ignore:.*max_length")
def test_through_the_client(name):
    """``forward_backward_custom`` without the network: what it sends to the server is -dL/dlogp."""
    from tinker import types
    from tinker.lib.public_interfaces.training_client import TrainingClient

    batch = case(3)
    datums = []
    for row, datum in enumerate(data(batch, lambda values: types.TensorData.from_torch(values.float()))):
        tokens = types.TensorData.from_torch(torch.arange(9))
        inputs = datum.loss_fn_inputs | {"target_tokens": tokens}
        datums.append(types.Datum(model_input=types.ModelInput.from_ints([row] * 9), loss_fn_inputs=inputs))
    outputs = [{"logprobs": types.TensorData.from_torch(row.detach().float())} for row in batch.logp]
    forward = types.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={})
    sent = TrainingClient._compute_custom_loss(datums, tinker.loss(name), forward)
    expected = own(name, batch)
    weights = torch.stack([datum.loss_fn_inputs["weights"].to_torch() for datum in sent.data])
    torch.testing.assert_close(weights, -expected.coefficient.float(), rtol=1e-4, atol=1e-6)
    assert sent.loss_sum == pytest.approx(expected.loss.item(), rel=1e-5)
    assert "offcorr/loss/kept" in sent.metrics
    kept = TrainingClient._get_custom_loss_forward_data(None, datums, "cross_entropy")
    assert set(kept[0].loss_fn_inputs) == {"target_tokens", "weights"}, "the other fields stay on the client"
