"""Configurations of docs/papers.md that set something else than a method's default say what the default is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from offcorr.methods.registry import find, illustration

PAGE = (Path(__file__).parent.parent / "docs" / "papers.md").read_text()


def configurations():
    """(method, loss_kwargs, text of the block) of each configuration that names them plainly."""
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S):
        for call in ast.walk(ast.parse(block)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "GRPOConfig":
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                if {"loss_type", "loss_kwargs"} <= given.keys():
                    name = ast.literal_eval(given["loss_type"]).removeprefix("offcorr:")
                    yield pytest.param(name, ast.literal_eval(given["loss_kwargs"]), block, id=name)


@pytest.mark.parametrize(("name", "options", "block"), configurations())
def test_what_is_no_default_is_said(name, options, block):
    method, aggregate = find(name), illustration(name).aggregate
    defaults = {key: option.default for key, option in method.options.items() if key not in method.required}
    differing = {
        key: value
        for key, value in options.items()
        if value != {**defaults, "aggregate": aggregate}.get(key, value) and not isinstance(value, dict)
    }
    assert not differing or "default" in block, f"{name} sets {differing}"
