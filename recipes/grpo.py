"""GRPO with an off-policy correction, on any model and any verifiable task.

    accelerate launch recipes/grpo.py                                           # the toy model, on-policy
    accelerate launch recipes/grpo.py --config recipes/configs/minpro.yaml      # stale, quantised sampler and MinPRO
    accelerate launch recipes/grpo.py --loss_type ctpo --lag 16 --precision int8
    accelerate launch recipes/grpo.py --config recipes/configs/gsm8k.yaml      # a hub model and data set, on a GPU
    accelerate launch recipes/grpo.py --sampler vllm://127.0.0.1:8000 --sync_every 16       # a running vLLM server

Every option of TRL's GRPOConfig is a flag here, and a key of the YAML file; a flag wins over the file.  Read from top
to bottom; to adapt it to your own model, start at ``Arguments`` and ``load_task``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import datasets
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import TrlParser

from offcorr import available, toy
from offcorr.diagnose import read
from offcorr.flags import unknown_flag
from offcorr.folders import check_writable
from offcorr.lab.text import listed
from offcorr.methods.registry import option_names
from offcorr.optional import configuration_keys
from offcorr.rollout import EngineError, OffPolicy, VLLMServer
from offcorr.training.generations import check_generation, check_max_steps
from offcorr.trl import GRPOConfig, GRPOTrainer  # line 1 of the swap: this was `from trl import ...`
from offcorr.trl.config import choose_correction
from offcorr.trl.resume import updates_of
from offcorr.trl.step import check_anchor, check_steps

UPDATES = 160
"""Of a run for which neither --max_steps nor --num_train_epochs is given."""

OF_CHECKPOINT = ", expected a run's checkpoint, such as runs/minpro/checkpoint-20 (--save_strategy steps saves them)"


@dataclass
class Arguments(GRPOConfig):
    """GRPOConfig with this recipe's own options, and defaults that suit the toy model.

    Line 2 of the swap is a pair of options of GRPOConfig: ``--loss_type minpro --loss_kwargs '{"eps_high": 0.28}'``.
    """

    model: str = field(default="toy", metadata={"help": "toy, a local folder, or any hub name"})
    task: str = field(
        default="toy",
        metadata={
            "help": "toy, a reasoning-gym name, a hub dataset such as openai/gsm8k, or a .jsonl file; the rows of the "
            "last two have the fields question and answer"
        },
    )
    sampler: str = field(
        default="local",
        metadata={"help": "local: in this process, with lag and precision; or vllm://host:port, a running vLLM server"},
    )
    sync_every: int = field(default=1, metadata={"help": "optimizer updates between two weights of the vLLM server"})
    lag: int = field(
        default=0, metadata={"help": "age of the sampler's weights, in optimizer updates, when it samples a generation"}
    )
    precision: str = field(
        default="fp32", metadata={"help": "of the sampler: fp32, bf16, fp16, int8, int4, fp8_e4m3 ..."}
    )
    train_size: int = field(default=4096, metadata={"help": "examples to train on"})
    eval_size: int = field(default=256, metadata={"help": "held-out examples, sampled at the run's --temperature"})
    picture: bool = field(default=True, metadata={"help": "draw history.png at the end of the run"})

    # 32 prompts x 8 samples per generation, four optimizer updates on each.
    output_dir: str | None = field(default=None, metadata={"help": "default: runs/<loss_type>"})
    max_steps: int | None = field(
        default=None, metadata={"help": "updates in all (default: 160; those of --num_train_epochs, where it is given)"}
    )
    num_train_epochs: float | None = field(default=None, metadata={"help": "passes over the training examples"})
    learning_rate: float = field(default=3e-4)
    lr_scheduler_type: str = field(default="constant")
    adam_beta2: float = field(default=0.99)
    per_device_train_batch_size: int = field(default=64)
    per_device_eval_batch_size: int = field(default=256)
    num_generations: int = field(default=8)
    num_generations_eval: int = field(default=1)
    steps_per_generation: int = field(
        default=4, metadata={"help": "micro-batches of a generation; its samples age by one with each optimizer update"}
    )
    max_completion_length: int = field(default=toy.MAX_COMPLETION)
    logging_steps: float = field(default=4)
    eval_strategy: str = field(default="steps")
    eval_steps: float = field(default=20)
    eval_on_start: bool = field(default=True)
    save_strategy: str = field(default="no", metadata={"help": "no, or steps: save a checkpoint every --save_steps"})
    report_to: str = field(default="none")
    log_metrics: str = field(default="full")  # the summary and the picture below read more than the short log
    gradient_checkpointing: bool = field(default=False)
    bf16: bool = field(default=False)
    dataloader_pin_memory: bool = field(default=torch.cuda.is_available())
    use_cpu: bool = field(default=not torch.cuda.is_available())

    def __post_init__(self) -> None:
        """What can be refused before data or models are loaded."""
        self.max_steps, self.num_train_epochs = length_of_run(self.max_steps, self.num_train_epochs)
        if self.output_dir is None:
            self.output_dir = "runs/" + re.sub(r"[^\w.=-]+", "-", self.loss_type)
        check_writable("--output_dir", self.output_dir)
        check_resumed(self)
        self._check_by_trl()
        if self.eval_strategy == "no":
            self.eval_on_start = False
        if self.dump_rollouts:
            check_writable("--dump_rollouts", self.dump_rollouts)
            for name in sorted(path.name for path in Path(self.dump_rollouts).glob("*")):
                held = f"--dump_rollouts {self.dump_rollouts!r} holds {name}"
                if not name.startswith("step_"):
                    raise ValueError(f"{held}, expected a new or empty folder for the dump")
                if not self.resume_from_checkpoint:
                    raise ValueError(f"{held}, the dump of another run; choose another --dump_rollouts")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trainer warns again
            loss = choose_correction(self)
            check_anchor(self, loss)
            if loss is not None:
                check_steps(self, loss.at(0.0))
        for name in ("train_size", "eval_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more examples")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")
        if self.reward_weights is not None and len(self.reward_weights) != 1:
            raise ValueError(f"reward_weights is {self.reward_weights}, expected one number: a task has one reward")
        check_max_steps(self.max_steps)
        check_saving(self)
        if self.sampler != "local" and not self.sampler.startswith("vllm://"):
            raise ValueError(f"sampler is {self.sampler!r}, expected local or vllm://host:port")
        if (self.use_vllm or self.sampler != "local") and (self.lag, self.precision) != (0, "fp32"):
            other = "use_vllm" if self.use_vllm else f"sampler {self.sampler!r}"
            raise ValueError(
                f"lag is {self.lag} and precision is {self.precision!r}, options of the local sampler, and {other} "
                "takes its place: leave both out"
            )
        if self.sampler == "local" and self.sync_every != 1:
            raise ValueError(f"sync_every is {self.sync_every}, which goes with --sampler vllm://host:port")
        self.make_sampler()
        # A hub name has one "/" at most.
        is_path = self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        if is_path and not Path(self.model).is_dir():
            raise ValueError(f"model is {self.model!r}, which is not a folder")
        if self.task.endswith(".jsonl"):
            if not Path(self.task).is_file():
                raise ValueError(f"task is {self.task!r}, which is not a file")
            with open(self.task, encoding="utf-8") as file:
                first = next((line for line in file if line.strip()), "{}")
            try:
                row = json.loads(first)
            except ValueError as error:
                raise ValueError(f"task is {self.task!r}, whose first line is no JSON: {error}") from error
            check_fields(self.task, row if isinstance(row, dict) else {})
        elif self.task != "toy" and "/" not in self.task:
            from reasoning_gym.factory import DATASETS

            if self.task not in DATASETS:
                raise ValueError(
                    f"task is {self.task!r}{nearest(self.task, DATASETS)}, expected toy, a .jsonl file, a hub data "
                    "set (owner/name), or a name of reasoning-gym"
                )

    def _check_by_trl(self) -> None:
        """TRL's own checks; before them that of a batch size that is computed, with the flags that make it."""
        if self.generation_batch_size is None:
            processes, steps = int(os.environ.get("WORLD_SIZE", 1)), self.steps_per_generation
            check_generation(
                self.per_device_train_batch_size,
                processes,
                steps or self.gradient_accumulation_steps,
                self.num_generations,
            )
        super().__post_init__()

    def make_sampler(self) -> OffPolicy | VLLMServer | None:
        """Real off-policy data, old or of another precision, with a record of both; None: TRL's own vLLM path."""
        if self.use_vllm and self.sampler != "local":
            raise ValueError(f"use_vllm is True and sampler is {self.sampler!r}: two samplers, leave one out")
        if self.use_vllm:
            return None
        if self.sampler == "local":
            return OffPolicy(lag=self.lag, precision=self.precision)
        if not self.sampler.rstrip("/").rpartition(":")[2].isdigit():
            raise ValueError(f"sampler is {self.sampler!r}, without a port, expected vllm://host:port")
        return VLLMServer(url=self.sampler, sync_every=self.sync_every)


