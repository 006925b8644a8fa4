"""Tests of the command line: what is listed and explained, what is refused at the door, and what training starts."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offcorr
from offcorr import cli

ROOT = Path(__file__).resolve().parent.parent
NAMES = [method.name for method in cli.catalogue()]


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "offcorr", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=570, **options)


# ------------------------------------------------------------------------------------------------------- lists


def test_version(tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"offcorr {offcorr.__version__}\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_about_a_method(name, capsys):
    """Formula, every option with its default and its meaning, the paper and the notes."""
    assert cli.main(["methods", name]) == 0
    page = capsys.readouterr().out
    words = " ".join(page.split())
    method = next(method for method in cli.catalogue() if method.name == name)
    for text in (method.multiplier, method.paper, method.provenance, method.notes):
        assert " ".join(text.split()) in words
    for option, parameter in method.options.items():
        shown = rf"{option}={re.escape(repr(parameter.default))}(, \w+=[^ ]+)* [\w\"]"
        if option in method.required:
            shown = rf"{option} \(required\)(, \w+ \(required\))* \w"
        assert re.search(shown, words), f"{option} has no description"
    assert max(map(len, page.splitlines())) <= 100 and f"offcorr.get('{name}'" in page


def test_options_that_share_a_sentence_stand_before_it_together(capsys):
    assert cli.main(["methods", "minpro"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.count("distances of the bounds from 1") == 1
    assert "eps_low=1.0, eps_high=0.28 distances" in page and "1 for the first, which has none" in page


def test_pages_of_several_names_and_given_options(capsys):
    assert cli.main(["methods", "grpo", "tis?cap=3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("ppo = grpo\n") and "\n\ntis\n" in page
    assert "cap=3 " in page and """--loss_type offcorr:tis --loss_kwargs '{"cap": 3}'""" in page


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
    for method in cli.catalogue():
        if options := cli._first(method):
            method(**method.example | json.loads(options))


@pytest.mark.parametrize("command", ["methods", "metrics"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_list_folds_to_the_width_of_the_terminal(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A formula without a space is not broken.
    assert not [line for line in lines if len(line) > width and " " in line.strip()[: width - 8]]
    if command == "methods":
        assert {"minpro", "ppo = grpo"} <= set(lines) and any("eps_high=0.28" in line for line in lines)
        assert "rho: its engine ratio" in " ".join(lines)


def test_a_list_in_a_pipe_has_one_line_per_method():
    """Columns are separated by tabs, so that no line is filled up to the longest."""
    lines = run("methods").stdout.splitlines()
    assert len(lines) == len(NAMES) + 1 and not any("   " in line for line in lines)
    (minpro,) = (line.split("\t") for line in lines if line.startswith("minpro"))
    assert lines[0].split("\t") == ["method", "multiplier", "options", "paper"]
    assert "eps_high=0.28" in minpro[2] and minpro[3] == "2601.22718"
    assert all(line.count("\t") == 3 for line in run("metrics").stdout.splitlines())


def refused(*words: str, capsys) -> str:
    assert cli.main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_misspelt_method(capsys):
    assert "did you mean 'minpro'?" in refused("methods", "minprop", capsys=capsys)
    assert "did you mean 'eps_high'?" in refused("methods", "minpro?eps_hihg=1", capsys=capsys)


def test_docs_outside_a_checkout(tmp_path, capsys):
    said = refused("docs", "--root", str(tmp_path), capsys=capsys)
    assert "not a checkout" in said and "docs/methods.md" in said and "--root" in said


# ---------------------------------------------------------------------------------------------------- training


@pytest.fixture
def started(monkeypatch):
    """The recipes and commands that would have been started."""
    found = []
    monkeypatch.setattr(cli, "require", lambda *_, **__: None)
    monkeypatch.setattr(cli, "_run", lambda recipe, flags: found.append([str(recipe), *flags]) or 0)
    monkeypatch.setattr(subprocess, "call", lambda command: found.append(command) or 0)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    return found


GRPO = str(ROOT / "recipes" / "grpo.py")


def test_training_runs_the_recipe_with_its_flags(started):
    flags = ["--loss_type", "minpro", "--loss_kwargs", '{"eps_high": 0.3}', "--lag", "16", "--use_cpu"]
    assert cli.main(["train", *flags]) == 0
    assert cli.main(["train", "--num_processes", "1", *flags]) == 0
    assert started == [[GRPO, *flags]] * 2


def test_a_configuration_by_file_or_by_name(started, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lag: 4\n")
    cli.main(["train", "--lag", "2", f"--config={file}"])
    cli.main(["train", "--config", "minpro"])
    own = str(ROOT / "recipes/configs/minpro.yaml")
    assert started == [[GRPO, "--config", str(file), "--lag", "2"], [GRPO, "--config", own]]


def test_several_processes_are_launched(started, capsys):
    folder = ROOT / "recipes" / "accelerate"
    cli.main(["train", "--num_processes", "3", "--lag", "4"])
    cli.main(["train", "--config_file", "fsdp2", "--num_processes=8", "--lag", "4"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    assert started == [
        [*launch, str(folder / "two_cpu_processes.yaml"), "--num_processes", "3", GRPO, "--lag", "4"],
        [*launch, str(folder / "fsdp2.yaml"), "--num_processes", "8", GRPO, "--lag", "4"],
    ]
    assert "accelerate.commands.launch" in capsys.readouterr().out


def test_several_gpus(started, monkeypatch, capsys):
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli.torch.cuda, "device_count", lambda: 2)
    cli.main(["train", "--num_processes", "2"])
    assert started[0][3:] == ["--multi_gpu", "--num_processes", "2", GRPO]
    capsys.readouterr()
    assert "--num_processes is 4, but there are 2 GPUs" in refused("train", "--num_processes", "4", capsys=capsys)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--config", "no.yaml"], "--config is 'no.yaml', which is not a file; expected one, or one of ctpo, gsm8k"),
        (["--config_file", "zero9"], "--config_file is 'zero9', which is not a file; expected one, or one of ddp"),
        (["--num_processes", "two"], "--num_processes is 'two', expected 1, 2, ..."),
        (["--num_processes", "0"], "--num_processes is '0', expected 1, 2, ..."),
        (["--config"], "--config has no value"),
        (["--config", "--lag", "2"], "--config has no value"),
        (["--config", "minpro", "--config=ctpo"], "--config is given twice"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(flags, said, started, capsys):
    assert said in refused("train", *flags, capsys=capsys)
    assert not started


@pytest.mark.parametrize("command", ["train", "demo"])
def test_what_is_missing_is_named(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    said = refused(command, capsys=capsys)
    assert said == f'offcorr {command}: needs trl, not installed here: pip install "offcorr[recipes]"\n'


@pytest.mark.parametrize("command", ["train", "demo"])
def test_help_loads_nothing(command, started, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0 and not started
    shown = capsys.readouterr().out
    assert f"offcorr {command}" in shown and ("minpro, vcpo" in shown) == (command == "train")


def test_every_flag_of_the_demo_is_in_its_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    shown = capsys.readouterr().out
    flags = re.findall(r'add_argument\("(--\w+)"', (ROOT / "recipes" / "demo.py").read_text())
    assert "--short" in flags and all(flag in shown for flag in flags)


def test_every_command_has_a_function():
    def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return commands.choices

    commands = below(cli._parser())
    assert {"train", "demo", "compare", "bench", "methods", "metrics", "docs"} <= set(commands)
    worlds = below(commands.pop("bench"))
    assert {"exact", "loop", "arena", "kernels"} == set(worlds)
    assert all(callable(command.get_default("run")) for command in (commands | worlds).values())


def trained(tmp_path: Path, *flags: str) -> str:
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    sizes = ("--train_size", "64", "--eval_size", "8", "--max_steps", "1", "--per_device_eval_batch_size", "8")
    done = run("train", *flags, *sizes, "--output_dir", "out", "--use_cpu", "--disable_tqdm", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "history.json").stat().st_size > 100
    return done.stdout


def test_training_from_a_folder_without_recipes(tmp_path):
    """What it runs is found beside or inside the package, not in the current folder."""
    said = trained(tmp_path, "--config", "ctpo")
    assert "ctpo at lag 16" in said and "tokens dropped" in said  # of the one update, though logging_steps is 4


@pytest.mark.slow
def test_training_in_two_processes(tmp_path):
    batch = ("--per_device_train_batch_size", "32")
    assert "--num_processes 2" in trained(tmp_path, "--config", "minpro", "--num_processes", "2", *batch)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_mistaken_flag_is_one_of_the_command(command, monkeypatch, capsys):
    """Not one of the recipe that the command runs."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    assert cli.main([command, "--no-such-flag", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: offcorr {command} ") and f"\noffcorr {command}: error: " in said
    assert ".py" not in said


