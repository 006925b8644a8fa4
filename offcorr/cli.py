"""The command ``offcorr``: training, the demo, the comparison, lists, and the generated tables of the docs.

Every table is made from the code that it describes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import offcorr
from offcorr.correction import Correction
from offcorr.diagnose import command as diagnose_command
from offcorr.integrations import HOOKS
from offcorr.integrations.hook import Hook
from offcorr.lab import bench, compare
from offcorr.methods.registry import Method, catalogue, find, illustration, split_spec
from offcorr.metrics import LOSS, MISMATCH
from offcorr.optional import RECIPE_NEEDS, configuration, configurations, recipes, require
from offcorr.stages.ratios import Ratio
from offcorr.stages.rejections import Rejection
from offcorr.stages.weights import Weight
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import SHORT

Table = list[dict[str, str]]


def methods_table() -> Table:
    """One row per method: its stages, with the pair of policies that each compares, and its multiplier."""
    return [
        {
            "method": _names(method),
            "multiplier c": method.multiplier,
            **_stages(illustration(method.name)),
        }
        for method in catalogue()
    ]


def options_table() -> Table:
    """One row per method: its options with their defaults, the paper, and where the definition was read."""
    return [
        {
            "method and options": f"`{method.name}({_signature(method)})`",
            "paper": method.paper,
            "definition read in": method.provenance,
            "notes": method.notes,
        }
        for method in catalogue()
    ]


def metrics_table() -> Table:
    """One row per metric: its formula, whether it is of raw or applied values, and its accumulator."""
    rows = []
    for prefix, series, values in (
        ("offcorr/{engine,staleness}/", MISMATCH, "raw"),
        ("offcorr/loss/", LOSS, "applied"),
    ):
        for metric in series:
            names = ", ".join(metric.outputs or (metric.name,))
            kind = metric.kind.__name__
            rows.append({"metric": prefix + names, "formula": metric.formula, "values": values, "accumulator": kind})
    return rows


def trainers_table() -> Table:
    """One row per method: whether the loss hook of each trainer can carry it, or the reason why not."""
    return [
        {"method": _names(method), "TRL": "yes"}
        | {hook.trainer: _carried(hook, illustration(method.name)) for hook in HOOKS}
        for method in catalogue()
    ]


def _carried(hook: Hook, loss_fn: Correction) -> str:
    refusal = hook.refusal(loss_fn)
    return f"no: {refusal.words}" if refusal else "yes"


def short_table() -> Table:
    """One row per metric of the trainers' short log: the question it answers, and when it is logged."""
    return [
        {"metric": f"`{answer.name}`", "answers the question": answer.question, "logged": answer.logged}
        for answer in SHORT
    ]


def aliases_table() -> Table:
    """One row per name of another framework: the framework, and the metric or the formula behind it."""
    return [
        {"name": f"`{name}`", "framework": alias.framework, "here": alias.formula or f"offcorr/engine/{alias.source}"}
        for name, alias in ALIASES.items()
    ]


