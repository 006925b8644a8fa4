"""Trains with traces and prefixes; each rank writes what it sampled.

torchrun --nproc-per-node N ranks_worker.py FOLDER STEPS [CHECKPOINT]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from offcorr.data import Curriculum, Demonstrations, Prefixes, Traces
from offcorr.rollout import OffPolicy
from tests.data.runs import PROMPTS, trainer_of, weights_of
from tests.rollout.rollout_models import tokenizer


def main(folder: str, steps: str, checkpoint: str | None = None) -> None:
    torch.set_num_threads(1)
    rows = [{"prompt": PROMPTS[1], "completion": text, "logp": [-1.0] * 3} for text in ("01", "23", "45", "67", "89")]
    traces = Traces(rows, tokenizer())
    prefixes = Prefixes(OffPolicy(lag=1), traces, share=0.7, length=Curriculum(start=0.7, step=0.2, bound=0.55))
    sampler = Demonstrations(prefixes, traces)
    options = {"max_steps": int(steps), "save_strategy": "steps", "save_steps": 2, "prompts": PROMPTS[1:3]}
    trainer = trainer_of(sampler, folder, per_device_train_batch_size=4, **options)
    outputs, inner = [], trainer.rollout_func

    def rollout_func(prompts, of):
        outputs.append(inner(prompts, of))
        return outputs[-1]

    trainer.rollout_func = rollout_func
    trainer.train(resume_from_checkpoint=checkpoint)
    rank = trainer.accelerator.process_index
    found = {
        "outputs": outputs,
        "state": repr((sampler.state_dict(), prefixes.state_dict())),
        "weights": weights_of(trainer).sum().item(),
        "logged": trainer.state.log_history[:-1] if rank == 0 else [],
    }
    Path(folder, f"rank_{rank}{'_resumed' * bool(checkpoint)}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # destroyed or not, threads of gloo may still drop tensors when the interpreter exits, and abort
