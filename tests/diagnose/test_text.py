"""The report in words: a newcomer finds the verdict, the numbers with units and what to do."""

from __future__ import annotations

import dataclasses
import re

import pytest

from offcorr.diagnose import diagnose
from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.html import page
from offcorr.diagnose.record import NAMES
from offcorr.diagnose.text import headline, measured, text
from tests.diagnose.simulated import World, noise, nucleus, world


@pytest.fixture(scope="module")
def reports():
    return {
        name: diagnose(world(*name.split("+")).records()) for name in ("clean", "top_p", "sentinel", "top_p+sentinel")
    }


def test_a_cause_is_said_with_evidence_and_advice(reports):
    said = text(reports["top_p"])
    joined = " ".join(said.split())
    assert said.splitlines()[0] == headline(reports["top_p"])
    assert f"1. {CAUSES['top_p'].title} [top_p], confidence 0." in joined
    assert f"Evidence: {' '.join(reports['top_p'].causes[0].evidence.split())}." in joined
    assert f"To do: {CAUSES['top_p'].advice}." in joined
    assert "   1,536 tokens of 32 sequences\n" in said
    assert re.search(r"mean \|d\| +0\.\d+ nats, largest 0\.\d+", said)


def test_a_share_that_others_may_have_made_is_that_of_a_fit_and_what_is_left_is_said():
    told = diagnose(world("stale_weights").records())
    said = " ".join(text(told).split())
    assert "put down for 100% of the mean |d|" in said and "is not accounted for" not in said
    half = dataclasses.replace(
        told, causes=[dataclasses.replace(told.causes[0], share=0.3, rough=False, remainder=False)]
    )
    assert headline(half).endswith("; 70% of the mean |d| is not accounted for")
    assert "accounted for" not in headline(told)
    for said in (" ".join(text(half).split()), page(half)):
        assert "explains 30% of the mean |d|" in said and "70% of the mean |d| is not accounted for" in said
    drawn = diagnose(world("temperature_silent").records())
    assert "is not accounted for" not in text(drawn)


def test_a_truncation_hides_what_else_differs_so_that_its_share_is_rough():
    """Where d is below 0 it holds the difference of other weights, too, of which those above 0 show a part."""
    besides = {"sequences": 64, "trainer": noise(0.03)}
    report = diagnose(World(sampler=nucleus(0.95), **besides).records())
    first, second = report.causes
    assert [(one.cause, one.rough) for one in report.causes] == [("top_p", True), ("precision", True)]
    said = " ".join(text(report).split())
    assert "its fit takes 99% of the mean |d|" in said and "put down for 1% of the mean |d|" in said
    assert "others move the same tokens" in said
    assert (
        "it is below 0, and hides there what a lower precision, a temperature, older weights or another prompt make"
        in said
    )
    without = diagnose(World(**besides).records()).numbers["abs_mean"]
    assert second.share * report.numbers["abs_mean"] < without < first.share * report.numbers["abs_mean"]


def test_clean_says_what_was_checked_and_what_no_log_prob_shows(reports):
    said = " ".join(text(reports["clean"]).split())
    assert said.startswith("clean: the log-probs of trainer and sampler agree (confidence 0.90)")
    assert f"Checked: {len(CAUSES)} causes" in said and "To do: nothing about the log-probs." in said
    assert "These data cannot tell: - whether the tokens were drawn under a penalty" in said
    assert "Evidence" not in said


def test_unknown_says_what_to_do_next(reports):
    unknown = dataclasses.replace(reports["top_p"], verdict="unknown", confidence=0.5, causes=())
    said = " ".join(text(unknown).split())
    assert said.startswith("unknown: trainer and sampler disagree, and no known cause fits")
    assert "None explains a difference of 0.093 nats per token" in said
    assert "dump more sequences" in said and "--model" in said and "To do: nothing" not in said
    many = dataclasses.replace(unknown, numbers=dict(unknown.numbers) | {"sequences": 960.0})
    said = " ".join(text(many).split())
    assert "more sequences" not in said and "or diagnose a few of the first steps and a few of the last" in said


