"""A plain call without ``old_logp`` says once that logp takes its place, wherever a stage compares with it."""

from __future__ import annotations

import warnings

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.methods.registry import catalogue, illustration
from offcorr.stages.checks import quietly, warn_again
from offcorr.training import Recomputed, Step

TOTAL_OR_NONE = {
    *(
        "aipo",
        "asymre",
        "cppo",
        "dppo",
        "dppo_kl",
        "drpo",
        "estr",
        "geo_mis",
        "glm5",
        "ipo",
        "mu_grpo",
        "near_overlap",
        "opmd",
    ),
    *("p3o", "reinforce", "sat", "vcpo"),
}
"""Methods that, given the engine's log-probs, do not look at ``old_logp``."""


@pytest.fixture(autouse=True)
def afresh():
    warn_again()


def batch(**changes):
    logp = torch.full((2, 3), -1.0)
    given = dict(logp=logp, rollout_logp=logp - 0.1, advantages=torch.ones(2), mask=logp < 0)
    other = dict(rewards=torch.ones(2), group_ids=torch.zeros(2, dtype=torch.long), entropy=-logp, sum_sq_probs=-logp)
    return Batch(**given | other | changes)


def said(loss_fn, given):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_fn(given)
    return [one for one in caught if "old_logp is None" in str(one.message)]


@pytest.mark.parametrize("method", [one.name for one in catalogue()])
def test_every_method_that_compares_with_old_logp_says_so_once(method):
    loss_fn = illustration(method)
    warned = said(loss_fn, batch())
    assert len(warned) == (method not in TOTAL_OR_NONE)
    for one in warned:
        assert repr(loss_fn.method) in str(one.message) and one.filename == __file__
        assert "logp, detached, takes its place" in str(one.message)
    assert not said(loss_fn, batch(old_logp=torch.full((2, 3), -1.2)))


def test_what_is_used_in_its_place():
    (one,) = said(offcorr.get("tis"), batch())
    assert "Token(mismatch='staleness') has ratio 1" in str(one.message)
    assert "mismatch='engine') has logp against rollout_logp" in str(one.message)
    assert "rollout_logp does not take its place" in str(one.message)


def test_without_any_other_policy():
    (one,) = said(offcorr.get("minpro"), batch(rollout_logp=None))
    assert "old_logp=logp.detach() says that these are the current ones" in str(one.message)
    assert not said(offcorr.get("minpro"), batch(old_logp=torch.full((2, 3), -1.0)))
    assert not said(offcorr.Correction(gate=offcorr.gates.ScoreFunction()), batch())  # its ratio is not read


@pytest.mark.parametrize("anchor", [None, Recomputed()])
def test_a_step_has_placed_it(anchor):
    """Where an anchor was chosen that is meant; else the step says it, once, and the correction does not."""
    step = Step(offcorr.get("minpro"), anchor=anchor)
    with quietly():
        pass  # what another test was told is forgotten

    def loss(given):
        step.begin(tokens=6)
        return step.loss(step.place(given))

    told = [str(one.message) for one in said(loss, batch(rollout_logp=None))]
    assert len(told) == (anchor is None) and all("no anchor was chosen" in one for one in told)
