"""The generated tables are those of the code, and the command line prints them."""

import re
import subprocess
import sys
from pathlib import Path

import offcorr
from offcorr import cli

ROOT = Path(__file__).resolve().parent.parent


def test_generated_tables_are_up_to_date():
    assert cli.main(["docs", "--check", "--root", str(ROOT)]) == 0, "run `make docs`"


def test_a_stale_table_is_noticed(tmp_path):
    for name in cli.GENERATED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace("| ppo = grpo |", "| ppo |"))
    assert cli.main(["docs", "--check", "--root", str(tmp_path)]) == 1
    assert cli.main(["docs", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_command_line():
    shown = subprocess.run(
        [sys.executable, "-m", "offcorr.cli", "methods", "--markdown"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    listed = {name for row in shown.splitlines()[2:] for name in row.split("|")[1].strip().split(" = ")}
    assert listed == set(offcorr.available())


def test_a_reader_may_stop_early():
    command = [sys.executable, "-m", "offcorr.cli", "methods"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as shown:
        shown.stdout.close()
        assert shown.stderr.read() == b""
    assert shown.returncode == 0


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
