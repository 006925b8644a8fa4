"""What the recipes say of their runs: summary, picture, the demo's progress, sentences and commands."""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import demo  # noqa: E402
import grpo  # noqa: E402


def history(corrects=True, end=0.8, size=0.9, gap=0.01, **more):
    """A log of three updates with an evaluation before each, as a trainer writes it."""
    effect = dict(zip(grpo.EFFECT, (size, 0.1, 0.25, 0.05, 0.97, 0.88), strict=True)) if corrects else {}
    mismatch = dict(zip(grpo.MISMATCH, (2.0, gap, 0.9, 0.0, 1.0, 0.125), strict=True))
    logs = []
    for step, accuracy in enumerate((0.4, 0.9, end)):
        logs.append({"step": step, "eval_reward": accuracy})
        logs.append({"step": step + 1, "loss": 0.1, "reward": accuracy, **mismatch, **effect, **more})
    return logs


def shown(logs, **options):
    with redirect_stdout(io.StringIO()) as said:
        grpo.summarise(logs, "a run", **options)
    return " ".join(said.getvalue().replace("│", " ").split())


def drawn(monkeypatch, plot, *args):
    """Every line of every panel of a picture, and the entries of its legend."""
    import matplotlib.pyplot as plt

    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    plot(*args)
    (figure,) = kept
    monkeypatch.undo()
    plt.close(figure)
    panels = {}
    for axis in figure.axes:
        legend = axis.get_legend()
        entries = [text.get_text() for text in legend.get_texts()] if legend else []
        panels[axis.get_title()] = (entries, axis.get_lines(), [text.get_text() for text in axis.texts])
    return panels


# -- the recipe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("anchor", "said"), [("recomputed", True), ("ewma", True), ("snapshot", False), (None, False)])
def test_a_lag_in_the_engines_gap_is_said_beside_it(anchor, said, monkeypatch, tmp_path):
    """An anchor of the weights of now compares an older sampler with them."""
    logs = history(**{"offcorr/engine/abs_mean": 0.05})
    table = shown(logs, anchor=anchor)
    assert ("engine, with the lag: mean |log-ratio|, nats" in table) == said
    assert ("--anchor snapshot keeps the two apart" in table) == said
    entries = drawn(monkeypatch, grpo.plot, logs, tmp_path / "picture.png", anchor)["mismatch"][0]
    assert ("engine/abs_mean, with the lag" in entries) == said


def test_the_summary_says_what_the_correction_did():
    said = shown(history())
    for row in (
        "mean multiplier, plain ratio = 1 0.90",
        "tokens dropped 0.10",
        "tokens damped 0.25",
        "tokens amplified 0.05",
        "ESS of the tokens, plain ratio 0.970",
        "ESS of the tokens, corrected 0.88",
        "prompts without advantage 0.12",
    ):
        assert row in said
    assert "ESS: effective sample size, 1 where all count alike" in said and len(grpo.caption()) < 300
    assert "correction none" not in said and "factor on the learning rate" not in said
    assert "factor on the learning rate 0.50" in shown(history(lr_scale=0.5))


def test_a_method_of_a_run_without_advantages_is_no_loss_of_trls_own():
    logs = [entry | ({"offcorr/loss/weight_mean": 1.0} if "loss" in entry else {}) for entry in history(corrects=False)]
    said = shown(logs)
    assert "no token had an advantage" in said and "TRL's own" not in said
    assert "TRL's own" in shown(history(corrects=False))


def test_a_number_is_short_to_read():
    numbers = {
        5.5: "5.50",
        0.88654: "0.89",
        0.9862: "0.986",
        1.0: "1.00",
        0.0444: "0.044",
        0.00064: "0.00064",
        0: "0.00",
    }
    assert {number: grpo.shortened(number) for number in numbers} == numbers


def test_noise_does_not_fill_a_panel(monkeypatch, tmp_path, logs):
    """Values that are nearly equal: shares and factors from 0 to 1, and a distance from 0."""
    flat = [entry | {"eval_reward": 0.40 + 0.001 * step} for step, entry in enumerate(history(end=0.4))]
    for draw, args in ((grpo.plot, (flat,)), (demo.plot, ({"minpro": flat, "ctpo": flat},))):
        extra = ("a demo",) if draw is demo.plot else ()
        panels = drawn(monkeypatch, draw, *args, tmp_path / "run.png", *extra)
        for title, (_, curves, _) in panels.items():
            low, high = curves[0].axes.get_ylim() if curves else (0, 1.05)
            assert low <= 0 and (high >= 1 or "log-ratio" in title or title == "mismatch"), title


