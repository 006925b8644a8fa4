"""``monitor_options``: what the trainers' and recipes' option ``monitor`` stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offcorr.stages.checks import nearest, one_of
from offcorr.training.alarms import ACTIONS
from offcorr.training.monitor import Monitor

__all__ = ["monitor_options"]

MONITOR_OPTIONS = ("warning", "critical", "self_test", "warmup", "drift", "threshold", "persistence", "folder")
"""The options of ``offcorr.Monitor`` that ``monitor`` takes."""


def monitor_options(given: Any) -> dict[str, Any] | None:
    """The keyword arguments of ``offcorr.Monitor`` that ``monitor`` stands for; None: "off".

    Raises:
        ValueError: it is no action, or has an option that is unknown or wrong.

    >>> monitor_options("stop")
    {'warning': 'stop', 'critical': 'stop'}
    >>> monitor_options('{"self_test": "warn"}')
    {'self_test': 'warn'}
    >>> monitor_options(None) is monitor_options("off") is None
    True
    """
    wanted = f"expected 'off', one of {list(ACTIONS)}, or a mapping of options of offcorr.Monitor"
    options = given
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            options = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"monitor is {given!r}, {wanted} ({error})") from error
    if options is None or options == "off":
        return None
    if isinstance(options, str):
        if options not in ACTIONS:
            raise ValueError(f"monitor is {given!r}{nearest(options, ('off', *ACTIONS), ', ' + wanted)}")
        return {"warning": options, "critical": options}
    if not isinstance(options, Mapping):
        raise ValueError(f"monitor is {given!r}, {wanted}")
    for name in options:
        if name not in MONITOR_OPTIONS:
            raise ValueError(f"monitor has the option {name!r}{one_of(name, MONITOR_OPTIONS)}")
    try:
        Path(options.get("folder", "."))
        Monitor(**{name: value for name, value in options.items() if name != "folder"})  # which may warn
    except (TypeError, ValueError) as error:
        raise ValueError(f"monitor: {error}") from error
    return dict(options)
