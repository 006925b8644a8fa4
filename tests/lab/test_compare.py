"""``offcorr compare``: the table, the picture, JSON, a user's own method, and what is refused."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import offcorr
from offcorr import cli
from offcorr.lab import compare, comparison, results, text
from offcorr.lab.compare import seconds_per_token
from offcorr.lab.exact import Setting, World, couples
from offcorr.methods.registry import catalogue
from offcorr.stages.checks import warn_again
from tests.fresh import python

ROOT = Path(__file__).resolve().parent.parent.parent
GEO_MIS = "geo_mis?low=0.5&high=2.0"
TINY = ("--vocabulary", "2", "--length", "4", "--draws", "10")

OWN = """
import offcorr

@offcorr.register("of_a_user")
def mine(cap: float = 2.0) -> offcorr.Correction:
    return offcorr.Correction(ratio=offcorr.ratios.Prefix(), gate=offcorr.gates.DetachedClip(cap))

def plain(cap: float = 2.0) -> offcorr.Correction:
    return mine(cap=cap)

finished = offcorr.Correction(gate=offcorr.gates.Clip(0.1, 0.1))
"""


@pytest.fixture
def own_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    yield file
    if "of_a_user" in offcorr.available():
        offcorr.unregister("of_a_user")


@pytest.fixture
def command(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            code = cli.main(["compare", *map(str, argv)])
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def rows():
    world = World.of(Setting(vocabulary=2, length=4))
    methods = [(name, offcorr.get(name)) for name in ("ppo", "minpro", "tis", "sequence_is", "m2po")]
    return world, compare.compare(world, methods, draws=10)


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_table_folds_to_the_width(rows, width):
    world, found = rows
    text = comparison.table(world, found, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    left_out = re.search(r"Left out for the width of this terminal: ([\w ,]+);", flat)
    for column in comparison.COLUMNS:
        if left_out and column.head in left_out[1].split(", "):
            assert column.leaves
            continue
        assert flat.count(column.head) >= 2, f"{column.head}: in the head and in the caption"
        assert " ".join(column.formula.split()) in flat
    assert comparison.NOT_A_RANKING in flat
    for row in found:
        assert re.search(rf"^{row.name}\b.*\d$", text, flags=re.M)


def test_what_must_not_be_concluded_stands_beside_the_table_and_names_only_its_methods(rows):
    world, found = rows
    shown = comparison.table(world, found, 100)
    _, scope, body, caution, _ = (" ".join(part.split()) for part in shown.split("\n\n"))
    assert (
        scope == f"{comparison.SCOPE} {comparison.REACHED}"
        and body.startswith("bias")
        and caution == comparison.NOT_A_RANKING
        and "reinforce" not in shown
    )
    assert comparison.REACHED not in " ".join(comparison.table(world, found[-2:-1], 100).split())


def test_above_the_table_reinforce_is_set_against_what_it_beats():
    world = World.of(Setting())

    def above(*names: str) -> str:
        found = compare.compare(world, [(name, offcorr.get(name)) for name in names], timed=False)
        setting, scope, table, *_ = comparison.table(world, found, 100).split("\n\n")
        assert "bias" in table and "staleness" in setting
        return " ".join(scope.split())

    assert above("ppo", "ctpo") == f"{comparison.SCOPE} {comparison.REACHED}" and above("minpro") == comparison.SCOPE
    assert "nearer to the true one here than that of ppo and ctpo; yet in the arena, training" in above(
        "reinforce", "ppo", "ctpo"
    )
    assert "than that of 4 of the 4 other methods; yet" in above("ppo", "ctpo", "gspo", "dapo", "reinforce")
    assert above("reinforce") == f"{comparison.SCOPE} reinforce corrects nothing, and {comparison.COLLAPSES}"
    on_policy = compare.compare(World.of(Setting(gap=0.0)), [(n, offcorr.get(n)) for n in ("reinforce", "ppo")])
    assert "than that of" not in comparison.table(World.of(Setting(gap=0.0)), on_policy, 100)  # equal but for rounding


def test_the_gaps_and_the_reward_are_said_in_the_library_s_words(rows):
    flat = " ".join(comparison.table(*rows, 100).split())
    assert "effective sample size (ESS) 0.50 of the sequences" in flat
    assert re.search(r"reward 0 or 1: 1 for \d+% of the sequences that the sampler draws, and for \d+% of", flat)


def test_a_gap_that_the_engine_does_not_reach_is_said(command):
    words = ("ppo", "--engine-gap", "0.15", "--engine-regime")
    said = " ".join(command(*words, "quantised")[1].split())
    assert "nats per token; --engine-gap asks for 1 - ESS = 0.15, reached is 0.18 " in said
    assert "--gap asks for" not in said
    assert "asks for" not in command(*words, "noise")[1]


def test_options_without_a_default_have_the_values_of_the_illustration_and_the_caption_says_so(command):
    code, out, err = command("estr", "pnpo?low=0.9", "estr?tau=0.2", *TINY)
    said = " ".join(out.split())
    assert not code and "estr ran with tau=0.1, an illustration: this option has no default." in said
    assert "pnpo?low=0.9 ran with high=1.25, an illustration: this option has no default." in said
    assert said.count("an illustration") == 2


def test_every_column_is_there_where_there_is_room(rows):
    assert "Left out" not in comparison.table(*rows, 110)
    assert "Left out" in comparison.table(*rows, 80)


def test_all_methods_are_one_block_of_80_columns(rows):
    """Names of the library's own methods need no second block and no folding."""
    world, found = rows
    wide = [found[0]._replace(name=max((m.name for m in catalogue()), key=len))]
    text = comparison.table(world, wide, 80)
    assert text.count(comparison.COLUMNS[0].head + " ") and len(re.findall(rf"^{wide[0].name} ", text, flags=re.M)) == 1


