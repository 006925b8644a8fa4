"""Tests of ``offcorr metrics``: the list, the page about a metric, and what is refused."""

import pytest

from offcorr import cli
from offcorr.cli import metrics
from offcorr.cli.guide import GUIDE, HINTS
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import SHORT


def page(capsys, *names: str) -> str:
    assert cli.main(["metrics", *names]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_full_name_is_one_page(capsys):
    words = page(capsys, "offcorr/staleness/ess_seq")
    assert words.startswith("offcorr/staleness/ess_seq meaning How many of the sequences still count")
    assert "(sum w)^2 / (n sum w^2)" in words and "d = logp - old_logp" in words and "warns below .3" in words
    assert "if outside A fall at a constant lag" in words and "offcorr/engine/ess_seq" not in words


def test_the_end_of_a_name_is_every_series_that_has_it(capsys):
    words = page(capsys, "ess_seq")
    assert "offcorr/staleness/ess_seq" in words and "offcorr/engine/ess_seq" in words
    assert page(capsys, "train/offcorr/loss/dropped") == page(capsys, "dropped")


def test_a_low_effective_sample_size_is_no_fault_of_a_method_that_damps(capsys):
    words = page(capsys, "ess_after")
    assert "normal for a method that damps, such as MinPRO" in words
    assert "a few tokens with a large one carry the update, also where `amplified` is 0" in words


@pytest.mark.parametrize("entry", metrics.entries(), ids=lambda entry: entry.name)
def test_every_metric_has_a_page(entry, capsys):
    words = page(capsys, entry.name)
    assert words.startswith(entry.name) and "logged" in words
    if entry.metric is not None:
        assert "formula" in words and "healthy" in words and "where" in words


def test_one_of_several_values_has_its_own_formula(capsys):
    assert "formula mean square - 1 (at least 0) of e^(sum d) where" in page(capsys, "offcorr/engine/chi2_seq")
    assert "formula min e^d where" in page(capsys, "offcorr/engine/ratio_min")


@pytest.mark.parametrize("name", ALIASES)
def test_a_name_of_another_framework(name, capsys):
    assert "formula" in page(capsys, name)


def test_what_is_explained_is_what_is_logged():
    assert list(GUIDE) == [answer.name for answer in SHORT if answer.logged == "always"]
    assert set(HINTS) <= {entry.name.rpartition("/")[2] for entry in metrics.entries()}


def test_an_unknown_name(refused):
    assert "unknown metric 'ess_sq', did you mean 'ess_seq'?" in refused("metrics", "ess_sq")
    near = refused("metrics", "offcorr/loss/droped")
    assert "did you mean 'offcorr/loss/dropped'?" in near
    assert "unknown metric 'qqqq'; `offcorr metrics` lists all" in refused("metrics", "qqqq")
    assert "unknown metric ''" in refused("metrics", "")
    assert "takes no NAME" in refused("metrics", "--markdown", "ess_seq")
    assert "'staleness' is a series of metrics, name one: abs_mean, abs_max" in refused("metrics", "staleness")
    assert "did you mean 'staleness'?" in refused("metrics", "stalenes")
    assert "is logged by the trainer, not by offcorr" in refused("metrics", "frac_reward_zero_std")
    for other in ("clip_ratio/high_mean", "actor/pg_clipfrac"):
        assert "the nearest to it are clipped and dropped" in refused("metrics", other)


def test_an_option_leads_to_what_it_logs(capsys, refused):
    assert "'ess_lr' is an option, which logs lr_scale: `offcorr metrics lr_scale`" in refused("metrics", "ess_lr")
    words = page(capsys, "lr_scale")
    assert "w = e^(sum of logp - rollout_logp), staleness and engine together" in words
    assert "logged where the option ess_lr asks for it" in words


def test_a_product_in_a_formula_keeps_its_sign(capsys):
    assert "of the share of ratio * A that" in page(capsys, "clipped")


def test_low_effective_sample_sizes_have_more_than_one_cause(capsys):
    said = page(capsys, "ess_seq")
    assert "either the outputs are long or a few tokens are far off; `ratio_min` and `ratio_max`" in said
    assert "Or the outputs grow longer (TRL's `completions/mean_length`) while `abs_mean` stays" in said


def test_a_link_to_a_page_names_it(capsys):
    assert cli.main(["metrics", "staleness/ess_seq"]) == 0
    assert "which one (docs/which.md)" in " ".join(capsys.readouterr().out.split())


def test_symbols_are_explained_where_the_formula_has_them(capsys):
    assert "where d = logp" not in page(capsys, "offcorr/staleness/lag")
    assert "where c: the factor" in page(capsys, "offcorr/loss/damped")


def test_a_word_of_a_formula_leads_to_its_metrics(refused):
    said = refused("metrics", "kl")
    assert "unknown metric 'kl', a word in the formula of offcorr/staleness/k1, offcorr/staleness/k3," in said
