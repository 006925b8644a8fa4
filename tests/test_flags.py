"""The parsers of commands and scripts: no abbreviation is taken, and the nearest flag is named."""

import ast
from pathlib import Path

import pytest

from offcorr.flags import Parser

ROOT = Path(__file__).resolve().parent.parent


def made(file: Path) -> list[tuple[int, ast.Call]]:
    """The calls in a file that make a parser, each with its line."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    names = ("argparse.ArgumentParser", "HfArgumentParser", "TrlParser")
    return [(call.lineno, call) for call in calls if ast.unparse(call.func) in names]


def test_no_parser_takes_an_abbreviation():
    """`--loss_typ minpro` would be read as --loss_type until a flag begins alike; what is misspelt is an error."""
    takes = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in ("offcorr", "recipes", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
        for line, call in made(file)
        if not any(keyword.arg == "allow_abbrev" for keyword in call.keywords)
    ]
    assert not takes


@pytest.mark.parametrize("words", (["--metho=ppo"], ["run", "--metho", "ppo"], ["--methd=ppo"]))
def test_an_abbreviated_flag_is_an_error_that_names_the_flag(words, capsys):
    parser = Parser()
    parser.add_argument("--method")
    parser.add_subparsers().add_parser("run").add_argument("--method")
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert "did you mean '--method'?" in capsys.readouterr().err
