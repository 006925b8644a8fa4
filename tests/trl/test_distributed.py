"""Two processes give the update, and the numbers in the log, of one process with the same global batch."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offcorr

WORKER = Path(__file__).with_name("replay_worker.py")
CONFIGS = {
    "tokens": {
        "loss_type": "minpro",
        "loss_kwargs": {"weight": {"name": "truncate", "cap": 1.05}},
    },
    "sequences": {"loss_type": "gspo"},
    "coupled": {
        "loss_type": "offcorr:dapo",
        "loss_kwargs": {"weight": {"name": "self_normalise", "inner": {"name": "truncate", "cap": 1.5}}},
    },
    "kl": {"loss_type": "offcorr:dapo", "beta": 0.1},
    "trl": {"loss_type": "dapo"},
    "ewma": {
        "loss_type": "offcorr:dapo",
        "loss_kwargs": {"eps_low": 0.02, "eps_high": 0.02},
        "anchor": "ewma",
        "anchor_kwargs": {"window": 4, "reset_below": 0.1},
    },
    "calibrated": {"loss_type": "vcpo", "ess_lr": "linear", "ess_base": "auto"},
    "annealed": {"loss_type": "holderpo"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, model_folder, recorded):
    """``results[processes][name]``: final parameters and the log entry."""
    found = {}
    for processes in (1, 2):
        output = tmp_path_factory.mktemp(f"processes{processes}")
        path = output / "settings.json"
        settings = {
            "model": model_folder,
            "output": str(output),
            "recorded": recorded,
            "configs": list(CONFIGS.values()),
        }
        path.write_text(json.dumps(settings))
        if processes == 1:
            runpy.run_path(str(WORKER))["main"](str(path))
        else:
            torchrun(processes, str(path))
        found[processes] = dict(zip(CONFIGS, torch.load(output / "results.pt"), strict=True))
    return found


def torchrun(processes, path):
    places = [str(Path(offcorr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(processes), str(WORKER), path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes(results, name):
    one, two = results[1][name], results[2][name]
    assert one["logged"]["grad_norm"] > 0.05
    torch.testing.assert_close(two["parameters"], one["parameters"], rtol=0, atol=2e-6)
    ours = [key for key in one["logged"] if key.startswith("offcorr/")]
    assert len(ours) > 25
    for key in [*ours, "mismatch_kl", "token_mult_prob_error"]:
        assert two["logged"][key] == pytest.approx(one["logged"][key], rel=2e-4, abs=2e-6), key
