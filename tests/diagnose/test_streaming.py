"""Large dumps: the sample is random, of whole groups, and memory does not grow with the dump."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from offcorr.diagnose import Record, diagnose, diagnosis
from offcorr.diagnose.text import text


def streamed(count, tokens=10, group=4, alive=None, prompt=lambda at: [at]):
    """Records made one at a time; ``alive`` gets the number of those that are still referred to."""
    made = weakref.WeakSet()
    for at in range(count):
        record = Record.of(
            {
                "prompt_ids": prompt(at // group),
                "completion_ids": np.arange(tokens),
                "rollout_logp": -np.ones(tokens),
                "old_logp": -np.ones(tokens),
                "step": at,
            }
        )
        made.add(record)
        if alive is not None and at % 50 == 0:
            gc.collect()
            alive.append(len(made))
        yield record


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(diagnosis, "SAMPLED_TOKENS", 2000)  # 200 records


@pytest.mark.parametrize(
    "prompt", [pytest.param(lambda at: [at], id="groups of 4"), pytest.param(lambda at: [1], id="one prompt")]
)
def test_no_more_than_the_sample_is_kept(small, prompt):
    alive = []
    report = diagnose(streamed(3000, alive=alive, prompt=prompt))
    assert 500 <= report.numbers["tokens"] <= 2000
    assert report.numbers["dump_tokens"] == 30_000 and report.numbers["dump_sequences"] == 3000
    assert "a random sample of the dump's 30,000 tokens of 3,000 sequences" in text(report)
    assert max(alive) <= 200 + 2 * 2000 / 2 / 10 + 5  # the sample, the next part and the one that is read
    steps = [record.step for record in report.evidence.records]
    assert steps == sorted(steps) and min(steps) < 1000 and max(steps) > 2000  # of the whole dump, in its order


def test_groups_are_sampled_whole(small):
    steps = [record.step for record in diagnose(streamed(2000)).evidence.records]
    assert len(steps) % 4 == 0
    assert {step // 4 for step in steps} == {step // 4 for step in steps[::4]}


def test_every_group_is_as_likely(small):
    """Over many seeds, the early, middle and late parts of a dump are drawn equally often."""
    counts = np.zeros(4)
    for seed in range(60):
        steps = [record.step for record in diagnosis._sample(streamed(1000), seed)]
        counts += np.bincount(np.array(steps) // 250, minlength=4)
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()


def test_a_small_dump_is_read_whole(small):
    assert diagnose(streamed(200)).numbers["tokens"] == 2000


def test_one_sequence_longer_than_the_sample(small):
    assert diagnose(streamed(3, tokens=5000)).numbers["tokens"] == 5000