def test_a_name_is_folded_only_where_leaving_columns_out_is_not_enough(rows):
    world, found = rows
    long = [row._replace(name="mine.py:mine_adaptive") for row in found if row.measured.drawn][:1]
    assert long and "\nmine.py:mine_adaptive *  " in comparison.table(world, long, 110)
    assert "\nmine.py:\nmine_adaptive" in comparison.table(world, long, 72)


def test_long_names_are_folded_where_they_can_be_broken():
    assert text.folded("minpro?eps_high=0.3&aggregate=sum", 16) == ["minpro?", "eps_high=0.3&", "aggregate=sum"]
    assert text.folded("some/folder/mine.py:method", 14) == ["some/folder/", "mine.py:method"]
    assert text.folded("a_name_that_cannot_be_broken", 10) == ["a_name_tha", "t_cannot_b", "e_broken"]
    assert text.folded("ppo", 14) == ["ppo"]


def test_the_table_says_what_is_the_same_and_what_was_drawn(rows):
    flat = " ".join(comparison.table(*rows, 100).split())
    assert "The same update in this setting: ppo, tis." in flat
    assert "m2po *" in flat and "10 batches of each size were drawn (--draws)" in flat
    assert "Two names of one method: ppo = grpo." in flat
    assert "The engine has no mismatch here; --engine-gap 0.05" in flat
    world = World.of(Setting(vocabulary=2, length=4, engine_gap=0.1))
    found = compare.compare(world, [("ppo", offcorr.get("ppo")), ("tis", offcorr.get("tis"))])
    flat = " ".join(comparison.table(world, found, 100).split())
    assert "The same update" not in flat and "no mismatch" not in flat and "couples" not in flat


# -- the command ---------------------------------------------------------------------------------------------


