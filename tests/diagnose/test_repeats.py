"""Two policies that differ are named only where the dump can tell them from a trainer that differs each time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offcorr.diagnose import Evidence, diagnose
from offcorr.diagnose.causes.policies import repeatable
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.text import headline, text
from tests.diagnose.simulated import World, each_time, moved, noise, positions, world
from tests.diagnose.test_command import run, written


def apart(records):
    """The same records, each with a prompt of its own, so that no context is scored twice."""
    return [dataclasses.replace(one, prompt_ids=np.append(one.prompt_ids, at)) for at, one in enumerate(records)]


fade = positions(lambda t: 1 / (1 + t / 8))


def dropout(logits, world):
    """Of attention weights, which matters less the more tokens there are to attend to."""
    return logits + fade(world)[..., None] * (each_time(1.0)(logits, world) - logits)


@pytest.mark.parametrize(
    ("trainer", "verdict"),
    [(noise(1.0, where=fade), "truncated_prompt"), (dropout, "dropout")],
    ids=["prompt", "dropout"],
)
def test_a_difference_that_fades_has_no_name_without_repeated_contexts(trainer, verdict):
    records = World(trainer=trainer).records()
    assert repeatable(Evidence.of(records))
    assert diagnose(records).verdict == verdict
    report = diagnose(apart(records))
    assert report.verdict == "unknown"
    assert any("dropout" in said for said in report.cannot_tell)


@pytest.mark.parametrize(("size", "verdict"), [(1.0, "unknown"), (0.3, "policy_updates")])
def test_a_gap_without_a_cause_is_said_beside_the_trainers_own_updates(size, verdict, tmp_path, capsys):
    """The updates are no part of d, so d is as unexplained as without them."""
    records = apart(World(trainer=noise(size, where=fade), edits=[moved]).records())
    report = diagnose(records)
    assert (report.verdict, [one.cause for one in report.causes]) == (verdict, ["policy_updates"])
    assert report.d_unexplained and report.as_dict()["d_unexplained"]
    said = " ".join(text(report).split())
    assert ("no known cause fits the gap d itself, 0.067 nats" in headline(report)) == (verdict == "policy_updates")
    assert f"None explains d, a difference of {report.numbers['abs_mean']:.2g} nats per token." in said
    assert "To do: compute the log-probs of one short sequence by hand" in said
    dump = written(tmp_path / "dump.jsonl", records)
    assert run(capsys, dump, "--fail-on", "unknown")[0] == 3


def test_dropout_in_few_tokens_is_not_taken_for_older_weights():
    made = World(sequences=8, tokens=16, trainer=each_time(0.6))
    report = diagnose(apart(made.records()))
    assert report.verdict == "unknown"
    assert any("dropout" in said for said in report.cannot_tell)


def flips(decay):
    """In a quarter of the sequences other experts for one token, which also move those after it, by less."""

    def edit(columns, world):
        size = np.zeros(columns["old_logp"].shape)
        for row in range(0, world.sequences, 4):
            first = int(world.rng.integers(4, 12))
            size[row, first:] = 0.8 * np.exp(-np.arange(world.tokens - first) / decay)
        sign = world.rng.choice([-1.0, 1.0], size.shape)
        columns["old_logp"] = columns["old_logp"] + sign * size * (1 - np.exp(columns["old_logp"]))

    return edit


def test_routing_that_also_moves_the_tokens_after_a_flip_is_named():
    records = World(edits=[flips(4.0)]).records()
    profile = Profile.of(Evidence.of(records))
    assert profile.smoothness > 0.75
    assert profile.tail > 5
    assert diagnose(records).verdict == "moe_routing"


def test_sequences_that_agree_exactly_are_no_rounding():
    made = World(edits=[flips(30.0)])
    made.edits.append(lambda columns, world: columns.update(old_logp=_nearer(columns, 0.02)))
    assert diagnose(made.records()).verdict not in ("precision", "clean")


def _nearer(columns, share):
    return columns["rollout_logp"] + share * (columns["old_logp"] - columns["rollout_logp"])


def test_prompts_are_not_what_decides_where_other_weights_agree():
    """The first of four steps agrees, and has the longest prompts."""
    made = world("stale_weights")
    records = made.records()
    clean = world(seed=0).records()
    steps = [dataclasses.replace(one, step=at // 8) for at, one in enumerate([*clean[:8], *records[8:]])]
    long = [
        dataclasses.replace(one, prompt_ids=np.resize(one.prompt_ids, 40)) if one.step == 0 else one for one in steps
    ]
    assert np.isnan(Profile.of(Evidence.of(long)).whole[1])
    assert diagnose(long).verdict == "stale_weights"
    together = Profile.of(Evidence.of([dataclasses.replace(one, step=0) for one in long])).whole[1]
    assert together == 1.0
