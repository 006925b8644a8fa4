"""The scripts of docs/using_trl.md run as they stand, with tiny models under the names of the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from transformers import AutoModelForCausalLM
from trl.trainer import base_config

from offcorr.trl import GRPOTrainer
from tests.trl.conformance import stand_ins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "using_trl.md").read_text()
SCRIPTS = {
    heading: code
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    for code in re.findall(r"```python\n(.*?)```", section, flags=re.S)
}
MODEL, VISION_MODEL = "Qwen/Qwen3-0.6B", "llava-hf/llava-1.5-7b-hf"


def load_dataset(path: str, name: str | None = None, *, split: str) -> Dataset:
    """Stand-ins with the columns that the page uses of the data sets it names."""
    asked = [f"What is {i} + {i}?" for i in range(8)]
    if path == "openai/gsm8k":
        return Dataset.from_dict({"question": asked, "answer": [f"twice {i} #### {2 * i}" for i in range(8)]})
    assert path == "HuggingFaceM4/A-OKVQA"
    pixels = np.random.default_rng(0).integers(0, 255, (8, 40, 40, 3), dtype=np.uint8)
    columns = Features({"question": Value("string"), "image": Image()})
    return Dataset.from_dict({"question": asked, "image": [*pixels]}, features=columns)


def make_small(patch: pytest.MonkeyPatch, hub: Path, steps: int = 4) -> None:
    """Models from ``hub``, data from here, and every run short and on the CPU."""
    original = base_config._BaseConfig.__post_init__

    def short(self: Any) -> None:
        self.use_cpu, self.bf16, self.report_to, self.disable_tqdm = True, False, [], True
        self.per_device_train_batch_size, self.num_generations = 4, 4
        self.max_steps, self.max_completion_length = min(self.max_steps, steps), 8
        self.logging_steps, self.learning_rate, self.gradient_checkpointing = 1, 1e-2, False
        original(self)

    patch.setattr(base_config._BaseConfig, "__post_init__", short)
    patch.setattr(datasets, "load_dataset", load_dataset)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    made = stand_ins.Hub(folder)
    made.add(MODEL, stand_ins.causal("Qwen3", head_dim=4), stand_ins.tokenizer())
    made.add(VISION_MODEL, *stand_ins.llava())
    return folder


@pytest.fixture
def run(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``run(heading)``: the trainer that the script below the heading made and trained."""
    monkeypatch.chdir(tmp_path)

    def script(heading: str, steps: int = 4) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            make_small(patch, hub, steps)
            return trained(heading)

    def trained(heading: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(SCRIPTS[heading], f"using_trl.md, {heading}", "exec"), names)
        return names["trainer"]

    return script


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def start(name: str, hub: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, cache_dir=hub)


def test_every_script_is_run_here():
    called = set(re.findall(r'\brun\("([^"]+)"\)|SCRIPTS\["([^"]+)"\]', Path(__file__).read_text()))
    assert {name for pair in called for name in pair if name} == set(SCRIPTS)


def test_plain(run):
    trainer = run("The two-line swap")
    assert trainer.correction.method == "minpro" and trainer.state.global_step == 4
    # The first of four steps on a generation is on-policy, the others are not.
    staleness = logged(trainer, "offcorr/staleness/abs_mean")
    assert staleness[0] == 0 and min(staleness[1:]) > 0


def test_peft(run, hub):
    trainer = run("PEFT")
    before = start(MODEL, hub).state_dict()
    inner = trainer.accelerator.unwrap_model(trainer.model).get_base_model().state_dict()
    kept = {name.replace(".base_layer", ""): value for name, value in inner.items() if "lora" not in name}
    assert set(kept) == set(before)
    for name, value in before.items():
        torch.testing.assert_close(kept[name], value)
    moved = [value for name, value in inner.items() if "lora_B" in name]
    assert moved and all(value.abs().max() > 0 for value in moved)


def test_kl_and_entropy(run):
    trainer = run("KL to a reference, and an entropy bonus")
    divergence, entropy = logged(trainer, "kl"), logged(trainer, "entropy")
    assert divergence[0] == pytest.approx(0, abs=1e-6) and divergence[-1] > 0
    assert entropy and logged(trainer, "policy_loss")


