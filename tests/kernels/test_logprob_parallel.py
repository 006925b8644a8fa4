"""A head split over two processes gives the log-probs, entropies and gradients of the whole head in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offcorr
from offcorr.kernels.logprob import linear_logprob
from tests.kernels.parallel_worker import CASES, SIZE, SPLITS, TOKENS, run

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks got."""
    folder = tmp_path_factory.mktemp("ranks")
    places = [str(Path(offcorr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(WORKER), str(folder)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(autouse=True)
def on_a_cpu():
    with torch.device("cpu"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree_with_one_process(ranks, name):
    case = CASES[name]
    whole, first = run(case | {"choice": "reference"}), SPLITS[case["split"]]
    assert whole["logp to hidden"].abs().max() > 0.1
    for rank, part in enumerate((slice(0, first), slice(first, None))):
        found = ranks[rank][name]
        assert found.keys() == whole.keys()
        for key, value in found.items():
            want = whole[key][part] if key.endswith(("weight", "bias")) else whole[key]
            tolerance = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-6}[value.dtype]
            torch.testing.assert_close(
                value, want, rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
            )
    for key in ("logp", "entropy", "sum_sq_probs", "logp to hidden"):
        assert torch.equal(ranks[0][name][key], ranks[1][name][key]), key


def test_number_and_size_of_collectives(ranks):
    gather, reduce = f"all_gather {6 * TOKENS} torch.float32", f"all_reduce {SIZE * TOKENS} torch.float32"
    for found in ranks:
        trainable, frozen = found["collectives"]
        assert trainable == [{gather: 1}, {reduce: 1}]
        assert frozen == [{gather: 1, reduce: 1}, {}]


def test_a_target_that_no_rank_has_or_that_two_have_is_never_silent(ranks):
    bad = torch.zeros(TOKENS, dtype=torch.bool)
    bad[[2, 5]] = True
    for found in ranks:
        assert torch.equal(found["unowned"]["nan"], bad) and torch.equal(found["unowned"]["nan entropy"], bad)
        assert found["unowned"]["counted"] == 2


@pytest.mark.parametrize(
    "message, options",
    [
        ("vocabulary_start is None, expected a value to go with group", {"group": object()}),
        ("group is None, expected a value to go with vocabulary_start", {"vocabulary_start": 5}),
        ("vocabulary_start is -1, expected the token", {"group": object(), "vocabulary_start": -1}),
        (
            "support has 11 columns, expected at least 12: one for each token",
            {"group": object(), "vocabulary_start": 5, "support": torch.ones(2, 11, dtype=torch.bool)},
        ),
    ],
)
def test_refusals(message, options):
    with pytest.raises(ValueError, match=message):
        linear_logprob(torch.zeros(2, 4), torch.zeros(7, 4), torch.zeros(2, dtype=torch.long), **options)