def check_saving(args: GRPOConfig) -> None:
    """Refuses how often to save where nothing is saved, as by default here."""
    for name in ("save_steps", "save_total_limit"):
        value, default = getattr(args, name), GRPOConfig.__dataclass_fields__[name].default
        if args.save_strategy == "no" and value != default:
            raise ValueError(
                f"{name} is {value:g}, and save_strategy is 'no', as it is by default here, which saves nothing: add "
                f"--save_strategy steps, or leave {name} out"
            )


def check_resumed(args: GRPOConfig) -> None:
    """Takes ``true`` for the last checkpoint in output_dir; refuses what is none, and one that has all updates."""
    folder = args.resume_from_checkpoint
    if str(folder).lower() == "true":
        folder = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        if folder is None:
            raise ValueError(
                f"resume_from_checkpoint is true, the last checkpoint in output_dir, and {args.output_dir!r} holds none"
                f"{OF_CHECKPOINT}"
            )
        args.resume_from_checkpoint = folder
    if not folder:
        return
    if not Path(folder).is_dir():
        raise ValueError(f"resume_from_checkpoint is {folder!r}, which is not a folder{OF_CHECKPOINT}")
    if last := get_last_checkpoint(folder):
        raise ValueError(f"resume_from_checkpoint is {folder!r}, which holds checkpoints; expected one of them: {last}")
    if 0 < args.max_steps <= (done := updates_of(folder)):
        raise ValueError(
            f"max_steps is {args.max_steps}, the number of updates in all, and {folder} has {done} already: nothing is "
            f"left to train, expected {done + 1} or more"
        )


def nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def leave_it_to_the_first_process() -> None:
    """Every process finds the same mistake: the first one says it and ends, and its launcher then ends the others."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(60)


class Parser(TrlParser):
    """TRL's parser, whose error is said once, however many processes read the same flags, and names the YAML file."""

    file: Path | None = None
    keys: Sequence[str] = ()  # of the file

    def separate(self, arguments: type[Any]) -> None:
        """Puts the flags that the recipe and the library define before all others of TRL and transformers in --help."""
        named: dict[bool, set[str]] = {True: set(), False: {"help"}}  # by TRL and transformers, or here
        for one in arguments.__mro__:
            theirs = one.__module__.partition(".")[0] in ("trl", "transformers")
            named[theirs] |= set(one.__dict__.get("__annotations__", ()))
        others = self.add_argument_group("TRL's and transformers' other options")
        flags = self._optionals._group_actions
        for flag in flags:
            if any(word.startswith("--no_") for word in flag.option_strings):  # its help is that of the other one
                flag.help = f"switch --{flag.dest} off"
        others._group_actions = [flag for flag in flags if flag.dest not in named[False]]
        self._optionals._group_actions = sorted(
            (flag for flag in flags if flag.dest in named[False]), key=lambda flag: flag.dest in named[True]
        )

    def error(self, message: str) -> NoReturn:
        leave_it_to_the_first_process()
        said = re.match(r"argument --(\w+)[^:]*: (.*)", message)  # argparse takes a key for its flag
        flags = {word[2:].partition("=")[0].replace("-", "_") for word in sys.argv if word.startswith("--")}
        if said and said[1] in self.keys and said[1] not in flags:
            message = f"{self.file}: {said[1]}: {said[2]}"
        super().error(message)


def length_of_run(max_steps: int | None, epochs: float | None) -> tuple[int, float]:
    """``max_steps`` and ``num_train_epochs`` as transformers reads them: -1 updates are those of the epochs.

    Raises:
        ValueError: both are given, of which transformers would ignore the epochs, or no epoch would be trained.
    """
    if epochs is not None and epochs <= 0:
        raise ValueError(f"num_train_epochs is {epochs:g}, expected more than 0")
    if max_steps is not None and max_steps > 0 and epochs is not None:
        raise ValueError(
            f"num_train_epochs is {epochs:g} and max_steps is {max_steps}, which ends the run whatever the epochs are: "
            "leave one of them out"
        )
    if max_steps is None:
        max_steps = UPDATES if epochs is None else -1
    return max_steps, 3.0 if epochs is None else epochs


