"""What is logged of what was measured: the short choice, and evaluations without what is constant there."""

from __future__ import annotations

import pytest
import torch

import offcorr
from offcorr.metrics import LOSS, MISMATCH
from offcorr.training import Step
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import CHOICES, SHORT, logged

ENGINE, STALENESS = "offcorr/engine/", "offcorr/staleness/"


def measured_step(gap=0.1, moved=0.2):
    """A step with one batch of three tokens, by version 1 of the weights, trained at version 4."""
    logp = torch.tensor([[-1.0, -2.0, -0.5]])
    step = Step(offcorr.get("tis"))
    batch = offcorr.Batch(
        logp=logp,
        old_logp=logp - moved,
        rollout_logp=logp - moved - gap,
        advantages=torch.ones(1),
        mask=torch.ones(1, 3).bool(),
        rollout_version=torch.ones(1, 3, dtype=torch.long),
        trainer_version=4,
    )
    return step, batch


def of_a_batch(choice=None, train=True, **settings):
    step, batch = measured_step(**settings)
    step.begin(tokens=3, train=train)
    step.loss(step.place(batch))
    return step.metrics(train, choice)


def test_the_short_choice_is_of_metrics_that_exist():
    existing = {prefix + name for prefix in (ENGINE, STALENESS) for m in MISMATCH for name in m.outputs or (m.name,)}
    existing |= {"offcorr/loss/" + name for m in LOSS for name in m.outputs or (m.name,)}
    existing |= {STALENESS + "lag", "entropy"}
    always = [answer.name for answer in SHORT if answer.logged != "in force"]
    assert set(always) <= existing
    assert len([answer for answer in SHORT if answer.logged == "always"]) <= 12
    assert all(answer.question.endswith("?") for answer in SHORT)


def test_each_choice_has_all_of_the_one_before():
    short, full, aliases = (of_a_batch(choice) for choice in CHOICES)
    assert short.items() < full.items() < aliases.items()
    assert aliases.keys() - full.keys() == ALIASES.keys()
    assert of_a_batch() == full and short[STALENESS + "lag"] == 3
    assert len([name for name in short if name.startswith("offcorr/")]) <= 12


def test_the_short_choice_names_errors_only_where_there_are_any():
    for name in ("unscored", "nonfinite", "skipped"):
        name = "offcorr/loss/" + name
        assert logged({name: 0.0}, "short") == {} and logged({name: 2.0}, "short") == {name: 2.0}
        assert logged({name: 0.0}, "full") == {name: 0.0}


@pytest.mark.parametrize("name", ["lr_scale", "offcorr/control/c_low", "offcorr/schedule/eps", "offcorr/anchor/resets"])
def test_the_short_choice_has_what_is_in_force(name):
    assert logged({name: 0.0}, "short") == {name: 0.0}


@pytest.mark.parametrize("choice", CHOICES)
def test_an_evaluation_is_logged_without_what_is_constant(choice):
    """Of two series, the one whose policies differ; the aliases follow the engine's."""
    both = of_a_batch(choice, train=False)
    assert {name[: name.rindex("/") + 1] for name in both if name.startswith("offcorr/")} == {ENGINE, STALENESS}
    one = of_a_batch(choice, train=False, gap=1e-7)
    assert all(name.startswith(STALENESS) for name in one) and STALENESS + "abs_mean" in one
    other = of_a_batch(choice, train=False, moved=1e-7)
    assert ENGINE + "abs_mean" in other and not any(name.startswith(STALENESS) for name in other)
    assert ("mismatch_kl" in other) == (choice == "aliases")
    assert of_a_batch(choice, train=False, gap=0.0, moved=0.0) == {}
    assert "offcorr/loss/kept" in of_a_batch(None, train=False, gap=0.0, moved=0.0)  # measured all the same


@pytest.mark.parametrize("size", [1e-3, 0.05, 1.0])
def test_the_standard_deviation_of_the_engine_ratio(size):
    """Also where the mean ratio is below 1, so that chi2, which is at least 0, says nothing of the variance."""
    d = (size * torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)) - size
    logp = torch.full_like(d, -9.0)
    step = Step()
    everything = torch.ones(4, 50).bool()
    batch = offcorr.Batch(logp=logp, old_logp=logp, rollout_logp=logp - d, advantages=torch.ones(4), mask=everything)
    step.observe(step.place(batch))
    found = step.metrics(choice="aliases")["rollout_corr/rollout_is_std"]
    assert found == pytest.approx(float(d.exp().std(correction=0)), rel=1e-3)


def test_an_unknown_choice_is_refused_by_name():
    with pytest.raises(ValueError, match="choice is 'ful'.* did you mean 'full'"):
        logged({}, "ful")
