"""``offcorr bench loop``: the world by enumeration, the loop step by step, and the command's files and sums."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch

import offcorr
from offcorr import cli
from offcorr.lab import closed_loop, loop
from offcorr.lab.closed_loop import DEVELOPMENT, HELD_OUT, Replicas, Setting, World, expected_return, train
from offcorr.lab.loop import Found, Plan, as_data, table
from offcorr.methods.registry import catalogue

SMALL = Setting("small", length=4, lag=2, vocabulary=3, prompts=2, samples=4)
POLICIES, REWARDS = ("free", "tabular", "tied"), ("count", "keys", "band")


def replicas(setting: Setting, seeds: int = 2, rates: int = 2) -> tuple[Replicas, torch.Tensor]:
    """The replicas of a setting, and random parameters."""
    made = Replicas(setting, tuple(World.of(setting, seed) for seed in range(seeds)), rates)
    draw = torch.Generator().manual_seed(5)
    return made, torch.randn(seeds, rates, made.parameters, generator=draw)


def probability(table: torch.Tensor, sequence: tuple[int, ...]) -> float:
    """Of a sequence under a policy [T, V, V] of log-probs."""
    before = (0, *sequence[:-1])
    return math.exp(sum(float(table[t, p, s]) for t, (p, s) in enumerate(zip(before, sequence, strict=True))))


# -- the world -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reward", REWARDS)
def test_the_return_is_the_mean_reward_of_every_sequence(policy, reward):
    setting = dataclasses.replace(SMALL, length=5, policy=policy, reward=reward)
    made, parameters = replicas(setting)
    logp = made.logits(parameters).double().log_softmax(4)
    world = made.worlds[1]
    got = expected_return(logp[2:], world.wrong, world.value.double())  # the second seed's two rates
    for rate, prompt in itertools.product(range(2), range(setting.prompts)):
        wanted = total = 0.0
        for sequence in itertools.product(range(3), repeat=5):
            before = (0, *sequence[:-1])
            steps = zip(before, sequence, strict=True)
            mistakes = sum(bool(world.wrong[prompt, t, p, s]) for t, (p, s) in enumerate(steps))
            rewarded = {"count": mistakes <= 2, "keys": mistakes == 0, "band": mistakes in (1, 2)}[reward]
            chance = probability(logp[2 + rate, prompt], sequence)
            wanted, total = wanted + rewarded * chance, total + chance
        assert total == pytest.approx(1) and got[rate, prompt].item() == pytest.approx(wanted, abs=1e-12)
    means = made.returns(made.logits(parameters).log_softmax(4))
    torch.testing.assert_close(means[1].double(), got.mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", DEVELOPMENT[:2] + HELD_OUT[:2] + HELD_OUT[5:8], ids=lambda setting: setting.name)
def test_every_run_begins_with_the_same_success(setting):
    made = Replicas(setting, (World.of(setting, 3),), 1)
    start = made.returns(made.logits(torch.zeros(1, 1, made.parameters)).log_softmax(4))
    assert start.item() == pytest.approx(closed_loop.SUCCESS, abs=1e-3)


def test_samples_have_the_frequencies_of_the_policy():
    setting = dataclasses.replace(SMALL, length=3, samples=20_000, policy="tabular")
    made, parameters = replicas(setting)
    logp = made.logits(parameters).log_softmax(4)
    uniform = torch.rand(3, 2, 2, 20_000, generator=torch.Generator().manual_seed(0))
    places = made.sample(logp, uniform)
    entries = places - made.origin
    symbols, previous = entries % 3, entries // 3
    assert (previous[:, 0] == 0).all() and (previous[:, 1:] == symbols[:, :-1]).all()
    rows = (symbols * torch.tensor([9, 3, 1])).sum(1).view(4, 2, -1)
    for replica, prompt in itertools.product(range(4), range(2)):
        got = rows[replica, prompt].bincount(minlength=27) / 20_000
        every = itertools.product(range(3), repeat=3)
        wanted = torch.tensor([probability(logp[replica, prompt], sequence) for sequence in every])
        assert ((got - wanted).abs() < 4.5 * (wanted / 20_000).sqrt() + 1e-4).all()


def test_rewards_are_those_of_the_sampled_sequences():
    setting = dataclasses.replace(SMALL, length=6)
    made, parameters = replicas(setting)
    places = made.sample(made.logits(parameters).log_softmax(4), torch.rand(6, 2, 2, 4))
    rewards = made.rewards(places)
    for row, (sequence, origin) in enumerate(zip(places, made.origin, strict=True)):
        world, prompt = made.worlds[row // 16], row // 4 % 2
        entries = (sequence - origin).tolist()
        mistakes = sum(bool(world.wrong[prompt, t, entry // 3, entry % 3]) for t, entry in enumerate(entries))
        assert rewards[row] == (mistakes <= 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_is_that_of_autograd(policy):
    made, parameters = replicas(dataclasses.replace(SMALL, policy=policy))
    parameters.requires_grad_()
    logits = made.logits(parameters)
    logits.retain_grad()
    factor = torch.randn(logits.shape)
    (logits.log_softmax(4) * factor).sum().backward()
    torch.testing.assert_close(made.gradient(logits.grad), parameters.grad)


def test_parameters_are_shared_within_a_replica_alone():
    for policy in POLICIES:
        made, parameters = replicas(dataclasses.replace(SMALL, policy=policy), seeds=3)
        before = made.logits(parameters)
        parameters[1, 0] += 1
        moved = (made.logits(parameters) - before).abs().flatten(1).sum(1) > 0
        assert moved.tolist() == [False, False, True, False, False, False]


# -- the loop ------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """What ``train`` hands to the correction in each step."""
    seen: list[tuple] = []
    make = closed_loop._batch

    def batch(loss_fn, made, places, logp, old, engine):
        seen.append((places, logp, old, engine, made_batch := make(loss_fn, made, places, logp, old, engine)))
        return made_batch

    monkeypatch.setattr(closed_loop, "_batch", batch)
    return seen


@pytest.mark.parametrize("lag", [0, 3])
def test_samples_come_from_the_policy_of_lag_steps_ago(recorded, lag):
    train(offcorr.get("cispo"), dataclasses.replace(SMALL, lag=lag), (0.1, 0.3), 2, 6)
    for step, (_, _, old, engine, batch) in enumerate(recorded):
        assert torch.equal(old, recorded[max(step - lag, 0)][1]) and engine is old
        assert batch.rollout_logp is None
    assert not torch.equal(recorded[5][1], recorded[4][1])


def test_methods_and_rates_are_paired_by_the_same_draws(recorded):
    for name in ("cispo", "reinforce"):
        train(offcorr.get(name), SMALL, (0.1, 0.3), 2, 1)
    first, second = (recorded[at][0] - replicas(SMALL)[0].origin for at in (0, 2))
    assert torch.equal(first, second)
    by_rate = first.view(2, 2, -1)
    assert torch.equal(by_rate[:, 0], by_rate[:, 1]) and not torch.equal(by_rate[0], by_rate[1])


def test_a_grid_rounds_the_engines_logits_and_nothing_else(recorded):
    setting = dataclasses.replace(SMALL, grid=0.5)
    train(offcorr.get("near_overlap"), setting, (0.3,), 1, 3)
    places, logp, old, engine, batch = recorded[0]
    gaps = engine - engine[..., :1]
    torch.testing.assert_close(gaps, (gaps / 0.5).round() * 0.5)
    assert torch.equal(old, logp) and not torch.equal(engine, old)
    assert torch.equal(batch.rollout_logp, engine.take(places)) and torch.equal(batch.old_logp, old.take(places))


def test_advantages_are_normalised_per_prompt(recorded):
    train(offcorr.get("cispo"), SMALL, (0.1,), 2, 1)
    batch = recorded[0][-1]
    for rewards, advantages in zip(batch.rewards.view(-1, 4), batch.advantages.view(-1, 4), strict=True):
        torch.testing.assert_close(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    assert batch.group_ids.tolist() == [row // 4 for row in range(16)]


CENTRED = ("reinforce?advantages=centred", "minpro?advantages=centred")


@pytest.mark.parametrize("name", [*(method.name for method in catalogue()), *CENTRED])
def test_replicas_do_not_touch_one_another(recorded, name):
    """Side by side, every replica has the update that it has by itself."""
    names = (name,) if name in CENTRED else ()
    loss_fn = dict(loop.compare.named_methods(names))[name].with_max_length(4)
    train(offcorr.get("cispo"), SMALL, (0.3, 1.0), 2, 8)
    made, (places, logp, old, engine, _) = replicas(SMALL)[0], recorded[8]
    batch = closed_loop._batch(loss_fn, made, places, logp, old, engine)
    together = closed_loop._applied(loss_fn, batch, 4).view(4, -1)
    single = torch.stack([loss_fn(batch.rows(slice(at, at + 8))).coefficient.flatten() for at in range(0, 32, 8)])
    sizes = together.norm(dim=1) / single.norm(dim=1)
    assert (single.norm(dim=1) > 0).any()
    able = single.norm(dim=1) > 0
    torch.testing.assert_close(sizes[able], sizes[able][:1].expand_as(sizes[able]))
    torch.testing.assert_close(together[able], -single[able] * sizes[able][:, None])
    assert (together[~able] == 0).all()


@pytest.mark.parametrize("aggregate", list(closed_loop.AGGREGATIONS))
@pytest.mark.parametrize("reject", [None, offcorr.rejections.K3(1e9)])
def test_the_constants_of_the_aggregation_are_divided_out(recorded, aggregate, reject):
    train(offcorr.get("cispo"), SMALL, (0.3,), 2, 1)
    batch = dataclasses.replace(recorded[0][-1], rollout_logp=recorded[0][-1].old_logp)
    loss_fn = offcorr.get("reinforce", aggregate=aggregate, reject=reject, count_rejected=reject is None)
    got = closed_loop._applied(loss_fn.with_max_length(4), batch, 2)
    torch.testing.assert_close(got, batch.advantages[:, None].expand(-1, 4))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizers_are_those_of_torch(name):
    mine, rates = torch.zeros(2, 2, 5), torch.tensor([0.1, 0.5])
    theirs = [torch.zeros(2, 5, requires_grad=True) for _ in rates]
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    wanted = [kind([one], lr=float(rate), maximize=True) for one, rate in zip(theirs, rates, strict=True)]
    optimizer = closed_loop._OPTIMIZERS[name](mine, rates[:, None])
    for _ in range(5):
        ascent = torch.randn(2, 2, 5)
        optimizer.step(ascent)
        for place, (one, step) in enumerate(zip(theirs, wanted, strict=True)):
            one.grad = ascent[:, place].clone()
            step.step()
    torch.testing.assert_close(mine, torch.stack([one.detach() for one in theirs], 1))


def test_a_seed_has_the_same_run_beside_any_others():
    few, many = (train(offcorr.get("cispo"), SMALL, (0.1,), seeds, 6).returns for seeds in (1, 3))
    torch.testing.assert_close(few[0], many[0])
    assert not torch.allclose(many[0], many[1])


def test_auc_is_the_trapezoidal_mean():
    run = closed_loop.Run(torch.tensor([[[0.0, 1.0, 0.5]]]), (0, 10, 15))
    assert run.auc.tolist() == [[pytest.approx((5.0 + 3.75) / 15)]]


def test_held_out_settings_are_no_development_settings():
    known = [dataclasses.replace(setting, name="") for setting in DEVELOPMENT + HELD_OUT]
    assert len(set(known)) == len(known) == 21


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("policy", "tabula", "did you mean 'tabular'"),
        ("lag", -1, "lag is -1, expected a whole number >= 0"),
        ("samples", 1, "samples is 1, expected a whole number >= 2"),
        ("grid", -0.5, "grid is -0.5"),
    ],
)
def test_a_setting_refuses_what_it_cannot_be(field, value, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(SMALL, **{field: value})


# -- summed up -----------------------------------------------------------------------------------------------


def by_hand() -> tuple[Plan, dict]:
    """Two methods, three settings, two seeds, two rates."""
    parts = {"development": (DEVELOPMENT[0], DEVELOPMENT[1]), "held-out": (HELD_OUT[0],)}
    plan = Plan(("ppo", "cispo"), parts, rates=(0.3, 0.1), seeds=2, steps=10)
    first, second, third = (setting.name for setting in plan.settings)
    curves = [[0.1, 0.2], [0.3, 0.4]]
    found = {
        ("ppo", first): Found([[0.1, 0.4], [0.3, 0.8]], [[0.2, 0.5], [0.4, 0.9]], curves),  # .2 and .6
        ("ppo", second): Found([[0.5, 0.0], [0.5, 0.0]], [[0.6, 0.0], [0.8, 0.0]], curves),  # .5 and .0
        ("ppo", third): Found([[0.2, 0.1], [0.4, 0.1]], [[0.5, 0.5], [0.5, 0.5]], curves),  # .3 and .1
        ("cispo", first): Found([[0.2, 0.1], [0.4, 0.1]], [[0.3, 0.1], [0.5, 0.1]], curves),  # .3 and .1
        ("cispo", second): Found([[0.9, 0.4], [1.1, 0.4]], [[1.0, 0.0], [0.8, 0.0]], curves),  # 1 and .4
        ("cispo", third): Found([[0.6, 0.3], [0.6, 0.9]], [[0.7, 0.7], [0.7, 0.9]], curves),  # .6 and .6: the first
    }
    return plan, found


def test_cells_are_summed_up_as_by_hand():
    plan, found = by_hand()
    data = as_data(plan, found, {"command": "as given"})
    ppo, cispo = data["methods"]
    assert data["command"] == "as given" and data["parts"] == {
        "development": ["tied-10-lag-16", "tied-32-lag-16"],
        "held-out": ["on-policy"],
    }
    assert list(data["best"].values()) == ["ppo", "cispo", "cispo"]
    assert ppo["rate"] == [0.3, 0.1, 0.1] and cispo["rate"] == [0.1, 0.1, 0.1]
    assert ppo["auc"] == [0.6, 0.5, 0.3] and cispo["auc"] == [0.3, 1.0, 0.6]
    assert ppo["relative"] == [1, 0.5, 0.5] and cispo["relative"] == [0.5, 1, 1]
    assert ppo["every_rate"] == [round((0.2 + 0.6) / 2 / 0.6, 4), 0.25, round(0.2 / 0.6, 4)]
    assert ppo["final"] == [0.7, 0.7, 0.5] and cispo["final"] == [0.4, 0.9, 0.7]
    # Differences to the best by seed: ppo -.4 and -.6 in the second setting, -.4 and -.2 in the third.
    assert ppo["error"] == [0, pytest.approx(0.1 / 1.0), pytest.approx(0.1 / 0.6, abs=1e-4)]
    assert cispo["error"] == [pytest.approx(0.1 / 0.6, abs=1e-4), 0, 0]  # .2 - .4 and .4 - .8
    assert ppo["curves"] == [[0.3, 0.4], [0.1, 0.2], [0.1, 0.2]]
    assert cispo["summary"]["development"] == {
        "worst": 0.5,
        "worst_setting": "tied-10-lag-16",
        "mean": 0.75,
        # Relative by seed, the mean of both settings: cispo (1/3 + .9) / 2 and (2/3 + 1.1) / 2, ppo (2/3 + .5) / 2
        # and (4/3 + .5) / 2; both have the mean .75, so ppo, which comes first, leads: .0333 and -.0333.
        "error": 0.03333,
        "every_rate": round(((0.2 / 0.6) + 0.7) / 2, 4),
        "final": 0.65,
    }
    assert ppo["summary"]["held-out"]["mean"] == 0.5 and cispo["summary"]["held-out"]["error"] == 0


def test_the_table_says_what_is_level_where_a_rate_is_at_the_edge_and_which_part_is_which():
    plan, found = by_hand()
    lines = table(as_data(plan, found, {})).splitlines()
    starts = [line for line in lines if line.startswith(("development", "held-out", "ppo", "cispo"))]
    assert [line.split()[0] for line in starts] == ["development", "ppo", "cispo", "held-out", "ppo", "cispo"]
    assert starts[1].split("|")[1].split() == ["1.00>=", "0.50<"]
    assert starts[2].split("|")[1].split() == ["0.50<", "1.00<="]
    assert starts[4].split("|")[1].split() == ["0.50<"]


def test_the_table_does_without_errors_of_a_single_seed():
    plan, found = by_hand()
    plan = dataclasses.replace(plan, seeds=1)
    found = {cell: Found(kept.auc[:1], kept.final[:1], kept.curves) for cell, kept in found.items()}
    text = table(as_data(plan, found, {}))
    assert "nan" not in text and "; empty, since one seed has none: give --seeds 2 or more" in " ".join(text.split())
    assert "one seed has none" not in table(as_data(*by_hand(), {}))


def test_the_footer_speaks_of_held_out_settings_where_there_are_some():
    plan, found = by_hand()
    footers = {}
    for parts in (("development", "held-out"), ("development",), ("held-out",)):
        some = dataclasses.replace(plan, parts={part: plan.parts[part] for part in parts})
        names = {setting.name for setting in some.settings}
        data = as_data(some, {cell: kept for cell, kept in found.items() if cell[1] in names}, {})
        footers[parts] = " ".join(table(data).split())
    both, development, held_out = footers.values()
    assert "believe the held-out ones. One kind" in both
    assert "believe" not in development and "choices were made" in development and "--settings held-out" in development
    assert "believe" not in held_out and "Development settings" not in held_out and "One kind of world" in held_out


# -- the command ---------------------------------------------------------------------------------------------

TINY = ("--settings", "tied-10-lag-16", "on-policy", "--rates", "0.1", "0.3", "--seeds", "2", "--steps", "12")


@pytest.fixture
def command(capsys):
    def run(*argv):
        try:
            code = cli.main(["bench", "loop", *map(str, argv)])
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_the_result_does_not_depend_on_the_number_of_processes(command, tmp_path):
    outputs = []
    for processes in (1, 2):
        file = tmp_path / f"{len(outputs)}.json"
        code, out, err = command("minpro", "m2po", *TINY, "--processes", processes, "--output", file)
        assert code == 0 and f"wrote {file}" in err
        assert "methods: 2, settings: 2, seeds: 2" in err
        outputs.append((out, json.loads(file.read_text())))
    assert outputs[0] == outputs[1]
    data = outputs[0][1]
    assert data["parts"] == {"development": ["tied-10-lag-16"], "held-out": ["on-policy"]}
    assert data["command"] == " ".join(("offcorr bench loop minpro m2po", *TINY))
    assert data["evaluated"] == [0, 10, 12] and len(data["methods"][0]["curves"][0]) == 3
    assert 0.17 < data["methods"][0]["auc"][0] < 1


def test_after_a_kill_the_same_command_goes_on_where_it_was(command, tmp_path, monkeypatch):
    argv = ("minpro", "reinforce", *TINY, "--processes", "1", "--output")
    wanted = command(*argv, tmp_path / "whole.json")[1]
    trained, work = [], loop._train

    def killed(cell):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(cell)
        return work(cell)

    monkeypatch.setattr(loop, "_train", killed)
    code, out, err = command(*argv, tmp_path / "cut.json")
    assert code == 130 and not out and "taken from" not in err
    assert f"stopped; the same command goes on from the cells in {tmp_path / 'cut.cells'}\n" in err
    assert len(list((tmp_path / "cut.cells").iterdir())) == 3 and not (tmp_path / "cut.json").exists()

    again = []
    monkeypatch.setattr(loop, "_train", lambda cell: again.append(cell) or work(cell))
    code, out, err = command(*argv, tmp_path / "cut.json")
    assert code == 0 and out == wanted and len(again) == 1 and again[0] not in trained
    assert f"\n3 of 4 cells taken from {tmp_path / 'cut.cells'}\n" in err
    whole, cut = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "cut.json"))
    assert [row["method"] for row in cut["methods"]] == ["minpro", "reinforce"]
    assert whole == cut and not (tmp_path / "cut.cells").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.json", "whole.json"]


def test_a_cell_of_other_options_or_of_an_edited_file_is_not_taken(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("import offcorr\n\ndef mine(): return offcorr.get('ppo')\n")
    setting = dataclasses.replace(SMALL)

    def path(**options):
        plan = Plan((f"{own}:mine",), {"development": (setting,)}, **options)
        methods = dict(loop.compare.named_methods(plan.specs))
        return loop._path(tmp_path, plan, (f"{own}:mine", "small"), methods, {"small": setting})

    first = path()
    assert path() == first
    assert len({first, path(seeds=5), path(steps=10), path(rates=(0.1,))}) == 4
    own.write_text(own.read_text() + "\nCAP = 2\n")
    assert path() != first


def test_a_result_is_not_replaced_unless_asked(command, tmp_path):
    file = tmp_path / "kept.json"
    file.write_text("{}")
    code, _, err = command("minpro", *TINY, "--output", file)
    assert code == 2 and "exists" in err and "--overwrite" in err and file.read_text() == "{}"
    assert command("minpro", *TINY, "--output", file, "--overwrite", "--processes", 1)[0] == 0
    assert json.loads(file.read_text())["seeds"] == 2


def test_lags_and_rates_replace_those_of_the_settings(command):
    code, out, _ = command(
        "minpro", *TINY[:2], "--lags", 0, 5, "--rates", 0.2, *"--seeds 1 --steps 3 --processes 1".split()
    )
    assert code == 0 and "development settings" in out and "held-out settings" not in out
    assert "tied-10-lag-16@0: 10 tokens, lag 0, tied, count, adam 0.2" in out and "16@5: 10 tokens, lag 5" in out


def test_a_picture_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "loop.png"
    code, _, err = command("minpro", "cispo", *TINY, "--processes", 1, "--picture", file)
    assert code == 0 and f"wrote {file}" in err and file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--settings", "develop"], "--settings has 'develop', did you mean 'development'?"),
        (["--rates", "0"], "--rates is (0.0,), expected learning rates above 0"),
        (["--seeds", "0"], "--seeds is 0, expected at least 1"),
        (["--steps", "0"], "--steps is 0, expected at least 1"),
        (["--processes", "0"], "--processes is 0, expected at least 1"),
        (["--lags", "-1"], "--lags is -1, expected a whole number >= 0"),
        (["--lags", "4", "4"], "--settings is"),
        (["nosuch"], "unknown method 'nosuch'"),
        (["--picture", "a.txt"], "--picture is 'a.txt'"),
    ],
)
def test_what_cannot_be_is_refused(command, argv, told):
    code, out, err = command(*argv)
    assert code == 2 and told in err and out == "" and "Traceback" not in err


def test_a_method_that_cannot_be_trained_is_named(command, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(
        "import offcorr\n\n"
        "class Versions(offcorr.rejections.K3):\n"
        "    needs = frozenset({'rollout_version'})\n\n"
        "def mine(): return offcorr.get('ppo', reject=Versions(1.0))\n"
    )
    code, _, err = command(f"{own}:mine", *TINY, "--processes", 1)
    assert code == 2 and f"METHOD '{own}:mine' cannot be trained in setting" in err and "rollout_version" in err
