"""Replay on every rank; each writes what it generated, and whether a resumed run is the uninterrupted one.

torchrun --nproc-per-node 2 replay_worker.py MODEL OUTPUT
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

from offcorr.data import Replay
from offcorr.rollout import OffPolicy
from offcorr.trl import GRPOConfig, GRPOTrainer


class Seen(GRPOTrainer):
    """Keeps prompt, origin and recorded log-probs of every generation of this rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generations = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        columns = {"origin": output["origin"], "prompt_ids": output["prompt_ids"], "old_logp": output["old_logp"]}
        self.generations.append({name: value.tolist() for name, value in columns.items()})
        return output


class Short(Replay):
    """On rank 1 the store loses a group before each generation, so that the ranks have to agree on a number."""

    def exchange(self, rows, trainer):
        if trainer.accelerator.process_index == 1 and len(self.store):
            del self.store.entries[next(iter(self.store.entries))]
        return super().exchange(rows, trainer)


def run(model: str, output: Path, replay: Replay, resume: str | None = None) -> Seen:
    trainer = Seen(
        model,
        reward_funcs=lambda completion_ids, **_: [float(sum(i % 3 for i in ids)) / len(ids) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(output),
            loss_type="minpro",
            per_device_train_batch_size=12,
            num_generations=4,
            max_completion_length=8,
            max_steps=6,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=3,
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{j}=" for i in range(8) for j in range(4)]}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=replay,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer: Seen) -> torch.Tensor:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main(model: str, output: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    whole = run(model, output / "whole", Short(OffPolicy(lag=1), 1.0, max_age=100, folder=output / "groups"))
    again = run(
        model,
        output / "again",
        Short(OffPolicy(lag=1), 1.0, max_age=100),
        resume=str(output / "whole" / "checkpoint-3"),
    )
    result = {
        "generations": whole.generations,
        "resumed_alike": torch.equal(parameters(whole), parameters(again)),
        "logged": [{k: v for k, v in entry.items() if "/origin/" in k} for entry in whole.state.log_history],
    }
    loaded = run(model, output / "loaded", Replay(OffPolicy(), 1.0).load(output / "groups"))
    result["loaded"] = loaded.generations[:1]
    (output / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # destroyed or not, threads of gloo may still drop tensors when the interpreter exits, and abort
