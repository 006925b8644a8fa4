"""Tests of methods from a user's own file."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

import offcorr
from tests.fresh import python

STAGE = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
import offcorr
from offcorr import gates, ops

class Bound(NamedTuple):
    cap: float

def bounded(log_ratio, logp, advantage, p):
    gradient = ops.minimum(ops.exp(log_ratio), p.cap) * advantage
    return gradient * logp, gradient

@dataclass(frozen=True)
class Bounded{name}(gates.Gate):
    """min(ratio, cap)."""
    cap: float = {cap}
    surrogate = staticmethod(bounded)
    detached = True
    @property
    def params(self):
        return Bound(self.cap)

mine = offcorr.Correction(gate=Bounded{name}())
'''


def test_a_stage_with_annotations_as_text_is_defined_in_the_file(tmp_path):
    """A dataclass looks its module up by name, which a file that is not imported lacks."""
    for folder, cap in (("one", 1.5), ("two", 3.0)):  # two files of one name
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "offcorr_test_mine.py"
        file.write_text(STAGE.format(name=folder.title(), cap=cap))
        loss_fn = offcorr.resolve(f"{file}:mine")
        assert loss_fn.gate.cap == cap and len(offcorr.testing.check(loss_fn)) == len(offcorr.testing.CHECKS)


def test_a_file_that_fails_leaves_nothing_behind(tmp_path):
    file = tmp_path / "offcorr_test_broken.py"
    file.write_text("raise KeyError('broken')\n")
    with pytest.raises(KeyError, match="broken"):
        offcorr.resolve(f"{file}:mine")
    assert "offcorr_user_offcorr_test_broken" not in sys.modules


METHOD = """
import offcorr

@offcorr.register("test_by_name", aliases=("test_by_alias",), multiplier="as ppo")
def method(eps: float = 0.2) -> offcorr.Correction:
    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))
"""


def test_a_registered_function_of_a_file_is_found_by_either_name(tmp_path):
    file = tmp_path / "offcorr_test_either.py"
    file.write_text(METHOD)
    try:
        by_function = offcorr.resolve(f"{file}:method?eps=0.1")
        for name in ("test_by_name", "test_by_alias"):
            assert offcorr.resolve(f"{file}:{name}?eps=0.1") == by_function
            assert offcorr.resolve(f"{file}:{name}").method == "test_by_name"
        with pytest.raises(ValueError, match="defines no 'test_by_nam', did you mean 'test_by_name'"):
            offcorr.resolve(f"{file}:test_by_nam")
        with pytest.raises(ValueError, match="defines no 'minpro'"):  # a method, but none of this file
            offcorr.resolve(f"{file}:minpro")
    finally:
        offcorr.unregister("test_by_name")


HELPER = """
import offcorr

def test_hump(log_ratio, advantage, p):
    return log_ratio * advantage, advantage

@offcorr.register("test_hump", multiplier="as ppo")
def method(eps: float = 0.2) -> offcorr.Correction:
    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))
"""


def test_a_registered_name_wins_over_a_helper_of_that_name(tmp_path):
    file = tmp_path / "offcorr_test_helper.py"
    file.write_text(HELPER)
    try:
        assert offcorr.resolve(f"{file}:test_hump?eps=0.1") == offcorr.get("test_hump", eps=0.1)
        file.write_text(HELPER.partition("@")[0].replace("return", "return offcorr.Correction() #"))
        os.utime(file, ns=(0, 0))  # no longer registered, and the function is what it names
        with pytest.raises(ValueError, match="test_hump requires log_ratio and advantage and p"):
            offcorr.resolve(f"{file}:test_hump")
    finally:
        offcorr.unregister("test_hump")


CONFIG = """
import json, offcorr
config = json.loads({config!r})
try:
    offcorr.from_config(config)
except ValueError as error:
    print(error)
import {module}
assert offcorr.from_config(config).to_config() == config
"""

OWN = """
from dataclasses import dataclass
import offcorr

@offcorr.register("test_own", multiplier="as ppo")
def test_own(eps: float = 0.2) -> offcorr.Correction:
    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))

@dataclass(frozen=True)
class OwnClip(offcorr.gates.Clip):
    pass

composed = offcorr.Correction(gate=OwnClip())
"""


def test_the_configuration_of_an_own_method_or_stage_in_a_new_process(tmp_path):
    """The error says that the module has to be imported first, and then it works."""
    (tmp_path / "own_things.py").write_text(OWN)
    found = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code = (
        "import json, own_things as own\nfor one in (own.test_own(), own.composed): print(json.dumps(one.to_config()))"
    )
    configs = python(found + code).stdout.splitlines()
    for config, what in zip(configs, ("method 'test_own'", "gate 'own_clip'"), strict=True):
        said = python(found + CONFIG.format(config=config, module="own_things")).stdout
        assert said.startswith(f"unknown {what}") and said.endswith(" is imported\n")
        assert "; your own are known once the module that " in said


@pytest.mark.parametrize("name", ["my method?x", "a=b", "a&b", "a:b", "a/b", "", 3])
def test_a_name_that_no_spec_could_hold_is_refused(name):
    message = "method name is .* expected a word without blanks and without any of"
    with pytest.raises(ValueError, match=message):
        offcorr.register(name)(offcorr.Correction)
    with pytest.raises(ValueError, match=message):
        offcorr.register("test_fine", aliases=(name,))(lambda: offcorr.Correction())
    assert "test_fine" not in offcorr.available()


SPAN_AND_METHOD = """
import torch

import offcorr
from offcorr import gates, ratios, spans


@spans.register("span_of_{name}")
def seen(x, rows):
    return torch.where(rows.mask, x, 0).cumsum(1)


@offcorr.register("method_of_{name}", multiplier="as PPO's")
def mine():
    return offcorr.Correction(gate=gates.Clip({bound}, {bound}))
"""


def write(file, bound):
    file.write_text(SPAN_AND_METHOD.format(name=file.stem, bound=bound))
    os.utime(file, ns=(0, int(bound * 1e9)))  # another time, however coarse the clock


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"edited_{tmp_path.name.replace('-', '_')}.py"
    yield file
    if f"method_of_{file.stem}" in offcorr.available():
        offcorr.unregister(f"method_of_{file.stem}")
        offcorr.spans.unregister(f"span_of_{file.stem}")


def test_a_file_that_was_edited_is_read_again(user_file):
    for bound in (0.1, 0.3):
        write(user_file, bound)
        assert offcorr.resolve(f"{user_file}:mine").gate == offcorr.gates.Clip(bound, bound)
        assert offcorr.get(f"method_of_{user_file.stem}").gate.eps_low == bound


@pytest.mark.parametrize("order", [("import", "resolve"), ("resolve", "import")])
def test_a_file_may_be_imported_and_named(user_file, order):
    write(user_file, 0.1)
    for step in order:
        if step == "import":
            importlib.import_module(user_file.stem)
        else:
            assert offcorr.resolve(f"{user_file}:mine").gate == offcorr.gates.Clip(0.1, 0.1)
    with pytest.raises(ValueError, match="did you mean 'mine'"):
        offcorr.resolve(f"{user_file}:mien")
