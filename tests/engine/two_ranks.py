"""Run by torchrun with two processes: a few updates on one vLLM server, which is then taken away by somebody else.

two_ranks.py vllm://host:port FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from offcorr.rollout import EngineError
from tests.engine.test_vllm import PROMPTS, Recording, gap, model_of, served_by, trainer_of


def main(url: str, folder: Path) -> None:
    sampler = Recording(url=url, sync_every=4)
    trainer = trainer_of(sampler, folder / "run", max_steps=8, per_device_train_batch_size=8)
    trainer.train()
    calls = [out for _, train, out in sampler.calls if train]
    found = {
        "versions": [out["rollout_version"][0] for out in calls],
        "completions": [out["completion_ids"] for out in calls],
        "gap": max(gap(out["logprobs"], out["old_logp"]).max().item() for out in calls),
    }
    accelerator = trainer.accelerator
    if accelerator.is_main_process:
        model = model_of()
        served_by(url, model, folder).ensure(0, dict(model.named_parameters()), [[3, 4, 5]])
    accelerator.wait_for_everyone()
    trainer.model.train()
    try:
        sampler(PROMPTS, trainer)
    except EngineError as error:
        found["error"] = str(error)
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
