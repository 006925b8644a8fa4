"""Tests of the processes that share out the work of a command, and of Ctrl-C, which a terminal sends to all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offcorr.lab import processes as lab_processes
from offcorr.lab.processes import STARTING, Clock, shared_out
from tests.lab.signals import heard

ROOT = Path(__file__).resolve().parents[2]
prepared: list[str] = []


def prepare(word: str) -> None:
    prepared.append(word)


def work(number: int) -> str:
    if number == 3:
        os._exit(1)  # as the kernel ends a process that wants too much memory
    if number == 4:
        raise ValueError("4 is refused")
    time.sleep(number)
    return f"{prepared[-1]} {number}"


@pytest.mark.parametrize("processes", [1, 2])
def test_every_item_is_worked_on_once_by_a_process_that_was_prepared(processes):
    assert sorted(shared_out(work, [0, 1], processes, prepare, ("done",))) == [(0, "done 0"), (1, "done 1")]


def test_a_process_that_is_ended_is_said():
    with pytest.raises(ValueError, match="a process ended early, perhaps for want of memory; give fewer --processes"):
        list(shared_out(work, [3, 1, 1, 1], 2, prepare, ("done",)))


def test_what_goes_wrong_in_a_process_ends_the_others_at_once():
    began = time.monotonic()
    with pytest.raises(ValueError, match="4 is refused"):
        list(shared_out(work, [300, 4], 2, prepare, ("done",)))
    assert time.monotonic() - began < 200


def processes_of(group: int) -> list[str]:
    """The processes of a group that run, by their ids."""
    found = subprocess.run(["ps", "-eo", "pgid=,pid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()]
    return [pid for pgid, pid, state in rows if int(pgid) == group and not state.startswith("Z")]


OF_SECONDS = ["ppo", "cispo", "minpro", "--settings", "tied-10-lag-16", "lag-4", "--seeds", "1", "--steps", "600"]
"""Six cells of a second or more each."""


@pytest.mark.parametrize(
    ("words", "waits", "said"),
    [
        (["exact"], "begun", "offcorr bench exact: stopped"),
        (["loop"], "begun", "offcorr bench loop: stopped; without --output nothing is kept"),
        (["loop", *OF_SECONDS, "--output", "a.json"], "a cell", "goes on from the cells in a.cells"),
    ],
)
def test_ctrl_c_ends_a_command_and_its_processes_with_one_line(words, waits, said, tmp_path):
    """While the processes import their modules, and while they work."""
    command = [sys.executable, "-m", "offcorr", "bench", *words, "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard,
    )
    assert process.stderr is not None
    process.stderr.readline()
    deadline = time.monotonic() + 120
    while waits == "a cell" and not list(tmp_path.glob("a.cells/*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    last = rest.splitlines()[-1]
    assert process.returncode == 130 and last.endswith(said) and "Traceback" not in rest, rest
    while left := processes_of(process.pid):  # the last one sees by a closed pipe that it is alone
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_the_start_of_processes_is_in_the_estimate_and_nothing_is_said_before_a_tenth(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lab_processes.time, "monotonic", lambda: now[0])
    clock = Clock(total=20.0, items=40, processes=2)
    assert clock.seconds == STARTING + 10
    now[0] += 2 * (STARTING + 0.5)  # this machine is half as fast
    assert clock.left(1.0) == ""
    now[0] += 2 * 4.5
    assert clock.left(10.0) == "; about 10 s left"
    assert Clock(total=3.0, items=1, processes=2).seconds == Clock(total=3.0, items=9, processes=1).seconds == 3.0
