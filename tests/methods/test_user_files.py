"""Tests of methods from a user's own file."""

from __future__ import annotations

import sys

import pytest

import offcorr

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
