"""``offcorr bench arena``: GRPO training of a small model on the toy task, one run per method, sampler and seed.

A run is recipes/grpo.py with a sampler of a chosen lag and precision, and the weights that sampled as the anchor.  Runs
that are paired by seed share the warm-started model, the prompts and the seed of every draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import offcorr
from offcorr.folders import check_writable
from offcorr.lab import arena_report, results
from offcorr.lab.contract import warn_of_failures
from offcorr.lab.text import HelpFormatter, duration, examples, for_a_shell
from offcorr.optional import RECIPE_NEEDS, configuration, recipes, require
from offcorr.training.ess_lr import RULES
from offcorr.training.precision import Precision

__all__ = ["GRIDS", "Grid", "Run", "add_parser", "train"]

Cell = tuple[int, str]
"""Lag and precision of a sampler."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        learning_rate: None: that of the configuration file.
        model: "toy", or a hub model, whose task and batch ``config`` gives.
        config: a YAML file of the recipe; None: the recipe's defaults.
        ess_lr: the rule by which each step's learning rate follows the effective sample size; None: it does not.

    >>> Run("minpro", lag=16, precision="int8", seed=0).flags["loss_type"]
    'offcorr:minpro'
    """

    method: str
    lag: int
    precision: str
    seed: int
    updates: int = 160
    learning_rate: float | None = 5e-4
    model: str = "toy"
    config: str | None = None
    ess_lr: str | None = None

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of recipes/grpo.py, without the folder of its output."""
        flags = {
            "config": self.config,
            "model": self.model,
            "loss_type": self.method if ":" in self.method else f"offcorr:{self.method}",
            "anchor": "snapshot",
            "lag": self.lag,
            "precision": self.precision,
            "seed": self.seed,
            "max_steps": self.updates,
            "eval_steps": max(4, self.updates // 10),
            "learning_rate": self.learning_rate,
            "ess_lr": self.ess_lr,
            "steps_per_generation": 1,
            "log_metrics": "full",
            "picture": False,
            "disable_tqdm": True,
        }
        return {name: value for name, value in flags.items() if value is not None}

    @cached_property
    def setting(self) -> dict[str, Any]:
        """Everything that decides the numbers of the run: fields, the correction with all its options, versions."""
        correction = offcorr.resolve(self.method).to_config()
        fields = dataclasses.asdict(self)
        if self.ess_lr is None:
            del fields["ess_lr"]  # so that records made before there was this field keep their names
        return fields | {"correction": correction, "versions": results.about("", {})["versions"]}

    @cached_property
    def name(self) -> str:
        """The name of the run's files: readable, and another one for every other setting."""
        digest = hashlib.sha256(json.dumps(self.setting, sort_keys=True, default=str).encode()).hexdigest()[:8]
        method = re.sub(r"[^\w.=-]+", "-", arena_report.trained(self.setting))
        return f"{method}_lag{self.lag}_{self.precision}_seed{self.seed}_{digest}"

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        return f"{arena_report.trained(self.setting)}, lag {self.lag}, {self.precision}{rate}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """The runs of a benchmark: every method in every cell, with every rule and value of the learning rate and seed."""

    methods: tuple[str, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    updates: int = 160
    learning_rates: tuple[float | None, ...] = (5e-4,)
    model: str = "toy"
    config: str | None = None
    ess_lr: tuple[str | None, ...] = (None,)

    @property
    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that what is finished early already compares all methods.

        >>> len(GRIDS["quick"].runs)
        6
        """
        return [
            Run(method, *cell, seed, self.updates, rate, self.model, self.config, rule)
            for seed, cell, method, rule, rate in product(
                self.seeds, self.cells, self.methods, self.ess_lr, self.learning_rates
            )
        ]


METHODS = ("reinforce", "ppo", "token_is", "cispo", "gspo", "minpro", "ctpo", "topr", "near_overlap")
GRIDS = {
    "default": Grid(METHODS, ((0, "fp32"), (4, "int8"), (16, "int8"), (64, "int8"), (16, "int4")), (0, 1, 2)),
    "quick": Grid(("reinforce", "gspo", "minpro"), ((16, "int8"),), (0, 1)),
    "gpu": Grid(
        METHODS,
        tuple(product((0, 4, 16, 64), ("bf16", "fp8_e4m3", "int4"))),
        (0, 1, 2),
        updates=400,
        learning_rates=(None,),
        model="Qwen/Qwen3-0.6B",
        config="gsm8k",
    ),
}
"""Every lag and precision occurs in the default grid, but not every pair of them, which would take two hours more."""

STARTING, SECONDS = 10, 50
"""The imports of a worker, and a run of 160 updates on one core of two that are both busy: for the first estimate."""


# -- running -------------------------------------------------------------------------------------------------


# One thread each: the workers share the cores, and a model this small gains nothing from more.  glibc would give the
# memory of every larger tensor back to the system and take it anew, which costs 15 % of a run.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
    "MALLOC_TOP_PAD_": str(2**26),
}


