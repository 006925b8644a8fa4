"""The commands and the code of docs/quickstart.md, run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.M | re.S)
SCRIPTS = [block for language, block in BLOCKS if language == "python"]
LINES = [line for language, block in BLOCKS if language == "bash" for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [line for line in LINES if line.startswith("offcorr ")]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=570)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    return ran.stdout


def test_the_page_has_commands_and_code():
    assert {command.split()[1] for command in COMMANDS} == {"--version", "train", "diagnose", "methods", "compare"}
    assert len(SCRIPTS) == 2 and {language for language, _ in BLOCKS} == {"bash", "python"}


@pytest.mark.parametrize("script", SCRIPTS, ids=["trl", "loop"])
def test_a_script_runs_and_prints_its_metrics(script, tmp_path):
    (tmp_path / "mine.py").write_text(script)
    shown = run([sys.executable, "mine.py"], tmp_path)
    assert "offcorr/staleness/" in shown
    if script == SCRIPTS[0]:
        told = re.search(r"`staleness/abs_mean` is about (\.\d+) and `staleness/ess_seq` (\.\d+)", PAGE)
        size, ess = (re.findall(rf"staleness/{name}': ([\d.]+)", shown)[-1] for name in ("abs_mean", "ess_seq"))
        assert float(size) == pytest.approx(float(told[1]), abs=0.02)
        assert float(ess) == pytest.approx(float(told[2]), abs=0.15)


def test_the_loop_prints_about_the_numbers_of_the_page(tmp_path):
    (tmp_path / "loop.py").write_text(SCRIPTS[1])
    printed = re.findall(r": ([\d.]+)$", run([sys.executable, "loop.py"], tmp_path), flags=re.M)
    told = re.search(r"The five numbers are about ([^:]+):", PAGE)[1]
    assert [float(one) for one in printed] == pytest.approx(
        [float(one) for one in re.findall(r"\.\d+", told)], abs=0.01
    )


@pytest.mark.slow
def test_the_commands_run_one_after_another(tmp_path):
    reached = []
    for command in COMMANDS:
        shown = run([sys.executable, "-m", *shlex.split(command)], tmp_path)
        if " train " in command:
            reached = [float(x) for x in re.findall(r"sampled accuracy, (?:start|end)\W+([\d.]+)", shown)]
            (start, low, high) = map(
                float, re.search(r"from about (\.\d+) to between (\.\d+) and (\.\d+)", PAGE).groups()
            )
            assert reached[0] == pytest.approx(start, abs=0.1)  # other processors round differently
            assert low - 0.1 < reached[1] < high + 0.1
    assert len(reached) == 2
    assert (tmp_path / "runs/minpro/history.png").exists() and (tmp_path / "runs/report.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # which .gitignore names
    diagnosis = next(command for command in COMMANDS if " diagnose " in command)
    run([sys.executable, "-m", *shlex.split(diagnosis)], tmp_path)  # the line may be repeated
