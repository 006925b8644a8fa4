"""Time of a training step: ``offcorr:dapo`` with all metrics on, against TRL's own ``dapo``.

    python benchmarks/trl_step.py [--device cuda] [--output result.json]

Both trainers run in one process, in turn, on the same model, the same recorded completions and the same settings, so
a step is what differs: forward, loss, metrics, backward, optimizer, logging.  Sampling is left out (the completions
are given), which makes the ratio stricter than that of a whole run.  A round is one short run of each trainer, the
order alternating.

Completions are trained on twice.  Before the first time TRL scores them with the current weights, in one more forward
pass; ours takes the log-probs that came with the completions (the anchor "snapshot") and leaves that pass out.
The seconds reported are the mean of two medians, of the first and of the second uses, and the ratio is ours / TRL's.
``ratio_second_use`` is of the second uses alone, in which both do the same passes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flags
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed

import offcorr
from offcorr.trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds from one step's begin to the next one's: logging included.

    On a CPU these are the process's own seconds, which do not count what else the machine is doing.
    """

    def __init__(self, device: str) -> None:
        self.device, self.began = device, []

    def on_step_begin(self, args, state, control, **_):
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.began.append(time.perf_counter() if self.device == "cuda" else time.process_time())

    def steps(self, warm_up: int) -> list[float]:
        began, self.began = self.began, []
        return [b - a for a, b in zip(began, began[1:], strict=False)][warm_up:]


def recorded_rollouts(options: argparse.Namespace):
    """A ``rollout_func`` that gives random completions, at no cost to speak of."""
    chance = torch.Generator().manual_seed(0)
    length, ids = options.length, range(2, options.vocabulary)
    likely = -math.log(options.vocabulary)  # of every token, nearly, in a model that has learnt nothing

    def rollout_func(prompts, trainer):
        lengths = torch.randint(length // 2, length + 1, (len(prompts),), generator=chance).tolist()
        completions = [torch.randint(ids.start, ids.stop, (n,), generator=chance).tolist() for n in lengths]
        logprobs = [(likely + 0.1 * torch.randn(n, generator=chance)).tolist() for n in lengths]
        old_logp = [[x + 0.01 * torch.randn((), generator=chance).item() for x in row] for row in logprobs]
        return {
            "prompt_ids": [[2, 3, 4, 5]] * len(prompts),
            "completion_ids": completions,
            "logprobs": logprobs,
            "old_logp": old_logp,
            "rollout_version": [0] * len(prompts),
        }

    return rollout_func


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(cls, config, loss_type, options, folder, **more):
    set_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=options.hidden // 4,
            max_position_embeddings=2 * options.length,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, options.vocabulary)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    on_gpu = options.device == "cuda"
    trainer = cls(
        model=model,
        reward_funcs=reward,
        args=config(
            output_dir=folder,
            loss_type=loss_type,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            num_generations=4,
            max_completion_length=options.length,
            max_steps=options.steps,
            num_iterations=2,
            epsilon=0.2,
            learning_rate=1e-6,
            logging_steps=options.logging_steps,
            save_strategy="no",
            report_to=[],
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **more,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i}" for i in range(2, 34)]}),
        processing_class=tokenizer,
        rollout_func=recorded_rollouts(options),
    )
    trainer.remove_callback(PrinterCallback)
    clock = Clock(options.device)
    trainer.add_callback(clock)
    return trainer, clock


def measure(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "trl dapo": make_trainer(trl.GRPOTrainer, trl.GRPOConfig, "dapo", options, folder),
            "offcorr:dapo": make_trainer(GRPOTrainer, GRPOConfig, "offcorr:dapo", options, folder),
        }
        rounds: dict[str, list[list[float]]] = {name: [] for name in contestants}
        for index in range(options.rounds + 1):
            # Who goes first alternates; the first round warms up.
            order = list(contestants)[:: 1 if index % 2 else -1]
            for name in order:
                trainer, clock = contestants[name]
                trainer.train()
                steps = clock.steps(warm_up=2)
                if index:
                    rounds[name].append(steps)
        logged = contestants["offcorr:dapo"][0].state.log_history[0]
    scored, again = (
        {name: statistics.median(sum((run[first::2] for run in runs), [])) for name, runs in rounds.items()}
        for first in (0, 1)
    )
    seconds = {name: (scored[name] + again[name]) / 2 for name in rounds}
    theirs, ours = rounds.values()
    return {
        "ratio": seconds["offcorr:dapo"] / seconds["trl dapo"],
        "ratio_second_use": again["offcorr:dapo"] / again["trl dapo"],
        "ratio_by_round": [statistics.mean(a) / statistics.mean(b) for a, b in zip(ours, theirs, strict=True)],
        "seconds_per_step": seconds,
        "steps": rounds,
        "metrics_logged": sum(name.startswith("offcorr/") for name in logged),
        "settings": {k: v for k, v in vars(options).items() if k != "output"},
        "machine": {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "offcorr": offcorr.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0].replace("``", ""))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default %(default)s)")
    parser.add_argument(
        "--rounds", type=flags.rounds, default=12, help="short runs of each trainer, 2 or more (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens it knows (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="completions of a micro-batch (default %(default)s)")
    parser.add_argument(
        "--length", type=int, default=128, help="tokens of the longest completion (default %(default)s)"
    )
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step (default %(default)s)")
    parser.add_argument("--logging-steps", type=int, default=1, help="steps between two logs (default %(default)s)")
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    options = parser.parse_args()
    result = measure(options)
    print(f"{'':14}{'ms a step':>12}")
    for name, seconds in result["seconds_per_step"].items():
        print(f"{name:14}{1000 * seconds:>12.2f}")
    low, _, high = statistics.quantiles(result["ratio_by_round"], n=4)
    print(f"{'ratio':14}{result['ratio']:>12.3f}   (quartiles over rounds {low:.3f}, {high:.3f})")
    if options.output:
        result["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in result["settings"].items()}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
