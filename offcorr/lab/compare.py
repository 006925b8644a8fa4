"""``offcorr compare``: corrections side by side in one exactly solvable world, as a table and as a picture.

``offcorr.lab.exact`` does the arithmetic, ``offcorr.lab.comparison`` shows it.  Here are the command with its options,
and the time per token on this machine.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.lab import results
from offcorr.lab.comparison import COLUMNS, NOT_A_RANKING, ROUNDS, SCOPE, TIMED, Row, checked, picture, table
from offcorr.lab.contract import warn_of_failures
from offcorr.lab.exact import Setting, World, couples, measure
from offcorr.lab.processes import one_thread
from offcorr.lab.text import HelpFormatter, Progress, examples, for_a_shell
from offcorr.methods.registry import catalogue, illustration

__all__ = ["add_parser", "compare", "run"]


# -- the numbers ---------------------------------------------------------------------------------------------


DRAWS = 200
"""Batches drawn of each size, for methods that couple the sequences of a batch."""


def compare(
    world: World,
    methods: Sequence[tuple[str, Correction]],
    draws: int = DRAWS,
    report: Callable[[int, str], None] = lambda done, name: None,
    timed: bool = True,
) -> list[Row]:
    """One row per method.

    Args:
        methods: names, as they shall appear, with their corrections.
        draws: batches drawn of each size, for a method that couples the sequences of a batch.
        report: called with the number of finished methods and the name of the next.
        timed: whether the time per token is measured; where it is not, it is NaN.

    Raises:
        ValueError: a correction cannot be computed here; the message begins with its name.
    """
    aliases = {method.name: method.aliases for method in catalogue()}
    found = []
    for done, (name, loss_fn) in enumerate(methods):
        report(done, name)
        try:
            found.append(measure(world, loss_fn, draws=draws))
            if timed:
                seconds_per_token([loss_fn], rounds=1)  # the first call takes longer, and says what it lacks
        except (ValueError, TypeError) as error:
            raise ValueError(f"METHOD {name!r} cannot be compared: {error}") from error
    seconds = seconds_per_token([loss_fn for _, loss_fn in methods]) if timed else [math.nan] * len(methods)
    return [
        Row(name, aliases.get(name, ()), loss_fn, measured, spent)
        for (name, loss_fn), measured, spent in zip(methods, found, seconds, strict=True)
    ]


def seconds_per_token(loss_fns: Sequence[Correction], rounds: int = ROUNDS) -> list[float]:
    """The shortest CPU time of loss and gradient, per token, of each correction, on one thread.

    They take turns, so that other work on the machine slows a round of all of them rather than one method.
    """
    batch = _timed_batch()
    with one_thread():
        taken = [[_spent(loss_fn, batch) for loss_fn in loss_fns] for _ in range(rounds)]
    return [min(times) / batch.logp.numel() for times in zip(*taken, strict=True)]


def _spent(loss_fn: Correction, batch: Batch) -> float:
    """The CPU time (seconds) of one loss and gradient."""
    loss_fn, fresh = loss_fn.with_max_length(TIMED[1]), copy.copy(batch)  # a batch that is used keeps its padded view
    begin = time.process_time()
    loss_fn(fresh).loss.backward()
    return time.process_time() - begin


def _timed_batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    logp = -torch.rand(TIMED, generator=draw) - 0.5
    old_logp = logp + 0.05 * torch.randn(TIMED, generator=draw)
    return Batch(
        logp=logp.requires_grad_(),
        old_logp=old_logp,
        rollout_logp=old_logp + 0.01 * torch.randn(TIMED, generator=draw),
        advantages=torch.randn(TIMED[0], generator=draw),
        mask=torch.ones(TIMED, dtype=torch.bool),
        rewards=torch.randint(2, TIMED[:1], generator=draw).float(),
        group_ids=torch.arange(TIMED[0]) // 8,
        entropy=torch.rand(TIMED, generator=draw),
        sum_sq_probs=torch.rand(TIMED, generator=draw),
    )


def as_data(world: World, rows: Sequence[Row], elapsed: float) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    return {
        "setting": dataclasses.asdict(world.setting),
        "sequences": world.tree.sequences,
        "distances": world.distances(),
        "success": {"sampler": world.success(world.engine), "trainer": world.success(world.trainer)},
        "columns": {column.key: column.formula for column in COLUMNS},
        "note": f"{SCOPE} {NOT_A_RANKING}",
        "elapsed": round(elapsed, 2),
        "methods": [
            {
                **checked(row),
                "aliases": list(row.aliases),
                "config": row.loss_fn.to_config(),
                "drawn": row.measured.drawn,
                **{column.key: column.value(row) for column in COLUMNS},
            }
            for row in rows
        ],
    }


# -- the command ---------------------------------------------------------------------------------------------


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Adds the argument METHOD ..., for ``named_methods``."""
    parser.add_argument(
        "methods",
        nargs="*",
        metavar="METHOD",
        help="a name with or without options ('minpro?eps_high=0.3'), or file.py:method; an option without a default "
        "has the value of an illustration unless it is given; default: every method",
    )


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``compare``."""
    default = Setting()
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="methods side by side: bias, variance and direction of their gradients, computed exactly",
        description="Corrections side by side, for a policy so small that every sequence it can produce is enumerated: "
        "bias, variance and direction of the gradient against the true one, the effect on the tokens, and the time "
        "per token. The caption below the table explains each column. All methods together take 10 to 30 s on one "
        "core.\n\n"
        "Staleness: the sampler's weights are older than the trainer's. Engine mismatch: the engine computes other "
        "log-probs than the trainer from the same weights. ESS: effective sample size, (sum w)^2 / sum w^2 of the "
        "importance weights w.",
        formatter_class=HelpFormatter,
        epilog=examples(
            "offcorr compare ppo minpro 'minpro?eps_high=0.3' --gap 0.8",
            "offcorr compare ppo mine.py:my_method",
            "offcorr compare --regime noise --engine-gap 0.05 --output compare.png",
        ),
    )
    add = parser.add_argument
    add_methods(parser)
    add(
        "--gap",
        type=float,
        default=default.gap,
        metavar="SHARE",
        help="staleness, as the share of the samples that it costs, from 0 (on-policy) to below 1: 1 - ESS / n over "
        "the n sequences (default %(default)s)",
    )
    add(
        "--regime",
        metavar="NAME",
        help="what has happened to the trainer's policy since it sampled: stale (8 natural-gradient steps), noise (a "
        "random change of every logit), drift (both), early (a random change at the first two tokens alone) "
        f"(default {default.regime})",
    )
    add(
        "--engine-gap",
        type=float,
        default=default.engine_gap,
        metavar="SHARE",
        help="engine mismatch, in the unit of --gap (default: none)",
    )
    add(
        "--engine-regime",
        metavar="NAME",
        help="how the engine differs: noise (a random change of every logit), quantised (logits on a coarse grid), "
        f"sharper or flatter (a temperature below or above 1) (default {default.engine_regime})",
    )
    add("--length", type=int, default=default.length, metavar="N", help="tokens per sequence (default %(default)s)")
    add(
        "--vocabulary",
        type=int,
        default=default.vocabulary,
        metavar="N",
        help="number of symbols that a token can be (default %(default)s)",
    )
    add(
        "--policy",
        default=default.policy,
        metavar="NAME",
        help="tabular (free logits after every prefix) or tied (logits that share 32 parameters) (default %(default)s)",
    )
    add(
        "--advantages",
        default=default.advantages,
        metavar="NAME",
        help="grpo ((reward - mean) / sd, one per sequence) or per-token (the true advantage of each token) "
        "(default %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=default.seed,
        metavar="N",
        help="seed of the policy, the reward and the drawn batches (default %(default)s)",
    )
    add(
        "--draws",
        type=int,
        metavar="N",
        help=f"batches drawn of each size, for methods that use statistics of the batch (default {DRAWS})",
    )
    add("--json", action="store_true", help="print JSON, with every column, instead of the table")
    add("--output", type=Path, metavar="FILE.png", help="also draw a picture (needs matplotlib)")
    add("--overwrite", action="store_true", help="replace the file of --output if it exists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    begin = time.perf_counter()
    try:
        setting = _setting(options)
        results.check_overwrite(options.overwrite, output=options.output)
        results.check_picture("--output", options.output)
        if options.output is not None:
            results.free(options.output, options.overwrite)
        draws = DRAWS if options.draws is None else options.draws
        if draws < 2:
            raise ValueError(f"--draws is {draws}, expected at least 2 batches")
        for spec in options.methods:
            if spec.endswith((".json", ".png")):
                raise ValueError(f"METHOD {spec!r} is a file's name: write --json > FILE, or --output FILE.png")
        methods = named_methods(options.methods)
        if options.draws is not None and not any(couples(loss_fn) for _, loss_fn in methods):
            said = "no METHOD here uses statistics of the batch, so it has no effect"
            print(f"offcorr compare: --draws is {draws}, but {said}", file=sys.stderr)
        failing = warn_of_failures(options.methods)
        with one_thread(), Progress(len(methods), _plan(setting, methods, draws)) as progress:
            world = _as_option(lambda: World.of(setting))
            rows = compare(world, methods, draws, progress)
        rows = [row._replace(fails=failing.get(row.name, "")) for row in rows]
    except ValueError as error:
        print(f"offcorr compare: error: {error}", file=sys.stderr)
        return 2
    elapsed = time.perf_counter() - begin
    if options.json:
        text = json.dumps(as_data(world, rows, elapsed), indent=1, allow_nan=False)
    else:
        text = table(world, rows, shutil.get_terminal_size((110, 24)).columns)
        if options.output is None:
            text += "\n\n--output compare.png draws this; --json prints every number."
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `offcorr compare | head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if options.output is not None:
        picture(world, rows, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _plan(setting: Setting, methods: Sequence[tuple[str, Correction]], draws: int) -> str:
    """The first line of the progress: the work, and an estimate of its time, from a fast core to a slow one."""
    sequences, coupled = setting.vocabulary**setting.length, sum(couples(loss_fn) for _, loss_fn in methods)
    world = sequences * (8e-5 if setting.policy == "tied" else 1e-5)
    seconds = 1 + world + len(methods) * (0.03 + 4e-6 * sequences) + 1.2 * coupled * draws / 200
    about, many = 5 * math.ceil(seconds / 5), "" if len(methods) == 1 else "s"
    work = f"{len(methods)} method{many} over {sequences:,} sequences"
    return f"offcorr compare: {work}, about {about} s, up to {3 * about} on a slow core"


def _setting(options: argparse.Namespace) -> Setting:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)}
    setting: Setting = _as_option(
        lambda: Setting(**{name: value for name, value in given.items() if value is not None})
    )
    for regime, gap in (("regime", "gap"), ("engine_regime", "engine_gap")):
        if given[regime] is not None and not given[gap]:
            raise ValueError(
                f"--{regime.replace('_', '-')} is {given[regime]!r}, but --{gap.replace('_', '-')} is 0, so it has no "
                "effect; give a gap, or leave it out"
            )
    return setting


def _as_option(make: Callable[[], Any]) -> Any:
    """``make()``, with the field that an error begins with named as the option."""
    try:
        return make()
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from error


def named_methods(specs: Sequence[str]) -> list[tuple[str, Correction]]:
    """The corrections by the names under which they were asked for; without any, every method once.

    Options that have no default and are not given have the values of ``Method.example``; ``illustrated`` names them.
    """
    specs = specs or [method.name for method in catalogue()]
    found: list[tuple[str, Correction]] = []
    for spec in specs:
        if spec in dict(found):
            raise ValueError(f"METHOD {spec!r} is given twice")
        try:
            found.append((spec, illustration(spec)))
        except Exception as error:  # a user's file may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            told = for_a_shell(f"{kind}{error}")
            named = told.startswith(f"unknown method {spec.partition('?')[0]!r}")
            raise ValueError(told if named else f"METHOD {spec!r}: {told}") from error
    return found
