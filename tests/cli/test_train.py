"""Tests of ``offcorr train`` and ``offcorr demo``: what is refused at the door, and what is started."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from offcorr import cli
from offcorr.cli import early as early_flags
from offcorr.cli import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def started(monkeypatch):
    """The recipes and commands that would have been started."""
    found = []
    monkeypatch.setattr(train, "require", lambda *_, **__: None)
    monkeypatch.setattr(train, "_run", lambda recipe, flags: found.append([str(recipe), *flags]) or 0)
    monkeypatch.setattr(train, "launch", lambda command, arguments: found.append(arguments) or 0)
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    return found


GRPO = str(ROOT / "recipes" / "grpo.py")


def test_training_runs_the_recipe_with_its_flags(started):
    flags = ["--loss_type", "minpro", "--loss_kwargs", '{"eps_high": 0.3}', "--lag", "16", "--use_cpu"]
    assert cli.main(["train", *flags]) == 0
    assert cli.main(["train", "--num_processes", "1", *flags]) == 0
    assert started == [[GRPO, *flags]] * 2


def test_a_configuration_by_file_or_by_name(started, tmp_path):
    pytest.importorskip("yaml")
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
    launch = ["--config_file"]
    assert started == [
        [*launch, str(folder / "two_cpu_processes.yaml"), "--num_processes", "3", GRPO, "--lag", "4"],
        [*launch, str(folder / "fsdp2.yaml"), "--num_processes", "8", GRPO, "--lag", "4"],
    ]
    assert "accelerate launch --config_file" in capsys.readouterr().out


def test_several_gpus(started, monkeypatch, refused, capsys):
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 2)
    cli.main(["train", "--num_processes", "2"])
    assert started[0] == ["--multi_gpu", "--num_processes", "2", GRPO]
    capsys.readouterr()
    assert "--num_processes is 4, but there are 2 GPUs" in refused("train", "--num_processes", "4")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--config", "no.yaml"], "--config is 'no.yaml', which is not a file; expected one, or one of ctpo, gsm8k"),
        (["--config", "minpor"], "vcpo, did you mean 'minpro'?"),
        (["--config_file", "zero9"], "--config_file is 'zero9', which is not a file; expected one, or one of ddp"),
        (["--num_processes", "two"], "--num_processes is 'two', expected 1, 2, ..."),
        (["--num_processes", "0"], "--num_processes is '0', expected 1, 2, ..."),
        (["--config"], "--config has no value"),
        (["--config", "--lag", "2"], "--config has no value"),
        (["--config", "minpro", "--config=ctpo"], "--config is given twice"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(flags, said, started, refused):
    assert said in refused("train", *flags)
    assert not started


@pytest.mark.parametrize("command", ["train", "demo"])
def test_what_is_missing_is_named(command, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "trl", None)
    said = refused(command)
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


def trained(run, tmp_path: Path, *flags: str) -> str:
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    sizes = ("--train_size", "64", "--eval_size", "8", "--max_steps", "1", "--per_device_eval_batch_size", "8")
    done = run("train", *flags, *sizes, "--output_dir", "out", "--use_cpu", "--disable_tqdm", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "history.json").stat().st_size > 100
    return done.stdout


def test_training_from_a_folder_without_recipes(run, tmp_path):
    """What it runs is found beside or inside the package, not in the current folder."""
    said = trained(run, tmp_path, "--config", "ctpo")
    assert "ctpo at lag 16" in said and "tokens dropped" in said  # of the one update, though logging_steps is 4


@pytest.mark.slow
def test_training_in_two_processes(run, tmp_path):
    batch = ("--per_device_train_batch_size", "32")
    assert "--num_processes 2" in trained(run, tmp_path, "--config", "minpro", "--num_processes", "2", *batch)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_mistaken_flag_is_one_of_the_command(command, monkeypatch, capsys):
    """Not one of the recipe that the command runs."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.setattr(train, "_run", None)  # not reached
    try:
        assert cli.main([command, "--no-such-flag", "1"]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    said = capsys.readouterr().err
    assert f"offcorr {command}: " in said and "no-such-flag" in said
    assert ".py" not in said


MISTAKES = {
    "--lagg 16": "'lagg', did you mean 'lag'?",
    "--los_type minpro": "'los_type', did you mean 'loss_type'?",
    "--loss_typ minpro": "'loss_typ', did you mean 'loss_type'?",
    "--lag two": "--lag: invalid int value: 'two'",
    "--lag -3": "lag is -3",
    "--precision int9": "precision is 'int9'",
    "--anchor snapsht": "'snapsht'",
    "--ess_lr sqr": "'sqr'",
    "--log_metrics ful": "log_metrics is 'ful', did you mean 'full'?",
    "--monitor stopp": "monitor is 'stopp', did you mean 'stop'?",
    "--loss_type minprop": "loss_type: unknown method 'minprop', did you mean 'minpro'?",
    '--loss_type minpro --loss_kwargs {"eps_hihg":1}': "loss_kwargs: minpro has no option 'eps_hihg', did you mean",
    "--use_vllm true --lag 4": "lag is 4",
    "--train_size 0": "train_size is 0",
    "--save_steps 4": "save_steps is 4, and save_strategy is 'no', as it is by default here, which saves nothing: add ",
    "--loss_type asymre": "steps_per_generation is 4, expected gradient_accumulation_steps, 1",
    "--sampler vllm://localhost": "sampler is 'vllm://localhost', without a port, expected vllm://host:port",
    "--reward_weights 1 2": "reward_weights is [1.0, 2.0], expected one number: a task has one reward",
    "--seed -1": "seed is -1, expected 0 or more",
    "--max_steps -2": "max_steps is -2, expected 1 or more updates, or -1 for",
    "--dump_rollouts .": "--dump_rollouts '.' holds here.txt, expected a new or empty folder",
    "--max_steps 0": "max_steps is 0, expected 1 or more updates, or -1 for",
    "--model runs/kept/checkpoint-99": "model is 'runs/kept/checkpoint-99', which is not a folder",
    "--task chain_summ": "task is 'chain_summ' (did you mean 'chain_sum'?)",
    "--task no.jsonl": "task is 'no.jsonl', which is not a file",
    "--task runs/trl.jsonl": "task is 'runs/trl.jsonl', whose rows have no question, but prompt, answer",
    "--task runs/here.jsonl": "task is 'runs/here.jsonl', whose first line is no JSON",
    "--model ./no": "model is './no', which is not a folder",
    "--resume_from_checkpoint no": "resume_from_checkpoint is 'no', which is not a folder",
    "resume_from_checkpoint: true": "resume_from_checkpoint is true, the last checkpoint in output_dir, and 'out'",
    "--resume_from_checkpoint runs/16 --max_steps 16": "max_steps is 16, the number of updates in all, and runs/16 has "
    "16 already: nothing is left to train, expected 17 or more",
    "--resume_from_checkpoint runs": "'runs', which holds checkpoints; expected one of them: runs/checkpoint-8",
    "learning_rat: 1e-4": "'learning_rat', did you mean 'learning_rate'",
    "lag: sixteen": "run.yaml: lag: invalid int value: 'sixteen'",
    "lag: [3]": "[3]",
    "{loss_type: minpro, loss_kwargs: [1, 2]}": "loss_kwargs is [1, 2], expected a mapping or a JSON object",
    "precision: [int8, 2]": "precision is ['int8', 2], expected one of fp32",
    "num_train_epochs: 1\nmax_steps: 4": "num_train_epochs is 1 and max_steps is 4, which ends the run",
    "max_steps: three": "run.yaml: max_steps: invalid int value: 'three'",
    "use_cpu: perhaps": "run.yaml: use_cpu: Truthy value expected",
    "--per_device_train_batch_size 3 --steps_per_generation 1": "generation_batch_size (3) must be divisible by "
    "num_generations (8); the 3 are 3 x 1 x 1: --per_device_train_batch_size x --num_processes x --steps_per_",
}


@pytest.mark.parametrize("command", (["offcorr", "train"], [GRPO]), ids=("offcorr train", "recipes/grpo.py"))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_recipe_s_flags_is_named_before_anything_is_loaded(
    mistake, command, tmp_path, monkeypatch, capsys
):
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
    (tmp_path / "here.txt").touch()
    (tmp_path / "runs" / "16").mkdir(parents=True)
    (tmp_path / "runs" / "checkpoint-8").mkdir()
    (tmp_path / "runs" / "trl.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "runs" / "here.jsonl").write_text("1+1=2\n")
    (tmp_path / "runs" / "16" / "trainer_state.json").write_text('{"global_step": 16}')
    words = mistake.split(" ")
    if not mistake.startswith("--"):
        (tmp_path / "run.yaml").write_text(mistake)
        words = ["--config", "run.yaml"]
    words += ["--output_dir", "out"]
    assert (train._run(Path(GRPO), words) if command == [GRPO] else cli.main(["train", *words])) == 2
    said = capsys.readouterr().err.removeprefix(f"{train.LOADING}\n")
    assert MISTAKES[mistake] in said and said.startswith(("usage:", "offcorr train: ")) and len(said) < 700


def test_options_of_a_file_s_method_beside_a_flag_s_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "minpro", "--loss_type", "ctpo"]) == 2
    said = capsys.readouterr().err
    assert "loss_kwargs: ctpo has no option 'eps_high'" in said
    assert said.rstrip().endswith("configs/minpro.yaml: --loss_kwargs '{}' leaves it out")
    (tmp_path / "run.yaml").write_text("loss_type: ctpo\nloss_kwargs: {eps_high: 0.3}")
    assert cli.main(["train", "--config", "run.yaml"]) == 2
    assert "leaves it out" not in capsys.readouterr().err


