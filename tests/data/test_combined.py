"""Replay around demonstrations around prefixes: every origin in one run, which goes on from a checkpoint exactly."""

from __future__ import annotations

import torch

from offcorr.data import Demonstrations, Prefixes, Replay
from offcorr.rollout import OffPolicy
from offcorr.training import ORIGINS
from tests.data.runs import PROMPTS, Seen, traces_of, trainer_of, weights_of
from tests.rollout.rollout_models import fresh_model

OPTIONS = {"max_steps": 8, "per_device_train_batch_size": 16, "save_steps": 4}


def sampler():
    """Demonstrations of the second prompt, prefixes of the first, and replay of both and of plain groups."""
    return Replay(
        Demonstrations(Prefixes(OffPolicy(lag=1), traces_of(PROMPTS[:1])), traces_of(PROMPTS[1:2], logp=-1.0)),
        share=0.5,
    )


def test_every_origin_trains_and_resumes(tmp_path):
    whole = trainer_of(sampler(), tmp_path, save_strategy="steps", **OPTIONS)
    seen = Seen(whole)
    whole.train()
    batches = [batch for batch in seen.batches if batch.origin is not None]
    found = {ORIGINS[int(i)] for batch in batches for i in batch.origin}
    assert found == set(ORIGINS)
    for batch in batches:
        assert torch.isfinite(batch.old_logp[batch.mask]).all()
        for group in batch.group_ids.unique():
            origins = {ORIGINS[int(i)] for i in batch.origin[batch.group_ids == group]}
            assert origins <= {"fresh", "prefix", "demonstration"} or origins <= {"replay", "demonstration"}, "torn"
    logged = {name for entry in whole.state.log_history for name in entry}
    assert {f"offcorr/origin/{origin}/share" for origin in ORIGINS} <= logged

    resumed = trainer_of(sampler(), tmp_path, fresh_model(seed=7), save_strategy="no", **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights_of(whole), weights_of(resumed))
