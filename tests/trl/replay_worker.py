"""Trains on recorded rollouts, once for each configuration; the first rank writes what came out.

torchrun --nproc-per-node N replay_worker.py settings.json
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

from offcorr.trl import GRPOConfig, GRPOTrainer


def main(path: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(Path(path).read_text())
    results = [train(settings, config) for config in settings["configs"]]
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, Path(settings["output"], "results.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def train(settings: dict, config: dict) -> dict:
    recorded = settings["recorded"]

    def rollout_func(prompts, trainer):
        # Each rank holds whole groups, so a prompt's completions come in the recorded order.
        seen, chosen = {}, []
        for prompt in prompts:
            seen[prompt] = seen.get(prompt, -1) + 1
            chosen.append(recorded[prompt][seen[prompt] % 4])
        names = ("prompt_ids", "completion_ids", "logprobs", "old_logp", "rollout_version")
        return {name: [row[name] for row in chosen] for name in names}

    def reward(completion_ids, **_):
        return [float(sum(i % 3 for i in ids)) / len(ids) for ids in completion_ids]

    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = GRPOTrainer(
        settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=settings["output"],
            per_device_train_batch_size=8 // world,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=8,
            max_steps=3,
            num_iterations=2,
            learning_rate=0.05,
            optim="sgd",
            lr_scheduler_type="constant",
            logging_steps=3,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            log_metrics="aliases",
            monitor={"self_test": "warn"},  # the completions are drawn at random
            **config,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(recorded)}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        rollout_func=rollout_func,
    )
    trainer.train()
    assert trainer.accelerator.num_processes == world
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "logged": trainer.state.log_history[0],
    }


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # destroyed or not, threads of gloo may still drop tensors when the interpreter exits, and abort
