"""Tests of the command line as a whole: its commands, their help, and the examples in it."""

import argparse
import shlex

import pytest

import offcorr
from offcorr import cli


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def parsers() -> dict[str, argparse.ArgumentParser]:
    commands = below(cli._parser())
    return commands | {f"bench {name}": parser for name, parser in below(commands["bench"]).items()}


def test_version(run, tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"offcorr {offcorr.__version__}\n"


def test_a_misspelt_flag_of_the_whole_command_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--versoin"])
    assert ended.value.code == 2 and "--versoin, did you mean '--version'?" in capsys.readouterr().err


def test_every_command_has_a_function():
    commands = below(cli._parser())
    assert {"train", "demo", "compare", "bench", "methods", "metrics", "docs"} <= set(commands)
    worlds = below(commands.pop("bench"))
    assert {"exact", "loop", "arena", "kernels"} == set(worlds)
    assert all(callable(command.get_default("run")) for command in (commands | worlds).values())


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0 and "train with GRPO" in capsys.readouterr().out


@pytest.mark.parametrize("name", parsers())
def test_an_example_is_a_line_to_copy(name, monkeypatch):
    """Each begins with the command, a comment behind it is one of the shell's, and the command takes its flags."""
    monkeypatch.setenv("COLUMNS", "80")
    text = parsers()[name].format_help()
    assert " | offcorr" not in " ".join(text.split())
    found = [line for line in text.splitlines() if line.startswith("  offcorr ")]
    assert found or name in ("diagnose", "metrics", "docs")
    for line in found:
        words = shlex.split(line, comments=True)
        assert words[: 1 + len(name.split())] == ["offcorr", *name.split()] or name == "bench"
        if name != "train" and "--help" not in words:  # the recipe reads the flags of train
            cli._parser().parse_args(words[1:])


@pytest.mark.parametrize(
    "line, said",
    {
        "tran": "invalid choice: 'tran'",
        "tran --lag 16": ", did you mean 'train'?\n",
        "bench exat": ", did you mean 'exact'?\n",
        "diagnose dump --fail-on stale_weigths": ", did you mean 'stale_weights'?\n",
        "compare ppo --gapp 0.8": "offcorr compare: error: unrecognized arguments: --gapp 0.8, did you mean '--gap'?\n",
        "methods minpro --eps 3": "offcorr methods: error: unrecognized arguments: --eps 3\n",
        "bench arena --quik": "offcorr bench arena: error: unrecognized arguments: --quik, did you mean '--quick'?\n",
    }.items(),
)
def test_a_misspelt_word_has_its_nearest(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("name", parsers())
def test_every_flag_is_explained(name):
    assert not [
        action.option_strings for action in parsers()[name]._actions if not action.help and action.option_strings
    ]
