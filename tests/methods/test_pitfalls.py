"""What goes wrong elsewhere, held as tests."""

import dataclasses
import math

import pytest
import torch

import offcorr
from offcorr import Batch, gates, ratios, rejections, testing, weights


def one(r, advantage=1.0):
    """The multiplier of one token at ratio r."""
    logp = torch.full((1, 1), math.log(r), dtype=torch.float64)
    batch = Batch(
        logp=logp, old_logp=torch.zeros_like(logp), advantages=torch.tensor([advantage]).double(), mask=torch.ones(1, 1)
    )
    return lambda loss_fn: loss_fn(batch).coefficient.item()


@pytest.mark.parametrize("length, shares", [(2000, {2: 0.38, 8: 0.86}), (32000, {2: 0.10, 8: 0.29})])
def test_a_bound_on_a_product_is_a_length_filter(length, shares):
    """Per-token log-ratios of RMS .031: what [1/cap, cap] on the product keeps."""
    draw = torch.Generator().manual_seed(0)
    # The sum over the sequence is what counts, so a few tokens of the same total variance stand for all.
    few, sequences = 8, 4000
    rollout = torch.randn((sequences, few), generator=draw) * 0.031 * math.sqrt(length / few)
    batch = Batch(
        logp=torch.zeros_like(rollout),
        rollout_logp=rollout,
        advantages=torch.ones(sequences),
        mask=torch.ones(sequences, few),
    )
    for cap, share in shares.items():
        loss_fn = offcorr.get("reinforce", weight=weights.Mask(1 / cap, cap, level="sequence"))
        assert loss_fn(batch).metrics.compute()["offcorr/loss/kept"] == pytest.approx(share, abs=0.025)


def test_cispo_at_ratio_two_is_the_cap_itself():
    """r = 2, A = +1: with cap .28 dL/dl is -.28 (TRL's reading of epsilon_high), with 1.28 it is -1.28 (verl's)."""
    assert one(2.0)(offcorr.get("cispo", cap=0.28)) == pytest.approx(-0.28)
    assert one(2.0)(offcorr.get("cispo", cap=1.28)) == pytest.approx(-1.28)


def test_truncated_importance_sampling_by_hand():
    delta = torch.tensor([[0.5, -0.5, 1.0]])
    zeros = torch.zeros_like(delta)
    batch = Batch(logp=delta, old_logp=delta, rollout_logp=zeros, advantages=torch.ones(1), mask=torch.ones(1, 3))
    multiplier = -3 * offcorr.get("tis", cap=2.0)(batch).coefficient
    torch.testing.assert_close(multiplier, torch.tensor([[1.6487, 0.6065, 2.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("t, low, high", [(1, 0.975, 1.051), (100, 0.78, 1.65), (1000, 0.45, 4.9)])
def test_ctpo_bands(t, low, high):
    """The last of t tokens moves alone: its prefix ratio passes just inside the band at t, and not just outside."""
    for edge, inward in ((low, 1.01), (high, 0.99)):
        advantage = 1.0 if edge > 1 else -1.0
        for factor, passes in ((inward, True), (1 / inward, False)):
            logp = torch.zeros(1, t, dtype=torch.float64)
            logp[0, -1] = math.log(edge * factor)
            batch = Batch(
                logp=logp,
                old_logp=torch.zeros_like(logp),
                advantages=torch.tensor([advantage]).double(),
                mask=torch.ones(1, t),
            )
            assert bool(offcorr.get("ctpo")(batch).coefficient[0, -1]) == passes


@pytest.mark.parametrize(
    "ratio",
    [
        ratios.Sequence(),
        ratios.Geometric(),
        ratios.Turn(),
        ratios.Prefix(),
        ratios.PrefixGeometric(),
        ratios.MinPrefix(),
    ],
)
def test_tool_tokens_are_in_no_product_minimum_position_or_length(ratio):
    """Cutting the masked tokens out of the batch changes nothing but where the others stand."""
    batch = testing.example(sequences=4)
    keep = batch.mask[0]
    row = batch.rows(slice(0, 1))
    tensors = ("logp", "old_logp", "rollout_logp", "entropy", "mask")
    cut = dataclasses.replace(row, **{name: getattr(row, name)[:, keep] for name in tensors})
    turns = torch.cumsum(keep & ~torch.nn.functional.pad(keep, (1, 0))[:-1], 0)
    cut = dataclasses.replace(cut, turn_ids=turns[keep][None])
    loss_fn = offcorr.Correction(ratio=ratio, gate=gates.PositionClip(log_low=0.5, log_high=0.5))
    torch.testing.assert_close(loss_fn(cut).coefficient, loss_fn(row).coefficient[:, keep])


def test_a_rejected_sequence_stays_in_the_denominator():
    batch = testing.example()
    loss_fn = offcorr.get("veto", threshold=0.6)
    kept = loss_fn(batch).metrics.compute()["offcorr/loss/kept"]
    assert 0 < kept < 1
    counted, uncounted = loss_fn(batch), dataclasses.replace(loss_fn, count_rejected=False)(batch)
    torch.testing.assert_close(counted.coefficient, uncounted.coefficient * kept)


def test_everything_rejected_is_no_nan():
    batch = testing.example()
    for count_rejected in (True, False):
        out = offcorr.Correction(reject=rejections.Geometric(5.0, 5.1), count_rejected=count_rejected)(batch)
        assert out.loss == 0 and not out.coefficient.any()


def test_an_ess_of_clamped_weights_could_not_alarm():
    """Two sequences at e^25 and e^60 among eight: unclamped, one of them is all that counts."""
    rollout = torch.zeros(8, 4, dtype=torch.float64)
    rollout[0], rollout[1] = -15, -6.25
    same = torch.zeros_like(rollout)
    batch = Batch(
        logp=same, old_logp=same, rollout_logp=rollout, advantages=torch.ones(8).double(), mask=torch.ones(8, 4)
    )
    assert offcorr.metrics.measure(batch).compute()["offcorr/engine/ess_seq"] == pytest.approx(1 / 8)


def test_clamped_ratios_keep_their_gradient():
    """A token at e^30 counts as one at e^20, and is not cut to 0."""
    assert one(math.exp(30))(offcorr.get("token_is")) == pytest.approx(-math.exp(20))
    assert one(math.exp(30))(offcorr.Correction(gate=gates.Unclipped())) == pytest.approx(-math.exp(20))


def test_second_derivatives_are_refused():
    """The coefficient would be taken for a constant, and a penalty on the gradient for none."""
    logp = torch.zeros(2, 3, requires_grad=True)
    batch = offcorr.Batch(logp=logp, advantages=torch.ones(2), mask=torch.ones(2, 3).bool())
    with pytest.raises(RuntimeError, match="first derivatives only: create_graph=True"):
        torch.autograd.grad(offcorr.get("ppo")(batch).loss, logp, create_graph=True)
