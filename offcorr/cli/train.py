"""``offcorr train`` and ``offcorr demo``: the recipes, run from the installed package."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offcorr.cli.early import check
from offcorr.cli.launch import launch
from offcorr.cli.output import Refusal
from offcorr.folders import check_writable
from offcorr.lab.text import HelpFormatter, examples
from offcorr.optional import RECIPE_NEEDS, configuration, configuration_keys, configurations, recipes, require

TRAIN = """\
Trains with GRPO and a correction: any model, any verifiable task, a sampler with a chosen lag and precision.

  offcorr train                                                # a toy model, samples up to 3 updates old, on a CPU
  offcorr train --loss_type minpro --lag 16 --precision int8   # the same with an old, quantised sampler
  offcorr train --config run.yaml --learning_rate 1e-6         # a file, and a flag that wins over it
  offcorr train --num_processes 2 --config run.yaml            # two processes

--config: a YAML file whose keys are the flags; these come with offcorr: {configs}
--num_processes: number of processes; more than one are started by `accelerate launch`
--config_file: an accelerate configuration; these come with offcorr: {accelerate}

--loss_type: the method (`offcorr methods` lists them); --loss_kwargs: its options as JSON, '{{"eps_high": 0.28}}'
--lag: how many optimizer updates old the sampler's weights are when it samples; a generation serves four updates
(--steps_per_generation), so its samples become up to three older
--precision: their number format: fp32, bf16, int8 ...

Every other flag goes to the recipe: each option of TRL's GRPOConfig, and the recipe's own --model, --task, --sampler, \
--sync_every, --train_size, --eval_size and --picture. `offcorr train --help-all` lists them.
The recipe is one file, to be read and copied: {recipe}"""

DEMO = """\
Trains a small model three times with a sampler that is 16 optimizer updates behind: with TRL's loss, MinPRO and CTPO. \
The first lines say how long it takes. `offcorr methods minpro ctpo` explains the two corrections."""


LOADING = "loading TRL and transformers, which takes some seconds ..."


def add_parser(commands: Any) -> None:
    """Adds the subcommands ``train``, whose flags but --help go to the recipe, and ``demo``."""
    train = commands.add_parser(
        "train",
        help="train with GRPO and a correction",
        usage="offcorr train [--config FILE.yaml] [--num_processes N] [--config_file ACCELERATE.yaml] [flags]",
        formatter_class=HelpFormatter,
        description=TRAIN.format(
            recipe=_shown(recipes() / "grpo.py"),
            configs=", ".join(configurations("configs")),
            accelerate=", ".join(configurations("accelerate")),
        ),
    )
    train.set_defaults(run=run_train)
    demo = commands.add_parser(
        "demo",
        help="three short training runs with an old, quantised sampler: TRL's loss, MinPRO and CTPO",
        formatter_class=HelpFormatter,
        description=DEMO,
        epilog=examples("offcorr demo", "offcorr demo --short --output runs/try"),
    )
    demo.add_argument("--short", action="store_true", help="a few updates: too few to compare the methods")
    demo.add_argument(
        "--output", metavar="FOLDER", help="where the runs go (default: runs/demo, or runs/demo-short with --short)"
    )
    demo.add_argument("--seed", type=int, metavar="N", help="seed of the model, the task and the samples (default 0)")
    demo.set_defaults(run=run_demo)


