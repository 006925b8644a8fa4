"""The effect of a correction: the same run three times, at lag 16 with an int8 sampler.

    make demo            # or: python recipes/demo.py [--short]

TRL's default loss, MinPRO and CTPO, side by side: held-out sampled accuracy at start, peak and end, the mismatch
between the policies, and how each correction's update differs from that with the plain ratio.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offcorr import toy
from offcorr.flags import Parser
from offcorr.folders import check_writable
from offcorr.lab.text import listed

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where installed, warns that it found nothing else

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from grpo import (  # noqa: E402
    ALIKE,
    EFFECT,
    MISMATCH,
    accuracy,
    caption,
    diagnose,
    lines,
    means,
    sampled_by_model,
    series,
    shortened,
    to_scale,
)

LAG, PRECISION = 16, "int8"
SHORT = 12  # updates of a run of --short
DUMPS = 16  # updates of a run whose sequences are written to its folder rollouts, or all of a shorter one
EVERY = 30  # seconds between two lines of progress of a run, where there is no terminal for a bar
COST = {
    "full": "This takes 4 to 9 minutes on two cores, and 2.5 GB of memory; no GPU, no download.",
    "short": "This takes one to three minutes on two cores, and 2.5 GB of memory; no GPU, no download.",
}


class Run(NamedTuple):
    title: str
    flags: tuple[str, ...]
    anchor: str

    @property
    def corrects(self) -> bool:
        """Whether it has a correction: its flags name one, rather than leave TRL's own loss in place."""
        return "--loss_type" in self.flags


RUNS = {
    "trl": Run("TRL's default", (), "recomputed"),
    "minpro": Run("MinPRO", ("--loss_type", "minpro", "--anchor", "snapshot"), "snapshot"),
    "ctpo": Run("CTPO", ("--loss_type", "ctpo", "--anchor", "snapshot"), "snapshot"),
}
SETTING = """\
A model of 0.1 million parameters learns arithmetic with GRPO, three times, from one start.
The sampler is {lag} optimizer updates behind the trainer{short}, with {precision} weights.
  TRL's default  the loss of a plain GRPOConfig, one update per generation: its anchor is
                 recomputed with the current weights, so every ratio is 1 at any lag
                 (TRL's use_vllm=True adds an engine weight to it, which this run has not)
  MinPRO, CTPO   --loss_type minpro, ctpo: their anchor is a snapshot, the log-probs of
                 the weights that sampled, in the trainer's precision"""


def opening(steps: int) -> str:
    """Model, sampler and the three losses; samples are never older than the run, so a short one stays below the lag."""
    short = "" if steps > LAG else f" (up to {steps - 1} updates here)"
    return SETTING.format(lag=LAG, short=short, precision=PRECISION)


def sampler(steps: int) -> str:
    """Lag and precision of the sampler, as a title."""
    short = "" if steps > LAG else f" (up to {steps - 1} updates here)"
    return f"lag {LAG}{short}, {PRECISION} sampler"