class Worker:
    """A process that does jobs one after another (``offcorr.lab.arena_worker``)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offcorr.lab.arena_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the workers
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def begin(self, job: Mapping[str, Any]) -> None:
        print(json.dumps(job), file=self.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Exit code and error of the job that has ended; a killed process has the negative number of its signal."""
        line = self.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self.process.wait()
        return {"exit_code": code, "error": f"the process of the run ended with exit code {code}"}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


def train(runs: Sequence[Run], folder: Path, processes: int) -> list[dict[str, Any]]:
    """Returns the records of all runs, in their order; runs that finished in an earlier call are read from ``folder``.

    A record has the run's ``setting``, its ``exit_code`` and ``error``, ``seconds``, the held-out accuracy, and the
    metrics by name, as lists of steps and values.  A run that failed is recorded, too, and is run anew by a later call.
    """
    records = {run: record for run in runs if (record := _finished(run, folder))}
    waiting = [run for run in runs if run not in records]
    if records:
        _say(f"{len(records)} of {len(runs)} runs are finished already, in {folder}")
    with ExitStack() as stack:
        workers = Workers(processes, stack)
        # One after another would leave cores idle, and runs that begin at once would all make the same one.
        seeds = sorted({run.seed for run in waiting if run.model == "toy"})
        if seeds:
            _say(f"warm start of the seeds {', '.join(map(str, seeds))}: half a minute each, where it is not cached")
        jobs = {seed: {"warm_start": seed, "output": str(folder / f"warm_start_{seed}.txt")} for seed in seeds}
        for seed, answer in workers.do(jobs):
            if answer["exit_code"]:
                _say(f"the warm start of seed {seed} failed, and so will its runs: {answer['error']}")
        log = RunLog(waiting, folder, processes)
        for run, answer in workers.do({run: _job(run, folder) for run in waiting}, log.tick):
            records[run] = _record(run, folder, answer)
            results.save(records[run], _file(run, folder))
            log.ended(run, records[run])
    return [records[run] for run in runs]


class Workers:
    """At most ``processes`` workers, which are killed when ``stack`` closes."""

    def __init__(self, processes: int, stack: ExitStack) -> None:
        self.processes, self.stack = processes, stack
        self.idle: list[Worker] = []

    def do(
        self, jobs: Mapping[Any, dict[str, Any]], tick: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Does the jobs; yields the name of each with its answer and its seconds as it ends; calls ``tick`` between.

        A worker whose job failed does no other.
        """
        waiting = list(jobs)
        running: dict[Worker, tuple[Any, float]] = {}
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < self.processes:
                    worker, name = self.idle.pop() if self.idle else self._started(), waiting.pop(0)
                    worker.begin(jobs[name])
                    running[worker] = name, time.monotonic()
                    selector.register(worker.stdout, selectors.EVENT_READ, worker)
                for key, _ in selector.select(timeout=5):
                    worker = key.data
                    selector.unregister(worker.stdout)
                    name, began = running.pop(worker)
                    answer = worker.answer()
                    if answer["exit_code"]:
                        worker.end()
                    else:
                        self.idle.append(worker)
                    yield name, answer | {"seconds": time.monotonic() - began}
                tick()

    def _started(self) -> Worker:
        worker = Worker()
        self.stack.callback(worker.end)
        return worker


def _file(run: Run, folder: Path) -> Path:
    return folder / f"{run.name}.json"


def _job(run: Run, folder: Path) -> dict[str, Any]:
    """The worker's job; what an unfinished run of the same name left is removed."""
    own = folder / run.name
    (own / "history.json").unlink(missing_ok=True)
    flags = run.flags | ({"config": configuration("--config", run.config, "configs")} if run.config else {})
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return {
        "recipe": str(recipes() / "grpo.py"),
        "argv": [*argv, "--output_dir", str(own)],
        "output": str(own / "output.txt"),
    }


def _finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """The record of a run that ended without an error in an earlier call."""
    file = _file(run, folder)
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"exit_code": None}
    return record if record["exit_code"] == 0 else None


