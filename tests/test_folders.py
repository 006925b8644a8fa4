"""Tests of ``offcorr.folders``, and of every command that writes: a place that cannot be written is refused first."""

from pathlib import Path

import pytest

from offcorr import cli, folders
from offcorr.cli import docs
from offcorr.folders import check_file, check_writable
from offcorr.lab.mismatch import __main__ as dumps


@pytest.fixture
def below_a_file(tmp_path) -> Path:
    """A folder that no user can make, the root user included."""
    (tmp_path / "notes.txt").write_text("")
    return tmp_path / "notes.txt" / "sub"


@pytest.fixture
def read_only(monkeypatch):
    """Folders in which nothing can be made."""

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(folders.tempfile, "TemporaryDirectory", refused)


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    file = tmp_path / "report.json"
    file.write_text("old")
    check_file("--output", file)
    check_file("--output", tmp_path / "new" / "report.json")
    check_writable("--output", tmp_path / "new" / "runs")
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_reason_is_the_system_s(tmp_path, read_only):
    said = f"cannot write to '{tmp_path}/runs' (in {tmp_path}: Read-only file system); choose another --output"
    for check in (check_file, check_writable):
        with pytest.raises(ValueError) as refusal:
            check("--output", tmp_path / "runs")
        assert str(refusal.value) == said


@pytest.mark.parametrize("path", ["", "folder"])
def test_a_folder_is_no_file(tmp_path, path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"\(Is a directory\); choose another --html"):
        check_file("--html", tmp_path / path)


PLACES = {
    "compare ppo --output {}.png": "--output",
    "bench exact ppo --output {}/new/exact.json": "--output",
    "bench exact ppo --picture {}.png": "--picture",
    "bench loop ppo --output {}/new/loop.json": "--output",
    "bench kernels --output {}/new/kernels.json": "--output",
    "bench arena --folder {}/new": "--folder",
    "bench arena --folder runs --output {}/new/report.json": "--output",
    "diagnose dump.jsonl --html {}.html": "--html",
}


@pytest.mark.parametrize("line", PLACES)
def test_a_command_names_the_option_before_it_begins(line, below_a_file, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    below = str(below_a_file) if "{}/" in line else str(tmp_path / "report")
    if "{}/" not in line:  # the folder of a picture or page must exist

        def refused(*_, **__):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(folders.tempfile, "TemporaryDirectory", refused)
    assert cli.main(line.format(below).split()) == 2
    out, err = capsys.readouterr()
    assert not out and f"cannot write to '{below}" in err and f"; choose another {PLACES[line]}\n" in err


def test_pages_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    for name in docs.GENERATED:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert cli.main(["docs", "--write", "--root", str(tmp_path)]) == 2
    assert "docs/methods.md' (Read-only file system); choose another --root" in capsys.readouterr().err


def test_dumps_with_a_known_cause(below_a_file, capsys):
    with pytest.raises(SystemExit) as ended:
        dumps.main(["--output", str(below_a_file)])
    assert ended.value.code == 2 and "notes.txt is a file); choose another --output" in capsys.readouterr().err
