"""The trainer, model and data of ``tests/trl``, and a run of a sampler with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import missing_at
from tests.trl.conftest import dataset, make_trainer, model_folder, one_thread, series, tokenizer

if not missing_at(Path(__file__).parent):  # else the tests beside this file are skipped
    from tests.data.replaying import SETTINGS, Seen, scored

__all__ = ["dataset", "make_trainer", "model_folder", "one_thread", "series", "tokenizer"]


@pytest.fixture
def trained(make_trainer, dataset):
    """``trained(sampler, **settings)``: a trainer after its run; ``calls`` are those of its reward function."""

    def run(sampler, cls=None, resume=None, **settings):
        calls = []

        def reward(completions, marks, **columns):
            return scored(completions, marks, calls)

        trainer = make_trainer(cls or Seen, rollout_func=sampler, reward_funcs=reward, **{**SETTINGS, **settings})
        trainer.train_dataset = dataset.add_column("marks", list(range(len(dataset))))
        trainer.calls = calls
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run
