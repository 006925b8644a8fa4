"""The tables of the docs, each made from the code that it describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction, Output
from offcorr.integrations import HOOKS
from offcorr.integrations.hook import Hook
from offcorr.methods.registry import Method, catalogue, illustration
from offcorr.metrics import LOSS, MISMATCH
from offcorr.stages.base import Stage, form, forms
from offcorr.stages.checks import of_library
from offcorr.stages.ratios import Ratio
from offcorr.stages.rejections import Rejection
from offcorr.stages.weights import Weight
from offcorr.training.field_metrics import ALIASES
from offcorr.training.logged import LONG, SHORT

Table = list[dict[str, str]]


def methods_table() -> Table:
    """One row per method: its stages, with the pair of policies that each compares, and its multiplier."""
    return [
        {
            "method": names(method),
            "multiplier c": method.multiplier,
            "value": value_of(method.name),
            **stages(illustration(method.name)),
        }
        for method in catalogue()
    ]


LOG_PROB, RATIO, BOTH = "sg(c) A logp", "f(ratio) A", "both"
"""The kinds of value that a term of a loss has."""


def value_of(name: str) -> str:
    """The kind of value of a method's loss, found on a batch: whether it is c A logp, or depends on ratios alone.

    >>> value_of("cispo"), value_of("ppo"), value_of("kimi")
    ('sg(c) A logp', 'f(ratio) A', 'both')
    """
    loss_fn = illustration(name, aggregate="sum")
    logp = torch.tensor([[-0.7, -1.1, -0.4], [-0.9, -0.2, -1.5]], dtype=torch.float64)
    moved = torch.tensor([[0.15, -0.1, 0.02], [-0.15, 0.1, 0.05]], dtype=torch.float64)

    def output(logp: Tensor) -> Output:
        old_logp = logp - moved
        return loss_fn(
            Batch(
                logp=logp,
                old_logp=old_logp,
                rollout_logp=old_logp,
                advantages=logp.new_tensor([1.0, -0.5]),
                mask=torch.ones(2, 3, dtype=torch.bool),
                rewards=logp.new_tensor([1.0, 0.0]),
                group_ids=torch.tensor([0, 0]),
                entropy=torch.ones_like(logp),
                sum_sq_probs=torch.full_like(logp, 0.3),
            )
        )

    out, lower = output(logp), output(logp - 1e-3)
    if torch.isclose(out.loss, (out.coefficient * logp).sum(), atol=1e-9):
        return LOG_PROB
    return RATIO if abs(out.loss - lower.loss) < 1e-4 else BOTH


def options_table() -> Table:
    """One row per method: its options with their defaults, the paper, and where the definition was read."""
    return [
        {
            "method and options": f"`{method.name}({signature(method)})`",
            "paper": method.paper,
            "definition read in": method.provenance,
            "notes": method.notes,
        }
        for method in catalogue()
    ]


SIDES = ("offcorr/engine/", "offcorr/staleness/")


def metrics_table() -> Table:
    """One row per metric: its formula, whether it is of raw or applied values, and its accumulator.

    Those that the training loop adds have the question that they answer in place of a formula.
    """
    rows, known = [], set()
    for prefix, series, values in (
        ("offcorr/{engine,staleness}/", MISMATCH, "raw"),
        ("offcorr/loss/", LOSS, "applied"),
    ):
        for metric in series:
            outputs = metric.outputs or (metric.name,)
            names = ", ".join(outputs)
            known |= {side + output for side in (prefix, *SIDES) for output in outputs}
            kind = metric.kind.__name__
            rows.append({"metric": prefix + names, "formula": metric.formula, "values": values, "accumulator": kind})
    added = [answer for answer in (*SHORT, *LONG) if answer.name not in known]
    return rows + [
        {"metric": answer.name, "formula": answer.question, "values": "of the loop", "accumulator": ""}
        for answer in added
    ]


def trainers_table() -> Table:
    """One row per method: whether the loss hook of each trainer can carry it, or the reason why not."""
    return [
        {"method": names(method), "TRL": "yes"}
        | {hook.trainer: _carried(hook, illustration(method.name)) for hook in HOOKS}
        for method in catalogue()
    ]


def _carried(hook: Hook, loss_fn: Correction) -> str:
    refusal = hook.refusal(loss_fn)
    return f"no: {refusal.words}" if refusal else "yes"


STAGES = ("ratio", "weight", "rejection", "gate", "advantages")
"""The kinds of stages, in the order in which a correction applies them."""


def stages_table() -> Table:
    """One row per stage that a configuration can name: its options with their defaults, and what it is."""
    built = [(kind, name, form(kind, name)) for kind in STAGES for name in forms(kind)]
    return [
        {"kind": kind, "name and options": f"`{name}{_options(build)}`", "what it is": _first_sentence(build)}
        for kind, name, build in built
        if of_library(build)
    ]


def _options(build: Callable[..., Any]) -> str:
    shown = []
    for name, option in inspect.signature(build).parameters.items():
        default = option.default
        if option.default is not option.empty:
            default = default.name() if isinstance(default, Stage) else repr(default)
        shown.append(name if option.default is option.empty else f"{name}={default}")
    return f"({', '.join(shown)})"


def _first_sentence(build: Callable[..., Any]) -> str:
    text = (inspect.getdoc(build) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`")


def short_table() -> Table:
    """One row per metric of the trainers' short log: the question it answers, and when it is logged."""
    return [
        {"metric": f"`{answer.name}`", "answers the question": answer.question, "logged": answer.logged}
        for answer in SHORT
    ]


def aliases_table() -> Table:
    """One row per name of another framework: the framework, and the metric or the formula behind it."""
    return [
        {
            "name": f"`{name}`",
            "framework": alias.framework,
            "here": (alias.formula or f"offcorr/engine/{alias.source}") + f"; {alias.note}" * bool(alias.note),
        }
        for name, alias in ALIASES.items()
    ]


def markdown(table: Table) -> str:
    """A table as Markdown, with arXiv numbers as links."""
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([_cell(row[name]) for name in head] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with what stands between ``<!-- NAME -->`` and ``<!-- end -->`` generated anew, for each name in parts.

    >>> fill("<!-- table x --> old <!-- end -->", {"table x": lambda: "new"}).split()
    ['<!--', 'table', 'x', '-->', 'new', '<!--', 'end', '-->']
    """
    names = "|".join(re.escape(name) for name in parts)
    return re.sub(
        rf"<!-- ({names}) -->.*?<!-- end -->",
        lambda match: f"<!-- {match[1]} -->\n{parts[match[1]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


TABLES: dict[str, Callable[[], Table]] = {
    "methods": methods_table,
    "options": options_table,
    "stages": stages_table,
    "metrics": metrics_table,
    "trainers": trainers_table,
    "short": short_table,
    "aliases": aliases_table,
}


def names(method: Method) -> str:
    return " = ".join((method.name, *method.aliases))


def signature(method: Method) -> str:
    return ", ".join(
        name if name in method.required else f"{name}={option.default!r}" for name, option in method.options.items()
    )


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return re.sub(r"(?<![\w/.])(\d{4}\.\d{5})(?!\d)", r"[\1](https://arxiv.org/abs/\1)", text)


def stages(loss_fn: Correction) -> dict[str, str]:
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