def markdown(table: Table) -> str:
    """A table as Markdown, with arXiv numbers as links."""
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([_cell(row[name]) for name in head] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str, tables: dict[str, Callable[[], Table]]) -> str:
    """``text`` with each table between ``<!-- table NAME -->`` and ``<!-- end -->`` generated anew."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(tables[match[2]]())}\n<!-- end -->"

    return re.sub(r"(<!-- table (\w+) -->)\n.*?<!-- end -->", written, text, flags=re.DOTALL)


TABLES: dict[str, Callable[[], Table]] = {
    "methods": methods_table,
    "options": options_table,
    "metrics": metrics_table,
    "trainers": trainers_table,
    "short": short_table,
    "aliases": aliases_table,
}
GENERATED = ("docs/methods.md", "docs/metrics.md", "docs/trainers.md")
PAGES = "https://github.com/offcorr/offcorr/tree/main/docs"


class Refusal(Exception):
    """A command that cannot run as it was given; the message says why and what would."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = _parser()
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if given[:1] in (["train"], ["demo"]) and not {"-h", "--help"} & set(given[1:]):
        options = argparse.Namespace(run={"train": _train, "demo": _demo}[given[0]], flags=given[1:])
    else:
        options = parser.parse_args(given)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # `offcorr methods | head` closes the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(" ".join(("offcorr", given[0], getattr(options, "world", ""))).rstrip() + ": stopped", file=sys.stderr)
        return 130
    except Refusal as refusal:
        said = str(refusal).replace("offcorr.available() lists", "`offcorr methods` lists")
        print(f"offcorr {given[0]}: {said}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offcorr",
        description="Off-policy correction for reinforcement learning of language models.",
        epilog=f"documentation: {PAGES}",
    )
    parser.add_argument("--version", action="version", version=f"offcorr {offcorr.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    # Every flag of these two but --help goes to a recipe, so main() gives them the rest of the line unread.
    train = commands.add_parser(
        "train",
        help="train with GRPO and a correction",
        usage="offcorr train [--config FILE.yaml] [--num_processes N] [--config_file ACCELERATE.yaml] [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_TRAIN.format(
            recipe=_shown(recipes() / "grpo.py"),
            configs=", ".join(configurations("configs")),
            accelerate=", ".join(configurations("accelerate")),
        ),
    )
    train.set_defaults(run=_train)
    demo = commands.add_parser(
        "demo",
        help="three short training runs with an old, quantised sampler: TRL's loss, MinPRO and CTPO",
        usage="offcorr demo [--short] [--output FOLDER] [--seed SEED]",
        description="Trains a small model three times with a sampler that is 16 optimizer updates behind, with TRL's "
        "loss, MinPRO and CTPO. The first lines say how long it takes. --short: a few updates, too few to compare; "
        "--output: where the runs go (default: runs/demo, or runs/demo-short).",
    )
    demo.set_defaults(run=_demo)
    compare.add_parser(commands)
    bench.add_parser(commands)
    diagnose_command.add_parser(commands)

    methods = commands.add_parser("methods", help="list every method; with a NAME, all about one")
    methods.add_argument(
        "names", nargs="*", metavar="NAME", help="a method, as for loss_type: minpro, 'tis?cap=3', mine.py:my_loss"
    )
    methods.set_defaults(run=_methods)
    metrics = commands.add_parser("metrics", help="list every metric")
    metrics.set_defaults(run=_metrics)
    for command in (methods, metrics):
        command.add_argument("--markdown", action="store_true", help="print a Markdown table")
    docs = commands.add_parser("docs", help="write the generated tables into the docs of a checkout")
    docs.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    docs.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout (default: the current folder)")
    docs.set_defaults(run=_docs)
    return parser


# -- training ------------------------------------------------------------------------------------------------------

_TRAIN = """\
Trains with GRPO and a correction: any model, any verifiable task, a sampler with a chosen lag and precision.

  offcorr train                                                a toy model, on-policy, in minutes on a CPU
  offcorr train --loss_type minpro --lag 16 --precision int8   the same with an old, quantised sampler
  offcorr train --config run.yaml --learning_rate 1e-6         a file, and a flag that wins over it
  offcorr train --num_processes 2 --config run.yaml            two processes, by `accelerate launch`

--config        a YAML file whose keys are the flags; these come with offcorr: {configs}
--num_processes number of processes; more than one are started by `accelerate launch`
--config_file   an accelerate configuration; these come with offcorr: {accelerate}

Every other flag goes to the recipe: each option of TRL's GRPOConfig, and the recipe's own --model, --task, --lag,
--precision, --train_size and --eval_size. `offcorr train --help-all` lists them.
The recipe is one file, to be read and copied: {recipe}"""


def _train(options: argparse.Namespace) -> int:
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
    flags = ["--help" if flag == "--help-all" else flag for flag in flags]
    recipe = recipes() / "grpo.py"
    os.environ["OFFCORR_COMMAND"] = "offcorr train"  # as which the recipe names itself, in every process
    if not launcher:
        return _run(recipe, flags)
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, str(recipe), *flags]
    print(shlex.join(command), flush=True)
    return subprocess.call(command)


def _demo(options: argparse.Namespace) -> int:
    _need("offcorr demo")
    os.environ["OFFCORR_COMMAND"] = "offcorr demo"
    return _run(recipes() / "demo.py", options.flags)


def _need(command: str) -> None:
    try:
        require(command, RECIPE_NEEDS, extra="recipes")
    except ImportError as error:
        raise Refusal(str(error).removeprefix(f"{command} ")) from error


def _run(recipe: Path, flags: Sequence[str]) -> int:
    """Runs a recipe as ``python recipe.py flags`` does, in this process."""
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