def test_updates_since_are_a_number_of_their_own():
    rows = {name: (value, meaning) for name, value, meaning in measured(diagnose(world("policy_updates").records()))}
    assert rows["mean |d|"][1] == "d: the trainer's old_logp minus the sampler's rollout_logp"
    assert re.match(r"0\.\d+ nats, largest 0\.\d+", rows["mean |logp - old_logp|"][0])
    assert "mean |logp - old_logp|" not in dict(
        (name, value) for name, value, _ in measured(diagnose(world("top_p").records()))
    )


def test_a_notice_stands_below_the_verdict(reports):
    assert text(reports["top_p"], notice="This is from the logs.").splitlines()[1].strip() == "This is from the logs."


def test_several_causes_are_ranked(reports):
    report = reports["top_p+sentinel"]
    assert {finding.cause for finding in report.causes} == {"top_p", "sentinel"}
    assert "; 1 more cause below" in headline(report)
    said = text(report)
    first, second = (said.index(f"[{finding.cause}]") for finding in report.causes)
    assert first < second


def test_further_sections_come_with_their_sentences(reports):
    said = text(reports["clean"], ["row 1 is odd"], ["top_k 4 [top_k] explains 90% of it"])
    assert "Scored again with --model:\n - top_k 4 [top_k] explains 90% of it\n" in said
    assert "About the data:\n - row 1 is odd\n" in said
    assert "About the data" not in text(reports["clean"]) and "Scored again" not in text(reports["clean"])


def test_every_line_fits_a_terminal(reports):
    for report in reports.values():
        lines = text(report, ["a long sentence about the data " * 9]).splitlines()
        assert all(len(line) <= 120 for line in lines[1:])


def test_numbers_keep_their_size(reports):
    """A ratio of 1e20, which placeholders make, is not written in 20 digits."""
    values = [value for _, value, _ in measured(reports["sentinel"])]
    assert any(re.fullmatch(r"\d\.?\d*e\+\d+ \+- \d\.?\d*e\+\d+", value) for value in values), values
    assert all(len(value) < 40 for value in values)


def test_what_cannot_be_told_names_what_would_decide():
    report = diagnose(world("stale_weights", entropy=False).records())
    said = " ".join(text(report).split())
    assert "These data cannot tell:" in said
    assert "log entropy: the trainer's, of each token's distribution" in said
    for one in report.cannot_tell:
        assert "To find out, " in one and one.startswith("whether ")


def test_every_cause_says_what_decides():
    for cause in CAUSES.values():
        for one in cause.not_told_from:
            assert one.words and one.how, (cause.id, one)
            assert {*one.fields} <= {*NAMES}, (cause.id, one)


def test_the_larger_of_two_gaps_is_the_verdict():
    """Trainer and sampler differ by rounding, and the trainer's own updates by far more."""
    report = diagnose(world("policy_updates", "precision").records())
    assert [one.cause for one in report.causes] == ["policy_updates", "precision"]
    assert re.search(
        r"; 1 more cause below, of the gap d itself: precision \(confidence 0\.\d+, .*\)$", headline(report)
    )


def test_what_is_drawn_wrongly_precedes_the_updates():
    report = diagnose(world("policy_updates", "temperature").records())
    assert [one.cause for one in report.causes] == ["temperature", "policy_updates"]


def test_a_headline_of_one_cause_of_two_says_so():
    unsure = "(confidence 0.50: it may as well be another, see what these data cannot tell)"
    assert headline(diagnose(world("chat_template").records())).endswith(unsure)
    sure = headline(diagnose(world("temperature").records()))
    assert "may as well" not in sure and f" among the {len(CAUSES)} known causes)" in sure


def test_a_report_says_that_a_fault_without_a_name_may_leave_the_same():
    said = " ".join(text(diagnose(world("temperature").records())).split())
    assert "It is no probability, and a fault that has no name may leave the numbers of one that has" in said
