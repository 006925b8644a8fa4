"""Two processes: each has whole groups, traces take turns over both, and both have the same state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcorr.data import Demonstrations, Prefixes
from offcorr.rollout import OffPolicy
from tests.data.runs import traces_of, trainer_of
from tests.rollout.rollout_models import tokenizer

WORKER = Path(__file__).with_name("ranks_worker.py")
TEXTS = ["01", "23", "45", "67", "89"]


def launched(folder, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    arguments = [str(folder), "4", *map(str, more)]
    ran = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-3000:]
    name = "rank_{}_resumed.json" if more else "rank_{}.json"
    return [json.loads(Path(folder, name.format(rank)).read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_share_the_turns_of_traces_and_resume_exactly(tmp_path):
    ranks = launched(tmp_path)
    words, taken, prompts = tokenizer(), [], []
    for outputs in zip(*(rank["outputs"] for rank in ranks), strict=True):
        for output in outputs:
            (prompt,) = {words.decode(ids) for ids in output["prompt_ids"]}
            prompts.append(prompt)
            assert output["origin"][3] == (2 if prompt == "c2=" else 0)
            assert len({str(given) for given in prefixes(output)}) == 1
            if prompt == "c2=":
                taken.append(words.decode(output["completion_ids"][3][:2]))
    assert len(prompts) == 8 and taken == [TEXTS[i % 5] for i in range(len(taken))] and len(taken) > 1
    assert ranks[0]["state"] == ranks[1]["state"] and ranks[0]["weights"] == ranks[1]["weights"]
    assert all(entry["offcorr/loss/nonfinite"] == 0 for entry in ranks[0]["logged"])

    again = launched(tmp_path, tmp_path / "checkpoint-2")
    for whole, resumed in zip(ranks, again, strict=True):
        assert str(resumed["outputs"]) == str(whole["outputs"][2:])
        assert resumed["state"] == whole["state"] and resumed["weights"] == whole["weights"]


def prefixes(output):
    """The tokens given in each sampled row."""
    rows = zip(output["completion_ids"], output["env_mask"], output["origin"], strict=True)
    return [ids[: mask.count(0)] for ids, mask, origin in rows if origin != 2]


@pytest.mark.parametrize("cls", [Demonstrations, Prefixes])
def test_groups_that_are_split_over_ranks_are_refused_with_the_numbers(tmp_path, cls):
    trainer = trainer_of(OffPolicy(), tmp_path, per_device_train_batch_size=8)
    trainer.args.per_device_train_batch_size = 6  # as two ranks may have it
    with pytest.raises(
        ValueError, match="per_device_train_batch_size=6 times steps_per_generation=1 = 6 completions, ex"
    ):
        cls(OffPolicy(), traces_of(logp=-1.0)).attach(trainer)
