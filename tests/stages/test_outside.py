"""Warnings point to the caller's line, outside this library and the trainers that it runs in."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import offcorr
from offcorr.stages.checks import outside

ROOT = Path(offcorr.__file__).parent


def test_every_warning_takes_its_level_from_outside():
    """Or from ``warn_once``, which does."""
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                module = ast.unparse(node.func) == "warnings.warn"
                levels = [ast.unparse(one.value) for one in node.keywords if one.arg == "stacklevel"]
                if module and levels != ["outside()"]:
                    wrong.append(f"{file}:{node.lineno}: stacklevel is {levels}, expected outside()")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["offcorr.trl.step", "trl.trainer", "transformers.trainer", "torch.autograd"])
def test_frames_of_libraries_are_passed_over(package):
    between = ModuleType(package)
    code = "def inner():\n    warnings.warn('said', stacklevel=outside())\ndef call():\n    inner()\n"
    between.__dict__.update(warnings=warnings, outside=outside)
    exec(compile(code, "x.py", "exec"), vars(between))
    with pytest.warns(UserWarning, match="said") as caught:
        between.call()
    assert caught[0].filename == __file__
