"""A process of ``offcorr bench arena`` that does training runs one after another, as it reads them from stdin.

One interpreter for several runs saves their imports, 5 to 10 s each.  Every run seeds all generators anew and makes its
own model and optimizer, so that its numbers do not depend on what ran before it (tests/lab/test_arena.py).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any


def main() -> None:
    """Does the jobs on stdin, one JSON object per line; the answer to each is a line with ``exit_code`` and ``error``.

    A job is ``{"recipe": FILE.py, "argv": [...], "output": FILE}`` or ``{"warm_start": SEED, "output": FILE}``.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        with _output_to(Path(job["output"])):
            answer = _do(job)
        print(json.dumps(answer), file=answers)


def _read(jobs: SimpleQueue[str]) -> None:
    """Puts every line of stdin into the queue; ends this process, in the middle of a run, when the parent has ended."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(1)


def _do(job: dict[str, Any]) -> dict[str, Any]:
    try:
        if "warm_start" in job:
            importlib.import_module("offcorr.toy").model_path(seed=job["warm_start"], progress=False)
        else:
            recipe = Path(job["recipe"])
            if str(recipe.parent) not in sys.path:
                sys.path.insert(0, str(recipe.parent))
            sys.argv = [str(recipe), *job["argv"]]
            importlib.import_module(recipe.stem).main()
    except SystemExit as ended:  # the recipe's parser refuses a flag
        code = ended.code if isinstance(ended.code, int) else 1
        return {"exit_code": code, "error": f"the recipe ended with {ended.code!r}" if code else None}
    except Exception as error:
        traceback.print_exc()
        return {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
    return {"exit_code": 0, "error": None}


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Context in which stdout and stderr, those of compiled code included, go to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
