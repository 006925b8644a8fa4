"""``offcorr methods``: a list of all methods, or all about one."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from offcorr.cli.output import Refusal, listing, paragraph, terminal_width
from offcorr.cli.tables import STAGES, markdown, methods_table, stages
from offcorr.correction import Correction
from offcorr.lab.text import HelpFormatter, entries, examples
from offcorr.methods.registry import Method, available, catalogue, find, split_spec
from offcorr.stages.base import forms
from offcorr.training.named_loss import TRL_LOSSES

NEXT = (
    "In brackets: the paper's arXiv number, or the framework whose code defines the method. `offcorr methods NAME` "
    "shows one method: formula, stages, options, notes, examples; `offcorr methods --markdown` is a table of all "
    "formulas. docs/which.md helps to choose; `offcorr compare NAME NAME` measures them side by side."
)


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``methods``."""
    parser = commands.add_parser(
        "methods",
        help="list every method; with a NAME, all about one",
        description="Lists the corrections by name, with a sentence about each and its source; in a pipe as columns "
        "separated by tabs. With a NAME: formula, stages, options, source, and the lines to type.",
        formatter_class=HelpFormatter,
        epilog=examples("offcorr methods minpro", "offcorr methods 'tis?cap=3' mine.py:my_loss"),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a method, as for loss_type, with or without options")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table of all formulas and stages")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    if options.names:
        if options.markdown:
            raise Refusal("--markdown prints the table of all methods and takes no NAME")
        try:
            pages = [about(name, terminal_width() or 100) for name in options.names]
        except (ValueError, TypeError) as error:
            raise Refusal(_of_stage(options.names) or str(error)) from None
        print("\n\n".join(pages))
        return 0
    if options.markdown:
        print(markdown(methods_table()))
        return 0
    width = terminal_width()
    table = [
        {"method": method.name, "what it does": _sentence(method) + _also(method), "source": method.paper}
        for method in catalogue()
    ]
    if width is None:
        print(listing(table, None))
    else:
        rows = [(row["method"], f"{row['what it does']} [{row['source']}]") for row in table]
        print("\n".join([*entries(rows, width), paragraph("", NEXT)]))
    return 0


def _of_stage(names: Sequence[str]) -> str:
    """A sentence where one of the names is that of a stage; "": none is."""
    for name in names:
        for kind in STAGES if name not in available() else ():
            if name in forms(kind):
                return f"{name!r} is a stage, of the kind {kind}, and no method: docs/methods.md lists the stages"
    return ""


def _sentence(method: Method) -> str:
    """The first paragraph about a method, on one line."""
    return _described(method).partition("\n\n")[0].replace("\n", " ").replace("``", "`").replace("  ", " ")


def _also(method: Method) -> str:
    return f" Also called {' and '.join(method.aliases)}." if method.aliases else ""


def _described(method: Method) -> str:
    """The docstring that describes a method: of its module where that holds one method, else of its function."""
    of_module = method.build.__module__.startswith("offcorr.methods.")
    return inspect.getdoc(sys.modules[method.build.__module__] if of_module else method.build) or method.multiplier


_SYMBOLS = (
    "r = exp(logp - old_logp), rho = exp(old_logp - rollout_logp), R = r rho; A: advantage; "
    "T: tokens of the sequence; p, mu: the token's probability now and to the sampler; H: entropy of its distribution; "
    "w_t: product of the weights, 0 where rejected; Z: what the aggregation divides a token by"
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
    meaning = _arguments(own)
    options: dict[str, str] = {}  # by what they mean, since a bound's two sides may share a sentence
    for option, default in method.options.items():
        text, shown = meaning.get(option, ""), f"{option}={given.get(option, default.default)!r}"
        if option in method.required and option not in given:
            shown = f"{option} (required)"
        options[text] = f"{options[text]}, {shown}" if text in options else shown
    schedules = [f"{option}: {dict(schedule)}" for option, schedule in method.schedules.items()]
    called = name if ":" in name else f"offcorr:{method.name}" if method.name in TRL_LOSSES else method.name
    shown_options = given | added or _first(method)
    in_python, in_json = (f"{shown_options!r}", json.dumps(shown_options)) if shown_options else ("", "")
    call = "".join(f", {option}={value!r}" for option, value in added.items())
    steps = " --steps_per_generation 1" * ("group_ids" in loss_fn.needs)  # TRL mixes a prompt's samples over them
    illustrated = f"the values of {' and '.join(added)} in the lines below are an illustration, no recommendation"
    parts: dict[str, list[str]] = {
        "": [_sentence(method)],
        "gradient": ["dL/dlogp_t = -c_t w_t A_t / Z"],
        "c_t": [method.multiplier],
        "where": [_SYMBOLS],
        "stages": [f"{place}: {shown}" for place, shown in stages(loss_fn).items() if shown != "none"],
        "needs": [", ".join(["logp", "advantages", "mask", *sorted(loss_fn.needs)])],
        "options": [f"{shown}  {text}".rstrip() for text, shown in options.items()] or ["none of its own"],
        "schedule": schedules,
        "paper": [method.paper],
        "read in": [method.provenance],
        "notes": [method.notes],
        "example": [illustrated] if added else [],
        "in TRL": [f"GRPOConfig(..., loss_type={called!r}" + (f", loss_kwargs={in_python})" if in_python else ")")],
        "in a loop": [f"offcorr.{'resolve' if ':' in name else 'get'}({spec!r}{call})"],
        "try it": [f"offcorr train --loss_type {called}" + (f" --loss_kwargs '{in_json}'" if in_json else "") + steps],
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


def _first(method: Method) -> dict[str, float]:
    """One numeric option at its default, for an example: the first, the upper of two bounds; empty without one."""
    for name, option in sorted(method.options.items(), key=lambda item: item[0] == "eps_low"):
        if isinstance(option.default, float | int) and not isinstance(option.default, bool):
            return {name: option.default}
    return {}


def _arguments(docstring: str) -> dict[str, str]:
    """The arguments that a docstring describes; "low, high: text" describes two."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1].rstrip()) if section else ():
        names, _, text = entry.partition(":")
        text = " ".join(text.split()).replace("``", "`")
        found |= {name.strip(): text for name in names.split(",")}
    return found
