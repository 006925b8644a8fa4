"""Two runs on every rank: one that the self-test refuses, and one whose sampler changes its temperature at step 9.

torchrun --nproc-per-node 2 monitor_worker.py MODEL OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from offcorr.rollout import OffPolicy
from offcorr.training import MismatchError
from offcorr.trl import GRPOConfig, GRPOTrainer


class Changing(OffPolicy):
    """A sampler whose temperature is .5 from step 9 on."""

    def __call__(self, prompts, trainer):
        if trainer.state.global_step >= 9:
            self.temperature = 0.5
        return super().__call__(prompts, trainer)


def make_trainer(model: str, output: Path, sampler: OffPolicy, monitor: dict) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        reward_funcs=lambda completion_ids, **_: [float(sum(i % 3 for i in ids)) / len(ids) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(output),
            loss_type="tis",
            monitor=monitor,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=16,
            max_steps=14,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{j}=" for i in range(8) for j in range(4)]}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=sampler,
    )


def main(model: str, output: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    trainer = make_trainer(model, output / "refused", OffPolicy(temperature=0.5), {"self_test": "stop"})
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    refused = ""
    try:
        trainer.train()
    except MismatchError as error:
        refused = str(error)
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    watched = {"warmup": 8, "warning": "log", "critical": ["dump", "stop"], "folder": str(output / f"dumps{rank}")}
    trainer = make_trainer(model, output / "watched", Changing(), watched)
    trainer.train()
    folder = output / f"dumps{rank}"
    result = {
        "refused": refused,
        "unchanged": torch.equal(before, after),
        "alarms": [[a.step, a.series, a.severity] for a in trainer.correction_step.monitor.alarms],
        "stopped_at": trainer.state.global_step,
        "masked": [entry["step"] for entry in trainer.state.log_history if "offcorr/monitor/masked" in entry],
        "dumps": [path.name for path in folder.iterdir()] if folder.exists() else [],
    }
    (output / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # destroyed or not, threads of gloo may still drop tensors when the interpreter exits, and abort
