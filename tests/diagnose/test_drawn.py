"""How tokens were drawn, from the trainer's log-prob and entropy alone, on chains whose sampler is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offcorr.diagnose import Evidence, Record, diagnose
from offcorr.diagnose.causes import unlogged
from offcorr.diagnose.causes.drawn import Repeats, least_share, likely_seen, power_of_draws, repeats, truncation
from offcorr.diagnose.causes.over_steps import surprising_steps
from offcorr.diagnose.evidence import Estimate
from tests.diagnose.simulated import draw, log_softmax, nucleus

VOCABULARY = 40


def chain(sampler, seed=0, sequences=32, tokens=80, prompt=12, scales=(1.5, 3.0)):
    """Records of one Markov chain, whose next token depends on the last; both sides log its untransformed log-probs."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((VOCABULARY, VOCABULARY)) * rng.choice(scales, (VOCABULARY, 1))
    ids = np.zeros((sequences, prompt + tokens), int)
    seen = np.zeros((sequences, VOCABULARY), bool)
    logp, entropy = np.zeros(ids.shape), np.zeros(ids.shape)
    rows = np.arange(sequences)
    for at in range(1, prompt + tokens):
        plain = log_softmax(table[ids[:, at - 1]])
        made = log_softmax(sampler(table[ids[:, at - 1]], seen)) if at >= prompt else plain
        ids[:, at] = draw(made, rng)
        seen[rows, ids[:, at]] = True
        logp[:, at] = plain[rows, ids[:, at]]
        entropy[:, at] = -(np.exp(plain) * plain).sum(-1)
    return [
        Record.of(
            {
                "prompt_ids": ids[row, :prompt],
                "completion_ids": ids[row, prompt:],
                "rollout_logp": logp[row, prompt:],
                "old_logp": logp[row, prompt:],
                "entropy": entropy[row, prompt:],
            }
        )
        for row in rows
    ]


def plain(logits, seen):
    return logits


def hot(logits, seen):
    return logits / 1.3


def cold(logits, seen):
    return logits / 0.7


def truncated(logits, seen):
    return nucleus(0.8)(logits, None)


def penalised(logits, seen):
    return logits - 1.5 * seen


