"""``offcorr diagnose``: what it prints, exit codes, what it refuses before a dump is read, and broken dumps."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from offcorr import cli
from offcorr.diagnose import Record, progress
from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.command import finite
from tests.diagnose.simulated import world

ROOT = Path(__file__).resolve().parents[2]


def rows(records):
    """The records as JSON has them."""
    made = []
    for record in records:
        values = {field.name: getattr(record, field.name) for field in fields(Record) if field.name != "where"}
        made.append(
            {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in values.items()
                if value is not None
            }
        )
    return made


def written(path, records, **changes):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        for row in rows(records):
            file.write(json.dumps({**row, **changes}) + "\n")
    return path


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    for name in ("clean", "top_p", "precision", "sentinel"):
        written(folder / f"{name}.jsonl", world(name).records())
    return folder


def run(capsys, *words):
    """Exit code, stdout and stderr."""
    try:
        code = cli.main(["diagnose", *map(str, words)])
    except SystemExit as error:
        code = error.code
    return (code, *capsys.readouterr())


# ------------------------------------------------------------------------------------------------ what it prints


def test_the_first_line_is_the_verdict(dumps, capsys):
    code, out, err = run(capsys, dumps / "top_p.jsonl")
    assert code == 0 and err == ""
    assert out.splitlines()[0].startswith(f"top_p: {CAUSES['top_p'].title} (confidence 0.")
    assert "To do: sample without truncation" in out


@pytest.mark.parametrize(
    "name, given, code",
    [
        ("top_p", ["any"], 3),
        ("top_p", ["clean"], 0),
        ("top_p", ["shift", "top_p"], 3),
        ("top_p", ["shift", "top_k"], 0),
        ("clean", ["any"], 0),
        ("clean", ["clean"], 3),
        ("clean", ["unknown"], 0),
    ],
)
def test_fail_on(dumps, capsys, name, given, code):
    assert run(capsys, dumps / f"{name}.jsonl", "--fail-on", *given)[0] == code


def test_fail_on_knows_its_causes(dumps, capsys):
    code, _, err = run(capsys, dumps / "clean.jsonl", "--fail-on", "topp")
    assert code == 2 and "topp" in err and "top_p" in err


@pytest.mark.parametrize("name", ["clean", "top_p", "sentinel"])
def test_json(dumps, capsys, name):
    code, out, err = run(capsys, dumps / f"{name}.jsonl", "--json")
    found = json.loads(out, parse_constant=lambda value: pytest.fail(f"{value} is no JSON"))
    assert code == 0 and err == ""
    assert set(found) == {"verdict", "confidence", "causes", "d_unexplained", "cannot_tell", "numbers", "warnings"}
    assert found["verdict"] == name and 0.5 <= found["confidence"] <= 1
    for cause in found["causes"]:
        numbers = {"confidence", "statistic", "se", "threshold", "share", "rough", "of_d", "remainder"}
        assert {"cause", "advice", "evidence", "title", *numbers} == set(cause)
        assert cause["advice"] == CAUSES[cause["cause"]].advice
    assert [cause["cause"] for cause in found["causes"]] == ([] if name == "clean" else [name])


def test_json_has_no_infinities(dumps, capsys, tmp_path):
    """Infinite and absent values of the data end as null."""
    made = rows(world("clean").records())
    for row in made:
        row["rollout_logp"][3] = -float("inf")
    path = tmp_path / "infinite.jsonl"
    path.write_text("\n".join(map(json.dumps, made)))
    code, out, _ = run(capsys, path, "--json")
    found = json.loads(out, parse_constant=lambda value: pytest.fail(f"{value} is no JSON"))
    assert code == 0 and found["numbers"]["abs_mean"] is None
    assert found["causes"][0]["cause"] == "sentinel" and found["causes"][0]["share"] == 1.0
    assert any("infinite.jsonl, row 1: rollout_logp is -inf" in said for said in found["warnings"])
    assert finite({"a": [np.float32("nan"), np.bool_(True), (np.int64(1),)]}) == {"a": [None, True, [1]]}


def test_json_is_all_of_stdout_in_a_process(dumps):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "always", "-m", "offcorr", "diagnose", str(dumps / "top_p.jsonl"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout)["verdict"] == "top_p" and done.returncode == 0


def test_paths_folders_and_formats_together(capsys, tmp_path):
    records = world("top_p").records()
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    written(tmp_path / "one.jsonl", records[:8])
    written(tmp_path / "folder" / "two.jsonl.gz", records[8:16])
    np.savez(
        tmp_path / "folder" / "deep" / "three.npz",
        **{
            name: np.stack([getattr(record, name) for record in records[16:20]])  # of one prompt
            for name in ("prompt_ids", "completion_ids", "rollout_logp", "old_logp", "mask")
        },
        prompt_lengths=[len(record.prompt_ids) for record in records[16:20]],
    )
    paths = [tmp_path / "one.jsonl", tmp_path / "folder"]
    count = 20
    try:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows(records[24:])), tmp_path / "four.parquet")
        paths.append(tmp_path / "four.parquet")
        count = 28
    except ImportError:
        pass
    code, out, _ = run(capsys, *paths, "--json")
    found = json.loads(out)
    assert code == 0 and found["numbers"]["sequences"] == count and found["verdict"] == "top_p"


# ---------------------------------------------------------------------------------------------------- broken dumps


def refused(capsys, *words):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and "Traceback" not in err
    assert err.startswith("offcorr diagnose: ")
    return err


def test_a_path_that_does_not_exist(capsys, tmp_path):
    assert f"{tmp_path / 'none.jsonl'} does not exist" in refused(capsys, tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("empty.jsonl", b"", "is empty (0 bytes)"),
        ("other.jsonl", b'{"text": "x"}\n', "row 1 is no row of a dump: it has text. A row"),
        ("noise.bin", bytes(range(128, 256)), "which is no dump"),
        ("broken.jsonl", b'{"prompt_ids": [1], "comple', "row 1"),
        ("bad.parquet", b"PAR1" + bytes(100), "bad.parquet"),
        ("bad.jsonl.gz", b"\x1f\x8b" + bytes(100), "bad.jsonl.gz"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"prompt_ids": [1], "completion_ids": [2], "rollo' * 9000, mtime=0)[:90],
            "cut.jsonl.gz",
        ),
    ],
)
def test_what_is_no_dump(capsys, tmp_path, name, content, said):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    assert said in refused(capsys, path)


def test_an_empty_folder(capsys, tmp_path):
    (tmp_path / "below").mkdir()
    said = refused(capsys, tmp_path)
    assert f"diagnose: the folder {tmp_path} has no file in it. A dump is written there by `offcorr train" in said
    assert f"--dump_rollouts {tmp_path}`" in said and f"GRPOConfig(dump_rollouts='{tmp_path}')" in said


def test_nan_everywhere(capsys, tmp_path):
    path = written(tmp_path / "nan.jsonl", world("clean").records(), rollout_logp=[None] * 48)
    err = refused(capsys, path)
    assert "no token has a log-prob of both sides: rollout_logp is NaN, old_logp is NaN" in err
    assert "nan.jsonl, row 1: rollout_logp is nan at 48 of 48 tokens" in err


def test_a_mask_of_zeros(capsys, tmp_path):
    path = written(tmp_path / "masked.jsonl", world("clean").records(), mask=[0] * 48)
    assert "or mask is 0" in refused(capsys, path)


def test_a_cut_file_is_diagnosed_up_to_there(capsys, tmp_path):
    path = written(tmp_path / "cut.jsonl", world("top_p").records())
    path.write_bytes(path.read_bytes()[:-100])
    code, out, _ = run(capsys, path)
    assert code == 0 and out.startswith("top_p: ") and "cut.jsonl, row 32" in " ".join(out.split())


# ------------------------------------------------------------------------------- refused before the dump is read


def test_html_is_not_overwritten(dumps, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    page.write_text("mine")
    missing = tmp_path / "none.jsonl"  # which would be named if the dump were read first
    err = refused(capsys, missing, "--html", page)
    assert f"--html is {page}, which exists; --overwrite replaces it" in err and page.read_text() == "mine"
    code, _, err = run(capsys, dumps / "top_p.jsonl", "--html", page, "--overwrite")
    assert code == 0 and err == f"report: {page}\n" and "<h1>top_p: " in page.read_text()


def test_a_failure_leaves_the_page_alone(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    page.write_text("mine")
    refused(capsys, tmp_path / "none.jsonl", "--html", page, "--overwrite")
    assert page.read_text() == "mine"


def test_html_in_the_place_of_something_else(dumps, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    missing = tmp_path / "none.jsonl"
    assert "does not exist" in refused(capsys, missing, "--html", tmp_path / "folder" / "report.html")
    assert "expected a file" in refused(capsys, missing, "--html", tmp_path, "--overwrite")
    assert "expected a file that ends in .html" in refused(capsys, missing, "--html", tmp_path / "report.txt")
    assert "--overwrite is given without --html" in refused(capsys, missing, "--overwrite")
    dump = written(tmp_path / "dump.jsonl", world("clean").records())
    before = dump.read_bytes()
    assert "a file of the dump" in refused(capsys, dump, "--html", dump, "--overwrite")
    assert "a file of the dump" in refused(capsys, tmp_path, "--html", dump, "--overwrite")
    assert dump.read_bytes() == before


@pytest.mark.parametrize(
    "words, said",
    [
        (["--checkpoint", "x"], "--checkpoint is given without --model"),
        (["--temperature", "0.7"], "--temperature is given without --model"),
        (["--rescored", "3"], "--rescored is given without --model"),
        (["--tokenizer", "x"], "--tokenizer is given without --html"),
        (["--model", "x", "--temperature", "0"], "--temperature is 0.0, expected a number > 0"),
        (["--model", "x", "--temperature", "nan"], "--temperature is nan, expected a number > 0"),
        (["--model", "x", "--temperature", "-1"], "--temperature is -1.0"),
        (["--model", "x", "--rescored", "0"], "--rescored is 0, expected at least 1"),
    ],
)
def test_options_out_of_place(capsys, tmp_path, words, said):
    assert said in refused(capsys, tmp_path / "none.jsonl", *words)


def test_folders_that_are_no_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    missing, empty, file = tmp_path / "none.jsonl", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("{}")
    assert "a folder without config.json" in refused(capsys, missing, "--model", empty)
    assert "which does not exist" in refused(capsys, missing, "--model", tmp_path / "nothing")
    assert "--model is the file" in refused(capsys, missing, "--model", file)
    good = tmp_path / "good"
    good.mkdir()
    (good / "config.json").write_text("{}")
    assert "--checkpoint is" in refused(capsys, missing, "--model", good, "--checkpoint", empty)


def test_a_model_and_a_tokenizer_that_do_not_load(dumps, capsys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    err = refused(capsys, dumps / "clean.jsonl", "--model", tmp_path)
    assert f"--model {tmp_path} cannot be loaded: " in err and len(err.splitlines()) == 1
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    err = refused(capsys, dumps / "clean.jsonl", "--html", page, "--tokenizer", tmp_path)
    assert f"--tokenizer {tmp_path} cannot be loaded: " in err and not page.exists()


def test_a_core_install(dumps, tmp_path):
    """Without transformers, pyarrow and matplotlib jsonl works; the rest says what to install."""
    parquet = tmp_path / "dump.parquet"
    parquet.write_bytes(b"PAR1" + bytes(8) + b"PAR1")
    jsonl = str(dumps / "top_p.jsonl")
    code = "import sys\nfor name in ('transformers', 'pyarrow', 'matplotlib', 'trl'): sys.modules[name] = None\n"
    code += "from offcorr import cli\n"
    code += "for words in " + repr(
        [
            [jsonl],
            [jsonl, "--html", str(tmp_path / "a.html")],
            [jsonl, "--model", "x"],
            [str(parquet)],
        ]
    )
    code += ": print(cli.main(['diagnose', *words]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("top_p: ") and done.stdout.split()[-4:] == ["0", "2", "2", "2"]
    html, model, table = done.stderr.splitlines()
    assert html == "offcorr diagnose: --html needs matplotlib, not installed here: pip install matplotlib"
    assert model == 'offcorr diagnose: --model needs transformers, not installed here: pip install "offcorr[recipes]"'
    assert "pyarrow" in table and "pip install" in table


# -------------------------------------------------------------------------------------------------------- progress


class Terminal:
    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("live", [False, True])
def test_progress_of_a_long_dump(monkeypatch, live):
    terminal = Terminal(live)
    clock = iter(range(10_000))
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.Reading() as reading:
        reading.bytes(30, 60)
        list(reading.of(world("clean").records()))
    if live:
        assert "\r\033[K[##########..........] 50% read: " in terminal.text
        assert terminal.text.endswith("\r\033[K") and "\n" not in terminal.text
    else:
        lines = terminal.text.splitlines()
        assert 3 < len(lines) < 8 and "\r" not in terminal.text
        assert lines[0].startswith("50% read: 6 sequences, 288 tokens (")
        assert lines[-1].startswith("32 sequences, 1,536 tokens read; looking for causes")


@pytest.mark.parametrize("live", [False, True])
def test_nothing_is_said_of_a_short_dump(monkeypatch, live):
    terminal = Terminal(live)
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    with progress.Reading() as reading:
        list(reading.of(world("clean").records()[:2]))
    assert terminal.text == ""


# ----------------------------------------------------------------------------------------------------------- --model


def test_a_model_names_the_cause(capsys, tmp_path):
    for package in ("transformers", "trl", "tokenizers", "matplotlib"):
        pytest.importorskip(package)
    from offcorr.rollout.decode import Sampling
    from tests.diagnose.test_rescore import dump
    from tests.rollout.rollout_models import fresh_model, tokenizer

    model = fresh_model(0).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    path = written(tmp_path / "dump.jsonl", dump(model, sampling=Sampling(top_k=4)))
    page = tmp_path / "report.html"
    capsys.readouterr()
    given = ["--model", tmp_path / "model", "--tokenizer", tmp_path / "model", "--html", page, "--rescored", 8]
    code, out, _ = run(capsys, path, *given)
    assert code == 0 and out.startswith("top_k: ")
    assert "Scored again with --model:" in out and "top_k 4 [top_k] explains 100% of it" in out
    html = page.read_text()
    assert "<h1>top_k: " in html and "top_k 4 [top_k] explains 100% of it" in html
    # In a process of its own: some packages print to stdout when they are imported.
    command = [sys.executable, "-m", "offcorr", "diagnose", path, "--model", tmp_path / "model", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["verdict"] == "top_k" and found["rescored"]["sequences"] == 12
    assert found["rescored"]["hypotheses"][0]["words"] == "top_k 4"


def test_a_model_that_neither_a_folder_nor_the_hub_has_says_so(monkeypatch):
    """What transformers says of it speaks of the network alone."""
    from offcorr.diagnose.command import _say_where, _unloadable

    def unreachable(*_, **__):
        raise ConnectionError("no such host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(ValueError, match="^--model checkpoint-30 cannot be loaded: .* no such host$"):
        _say_where("--model", "checkpoint-30")
    said = str(_unloadable("--model", "checkpoint-30", OSError("We couldn't connect")))
    assert said == (
        "--model checkpoint-30 cannot be loaded: there is no folder checkpoint-30 here, and of the hub's: We couldn't "
        "connect"
    )
