"""Triton kernels of offcorr.exact: right to float32's rounding, and bitwise the same whatever else is in the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import offcorr
from offcorr import exact
from offcorr.exact import invariant as invariant_operators
from offcorr.kernels import invariant
from tests import tiny

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def tile_product(monkeypatch):
    """A GPU's product of two tiles, for the interpreter: every row alike, terms in order, bfloat16 as numbers.

    numpy's product rounds a row by its place in the tile, and takes the bits of a bfloat16 for an integer.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")

    def number(tile):
        if tile.dtype.scalar == language.bfloat16:
            return (tile.data.astype(np.uint32) << 16).view(np.float32)
        return tile.data.astype(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data
        for column, row in zip(number(a).T, number(b), strict=True):
            total = total + column[:, None] * row
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (5, 27, 33), (70, 130, 65), (64, 128, 128)])
def test_products_are_right(m, n, k, dtype):
    a, b, bias = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1).T, numbers(n, dtype=dtype, seed=2)
    wanted = a.double() @ b.double() + bias.double()
    found = invariant.matmul(a, b, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * k**0.5)
    stacked = invariant.matmul(torch.stack([a, -a]), torch.stack([b, b.contiguous()]))
    torch.testing.assert_close(stacked[1].double(), -(wanted - bias.double()), rtol=TOLERANCE[dtype], atol=1e-2)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype):
    a, b = numbers(70, 100, dtype=dtype), numbers(37, 100, dtype=dtype, seed=1).T
    whole = invariant.matmul(a, b)
    for rows in (slice(0, 1), slice(3, 9), slice(1, 70)):
        assert torch.equal(invariant.matmul(a[rows], b), whole[rows])


def test_zeros_behind_the_terms_change_nothing():
    """The keys behind the last one of a query, in the product of its weights and the values."""
    a, b = numbers(3, 5, 50), numbers(3, 50, 8, seed=1)
    longer = invariant.matmul(F.pad(a, (0, 90)), F.pad(b, (0, 0, 0, 90), value=7.0))
    assert torch.equal(longer, invariant.matmul(a, b))


