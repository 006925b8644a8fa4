"""Asynchronous GRPO with an off-policy correction: sampling and training at the same time, on TRL's packed rows.

    accelerate launch recipes/async_grpo.py                               # the toy model, a sampler thread, on a CPU
    accelerate launch recipes/async_grpo.py --loss_type minpro --max_staleness 8 --precision int8
    accelerate launch recipes/async_grpo.py --sampler vllm://127.0.0.1:8000     # a vLLM server, its weights over HTTP

    CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --dtype float32 \\
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'
    CUDA_VISIBLE_DEVICES=1 accelerate launch recipes/async_grpo.py --sampler vllm \\
        --model Qwen/Qwen3-0.6B --task openai/gsm8k --loss_type minpro --learning_rate 1e-6

Every option of TRL's AsyncGRPOConfig is a flag here.  The lag is not set: it is the number of weight
updates while a completion is sampled and waits, up to ``max_staleness``; older samples are dropped.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ProgressCallback, TrainerCallback

from offcorr import toy
from offcorr.rollout import Sampling, decode
from offcorr.training import Replica, changing_weights
from offcorr.trl.async_grpo import ASYNC_HELP, AsyncGRPOConfig, AsyncGRPOTrainer
from offcorr.trl.local_worker import LocalWorker, VLLMWorker

sys.path.insert(0, str(Path(__file__).parent))
from grpo import (  # noqa: E402
    Bar,
    History,
    Task,
    check_saving,
    length_of_run,
    load_task,
    model_and_tokenizer,
    parse,
    plot,
    say_measuring,
    summarise,
)


@dataclass
class Arguments(AsyncGRPOConfig):
    """AsyncGRPOConfig with this recipe's own options, and defaults that suit the toy model."""

    model: str = field(default="toy", metadata={"help": "toy, a local folder, or any hub name"})
    task: str = field(default="toy", metadata={"help": "as in recipes/grpo.py"})
    sampler: str = field(
        default="local",
        metadata={"help": "local: a thread here; vllm://host:port: a server, without NCCL; vllm: TRL's own worker"},
    )
    precision: str = field(default="fp32", metadata={"help": "of the local sampler: fp32, bf16, int8, fp8_e4m3 ..."})
    train_size: int = field(default=4096, metadata={"help": "examples to train on"})
    eval_size: int = field(
        default=256, metadata={"help": "held-out examples, one sample each, at the run's --temperature"}
    )

    output_dir: str = field(default="runs/async_grpo")
    loss_type: str | None = field(default="ppo", metadata={"help": ASYNC_HELP})
    max_steps: int | None = field(
        default=None, metadata={"help": "updates in all (default: 160, as in recipes/grpo.py)"}
    )
    num_train_epochs: float | None = field(default=None, metadata={"help": "passes over the training examples"})
    learning_rate: float = field(default=3e-4)
    adam_beta2: float = field(default=0.99)
    per_device_train_batch_size: int = field(default=64)
    token_budget: int | None = field(default=0, metadata={"help": "0: per_device_train_batch_size samples per row"})
    num_generations: int = field(default=8)
    max_completion_length: int = field(default=toy.MAX_COMPLETION)
    logging_steps: float = field(default=4)
    eval_steps: float = field(default=20)
    save_strategy: str = field(default="no", metadata={"help": "no, or steps: save a checkpoint every --save_steps"})
    report_to: str = field(default="none")
    log_metrics: str = field(default="full")  # for the summary and the picture
    gradient_checkpointing: bool = field(default=False)
    bf16: bool = field(default=False)
    use_cpu: bool = field(default=not torch.cuda.is_available())

    def __post_init__(self) -> None:
        self.max_steps, self.num_train_epochs = length_of_run(self.max_steps, self.num_train_epochs)
        super().__post_init__()
        check_saving(self)
        if self.sampler not in ("local", "vllm") and not self.sampler.startswith("vllm://"):
            raise ValueError(f"sampler is {self.sampler!r}, expected local, vllm://host:port, or vllm")
        if self.sampler != "local" and self.precision != "fp32":
            raise ValueError(f"precision is {self.precision!r}, an option of --sampler local: leave it out")


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    args = parse(Arguments)
    path, tokenizer = model_and_tokenizer(args.model, args.seed)
    task = load_task(args, tokenizer)

    backend: dict[str, Any] = {}
    if args.sampler != "vllm":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device)
        parts = (model, tokenizer, task.train, task.reward, args)
        if args.sampler == "local":
            worker = LocalWorker(*parts, precision=args.precision)
        else:
            worker = VLLMWorker(*parts, url=args.sampler)
        backend = {"rollout_worker": worker, "weight_transfer": worker}
    history = History(Path(args.output_dir))
    if not args.resume_from_checkpoint and int(os.environ.get("RANK", 0)) == 0:
        history.say_replaced()
    trainer = AsyncGRPOTrainer(
        model=path,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train,
        processing_class=tokenizer,
        callbacks=[history],
        **backend,
    )
    trainer.remove_callback(ProgressCallback)
    if trainer.accelerator.is_main_process and not args.disable_tqdm:
        trainer.add_callback(Bar)
    trainer.add_callback(Examine(trainer, task, path))
    trainer.train()

    if trainer.accelerator.is_main_process:
        title = f"{args.loss_type}, asynchronous, staleness up to {args.max_staleness}"
        summarise(history.logs, title=title, file=history.summary)
        print(f"history: {history.file}\npicture: {plot(history.logs, history.file.with_suffix('.png'))}")
    trainer.accelerator.wait_for_everyone()  # why: see recipes/grpo.py
    trainer.accelerator.end_training()


class Examine(TrainerCallback):
    """Held-out accuracy of the current weights: TRL's asynchronous trainer has no evaluation of its own."""

    def __init__(self, trainer: AsyncGRPOTrainer, task: Task, path: str) -> None:
        self.trainer, self.task = trainer, task
        self.tokenizer = trainer.processing_class
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # its attention can decode
        self.replica = Replica(model, trainer.accelerator.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and not args.disable_tqdm:
            say_measuring(args.eval_size, state.global_step)
        self.examine()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.eval_steps == 0 or state.global_step == args.max_steps:
            self.examine()

    def examine(self) -> None:
        weights = dict(changing_weights(self.trainer.accelerator.unwrap_model(self.trainer.model)))
        rows = self.task.test.to_list()
        decoded = decode(
            self.replica.load(weights),
            [self.encode(row["prompt"]) for row in rows],
            max_new_tokens=self.trainer.args.max_completion_length,
            eos_token_ids=[self.tokenizer.eos_token_id],
            sampling=Sampling(temperature=self.trainer.args.temperature),
            generator=torch.Generator(self.trainer.accelerator.device).manual_seed(0),
        )
        texts = self.tokenizer.batch_decode(decoded.completion_ids, skip_special_tokens=True)
        rewards = self.task.reward(completions=texts, **{name: [row[name] for row in rows] for name in rows[0]})
        self.trainer.log({"eval_reward": sum(rewards) / len(rewards)})

    def encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


if __name__ == "__main__":
    main()
