"""The configurations of docs/papers.md: each is built as it stands and names a correction of its own heading."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

import offcorr
from offcorr.trl import GRPOConfig
from offcorr.trl.config import choose_correction

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "papers.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[2:]}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("title", SECTIONS)
def test_the_configuration_of_a_paper_is_built(title, tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], flags=re.S)
    config = functools.partial(GRPOConfig, output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    names = {"GRPOConfig": config}
    exec(block, names)
    annealed = choose_correction(names["args"])
    assert annealed is not None, "TRL's own loss"
    correction = annealed.at(0.0)
    assert f"`{correction.method}`" in SECTIONS[title].splitlines()[2]
    assert torch.isfinite(correction(offcorr.testing.example()).coefficient).all()
