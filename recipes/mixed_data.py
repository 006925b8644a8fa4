"""GRPO on data of any origin: earlier rollouts again, demonstrations, and the beginnings of traces.

    accelerate launch recipes/mixed_data.py --loss_type minpro --replay_share 0.75      # each sample is used four times
    accelerate launch recipes/mixed_data.py --loss_type minpro --replay_from runs/yesterday/rollouts --replay_share 0.5
    accelerate launch recipes/mixed_data.py --unsolved 16 --demonstrations toy --without_logp ratio_one
    accelerate launch recipes/mixed_data.py --unsolved 16 --demonstrations toy --without_logp ratio_one --chord_mu 0.1
    accelerate launch recipes/mixed_data.py --unsolved 16 --prefixes toy --prefix_length curriculum

    # ReMix (2507.06892): a mixed phase, then on-policy training from one of its checkpoints, the new reference model.
    accelerate launch recipes/mixed_data.py --loss_type ppo --replay_share 0.5 --beta 0.02 \\
        --convex_kl '{"base_share": {"start": 1.0, "end": 0.0}, "window": 16}' --save_strategy steps --save_steps 80
    accelerate launch recipes/mixed_data.py --loss_type ppo --beta 0.02 --model runs/ppo/checkpoint-80 \\
        --output_dir runs/restarted

docs/mixed_data.md explains the parts and compares them.  Everything else, and every flag that is not here, is
recipes/grpo.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import grpo  # noqa: E402

from offcorr import toy  # noqa: E402
from offcorr.data import Curriculum, Demonstrations, Prefixes, Replay, Traces  # noqa: E402
from offcorr.extras import CHORD  # noqa: E402
from offcorr.rollout import Sampling, decode  # noqa: E402
from offcorr.rollout.sampler import tokenize  # noqa: E402

OF_TRACES = (
    "a jsonl or parquet file with prompt, completion and perhaps logp; or toy: right workings of the toy prompts"
)


@dataclass
class Arguments(grpo.Arguments):
    """grpo.py's arguments, with what is trained on beside new samples."""

    replay_share: float = field(default=0.0, metadata={"help": "share of each generation's groups that is replayed"})
    replay_groups: int = field(default=1024, metadata={"help": "number of groups that are stored"})
    replay_age: int | None = field(default=None, metadata={"help": "the oldest group replayed, in optimizer updates"})
    replay_from: str | None = field(
        default=None, metadata={"help": "a folder of an earlier run's rollouts, which fills the store at the start"}
    )
    demonstrations: str | None = field(default=None, metadata={"help": OF_TRACES})
    per_group: int = field(default=1, metadata={"help": "completions of a group that are demonstrations"})
    without_logp: str = field(
        default="refuse",
        metadata={
            "help": "the ratio of demonstrations without log-probs: refuse, ratio_one, or deterministic",
            "choices": ["refuse", "ratio_one", "deterministic"],
        },
    )
    chord_mu: float = field(
        default=0.0,
        metadata={"help": "weight of a supervised term on the demonstrations (CHORD), which then are in no group"},
    )
    prefixes: str | None = field(default=None, metadata={"help": OF_TRACES})
    prefix_share: float = field(default=1.0, metadata={"help": "share of the groups with traces that get a prefix"})
    prefix_length: str = field(default="0.5", metadata={"help": "share of the trace that is given, or curriculum"})
    unsolved: int = field(
        default=0,
        metadata={"help": "keep the prompts that the model solves in none of this many samples, to train and evaluate"},
    )
    warm_start: int | None = field(default=None, metadata={"help": "updates of the toy model's warm start, of 900"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chord_mu and self.demonstrations is None:
            raise ValueError(f"chord_mu is {self.chord_mu}, which learns from demonstrations: name them")
        if self.replay_from is not None and not self.replay_share:
            raise ValueError(f"replay_from is {self.replay_from!r}, and replay_share is 0: choose a share")
        if self.warm_start is not None:
            if self.model != "toy":
                raise ValueError(f"warm_start is {self.warm_start}, which goes with the toy model, not {self.model!r}")
            self.model = toy.model_path(seed=self.seed, recipe=toy.Recipe(steps=self.warm_start))
        self.length: float | Curriculum = Curriculum() if self.prefix_length == "curriculum" else self._length()

    def _length(self) -> float:
        try:
            return float(self.prefix_length)
        except ValueError:
            raise ValueError(f"prefix_length is {self.prefix_length!r}, expected a number, or curriculum") from None


# -- the data ------------------------------------------------------------------------------------------------


def traces(source: str, rows: Dataset, tokenizer: Any) -> Traces:
    """Traces of a file; of the toy task right workings of every prompt."""
    if source != "toy":
        return Traces(source, tokenizer)
    prompts = dict.fromkeys(rows["prompt"])
    return Traces([{"prompt": prompt, "completion": toy.demonstration(prompt)} for prompt in prompts], tokenizer)


def sampler(args: Arguments, inner: Any, rows: Dataset, tokenizer: Any) -> Any:
    """The sampler of grpo.py with prefixes, demonstrations and replay around it, in this order."""
    if args.prefixes is not None:
        given = traces(args.prefixes, rows, tokenizer)
        inner = Prefixes(inner, given, share=args.prefix_share, length=args.length)
    if args.demonstrations is not None and not args.chord_mu:
        shown = traces(args.demonstrations, rows, tokenizer)
        inner = Demonstrations(inner, shown, args.per_group, args.without_logp)
    if args.replay_share:
        inner = Replay(inner, args.replay_share, max_groups=args.replay_groups, max_age=args.replay_age)
        if args.replay_from is not None:
            inner.load(args.replay_from)
    return inner


def unsolved(trainer: MixedDataTrainer, name: str, rows: Dataset) -> Dataset:
    """The rows none of whose samples gets a reward, under the model that the training begins with."""
    args, tokenizer = trainer.args, trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model)
    generator = torch.Generator(model.device).manual_seed(args.seed)
    kept = []
    for start in range(0, len(rows), 64):
        part = rows.select(range(start, min(start + 64, len(rows))))
        solved = [False] * len(part)
        for _ in range(args.unsolved):
            sampled = decode(
                model,
                tokenize(list(part["prompt"]), trainer),
                max_new_tokens=args.max_completion_length,
                eos_token_ids=[tokenizer.eos_token_id],
                sampling=Sampling(args.temperature),
                generator=generator,
            )
            texts = tokenizer.batch_decode(sampled.completion_ids, skip_special_tokens=True)
            columns = {name: list(part[name]) for name in part.column_names}
            rewards = trainer.reward_funcs[0](prompts=columns.pop("prompt"), completions=texts, **columns)
            solved = [before or reward > 0 for before, reward in zip(solved, rewards, strict=True)]
        kept += [start + i for i, one in enumerate(solved) if not one]
    if not kept:
        raise ValueError(f"every {name} prompt was solved in {args.unsolved} samples: set unsolved to fewer, or 0")
    if trainer.accelerator.is_main_process:
        print(f"unsolved in {args.unsolved} samples: {len(kept)} of {len(rows)} {name} prompts", flush=True)
    return rows.select(kept)


# -- the trainer ---------------------------------------------------------------------------------------------


class MixedDataTrainer(grpo.GRPOTrainer):
    """The trainer of grpo.py, with the sampler above, and a supervised term where ``chord_mu`` asks for one."""

    def __init__(self, *, args: Arguments, processing_class: Any, train_dataset: Dataset, **kwargs: Any) -> None:
        around = sampler(args, kwargs.pop("rollout_func"), train_dataset, processing_class)
        super().__init__(
            args=args,
            processing_class=processing_class,
            train_dataset=train_dataset,
            rollout_func=around,
            **kwargs,
        )
        if args.unsolved:
            self.train_dataset, self.eval_dataset = (
                unsolved(self, name, rows) for name, rows in (("training", train_dataset), ("test", self.eval_dataset))
            )
        if args.chord_mu:
            self.chord = CHORD(mu=args.chord_mu)
            self.expert = traces(args.demonstrations, self.train_dataset, processing_class)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if not (self.args.chord_mu and model.training):
            return loss
        accumulation, ranks = self.args.gradient_accumulation_steps, self.accelerator.num_processes
        done = self.state.global_step * accumulation + self._step % accumulation
        batch = self.expert.batch(done * ranks + self.accelerator.process_index, len(inputs["advantages"]))
        expert = {name: value.to(loss.device) for name, value in batch.items()}
        logp, *_ = self._get_per_token_logps_and_entropies(
            model, expert["input_ids"], expert["attention_mask"], expert["mask"].size(1)
        )
        learnt = self.chord.supervised(logp, expert["mask"]).loss / accumulation
        return (1 - self.chord.mu) * loss + self.chord.mu * learnt


def main() -> None:
    grpo.main(Arguments, MixedDataTrainer)


if __name__ == "__main__":
    main()
