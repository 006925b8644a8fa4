"""The extensions of docs/extending.md run in the kernel, and give the numbers of the reference."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import offcorr
from offcorr.stages import spans

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def extensions(tmp_path_factory):
    """The page's definitions as a reader would have them, in two files: Triton reads the source."""
    folder = tmp_path_factory.mktemp("extensions")
    examples = [e for e in doctest.DocTestParser().get_examples(PAGE) if e.exc_msg is None and not e.want]
    stages = PAGE.index("## 5.")
    line = PAGE[:stages].count("\n")
    kept = [e.source for e in examples if e.lineno < line and re.match(r"import|from|class|def|@", e.source)]
    (folder / "my_corrections.py").write_text("\n".join(kept))
    module = imported(folder / "my_corrections.py")
    (twin,) = re.findall(r"```python\n(# my_spans.py\n.*?)```", PAGE, flags=re.S)
    (folder / "my_spans.py").write_text(twin)
    imported(folder / "my_spans.py")
    yield module
    offcorr.unregister("gspo_tis")
    for name in ("running_max", "decayed"):
        spans.unregister(name)


def batch() -> offcorr.Batch:
    fields = dataclasses.asdict(offcorr.testing.example(sequences=9, width=300))
    floats = {n: v.float() for n, v in fields.items() if torch.is_tensor(v) and v.is_floating_point()}
    return offcorr.Batch(**fields | floats)


@pytest.mark.parametrize("stages", ["method", "gate", "ratio", "controller"])
def test_an_extension_runs_in_the_kernel(extensions, stages):
    loss_fn = {
        "method": lambda: offcorr.get("gspo_tis"),
        "gate": lambda: offcorr.Correction(gate=extensions.DynamicClip()),
        "ratio": lambda: offcorr.Correction(ratio=extensions.RunningMax()),
        "controller": lambda: offcorr.Correction(gate=extensions.ClipDeviations(width=1.0)),
    }[stages]()
    with offcorr.use_backend("triton"):
        assert offcorr.backend(loss_fn, batch()) == "triton"
        fused = loss_fn(batch())
    with offcorr.use_backend("reference"):
        expected = loss_fn(batch())
    torch.testing.assert_close(fused.coefficient, expected.coefficient, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(fused.loss, expected.loss, rtol=1e-4, atol=1e-6)


def test_a_span_without_a_twin_runs_on_the_reference_and_says_so(extensions):
    loss_fn = offcorr.Correction(ratio=extensions.DecayedTrace())
    with offcorr.use_backend("triton"):
        assert offcorr.backend(loss_fn, batch()).startswith("reference: ")
        with pytest.warns(RuntimeWarning, match="decayed"):
            loss_fn(batch())
