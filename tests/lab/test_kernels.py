"""``offcorr bench kernels``: its batches and times, the file, and what is refused."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import offcorr
from offcorr import cli
from offcorr.lab import kernels

SMALL = ("--head", "16", "8", "50", "--rounds", "2", "--device", "cpu")


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "SHAPE", (8, 32))

    def run(*argv):
        try:
            code = cli.main(["bench", "kernels", *map(str, argv)])
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_the_bare_loss_is_ppos():
    given = kernels.batch("cpu", 8, 50)
    logp = given.logp.requires_grad_()
    bare = kernels.bare_ppo(given)
    (gradient,) = torch.autograd.grad(bare, logp)
    wanted = offcorr.get("ppo", aggregate="token-mean")(given)
    torch.testing.assert_close(bare, wanted.loss)
    torch.testing.assert_close(gradient, wanted.coefficient)
    assert (gradient == 0)[given.mask].any() and (gradient != 0).any()


def test_a_packed_batch_is_the_padded_one():
    padded, packed = (kernels.batch("cpu", 8, 50, packed=packed) for packed in (False, True))
    for name in ("minpro", "gspo", "topr"):
        a, b = (offcorr.get(name)(given) for given in (padded, packed))
        torch.testing.assert_close(a.loss, b.loss)
        torch.testing.assert_close(a.coefficient.flatten(), b.coefficient)


def test_log_probs_are_as_a_sampler_has_them():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = kernels.batch("cpu", 64, 2048)
    assert max(float(logp.max()) for logp in (given.logp, given.old_logp, given.rollout_logp)) < 0


def test_works_take_turns_and_the_first_round_warms_up(monkeypatch):
    order = []
    clock = iter([0.0, 1.0, 5.0, 7.0, 10.0, 13.0, 20.0, 24.0, 30.0, 35.0, 40.0, 46.0])
    monkeypatch.setattr(kernels.time, "process_time", clock.__next__)
    monkeypatch.setattr(kernels.time, "perf_counter", kernels.time.process_time)
    taken = kernels.in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3 and taken == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    row = kernels._row("both", taken, tokens=2)
    assert row["nanoseconds_per_token"] == {"a": pytest.approx(2e9), "b": pytest.approx(2.5e9)}
    assert row["ratio to a"] == {"b": pytest.approx((4 / 3 + 6 / 5) / 2)}


def test_both_heads_compute_the_same():
    p = kernels.Problem.of("cpu", 16, 8, 50)
    naive = kernels.naive_head(p.hidden, p.weight, p.target)
    ours = offcorr.linear_logprob(p.hidden, p.weight, p.target).logp
    torch.testing.assert_close(naive, ours)
    wanted = torch.autograd.grad(naive, (p.hidden, p.weight), p.some(0.4))
    torch.testing.assert_close(torch.autograd.grad(ours, (p.hidden, p.weight), p.some(0.4)), wanted)
    assert 0 < int((p.some(0.4) != 0).sum()) < 16


def test_the_command_writes_times_and_ratios(command, tmp_path):
    file, output = tmp_path / "mine.py", tmp_path / "new" / "kernels.json"
    file.write_text("import offcorr\nmine = offcorr.Correction(gate=offcorr.gates.Clip(0.1, 0.1))\n")
    threads = torch.get_num_threads()
    code, out, err = command("minpro", "m2po", f"{file}:mine", *SMALL, "--output", output)
    assert code == 0, err
    assert torch.get_num_threads() == threads
    data = json.loads(output.read_text())
    assert [row["name"] for row in data["correction"]] == ["minpro", "m2po", f"{file}:mine"]
    for row in data["correction"]:
        assert set(row["nanoseconds_per_token"]) == {"bare PPO loss", "reference"}
        assert min(row["nanoseconds_per_token"].values()) > 0
        ratio = row["ratio to bare PPO loss"]["reference"]
        assert 1 < ratio and f"{ratio:.2f}" in out
    assert data["head"]["name"] == "N=16, H=8, V=50, float32" and len(data["head"]["ratio to naive"]) == 2
    assert data["command"].startswith("offcorr bench kernels minpro m2po") and "--head 16 8 50" in data["command"]
    assert data["machine"]["processor"] and torch.__version__.startswith(data["versions"]["torch"])
    before = output.read_text()
    code, out, err = command("ppo", *SMALL, "--output", output)
    assert code == 2 and f"{output} exists" in err and "--overwrite" in err and output.read_text() == before
    assert command("ppo", *SMALL, "--output", output, "--overwrite")[0] == 0 and output.read_text() != before


@pytest.mark.parametrize(
    "argv, said",
    [
        (["mnipro"], "error: unknown method 'mnipro', did you mean 'minpro'?"),
        (["--rounds", "0"], "--rounds is 0, expected at least 1"),
        (["--threads", "-1"], "--threads is -1, expected at least 1"),
        (["--head", "16", "0", "50"], "--head H is 0, expected at least 1"),
        (["--device", "cuda"], "--device is 'cuda', but torch finds no GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_option(command, monkeypatch, argv, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = command(*argv)
    assert code == 2 and not out and said in err and "Traceback" not in err