def _history(run: Run, folder: Path) -> list[dict[str, Any]]:
    file = folder / run.name / "history.json"
    return json.loads(file.read_text()) if file.exists() else []


def _record(run: Run, folder: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run that has ended, from the history that the recipe wrote."""
    logs = _history(run, folder)
    metrics = {name: _series(logs, name) for name in arena_report.METRICS if any(name in entry for entry in logs)}
    return {"setting": run.setting, **answer, "held_out": _series(logs, "eval_reward"), "metrics": metrics}


def _series(logs: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[float]]:
    pairs = [(entry["step"], entry[name]) for entry in logs if name in entry]
    return {"step": [step for step, _ in pairs], "value": [value for _, value in pairs]}


class RunLog:
    """Lines on stderr, with a terminal and without: one for every run that ends, and one a minute."""

    def __init__(self, runs: Sequence[Run], folder: Path, processes: int) -> None:
        self.unfinished, self.folder, self.total = list(runs), folder, len(runs)
        self.updates = sum(run.updates for run in runs)
        self.done, self.failed = 0, 0
        self.began = self.said = time.monotonic()
        if runs:
            seconds = STARTING + SECONDS * self.updates / 160 / processes
            guess = f", about {duration(seconds)} on idle cores like ours" if runs[0].model == "toy" else ""
            _say(f"{len(runs)} runs, {processes} at a time{guess}; one file each in {folder}")

    def ended(self, run: Run, record: Mapping[str, Any]) -> None:
        self.unfinished.remove(run)
        self.done += run.updates
        if record["exit_code"]:
            outcome = f"FAILED: {record['error']} ({self.folder / run.name / 'output.txt'})"
        else:
            curve = arena_report.Curve.of(record)
            outcome = f"AUC {curve.auc:.3f}, final {curve.final:.3f}{', COLLAPSED' if curve.collapse else ''}"
        count = f"{self.total - len(self.unfinished)} of {self.total}"
        _say(f"{count}  {run}: {outcome}, {record['seconds']:.0f} s; {self._left()}")
        self.said = time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self.said >= 60:
            self.said = time.monotonic()
            _say(f"{self.total - len(self.unfinished)} of {self.total}  {self._left()}")

    def _left(self) -> str:
        partial = sum(entries[-1]["step"] for run in self.unfinished if (entries := _history(run, self.folder)))
        done, elapsed = self.done + partial, time.monotonic() - self.began
        return f"about {duration(elapsed * (self.updates - done) / done)} left" if done else "starting"


def _say(text: str) -> None:
    print(f"offcorr bench arena: {text}", file=sys.stderr, flush=True)


# -- the command ----------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``arena``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "arena",
        help="real GRPO training of a small model on the toy task; default: about an hour on two cores",
        description="Trains a small model with GRPO on the toy task, once per method, sampler and seed, several runs "
        "at a time. Every finished run is a file in --folder: if the command was stopped, the same one goes on from "
        "there. Prints and writes accuracy, collapses, paired differences, and which metric warned of a collapse how "
        "early.",
        formatter_class=HelpFormatter,
        epilog=examples(
            "offcorr bench arena --quick",
            "offcorr bench arena minpro 'minpro?eps_high=0.3' --lags 16 64 --precisions int8 --seeds 0 1 2 3 4 5",
        ),
    )
    add = parser.add_argument
    add("methods", nargs="*", metavar="METHOD", help="a name with or without options, or file.py:method")
    add("--grid", choices=tuple(GRIDS), help="the settings that the flags below do not give (default: default)")
    add(
        "--quick",
        action="store_true",
        help="the same as --grid quick: three methods, one sampler, two seeds; 5 minutes",
    )
    add(
        "--lags",
        type=int,
        nargs="+",
        metavar="N",
        help="ages of the sampler's weights in optimizer updates, each with every precision",
    )
    add("--precisions", nargs="+", metavar="NAME", help="number formats of its weights: fp32, int8 (the default) ...")
    add("--seeds", type=int, nargs="+", metavar="N", help="seeds, a run each")
    add("--updates", type=int, metavar="N", help="optimizer updates per run")
    add("--learning-rates", type=float, nargs="+", metavar="RATE", help="learning rates, a run each")
    add(
        "--ess-lr",
        nargs="+",
        choices=("none", *RULES),
        metavar="RULE",
        help=f"scale the learning rate of each step by its effective sample size: {', '.join(RULES)}, or none (the "
        "default); several: every method with each, in rows of their own",
    )
    add("--model", metavar="HUB_NAME", help="a model in place of the toy one; task and batch are those of --config")
    add("--config", metavar="FILE.yaml", help="a configuration of `offcorr train`; default with --model: gsm8k")
    add("--processes", type=int, metavar="N", help="runs at a time (default: one per core; with --model one)")
    add("--folder", type=Path, default=Path("runs/arena"), help="where the runs go (default: %(default)s)")
    add("--output", type=Path, metavar="FILE.json", help="the report (default: report.json in the folder of the runs)")
    add("--overwrite", action="store_true", help="replace the file of --output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code: 1 if a run failed, 2 if the command cannot run as it was given."""
    try:
        grid = _grid(options)
        check_writable("--folder", options.folder)
        results.check_overwrite(options.overwrite, output=options.output)
        output = results.free(options.output or options.folder / "report.json", options.overwrite or not options.output)
        require("offcorr bench arena", RECIPE_NEEDS, extra="recipes")
    except (ValueError, ImportError) as error:
        print(f"offcorr bench arena: error: {for_a_shell(str(error))}", file=sys.stderr)
        return 2
    failing = warn_of_failures(grid.methods)
    processes = options.processes or (1 if grid.model != "toy" else os.cpu_count() or 1)
    try:
        records = train(grid.runs, options.folder, processes)
    except KeyboardInterrupt:
        _say(f"stopped; the same command goes on from what is finished in {options.folder}")
        return 130
    report = arena_report.report(records)
    setting = dataclasses.asdict(grid)
    if grid.ess_lr == (None,):
        del setting["ess_lr"]
    results.save(results.about(_command(options), setting) | report | {"fails_check": failing}, output)
    print(arena_report.text(report))
    print(f"numbers: {output}")
    for picture in arena_report.pictures(report, output):
        print(f"picture: {picture}")
    return int(any(record["exit_code"] for record in records))


def _grid(options: argparse.Namespace) -> Grid:
    """The grid that the flags ask for.

    Raises:
        ValueError: a flag has a value that it cannot have.
    """
    if options.quick and options.grid not in (None, "quick"):
        raise ValueError(f"--quick is --grid quick, and --grid is {options.grid!r}: leave one out")
    grid = GRIDS["quick" if options.quick else options.grid or "default"]
    lists = {"METHOD": options.methods, "--lags": options.lags, "--precisions": options.precisions}
    lists |= {"--seeds": options.seeds, "--learning-rates": options.learning_rates, "--ess-lr": options.ess_lr}
    for flag, values in lists.items():
        if twice := [value for value in values or () if values.count(value) > 1]:
            raise ValueError(f"{flag} {twice[0]!r} is given twice")
    for flag, values, least in (
        ("--lags", options.lags or (), 0),
        ("--seeds", options.seeds or (), 0),
        ("--updates", [options.updates] if options.updates is not None else (), 1),
        ("--processes", [options.processes] if options.processes is not None else (), 1),
    ):
        if wrong := [value for value in values if value < least]:
            raise ValueError(f"{flag} is {wrong[0]}, expected {least} or more")
    if wrong_rates := [rate for rate in options.learning_rates or () if not rate > 0]:
        raise ValueError(f"--learning-rates is {wrong_rates[0]}, expected numbers above 0")
    for name in options.precisions or ():
        Precision.named(name)
    for method in options.methods:
        offcorr.resolve(method)
    if options.config:
        configuration("--config", options.config, "configs")

    given: dict[str, Any] = {}
    for name in ("methods", "seeds", "learning_rates", "updates", "model", "config"):
        if (value := getattr(options, name)) not in (None, []):
            given[name] = tuple(value) if isinstance(value, list) else value
    if options.ess_lr:
        given["ess_lr"] = tuple(None if rule == "none" else rule for rule in options.ess_lr)
    if options.lags or options.precisions:
        given["cells"] = tuple(product(options.lags or (16,), options.precisions or ("int8",)))
    if options.model not in (None, "toy") and not grid.config:
        given.setdefault("config", "gsm8k")
        given.setdefault("learning_rates", (None,))
    return dataclasses.replace(grid, **given)


def _command(options: argparse.Namespace) -> str:
    """The command that repeats the benchmark, without the flags that do not change its numbers."""
    words = ["offcorr", "bench", "arena", *options.methods]
    flags = ("grid", "quick", "lags", "precisions", "seeds", "updates", "learning_rates", "ess_lr", "model", "config")
    for name in flags:
        value = getattr(options, name)
        if value not in (None, False):
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    return shlex.join(words)
