"""``WorkerReplay``: replay in the asynchronous trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("trl.experimental.async_grpo.packing", exc_type=ImportError)

from offcorr import toy
from offcorr.data import WorkerReplay
from offcorr.stages.checks import warn_again
from offcorr.toy.warm_start import build_tokenizer
from offcorr.trl.async_grpo import AsyncGRPOConfig
from offcorr.trl.local_worker import LocalWorker
from tests.trl.test_async import folder as model_folder_of_async
from tests.trl.test_async import trainer_of

async_model = model_folder_of_async


def worker_of(async_model, tmp_path, replay, **options):
    settings = {"num_generations": 4, "max_completion_length": 6, "report_to": "none", "bf16": False, "use_cpu": True}
    args = AsyncGRPOConfig(str(tmp_path), **settings | options)
    model = AutoModelForCausalLM.from_pretrained(async_model, dtype=torch.float32)
    return LocalWorker(model, build_tokenizer(), toy.dataset(16, split="train"), toy.reward, args, replay=replay)


def groups_of(samples):
    """Of each group: origin, model version, and everything recorded of its samples."""
    found = {}
    for sample in samples:
        content = (sample.input_ids, sample.old_log_probs, sample.old_logp)
        recorded = (*(tuple(column.tolist()) for column in content), sample.advantage, sample.metrics["reward"])
        origin, version, rows = found.setdefault(sample.group_id, (sample.origin, sample.model_version, []))
        assert (origin, version) == (sample.origin, sample.model_version), "a torn group"
        rows.append(recorded)
    assert all(len(rows) == 4 for *_, rows in found.values())
    return {group: (origin, version, tuple(rows)) for group, (origin, version, rows) in found.items()}


def test_a_share_of_the_groups_is_replayed_as_it_was_recorded(async_model, tmp_path):
    worker = worker_of(async_model, tmp_path, WorkerReplay(0.5, max_age=2), max_staleness=3)
    weights = list(AutoModelForCausalLM.from_pretrained(async_model, dtype=torch.float32).named_parameters())
    rows, generator, seen, first = iter(range(16)), torch.Generator().manual_seed(0), {}, 0
    for version in (0, 0, 1, 4):
        worker.send_weights(iter(weights))
        worker.update_model_version(version)
        found = groups_of(worker._groups(rows, first, generator))
        assert list(found) == sorted(found) == list(range(first, first + 4))  # an id is never used again
        first += 4
        replayed = [(own, rest) for origin, own, rest in found.values() if origin == "replay"]
        assert len(replayed) == (0 if version == 4 or first == 4 else 2)  # at version 4 all are too old
        assert all(seen[rest] == own for own, rest in replayed)
        seen |= {rest: own for origin, own, rest in found.values() if origin == "fresh"}
    assert {entry.version for entry in worker.replay.store.entries.values()} == {4}


def test_training_with_replay(async_model, tmp_path):
    """Old groups have the log-probs of the weights that sampled them, and every sample its origin."""
    options = {"loss_type": "minpro", "max_staleness": 6, "per_device_train_batch_size": 16, "max_steps": 4}
    trainer = trainer_of(async_model, tmp_path, **options)
    replay = trainer.rollout_worker.replay = WorkerReplay(0.5)
    replay.begin(trainer.args.max_staleness, seed=0)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "offcorr/origin/fresh/share" in entry]
    assert len(logged) == 4 and 0 < logged[-1]["offcorr/origin/replay/share"] < 1
    assert all(
        abs(sum(entry.get(f"offcorr/origin/{name}/share", 0) for name in ("fresh", "replay")) - 1) < 1e-6
        for entry in logged
    )
    assert max(entry.get("offcorr/origin/replay/engine_abs_mean", 0) for entry in logged) < 1e-5
    assert sum(entry.uses for entry in replay.store.entries.values()) > 0


def test_without_replay_there_is_no_origin(async_model, tmp_path):
    trainer = trainer_of(async_model, tmp_path, loss_type="minpro", max_steps=1)
    trainer.train()
    assert not any("/origin/" in name for entry in trainer.state.log_history for name in entry)


def test_an_age_that_trl_would_drop_is_refused(async_model, tmp_path):
    with pytest.raises(ValueError, match="max_age is 5, expected at most max_staleness, 4"):
        worker_of(async_model, tmp_path, WorkerReplay(0.5, max_age=5), max_staleness=4)
    with pytest.raises(ValueError, match="share"):
        WorkerReplay(2.0)


@pytest.mark.parametrize(("loss_type", "warns"), [("reinforce", True), ("minpro", False)])
def test_a_loss_that_sees_no_age_is_said(async_model, tmp_path, recwarn, loss_type, warns):
    warn_again()
    trainer = trainer_of(async_model, tmp_path, loss_type=loss_type, max_steps=1)
    replay = trainer.rollout_worker.replay = WorkerReplay(0.5)
    replay.begin(trainer.args.max_staleness, seed=0)
    trainer.train()
    said = [str(one.message) for one in recwarn if "takes no ratio to the weights that sampled" in str(one.message)]
    assert len(said) == warns and all("WorkerReplay replays" in one for one in said)
