"""Code run in a process of its own, without the seconds that importing torch or TRL takes each time.

A server imports the packages once and forks for every piece of code.  Nothing of offcorr is imported before the code
runs, and no shape is checked.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TRAINER = ("transformers", "datasets", "reasoning_gym", "trl.trainer.grpo_trainer")
"""What is slow to import beneath the parts that need it."""

SERVER = """
import gc, importlib, json, os, signal, sys, traceback

for package in sys.argv[1:]:
    try:
        importlib.import_module(package)
    except ImportError:
        pass  # the code says whether it can do without
gc.freeze()
for line in sys.stdin:
    code, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def server(packages: tuple[str, ...]) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER, *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    atexit.register(lambda: started.communicate())  # the end of its input is the end of the server
    return started


def python(code: str, imported: tuple[str, ...] = ("torch",)) -> subprocess.CompletedProcess[str]:
    """Runs ``code``, for at most 300 seconds, in a process in which these packages are imported already."""
    process = server(imported)
    with tempfile.TemporaryDirectory() as folder:
        process.stdin.write(json.dumps([code, folder]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the server of {imported} has ended"
        said = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(["python", "-c", code], int(answer), *said)


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a folder with a copy of the library, which is imported in place of this one."""
    return python(
        f"import os, sys; os.chdir({str(folder)!r}); sys.path.remove({str(ROOT)!r}); sys.path.insert(0, os.getcwd())\n"
        f"import pytest; sys.exit(pytest.main({[*words]!r}))"
    )
