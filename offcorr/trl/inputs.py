"""Checks of a trainer's reward functions and data, before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from offcorr.training.field_metrics import ENGINE, STALENESS
from offcorr.trl.rewards import function_name

CALL = "def reward(completions, **kwargs)"

GAPS = (ENGINE, STALENESS)


def check_reward_funcs(reward_funcs: Any) -> None:
    """Raise ``TypeError`` for a reward function that TRL cannot call.

    Args:
        reward_funcs: one or a list of them: functions, models, or names of models; None is left to TRL.
    """
    several = isinstance(reward_funcs, list)
    for i, function in enumerate(reward_funcs if several else [reward_funcs]):
        what = f"reward_funcs[{i}]" if several else "reward_funcs"
        if function is None or isinstance(function, str | nn.Module):
            continue
        if not callable(function):
            raise TypeError(f"{what} is {function!r}, expected a function {CALL}, a model, the name of one, or a list")
        if isinstance(function, type):
            raise TypeError(f"{what} is the class {function.__name__}, expected an instance, or a function {CALL}")
        _check_arguments(what, function)


def check_reference(model: Any, args: Any, peft_config: Any = None) -> None:
    """Raise ``ValueError`` for a KL penalty to a reference model that TRL has nowhere to load from.

    TRL loads it from the name of the model's configuration, which a model made in memory does not have; with PEFT it
    needs none.

    Args:
        model: a model, or the name of one.
        args: the configuration; None: TRL's default, without the penalty.
        peft_config: as passed to the trainer.
    """
    beta = getattr(args, "beta", 0.0)
    if not beta or not isinstance(model, nn.Module) or hasattr(model, "peft_config") or peft_config is not None:
        return
    config = getattr(model, "config", None)
    if config is not None and not (config._name_or_path or config.get_text_config()._name_or_path):
        raise ValueError(
            f"beta is {beta!r}, and the model, a {type(model).__name__}, has no name: TRL loads the reference model "
            "from the folder or the hub name of the model, and this one was made in memory. Save it first, "
            'model.save_pretrained("FOLDER"), and pass model="FOLDER" to the trainer; or set beta=0.0'
        )


def check_best_metric(args: Any, corrects: bool) -> None:
    """Raise ``ValueError`` for a ``metric_for_best_model`` that no evaluation logs, which would fail at the first one.

    Args:
        args: the configuration; None: TRL's default, without one.
        corrects: whether a correction takes the place of TRL's loss.

    >>> class Config:
    ...     metric_for_best_model = "eval_offcorr/loss/dropped"
    >>> check_best_metric(Config(), corrects=True)
    Traceback (most recent call last):
    ValueError: metric_for_best_model is 'eval_offcorr/loss/dropped', ... expected another, such as 'eval_reward'
    """
    metric = getattr(args, "metric_for_best_model", None)
    name = metric.removeprefix("eval_") if isinstance(metric, str) else ""
    if name.startswith("offcorr/") and not name.startswith(GAPS):
        why = "and an evaluation makes no update: it logs no metric of a loss, a controller or a schedule"
    elif corrects and name.startswith("clip_ratio/"):
        why = "which TRL's own loss logs, and a correction takes its place"
    else:
        return
    raise ValueError(f"metric_for_best_model is {metric!r}, {why}: expected another, such as 'eval_reward'")


def _check_arguments(what: str, function: Any) -> None:
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has none
        return
    if any(argument.kind is argument.VAR_KEYWORD for argument in taken):
        return
    named = [argument.name for argument in taken if argument.kind is not argument.POSITIONAL_ONLY]
    if not {"prompts", "completions"} <= {*named}:
        raise TypeError(
            f"{what} is {function_name(function)}({', '.join(argument.name for argument in taken)}), and TRL calls it "
            f"by keyword, with prompts, completions, completion_ids and the other columns of the data: expected {CALL}"
        )


def check_data(name: str, data: Any, prompts: int = 1, *, steps: bool = False) -> None:
    """Raise ``ValueError`` for data that nothing can be trained on.

    Args:
        name: of the argument.
        data: a data set, or several by name; None, and what is no data set, is left to TRL.
        prompts: number of different prompts in a generation.
        steps: fewer rows than ``prompts`` make no step.
    """
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        for key, own in data.items():
            check_data(f"{name}[{key!r}]", own)
        return
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list):
        return
    rows = len(data) if hasattr(data, "__len__") else None
    if rows == 0:
        raise ValueError(f"{name} has no rows, expected at least {prompts if steps else 1}")
    if "prompt" not in columns:
        rename = f", for instance {name}.rename_column({columns[0]!r}, 'prompt')" if len(columns) == 1 else ""
        raise ValueError(f"{name} has the columns {columns}, expected one of the name 'prompt'{rename}")
    if rows is None:
        return
    if not isinstance(first := data[0]["prompt"], str | list):
        raise ValueError(f"{name}[0]['prompt'] is {first!r}, expected text or a list of messages")
    if steps and rows < prompts:
        raise ValueError(
            f"{name} has {rows} row{'s' * (rows != 1)}, expected at least {prompts}, the different prompts of one "
            "generation (generation_batch_size / num_generations): TRL drops the rest, so no step would be made"
        )
