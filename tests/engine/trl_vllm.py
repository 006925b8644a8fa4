"""Run by the Python that has vLLM: TRL's own vLLM paths with this library's trainer, on a CPU.

    trl_vllm.py MODEL_FOLDER FOLDER [URL]

Without a URL in TRL's colocate mode, with one in its server mode.  Engine, generation, HTTP and log-probs are the
real ones.  Only the transfer of the weights is replaced: vLLM's ``load_weights`` fails on a CPU, where linear weights
were packed, and a server is sent weights through NCCL, which needs GPUs.  Here they are saved and reloaded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29641",
}

from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402

from offcorr.rollout import Engine, save_for_engine  # noqa: E402
from offcorr.trl import GRPOConfig, GRPOTrainer  # noqa: E402

PROMPTS = ["a3b1=", "c2=", "b7a3c9=", "a1b2c3a4="]


def main(model: str, folder: Path, url: str | None) -> None:
    weights, syncs = str(folder / "weights"), []

    def sync_weights(self: VLLMGeneration) -> None:
        syncs.append(len(syncs))
        save_for_engine(self.accelerator.unwrap_model(self.model), weights)
        if url is None:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
            self.llm.reset_prefix_cache()
        else:
            Engine(url).replace_weights(weights, len(syncs))

    VLLMGeneration.sync_weights = sync_weights
    VLLMClient.init_communicator = lambda self, device: None
    args = GRPOConfig(
        str(folder / "run"),
        loss_type="minpro",
        loss_kwargs={"weight": {"name": "truncate", "cap": 2.0}},
        log_metrics="full",
        use_vllm=True,
        vllm_mode="colocate" if url is None else "server",
        vllm_server_base_url=url and url.replace("vllm://", "http://"),
        vllm_max_model_length=64,
        per_device_train_batch_size=16,
        num_generations=4,
        steps_per_generation=4,
        max_completion_length=12,
        max_steps=8,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )

    def reward(completions: list[str], **kwargs: object) -> list[float]:
        return [len(set(text)) / (1 + len(text)) for text in completions]

    trainer = GRPOTrainer(
        model,
        reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    found = {
        "logs": trainer.state.log_history,
        "trl_corrects": trainer.vllm_importance_sampling_correction,
        "anchor": type(trainer.anchor).__name__,
        "syncs": len(syncs),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:] or [None])