# -- lists -----------------------------------------------------------------------------------------------------------


def _methods(options: argparse.Namespace) -> int:
    if options.names:
        if options.markdown:
            raise Refusal("--markdown prints the table of all methods and takes no NAME")
        try:
            pages = [about(name, _width() or 100) for name in options.names]
        except (ValueError, TypeError) as error:
            raise Refusal(str(error)) from None
        print("\n\n".join(pages))
        return 0
    if options.markdown:
        print(markdown(methods_table()))
        return 0
    table = [
        {
            "method": _names(method),
            "multiplier": method.multiplier,
            "options": _signature(method),
            "paper": method.paper,
        }
        for method in catalogue()
    ]
    width = _width()
    print(listing(table, width))
    if width is not None:
        legend = (
            "r: a token's staleness ratio, e^(logp - old_logp); rho: its engine ratio, e^(old_logp - rollout_logp); "
        )
        legend += "R = r rho (in asymre the reward); s: a span's ratio; A: the advantage; T: the length of the span."
        print(f"\n{textwrap.fill(legend, max(20, width))}")
        hint = "`offcorr methods NAME` shows one method: formula, stages, options, notes, examples."
        print(f"\n{textwrap.fill(hint, max(20, width))}")
    return 0


def _metrics(options: argparse.Namespace) -> int:
    table = metrics_table()
    print(markdown(table) if options.markdown else listing(table, _width()))
    return 0


_SYMBOLS = (
    "r = exp(logp - old_logp), rho = exp(old_logp - rollout_logp), R = r rho; A: advantage; "
    "w_t: product of the weights, 0 where rejected; Z: denominator of the aggregation"
)


def about(spec: str, width: int) -> str:
    """A page about a method: formula, stages, options with their defaults, sources, and examples.

    Options without a default, unless they are given, have the values of ``Method.example``.

    Raises:
        ValueError: the method or an option is unknown, or a value is out of range.
    """
    method, (name, given) = find(spec), split_spec(spec)
    if isinstance(method, Correction):
        finished = method
        method = Method(name, lambda: finished, notes="a finished Correction: it takes no options")
    added = {option: value for option, value in method.example.items() if option not in given}
    loss_fn = method(**given, **added)
    own = inspect.getdoc(method.build) or ""
    one_file_each = method.build.__module__.startswith("offcorr.methods.")
    docstring = (inspect.getdoc(sys.modules[method.build.__module__]) or "") if one_file_each else own
    meaning = _arguments(own)
    options: dict[str, str] = {}  # by what they mean, since a bound's two sides may share a sentence
    for option, default in method.options.items():
        text, shown = meaning.get(option, ""), f"{option}={given.get(option, default.default)!r}"
        if option in method.required and option not in given:
            shown = f"{option} (required)"
        options[text] = f"{options[text]}, {shown}" if text in options else shown
    schedules = [f"{option}: {dict(schedule)}" for option, schedule in method.schedules.items()]
    called = name if ":" in name else f"offcorr:{method.name}"
    kwargs = json.dumps(given | added) if given or added else _first(method)
    call = "".join(f", {option}={value!r}" for option, value in added.items())
    illustrated = f"the values of {' and '.join(added)} in the lines below are an illustration, no recommendation"
    parts: dict[str, list[str]] = {
        "": [docstring.split("\n\n")[0].replace("\n", " ").replace("``", "`")],
        "gradient": ["dL/dlogp_t = -c_t w_t A_t / Z"],
        "c_t": [method.multiplier],
        "where": [_SYMBOLS],
        "stages": [f"{place}: {shown}" for place, shown in _stages(loss_fn).items() if shown != "none"],
        "needs": [", ".join(["logp", "advantages", "mask", *sorted(loss_fn.needs)])],
        "options": [f"{shown}  {text}".rstrip() for text, shown in options.items()] or ["none of its own"],
        "schedule": schedules,
        "paper": [method.paper],
        "read in": [method.provenance],
        "notes": [method.notes],
        "example": [illustrated] if added else [],
        "in TRL": [f"GRPOConfig(..., loss_type={called!r}" + (f", loss_kwargs={kwargs})" if kwargs else ")")],
        "without": [f"offcorr.{'resolve' if ':' in name else 'get'}({spec!r}{call})"],
        "try it": [f"offcorr train --loss_type {called}" + (f" --loss_kwargs '{kwargs}'" if kwargs else "")],
    }
    lines = [" = ".join((method.name, *method.aliases))]
    for label, texts in parts.items():
        for text in filter(None, texts):
            lines += textwrap.wrap(
                text,
                max(40, width - 1),
                initial_indent=f"  {label:10}",
                subsequent_indent=" " * 14,
                break_long_words=False,
                break_on_hyphens=False,
            )
            label = ""
    return "\n".join(lines)


