"""A change of level at one position of all sequences against a fade, and tokens that were chosen by the sign of d."""

from __future__ import annotations

import numpy as np
import pytest

from offcorr.diagnose import Evidence, Record, diagnose
from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.causes.sampling import Unnormalised
from offcorr.diagnose.causes.truncation import kept
from tests.diagnose.simulated import noise, positions, world


def profile(shape, seed=0):
    """Of d that is noise of the given size at each position."""
    rng = np.random.default_rng(seed)
    at = np.arange(80)
    rows = []
    for row in range(24):
        trainer = -rng.exponential(size=80) - 0.1
        d = 0.2 * shape(at) * rng.standard_normal(80) * (1 - np.exp(trainer))
        rows.append({"prompt_ids": [row], "completion_ids": at, "rollout_logp": trainer - d, "old_logp": trainer})
    return Profile.of(Evidence.of([Record.of(row) for row in rows]))


@pytest.mark.parametrize("seed", range(4))
def test_a_drop_is_found_where_it_is_and_a_fade_is_none(seed):
    dropped = profile(lambda t: np.where(t < 20, 1.0, 0.3), seed).common_step
    assert dropped.gain > 40
    assert dropped.rise < -0.5
    assert abs(dropped.place - 20) <= 3
    for fade in (lambda t: 1 / (1 + t / 6), lambda t: np.exp(-t / 30), lambda t: np.ones(len(t))):
        assert profile(fade, seed).common_step.gain < 20


def test_few_tokens_have_no_step():
    row = {"prompt_ids": [1], "completion_ids": range(9), "rollout_logp": [-1.0] * 9, "old_logp": [-1.1] * 9}
    assert Profile.of(Evidence.of([Record.of(row)])).common_step.gain == 0


def test_beside_a_truncation_only_tokens_that_it_cannot_lower_tell_what_else_differs():
    made = world("top_p", tokens=96)
    made.trainer = noise(0.05, shared=True)
    records = made.records()
    assert "moe_routing" not in {finding.cause for finding in diagnose(records).causes}
    left = kept(Evidence.of(records)).left
    assert left.selected and (left.d > 0).all()
    assert Unnormalised().found(left) is None  # d has one sign by the choice
    assert kept(left) is None
    pure = kept(Evidence.of(world("top_p").records())).left
    assert pure.floor == np.inf  # nothing else is looked for


def test_weights_that_change_at_one_position_are_told_from_what_fades():
    made = world("weights_swapped")
    made.sampler = noise(0.3, shared=True, where=positions(lambda t: np.where(t < 22, 1.0, 0.2)))
    assert diagnose(made.records()).verdict == "weights_swapped"


def rounded(order, seed=0):
    """Rounding whose size depends on the token id alone; ``order`` gives the ids of each position."""
    rng = np.random.default_rng(seed)
    records = []
    for row in range(32):
        ids = order(rng)
        trainer = -rng.exponential(size=len(ids)) - 0.1
        d = np.where(ids < 4, 0.03, 0.006) * rng.standard_normal(len(ids)) * (1 - np.exp(trainer))
        columns = {
            "completion_ids": ids,
            "rollout_logp": trainer - d,
            "old_logp": trainer,
            "mask": np.ones(len(ids), bool),
        }
        records.append(Record.of({"prompt_ids": [row // 4], **columns}))
    return records


def test_rounding_that_follows_the_text_is_no_old_cache_and_no_other_prompt():
    """Completions begin with the ids that rounding moves most, as answers of one form do."""

    def form(rng):
        return np.concatenate([rng.integers(0, 4, 8), rng.integers(0, 40, 40)])

    assert diagnose(rounded(form)).verdict == "precision"
    faded = Profile.of(Evidence.of(rounded(form)))
    assert faded.level(0, 8)[0] > 0.8 and abs(faded.within_ids.level(0, 8)[0]) < 0.2

    def first(rng):
        return np.concatenate([rng.integers(0, 4, 1), rng.integers(4, 40, 47)])

    assert diagnose(rounded(first)).verdict == "precision"
