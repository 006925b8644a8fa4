"""``Replay`` on two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offcorr

WORKER = Path(__file__).with_name("replay_worker.py")
SIZE = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, model_folder):
    """What each of the two ranks found."""
    output = tmp_path_factory.mktemp("ranks")
    places = [str(Path(offcorr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(WORKER), model_folder, str(output)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def groups(generation):
    """(origin, recorded log-probs) of each group."""
    found = []
    for start in range(0, len(generation["origin"]), SIZE):
        rows = slice(start, start + SIZE)
        assert len({*generation["origin"][rows]}) == 1 and len({*map(tuple, generation["prompt_ids"][rows])}) == 1
        found.append(
            (generation["origin"][start], tuple(tuple(x for x in row if x) for row in generation["old_logp"][rows]))
        )
    return found


def test_the_ranks_agree_on_the_number_of_replayed_groups(ranks):
    """Rank 1 holds fewer: where rank 0 could replay all, both sample one more."""
    numbers = [[sum(origin for origin, _ in groups(g)) for g in rank["generations"]] for rank in ranks]
    assert numbers[0] == numbers[1] and numbers[0][:3] == [0, 2, 2]


def test_two_ranks_draw_disjoint_groups(ranks):
    sampled = [{c for g in rank["generations"] for origin, c in groups(g) if not origin} for rank in ranks]
    replayed = [{c for g in rank["generations"] for origin, c in groups(g) if origin} for rank in ranks]
    assert not sampled[0] & sampled[1]
    assert replayed[0] <= sampled[0] and replayed[1] <= sampled[1] and all(replayed)


def test_every_rank_logs_the_same_and_resumes_exactly(ranks):
    assert ranks[0]["resumed_alike"] and ranks[1]["resumed_alike"]
    assert ranks[0]["logged"][1]["offcorr/origin/replay/share"] == pytest.approx(2 / 3)


def test_two_ranks_share_the_groups_of_a_folder(ranks):
    loaded = [{content for _, content in groups(rank["loaded"][0])} for rank in ranks]
    assert all(len(one) == 3 for one in loaded) and not loaded[0] & loaded[1]
    assert {origin for rank in ranks for origin, _ in groups(rank["loaded"][0])} == {1}