def test_the_command_that_reads_a_dump_names_tokenizer_and_model():
    words = grpo.diagnose("runs/a/dump", "/cache/toy model", Path("runs/a/checkpoint-4"))
    assert words == (
        "offcorr diagnose runs/a/dump --html runs/a/report.html --overwrite --tokenizer '/cache/toy model' "
        "--model runs/a/checkpoint-4"
    )
    assert "--model" not in grpo.diagnose("runs/a/dump", "toy")


def test_the_model_of_that_command_is_one_that_sampled(tmp_path):
    """The last checkpoint has trained on since, so it computed no log-prob of the dump."""

    def sampled(*versions, resumed=0):
        dump = tmp_path / "dump"
        dump.mkdir(exist_ok=True)
        for file in dump.iterdir():
            file.unlink()
        for step, version in enumerate(versions, 1):
            row = {"prompt_ids": [1], "completion_ids": [2], "rollout_logp": [-1.0], "old_logp": [-1.0]}
            file = dump / f"step_{step:06d}.rank_0.jsonl"
            file.write_text(json.dumps(row | {"rollout_version": version}) + "\n")
        return grpo.sampled_by_model(dump, folders, "toy", resumed)

    folders = [tmp_path]
    assert sampled(4, 8) == (None, "")  # no model was saved
    assert sampled(0, 4, 8) == ("toy", "")
    (tmp_path / "checkpoint-3").mkdir()
    model, why = sampled(4, 8)
    assert model is None and "the weights after update 4 and 8 sampled, and those after 3 were saved." in why
    assert "A --save_steps that divides one of the former, 8 for instance, gives it one." in why
    assert "A --save_steps that divides 8 gives it one." in sampled(4, 8, resumed=4)[1]
    assert "no --save_steps of this run saves them" in sampled(4, 8, resumed=8)[1]
    assert sampled(0, 4, 8) == ("toy", "")
    for step in (4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert sampled(0, 4, 8) == (tmp_path / "checkpoint-4", "")
    (tmp_path / "earlier" / "checkpoint-8").mkdir(parents=True)  # of the run that this one resumed
    folders.append(tmp_path / "earlier")
    assert sampled(4, 8) == (tmp_path / "earlier" / "checkpoint-8", "")
    assert "those after 3, 4, 8 and 10 were saved" in sampled(6)[1]


def test_epochs_that_are_given_say_how_long_a_run_is():
    """transformers would ignore them beside a max_steps."""
    assert grpo.length_of_run(None, None) == (160, 3.0)
    assert grpo.length_of_run(None, 1) == (-1, 1) and grpo.length_of_run(-1, 1) == (-1, 1)
    assert grpo.length_of_run(12, None) == (12, 3.0)
    with pytest.raises(ValueError, match="num_train_epochs is 1 and max_steps is 12, which ends the run"):
        grpo.length_of_run(12, 1)
    with pytest.raises(ValueError, match="num_train_epochs is 0, expected more than 0"):
        grpo.length_of_run(None, 0)


def test_the_last_updates_are_logged_and_count_as_many_as_they_are(capsys):
    """30 updates with a log after every fourth: 28 of them, and the last two."""
    history = grpo.History(Path("runs"))
    for step, max_steps, saves, logs in ((28, 30, False, False), (30, 30, False, True), (2, 7, True, True)):
        control = SimpleNamespace(should_log=False, should_save=saves)
        history.on_step_end(None, SimpleNamespace(global_step=step, max_steps=max_steps), control)
        assert control.should_log == logs
    logs = [{"step": 4 * window, "lag": float(window)} for window in range(1, 8)] + [{"step": 30, "lag": 20.0}]
    assert grpo.means(logs, ("lag",)) == {"lag": (4 * 28 + 2 * 20) / 30}
    evaluated = [{"step": 2, "eval_reward": 0.5, "epoch": 0.1}, *logs, {"step": 30, "train_loss": 0.1}]
    assert grpo.means(evaluated, ("lag",)) == grpo.means(logs, ("lag",))


def test_a_quantity_that_is_logged_from_some_step_on_counts_from_there():
    """As those of a correction do in a run that was resumed with one."""
    logs = [{"step": 8, "lag": 1.0}, {"step": 16, "lag": 2.0}, {"step": 20, "lag": 3.0, "c": 0.5}]
    logs.append({"step": 24, "lag": 3.0, "c": 0.7})
    assert grpo.means(logs, ("lag", "c")) == {"lag": pytest.approx(2.0), "c": pytest.approx(0.6)}


def test_a_resumed_run_does_not_measure_before_training(capsys):
    grpo.say_measuring(256)
    grpo.say_measuring(256, 12)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("measuring the accuracy before training: 256")
    assert said[1].startswith("measuring the accuracy after 12 updates: 256")


def test_no_evaluation_is_none_at_the_start_either(tmp_path):
    assert grpo.Arguments(str(tmp_path), use_cpu=True).eval_on_start
    assert not grpo.Arguments(str(tmp_path), eval_strategy="no", use_cpu=True).eval_on_start


def test_the_summary_of_trls_own_loss_says_so():
    said = shown(history(corrects=False))
    assert "Correction: none: a loss of TRL's own" in said and "tokens dropped" not in said


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ([], "runs/dapo"),
        (["--loss_type", "offcorr:dapo"], "runs/offcorr-dapo"),
        (["--loss_type", "minpro?eps_high=0.3&aggregate=sum"], "runs/minpro-eps_high=0.3-aggregate=sum"),
        (["--config", str(ROOT / "recipes/configs/minpro.yaml")], "runs/minpro"),
        (["--config", str(ROOT / "recipes/configs/minpro.yaml"), "--loss_type", "gspo"], "runs/gspo"),
        (["--loss_type", "minpro", "--output_dir", "mine"], "mine"),
    ],
)
def test_every_loss_has_a_folder_of_its_own(monkeypatch, flags, folder):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--use_cpu", "true", *flags])
    assert grpo.parse(grpo.Arguments).output_dir == folder


