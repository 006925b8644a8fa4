"""Every pointwise function of every stage, as it stands, runs in Triton and agrees with torch."""

import importlib.util
import textwrap

import pytest
import torch

import offcorr
from offcorr.kernels.rebind import for_triton
from offcorr.stages.base import _FORMS, arguments
from offcorr.stages.pointwise import held_back, nonnegative_kl

offcorr.available()  # some stages stand in the file of the one method that uses them

ARGUMENTS = {
    "K1": {"low": 0.9, "high": 1.2},
    "K2": {"bound": 0.1},
    "K3": {"bound": 0.1},
    "BinaryKL": {"bound": 0.1},
    "EssCapped": {"share": 0.7},
    "NarrowingClip": {"eps_low": 0.2, "eps_high": 0.2, "tail": 0.3, "power": 2.0},
    "ESTR": {"tau": 0.1},
    "NarrowingInterval": {"low": 0.9, "high": 1.1},
    "SquareBound": {"bound": 0.1},
}


def parts():
    for (kind, name), build in sorted(_FORMS.items()):
        if isinstance(build, type):  # a function builds a stage of another name
            stage = build(**ARGUMENTS.get(build.__name__, {}))
            for part in stage.PARTS:
                yield pytest.param(getattr(stage, part), stage.params, id=f"{kind}-{name}-{part}")
    for function in (kl, removed):
        yield pytest.param(function, (), id=f"shared-{function.__name__}")


def kl(log_ratio):
    return nonnegative_kl(log_ratio)


def removed(value, log_ratio, advantage):
    return held_back(value, log_ratio, nonnegative_kl(log_ratio), advantage)


def kernel_calling(pointwise, outputs, folder):
    """A kernel from a file (Triton reads sources) that loads the arguments by name and stores each output."""
    names = [name for name in arguments(pointwise) if name != "p"]
    loads = "\n".join(f"    {name} = tl.load(inputs + {i} * n + lanes)" for i, name in enumerate(names))
    results = ", ".join(f"out{i}" for i in range(outputs))
    stores = "\n".join(f"    tl.store(result + {i} * n + lanes, out{i} + 0.0)" for i in range(outputs))
    source = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def kernel(inputs, result, p, n: tl.constexpr):\n    lanes = tl.arange(0, n)\n"
        f"{loads}\n    {results} = pointwise({', '.join(arguments(pointwise))})\n{stores}\n"
    )
    path = folder / "generated.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    module.pointwise = for_triton(pointwise)
    spec.loader.exec_module(module)
    return module.kernel, names


@pytest.mark.parametrize("pointwise, params", parts())
def test_same_source_same_numbers(pointwise, params, tmp_path):
    n = 64
    generator = torch.Generator().manual_seed(0)
    draw = lambda scale: torch.randn(n, generator=generator) * scale  # noqa: E731
    inputs = {name: draw(0.4) for name in ("log_ratio", "raw_log_ratio", "value", "advantage", "reward")}
    inputs |= {"logp": -draw(1).abs() - 1e-3, "anchor_logp": -draw(1).abs() - 1e-3}
    inputs |= {"entropy": draw(1).abs(), "mean_advantage": draw(0.4)}
    inputs |= {"position": torch.arange(1, n + 1).float(), "length": torch.full((n,), float(n))}

    expected = pointwise(*[params if name == "p" else inputs[name] for name in arguments(pointwise)])
    expected = expected if isinstance(expected, tuple) else (expected,)
    kernel, names = kernel_calling(pointwise, len(expected), tmp_path)
    result = torch.full((len(expected), n), torch.nan)
    kernel[(1,)](torch.stack([inputs[name] for name in names]), result, params or (0.0,), n)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)
