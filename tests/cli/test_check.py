"""``offcorr check``: one line per method, and the exit code."""

from pathlib import Path

import pytest

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
    pytest.importorskip("triton")
    done = run("check", "ppo", "--kernel")
    assert done.returncode == 0, done.stderr
    assert "checks passed; kernel and reference differ by " in done.stdout


def test_the_kernel_needs_triton(refused, monkeypatch):
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    assert "offcorr check --kernel needs triton" in refused("check", "ppo", "--kernel")