def main() -> int:
    command = os.environ.get("OFFCORR_COMMAND")  # "offcorr demo", where it runs this file
    parser = Parser(prog=command, description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few updates: too few to compare the methods")
    parser.add_argument("--output", type=Path, help="where the runs go (default: runs/demo, or runs/demo-short)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}, expected 0 or more")
    steps = SHORT if args.short else 160
    args.output = args.output or Path("runs/demo-short" if args.short else "runs/demo")
    try:
        check_writable("--output", args.output)
    except ValueError as error:
        parser.error(str(error))

    print(f"{opening(steps)}\n{COST['short' if args.short else 'full']}\n", flush=True)
    if (args.output / "demo.json").exists():
        print(f"{args.output} has an earlier demo, which is replaced; another --output keeps both\n", flush=True)
        for name in ("demo.json", "demo.png"):  # if this one is stopped, they do not stand beside its runs
            (args.output / name).unlink(missing_ok=True)
    model = toy.model_path(seed=args.seed)  # the warm start, once, with its progress bar
    print(f"Three runs of recipes/grpo.py, {steps} updates each:", flush=True)
    logs = train_all(RUNS, args.output, steps, args.seed)
    Console().print(comparison(logs, sampler(steps)))
    print(f"\n{verdict(logs, full=not args.short)}\n")
    print(f"picture: {plot(logs, args.output / 'demo.png', sampler(steps))}")
    for line in alarms(logs, args.output):
        print(line)
    kept = f" of one update in {dump_every(steps)}" * (dump_every(steps) > 1)
    print(f"sequences{kept}, with the log-probs of sampler and trainer: {args.output}/*/rollouts")
    print(f"numbers: {record(logs, args.output / 'demo.json', vars(args) | {'updates': steps})}")
    print(f"\n{next_commands(args.output / 'trl' / 'rollouts', model, args.seed)}")
    return 0


SAMPLER = {"lag": LAG, "precision": PRECISION}
"""The flags of recipes/grpo.py that choose the sampler."""


def train_all(
    runs: Mapping[str, Run],
    folder: Path,
    steps: int,
    seed: int,
    sampler: Mapping[str, Any] = SAMPLER,
    at_once: int | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """The histories of all runs, each in a process of its own.

    Args:
        sampler: flags of recipes/grpo.py that choose it.
        at_once: runs at a time; None: one more than there are cores, or the last run of an odd number would leave a
            core idle.
    """
    at_once = at_once or (os.cpu_count() or 1) + 1
    waiting, running = list(runs), {}
    accuracy = TextColumn("{task.fields[accuracy]}")
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), accuracy)
    console, began = Console(), time.monotonic()
    said = dict.fromkeys(runs, began)  # when each run's last line was printed, where there is no bar
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with bar as progress, contextlib.ExitStack() as at_the_end:
        bars = {name: progress.add_task(run.title, total=steps, start=False, accuracy="") for name, run in runs.items()}
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                progress.start_task(bars[name])
                running[name] = launch(runs[name], folder / name, steps, seed, sampler)
                at_the_end.callback(running[name].terminate)  # where another fails, or at Ctrl-C
            time.sleep(0.5)
            for name, process in list(running.items()):
                ended = process.poll() is not None
                state = progress_of(folder / name)
                progress.update(bars[name], completed=state.update, accuracy=state.shown)
                if not console.is_terminal and (ended or time.monotonic() - said[name] >= EVERY):
                    said[name] = time.monotonic()
                    print(f"  {time.monotonic() - began:4.0f} s  {runs[name].title}: {state.line(steps)}", flush=True)
                if not ended:
                    continue
                del running[name]
                progress.stop_task(bars[name])
                if process.returncode:
                    raise SystemExit(f"the run {name!r} failed; its output is in {folder / name / 'output.txt'}")
    return {name: json.loads((folder / name / "history.json").read_text()) for name in runs}


