"""``dump_rollouts``: what both trainers were trained on, in files that ``offcorr.diagnose.read`` reads."""

from __future__ import annotations

import numpy as np
import pytest
import trl
from packaging.version import Version
from transformers import HfArgumentParser

from offcorr.data import Replay
from offcorr.diagnose import read
from offcorr.rollout import OffPolicy
from offcorr.trl import GRPOConfig
from offcorr.trl.dump import row_sequences

pytest.importorskip("pyarrow")


def dumped(folder):
    return list(read([folder], warn=lambda text: None))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dump"


@pytest.mark.parametrize("settings", [{"loss_type": "tis"}, {"loss_type": "grpo"}], ids=["correction", "TRL's loss"])
def test_the_dump_holds_what_was_sampled_and_trained_on(make_trainer, replay, recorded, tokenizer, folder, settings):
    sampler = replay("old_logp", "rollout_version", "env_mask")
    trainer = make_trainer(rollout_func=sampler, dump_rollouts=str(folder), max_steps=2, **settings)
    trainer.train()
    assert sorted(file.name for file in folder.iterdir()) == [f"step_00000{s}.rank_0.parquet" for s in (1, 2)]
    records = dumped(folder)
    assert len(records) == 16  # two steps of two micro-batches of four
    by_prompt = {tuple(tokenizer(prompt)["input_ids"]): rows for prompt, rows in recorded.items()}
    for record in records:
        known = by_prompt[tuple(record.prompt_ids)]
        (row,) = [row for row in known if row["completion_ids"] == record.completion_ids.tolist()]
        for name, key in (("rollout_logp", "logprobs"), ("old_logp", "old_logp")):
            np.testing.assert_array_equal(getattr(record, name), np.float32(row[key]).astype(float))
        assert record.mask.tolist() == [bool(one) for one in row["env_mask"]]
        assert record.rollout_version == 0 and record.step == record.trainer_version + 1
        assert record.reward == pytest.approx(np.mean(np.mod(record.completion_ids, 3)))
    first = [record for record in records if record.step == 1]
    for record in first:  # by weights that have not moved
        np.testing.assert_allclose(record.logp[record.mask], record.old_logp[record.mask], atol=1e-4)
        assert record.entropy.min() > 0
    assert all(record.entropy is None for record in records if record.step == 2)  # not of the weights that sampled
    for group in {record.group_id for record in records}:
        members = [record for record in records if record.group_id == group]
        assert len(members) == 4 and len({tuple(record.prompt_ids) for record in members}) == 1
        rewards = np.array([record.reward for record in members])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose([record.advantage for record in members], advantages, atol=1e-4)


@pytest.mark.parametrize("anchor", ["rollout", "recomputed", "ewma"])
def test_old_logp_is_of_the_weights_that_sampled_whatever_the_anchor_is(make_trainer, replay, folder, anchor):
    settings = {"anchor_kwargs": {"window": 4}} if anchor == "ewma" else {}
    trainer = make_trainer(
        loss_type="minpro",
        anchor=anchor,
        rollout_func=replay("old_logp", "rollout_version"),
        dump_rollouts=str(folder),
        max_steps=2,
        **settings,
    )
    trainer.train()
    first, second = ([record for record in dumped(folder) if record.step == step] for step in (1, 2))
    for record in first:
        np.testing.assert_allclose(record.logp, record.old_logp, atol=1e-4)
    assert max(abs(record.logp - record.old_logp).max() for record in second) > 1e-3
    assert min(abs(record.rollout_logp - record.old_logp).max() for record in second) > 1e-3


def test_the_dump_changes_nothing_and_costs_nothing_where_it_is_off(make_trainer, replay, series, folder, monkeypatch):
    def run(**settings):
        trainer = make_trainer(loss_type="tis", rollout_func=replay("old_logp"), max_steps=3, **settings)
        trainer.train()
        return series(trainer, "grad_norm")

    with_dump = run(dump_rollouts=str(folder), dump_every=2)
    assert sorted(file.name for file in folder.iterdir()) == [f"step_00000{s}.rank_0.parquet" for s in (1, 3)]

    def refuse(*_, **__):
        raise AssertionError("records were made")

    monkeypatch.setattr("offcorr.trl.dump.records_of", refuse)
    assert run() == with_dump


def test_evaluation_is_not_dumped(make_trainer, replay, folder, dataset):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 4}
    trainer = make_trainer(
        loss_type="tis",
        rollout_func=replay("old_logp"),
        dump_rollouts=str(folder),
        max_steps=1,
        eval_dataset=dataset.select(range(2)),
        **settings,
    )
    trainer.train()
    assert len(dumped(folder)) == 8


def test_trls_own_generation_has_no_log_probs_of_the_sampler(make_trainer, folder):
    """Said in a warning; the versions are those of the generation."""
    trainer = make_trainer(loss_type="minpro", num_iterations=2, max_steps=2, dump_rollouts=str(folder))
    with pytest.warns(RuntimeWarning, match="the sampler reports no log-probs, so rollout_logp of the dump is NaN"):
        trainer.train()
    records = dumped(folder)
    assert all(np.isnan(record.rollout_logp).all() and record.rollout_version == 0 for record in records)
    assert {record.trainer_version for record in records} == {0, 1}
    moved = [abs(record.logp - record.old_logp).max() for record in records if record.trainer_version == 1]
    assert max(moved) > 1e-3


