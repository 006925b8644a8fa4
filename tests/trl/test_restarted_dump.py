"""A run killed between a checkpoint and its last dump writes some steps again: the later file is read."""

from __future__ import annotations

import pytest

from offcorr.diagnose import read
from offcorr.rollout import OffPolicy

pytest.importorskip("pyarrow")


def test_a_step_trained_again_is_read_once_as_it_was_trained_the_last_time(make_trainer, tmp_path):
    settings = dict(
        loss_type="minpro",
        output_dir=str(tmp_path / "run"),
        dump_rollouts=str(tmp_path / "dump"),
        save_strategy="steps",
        save_steps=2,
    )
    make_trainer(rollout_func=OffPolicy(lag=1), max_steps=3, **settings).train()  # killed after step 3
    make_trainer(rollout_func=OffPolicy(lag=1, seed=9), max_steps=4, **settings).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2")
    )
    files = {file.name: file for file in (tmp_path / "dump").iterdir()}
    assert {"step_000003.rank_0.parquet", "step_000003.rank_0.2.parquet"} <= files.keys()
    said = []
    records = list(read([tmp_path / "dump"], warn=said.append))
    assert [sum(one.step == step for one in records) for step in (1, 2, 3, 4)] == [8, 8, 8, 8]
    (later,) = [list(read([files["step_000003.rank_0.2.parquet"]], warn=lambda text: None))]
    third = [one for one in records if one.step == 3]
    assert [one.completion_ids.tolist() for one in third] == [one.completion_ids.tolist() for one in later]
    (sentence,) = [one for one in said if "again" in one]
    assert "step_000003.rank_0.parquet is of a step that was trained again after a restart" in sentence
    assert "step_000003.rank_0.2.parquet is read; 1 such files are left out" in sentence