@pytest.mark.parametrize("columns", [1, 27, 1024, 2500])
def test_row_reductions_are_right(columns):
    x = numbers(6, 2, columns) * 4
    torch.testing.assert_close(invariant.row_sum(x), x.sum(-1), rtol=1e-5, atol=1e-4)
    mean = invariant.row_sum(x, divisor=columns, squared=True)
    torch.testing.assert_close(mean, x.square().mean(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(invariant.softmax(x, log=False), x.softmax(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(invariant.softmax(x, log=True), x.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert invariant.softmax(x.bfloat16(), log=True, dtype=torch.float32).dtype == torch.float32


def test_a_row_of_a_reduction_depends_on_nothing_else():
    x = numbers(9, 1500)
    behind = F.pad(x, (0, 700), value=-torch.inf)
    assert torch.equal(invariant.softmax(x[4:5], log=True), invariant.softmax(x, log=True)[4:5])
    assert torch.equal(invariant.softmax(behind, log=False)[:, :1500], invariant.softmax(x, log=False))
    assert torch.equal(invariant.row_sum(F.pad(x, (0, 700))), invariant.row_sum(x))
    assert torch.equal(invariant.row_sum(x[2:3]), invariant.row_sum(x)[2:3])


# ----------------------------------------------------------------------------- in the place of torch's operators


@pytest.fixture
def replaced(device):
    """The operators of a GPU, under the interpreter where there is none."""
    with offcorr.use_backend("triton"), exact.batch_invariant():
        yield


def test_operators_keep_torchs_results(replaced):
    """Shapes, dtypes and numbers, the options of each operator included."""
    x, weight, bias = numbers(2, 3, 20), numbers(7, 20, seed=1), numbers(7, seed=2)
    calls = {
        "linear": lambda x, w, b: F.linear(x, w, b),
        "addmm": lambda x, w, b: torch.addmm(b, x[0], w.T, beta=0.5, alpha=2.0),
        "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w.T.expand(2, 20, 7), beta=0.5),
        "mv": lambda x, w, b: torch.mv(x[0], w[0]),
        "mean": lambda x, w, b: x.mean(-1, keepdim=True),
        "mean of two": lambda x, w, b: x.mean((0, 2)),
        "mean in float32": lambda x, w, b: x.bfloat16().mean(-1, dtype=torch.float32),
        "sum": lambda x, w, b: x.sum(1),
        "sum of all": lambda x, w, b: x.sum((), keepdim=True),
        "softmax": lambda x, w, b: x.softmax(-1),
        "softmax of half": lambda x, w, b: x.bfloat16().softmax(-1, dtype=torch.float32),
        "softmax of the middle": lambda x, w, b: x.softmax(1),
        "rms_norm": lambda x, w, b: F.rms_norm(x, (20,), w[0], 1e-5),
        "rms_norm of two": lambda x, w, b: F.rms_norm(x, (3, 20)),
        "integers": lambda x, w, b: (x > 0).sum(-1),
        "empty": lambda x, w, b: x[:0] @ w.T,
    }
    found = {name: call(x, weight, bias) for name, call in calls.items()}
    wide = [t.double() for t in (x, weight, bias)]  # float64 is left to torch
    for name, call in calls.items():
        wanted = call(*wide)
        assert found[name].shape == wanted.shape, name
        torch.testing.assert_close(
            found[name].double(),
            wanted.double(),
            rtol=1e-2 if "half" in name or "32" in name else 2e-5,
            atol=1e-2,
            msg=name,
        )


@pytest.mark.parametrize("shape", [(20,), (3, 20)])
def test_the_fused_rms_norm_is_torchs(shape):
    x, weight = numbers(2, 3, 20), numbers(*shape, seed=1)
    out, scale = invariant_operators.on_gpu()["_fused_rms_norm"](x, shape, weight, 1e-5)
    torch.testing.assert_close(out, F.rms_norm(x, shape, weight, 1e-5))
    axes = tuple(range(-len(shape), 0))
    torch.testing.assert_close(scale, (x.square().mean(axes, keepdim=True) + 1e-5).rsqrt())


def test_a_wrong_shape_is_torchs_error(replaced):
    with pytest.raises(RuntimeError, match="mat1 and mat2|multiplied"):
        numbers(2, 3) @ numbers(4, 5)


def test_gradients_are_torchs(replaced):
    x, weight = numbers(4, 20).requires_grad_(), numbers(9, 20, seed=1).requires_grad_()

    def loss(x, weight):
        return F.linear(F.rms_norm(x, (20,)), weight).log_softmax(-1)[:, 0].mean(-1, keepdim=True).sum()

    found = torch.autograd.grad(loss(x, weight), (x, weight))
    wanted = torch.autograd.grad(loss(x.double(), weight.double()), (x, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_model_scores_alike_with_and_without_a_cache(replaced, monkeypatch):
    """Prompts of different lengths; every product of the model is the kernel's."""
    pytest.importorskip("transformers")
    model = tiny.qwen3(19, num_hidden_layers=1).to(torch.empty(0).device).eval()
    launched = []
    matmul = invariant.matmul
    monkeypatch.setattr(invariant, "matmul", lambda a, *rest: (launched.append(a.shape), matmul(a, *rest))[1])
    agreement = exact.check(model, [[3, 4, 5, 6], [7]], [[8, 9, 2], [1, 5]], locate=False)
    assert agreement.exact and agreement.tokens == 5
    assert len(launched) == 4 * (4 + 3 + 1 + 2)  # passes, times q k v o, the MLP, the head, attention


# --------------------------------------------------------------------------------------------- ahead of time


def test_the_kernels_compile_without_spills(tmp_path):
    """A process of its own, since this one has TRITON_INTERPRET=1."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, ROOT / "benchmarks" / "aot_exact.py", "--output", tmp_path / "aot"]
    done = subprocess.run([*command, "--targets", "sm_90"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "aot.json").read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"matmul_kernel", "row_sum_kernel", "softmax_kernel"}
    assert all(row["spills"] == 0 for row in rows)