def test_a_folder_with_another_run_is_refused_before_training(make_trainer, replay, folder):
    def trainer(**settings):
        return make_trainer(
            loss_type="tis", rollout_func=replay("old_logp"), dump_rollouts=str(folder), max_steps=2, **settings
        )

    trainer(save_strategy="steps", save_steps=1).train()
    with pytest.raises(FileExistsError, match="holds step_000001.rank_0.parquet, the dump of another run"):
        trainer().train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-1")
    names = ["step_000001.rank_0.parquet", "step_000002.rank_0.2.parquet", "step_000002.rank_0.parquet"]
    assert sorted(file.name for file in folder.iterdir()) == names


# ------------------------------------------------------------------------------------------------- the configuration


def test_options_from_the_command_line(tmp_path):
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--dump_rollouts", "dump", "--dump_every", "5", "--bf16", "false"]
    )
    assert (args.dump_rollouts, args.dump_every) == ("dump", 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dump_rollouts": ""}, "dump_rollouts is '', expected the path of a folder or None"),
        ({"dump_rollouts": True}, "dump_rollouts is True, expected the path of a folder or None"),
        ({"dump_rollouts": __file__}, "test_dump.py', which is a file, expected a folder"),
        ({"monitor": {"folder": 3}}, "monitor: .* not '?int"),
        ({"dump_rollouts": "d", "dump_every": 0}, "dump_every is 0, expected a number of optimizer steps, 1 or more"),
        ({"dump_rollouts": "d", "dump_every": 1.5}, "dump_every is 1.5, expected a number of optimizer steps"),
    ],
)
def test_options_that_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(str(tmp_path), bf16=False, report_to=[], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dump_rollouts": f"{__file__}/sub"}, r"cannot write to '.*test_dump.py/sub' \(.*test_dump.py is a file\)"),
        ({"dump_rollouts": "/proc/xx"}, r"cannot write to '/proc/xx' \(in /proc: .*\); choose another dump_rollouts"),
        ({"monitor": {"critical": "dump", "folder": __file__}}, r"is a file\); choose another folder of monitor"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(make_trainer, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(model=str(tmp_path / "no model here"), loss_type="minpro", **options)
    with pytest.raises(ValueError, match="is a file.; choose another folder of Replay"):
        Replay(OffPolicy(), folder=f"{__file__}/groups")


def test_dump_every_alone_does_nothing(tmp_path):
    with pytest.warns(UserWarning, match="dump_every=5 does nothing without dump_rollouts"):
        GRPOConfig(str(tmp_path), bf16=False, report_to=[], dump_every=5)


# ------------------------------------------------------------------------------------------ the asynchronous trainer

if Version(trl.__version__) >= Version("1.16"):
    from tests.trl.test_async import folder as model_folder_of_async
    from tests.trl.test_async import some_samples, through_trl, trainer_of

    async_model = model_folder_of_async

    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_samples_of_a_packed_row(processes):
        """From the trie back to prompt, completion and the places of the trained tokens."""
        inputs, rows = through_trl(some_samples(), processes)
        for of_rank, row in zip(inputs, rows, strict=True):
            found = row_sequences(of_rank, len(row.samples))
            for sample, prompt, completion, places in zip(row.samples, *found, strict=True):
                ids, trained = sample["input_ids"], sample["completion_mask"].nonzero()[0]
                if not len(trained):
                    assert (prompt, completion, places) == ([], [], [])
                    continue
                assert prompt == ids[: trained[0]].tolist()
                assert completion == ids[trained[0] : trained[-1] + 1].tolist()
                assert places == (trained - trained[0]).tolist()

    @pytest.mark.parametrize("loss_type", ["tis", None])
    def test_the_asynchronous_trainer(async_model, tmp_path, folder, loss_type):
        trainer = trainer_of(async_model, tmp_path, loss_type=loss_type, dump_rollouts=str(folder), max_steps=2)
        trainer.train()
        records = dumped(folder)
        assert len(records) == 16 and {record.step for record in records} == {1, 2}
        for record in records:
            assert record.mask.any() and len(record.prompt_ids) > 1
            assert (record.entropy is None) == (record.rollout_version < record.trainer_version)
            np.testing.assert_allclose(record.rollout_logp[record.mask], record.old_logp[record.mask], atol=1e-4)
            assert record.reward is not None and record.rollout_version <= record.trainer_version
        assert len({tuple(r.prompt_ids) for r in records if r.group_id == records[0].group_id}) == 1


def test_a_folder_with_other_files_is_no_place_for_a_dump(make_trainer, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.md").write_text("dump here")
    trainer = make_trainer(dump_rollouts=str(tmp_path / "notes"))
    with pytest.raises(FileExistsError, match=r"holds todo\.md, expected a new or empty folder"):
        trainer.train()