@pytest.mark.parametrize(
    ("sampler", "verdict"),
    [
        (plain, "clean"),
        (hot, "temperature_silent"),
        (cold, "temperature_silent"),
        (truncated, "top_p_silent"),
        (penalised, "penalty_silent"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_neither_side_logs_is_told_by_how_the_tokens_were_drawn(sampler, verdict, seed):
    assert diagnose(chain(sampler, seed)).verdict == verdict


def steps_of(*samplers, sequences=8, **options):
    """Sequences of each sampler, in an optimizer step of their own."""
    return [
        dataclasses.replace(record, step=step)
        for step, sampler in enumerate(samplers, 1)
        for record in chain(sampler, step, sequences, **options)
    ]


@pytest.mark.parametrize(
    ("sampler", "verdicts"),
    [
        (hot, {"temperature_silent"}),
        (cold, {"temperature_silent", "top_p_silent"}),  # which overlap
        (truncated, {"top_p_silent"}),
    ],
)
@pytest.mark.parametrize(("before", "bad", "after"), [(8, 8, 0), (0, 4, 12), (5, 8, 3)])
def test_a_silent_cause_in_some_of_the_steps(sampler, verdicts, before, bad, after):
    report = diagnose(steps_of(*[plain] * before, *[sampler] * bad, *[plain] * after))
    assert report.verdict in verdicts
    assert report.causes[0].evidence.endswith(
        f"; this is of {bad} of the 16 optimizer steps, {before + 1} to {before + bad}: in the others none shows"
    )


def test_healthy_steps_in_the_middle_are_left_out():
    found = surprising_steps(Evidence.of(steps_of(*[cold] * 6, *[plain] * 4, *[cold] * 6)))
    assert "12 of the 16 optimizer steps, 1 to 6 and 11 to 16:" in found.said
    assert len(found.off) == 3 * len(found.rest) == 12 * 8 * 80


@pytest.mark.parametrize("sampler", [plain, cold, truncated])
def test_steps_of_one_kind_are_looked_at_together(sampler):
    records = steps_of(*[sampler] * 8)
    for kept in (records, [dataclasses.replace(record, step=None) for record in records]):
        evidence = Evidence.of(kept)
        assert surprising_steps(evidence) == (evidence, "", None)


@pytest.mark.parametrize("seed", [0, 1])
def test_flat_distributions_end_in_healthy_steps_too(seed):
    """A temperature in some of the steps; unlikely tokens end by themselves where the distributions are flat."""
    few = {"sequences": 16, "tokens": 12, "scales": (0.8,)}
    samplers = [plain] * 22 + [lambda logits, seen: logits / 0.6] * 23
    records = [
        dataclasses.replace(record, step=step)
        for step, sampler in enumerate(samplers, 1)
        for record in chain(sampler, 100 * seed + step, **few)
    ]
    assert diagnose(records).verdict == "temperature_silent"


def test_what_cannot_be_told_from_a_temperature_is_not_certain():
    report = diagnose(chain(truncated, sequences=64))
    assert (report.verdict, report.confidence < 0.66) == ("top_p_silent", True)
    assert any("top_p_silent or a low temperature" in one for one in report.cannot_tell)


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.0])
def test_the_power_of_the_draws_is_one_over_the_temperature(temperature):
    rng = np.random.default_rng(3)
    logp = log_softmax(2 * rng.standard_normal((20_000, 30)))
    ids = draw(log_softmax(logp / temperature), rng)
    entropy = -(np.exp(logp) * logp).sum(-1)
    found = power_of_draws(logp[np.arange(len(ids)), ids], entropy)
    assert found == pytest.approx(1 / temperature, rel=0.15)


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_no_draw_of_a_top_p_contradicts_its_share(share):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((20_000, 1, 30)) * rng.choice([1.0, 3.0, 6.0], (20_000, 1, 1))
    logp = log_softmax(logits)[:, 0]
    ids = draw(log_softmax(nucleus(share)(logits, None))[:, 0], rng)
    entropy = -(np.exp(logp) * logp).sum(-1)
    drawn = logp[np.arange(len(ids)), ids]
    assert least_share(drawn, entropy).max() < share
    free = logp[np.arange(len(ids)), draw(logp, rng)]
    assert least_share(free, entropy).max() > share  # untruncated draws do contradict it
    assert truncation(drawn, entropy).support > 3 > truncation(free, entropy).support


def test_likely_next_tokens_are_those_of_other_sequences():
    def record(prompt, ids):
        return Record.of(
            {"prompt_ids": prompt, "completion_ids": ids, "rollout_logp": [-1.0] * len(ids), "logp": [-1.0] * len(ids)}
        )

    # After 1 the others went on with 2 three times, and once with 3.
    others = [record([1], [2]), record([1], [2]), record([1], [2]), record([1], [3])]
    seen = likely_seen(Evidence.of([record([2, 1], [4]), record([5, 1], [4]), *others]))
    assert seen[:2].tolist() == [3 / 5, 0.0]  # of 2, 2, 2, 3 and the other's 4, the 2 stands in the first prompt
    assert np.isnan(likely_seen(Evidence.of([record([1], [2])]))).all()


def test_without_entropy_or_with_few_tokens_repetitions_say_nothing():
    records = chain(plain, sequences=2, tokens=8)
    assert repeats(Evidence.of(records)) is None
    bare = [Record(one.prompt_ids, one.completion_ids, one.rollout_logp, one.old_logp) for one in records]
    assert repeats(Evidence.of(bare)) is None


def test_a_penalty_that_raises_nothing_as_a_whole_is_not_named(monkeypatch):
    """Draws that are too surprising after repetitions, by chance, and too likely elsewhere."""
    found = Repeats(overall=Estimate(0.01, 0.04), seen=Estimate(0.7, 0.18))
    monkeypatch.setattr(unlogged, "repeats", lambda evidence: found)
    records = chain(plain)
    assert diagnose(records).verdict == "clean"
    found = Repeats(overall=Estimate(0.08, 0.04), seen=Estimate(0.7, 0.18))
    assert diagnose(records).verdict == "penalty_silent"


def test_repetitions_that_updates_rewarded_are_no_sure_penalty(monkeypatch):
    """Where rollout_logp is a copy of old_logp, older weights that repeated themselves less leave the same."""
    monkeypatch.setattr(unlogged, "repeats", lambda evidence: Repeats(Estimate(0.5, 0.04), Estimate(0.9, 0.05)))
    report = diagnose(chain(plain))
    assert (report.verdict, report.confidence) == ("penalty_silent", 0.5)
    assert any("older weights that sampled" in one for one in report.cannot_tell)
    assert any("no_repeat_ngram_size" in one for one in report.cannot_tell)


@pytest.mark.parametrize(("noise", "named"), [(0.01, True), (0.3, False)])
def test_two_policies_that_differ_surprise_as_a_penalty_does(monkeypatch, noise, named):
    """As where the sampler read another prompt: the balance has to be twice what the two can make."""
    found = Repeats(overall=Estimate(0.3, 0.04), seen=Estimate(2.0, 0.4))
    monkeypatch.setattr(unlogged, "repeats", lambda evidence: found)
    draws = np.random.default_rng(0)
    records = [
        dataclasses.replace(one, rollout_logp=one.rollout_logp + noise * draws.standard_normal(len(one)))
        for one in chain(lambda logits, seen: np.where(seen, logits - 1.0, logits))
    ]
    assert ("penalty_silent" in {one.cause for one in diagnose(records).causes}) == named
