"""``offcorr check``: one line per method, and the exit code."""

from pathlib import Path

import pytest

import offcorr
from offcorr import cli, optional
from offcorr.testing import CHECKS

FILE = Path(__file__).parents[1] / "lab" / "broken.py"


def test_every_method_has_a_line_and_a_failure_decides_the_exit_code(capsys):
    assert cli.main(["check", "minpro?eps_high=0.3", f"{FILE}:finished"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"minpro?eps_high=0.3: {len(CHECKS)} checks passed",
        f"{FILE}:finished: {len(CHECKS)} checks passed",
    ]
    assert cli.main(["check", f"{FILE}:tripled", "ppo"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{FILE}:tripled fails: coefficient_is_the_gradient: stated derivative against autograd")
    assert second == f"ppo: {len(CHECKS)} checks passed"


def test_what_is_no_method_is_refused_before_anything_is_checked(refused):
    assert refused("check", "minpro", "minprop").startswith("offcorr check: METHOD 'minprop': unknown method")
    assert "defines no 'triple_', did you mean" in refused("check", f"{FILE}:triple_")


@pytest.mark.slow
def test_the_kernel_is_compared_under_the_interpreter_or_on_a_gpu(run):
    pytest.importorskip("triton", minversion="3.6")
    done = run("check", "ppo", "--kernel")
    assert done.returncode == 0, done.stderr
    assert "checks passed; kernel and reference differ by " in done.stdout


def test_an_option_that_cannot_be_tried_is_named(tmp_path, capsys):
    file = tmp_path / "sided.py"
    file.write_text("from offcorr import get\ndef sided(side: str = 'both'):\n    return get('ppo')\n")
    assert cli.main(["check", f"{file}:sided"]) == 0
    said = "; whether the option side does anything was not looked at, as it is no number and no Literal\n"
    assert capsys.readouterr().out == f"{file}:sided: {len(CHECKS)} checks passed{said}"


def test_a_method_without_a_kernel_runs_on_the_reference(tmp_path, capsys, monkeypatch):
    pytest.importorskip("triton", minversion="3.6")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "twin.py"
    file.write_text(
        "import offcorr\n"
        "offcorr.spans.register('test_without_twin')(lambda x, rows: x)\n"
        "class NoTwin(offcorr.ratios.Ratio):\n"
        "    span = 'test_without_twin'\n"
        "finished = offcorr.Correction(ratio=NoTwin())\n"
    )
    try:
        assert cli.main(["check", f"{file}:finished", "--kernel"]) == 0
    finally:
        offcorr.spans.unregister("test_without_twin")
    reason = "runs on the reference: the span 'test_without_twin' has no Triton twin"
    assert capsys.readouterr().out == f"{file}:finished: {len(CHECKS)} checks passed; {reason}\n"


def test_the_kernel_needs_triton(refused, monkeypatch):
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    assert "offcorr check --kernel needs triton" in refused("check", "ppo", "--kernel")