def test_the_table_is_printed_before_the_picture_is_drawn(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    before = []
    monkeypatch.setattr(compare, "picture", lambda *_: before.append(capsys.readouterr().out))
    assert cli.main(["compare", "ppo", *TINY, "--output", str(tmp_path / "compare.png")]) == 0
    assert comparison.NOT_A_RANKING[:40] in before[0]


def test_a_users_methods_stand_beside_the_named_ones(command, own_file):
    own = [f"{own_file}:mine?cap=1.5", f"{own_file}:plain", f"{own_file}:finished"]
    code, out, err = command("ppo", "minpro?eps_high=0.3", *own, *TINY, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert [row["method"] for row in data["methods"]] == ["ppo", "minpro?eps_high=0.3", *own]
    assert data["methods"][1]["config"]["eps_high"] == 0.3 and data["methods"][2]["config"]["cap"] == 1.5
    same = ("bias", "direction_64", "kept", "multiplier")
    prefix = json.loads(command("prefix_is?cap=1.5", *TINY, "--json")[1])["methods"][0]
    assert {name: data["methods"][2][name] for name in same} == pytest.approx({name: prefix[name] for name in same})


def test_json_holds_every_column_and_repeats_by_seed(command):
    first, again, other = (
        json.loads(command("minpro", "m2po", *TINY, "--seed", seed, "--json")[1]) for seed in (3, 3, 4)
    )
    assert list(first["columns"]) == [column.key for column in comparison.COLUMNS]
    assert first["setting"] == {**vars(Setting(vocabulary=2, length=4, seed=3))}
    assert (
        first["note"] == f"{comparison.SCOPE} {comparison.NOT_A_RANKING}"
        and first["distances"]["staleness"]["ess"] < 0.51
    )
    for data in (first, again, other):
        for row in data["methods"]:
            assert row.keys() >= data["columns"].keys()
            assert row.pop("nanoseconds_per_token") > 0
    assert first["methods"] == again["methods"] != other["methods"]


def test_every_option_reaches_the_setting(command):
    given = {
        "gap": 0.2, "regime": "noise", "engine_gap": 0.1, "engine_regime": "sharper", "length": 3, "vocabulary": 3,
        "policy": "tied", "advantages": "per-token", "seed": 5,
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert json.loads(command("ppo", *flags, "--json")[1])["setting"] == given


def test_without_a_method_all_are_compared_within_the_time(command):
    wall, cpu = time.perf_counter(), time.process_time()
    code, out, err = command("--json")
    assert code == 0, err
    assert [row["method"] for row in json.loads(out)["methods"]] == [method.name for method in catalogue()]
    assert time.process_time() - cpu < 30, f"{time.process_time() - cpu:.1f} s of CPU, {time.perf_counter() - wall:.1f}"


def test_the_picture_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = command("ppo", "minpro", *TINY, "--output", tmp_path / "compare.png")
    assert code == 0 and (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'compare.png'}" in err and "--output compare.png draws" not in out
    assert "--output compare.png draws this" in command("ppo", *TINY)[1]


def test_a_folder_is_no_file_to_replace(tmp_path):
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="choose another --output$"):
            results.free(tmp_path, overwrite)


def test_a_picture_is_replaced_only_where_that_was_asked_for(command, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "compare.png"
    path.write_text("another one")
    code, out, err = command("ppo", *TINY, "--output", path)
    assert code == 2 and not out and path.read_text() == "another one"
    assert err.endswith(f"{path} exists; choose another --output, or allow it with --overwrite\n")
    assert command("ppo", *TINY, "--output", path, "--overwrite")[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_option_is_named_before_anything_runs(command, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(World, "of", lambda setting: pytest.fail("it ran"))
    code, out, err = command("ppo", "--output", tmp_path / "compare.png")
    assert code == 2 and not out
    assert err == (
        "offcorr compare: error: --output draws with matplotlib, which is not installed: pip install matplotlib, or "
        "leave --output out (all else does without)\n"
    )


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--gap", "1.5"], "--gap is 1.5, expected a share of the samples, 0 <= gap < 1"),
        (["--gap", "wide"], "argument --gap: invalid float value: 'wide'"),
        (["--engine-gap", "-1"], "--engine-gap is -1.0, expected a share of the samples"),
        (["--regime", "steal"], "--regime is 'steal', did you mean 'stale'? Expected one of ['stale', 'noise', 'drift"),
        (["--engine-regime", "sharper"], "--engine-regime is 'sharper', but --engine-gap is 0, so it has no effect"),
        (["--regime", "noise", "--gap", "0"], "--regime is 'noise', but --gap is 0, so it has no effect"),
        (["--engine-regime", "int8"], "--engine-regime is 'int8', expected one of ['noise', 'quantised'"),
        (["--advantages", "gae"], "--advantages is 'gae', expected one of ['grpo', 'per-token']"),
        (["--length", "40"], "--length is 40 with a vocabulary of 4, more than 65,536 sequences"),
        (["--seed", "-1"], "--seed is -1, expected a whole number >= 0"),
        (["--draws", "1"], "--draws is 1, expected at least 2 batches"),
        (["--gap", "0.99", "--regime", "stale"], "--gap is 0.99, but regime 'stale' reaches at most 0."),
        (["--output", "here.jpeg"], "--output is 'here.jpeg', expected a file name that ends in .png, .svg or .pdf"),
        (["--output", "no/such/a.png"], "--output is 'no/such/a.png', but there is no folder 'no/such'"),
        (["minprop"], "error: unknown method 'minprop', did you mean 'minpro'? `offcorr methods` lists them"),
        (["minpro?eps=1"], "METHOD 'minpro?eps=1': minpro has no option 'eps'"),
        (["ppo", "ppo"], "METHOD 'ppo' is given twice"),
        (["--json", "out.json"], "METHOD 'out.json' is a file's name: write --json > FILE, or --output FILE"),
        (["nowhere.py:mine"], "METHOD 'nowhere.py:mine': nowhere.py is not a file"),
        (["--gaps", "1"], "unrecognized arguments: --gaps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_option(command, argv, said):
    code, out, err = command(*argv)
    assert code == 2 and not out
    assert said in err and "Traceback" not in err


FAULTY = {
    "1 +": "METHOD '{}:mine': SyntaxError: invalid syntax",
    "mine = 7": "{} has 'mine', which is 7, expected a correction, or a function or class that returns one",
    "def mine(): return 7": "METHOD '{0}:mine': TypeError: {0}:mine built a int, expected an offcorr.Correction",
    "def other(): return 7": "METHOD '{0}:mine': {0} defines no 'mine'",
    "def mine(): return missing": "METHOD '{}:mine': NameError: name 'missing' is not defined",
}
NEEDS_A_VERSION = """
import offcorr
from dataclasses import dataclass

@dataclass(frozen=True)
class Aged(offcorr.rejections.Rejection):
    needs = frozenset({"rollout_version"})
    mismatch = "staleness"
    measure = staticmethod(lambda log_ratio: log_ratio)
    rule = staticmethod(lambda value: (value * 0 + 1, value < 9))

mine = offcorr.Correction(reject=Aged())
"""
FAULTY[NEEDS_A_VERSION] = "METHOD '{}:mine' cannot be compared: rollout_version is None, but Aged() of 'custom' needs"


@pytest.mark.parametrize("text", FAULTY, ids=lambda text: text.split("\n")[0] or "needs a version")
def test_a_faulty_file_is_named(command, tmp_path, text):
    file = tmp_path / "faulty.py"
    file.write_text(text)
    code, out, err = command(f"{file}:mine", *TINY)
    assert code == 2 and not out
    assert FAULTY[text].format(file) in err and "Traceback" not in err


SQUISH = """
import offcorr

class Squish(offcorr.ratios.Token):
    pass

def half(eps: float = 0.1) -> offcorr.Correction:
    return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))

own = offcorr.Correction()
"""


def test_an_unknown_name_of_a_file_is_told_what_the_file_has(command, tmp_path):
    file = tmp_path / "squish.py"
    file.write_text(SQUISH)
    _, _, err = command(f"{file}:squash", *TINY)
    has = "It has 'Squish' (a ratio), 'half' (a function), 'own' (a correction)"
    assert f"defines no 'squash', did you mean 'Squish'? {has}" in err
    _, _, err = command(f"{file}:Squish", *TINY)
    assert "has 'Squish', a ratio, expected a correction: Correction(ratio=Squish(...))" in err


def test_progress_without_a_terminal_is_on_stderr(command, monkeypatch):
    small = TINY[:-2]
    code, out, err = command("ppo", *small)
    assert (
        err == "offcorr compare: 1 method over 16 sequences, about 5 s, up to 15 on a slow core\n" and "\r" not in out
    )
    monkeypatch.setattr(compare.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    _, _, err = command("ppo", "minpro", *small)
    assert err.splitlines()[1:] == ["0/2 ppo", "1/2 minpro"]


def test_progress_on_a_terminal_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with text.Progress(2, "two methods") as progress:
        progress(0, "ppo")
        progress(1, "minpro")
    shown = capsys.readouterr().err
    assert "\n" not in shown and "1/2 minpro" in shown and shown.endswith("\r\033[K")
    with text.Progress(2, "two methods") as progress:
        progress.note("one was known")
    assert "\r\033[Kone was known\n" in capsys.readouterr().err


def test_ctrl_c_is_one_line(command, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "measure", interrupted)
    code, out, err = command("ppo", *TINY)
    assert code == 130 and not out and err.splitlines()[-1] == "offcorr compare: stopped"


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_the_width_of_the_terminal_is_asked_for(command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = command("ppo", "minpro?eps_high=0.28&eps_low=0.9", *TINY)
    assert code == 0, err
    assert columns - 25 < max(map(len, out.splitlines())) <= columns


def test_torchs_threads_are_as_before(command):
    import torch

    before = torch.get_num_threads()
    command("ppo", *TINY)
    assert torch.get_num_threads() == before


def test_the_page_shows_what_the_command_prints():
    """But for the times; and the methods that are drawn, whose numbers need a minute to be worth comparing."""
    page = (ROOT / "docs" / "compare.md").read_text()
    shown = page.partition("<!-- compare -->\n```text\n")[2].partition("```")[0]
    assert max(map(len, shown.splitlines())) <= 80
    world = World.of(Setting())
    methods = [(method.name, method(**method.example)) for method in catalogue()]
    found = compare.compare(world, methods, draws=2)
    fresh = comparison.table(world, found, 80).replace("2 batches of each size", "200 batches of each size")

    def parts(text: str) -> tuple[list[str], list[str], dict[str, list[str]]]:
        setting, scope, body, *caption = text.strip().split("\n\n")
        head, *lines = body.splitlines()
        numbers = {line.split()[0]: line.replace(" *", "").split()[1:-1] for line in lines if " * " not in line}
        return " ".join((setting, scope, *caption)).split(), head.split(), numbers

    assert parts(shown)[:2] == parts(fresh)[:2]
    old, new = parts(shown)[2], parts(fresh)[2]
    assert old.keys() == new.keys() and len(old) == len([f for _, f in methods if not couples(f)])
    for name, values in new.items():
        assert list(map(float, old[name])) == pytest.approx(list(map(float, values)), abs=0.011), name


def test_the_page_names_every_option():
    page = (ROOT / "docs" / "compare.md").read_text()
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers())
    options = vars(parser.parse_args(["compare"])).keys() - {"methods", "run"}
    assert len(options) == 13
    for name in options:
        assert f"--{name.replace('_', '-')}" in page
    for column in comparison.COLUMNS:
        assert f"`{column.head}`" in page


# -- processes of their own ----------------------------------------------------------------------------------

CORE_INSTALL = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("transformers", "trl", "accelerate", "datasets", "matplotlib", "rich", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from offcorr import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_core_install_is_enough():
    words = ["compare", "ppo", "minpro", *TINY]
    shown = python(f"import sys; sys.argv[1:] = {words!r}" + CORE_INSTALL)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^minpro +\d", shown.stdout, flags=re.M)


def test_a_reader_may_close_the_pipe():
    command = [sys.executable, "-m", "offcorr.cli", "compare", "ppo", *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as shown:
        shown.stdout.close()
        assert b"Error" not in shown.stderr.read()
    assert shown.returncode == 0


def test_the_hook_is_a_subparser():
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers(dest="command"))
    options = parser.parse_args(["compare", "ppo", *TINY])
    assert compare.run(options) == 0


def test_the_timing_warns_of_nothing():
    """The batch that is timed has log-probs as a sampler has them."""
    warn_again()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seconds_per_token([offcorr.get("tis")], rounds=1)[0] > 0


def test_a_slow_round_is_no_methods_time(monkeypatch):
    """The methods take turns, and the shortest of the rounds counts."""
    order = []

    def spent(loss_fn, batch):
        order.append(loss_fn)
        return 9.0 if len(order) in (1, 2, 5) else float(loss_fn)

    monkeypatch.setattr(compare, "_spent", spent)
    tokens = math.prod(comparison.TIMED)
    assert seconds_per_token([1, 2], rounds=3) == [1 / tokens, 2 / tokens]
    assert order == [1, 2, 1, 2, 1, 2]


def test_with_an_engine_gap_the_caption_says_what_is_biased(command):
    said = " ".join(command("sequence_is", GEO_MIS, *TINY, "--engine-gap", "0.1")[1].split())
    assert "which biases a method that compares staleness alone. sequence_is, unbiased without one, is not" in said
    assert "geo_mis and vcpo weight each sequence by the engine's ratio as well" in said
    other = " ".join(command("ppo", *TINY, "--engine-gap", "0.1")[1].split())
    assert "which biases a method" in other and "sequence_is" not in other and "vcpo" not in other
    for words in (["sequence_is"], [GEO_MIS, "--engine-gap", "0.1"]):
        assert "which biases a method" not in " ".join(command(*words, *TINY)[1].split())


def test_the_reward_is_that_of_what_is_drawn_the_engines_mismatch_included():
    """The batches are drawn from the engine's distributions."""
    world = World.of(Setting(vocabulary=2, length=4, engine_gap=0.5, engine_regime="flatter"))
    drawn = world.success(world.engine)
    assert abs(drawn - world.success(world.old)) > 0.005
    assert f"1 for {drawn:.0%} of the sequences that the sampler draws" in " ".join(
        comparison.table(world, compare.compare(world, compare.named_methods(["ppo"]), timed=False), 100).split()
    )
    assert compare.as_data(world, [], 0.0)["success"]["sampler"] == drawn


def test_draws_without_a_method_that_draws_are_said_to_have_no_effect(capsys):
    assert cli.main(["compare", "ppo", *TINY]) == 0
    assert "--draws is 10, but no METHOD here uses statistics of the batch" in capsys.readouterr().err
    assert cli.main(["compare", "ppo", "m2po", *TINY]) == 0
    assert "--draws" not in capsys.readouterr().err
    assert cli.main(["compare", "ppo", "--vocabulary", "2", "--length", "4"]) == 0
    assert "--draws" not in capsys.readouterr().err