MISTAKES = {
    "--lagg 16": "'lagg' (did you mean 'lag'?)",
    "--lag two": "--lag: invalid int value: 'two'",
    "--lag -3": "lag is -3",
    "--precision int9": "precision is 'int9'",
    "--loss_type minprop": "loss_type: unknown method 'minprop', did you mean 'minpro'?",
    '--loss_type minpro --loss_kwargs {"eps_hihg":1}': "loss_kwargs: minpro has no option 'eps_hihg', did you mean",
    "--use_vllm true --lag 4": "lag is 4",
    "--train_size 0": "train_size is 0",
    "--task chain_summ": "task is 'chain_summ' (did you mean 'chain_sum'?)",
    "--task no.jsonl": "task is 'no.jsonl', which is not a file",
    "--model ./no": "model is './no', which is not a folder",
    "--resume_from_checkpoint no": "resume_from_checkpoint is 'no', which is not a folder",
    "learning_rat: 1e-4": "'learning_rat' (did you mean 'learning_rate'?)",
    "lag: sixteen": "--lag: invalid int value: 'sixteen'",
    "lag: 2\nlag: 4": "has the key 'lag' twice",
    "lag: 4\n  precision: int8": "run.yaml is no YAML: mapping values are not allowed here",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_recipe_s_flags_is_named_before_anything_is_loaded(mistake, tmp_path, monkeypatch, capsys):
    """Flags, or the text of a YAML file; one line says it, without a traceback."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    from transformers import AutoTokenizer

    from offcorr import toy

    def loaded(*_, **__):
        raise AssertionError("something was loaded")

    monkeypatch.setattr(toy, "model_path", loaded)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loaded)
    monkeypatch.chdir(tmp_path)
    words = mistake.split(" ")
    if not mistake.startswith("--"):
        (tmp_path / "run.yaml").write_text(mistake)
        words = ["--config", "run.yaml"]
    assert cli.main(["train", *words, "--output_dir", "out"]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[mistake] in said and said.startswith("usage:") and len(said) < 600


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert cli.main(["train", "--output_dir", "notes.txt/run"]) == 2
    assert "output_dir is 'notes.txt/run', below" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert cli.main(["train", "--output_dir", "run"]) == 2
    assert "in which nothing may be written: name another folder" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_one_sentence(tmp_path):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    done = run("train", "--model", "no/such-model", "--output_dir", "out", "--use_cpu", cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "model is 'no/such-model', which is no folder here" in done.stderr


def test_an_error_of_the_recipe_is_the_exit_code(tmp_path):
    pytest.importorskip("trl")
    done = run("train", "--loss_type", "minprop", "--output_dir", "out", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean" in done.stderr and "Traceback" not in done.stderr


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0 and "train with GRPO" in capsys.readouterr().out
