"""A user's method that fails the contract is named by every command that ranks methods."""

from pathlib import Path

import pytest

from offcorr import cli
from offcorr.lab import arena

FILE = Path(__file__).with_name("broken.py")

LINES = {
    "compare": "compare METHODS --vocabulary 2 --length 4",
    "exact": "bench exact METHODS --regimes noise --lengths 4 --policies tied --advantages grpo --gaps 0.5 --seeds 0",
    "loop": "bench loop METHODS --settings tied-10-lag-16 --rates 0.1 --seeds 1 --steps 2 --processes 1",
    "arena": "bench arena METHODS --quick --folder FOLDER",
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_method_is_named_and_still_ranked(name, tmp_path, capsys, monkeypatch):
    asked = [f"{FILE}:with_holes", "ppo", f"{FILE}:finished", f"{FILE}:tripled"]
    trained = []
    monkeypatch.setattr(arena, "train", lambda runs, *_: trained.extend(run.method for run in runs) or [])
    monkeypatch.setattr(arena.arena_report, "report", lambda records: {})
    monkeypatch.setattr(arena.arena_report, "text", lambda report: " ".join(trained))
    monkeypatch.setattr(arena.arena_report, "pictures", lambda *_: [])
    words = LINES[name].replace("FOLDER", str(tmp_path)).split()
    at = words.index("METHODS")
    assert cli.main([*words[:at], *asked, *words[at + 1 :]]) == 0
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if "fails" in line]
    assert len(told) == 2 and "tripled" in out
    if name != "arena":  # whose report is not made here
        assert " ".join(out.split()).count("fails offcorr.testing.check, so its numbers need not be") == 2
        assert out.count(" !") == 2 and "ppo !" not in out
    assert told[0].startswith(f"{FILE}:with_holes fails offcorr.testing.check: finite_on_ordinary_batches: Holes.surr")
    assert told[1].startswith(f"{FILE}:tripled fails offcorr.testing.check: coefficient_is_the_gradient: stated")
