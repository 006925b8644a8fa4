"""``Replay`` in the trainer: which groups are replayed, and what is kept of them, in real runs on a tiny model."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from offcorr.data import Replay
from offcorr.data.store import Store
from offcorr.diagnose import diagnose, read
from offcorr.rollout import OffPolicy
from tests.data.replaying import SETTINGS, SIZE, Seen, groups_of, parameters

# -- what is replayed --------------------------------------------------------------------------------------------


def test_share_0_is_the_plain_run(trained, series):
    plain, wrapped = trained(OffPolicy(lag=2, precision="int8")), trained(Replay(OffPolicy(lag=2, precision="int8"), 0))
    assert torch.equal(parameters(plain), parameters(wrapped))
    for entry, other in zip(plain.state.log_history[:-1], wrapped.state.log_history[:-1], strict=True):
        for name in entry:
            if not name.endswith(("_time", "runtime")) and "step_time" not in name:
                assert entry[name] == other[name] or np.isnan(entry[name]), name
    assert [len(call) for call in wrapped.calls] == [8] * 6


def test_share_1_at_age_0_gives_the_same_batch_again(trained):
    """Two generations per optimizer step: the first is sampled, the second is the same at the same version."""
    trainer = trained(
        Replay(OffPolicy(), 1.0, max_age=0), per_device_train_batch_size=8, steps_per_generation=1, max_steps=3
    )
    first, second = trainer.generations[::2], trainer.generations[1::2]
    assert len(first) == len(second) == 3
    for one, other in zip(first, second, strict=True):
        assert one["origin"].unique().tolist() == [0] and other["origin"].unique().tolist() == [1]
        for name in ("prompt_ids", "completion_ids", "old_logp", "sampling_per_token_logps", "rewards", "advantages"):
            assert torch.equal(one[name], other[name]), name
    assert [len(call) for call in trainer.calls] == [8] * 3
    assert len({groups_of(generation)[0] for generation in first}) == 3


def test_a_replayed_group_is_whole_and_keeps_what_was_recorded(trained):
    trainer = trained(Replay(OffPolicy(lag=1, precision="int8"), 0.5), max_steps=8)
    sampled = {}
    for version, generation in enumerate(trainer.generations):
        for place, (origin, content) in enumerate(groups_of(generation)):
            rows = slice(place * SIZE, (place + 1) * SIZE)
            recorded = (*(generation[name][rows].tolist() for name in ("rewards", "rollout_version", "advantages")),)
            if origin:
                assert recorded == sampled[content] and recorded[1][0] < version
            else:
                sampled[content] = recorded
    origins = [origin for generation in trainer.generations for origin, _ in groups_of(generation)]
    assert origins == [0, 0] + [0, 1] * 7  # nothing is stored before the first generation
    assert [len(call) for call in trainer.calls] == [8] + [4] * 7


def test_ratios_are_those_of_the_recorded_log_probs(trained, series):
    trainer = trained(Replay(OffPolicy(precision="int8"), 0.5), max_steps=5)
    assert repr(trainer.anchor) == "Supplied()"
    replayed = 0
    for inputs, batch in trainer.batches:
        assert torch.equal(batch.old_logp, inputs["old_logp"])
        rows = batch.origin == 1
        replayed += int(rows.sum())
        if rows.any() and int((batch.trainer_version - batch.rollout_version)[rows].max()) > 1:
            moved = (batch.logp - batch.old_logp)[rows & True][batch.mask[rows]]
            assert moved.abs().max() > 1e-4
    assert replayed == 4 * SIZE
    lags = series(trainer, "offcorr/origin/replay/lag")
    assert lags[0] == 1 and max(lags) > 1 and {*series(trainer, "offcorr/origin/fresh/lag")} == {0}
    assert (
        max(series(trainer, "offcorr/origin/fresh/abs_mean"))
        < 1e-5
        < min(series(trainer, "offcorr/origin/replay/abs_mean"))
    )
    assert series(trainer, "offcorr/origin/replay/share")[-1] == 0.5


def test_a_fraction_of_a_group_is_carried_over(trained):
    trainer = trained(Replay(OffPolicy(), 0.3), max_steps=11)
    replayed = [sum(origin for origin, _ in groups_of(generation)) for generation in trainer.generations]
    assert replayed == [0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]  # of two groups each: .6 a generation
    assert Replay(OffPolicy(), 0.75).update_to_data == 4 and Replay(OffPolicy(), 1).update_to_data == float("inf")


def test_fewest_uses_first_and_none_twice_in_a_generation(trained):
    replay = Replay(OffPolicy(), 1.0, max_groups=16, max_age=9)
    trainer = trained(replay, per_device_train_batch_size=16, max_steps=2)
    assert [entry.uses for entry in replay.store.entries.values()] == [1] * 8
    contents = [content for _, content in groups_of(trainer.generations[1])]
    assert len({*contents}) == 8


def test_fewest_uses_come_first_where_a_part_is_drawn():
    """After any number of draws of 3 of 8 groups, no group was used more than once more often than another."""
    store = Store(8, None, None)
    for group in range(8):
        store.add(group, version=0)
    for draw in range(12):
        assert len({*store.choose(3, [0, draw])}) == 3
        uses = [entry.uses for entry in store.entries.values()]
        assert sum(uses) == 3 * (draw + 1) and max(uses) - min(uses) <= 1


def test_advantages_of_the_time_of_sampling(trained):
    """They differ from recomputed ones where the scale is that of the batch."""
    found = {}
    for advantages in ("recomputed", "recorded"):
        trainer = trained(Replay(OffPolicy(), 0.5, advantages=advantages), scale_rewards="batch", max_steps=3)
        sampled = {}
        for generation in trainer.generations:
            for place, (origin, content) in enumerate(groups_of(generation)):
                own = generation["advantages"][place * SIZE : (place + 1) * SIZE].tolist()
                if origin:
                    found.setdefault(advantages, []).append(own == sampled[content])
                else:
                    sampled[content] = own
    assert all(found["recorded"]) and not all(found["recomputed"])


def test_rewards_that_are_not_there_stay_absent(make_trainer):
    """A reward function that returns None: NaN again, in the replayed group as when it was sampled."""

    def sometimes(completion_ids, **_):
        return [None if len(ids) % 2 else float(len(ids)) for ids in completion_ids]

    def always(completion_ids, **_):
        return [float(ids[0] % 3) for ids in completion_ids]

    trainer = make_trainer(
        Seen,
        rollout_func=Replay(OffPolicy(), 1.0, max_age=1),
        reward_funcs=[sometimes, always],
        reward_weights=[1.0, 0.5],
        **{**SETTINGS, "max_steps": 2},
    )
    trainer.train()
    first, second = trainer.generations
    assert torch.equal(first["rewards"], second["rewards"]) and torch.equal(first["advantages"], second["advantages"])
    (entry, _) = trainer._sampler.store.entries.values()
    assert entry.group.rewards.isnan().any() or _.group.rewards.isnan().any()


# -- what is kept ------------------------------------------------------------------------------------------------


def test_memory_is_bounded(trained):
    replay = Replay(OffPolicy(), 0.5, max_groups=3)
    seen = []

    class Counting(Seen):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen.append(len(replay.store))
            return output

    trained(replay, cls=Counting, max_steps=8)
    assert seen == [2, 3, 3, 3, 3, 3, 3, 3]


def test_old_groups_are_not_replayed(trained):
    replay = Replay(OffPolicy(lag=1), 0.5, max_age=2)
    trainer = trained(replay, max_steps=8)
    for now, generation in enumerate(trainer.generations):
        ages = now - generation["rollout_version"][generation["origin"] == 1]
        assert not len(ages) or ages.max() <= 2
    assert replay.store.entries and all(7 - entry.version <= 2 for entry in replay.store.entries.values())


def test_groups_far_from_the_policy_are_evicted(trained):
    """By the log-probs of the last update that trained on them, which are of the weights before it."""
    kept = Replay(OffPolicy(), 0.5, min_ess=0.001)
    trainer = trained(kept, learning_rate=2e-2, max_steps=5)
    kept._read_log_ratios()
    newest = {}
    for inputs, batch in trainer.batches:
        gap = torch.where(batch.mask, batch.logp.detach() - inputs["old_logp"], 0).sum(1).tolist()
        newest |= {tuple(old[mask].tolist()): x for old, mask, x in zip(batch.old_logp, batch.mask, gap, strict=True)}
    for entry in kept.store.entries.values():
        w = np.exp([newest[tuple(old.tolist())] for old in entry.group.columns["old_logp"]])
        assert entry.ess == pytest.approx(w.sum() ** 2 / (SIZE * (w**2).sum()), rel=1e-5)
    assert min(entry.ess for entry in kept.store.entries.values()) < 0.9

    strict = Replay(OffPolicy(), 0.5, min_ess=0.9)
    trained(strict, learning_rate=2e-2, max_steps=5)
    assert len(strict.store) < len(kept.store)


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_resume_is_exact(trained, tmp_path, series):
    def sampler(folder):
        return Replay(OffPolicy(lag=2, precision="int8"), 0.6, max_groups=4, min_ess=1e-6, folder=tmp_path / folder)

    saved = dict(save_strategy="steps", save_steps=3, output_dir=str(tmp_path / "whole"), max_steps=7)
    whole = trained(sampler("groups"), **saved)
    checkpoint = tmp_path / "moved" / "checkpoint-3"
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", checkpoint)
    assert (checkpoint / "offcorr_replay.rank_0.pt").exists()
    replay = sampler("groups")
    again = trained(replay, resume=str(checkpoint), **{**saved, "output_dir": str(tmp_path / "again")})
    assert torch.equal(parameters(again), parameters(whole))
    for name in ("reward", "offcorr/origin/replay/lag", "offcorr/origin/replay/ess_seq", "offcorr/engine/k3"):
        assert series(again, name)[-4:] == series(whole, name)[-4:]
    state, other = replay.state_dict(), whole._sampler.state_dict()
    assert [entry[0] for entry in state["store"]["entries"]] == [entry[0] for entry in other["store"]["entries"]]
    assert [entry[2:] for entry in state["store"]["entries"]] == [entry[2:] for entry in other["store"]["entries"]]
    assert state["carry"] == other["carry"]
    # One generation had no fresh group; the files that the resumed run finds are left as they are.
    assert len(list((tmp_path / "groups").iterdir())) == 6


def test_another_number_of_ranks_is_refused(trained, tmp_path):
    saved = dict(save_strategy="steps", save_steps=2, output_dir=str(tmp_path / "run"), max_steps=2)
    trained(Replay(OffPolicy(), 0.5), **saved)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    shutil.copy(checkpoint / "offcorr_replay.rank_0.pt", checkpoint / "offcorr_replay.rank_1.pt")
    with pytest.raises(ValueError, match="of 2 ranks, and this run has 1: resume with 2, or delete"):
        trained(Replay(OffPolicy(), 0.5), resume=str(checkpoint), **{**saved, "max_steps": 3})


# -- on disk -----------------------------------------------------------------------------------------------------


def test_yesterdays_rollouts(trained, tmp_path, series):
    """A folder of groups, which ``diagnose`` reads, begins another run; no reward function is called for them."""
    folder = tmp_path / "groups"
    before = trained(Replay(OffPolicy(), 0.5, folder=folder), max_steps=3)
    records = list(read([folder], warn=lambda text: None))
    assert len(records) == (2 + 1 + 1) * SIZE and {record.origin for record in records} == {"fresh"}
    assert diagnose(records).verdict
    replay = Replay(OffPolicy(), 1.0).load(folder)
    trainer = trained(replay, max_steps=2)
    assert trainer.calls == []
    sampled = {content for generation in before.generations for origin, content in groups_of(generation) if not origin}
    replayed = [group for generation in trainer.generations for group in groups_of(generation)]
    assert {origin for origin, _ in replayed} == {1} and {content for _, content in replayed} == sampled
    with pytest.raises(FileExistsError, match="holds generation_000001.rank_0.parquet, of another run"):
        trained(Replay(OffPolicy(), 0.5, folder=folder), max_steps=1)


def test_a_dump_of_another_size_is_refused(trained, tmp_path):
    trained(OffPolicy(), dump_rollouts=str(tmp_path / "dump"), max_steps=2)
    replay = Replay(OffPolicy(), 0.5).load(tmp_path / "dump")
    with pytest.raises(ValueError, match=r"the loaded groups have \[4\] sequences, expected num_generations, 2"):
        trained(replay, num_generations=2, max_steps=1)
    trainer = trained(Replay(OffPolicy(), 0.5).load(tmp_path / "dump"), max_steps=1)
    assert Counter(trainer.generations[0]["origin"].tolist()) == {0: 4, 1: 4}


def test_several_updates_on_a_generation(trained):
    """``num_iterations``: the newest log-ratios of a group are those of its last update."""
    replay = Replay(OffPolicy(), 0.5, min_ess=1e-9)
    trainer = trained(replay, num_iterations=2, max_steps=6)
    assert [int((generation["origin"] == 1).sum()) for generation in trainer.generations] == [0, 4, 4]
    assert all(entry.ess is not None for entry in [*replay.store.entries.values()][:3])
