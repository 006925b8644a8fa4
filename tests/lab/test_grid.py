"""``offcorr bench exact``: the grid against single settings and numbers by hand, the files, and what is refused."""

from __future__ import annotations

import json
import math
import shlex

import pytest

import offcorr
from offcorr import cli
from offcorr.lab import grid, processes, results
from offcorr.lab.exact import Accuracy, Setting, World, measure
from offcorr.lab.grid import REGIMES, Cell, Found, Grid, cells, measured

OWN = "import offcorr\n\ndef mine(): return offcorr.get('dapo', eps_high=0.01)\n"
TINY = ("--regimes", "noise", "--lengths", "3", "--policies", "tabular", "--gaps", ".5", "--seeds", "0", "--draws", "4")


@pytest.fixture
def command(capsys):
    def run(*argv):
        try:
            code = cli.main(["bench", "exact", *map(str, argv)])
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def one(setting: Setting, **values: list[float]) -> tuple[Cell, Found]:
    """A cell with numbers by hand; a column that is not given is 1 for both methods."""
    return Cell(setting.regime, setting.gap, setting), Found({k: values.get(k, [1.0, 1.0]) for k in grid.KEYS}, [0, 1])


# -- the cells -----------------------------------------------------------------------------------------------


def test_compares_one_setting_is_a_cell(capsys):
    names = ["ppo", "minpro", "m2po"]
    assert cli.main(["compare", *names, "--draws", "5", "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    chosen = [cell for cell in cells() if vars(cell.setting) == wanted["setting"]]
    assert [str(cell) for cell in chosen] == ["drift 0.5, 6 tokens over 4 symbols, tabular, grpo advantages, seed 0"]
    (found,) = measured(chosen, names, draws=5).found
    assert {key: [row[key] for row in wanted["methods"]] for key in grid.KEYS} == found.values


def test_a_cell_is_its_setting_also_where_it_shares_its_policies():
    chosen = cells(["early", "sharper"], [3], ["tied"], gaps=[0.5], seeds=[1])
    assert [cell.setting.advantages for cell in chosen] == ["grpo", "per-token"] * 2
    for cell, found in zip(chosen, measured(chosen, ["prefix_is", "vcpo"]).found, strict=True):
        for place, name in enumerate(("prefix_is", "vcpo")):
            wanted = measure(World.of(cell.setting), offcorr.get(name))
            got = Accuracy(*(wanted.accuracy[64]))._replace(bias=found.values["bias"][place])
            assert found.values["bias"][place] == wanted.accuracy[1024].bias
            assert found.values["rmse_64"][place] == got.rmse and found.values["direction_limit"][place] == wanted.limit


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_has_its_gaps(name):
    (cell,) = cells([name], [3], ["tabular"], ["grpo"], [0.4], [0])
    staleness, engine = REGIMES[name]
    lost = {pair: 1 - found["ess"] for pair, found in World.of(cell.setting).distances().items()}
    assert lost["staleness"] == pytest.approx(0.4 if staleness else 0, abs=1e-6)
    # quantised logits move in steps, so that a gap is met only roughly
    assert lost["engine"] == pytest.approx((0.1 if staleness else 0.4) if engine else 0, abs=0.1 if engine else 1e-9)
    assert (lost["engine"] > 0.01) == bool(engine)


def test_the_total_ratio_is_unbiased_in_every_regime():
    """And the staleness ratio where the engine has no mismatch, with both kinds of advantages."""
    chosen = cells(lengths=[3], gaps=[0.5], seeds=[0])
    assert {cell.regime for cell in chosen} == set(REGIMES) and len(chosen) == 4 * len(REGIMES)
    for cell, found in zip(chosen, measured(chosen, ["vcpo?cap=1e9", "sequence_is"]).found, strict=True):
        total, staleness = found.values["bias"]
        assert total < 1e-12 and (staleness < 1e-12) == (REGIMES[cell.regime][1] is None), str(cell)


def test_the_numbers_repeat_by_seed_whatever_the_processes():
    names = ["minpro", "m2po"]
    first, again, other = (
        measured(cells(["drift"], [3, 7], ["tied"], ["grpo"], [0.1, 0.5], [seed]), names, 4, processes)
        for seed, processes in ((1, 1), (1, 2), (2, 1))
    )
    assert first.found == again.found
    assert first.cells == again.cells == cells(["drift"], [3, 7], ["tied"], ["grpo"], [0.1, 0.5], [1])
    assert all(a.values != b.values for a, b in zip(first.found, other.found, strict=True))


def test_a_gap_out_of_reach_leaves_the_cell_out():
    found = measured(cells(["noise", "stale"], [3], ["tabular"], ["grpo"], [0.5, 0.9999], [0]), ["ppo"])
    assert [str(cell).split(",")[0] for cell in found.cells] == ["noise 0.5", "noise 0.9999", "stale 0.5"]
    ((cell, why),) = found.left_out
    assert (cell.regime, cell.gap) == ("stale", 0.9999) and why.startswith(
        "gap is 0.9999, but regime 'stale' reaches at"
    )
    data = grid.as_data(found, {})
    assert data["left_out"] == [{"cell": str(cell), "why": why}]
    assert "Left out, since it does not exist: 1 cells, the first: stale 0.9999" in grid.table(data, 200)


# -- the summary ---------------------------------------------------------------------------------------------


def by_hand() -> Grid:
    tabular, tied = Setting(), Setting(policy="tied")
    pairs = [
        one(tabular, direction_64=[0.8, 0.4], rmse_64=[1.0, 4.0], bias=[0.0, 1.5], direction_limit=[1.0, -0.2]),
        one(tied, direction_64=[0.1, 0.5], rmse_64=[3.0, 2.0], bias=[0.5, 0.5], direction_limit=[0.9, 0.0]),
        one(tied, direction_64=[-0.2, 0.5], rmse_64=[2.0, 2.0], bias=[0.1, 0.7], direction_limit=[-0.1, -0.5]),
    ]
    both = [("ppo", offcorr.get("ppo")), ("reinforce", offcorr.get("reinforce"))]
    return Grid(both, 30, [cell for cell, _ in pairs], [found for _, found in pairs])


def test_the_summary_is_that_of_numbers_by_hand():
    found, keys = by_hand(), [column.key for column in grid.SUMMARY]
    first, second = (dict(zip(keys, found.summary(method), strict=True)) for method in (0, 1))
    assert first["direction_64_mean"] == pytest.approx((1 + 0.2 - 0.4) / 3)
    assert first["direction_64_worst"] == pytest.approx(-0.4)
    assert second["direction_64_mean"] == pytest.approx((0.5 + 1 + 1) / 3) and second["direction_64_worst"] == 0.5
    assert first["rmse_64_mean"] == pytest.approx((1 * 1.5 * 1) ** (1 / 3)) and first["rmse_64_worst"] == 1.5
    assert second["rmse_64_mean"] == pytest.approx(4 ** (1 / 3)) and second["rmse_64_worst"] == 4
    assert (first["bias_mean"], first["bias_worst"]) == pytest.approx((0.2, 0.5))
    assert (second["bias_mean"], second["bias_worst"]) == pytest.approx((0.9, 1.5))
    assert (first["away"], second["away"]) == (1, 2)
    assert first["direction_1024_mean"] == first["rmse_1024_worst"] == 1
    along = grid.as_data(found, {})["methods"][0]["by"]
    assert along["policy"]["tabular"][keys.index("direction_64_mean")] == 1
    assert along["policy"]["tied"][keys.index("direction_64_mean")] == pytest.approx(-0.1)
    assert list(along) == list(grid.AXES) and list(along["length"]) == ["6"]


def test_where_no_method_has_a_direction_there_is_no_best():
    assert grid.relative([-0.1, -0.4], max) == [pytest.approx(math.nan, nan_ok=True)] * 2
    cell, found = one(Setting(), direction_64=[-0.1, -0.4])
    some = Grid(by_hand().methods, 30, [*by_hand().cells, cell], [*by_hand().found, found])
    assert some.summary(0)[:2] == by_hand().summary(0)[:2] and some.summary(0)[8] != by_hand().summary(0)[8]
    alone = Grid(by_hand().methods, 30, [cell], [found])
    assert math.isnan(alone.summary(0)[0]) and alone.summary(0)[8] == 1
    assert " - " in grid.table(grid.as_data(alone, {}))


def test_the_same_update_in_every_cell_is_one_row():
    chosen = cells(["noise", "sharper"], [3], ["tabular"], ["grpo"], [0.5], [0])
    names = ["rec", "minpro", "tis", "ppo"]
    stale, both = measured(chosen[:1], names), measured(chosen, names)
    assert stale.groups == [[0, 2, 3], [1]]
    assert both.groups == [[0, 3], [1], [2]]  # tis corrects the engine
    text = grid.table(grid.as_data(both, {}))
    assert text.count("\nrec ") == 1 and "\nppo" not in text and "The same update in every cell: rec, ppo." in text
    assert max(map(len, text.splitlines())) <= 80


def test_options_without_a_default_are_those_of_the_illustration(command):
    """Of a method of the catalogue, and of one that is asked for by name without its options."""

    @offcorr.register("of_a_test", example={"low": 0.3})
    def of_a_test(low: float) -> offcorr.Correction:
        return offcorr.Correction(gate=offcorr.gates.Clip(low, 0.2))

    try:
        found = measured(cells(["noise"], [3], ["tabular"], ["grpo"], [0.5], [0]), draws=2)
        assert "of_a_test" in [name for name, _ in found.methods]
        data = grid.as_data(found, {})
        said = "of_a_test ran with low=0.3, an illustration: this option has no default."
        assert said in data["illustrated"] and said in grid.table(data, 200)
        code, out, err = command("of_a_test", *TINY)
        assert not code and said in " ".join(out.split())
    finally:
        offcorr.unregister("of_a_test")


def test_gaps_that_are_not_reached_are_said():
    """A coarse grid of logits has few steps."""
    data = grid.as_data(measured(cells(["quantised", "noise"], [2], ["tied"], ["grpo"], [0.3], [0]), ["ppo"]), {})
    (other,) = data["other_gaps"]
    assert other["cell"].startswith("quantised 0.3, 2 tokens")
    assert other["why"] == "--engine-gap asks for 1 - ESS = 0.3, reached is 0.45"
    said = "The gap reached is more than a tenth off the one asked for in 1 cell, the first: quantised 0.3, 2 tokens"
    assert said in grid.table(data, 2000)
    assert "more than a tenth off" not in grid.table({**data, "other_gaps": []}, 2000)


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_its_command_repeats(command, tmp_path):
    mine, output = tmp_path / "mine.py", tmp_path / "new" / "exact.json"
    mine.write_text(OWN)
    names = ("ppo", "m2po", "dapo?eps_high=0.01", f"{mine}:mine")
    code, out, err = command(*names, *TINY, "--processes", 2, "--output", output, "--every-cell")
    assert code == 0, err
    assert err.startswith(
        "offcorr bench exact: methods: 4, cells: 2, processes: 2; about 5 s on idle cores like ours\n"
    )
    first = json.loads(output.read_text())
    assert [row["method"] for row in first["methods"]] == list(names)
    assert [row["drawn"] for row in first["methods"]] == [0, 4, 0, 0]
    assert first["methods"][2]["config"]["eps_high"] == 0.01
    assert first["methods"][3]["cells"] == first["methods"][2]["cells"] != first["methods"][0]["cells"]
    assert first["cell_names"][1].endswith("per-token advantages, seed 0")
    assert all(len(row["all"]) == len(first["columns"]) for row in first["methods"])
    assert [len(row) for row in first["methods"][0]["cells"]] == [len(first["cell_columns"])] * 2
    again = tmp_path / "again.json"
    repeated = shlex.split(first["command"])[3:]
    assert command(*repeated, "--processes", 1, "--output", again, "--every-cell")[0] == 0
    assert again.read_text() == output.read_text()


def test_a_file_that_exists_is_kept_unless_it_may_be_replaced(command, tmp_path, monkeypatch):
    output = tmp_path / "exact.json"
    output.write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(World, "of", lambda setting: pytest.fail("it ran"))
        code, out, err = command("ppo", *TINY, "--processes", 1, "--output", output)
        assert code == 2 and f"{output} exists; choose another --output, or allow it with --overwrite" in err
    assert output.read_text() == "{}"
    assert command("ppo", *TINY, "--processes", 1, "--output", output, "--overwrite")[0] == 0
    assert json.loads(output.read_text())["cells"] == 2


def test_the_picture_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = command("ppo", "minpro", *TINY, "--processes", 1, "--picture", tmp_path / "exact.png")
    assert code == 0 and (tmp_path / "exact.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv, said",
    [
        (["mnipro"], "error: unknown method 'mnipro', did you mean 'minpro'?"),
        (["--gaps", ".5", "1.5"], "gap is 1.5, expected a share of the samples, 0 <= gap < 1"),
        (["--lengths", "17"], "length is 17 with a vocabulary of 2, more than 65,536 sequences"),
        (["--regimes", "steal"], "argument --regimes: invalid choice: 'steal'"),
        (["--draws", "1"], "--draws is 1, expected at least 2 batches"),
        (["--processes", "0"], "--processes is 0, expected at least 1"),
        (["--picture", "here.jpeg"], "--picture is 'here.jpeg', expected a file name that ends in .png, .svg or .pdf"),
        (
            ["ppo", "--regimes", "stale", "--gaps", ".999", "--lengths", "3", "--processes", "1"],
            "none of the cells exi",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_option(command, argv, said):
    code, out, err = command(*argv)
    assert code == 2 and not out and said in err and "Traceback" not in err


@pytest.mark.parametrize("processes", [1, 2])
def test_a_method_that_cannot_be_measured_is_named(command, tmp_path, processes):
    file = tmp_path / "aged.py"
    file.write_text("import offcorr\nmine = offcorr.Correction(gate=offcorr.gates.Clip(0.1, 0.1))\n")
    monstrous = tmp_path / "faulty.py"
    monstrous.write_text(NEEDS_A_VERSION)
    code, out, err = command("ppo", f"{file}:mine", f"{monstrous}:mine", *TINY, "--processes", processes)
    assert code == 2 and f"METHOD '{monstrous}:mine' cannot be compared: rollout_version is None" in err


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


def test_progress_says_how_much_is_left(monkeypatch, capsys):
    monkeypatch.setattr(processes.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    said = []
    measured(cells(["noise"], [3], ["tabular"], gaps=[0.1, 0.5], seeds=[0]), ["ppo"], report=lambda *a: said.append(a))
    assert said == [(2, "cells; about 10 s left"), (4, "cells; about 0 s left")]


def test_a_result_file_has_a_list_of_numbers_on_one_line(tmp_path):
    data = {"numbers": [1.5, math.nan, -2e-9], "words": ["[ 1,", "x\n[ 2 ]"], "rows": [[1, 2], []], "empty": []}
    text = results.save(data, tmp_path / "a.json").read_text()
    assert json.loads(text) == data | {"numbers": [1.5, None, -2e-9]}
    assert '"numbers": [1.5, null, -2e-09]' in text and "[1, 2]" in text
