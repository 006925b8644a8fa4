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
from offcorr.kernels import dispatch
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
    stages = PAGE.index("## 6.")
    line = PAGE[:stages].count("\n")
    kept = [e.source for e in examples if e.lineno < line and re.match(r"import|from|class|def|@", e.source)]
    (folder / "my_corrections.py").write_text("\n".join(kept))
    module = imported(folder / "my_corrections.py")
    (twin,) = re.findall(r"```python\n(# my_spans.py\n.*?)```", PAGE, flags=re.S)
    (folder / "my_spans.py").write_text(twin)
    imported(folder / "my_spans.py")
    yield module
    offcorr.unregister("gspo_tis")
    offcorr.unregister("capped")
    for name in ("running_max", "decayed"):
        spans.unregister(name)


def batch() -> offcorr.Batch:
    fields = dataclasses.asdict(offcorr.testing.example(sequences=9, width=300))
    floats = {n: v.float() for n, v in fields.items() if torch.is_tensor(v) and v.is_floating_point()}
    return offcorr.Batch(**fields | floats)


@pytest.mark.parametrize("stages", ["method", "gate", "weight", "ratio", "controller"])
def test_an_extension_runs_in_the_kernel(extensions, stages):
    loss_fn = {
        "method": lambda: offcorr.get("gspo_tis"),
        "gate": lambda: offcorr.Correction(gate=extensions.DynamicClip()),
        "weight": lambda: offcorr.Correction(weight=extensions.Tempered()),
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


@pytest.mark.parametrize("name", ["dapo", "minpro", "holderpo", "turn_ppo", "asymre", "vaco"])
def test_the_kernel_check_passes_where_both_agree(name):
    assert offcorr.testing.check_kernel(name) < 1e-3


def test_the_kernel_check_finds_a_kernel_that_is_wrong_on_packed_rows(monkeypatch):
    run = dispatch.run

    def wrong(plan, batch, denominator):
        fused = run(plan, batch, denominator)
        packed = fused is not None and batch.cu_seqlens is not None
        return fused._replace(coefficient=1.01 * fused.coefficient) if packed else fused

    monkeypatch.setattr(dispatch, "run", wrong)
    with pytest.raises(AssertionError, match=r"dapo: kernel and reference differ by .* on a packed batch at a spread"):
        offcorr.testing.check_kernel("dapo")


def test_the_kernel_check_finds_a_twin_that_computes_another_span(tmp_path):
    """The wrong one begins each row at 0, as if a row whose ratios all fell had had a ratio of 1."""
    (tmp_path / "peaks.py").write_text(
        "import torch, triton, triton.language as tl\n"
        "from offcorr import ratios, spans\n"
        "from offcorr.kernels.spans import Running, register\n\n"
        "def peak(x, rows):\n"
        "    return torch.where(rows.mask, x, -torch.inf).cummax(1).values\n\n"
        "@triton.jit\n"
        "def larger(a, b):\n"
        "    return tl.maximum(a, b)\n\n"
        "@triton.jit\n"
        "def twin(x, mask, position, carry, p):\n"
        "    seen = tl.associative_scan(tl.where(mask, x, -1e30), 0, larger)\n"
        "    return tl.maximum(seen, carry), tl.maximum(tl.max(tl.where(mask, x, -1e30), 0), carry)\n\n"
        "for name in ('test_none', 'test_right', 'test_wrong'):\n"
        "    spans.register(name)(lambda x, rows: peak(x, rows))\n"
        "register('test_right', Running(twin, first=-1e30, needs_position=False))\n"
        "register('test_wrong', Running(twin, first=0.0, needs_position=False))\n"
    )
    imported(tmp_path / "peaks.py")
    loss = {
        name: offcorr.Correction(ratio=type(name, (offcorr.ratios.Ratio,), {"span": name, "__module__": __name__})())
        for name in ("test_none", "test_right", "test_wrong")
    }
    try:
        with pytest.raises(AssertionError, match="^runs on the reference: the span 'test_none' has no"):
            offcorr.testing.check_kernel(loss["test_none"])
        offcorr.testing.check_kernel(loss["test_right"])
        with pytest.raises(AssertionError, match="kernel and reference differ by .* at a spread of"):
            offcorr.testing.check_kernel(loss["test_wrong"])
    finally:
        for name in loss:
            spans.unregister(name)


def test_a_function_that_uses_torch_does_not_fuse(tmp_path):
    (tmp_path / "torchy.py").write_text(
        "import torch\nfrom offcorr import gates\n\n"
        "def exponential(log_ratio, advantage):\n"
        "    surrogate = torch.exp(log_ratio) * advantage\n    return surrogate, surrogate\n\n"
        "class Torchy(gates.Gate):\n    surrogate = staticmethod(exponential)\n"
    )
    loss_fn = offcorr.Correction(gate=imported(tmp_path / "torchy.py").Torchy())
    with offcorr.use_backend("triton"):
        assert "it uses the module torch, and only offcorr.ops runs" in offcorr.backend(loss_fn, batch())


def test_the_kernel_without_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with offcorr.use_backend("triton"), pytest.raises(RuntimeError, match="expected a GPU, or TRITON_INTERPRET=1"):
        offcorr.get("ppo")(batch())
