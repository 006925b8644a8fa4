"""``check``: mistakes in the flags of a recipe, found before TRL and transformers are imported, which takes seconds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offcorr.cli.output import Refusal
from offcorr.flags import Option, declared, unknown_flag
from offcorr.folders import check_writable
from offcorr.methods.registry import available, option_names
from offcorr.stages.checks import one_of
from offcorr.training.anchors import check_anchor
from offcorr.training.ess_lr import RULES
from offcorr.training.generations import check_generation, check_max_steps
from offcorr.training.logged import CHOICES
from offcorr.training.monitor_option import monitor_options
from offcorr.training.named_loss import TRL_LOSSES, named_loss
from offcorr.training.precision import Precision
from offcorr.training.snapshots import check_steps

__all__ = ["check", "options_of"]

NUMBERS = {"int": int, "float": float}
NONE = ("none", "null")


def check(recipe: Path, flags: Sequence[str], config: Path | None = None, processes: int | None = 1) -> None:
    """Refuses what the flags and the file show to be a mistake; all else is left to the recipe's own parser.

    Args:
        recipe: recipes/grpo.py.
        config: the YAML file of ``--config``.
        processes: as many as will be started; None: an accelerate configuration says it.

    Raises:
        Refusal: an unknown or abbreviated flag or key, a number that is none, an unknown method or option of it, a
            value that an option cannot have, a folder that cannot be written to, or batches that do not divide.
    """
    try:
        options = options_of(recipe)
    except (OSError, KeyError):  # another version of TRL has its options elsewhere, and its parser knows them
        return
    found, unknown = _parser(options).parse_known_args(list(flags))
    written = {} if config is None else _file(config)
    values = written | vars(found)
    unknown = [*(word.partition("=")[0].removeprefix("--") for word in unknown), *(values.keys() - options.keys())]
    if unknown := [name for name in unknown if name != "env"]:  # the key of TRL's parser for environment variables
        raise Refusal(unknown_flag(unknown[0], options, available(), option_names()))
    if config is not None:
        _check_file(config, written, options)
    try:
        _check_loss(values)
    except (TypeError, ValueError) as error:
        of_file = written.get("loss_kwargs") and "loss_type" in found and "loss_kwargs" not in found
        mend = f"; loss_kwargs is that of {config}: --loss_kwargs '{{}}' leaves it out" if of_file else ""
        raise Refusal(f"{error}{mend}") from None
    try:
        _check_values(values, options, processes)
    except (TypeError, ValueError) as error:
        raise Refusal(str(error)) from None


def options_of(recipe: Path) -> dict[str, Option]:
    """Every option of the recipe: its own, this library's, TRL's and those of transformers.

    Raises:
        OSError, KeyError: TRL or transformers keep theirs in another place.
    """
    library = Path(__file__).parent.parent
    trl, transformers = (_package(name) for name in ("trl", "transformers"))
    common = trl / "trainer" / "base_config.py"
    return {
        **declared(transformers / "training_args.py", "TrainingArguments"),
        **(declared(common, "_BaseConfig") if common.is_file() else {}),
        **declared(trl / "trainer" / "grpo_config.py", "GRPOConfig"),
        **declared(library / "trl" / "config.py", "CorrectionOptions"),
        **declared(library / "trl" / "config.py", "GRPOConfig"),
        **declared(recipe, "Arguments"),
    }


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise KeyError(name)
    return Path(found.origin).parent


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refusal(message)


def _kind(option: Option) -> str:
    """The annotation without its None."""
    return re.sub(r"\s*\|\s*None$|^(?:typing\.)?Optional\[(.*)\]$", r"\1", option.annotation)


def _or_none(kind: str) -> Callable[[str], Any]:
    """Reads a number, or none, in words; argparse names it in its error."""

    def read(text: str) -> Any:
        return None if text.lower() in NONE else NUMBERS[kind](text)

    read.__name__ = kind
    return read


def _parser(options: Mapping[str, Option]) -> _Parser:
    """With the type of a number; every other value is text here, and read by the recipe's parser."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, option in options.items():
        words = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        kind = _kind(option)
        if kind in NUMBERS:
            parser.add_argument(*words, dest=name, type=NUMBERS[kind] if kind == option.annotation else _or_none(kind))
        elif kind == "str":
            parser.add_argument(*words, dest=name)
        else:
            parser.add_argument(*words, dest=name, nargs="*")
        if kind == "bool":
            negated = dict.fromkeys((f"--no_{name}", f"--no-{name.replace('_', '-')}"))
            parser.add_argument(*negated, dest=name, action="store_false")
    return parser


def _file(config: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    return dict(yaml.safe_load(config.read_text()) or {})


def _check_file(config: Path, values: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    """Numbers of a file that are none; those of flags are read by the parser."""
    for name, value in values.items():
        kind = _kind(options[name]) if name in options else ""
        if isinstance(value, str) and value.lower() in NONE and kind != options[name].annotation:
            continue
        number = kind in NUMBERS and not (isinstance(value, str) and _is_number(value, NUMBERS[kind]))
        if number and isinstance(value, str | list | dict):
            raise Refusal(f"{config}: {name}: invalid {kind} value: {value!r}")


def _check_chosen(name: str, choices: Collection[str], value: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}{one_of(value, choices)}")


CHECKS: Mapping[str, Callable[[Any], object]] = {
    "anchor": check_anchor,
    "precision": Precision.named,
    "lag": partial(check_steps, "lag"),
    "ess_lr": partial(_check_chosen, "ess_lr", RULES),
    "log_metrics": partial(_check_chosen, "log_metrics", CHOICES),
    "monitor": monitor_options,
    "max_steps": check_max_steps,
}
"""The check of each option's value, by which the recipe or its trainer refuses it as well."""


def _check_loss(values: Mapping[str, Any]) -> None:
    loss_type = values.get("loss_type")
    if isinstance(loss_type, str) and loss_type not in TRL_LOSSES:
        named_loss(loss_type, _mapping(values.get("loss_kwargs")))


def _check_values(values: Mapping[str, Any], options: Mapping[str, Option], processes: int | None) -> None:
    for name, check_one in CHECKS.items():
        if values.get(name) is not None:
            check_one(_words(values[name]))
    for name in ("output_dir", "dump_rollouts"):
        if isinstance(values.get(name), str):
            check_writable(f"--{name}", values[name])
    batch = ("per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps", "num_generations")
    size, steps, accumulation, generations = (values.get(name, options[name].default) for name in batch)
    numbers = (size, steps or accumulation, generations)
    if processes is None or values.get("generation_batch_size") is not None:
        return
    if all(isinstance(one, int) for one in numbers):
        check_generation(size, processes, steps or accumulation, generations)


def _words(given: Any) -> Any:
    """One text, where the parser made several words of it."""
    of_flags = isinstance(given, list) and all(isinstance(word, str) for word in given)
    return " ".join(given) if of_flags else given


def _is_number(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _mapping(given: Any) -> Mapping[str, Any]:
    """The options of a method."""
    wanted = """expected a mapping or a JSON object, for instance '{"eps_high": 0.28}'"""
    text = _words(given)
    try:
        read = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"loss_kwargs is {text!r}, {wanted} ({error})") from None
    if not isinstance(read or {}, dict):
        raise ValueError(f"loss_kwargs is {text!r}, {wanted}")
    return read or {}