def _first(method: Method) -> str:
    """JSON of one numeric option at its default, for an example: eps_high or the first; empty without one."""
    for name, option in sorted(method.options.items(), key=lambda item: item[0] != "eps_high"):
        if isinstance(option.default, float | int) and not isinstance(option.default, bool):
            return json.dumps({name: option.default})
    return ""


def _arguments(docstring: str) -> dict[str, str]:
    """The arguments that a docstring describes; "low, high: text" describes two."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1].rstrip()) if section else ():
        names, _, text = entry.partition(":")
        text = " ".join(text.split()).replace("``", "`")
        found |= {name.strip(): text for name in names.split(",")}
    return found


def listing(table: Table, width: int | None) -> str:
    """A table as aligned columns where they fit into ``width``, else a paragraph per row.

    Args:
        width: None: a line per row, its columns separated by tabs, for other programs.
    """
    if width is None:
        return "\n".join("\t".join(row) for row in (table[0], *(row.values() for row in table)))
    columns = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    if sum(columns.values()) + 2 * (len(columns) - 1) <= width:
        rows = ({name: name for name in columns}, *table)
        return "\n".join("  ".join(row[name].ljust(size) for name, size in columns.items()).rstrip() for row in rows)
    first, second, *others = columns
    lines = []
    for row in table:
        lines.append(row[first])
        for text in (row[second], "; ".join(f"{name}: {row[name]}" for name in others if row[name])):
            lines += textwrap.wrap(
                text,
                max(20, width),
                initial_indent="    ",
                subsequent_indent="      ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _width() -> int | None:
    """Columns of the terminal, or of the variable COLUMNS; None where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def _docs(options: argparse.Namespace) -> int:
    missing = [name for name in GENERATED if not (options.root / name).is_file()]
    if missing:
        raise Refusal(
            f"{options.root.resolve()} is not a checkout of offcorr: it has no {' and no '.join(missing)}, whose "
            f"tables this command writes. --root names the checkout; to read the pages: {PAGES}"
        )
    stale = []
    for name in GENERATED:
        text = (options.root / name).read_text()
        fresh = fill(text, TABLES)
        if fresh != text:
            stale.append(name)
            if not options.check:
                (options.root / name).write_text(fresh)
    if stale:
        print(f"{'out of date' if options.check else 'written'}: {', '.join(stale)}")
    return int(options.check and bool(stale))


def _names(method: Method) -> str:
    return " = ".join((method.name, *method.aliases))


def _signature(method: Method) -> str:
    return ", ".join(
        name if name in method.required else f"{name}={option.default!r}" for name, option in method.options.items()
    )


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return re.sub(r"(?<![\w/.])(\d{4}\.\d{5})(?!\d)", r"[\1](https://arxiv.org/abs/\1)", text)


def _stages(loss_fn: Correction) -> dict[str, str]:
    def described(stages: Any) -> str:
        stages = stages if isinstance(stages, tuple) else (stages,)
        return ", ".join(_stage(s) for s in stages if s is not None) or "none"

    return {
        "ratio": described(loss_fn.ratio),
        "weight": described(loss_fn.weight),
        "reject": described(loss_fn.reject),
        "gate": described(loss_fn.gate),
        **({} if loss_fn.advantages is None else {"advantages": described(loss_fn.advantages)}),
        "aggregate": loss_fn.aggregate,
    }


def _stage(stage: Any) -> str:
    """A stage by its name, with its level where it has one, and the pair of policies it compares."""
    either = "total, else staleness" if isinstance(stage, Ratio | Weight | Rejection) else None
    details = [getattr(stage, "level", "token"), stage.mismatch or either]
    shown = ", ".join(detail for detail in details if detail not in ("token", None))
    return stage.to_config()["name"] + (f" ({shown})" if shown else "")


if __name__ == "__main__":
    sys.exit(main())