def dump_every(steps: int) -> int:
    """Updates from one dump of a run to the next."""
    return max(1, steps // DUMPS)


def launch(run: Run, folder: Path, steps: int, seed: int, sampler: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("history.json", "history.png", "summary.txt"):  # of an earlier demo, as the rollouts are
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "rollouts", ignore_errors=True)
    flags = {
        **sampler,
        "max_steps": steps,
        "eval_steps": max(4, steps // 10),
        "learning_rate": 5e-4,
        "steps_per_generation": 1,
        "seed": seed,
        "output_dir": folder,
        "disable_tqdm": True,
        "dump_rollouts": folder / "rollouts",
        "dump_every": dump_every(steps),
    }
    command = [sys.executable, str(HERE / "grpo.py"), *run.flags]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    with open(folder / "output.txt", "wb") as output:
        # One thread each: the runs share the cores, and a model this small gains nothing from more.
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


class State(NamedTuple):
    """Where a run is: its last logged update, and the held-out accuracy with its update.

    The reward of the samples is that of older weights.
    """

    update: int = 0
    accuracy: float | None = None
    measured: int = 0

    @property
    def shown(self) -> str:
        """The words beside the run's bar."""
        if self.accuracy is None:
            return "measuring accuracy"
        when = "" if self.measured == self.update else f" at update {self.measured}"
        return f"accuracy {self.accuracy:.2f}{when if self.measured else ' before training'}"

    def line(self, steps: int) -> str:
        """The line where there is no bar."""
        if self.update:
            return f"update {self.update} of {steps}, {self.shown}"
        if self.accuracy is not None:
            return f"{self.shown}; working on the first update"
        return "loading, then measuring the accuracy before training"


def progress_of(folder: Path) -> State:
    file = folder / "history.json"
    logs = json.loads(file.read_text()) if file.exists() else []
    last = max((int(entry["step"]) for entry in logs), default=0)
    measured = max((int(entry["step"]) for entry in logs if "eval_reward" in entry), default=0)
    return State(last, accuracy(logs).get("end"), measured)


def comparison(logs: dict[str, list[dict[str, Any]]], title: str) -> Table:
    table = Table(
        title=title,
        caption=f"{caption()} {ALIKE} Staleness: against the weights that sampled, which TRL's own loss ignores; its "
        "updates are fewer while a run begins. Log-ratio: the logarithm of the ratio of a token's two probabilities.",
    )
    table.add_column("", no_wrap=True)
    for name in logs:
        table.add_column(RUNS[name].title, justify="right", no_wrap=True)
    table.add_row("anchor: supplies old_logp", *(RUNS[name].anchor for name in logs), end_section=True)
    for moment in ("start", "peak", "end"):
        cells = (f"{accuracy(entries)[moment]:.3f}" for entries in logs.values())
        table.add_row(f"held-out sampled accuracy, {moment}", *cells)
    table.add_row(
        "  largest fall from a peak", *(f"{largest_fall(run):.3f}" for run in logs.values()), end_section=True
    )
    for part in (MISMATCH, EFFECT):
        for name, label in part.items():
            table.add_row(label, *(cell(run, entries, name) for run, entries in logs.items()))
        table.add_section()
    return table


def cell(run: str, entries: list[dict[str, Any]], name: str) -> str:
    """A metric's mean over a run; a loss without a correction has no effect of one."""
    if name in EFFECT and not RUNS[run].corrects:
        return "not measured"
    return shortened(means(entries, (name,))[name])


def alarms(logs: dict[str, list[dict[str, Any]]], folder: Path) -> Iterator[str]:
    """A line on each run with alarms of the monitor, and where they stand."""
    for name, entries in logs.items():
        raised = int(max(series(entries, "offcorr/monitor/alarms")[1], default=0))
        if raised:
            many = f"{raised} alarms" if raised > 1 else "one alarm"
            where = folder / name / "output.txt"
            yield f"the monitor raised {many} in the run of {RUNS[name].title}, each a warning in {where}"


def largest_fall(entries: list[dict[str, Any]]) -> float:
    """Largest fall of held-out accuracy below an earlier peak; a collapse oscillates, so its last value can mislead."""
    _, values = series(entries, "eval_reward")
    return max(max(values[: i + 1]) - value for i, value in enumerate(values))


def verdict(logs: dict[str, list[dict[str, Any]]], full: bool, age: str = f"{LAG} updates") -> str:
    """Three sentences: what happened without a correction, what with one, and what the corrections did.

    Args:
        age: of the samples, in words.
    """
    found = {name: accuracy(entries) | {"fall": largest_fall(entries)} for name, entries in logs.items()}
    own = found.pop("trl")
    course = f"accuracy went from {own['start']:.0%} to {own['end']:.0%}, with a fall of {100 * own['fall']:.0f} points"
    if not full:
        first = f"With TRL's default loss {course}; cut short, these runs compare nothing."
    elif own["fall"] < 0.2:
        first = f"With TRL's default loss {course}: on this machine the setting shows too little."
    else:
        first = (
            f"With TRL's default loss {course} from its peak on the way: the samples were {age} old, and the "
            "loss took them for new ones."
        )
    ends = listed(f"{RUNS[name].title} ended at {values['end']:.0%}" for name, values in found.items())
    falls = listed(f"{100 * values['fall']:.0f}" for values in found.values())
    second = f"From the same start and with samples as old, {ends}; their largest falls were {falls} points."
    third = f"Compared with the plain ratio, {listed(change(name, logs[name]) for name in found)}."
    return "\n".join(textwrap.fill(sentence, 88) for sentence in (first, second, third))


def change(run: str, entries: list[dict[str, Any]]) -> str:
    """What a correction did to the update, in words."""
    size, dropped, damped, amplified = (means(entries, (name,))[name] for name in list(EFFECT)[:4])
    return (
        f"{RUNS[run].title}'s mean multiplier was {size:.2f} times as large ({dropped:.0%} of the tokens dropped, "
        f"{damped:.0%} damped, {amplified:.0%} amplified)"
    )


def next_commands(dump: Path, tokenizer: str, seed: int) -> str:
    """Commands to type next, as they work in this environment.

    Args:
        dump: the folder of a run's sequences; tokenizer: that of its start model.
        seed: of the demo, so that a run begins with the same model.
    """
    model, _ = sampled_by_model(dump, [Path(dump).parent], tokenizer)
    # `make` has the environment on its PATH, where the user's shell need not have it.
    on_path = sys.prefix == sys.base_prefix or {"VIRTUAL_ENV", "CONDA_PREFIX"} & os.environ.keys()
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    beside = Path(python).parent / "offcorr"
    if on_path and shutil.which("offcorr"):
        offcorr = "offcorr"
    else:
        offcorr = shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(python)} -m offcorr"
    return (
        "This was one seed at one learning rate, and is no ranking; docs/which.md compares more. Next:\n"
        "A run of your own (160 updates or --max_steps, a lower learning rate, four updates for each generation):\n"
        f"  {offcorr} train --loss_type minpro --lag {LAG} --precision {PRECISION} --seed {seed}\n"
        "Why trainer and sampler disagree in a run:\n"
        f"  {diagnose(dump, tokenizer, model, offcorr='OFFCORR').replace('OFFCORR', offcorr, 1)}\n"
        "What a method is:\n"
        f"  {offcorr} methods minpro\n"
        "Bias and variance of several, in seconds:\n"
        f"  {offcorr} compare minpro ctpo cispo"
    )


def record(
    logs: dict[str, list[dict[str, Any]]], file: Path, settings: dict[str, Any], sampler: Mapping[str, Any] = SAMPLER
) -> Path:
    """Writes the numbers of the table and the curves, with machine and versions."""
    packages = ("torch", "transformers", "trl", "accelerate", "reasoning-gym", "offcorr")
    report = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "settings": {name: str(value) for name, value in settings.items()} | dict(sampler),
        "runs": {
            name: {
                "anchor": RUNS[name].anchor,
                "accuracy": accuracy(entries) | {"largest_fall": largest_fall(entries)},
                "means": means(entries, (*MISMATCH, *EFFECT)),
                "held_out": dict(zip(("step", "accuracy"), series(entries, "eval_reward"), strict=True)),
            }
            for name, entries in logs.items()
        },
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    return file


def changed(entry: dict[str, Any]) -> dict[str, float]:
    """The share of the tokens with an advantage that the correction dropped, damped or amplified."""
    _, *shares = list(EFFECT)[:4]
    return {"changed": sum(entry[name] for name in shares)} if shares[0] in entry else {}


def plot(logs: dict[str, list[dict[str, Any]]], file: Path, title: str) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("eval_reward", "held-out sampled accuracy"),
        ("offcorr/staleness/abs_mean", "staleness: mean |log-ratio|, nats"),
        ("offcorr/engine/abs_mean", "engine mismatch: mean |log-ratio|, nats"),
        ("offcorr/loss/multiplier_vs_ratio", "mean multiplier, plain ratio = 1"),
        ("changed", "tokens dropped, damped or amplified"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(21, 4), constrained_layout=True)
    for axis, (name, label) in zip(axes, panels, strict=True):
        for colour, (run, entries) in enumerate(logs.items()):
            drawn = lines([entry | changed(entry) for entry in entries], (name,))
            for steps, values in drawn.values():
                style = {"color": f"C{colour}", "marker": "o" if name == "eval_reward" else ""}
                axis.plot(steps, values, label=RUNS[run].title, **style)
        axis.set(xlabel="optimizer update", title=label)
        if axis.get_lines():
            to_scale(axis, name)
            axis.legend()
        else:
            axis.text(0.5, 0.5, "0 throughout", ha="center", transform=axis.transAxes)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as at Ctrl-C: the runs end with it
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; nothing was compared", file=sys.stderr)
        sys.exit(130)