def parse(arguments: type[Any]) -> Any:
    """The flags and the YAML file of ``--config``; a mistake ends the program with one line that names the flag."""
    command = os.environ.get("OFFCORR_COMMAND")  # "offcorr train", where it runs this file
    usage = "%(prog)s [--config FILE.yaml] [flags]"
    parser = Parser(arguments, prog=command, usage=usage, allow_abbrev=False)
    parser.separate(arguments)
    try:
        if "--config" in sys.argv[1:-1]:
            parser.file = Path(sys.argv[sys.argv.index("--config") + 1])
            parser.keys = configuration_keys(parser.file)
        args, unknown = parser.parse_args_and_config(return_remaining_strings=True)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error).replace("offcorr.available() lists", "`offcorr methods` lists"))
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--")
        known = [action.dest for action in parser._actions]
        parser.error(unknown_flag(name, known, available(), option_names()))
    return args


# -- the task ------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """Datasets with a ``prompt`` column, and a TRL reward function that sees the other columns."""

    train: datasets.Dataset
    test: datasets.Dataset
    reward: Callable[..., list[float]]


def load_task(args: Arguments, tokenizer: PreTrainedTokenizerBase) -> Task:
    def as_prompt(question: str) -> Any:
        """A chat message where the model knows what a chat is, else the bare question."""
        return [{"role": "user", "content": question}] if tokenizer.chat_template else question + "\n"

    if args.task == "toy":
        return Task(
            toy.dataset(args.train_size, seed=args.seed, split="train"),
            toy.dataset(args.eval_size, seed=0, split="test"),
            toy.reward,
        )
    if args.task.endswith(".jsonl"):
        rows = datasets.load_dataset("json", data_files=args.task, split="train").shuffle(seed=args.seed)
        split = rows.train_test_split(test_size=min(args.eval_size, len(rows) // 2), seed=args.seed)
        return math_task(split["train"], split["test"], args, as_prompt)
    if "/" in args.task:
        rows = datasets.load_dataset(args.task, "main" if args.task == "openai/gsm8k" else None)
        return math_task(rows["train"], rows["test"], args, as_prompt)
    return reasoning_gym_task(args, as_prompt)


def check_fields(task: str, names: Iterable[str]) -> None:
    """Raises ``ValueError`` where a data set lacks a field of ``math_task``."""
    if missing := sorted({"question", "answer"} - set(names)):
        raise ValueError(f"task is {task!r}, whose rows have no {' and no '.join(missing)}, but {', '.join(names)}")


def math_task(train: datasets.Dataset, test: datasets.Dataset, args: Arguments, as_prompt: Callable) -> Task:
    """``question`` and ``answer`` columns; the last number or boxed expression is checked with math-verify.

    Raises:
        ValueError: a column is missing.
    """
    from math_verify import parse, verify

    check_fields(args.task, train.column_names)

    def prepare(rows: datasets.Dataset, size: int) -> datasets.Dataset:
        rows = rows.select(range(min(size, len(rows))))
        return rows.map(
            lambda row: {"prompt": as_prompt(row["question"]), "answer": row["answer"].split("####")[-1].strip()},
            remove_columns=rows.column_names,
        )

    def reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        # The timeouts of math-verify are signals, which only the main thread may set.
        gold = [parse(wanted, parsing_timeout=None) for wanted in answer]
        said = [parse(text_of(completion), parsing_timeout=None) for completion in completions]
        return [float(verify(g, s, timeout_seconds=None)) for g, s in zip(gold, said, strict=True)]

    return Task(prepare(train, args.train_size), prepare(test, args.eval_size), reward)


def reasoning_gym_task(args: Arguments, as_prompt: Callable) -> Task:
    """Any generator of reasoning-gym, scored by its own scorer."""
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    sources = {
        "train": reasoning_gym.create_dataset(args.task, size=args.train_size, seed=args.seed),
        "test": reasoning_gym.create_dataset(args.task, size=args.eval_size, seed=args.seed + 1_000_003),
    }

    def rows(split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list(
            [{"prompt": as_prompt(e["question"]), "split": split, "entry": i} for i, e in enumerate(sources[split])]
        )

    def reward(completions: list[Any], split: list[str], entry: list[int], **kwargs: Any) -> list[float]:
        texts = [text_of(completion) for completion in completions]
        answers = [extract_answer(text) or text.strip() for text in texts]
        return [sources[s].score_answer(a, sources[s][e]) for a, s, e in zip(answers, split, entry, strict=True)]

    return Task(rows("train"), rows("test"), reward)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


# -- the run -------------------------------------------------------------------------------------------------


def model_and_tokenizer(model: str, seed: int) -> tuple[str, PreTrainedTokenizerBase]:
    """The folder or hub name of the model, and its tokenizer."""
    path = toy.model_path(seed=seed) if model == "toy" else model
    if not Path(path).exists() and int(os.environ.get("RANK", 0)) == 0:  # without a network it takes a minute
        print(f"looking for the model {model!r} on the hub, as it is no folder here", file=sys.stderr, flush=True)
    try:
        return path, AutoTokenizer.from_pretrained(path)
    except OSError as error:
        leave_it_to_the_first_process()
        raise SystemExit(
            f"model is {model!r}, which is no folder here with a model and its tokenizer, and the hub did not "
            f"give one: {str(error).splitlines()[0]}"
        ) from None


def main(arguments: type[Arguments] = Arguments, trainer_class: type[GRPOTrainer] = GRPOTrainer) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental in TRL, and wanted here
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where installed, warns
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available():
        # On a CPU DeepSpeed would compile its shared-memory collectives at every first start; gloo does without.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    args = parse(arguments)
    path, tokenizer = model_and_tokenizer(args.model, args.seed)
    task = load_task(args, tokenizer)

    history = History(Path(args.output_dir))
    if not args.resume_from_checkpoint and int(os.environ.get("RANK", 0)) == 0:
        history.say_replaced()
    trainer = trainer_class(
        model=path,
        args=args,
        reward_funcs=task.reward,
        train_dataset=task.train,
        eval_dataset=task.test,
        processing_class=tokenizer,
        rollout_func=args.make_sampler(),
        callbacks=[history],
    )
    for quiet in (ProgressCallback, PrinterCallback):  # they print every log; the history file has them all
        trainer.remove_callback(quiet)
    if trainer.accelerator.is_main_process and not args.disable_tqdm:
        trainer.add_callback(Bar)
    tied = getattr(trainer.model.config, "tie_word_embeddings", False)
    if args.resume_from_checkpoint and tied and trainer.accelerator.is_main_process:
        print("(lm_head.weight, which transformers may miss in the checkpoint, is the embedding's)", file=sys.stderr)
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except KeyboardInterrupt:
        if trainer.accelerator.is_main_process:
            print(f"\n{what_is_left(trainer, history)}", file=sys.stderr, flush=True)
        raise
    except EngineError as error:  # its message says what to do, and no line of this code is at fault
        leave_it_to_the_first_process()
        raise SystemExit(f"\n{error}") from None
    evaluated, _ = series(trainer.state.log_history, "eval_reward")
    if trainer.state.global_step not in evaluated and args.eval_strategy != "no":
        trainer.evaluate()

    if trainer.accelerator.is_main_process:
        title = f"{args.loss_type} {sampled_by(args)}"
        if args.resume_from_checkpoint:
            title += f"\n(the updates before {args.resume_from_checkpoint} with the settings of their own run)"
        summarise(history.logs, title=title, file=history.summary, anchor=args.anchor)
        print(f"history: {history.file}")
        if args.picture:
            print(f"picture: {plot(history.logs, history.file.with_suffix('.png'), anchor=args.anchor)}")
        if args.dump_rollouts:
            own = args.anchor in (None, "snapshot")  # else the dump's old_logp is not of the weights that sampled
            folders, resumed = [Path(args.output_dir)], 0
            if args.resume_from_checkpoint:
                checkpoint = Path(args.resume_from_checkpoint)
                folders.append(checkpoint.parent)
                resumed = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step
            model, why_none = sampled_by_model(args.dump_rollouts, folders, path, resumed) if own else (None, "")
            print(f"why trainer and sampler disagree:\n  {diagnose(args.dump_rollouts, path, model)}")
            if why_none:
                print(why_none)
    # A process that ends while gloo still holds its tensors aborts (pytorch/pytorch#190489).
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def what_is_left(trainer: GRPOTrainer, history: History) -> str:
    """What an interrupted run has on disk."""
    stopped = f"stopped after {trainer.state.global_step} of {trainer.state.max_steps} updates"
    numbers = f"{history.file} has the log so far" if history.logs else "nothing was logged yet"
    if history.checkpoint is None:
        often = max(1, trainer.state.max_steps // 10)
        return f"{stopped}: {numbers}, and no model was saved (--save_strategy steps --save_steps {often} saves it)"
    again = f"the same command with --resume_from_checkpoint {history.checkpoint} goes on from there"
    return f"{stopped}: {numbers}; {again}"


def sampled_by_model(
    dump: str | Path, folders: Sequence[Path], start: str | Path, resumed: int = 0
) -> tuple[str | Path | None, str]:
    """The latest weights on disk that sampled a part of the dump, of a checkpoint or the start: its ``--model``.

    Args:
        folders: of the run, and of the run that it resumed.
        resumed: the update after which it went on.

    Returns:
        None and a sentence on why, where none of them was; the sentence is empty where a run saved no checkpoint.
    """
    versions = []
    for file in sorted(Path(dump).glob("step_*"), reverse=True):
        version = next(read([file], warn=lambda text: None)).rollout_version
        versions += [] if version is None else [int(np.max(version))]
        for folder in folders:
            checkpoint = folder / f"checkpoint-{versions[-1] if versions else 0}"
            if checkpoint.is_dir():
                return checkpoint, ""
    saved = sorted({int(path.name.split("-")[1]) for folder in folders for path in folder.glob("checkpoint-*")})
    trained = sorted({version for version in versions if version > 0})
    if 0 in versions:
        return start, ""
    if not saved or not trained:
        return None, ""
    if later := [version for version in trained if version > resumed]:
        which = f"{later[0]}" if len(later) == 1 else f"one of the former, {later[-1]} for instance,"
        how = f"A --save_steps that divides {which} gives it one"
    else:
        how = "The former lie before the checkpoint that was resumed, so that no --save_steps of this run saves them"
    return None, (
        f"(The command has no --model, so that the logs alone have to tell: the weights after update "
        f"{listed(map(str, trained))} sampled, and those after {listed(map(str, saved))} were saved. {how}.)"
    )


def diagnose(dump: str | Path, tokenizer: str, checkpoint: str | Path | None = None, offcorr: str = "offcorr") -> str:
    """The command that reads a dump, with the folder or hub name of the tokenizer, and of the model that sampled."""
    words: list[Any] = [offcorr, "diagnose", dump, "--html", Path(dump).parent / "report.html", "--overwrite"]
    words += ["--tokenizer", tokenizer, *(["--model", checkpoint] if checkpoint else [])]
    return shlex.join(map(str, words))


def sampled_by(args: Arguments) -> str:
    if args.use_vllm:
        return "with TRL's vLLM path"
    if args.sampler != "local":
        return f"on a vLLM server with new weights every {args.sync_every} updates"
    return f"at lag {args.lag}, {args.precision} sampler"


def say_measuring(examples: int, done: int = 0) -> None:
    """Says why the first update, after those that a resumed run has done, is long in coming."""
    when = f"after {done} updates" if done else "before training"
    print(f"measuring the accuracy {when}: {examples} held-out examples ...", file=sys.stderr, flush=True)


SHOWN = {
    "reward": "reward of the samples",
    "offcorr/staleness/abs_mean": "staleness's mean |log-ratio|",
    "offcorr/engine/abs_mean": "engine's mean |log-ratio|",
}
"""Named with each evaluation, beside the held-out accuracy: the last logged values."""


class Bar(ProgressCallback):
    """The progress bar, with a line for every evaluation, and none for every log."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.eval_on_start and state.is_world_process_zero:
            say_measuring(args.eval_size, state.global_step)
        super().on_train_begin(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        if self.training_bar is None or "eval_reward" not in (metrics or {}):
            return
        when = f"after {state.global_step} updates" if state.global_step else "before training"
        logged = [(label, series(state.log_history, name)[1]) for name, label in SHOWN.items()]
        rest = [f"{label} {shortened(values[-1])}" for label, values in logged if values]
        words = ", ".join([f"accuracy {when}: {metrics['eval_reward']:.3f}", *rest])
        self.training_bar.write(words, file=sys.stderr)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class History(TrainerCallback):
    """Writes everything logged to one JSON file, which is complete at any moment, and the run's flags to ``summary``;
    knows this run's last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "history.json"
        self.summary = folder / "summary.txt"
        self.logs: list[dict[str, float]] = []
        self.checkpoint: Path | None = None

    def say_replaced(self) -> None:
        """Says that the file of an earlier run is replaced, if there is one."""
        if self.file.exists():
            print(f"{self.file} is of an earlier run, and is replaced; another --output_dir keeps both", flush=True)
            self.file.with_suffix(".png").unlink(missing_ok=True)  # of that run, too

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The last updates before the end or a checkpoint, where logging_steps does not divide their number: a run that
        # is resumed from there has no metrics of updates that were not logged.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self.logs:
            self.summary.write_text(f"flags: {shlex.join(sys.argv[1:]) or 'none'}\n")
        self.logs = [dict(entry) for entry in state.log_history]
        half_written = self.file.with_suffix(".tmp")
        half_written.write_text(json.dumps(self.logs))
        half_written.replace(self.file)


# -- results -----------------------------------------------------------------------------------------


def series(logs: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one logged quantity."""
    pairs = [(entry["step"], entry[name]) for entry in logs if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def accuracy(logs: list[dict[str, float]]) -> dict[str, float]:
    """Held-out sampled accuracy (mean reward) at start, peak and end."""
    _, values = series(logs, "eval_reward")
    return {"start": values[0], "peak": max(values), "end": values[-1]} if values else {}


def means(logs: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float]:
    """Mean of each of these quantities over the updates that its logs cover, each of which ends a log of training."""
    other = ("step", "epoch", "eval_", "train_")
    steps = sorted({entry["step"] for entry in logs if any(not name.startswith(other) for name in entry)})
    updates = {step: step - before for before, step in pairwise([0, *steps])}
    found = {}
    for name in names:
        logged, values = series(logs, name)
        if values:
            found[name] = sum(updates[step] * value for step, value in zip(logged, values, strict=True))
            found[name] /= sum(updates[step] for step in logged)
    return found


MISMATCH = {
    "offcorr/staleness/lag": "staleness: optimizer updates",
    "offcorr/staleness/abs_mean": "staleness: mean |log-ratio|, nats",
    "offcorr/staleness/ess_seq": "staleness: ESS, share of sequences",
    "offcorr/engine/abs_mean": "engine: mean |log-ratio|, nats",
    "offcorr/engine/ess_seq": "engine: ESS, share of sequences",
    "frac_reward_zero_std": "prompts without advantage",
}
"""ESS: effective sample size.  A prompt whose samples all got one reward has no advantage."""

TRLS = ("frac_reward_zero_std",)
"""Keys among these that TRL logs, so that `offcorr metrics` does not explain them."""

EFFECT = {
    "offcorr/loss/multiplier_vs_ratio": "mean multiplier, plain ratio = 1",
    "offcorr/loss/dropped": "tokens dropped",
    "offcorr/loss/damped": "tokens damped",
    "offcorr/loss/amplified": "tokens amplified",
    "offcorr/loss/ess_before": "ESS of the tokens, plain ratio",
    "offcorr/loss/ess_after": "ESS of the tokens, corrected",
}
"""What a correction did to the tokens that have an advantage; a loss of TRL's own has none of these."""

WEIGHT = {
    "offcorr/loss/weight_mean": "all tokens: mean weight",
    "offcorr/loss/truncated": "all tokens: weight is not the ratio",
}
"""What a weight did, such as one for the engine, to tokens with and without advantage; without one its mean is 1 in
every step, and is not shown."""

ACCURACIES = "Accuracies: --eval_size samples at the run's temperature (256: +- .03, 32: +- .09)."
TERMS = (
    "ESS: effective sample size, 1 where all count alike, of the updates between two logs. Multiplier, tokens and "
    "their ESS: of those with an advantage; damped, amplified: by more than 1 %."
)
ALIKE = "A prompt has no advantage where its samples all got one reward."
KEYS = "More: `offcorr metrics KEY`, KEY in the last column."
NO_CORRECTION = "none: a loss of TRL's own, which offcorr runs unchanged; its effect on the tokens is not measured"

NOT_LOGGED = "not measured: no update was logged"
NO_ADVANTAGE = "not measured: no token had an advantage in the updates that were logged"


def corrects(logs: list[dict[str, float]]) -> bool:
    """Whether the loss was one of this library: TRL's own has no weight."""
    return bool(series(logs, "offcorr/loss/weight_mean")[0])


WITH_THE_LAG = "with the lag"

HOLDS_LAG = (
    "Engine, with the lag: this anchor compares the sampler with the weights of now, so that its age is part of that "
    "gap; --anchor snapshot keeps the two apart."
)


def engine_holds_lag(logs: list[dict[str, float]], anchor: str | None) -> bool:
    """Whether the engine's gap is of an older sampler against the weights of now, as without a snapshot of its own."""
    age = means(logs, ("offcorr/staleness/lag",)).get("offcorr/staleness/lag", 0.0)
    return anchor not in (None, "snapshot") and age > 0 and bool(series(logs, "offcorr/engine/abs_mean")[0])


def caption(accuracies: bool = True) -> str:
    """What the rows of a table are: accuracies, if there are any, and means."""
    numbers = f"{ACCURACIES} All else: means" if accuracies else "Means"
    return f"{numbers} over the run. {TERMS}"


def summarise(logs: list[dict[str, float]], title: str, file: Path | None = None, anchor: str | None = None) -> None:
    """Prints the table of a run, and adds it to the file, if one is given."""
    with_lag = engine_holds_lag(logs, anchor)
    measured = accuracy(logs)
    table = Table(title=title, caption=f"{caption(bool(measured))} {ALIKE} {KEYS}", show_header=False)
    for moment, value in measured.items():
        table.add_row(f"held-out sampled accuracy, {moment}", f"{value:.3f}", end_section=moment == "end")
    weighted = any(value != 1 for value in series(logs, "offcorr/loss/weight_mean")[1])
    effect = EFFECT | (WEIGHT if weighted else {}) | {"lr_scale": "factor on the learning rate"}
    for part in (MISMATCH, effect):
        for name, value in means(logs, tuple(part)).items():
            label = part[name].replace("engine:", f"engine, {WITH_THE_LAG}:") if with_lag else part[name]
            table.add_row(label, shortened(value), "" if name in TRLS else name.rpartition("/")[2])
        table.add_section()
    if with_lag:
        table.caption = f"{HOLDS_LAG} {table.caption}"
    if not means(logs, tuple(EFFECT)):
        why = NO_ADVANTAGE if corrects(logs) else NO_CORRECTION
        table.caption = f"Correction: {why if series(logs, 'loss')[0] else NOT_LOGGED}. {table.caption}"
    Console().print(table)
    if file is not None:
        with file.open("a") as opened:
            Console(file=opened, width=100).print(table)
        print(f"flags and this table: {file}")


def shortened(value: float) -> str:
    """Two decimals, three of shares near 1, where limits lie, or two digits of what is smaller than they show."""
    if 0.9 < value < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


def lines(logs: list[dict[str, float]], names: Iterable[str]) -> dict[str, tuple[list[float], list[float]]]:
    """The series among these that were logged and are not 0 all the time, to rounding."""
    found = {name: series(logs, name) for name in names}
    return {name: pair for name, pair in found.items() if any(abs(value) > 1e-5 for value in pair[1])}


def to_scale(axis: Any, name: str = "") -> None:
    """Limits that begin at 0 and, but for a distance in nats, reach 1, so that noise does not fill the panel."""
    low, high = axis.get_ylim()
    least = 0.0 if "abs_mean" in name else 1.05
    axis.set_ylim(min(0.0, low), max(least, high))


def plot(logs: list[dict[str, float]], file: Path, anchor: str | None = None) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    age = means(logs, ("offcorr/staleness/lag",))
    labels = {"reward": "reward, of samples {:.3g} updates old on average".format(*age.values())} if age else {}
    if engine_holds_lag(logs, anchor):
        labels["offcorr/engine/abs_mean"] = f"engine/abs_mean, {WITH_THE_LAG}"
    figure, axes = plt.subplots(1, 4, figsize=(18, 4), constrained_layout=True)
    size, dropped, damped, amplified, *ess = EFFECT
    nothing = "nothing: 0 throughout"
    if not means(logs, tuple(EFFECT)):
        nothing = "no token had an advantage" if corrects(logs) else "no correction: a loss of TRL's own"
    panels = (
        ("reward", ("eval_reward", "reward"), "mean", "0 throughout"),
        ("mismatch", [name for name in MISMATCH if "abs_mean" in name], "mean |log-ratio|, nats", "0 throughout"),
        (
            "effect of the correction",
            (size, dropped, damped, amplified, "lr_scale"),
            "share of tokens; factor",
            nothing,
        ),
        ("effective sample size", ess, "share of tokens", nothing),
    )
    for axis, (title, names, unit, otherwise) in zip(axes, panels, strict=True):
        drawn = lines(logs, names)
        for name, (steps, values) in drawn.items():
            label = labels.get(name, name.removeprefix("offcorr/"))
            axis.plot(steps, values, label=label, marker="o" if name == "eval_reward" else "")
        axis.set(title=title, xlabel="optimizer update", ylabel=unit)
        if drawn:
            to_scale(axis, names[0])
            axis.legend()
        else:
            axis.text(0.5, 0.5, otherwise, ha="center", transform=axis.transAxes)
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


if __name__ == "__main__":
    main()