def test_beta_keeps_the_policy_near_the_initial_model(run, monkeypatch):
    heading = "KL to a reference, and an entropy bonus"
    script, divergence = SCRIPTS[heading], {}
    for beta in ("0.04", "30.0"):
        monkeypatch.setitem(SCRIPTS, heading, script.replace("beta=0.04", f"beta={beta}"))
        divergence[beta] = logged(run("KL to a reference, and an entropy bonus", steps=16), "kl")
    # In the first step the KL is 0, so the second starts from the same weights.
    assert divergence["30.0"][:2] == divergence["0.04"][:2]
    assert sum(divergence["30.0"][2:]) < 0.8 * sum(divergence["0.04"][2:])


def test_rewards_and_conversations(run):
    trainer = run("Several rewards, and conversations")
    correct, short = logged(trainer, "rewards/correct/mean"), logged(trainer, "rewards/shorter/mean")
    for total, one, other in zip(logged(trainer, "reward"), correct, short, strict=True):
        assert total == pytest.approx(one + 0.1 * other, abs=1e-6)
    assert trainer.correction.method == "gspo" and min(short) < 0


def test_turns(run, monkeypatch):
    batches = []
    original = GRPOTrainer._batch
    monkeypatch.setattr(GRPOTrainer, "_batch", lambda *args: batches.append(original(*args)) or batches[-1])
    trainer = run("Several turns and tools, by a rollout function")
    assert trainer.anchor.contains_rollout
    reply = len(trainer.processing_class("\nIs that right? Check it once more.\n")["input_ids"])
    for batch in batches:
        runs = batch.mask.int().diff(dim=1)
        assert ((runs == 1).sum(1) == 1).all(), "the reply lies between two turns"
        assert (runs[0] == 1).nonzero() - (runs[0] == -1).nonzero()[:1] == reply
        assert batch.rollout_logp is not None and batch.old_logp is not None
    # Each generation's first step is on the weights that sampled: the engine is the trainer.
    assert logged(trainer, "offcorr/staleness/abs_mean")[0] < 1e-4 < logged(trainer, "offcorr/staleness/abs_mean")[-1]


def test_images(run):
    trainer = run("Images")
    assert type(trainer.accelerator.unwrap_model(trainer.model)).__name__ == "LlavaForConditionalGeneration"
    staleness = logged(trainer, "offcorr/staleness/abs_mean")
    assert staleness[0] == pytest.approx(0, abs=1e-6) and min(staleness[1:]) > 0


def test_stale_and_resumed(run, hub, tmp_path, monkeypatch):
    resumed = run("A stale sampler, and resuming from a checkpoint")
    assert resumed.state.global_step == 4 and max(logged(resumed, "offcorr/staleness/lag")) == 2
    once = SCRIPTS["A stale sampler, and resuming from a checkpoint"].partition("make_trainer(max_steps=2)")[0]
    monkeypatch.chdir(tmp_path.parent)
    make_small(monkeypatch, hub)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(once, names)
    straight = names["make_trainer"](4)
    straight.train()
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_processes(hub, tmp_path):
    """By a configuration for the CPU, where ``--num_processes`` alone would need two GPUs."""
    small = "import pathlib, pytest\nfrom tests.trl.test_using_trl import make_small\n"
    small += f"make_small(pytest.MonkeyPatch(), pathlib.Path({str(hub)!r}))\n"
    said = "\nassert trainer.accelerator.num_processes == 2\n"
    said += 'pathlib.Path(f"rank_{trainer.accelerator.process_index}").write_text(str(trainer.state.global_step))\n'
    said += "trainer.accelerator.wait_for_everyone()\ntrainer.accelerator.end_training()\n"  # as the page says
    (tmp_path / "train.py").write_text(small + SCRIPTS["The two-line swap"] + said)
    configuration = ROOT / "recipes" / "accelerate" / "two_cpu_processes.yaml"
    ran = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", configuration, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