EARLY = [
    "--lagg 16",
    "--loss_typ minpro",
    "--lag two",
    "--precision int9",
    "--anchor snapsht",
    "--lag -3",
    "--ess_lr sqr",
    "--log_metrics ful",
    "--monitor stopp",
    "--max_steps 0",
    "--loss_type minprop",
    '--loss_type minpro --loss_kwargs {"eps_hihg":1}',
    "learning_rat: 1e-4",
    "--per_device_train_batch_size 3 --steps_per_generation 1",
]


@pytest.mark.parametrize("mistake", EARLY)
def test_a_mistake_in_the_flags_is_named_before_trl_is_loaded(mistake, started, tmp_path, monkeypatch, refused):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    words = mistake.split(" ")
    if not mistake.startswith("--"):
        (tmp_path / "run.yaml").write_text(mistake)
        words = ["--config", "run.yaml"]
    assert MISTAKES[mistake] in refused("train", *words) and not started


def test_batches_of_two_processes_are_looked_at_before_they_are_launched(started, refused):
    pytest.importorskip("trl")
    flags = ("--per_device_train_batch_size", "3", "--steps_per_generation", "1")
    said = refused("train", "--num_processes", "2", *flags)
    assert "the 6 are 3 x 2 x 1: --per_device_train_batch_size" in said and not started
    assert cli.main(["train", "--num_processes", "8", *flags]) == 0 and len(started) == 1
    assert cli.main(["train", "--config_file", "fsdp2", *flags]) == 0 and len(started) == 2  # it says how many
    assert cli.main(["train", *flags, "--generation_batch_size", "24"]) == 0 and len(started) == 3


