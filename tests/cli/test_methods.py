"""Tests of ``offcorr methods``: the list, the page about a method, and what is refused."""

import json
import re
from pathlib import Path

import pytest

import offcorr
from offcorr import cli
from offcorr.cli import methods
from offcorr.methods.registry import catalogue

NAMES = [method.name for method in catalogue()]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_about_a_method(name, capsys):
    """Formula, every option with its default and its meaning, the paper and the notes."""
    assert cli.main(["methods", name]) == 0
    page = capsys.readouterr().out
    words = " ".join(page.split())
    method = next(method for method in catalogue() if method.name == name)
    for text in (method.multiplier, method.paper, method.provenance, method.notes):
        assert " ".join(text.split()) in words
    for option, parameter in method.options.items():
        shown = rf"{option}={re.escape(repr(parameter.default))}(, \w+=[^ ]+)* [\w\"]"
        if option in method.required:
            shown = rf"{option} \(required\)(, \w+ \(required\))* \w"
        assert re.search(shown, words), f"{option} has no description"
    assert max(map(len, page.splitlines())) <= 100 and f"in a loop offcorr.get('{name}'" in page


def test_options_that_share_a_sentence_stand_before_it_together(capsys):
    assert cli.main(["methods", "minpro"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.count("distances of the bounds from 1") == 1
    assert "eps_low=1.0, eps_high=0.28 distances" in page and "1 for the first, which has none" in page


def test_pages_of_several_names_and_given_options(capsys):
    assert cli.main(["methods", "grpo", "tis?cap=3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("ppo = grpo\n") and "\n\ntis\n" in page
    assert "cap=3 " in page and """--loss_type tis --loss_kwargs '{"cap": 3}'""" in page


@pytest.mark.parametrize("spec", ["rec?weighted=False", "ppo?dual_clip=None&reject=None", "minpro?eps_high=0.3", "tis"])
def test_the_line_for_trl_is_python(spec, capsys):
    assert cli.main(["methods", spec]) == 0
    page = " ".join(capsys.readouterr().out.split())
    line = re.search(r"in TRL GRPOConfig\(\.\.\., (.*?\})\)", page)[1]
    given = eval(f"dict({line})")
    flag = re.search(r"--loss_kwargs '(.*?)'", page)[1]
    assert given["loss_kwargs"] == json.loads(flag) and offcorr.resolve(given["loss_type"], **given["loss_kwargs"])


def test_a_page_about_a_method_of_ones_own(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import offcorr\n\n\ndef narrow(eps: float = 0.1):\n"
        '    """A narrow clip.\n\n    Args:\n        eps: distance of both bounds from 1.\n    """\n'
        "    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))\n\n\nfixed = narrow(0.2)\n"
    )
    assert cli.main(["methods", f"{file}:narrow", f"{file}:fixed"]) == 0
    page = capsys.readouterr().out
    assert "A narrow clip." in page and "eps=0.1  distance of both bounds from 1." in page
    assert "takes no options" in page


def test_an_example_of_a_page_runs(capsys):
    """The option that the example gives is one that the method takes."""
    for method in catalogue():
        if options := methods._first(method):
            method(**method.example | options)


@pytest.mark.parametrize("command", ["methods", "metrics"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_list_folds_to_the_width_of_the_terminal(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A formula without a space is not broken.
    assert not [line for line in lines if len(line) > width and " " in line.strip()[: width - 8]]
    if command == "methods":
        assert [line.split()[0] for line in lines[: lines.index("")] if line[0] != " "] == NAMES
        flat = " ".join(" ".join(lines).split())
        assert "the smallest ratio before it. [2601.22718]" in flat and "Also called grpo. [1707.06347;" in flat
        assert "In brackets: the paper's arXiv number" in flat and "`offcorr methods NAME` shows one method" in flat


def test_a_list_in_a_pipe_has_one_line_per_method(run):
    """Columns are separated by tabs, so that no line is filled up to the longest, and the first is the name alone."""
    done = run("methods")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert not done.stderr and lines[0] == ["method", "what it does", "source"]
    assert [name for name, _, _ in lines[1:]] == NAMES
    (minpro,) = (line for line in lines if line[0] == "minpro")
    assert minpro[1].endswith("times the smallest ratio before it.") and minpro[2] == "2601.22718"
    assert max(map(len, done.stdout.splitlines())) < 170
    assert all(line.count("\t") == 3 for line in run("metrics").stdout.splitlines())


def test_the_prefix_is_for_the_names_that_trl_has_too(capsys):
    assert cli.main(["methods", "minpro", "cispo", "grpo"]) == 0
    page = capsys.readouterr().out
    for called in ("minpro", "offcorr:cispo", "ppo"):
        assert f"loss_type='{called}'" in page and f"train --loss_type {called} " in page


def test_a_misspelt_method(refused):
    assert "did you mean 'minpro'?" in refused("methods", "minprop")
    assert "did you mean 'eps_high'?" in refused("methods", "minpro?eps_hihg=1")


@pytest.mark.parametrize(("name", "kind"), [("self_normalise", "weight"), ("k1", "rejection"), ("soft_clip", "gate")])
def test_a_stage_is_no_method_and_has_a_page(name, kind, refused):
    said = refused("methods", name)
    assert f"{name!r} is a stage, of the kind {kind}, and no method: docs/methods.md lists" in said
    page = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
    assert f"| {kind} | `{name}(" in page.read_text()
