"""``offcorr diagnose``: the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.diagnosis import diagnose
from offcorr.diagnose.html import Decode, page
from offcorr.diagnose.informed import informed
from offcorr.diagnose.progress import Reading
from offcorr.diagnose.readers import read
from offcorr.diagnose.record import Record
from offcorr.diagnose.rescore import Rescored, described, rescore, rollout_versions
from offcorr.diagnose.scorable import of_the_model, scorable, spread
from offcorr.diagnose.text import text
from offcorr.folders import check_file
from offcorr.optional import require
from offcorr.quiet import no_progress_bar

SEQUENCES = 32
"""Sequences that ``--model`` scores."""

TO_DUMP = (
    "A dump is written there by `offcorr train --dump_rollouts {0}`, or in your own script by "
    "GRPOConfig(dump_rollouts='{0}'); docs/mismatch.md lists the dumps of other trainers that can be read"
)

OTHER_VERDICTS = ("clean", "unknown")
FAILED = 3
"""Exit code where ``--fail-on`` applies; 2 is that of a command that cannot run."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand ``diagnose``."""
    parser = subparsers.add_parser(
        "diagnose",
        help="name the cause of a mismatch between trainer and sampler, from a dump of rollouts",
        description="Reads what trainer and sampler logged of each sampled token, says in one line why the two "
        "disagree and what to change, and then lists every cause with its statistic.",
        epilog="A dump: a folder that dump_rollouts= wrote, jsonl, jsonl.gz or parquet with a row "
        "per sequence (prompt_ids, completion_ids, rollout_logp, old_logp), npz with these fields of all sequences end "
        "to end and their tokens counted in lengths and prompt_lengths, or a dump of prime-rl, slime or NeMo-RL; "
        "docs/mismatch.md describes them. Exit code: 0; 2, the command cannot run; 3, --fail-on applies.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="files or folders of one run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else to stdout")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one self-contained file")
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or hub name: decodes the worst sequences of --html")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="folder or hub name of the model with the weights that the trainer's log-probs (old_logp) are of: scores "
        "some sequences again, under each hypothesis about the sampler",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        action="append",
        default=[],
        help="an earlier model that the sampler may have had, for --model; may be repeated",
    )
    parser.add_argument(
        "--temperature", type=float, help="the trainer's, for --model (default: found from its log-probs)"
    )
    parser.add_argument(
        "--rescored", type=int, metavar="N", help=f"sequences that --model scores (default: {SEQUENCES})"
    )
    parser.add_argument(
        "--fail-on",
        nargs="+",
        metavar="CAUSE",
        choices=("any", *CAUSES, *OTHER_VERDICTS),
        default=[],
        help=f"exit with {FAILED} if one of these is found; any: everything but clean; to be written after PATH",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --html if it exists")
    parser.set_defaults(run=run)


OF_LOGS_ALONE = (
    "This is from the logged data alone: --model is not the model that computed the trainer's log-probs (below)."
)


def run(options: argparse.Namespace) -> int:
    """Diagnoses, prints, and returns the exit code."""
    warnings: list[str] = []
    try:
        _check(options)
        with redirect_stdout(sys.stderr), Reading() as reading:  # packages that are imported may print
            records = read(options.paths, warn=warnings.append, report=reading.bytes)
            decode = None if options.tokenizer is None else _decode(options.tokenizer)
            model = None if options.model is None else _loaded("--model", options.model)
            report = diagnose(reading.of(records))
        rescored = None if model is None else _rescored(options, model, report.evidence.records)
        if rescored is not None:
            report = informed(report, rescored)
        outcome = [] if rescored is None else described(rescored, rollout_versions(report.evidence.records))
        notice = OF_LOGS_ALONE if rescored is not None and rescored.other_model else ""
        if options.html is not None:
            written = page(report, warnings, decode, outcome, notice)
            with open(options.html, "w" if options.overwrite else "x", encoding="utf-8") as file:
                file.write(written)
            print(f"report: {options.html}", file=sys.stderr)
    except (OSError, ValueError, ImportError) as error:
        print("\n- ".join([f"offcorr diagnose: {error}", *warnings]), file=sys.stderr)
        return 2
    if options.json:
        made = report.as_dict() | {"warnings": warnings}
        if rescored is not None:
            made["rescored"] = dataclasses.asdict(rescored)
        print(json.dumps(finite(made), indent=1, allow_nan=False))
    else:
        print(text(report, warnings, outcome, notice))
    failing = set(options.fail_on)
    named = {finding.cause for finding in report.causes} | {report.verdict}
    named |= {"unknown"} if report.d_unexplained else set()
    return FAILED if failing & named or ("any" in failing and report.verdict != "clean") else 0


def _check(options: argparse.Namespace) -> None:
    """Refuses what can be refused before anything is read."""
    for path in options.paths:
        if path.is_dir() and not any(file.is_file() for file in path.rglob("*")):
            raise ValueError(f"the folder {path} has no file in it. {TO_DUMP.format(path)}")
    html: Path | None = options.html
    if options.overwrite and html is None:
        raise ValueError("--overwrite is given without --html, whose file it replaces")
    if html is not None:
        require("--html", ["matplotlib"], install="pip install matplotlib")
        if html.is_dir():
            raise ValueError(f"--html is the folder {html}, expected a file")
        if not html.parent.is_dir():
            raise ValueError(f"--html is {html}, whose folder {html.parent} does not exist")
        if html.exists() and not options.overwrite:
            raise ValueError(f"--html is {html}, which exists; --overwrite replaces it")
        if html.exists() and any(html.resolve().is_relative_to(path.resolve()) for path in options.paths):
            raise ValueError(f"--html is {html}, a file of the dump; expected another one")
        if html.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--html is {html}, expected a file that ends in .html")
        check_file("--html", html)
    if options.tokenizer is not None:
        if html is None:
            raise ValueError("--tokenizer is given without --html, whose sequences it decodes")
        require("--tokenizer", ["transformers"], extra="recipes")
    given = {
        "--checkpoint": options.checkpoint or None,
        "--temperature": options.temperature,
        "--rescored": options.rescored,
    }
    for flag, value in given.items():
        if value is not None and options.model is None:
            raise ValueError(f"{flag} is given without --model, which it belongs to")
    if options.temperature is not None and not (math.isfinite(options.temperature) and options.temperature > 0):
        raise ValueError(f"--temperature is {options.temperature}, expected a number > 0")
    if options.rescored is not None and options.rescored < 1:
        raise ValueError(f"--rescored is {options.rescored}, expected at least 1")
    if options.model is not None:
        require("--model", ["transformers"], extra="recipes")
        for flag, name in [("--model", options.model), *(("--checkpoint", one) for one in options.checkpoint)]:
            _check_folder(flag, name)


def _check_folder(flag: str, name: str) -> None:
    """Refuses a path that is no model; the name of one on the hub is tried when it is loaded."""
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{flag} is the file {name}, expected the folder of a model that save_pretrained wrote")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ValueError(f"{flag} is {name}, a folder without config.json, expected one that save_pretrained wrote")
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise ValueError(f"{flag} is {name}, which does not exist")


def finite(value: Any) -> Any:
    """The same as plain Python values, with None in place of numbers that JSON has not.

    >>> import numpy as np
    >>> finite({"a": (float("nan"), np.float32(0.5), np.int64(3))})
    {'a': [None, 0.5, 3]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- tokenizer and models ------------------------------------------------------------------------------------


def _unloadable(flag: str, name: str, error: Exception) -> ValueError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file() and not (Path(name) / "config.json").is_file():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path") or "not named there"
        reason = (
            f"it is an adapter, whose base model (adapter_config.json) is {base}. Save the base model in a folder, set "
            f"base_model_name_or_path to it, and give {flag} again ({reason})"
        )
    missing = "" if Path(name).exists() else f"there is no folder {name} here, and of the hub's: "
    return ValueError(f"{flag} {name} cannot be loaded: {missing}{reason}")


KEPT = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""The files of which the hub's cache has one, if it has the model."""


def _say_where(flag: str, name: str) -> None:
    """A line where the hub is asked, and its answer within seconds: transformers asks for a minute without a network.

    Raises:
        ValueError: the hub has no such model, or does not answer.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if Path(name).exists():
        return
    print(f"{flag} {name} is no folder here: looking for it on the hub", file=sys.stderr, flush=True)
    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in KEPT):
            HfApi().model_info(name, timeout=10)
    except Exception as error:  # the hub's library raises errors of many kinds
        raise _unloadable(flag, name, error) from error


def _decode(name: str) -> Decode:
    from transformers import AutoTokenizer

    _say_where("--tokenizer", name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises errors of many kinds for what is no tokenizer
        raise _unloadable("--tokenizer", name, error) from error
    return lambda id: str(tokenizer.decode([id]))


def _loaded(flag: str, name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    _say_where(flag, name)
    try:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:  # transformers raises errors of many kinds for what is no model
        raise _unloadable(flag, name, error) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _rescored(options: argparse.Namespace, model: Any, records: Sequence[Record]) -> Rescored:
    """Scores some sequences again with ``--model`` and every ``--checkpoint``."""
    usable = scorable(records)
    if not usable:
        raise ValueError("--model has nothing to score: no sequence of the dump has a prompt and a scored token")
    chosen = spread(of_the_model(usable, model), SEQUENCES if options.rescored is None else options.rescored)
    with redirect_stdout(sys.stderr), Reading() as progress:
        return rescore(
            chosen,
            model,
            checkpoints=((name, _loaded("--checkpoint", name)) for name in options.checkpoint),
            temperature=options.temperature,
            report=progress.scored,
        )