@pytest.mark.parametrize("corrects", [True, False])
def test_the_picture_has_no_empty_and_no_constant_zero_line(monkeypatch, tmp_path, corrects):
    panels = drawn(monkeypatch, grpo.plot, history(corrects), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    for entries, curves, texts in panels.values():
        assert len(entries) == len(curves) and bool(curves) != bool(texts)
        assert all(len(line.get_ydata()) and any(line.get_ydata()) for line in curves)
    assert panels["reward"][0] == ["eval_reward", "reward, of samples 2 updates old on average"]
    assert panels["mismatch"][0] == ["staleness/abs_mean"]  # the engine's is 0 all the time
    said = {title: texts for title, (_, _, texts) in panels.items() if texts}
    effects = ("effect of the correction", "effective sample size")
    assert said == ({} if corrects else dict.fromkeys(effects, ["no correction: a loss of TRL's own"]))


# -- the demo ------------------------------------------------------------------------------------------------


@pytest.fixture
def logs():
    return {"trl": history(corrects=False, end=0.3), "minpro": history(), "ctpo": history(end=0.85, size=0.7)}


def test_the_table_has_a_word_or_a_number_in_every_cell(logs):
    table = demo.comparison(logs, "a demo")
    columns = [list(column.cells) for column in table.columns]
    rows = {label: cells for label, *cells in zip(*columns, strict=True)}
    assert rows["mean multiplier, plain ratio = 1"] == ["not measured", "0.90", "0.70"]
    assert rows["tokens damped"] == ["not measured", "0.25", "0.25"]
    assert rows["prompts without advantage"] == ["0.12"] * 3
    assert set(grpo.EFFECT.values()) | set(grpo.MISMATCH.values()) <= rows.keys()
    assert all(cell.strip("- ") for cells in rows.values() for cell in cells)
    assert table.__rich_measure__(demo.Console(width=200), demo.Console(width=200).options).maximum <= 80


def test_a_correction_that_was_not_logged_is_no_lack_of_one(logs):
    logs["minpro"] = history(corrects=False)
    with pytest.raises(KeyError, match="multiplier_vs_ratio"):
        demo.comparison(logs, "a demo")


def test_the_demo_names_the_alarms_of_its_runs():
    logs = {
        "trl": [{"step": 1, "offcorr/monitor/alarms": 0.0}, {"step": 2, "offcorr/monitor/alarms": 1.0}],
        "minpro": [{"step": 1}],
        "ctpo": [{"step": 1, "offcorr/monitor/alarms": 2.0}],
    }
    first, second = demo.alarms(logs, Path("runs"))
    assert first == "the monitor raised one alarm in the run of TRL's default, each a warning in runs/trl/output.txt"
    assert second.startswith("the monitor raised 2 alarms in the run of CTPO")


def test_the_demo_ends_with_sentences_from_the_numbers(logs):
    said = " ".join(demo.verdict(logs, full=True).split())
    assert said.count(". ") == 2 and said.endswith(".")
    for part in (
        "went from 40% to 30%, with a fall of 60 points",
        "samples were 16 updates old",
        "MinPRO ended at 80% and CTPO ended at 85%",
        "falls were 10 and 5 points",
        "MinPRO's mean multiplier was 0.90 times as large (10% of the tokens dropped, 25% damped, 5% amplified)",
        "CTPO's mean multiplier was 0.70 times as large",
    ):
        assert part in said, part
    logs["trl"] = history(corrects=False, end=0.85)
    assert "the setting shows too little" in demo.verdict(logs, full=True)
    assert "compare nothing" in demo.verdict(logs, full=False)


def next_commands():
    return demo.next_commands(Path("runs/demo/trl/rollouts"), "/cache/toy model", seed=0)


def test_the_next_commands_are_commands():
    from offcorr import cli

    commands = [line for line in next_commands().splitlines() if line.startswith("  ")]
    words = [shlex.split(command.partition("offcorr ")[2]) for command in commands]
    assert [word[0] for word in words] == ["train", "diagnose", "methods", "compare"]
    parser = grpo.TrlParser(grpo.Arguments)
    assert parser.parse_args_and_config([*words[0][1:], "--use_cpu", "true"])[0].seed == 0  # the demo's model
    for rest in words[1:]:
        cli._parser().parse_args(rest)
    version = commands[2].split(" methods ")[0].split() + ["--version"]  # the command as it is printed
    assert subprocess.run(version, capture_output=True, text=True, check=True).stdout.startswith("offcorr ")


def test_the_next_commands_where_the_environment_is_not_active(monkeypatch, tmp_path):
    """As after `make demo`: the shell that reads this does not find ``offcorr`` on its PATH."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "offcorr").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(demo.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    assert "\n  offcorr methods" in next_commands()
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    assert "\n  .venv/bin/offcorr methods" in next_commands()
    (tmp_path / ".venv" / "bin" / "offcorr").unlink()
    assert "\n  .venv/bin/python -m offcorr methods" in next_commands()


def test_the_picture_of_the_demo_has_a_line_for_every_legend_entry(monkeypatch, tmp_path, logs):
    panels = drawn(monkeypatch, demo.plot, logs, tmp_path / "demo.png", "a demo")
    assert panels["mean multiplier, plain ratio = 1"][0] == ["MinPRO", "CTPO"]
    assert panels["tokens dropped, damped or amplified"][1][0].get_ydata()[0] == pytest.approx(0.1 + 0.25 + 0.05)
    for entries, curves, texts in panels.values():
        assert len(entries) == len(curves) and bool(curves) != bool(texts)


def test_progress_without_a_terminal(monkeypatch, tmp_path, capsys):
    """Runs that log an update every tenth of a second, and a line of each at least every 0.2 seconds."""
    writes = (
        "import json, pathlib, sys, time\n"
        "file, logs = pathlib.Path(sys.argv[1], 'history.json'), []\n"
        "for step in range(1, 9):\n"
        "    time.sleep(0.1)\n"
        "    logs.append({'step': step, 'reward': 0.1, 'eval_reward': step / 10})\n"
        "    file.with_suffix('.tmp').write_text(json.dumps(logs))\n"
        "    file.with_suffix('.tmp').replace(file)\n"
    )

    def launch(run, folder, steps, seed, sampler):
        folder.mkdir(parents=True)
        return subprocess.Popen([sys.executable, "-c", writes, str(folder)])

    monkeypatch.setattr(demo, "EVERY", 0.2)
    monkeypatch.setattr(demo, "launch", launch)
    runs = {name: demo.RUNS[name] for name in ("minpro", "ctpo")}
    logs = demo.train_all(runs, tmp_path, 8, 0)
    assert {name: len(entries) for name, entries in logs.items()} == {"minpro": 8, "ctpo": 8}
    said = capsys.readouterr().out.splitlines()
    for title in ("MinPRO", "CTPO"):
        own = [line for line in said if f"{title}: " in line]
        assert len(own) >= 2 and own[-1].endswith("update 8 of 8, accuracy 0.80")


def test_a_run_says_what_it_does_before_its_first_update(tmp_path):
    assert demo.progress_of(tmp_path).line(12) == "loading, then measuring the accuracy before training"
    logs = history()
    (tmp_path / "history.json").write_text(json.dumps(logs[:1]))
    state = demo.progress_of(tmp_path)
    assert state.line(12) == "accuracy 0.40 before training; working on the first update" and state.shown
    (tmp_path / "history.json").write_text(json.dumps(logs[:2]))
    assert demo.progress_of(tmp_path).line(12) == "update 1 of 12, accuracy 0.40 before training"
    assert demo.State(108, 0.58, 96).line(160) == "update 108 of 160, accuracy 0.58 at update 96"


def test_the_bar_says_what_each_evaluation_found(capsys):
    args, state = SimpleNamespace(eval_on_start=True, eval_size=32), SimpleNamespace(is_world_process_zero=True)
    state.max_steps, state.global_step, state.log_history = 4, 0, []
    bar = grpo.Bar()
    bar.on_train_begin(args, state, None)
    assert capsys.readouterr().err.startswith("measuring the accuracy before training: 32 held-out examples")
    bar.on_evaluate(args, state, None, metrics={"eval_reward": 0.375})
    state.global_step = 4
    state.log_history = [{"step": 4, "reward": 0.25, "offcorr/engine/abs_mean": 0.00123}]
    bar.on_evaluate(args, state, None, metrics={"eval_reward": 0.5})
    bar.on_train_end(args, state, None)
    out, err = capsys.readouterr()
    assert not out and "accuracy before training: 0.375" in err
    assert "accuracy after 4 updates: 0.500, reward of the samples 0.25, engine's mean |log-ratio| 0.0012" in err


@pytest.mark.parametrize("short", [False, True])
def test_a_short_demo_has_its_own_folder_and_never_claims_the_lag(monkeypatch, tmp_path, capsys, logs, short):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py"] + ["--short"] * short)
    monkeypatch.setattr(demo.toy, "model_path", lambda seed: None)
    trained = []

    def train_all(runs, folder, steps, seed):
        folder.mkdir(parents=True)
        trained.append((str(folder), steps))
        return logs

    monkeypatch.setattr(demo, "train_all", train_all)
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert trained == [("runs/demo-short", 12) if short else ("runs/demo", 160)]
    assert said.count("(up to 11 updates here)") == (2 if short else 0)  # the opening text and the title of the table
    assert (tmp_path / trained[0][0] / "demo.json").exists()


def test_a_demo_that_is_stopped_leaves_no_result_of_an_earlier_one(monkeypatch, tmp_path):
    ours = ["demo.json", "demo.png", *(f"trl/{name}" for name in ("history.json", "history.png", "summary.txt"))]
    (tmp_path / "trl" / "rollouts").mkdir(parents=True)
    for name in [*ours, "trl/notes.txt"]:
        (tmp_path / name).write_text("earlier")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path)])
    monkeypatch.setattr(demo.toy, "model_path", lambda seed: None)

    def stopped(command, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.subprocess, "Popen", stopped)
    monkeypatch.setattr(demo, "RUNS", {"trl": demo.RUNS["trl"]})
    with pytest.raises(KeyboardInterrupt):
        demo.main()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"trl/notes.txt", "trl/output.txt"}
    assert not (tmp_path / "trl" / "rollouts").exists()


@pytest.mark.slow
def test_the_demo_cut_short(tmp_path):
    run = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "demo.py"), "--short", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    first, last = run.stdout.partition("Three runs")[::2]
    assert "minute" in first and "GB of memory" in first and "update 12 of 12, accuracy" in last
    assert "offcorr train --loss_type minpro" in last
    for name in demo.RUNS:
        assert len(list((tmp_path / name / "rollouts").glob("step_*.rank_0.parquet"))) == 12
    report = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert set(grpo.EFFECT) <= report["minpro"]["means"].keys() and not set(grpo.EFFECT) & report["trl"]["means"].keys()


def test_an_interrupted_run_says_what_is_on_disk(tmp_path):
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=12, max_steps=400))
    history = grpo.History(tmp_path)
    assert grpo.what_is_left(trainer, history).startswith("stopped after 12 of 400 updates: nothing was logged yet")
    history.logs = [{"loss": 0.0}]
    said = grpo.what_is_left(trainer, history)
    assert "history.json has the log so far" in said
    assert said.endswith("no model was saved (--save_strategy steps --save_steps 40 saves it)")
    trainer.state.max_steps = 4  # of which a tenth is no update
    assert grpo.what_is_left(trainer, history).endswith("--save_steps 1 saves it)")
    history.on_save(SimpleNamespace(output_dir=tmp_path), trainer.state, None)
    assert grpo.what_is_left(trainer, history).endswith(f"{tmp_path}/checkpoint-12 goes on from there")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("script", ["demo.py", "demo_vllm.py"])
def test_an_interrupted_demo_has_the_exit_code_of_an_interrupt(script, sent, monkeypatch, tmp_path, capsys, request):
    """Ctrl-C, or a kill, of which its runs would hear nothing."""
    import runpy

    before = signal.getsignal(signal.SIGTERM)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))

    def interrupted(*_, **__):
        signal.raise_signal(sent)

    monkeypatch.setattr("offcorr.folders.check_writable", interrupted)
    monkeypatch.setattr(
        sys, "argv", [script, "--output", str(tmp_path), *["--python", sys.executable] * ("vllm" in script)]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "recipes" / script), run_name="__main__")
    assert ended.value.code == 130 and capsys.readouterr().err == "stopped; nothing was compared\n"


def test_a_history_that_will_be_replaced_is_said_first(tmp_path, capsys):
    """Nothing is written before the first log, and the sentence names the flag."""
    first = grpo.History(tmp_path)
    first.say_replaced()
    assert capsys.readouterr().out == ""
    first.file.write_text("[]")
    grpo.History(tmp_path).say_replaced()
    said = f"{first.file} is of an earlier run, and is replaced; another --output_dir keeps both\n"
    assert capsys.readouterr().out == said and first.file.read_text() == "[]" and not first.summary.exists()


def test_the_folder_of_a_run_says_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--loss_type", "minpro", "--loss_kwargs", '{"eps_high": 1.0}'])
    written = grpo.History(tmp_path)
    for step in (1, 2):
        entries = [{"step": i, "loss": 0.1} for i in range(step)]
        written.on_log(None, SimpleNamespace(is_world_process_zero=True, log_history=entries), None)
    with redirect_stdout(io.StringIO()) as said:
        grpo.summarise(history(), "a run", file=written.summary)
    flags, table = written.summary.read_text().split("\n", 1)
    assert flags == """flags: --loss_type minpro --loss_kwargs '{"eps_high": 1.0}'"""
    assert "held-out sampled accuracy, peak" in table and "held-out sampled accuracy, peak" in said.getvalue()


def test_accuracies_are_explained_where_there_are_any():
    assert "Accuracies: --eval_size samples at the run's temperature" in shown(
        history()
    ) and "All else: means over the run" in shown(history())
    said = shown([entry for entry in history() if "eval_reward" not in entry])
    assert "Accuracies" not in said and "Means over the run" in said


def test_the_key_column_is_named_where_there_is_one():
    assert "KEY in the last column" in shown(history()) and "last column" not in grpo.caption()  # of the demo's, too


@pytest.mark.parametrize("recipe", ["grpo", "async_grpo", "accelerate_loop"])
def test_every_recipe_with_a_history_says_so_before_it_trains(recipe):
    source = (ROOT / "recipes" / f"{recipe}.py").read_text()
    after = source[source.index("istory = History(") :]
    assert "history.say_replaced()" in after[: after.index("rainer")]
