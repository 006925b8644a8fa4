"""``Parser`` of the commands and scripts, and ``declared``: the options of a class, read from its source."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from offcorr.stages.checks import nearest

__all__ = ["Option", "Parser", "declared", "unknown_flag"]


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations; its errors name the nearest command, choice or flag.

    >>> parser = Parser(exit_on_error=False)
    >>> _ = parser.add_argument("--method")
    >>> parser.parse_known_args(["--method", "ppo"])[0]
    Namespace(method='ppo')
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; a flag that a subcommand does not have is its own error, not one of the whole command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.unrecognized(unknown)
        return found, unknown

    def unrecognized(self, given: Sequence[str]) -> NoReturn:
        """Ends the program with the flags and values that it does not have, and the flag that is nearest."""
        flags = [flag for action in self._actions for flag in action.option_strings if action.dest != "help"]
        flag = given[0].partition("=")[0]
        close = nearest(flag, flags) if flag.startswith("--") else ""
        self.error(f"unrecognized arguments: {' '.join(given)}{close}")

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message, and the nearest of the choices where one is not among them."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        super().error(message + (nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""))


OTHER_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "task",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
}
"""Flags of TRL's scripts, and names that other libraries use, with what the recipes call them."""


def unknown_flag(name: str, known: Iterable[str], methods: Iterable[str] = (), of_methods: Iterable[str] = ()) -> str:
    """The error of a flag, or of a key of a YAML file, that does not exist.

    Args:
        methods: names that --loss_type takes.
        of_methods: names of their options, which --loss_kwargs takes.

    >>> unknown_flag("loss_typ", ["loss_type", "lag"])
    "unknown flag, or key of the YAML file, 'loss_typ', did you mean 'loss_type'?"
    >>> unknown_flag("steps", ["steps_per_generation", "max_steps"])
    "unknown flag, or key of the YAML file, 'steps', did you mean 'max_steps'?"
    >>> unknown_flag("max_steps", ["max_steps"])  # without its dashes
    "unknown flag, or key of the YAML file, 'max_steps': a flag begins with two dashes, --max_steps"
    >>> unknown_flag("minpro", ["loss_type", "min_p"], ["minpro"])
    "unknown flag, or key of the YAML file, 'minpro': it is a method, which --loss_type minpro names"
    >>> print(unknown_flag("eps_high", ["epsilon_high"], of_methods=["eps_high"]))
    unknown flag, or key of the YAML file, 'eps_high': it is an option of a method: --loss_kwargs '{"eps_high": ...}'
    """
    known = [*known]
    mend = f": a flag begins with two dashes, --{name}" if name in known else nearest(name, known)
    if name in methods:
        mend = f": it is a method, which --loss_type {name} names"
    elif OTHER_NAMES.get(name) in known:
        mend = f", did you mean {OTHER_NAMES[name]!r}?"
    elif name in of_methods:
        mend = f": it is an option of a method: --loss_kwargs '{{\"{name}\": ...}}'"
    return f"unknown flag, or key of the YAML file, {name!r}{mend}"


class Option(NamedTuple):
    """A field of a dataclass as its source declares it: the annotation, and the default if it is a literal."""

    annotation: str
    default: Any


def declared(file: Path, name: str) -> dict[str, Option]:
    """The fields that a class declares itself, read without importing its module.

    Args:
        file: the module's source.
        name: of the class.

    Raises:
        OSError: the file cannot be read.
        KeyError: it has no such class.

    >>> declared(Path(__file__), "Option")["annotation"]
    Option(annotation='str', default=None)
    """
    classes = {node.name: node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}
    return {
        node.target.id: Option(ast.unparse(node.annotation), _default(node.value))
        for node in classes[name].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation)
    }


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # field(default=...)
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return value.value if isinstance(value, ast.Constant) else None