def run_train(options: argparse.Namespace) -> int:
    """Runs recipes/grpo.py in this process, or under ``accelerate launch`` where several processes are asked for."""
    flags = list(options.flags)
    count = _taken(flags, "--num_processes")
    accelerate = _taken(flags, "--config_file")
    if count is not None and not (count.isdecimal() and int(count) > 0):
        raise Refusal(f"--num_processes is {count!r}, expected 1, 2, ...")
    launcher: list[str] = []
    if accelerate is not None:
        launcher = ["--config_file", _file("--config_file", accelerate, "accelerate")]
        launcher += ["--num_processes", count] if count else []
    elif count is not None and int(count) > 1:
        launcher = [*_several(int(count)), "--num_processes", count]
    config = _taken(flags, "--config")
    if config is not None:
        flags = ["--config", _file("--config", config, "configs"), *flags]
    _need("offcorr train")
    if config is not None:
        _check_keys(Path(flags[1]))
    recipe = recipes() / "grpo.py"
    if "--help-all" not in flags:
        own, file = (flags, None) if config is None else (flags[2:], Path(flags[1]))
        known = count or (os.environ.get("WORLD_SIZE", "1") if accelerate is None else None)
        check(recipe, own, file, processes=None if known is None else int(known))
    flags = ["--help" if flag == "--help-all" else flag for flag in flags]
    os.environ["OFFCORR_COMMAND"] = "offcorr train"  # as which the recipe names itself, in every process
    if not launcher:
        return _run(recipe, flags)
    _say_loading()
    arguments = [*launcher, str(recipe), *flags]
    print(shlex.join(["accelerate", "launch", *arguments]), flush=True)
    return launch("offcorr train", arguments)


def run_demo(options: argparse.Namespace) -> int:
    """Runs recipes/demo.py in this process."""
    _need("offcorr demo")
    flags = ["--short"] if options.short else []
    for name in ("output", "seed"):
        value = getattr(options, name)
        flags += [] if value is None else [f"--{name}", str(value)]
    if options.output is not None:
        _check_folder("--output", options.output)
    os.environ["OFFCORR_COMMAND"] = "offcorr demo"
    return _run(recipes() / "demo.py", flags)


def _check_folder(flag: str, folder: str) -> None:
    try:
        check_writable(flag, folder)
    except ValueError as error:
        raise Refusal(str(error)) from None


def _need(command: str) -> None:
    try:
        require(command, RECIPE_NEEDS, extra="recipes")
    except ImportError as error:
        raise Refusal(str(error).removeprefix(f"{command} ")) from error


def _run(recipe: Path, flags: Sequence[str]) -> int:
    """Runs a recipe as ``python recipe.py flags`` does, in this process."""
    _say_loading()
    before = sys.argv, sys.path[:]
    sys.argv = [str(recipe), *flags]
    sys.path.insert(0, str(recipe.parent))
    try:
        runpy.run_path(str(recipe), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        raise
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _say_loading() -> None:
    """Says on stderr why nothing comes for some seconds: flags are read by TRL's parser."""
    if "trl.trainer.grpo_trainer" not in sys.modules:
        print(LOADING, file=sys.stderr, flush=True)


def _several(count: int) -> list[str]:
    """The flags of ``accelerate launch`` for several processes without a configuration file."""
    if not torch.cuda.is_available():
        return ["--config_file", str(recipes() / "accelerate" / "two_cpu_processes.yaml")]
    if count > torch.cuda.device_count():
        raise Refusal(
            f"--num_processes is {count}, but there are {torch.cuda.device_count()} GPUs; "
            "several machines need an accelerate configuration, --config_file"
        )
    return ["--multi_gpu"]


def _shown(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _file(flag: str, given: str, folder: str) -> str:
    try:
        return str(configuration(flag, given, folder))
    except ValueError as error:
        raise Refusal(str(error)) from None


def _check_keys(file: Path) -> None:
    """Refuses what is no YAML, or has a key twice, before the packages are loaded that read the values."""
    try:
        configuration_keys(file)
    except ValueError as error:
        raise Refusal(str(error)) from None


def _taken(flags: list[str], name: str) -> str | None:
    """The value of the flag ``name``, which is removed; None if it is not given."""
    for place, word in enumerate(flags):
        if word == name:
            if place + 1 == len(flags) or flags[place + 1].startswith("--"):
                raise Refusal(f"{name} has no value")
            value = flags[place + 1]
            del flags[place : place + 2]
            break
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
            del flags[place]
            break
    else:
        return None
    if any(word == name or word.startswith(f"{name}=") for word in flags):
        raise Refusal(f"{name} is given twice")
    return value
