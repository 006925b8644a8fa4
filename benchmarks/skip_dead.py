"""Step times with and without ``skip_dead_sequences`` at several points of a run, on the toy model.

    python benchmarks/skip_dead.py [--checkpoints 0 120 360] [--output benchmarks/results/skip_dead.json]

One on-policy run trains the toy model.  The better it gets, the more groups have equal rewards, so that their
advantages and gradients are zero and their sequences can be skipped.  The weights of each checkpoint are then loaded
into two trainers, with and without the option, at learning rate 0.  Their samples are recorded once and replayed to
both, so both see the same batches.  A step is forward, loss, metrics, backward and optimizer, which the option can
change.  Rounds alternate between the two.  The ratio is the median over all steps with the option / the median without;
the time of sampling, which the option cannot change, is reported separately.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flags
import torch
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import offcorr.rollout
from offcorr import toy
from offcorr.trl import GRPOConfig, GRPOTrainer

SKIPPED = "offcorr/loss/skipped"


class Clock(TrainerCallback):
    """CPU seconds of the process from the start of one step to the start of the next."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began.append(time.process_time())

    def steps(self) -> list[float]:
        began, self.began = self.began, []
        return [b - a for a, b in zip(began, began[1:], strict=False)]


class Checkpoints(TrainerCallback):
    """Copies of the weights after given numbers of updates."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted, self.weights = wanted, dict[int, dict[str, torch.Tensor]]()

    def keep(self, state: Any, model: Any) -> None:
        if state.global_step in self.wanted:
            self.weights[state.global_step] = copy.deepcopy(model.state_dict())

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.keep(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.keep(state, model)


class Recorded:
    """A ``rollout_func`` that records on-policy samples and replays them once ``next`` is set."""

    def __init__(self) -> None:
        self.sampler = offcorr.rollout.OffPolicy()
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []
        self.seconds: list[float] = []
        self.next: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if self.next is None:
            began = time.process_time()
            self.calls.append((list(prompts), self.sampler(prompts, trainer)))
            self.seconds.append(time.process_time() - began)
            return dict(self.calls[-1][1])
        recorded, samples = self.calls[self.next]
        assert recorded == list(prompts), "the trainers see different prompts"
        self.next += 1
        return dict(samples)


def make_trainer(options: argparse.Namespace, folder: str, rollout_func: Callable[..., Any], **overrides: Any) -> Any:
    path = toy.model_path(seed=0)
    trainer = GRPOTrainer(
        model=path,
        reward_funcs=toy.reward,
        args=GRPOConfig(
            **{
                "output_dir": folder,
                "loss_type": "offcorr:dapo",
                "learning_rate": options.learning_rate,
                "lr_scheduler_type": "constant",
                "adam_beta2": 0.99,
                "per_device_train_batch_size": 64,
                "num_generations": options.num_generations,
                "steps_per_generation": 4,
                "max_completion_length": toy.MAX_COMPLETION,
                "logging_steps": 4,
                "save_strategy": "no",
                "report_to": "none",
                "gradient_checkpointing": False,
                "bf16": False,
                "use_cpu": True,
                "dataloader_pin_memory": False,
                "disable_tqdm": True,
                "seed": 0,
                **overrides,
            }
        ),
        train_dataset=toy.dataset(4096, seed=0, split="train"),
        processing_class=AutoTokenizer.from_pretrained(path),
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(options: argparse.Namespace, folder: str) -> tuple[dict[int, dict[str, torch.Tensor]], list[dict[str, Any]]]:
    """Returns the weights of each checkpoint, and reward and share of skipped sequences along the run."""
    checkpoints = Checkpoints(options.checkpoints)
    trainer = make_trainer(
        options, folder, offcorr.rollout.OffPolicy(), skip_dead_sequences=True, max_steps=max(options.checkpoints)
    )
    trainer.add_callback(checkpoints)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if SKIPPED in entry]
    return checkpoints.weights, [{"update": e["step"], "reward": e["reward"], "skipped": e[SKIPPED]} for e in logged]


def measure(options: argparse.Namespace, folder: str, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Times both trainers on the samples of ``weights``."""
    recorded = Recorded()
    trainers, clocks = {}, {}
    for skip in (False, True):
        fixed = {"skip_dead_sequences": skip, "learning_rate": 0.0, "max_steps": options.steps}
        trainers[skip] = make_trainer(options, folder, recorded, **fixed)
        trainers[skip].model.load_state_dict(weights)
        clocks[skip] = Clock()
        trainers[skip].add_callback(clocks[skip])
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(options.rounds + 1):
        for skip in (False, True) if number % 2 else (True, False):
            trainers[skip].train()
            seconds = clocks[skip].steps()
            if number:  # the first round records and warms up
                taken[skip].append(seconds)
            recorded.next = 0
    logged = [entry for entry in trainers[True].state.log_history if SKIPPED in entry]
    medians = {skip: statistics.median(sum(rounds, [])) for skip, rounds in taken.items()}
    sampling = statistics.median(recorded.seconds) / trainers[False].args.steps_per_generation
    return {
        "reward": statistics.mean(entry["reward"] for entry in logged),
        "skipped": statistics.mean(entry[SKIPPED] for entry in logged),
        "ratio": medians[True] / medians[False],
        "ratio_by_round": [
            statistics.median(a) / statistics.median(b) for a, b in zip(taken[True], taken[False], strict=True)
        ],
        "ratio_with_sampling": (medians[True] + sampling) / (medians[False] + sampling),
        "seconds_per_step": {"without": medians[False], "with": medians[True], "sampling": sampling},
        "steps": {"without": taken[False], "with": taken[True]},
    }


def table(checkpoints: dict[int, dict[str, Any]]) -> str:
    lines = [f"{'updates':>8}{'reward':>9}{'skipped':>9}{'ratio':>8}{'quartiles':>16}{'with sampling':>15}"]
    for update, row in checkpoints.items():
        low, _, high = statistics.quantiles(row["ratio_by_round"], n=4)
        lines.append(
            f"{update:>8}{row['reward']:>9.3f}{row['skipped']:>9.2f}{row['ratio']:>8.3f}"
            f"{f'{low:.3f}, {high:.3f}':>16}{row['ratio_with_sampling']:>15.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[0, 120, 360], help="optimizer updates")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="learning rate of the run that trains")
    parser.add_argument("--steps", type=int, default=16, help="steps per round, a multiple of 4; the last is not timed")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        weights, along = train(options, folder)
        checkpoints = {update: measure(options, folder, weights[update]) for update in sorted(weights)}
    print(table(checkpoints))
    if options.output:
        settings = {name: value for name, value in vars(options).items() if name != "output"}
        report = {
            "command": "python benchmarks/skip_dead.py",
            "settings": settings,
            "checkpoints": checkpoints,
            "along_the_run": along,
            "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
            | {"offcorr": offcorr.__version__},
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
