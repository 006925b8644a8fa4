"""The readers against files that the other trainers' own code writes, where their source is there.

OFFCORR_PRIME_RL and OFFCORR_SLIME name checkouts.  The modules that write the files are
loaded alone, since the packages import what only a GPU machine has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.diagnose.dumps import read_all


def checkout(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no checkout: `make test-integrations` gets one")
    return Path(folder)


def loaded(file: Path, patched: pytest.MonkeyPatch, **around: dict) -> types.ModuleType:
    """A module from its file, with stand-ins for those that it imports: {module: {name: value}}."""
    for name, content in around.items():
        parts = name.replace("__", ".").split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in sys.modules:
                patched.setitem(sys.modules, package, types.ModuleType(package))
        for symbol, value in content.items():
            patched.setattr(sys.modules[".".join(parts)], symbol, value, raising=False)
    spec = importlib.util.spec_from_file_location(f"real_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prime_rls_exporter(tmp_path, monkeypatch):
    source = checkout("OFFCORR_PRIME_RL") / "src" / "prime_rl" / "trainer" / "rl" / "token_export.py"
    names = dict.fromkeys(("DefaultLossConfig", "TrainerConfig"), SimpleNamespace)
    kl = {"compute_importance_ratio_and_mismatch_kl": lambda a, b: (a - b, (a - b).exp(), (a - b).exp() - (a - b) - 1)}
    theirs = loaded(source, monkeypatch, prime_rl__configs__trainer=names, prime_rl__trainer__rl__loss=kl)
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 5, 4]  # the last is padding
    micro_batch = {
        "input_ids": torch.randint(9, (1, 16), generator=generator),
        "position_ids": torch.arange(16)[None],
        "loss_mask": torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0]]).bool(),
        "advantages": torch.randn(1, 16, generator=generator),
        "inference_logprobs": -torch.rand(1, 16, generator=generator),
        "env_names": ["math"] * 12 + [""] * 4,
    }
    output = {"logprobs": -torch.rand(1, 16, generator=generator), "entropy": torch.rand(1, 16, generator=generator)}
    output["logprobs"][0, 3] = torch.nan
    exporter = theirs.TokenExporter(tmp_path, rank=0)
    options = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2)
    exporter.export(3, 0, micro_batch, output, lengths, options)
    exporter.mark_stable()
    (first, second), _ = read_all(tmp_path)
    for found, start, end in ((first, 2, 7), (second, 8, 12)):
        assert found.completion_ids.tolist() == micro_batch["input_ids"][0, start:end].tolist()
        for name, values in (("rollout_logp", micro_batch["inference_logprobs"]), ("old_logp", output["logprobs"])):
            np.testing.assert_array_equal(getattr(found, name), values[0, start:end].double().numpy())
        assert found.mask.tolist() == micro_batch["loss_mask"][0, start:end].tolist() and found.step == 3
    assert first.prompt_ids.tolist() == micro_batch["input_ids"][0, :2].tolist()
    assert second.prompt_ids.tolist() == micro_batch["input_ids"][0, 7:8].tolist()


def test_slimes_dumps(tmp_path, monkeypatch):
    folder = checkout("OFFCORR_SLIME") / "slime"
    sample = loaded(
        folder / "utils" / "types.py", monkeypatch, slime__utils__misc={"decode_int32_meta_array": lambda *_: None}
    ).Sample
    types_module = {"Sample": sample}
    rollout = loaded(folder / "observability" / "rollout_data_utils.py", monkeypatch, slime__utils__types=types_module)
    train = loaded(folder / "observability" / "train_data_utils.py", monkeypatch)
    samples = [
        sample(
            group_index=i // 2,
            index=i,
            tokens=[1, 2, 3 + i, 4 + i, 5],
            response_length=3,
            reward=float(i),
            loss_mask=[1, 0, 1],
            weight_versions=["6"],
            rollout_log_probs=[-1.0 - i, 0.0, -3.0],
            status=sample.Status.COMPLETED,
        )
        for i in range(4)
    ]
    rollout.save_debug_rollout_data(str(tmp_path / "rollout_{rollout_id}.pt"), samples, rollout_id=2, evaluation=False)
    shards = []
    for rank, partition in enumerate(([3, 0], [1, 2])):
        data = {
            "partition": partition,
            "tokens": [torch.tensor(samples[i].tokens) for i in partition],
            "response_lengths": [3, 3],
            "total_lengths": [5, 5],
            "loss_masks": [torch.tensor([1, 0, 1], dtype=torch.int)] * 2,
            "rollout_log_probs": [torch.tensor(samples[i].rollout_log_probs) for i in partition],
            "log_probs": [torch.tensor([-1.5 - i, -9.0, -3.5]) for i in partition],
            "advantages": [torch.full((3,), float(i)) for i in partition],
            "rewards": [0.1, 0.2],
            "raw_reward": [one.reward for one in samples],
            "sample_indices": partition,
            "micro_batch_indices": [[[0, 1]]],
        }
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    torch.save(train._build_dump_payload(shards, rollout_id=2, writer_rank=0), tmp_path / "train_2.pt")
    records, _ = read_all(tmp_path)
    assert [one.completion_ids.tolist() for one in records] == [[3 + i, 4 + i, 5] for i in range(4)]
    assert [one.rollout_logp.tolist() for one in records] == [[-1.0 - i, 0.0, -3.0] for i in range(4)]
    assert [one.old_logp.tolist() for one in records] == [[-1.5 - i, -9.0, -3.5] for i in range(4)]
    assert [one.group_id for one in records] == [0, 0, 1, 1] and [one.reward for one in records] == [0, 1, 2, 3]
    assert {one.rollout_version for one in records} == {6} and {one.step for one in records} == {2}
    assert all(one.prompt_ids.tolist() == [1, 2] and one.mask.tolist() == [True, False, True] for one in records)