def test_a_mistake_takes_less_time_than_trl(tmp_path):
    """What it loads is neither TRL nor transformers."""
    pytest.importorskip("trl")
    code = (
        "import sys; from offcorr import cli; cli.main(sys.argv[1:]); print({'trl', 'transformers'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", code, "train", "--loss_type", "minprop"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert "unknown method 'minprop'" in done.stderr and done.stdout == "set()\n"


def test_every_option_of_the_recipe_is_known_before_trl_is_loaded(monkeypatch):
    """And its type, where that is a number."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    recipe = runpy.run_path(GRPO)
    real = {action.dest: action for action in recipe["Parser"](recipe["Arguments"])._actions if action.dest != "help"}
    flags = {flag for action in real.values() for flag in action.option_strings}
    early = early_flags._parser(early_flags.options_of(Path(GRPO)))
    assert real.keys() - {"config"} <= {action.dest for action in early._actions}
    assert flags - {"--config"} <= {flag for action in early._actions for flag in action.option_strings}
    for action in early._actions:
        if action.type in (int, float):
            assert real[action.dest].type is action.type, action.dest


def test_a_trl_that_has_its_options_elsewhere_leaves_the_flags_to_the_recipe(started, monkeypatch):
    monkeypatch.setattr(early_flags, "_package", lambda name: Path("/no/such/folder"))
    assert cli.main(["train", "--lagg", "16"]) == 0 and started == [[GRPO, "--lagg", "16"]]


def test_the_help_begins_with_the_library_s_and_the_recipe_s_flags(capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    assert cli.main(["train", "--help-all"]) == 0
    first, others = capsys.readouterr().out.split("TRL's and transformers' other options:")
    for flag in ("--loss_type", "--loss_kwargs", "--anchor", "--log_metrics", "--lag", "--precision", "--picture"):
        assert f"\n  {flag}" in first and f"\n  {flag}" not in others
    assert "\n  --beta " in others and len(first) < len(others)


FILES = {
    "lag: 2\nlag: 4": "run.yaml has the key 'lag' twice",
    "loss_kwargs:\n  cap: {start: 4, start: 2}": "run.yaml has the key 'start' twice",
    "lag: 4\n  precision: int8": "run.yaml is no YAML: mapping values are not allowed here",
    "- lag": "run.yaml is no mapping, expected lines of flag: value",
}


@pytest.mark.parametrize("text", FILES)
def test_a_mistake_of_the_file_is_named_before_trl_is_loaded(text, started, tmp_path, monkeypatch, refused):
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert FILES[text] in refused("train", "--config", "run.yaml") and not started


@pytest.mark.parametrize("text", FILES)
def test_the_recipe_names_a_mistake_of_the_file_by_itself(text, tmp_path, monkeypatch, capsys):
    """As under `accelerate launch recipes/grpo.py`."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    assert train._run(Path(GRPO), ["--config", "run.yaml"]) == 2
    assert FILES[text] in capsys.readouterr().err


def test_what_takes_seconds_is_said(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trl.trainer.grpo_trainer", raising=False)
    monkeypatch.setattr(train.runpy, "run_path", lambda *_, **__: None)
    assert train._run(Path("recipe.py"), []) == 0
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", train)
    assert train._run(Path("recipe.py"), []) == 0
    assert capsys.readouterr().err == f"{train.LOADING}\n"


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert cli.main(["train", "--output_dir", "notes.txt/run"]) == 2
    said = capsys.readouterr().err
    assert "cannot write to 'notes.txt/run' (" in said and "notes.txt is a file); choose another --output_dir" in said
    assert cli.main(["train", "--output_dir", "run", "--train_size", "0"]) == 2
    assert "train_size is 0" in capsys.readouterr().err and not (tmp_path / "run").exists()  # the trial leaves nothing


@pytest.mark.parametrize(
    "words, option",
    [
        (["demo", "--output", "notes.txt/run"], "--output"),
        (["train", "--dump_rollouts", "notes.txt/run"], "--dump_rollouts"),
    ],
)
def test_every_folder_that_is_written_is_tried(words, option, tmp_path, monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and f"notes.txt is a file); choose another {option}\n" in err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder here in which even the root user cannot write")
def test_a_folder_that_the_system_refuses_is_named_before_anything_is_loaded(monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    from offcorr import toy

    monkeypatch.setattr(toy, "model_path", None)  # not reached
    assert cli.main(["train", "--output_dir", "/proc/nowrite"]) == 2
    assert "cannot write to '/proc/nowrite' (in /proc: " in (said := capsys.readouterr().err)
    assert "; choose another --output_dir" in said and "Traceback" not in said


def test_a_model_that_is_nowhere_is_one_sentence(run, tmp_path):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    done = run("train", "--model", "no/such-model", "--output_dir", "out", "--use_cpu", cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "model is 'no/such-model', which is no folder here" in done.stderr


def test_an_error_of_the_recipe_is_the_exit_code(run, tmp_path):
    pytest.importorskip("trl")
    done = run("train", "--loss_type", "minprop", "--output_dir", "out", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean" in done.stderr and "Traceback" not in done.stderr


def test_a_flag_s_mistake_is_not_one_of_the_file(tmp_path, monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("max_steps: 1\n")
    assert cli.main(["train", "--config", "run.yaml", "--max-steps", "1.5"]) == 2
    assert "argument --max_steps/--max-steps: invalid int value: '1.5'" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        ("--lagg 16", "offcorr train: unknown flag, or key of the YAML file, 'lagg', did you mean 'lag'?"),
        ("--loss_type minprop", "unknown method 'minprop', did you mean 'minpro'? `offcorr methods` lists them"),
        ("--model no/such-model", "model is 'no/such-model', which is no folder here"),
        (
            "--per_device_train_batch_size 3 --steps_per_generation 1",
            "the 6 are 3 x 2 x 1: --per_device_train_",
        ),
    ],
)
def test_a_mistake_is_said_once_by_two_processes(run, flags, said, tmp_path):
    """With the exit code of one process, and without torch's table and the launcher's traceback."""
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    flags = [*flags.split(), "--output_dir", "out", "--use_cpu"]
    done = run("train", "--num_processes", "2", *flags, cwd=tmp_path)
    assert done.returncode == (1 if "no/such-model" in flags else 2), done.stderr
    assert done.stderr.count(said) == 1 and said in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr


def launched(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("accelerate")
    (tmp_path / "program.py").write_text(program)
    config = ROOT / "recipes" / "accelerate" / "two_cpu_processes.yaml"
    code = "import sys; from offcorr.cli.launch import launch; sys.exit(launch('offcorr train', sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--config_file", str(config), str(tmp_path / "program.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


FIRST = "import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(100)\n"


@pytest.mark.parametrize(
    "ends, code, last",
    [
        ("raise ValueError('why it failed')", 1, "ValueError: why it failed"),
        ("sys.exit(5)", 5, ""),
        ("os.kill(os.getpid(), 9)", 137, "offcorr train: process 1 was ended by SIGKILL (often: no memory left)"),
    ],
)
@pytest.mark.slow
def test_a_failure_ends_with_what_the_process_said(ends, code, last, tmp_path):
    done = launched(tmp_path, f"{FIRST}{ends}\n")
    assert done.returncode == code
    assert (done.stderr.strip().splitlines() or [""])[-1].startswith(last) and "ChildFailedError" not in done.stderr
    assert not last or last in done.stderr


def test_only_the_first_process_says_a_mistake_at_once(monkeypatch, capsys):
    for package in ("trl", "rich", "matplotlib", "reasoning_gym"):
        pytest.importorskip(package)
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank, waits in (("0", []), ("1", [60])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train._run(Path(GRPO), ["--lag", "two"]) == 2  # found before the processes look for each other
        assert waited == waits
    assert "--lag: invalid int value: 'two'" in capsys.readouterr().err
