"""Tests of centred advantages, against the formula token by token."""

from __future__ import annotations

import dataclasses
import math
from functools import reduce

import pytest
import torch

import offcorr
from offcorr import advantages, testing
from offcorr.correction import Statistics


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def shift_of(batch: offcorr.Batch, pair: str) -> float:
    """sum c A / sum c - mean A."""
    weighted = weight = plain = count = 0.0
    other = batch.old_logp
    if pair == "total":  # an unscored token has the log-prob of the sampling weights
        other = torch.where(batch.rollout_logp.isnan(), batch.old_logp, batch.rollout_logp)
    for row in range(batch.sequences):
        valid = batch.mask[row].nonzero()[:, 0].tolist()
        d = {t: max(-20.0, min(20.0, float(batch.logp[row, t]) - float(other[row, t]))) for t in valid}
        for t in valid:
            c = 2 * sigmoid(d[t]) * 2 * sigmoid(sum(d.values()) - d[t])
            advantage = float(batch.advantages[row])
            weighted, weight = weighted + c * advantage, weight + c
            plain, count = plain + advantage, count + 1
    return weighted / weight - plain / count


@pytest.mark.parametrize("engine_known", [True, False])
def test_the_shift_is_that_of_the_formula(engine_known):
    batch = testing.example(seed=3)
    if not engine_known:
        batch = dataclasses.replace(batch, rollout_logp=None)
    shift = shift_of(batch, "total" if engine_known else "staleness")
    assert abs(shift) > 1e-3
    centred = offcorr.get("minpro", advantages="centred")
    by_hand = dataclasses.replace(batch, advantages=batch.advantages - shift)
    out = centred(batch)
    torch.testing.assert_close(out.coefficient, offcorr.get("minpro")(by_hand).coefficient)
    assert out.metrics.compute()["offcorr/control/advantage_shift"] == pytest.approx(shift, rel=1e-6)


def test_the_split_of_the_batch_changes_nothing():
    batch = testing.example(seed=1)
    loss_fn = offcorr.get("near_overlap", advantages="centred")
    whole = loss_fn(batch)
    parts = [batch.rows(slice(0, 2)), batch.rows(slice(2, None))]
    merged = reduce(Statistics.merge, [loss_fn.statistics(part) for part in parts])
    z = float(batch.mask.sum())
    outs = [loss_fn(part, denominator=z, statistics=merged).coefficient for part in parts]
    torch.testing.assert_close(torch.cat(outs), whole.coefficient)


def test_on_policy_nothing_changes():
    batch = testing.example()
    same = dataclasses.replace(batch, old_logp=batch.logp, rollout_logp=batch.logp)
    plain, centred = (offcorr.get("token_is", advantages=stage)(same) for stage in (None, "centred"))
    torch.testing.assert_close(plain.coefficient, centred.coefficient)


@pytest.mark.parametrize("method", ["reinforce", "near_overlap", "tis", "seq_tis"])
def test_the_contract_holds(method):
    loss_fn = offcorr.get(method, advantages="centred")
    assert len(testing.check(loss_fn)) == len(testing.CHECKS)
    assert loss_fn.couples == {"batch"} and not loss_fn.scales_with_advantage


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected one of offcorr.advantages"):
        offcorr.Correction(advantages=offcorr.gates.Clip())
    with pytest.raises(ValueError, match="expected one stage or None"):
        offcorr.Correction(advantages=(advantages.Centred(), advantages.Centred()))
    with pytest.raises(ValueError, match="unknown advantages 'centered', did you mean 'centred'"):
        offcorr.get("minpro", advantages="centered")
    with pytest.raises(ValueError, match="Centred: mismatch is 'all'"):
        advantages.Centred(mismatch="all")


def test_no_valid_token():
    batch = testing.example()
    out = offcorr.get("minpro", advantages="centred")(dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)))
    assert float(out.loss.detach()) == 0 and not out.coefficient.any()
