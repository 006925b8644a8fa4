"""TRL's own GRPO tests, with TRL's trainers and then with this library's, compared test by test.

    git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl .trl-source     # the installed version
    python tests/trl/conformance/run.py .trl-source [--offline] [--output results.json]

The tests run three times: with TRL's own trainers (``stock``); with this library's in their place, where a loss name of
TRL's means TRL's own loss (``offcorr``); and with a correction of this library wherever a test names no loss
(``corrected``).  The exit status is 1 where a test's outcome differs from stock and is not in ``EXPECTED``.

The tests load small models and data sets from a hub.  With ``--offline`` stand-ins are made here (``stand_ins.py``).
Nothing of TRL's is written to the source folder: its tests are copied.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TESTS = ("test_grpo_trainer.py", "experimental/test_async_grpo_trainer.py")
VARIANTS = ("stock", "offcorr", "corrected")

EXPECTED: dict[tuple[str, str], str] = {}
"""{(variant, the test's name without parameters): why it differs from stock}"""


class Difference(NamedTuple):
    """A test that does not end as with TRL's own trainer."""

    variant: str
    test: str
    stock: str
    here: str
    reason: str  # why it ended so
    expected: str  # from EXPECTED; empty: not expected


def source_version(source: Path) -> str:
    """Returns the version that a folder with TRL's source states, "1.16.0" or "1.17.0.dev0".

    Raises:
        FileNotFoundError: it is no such folder.
    """
    if not (source / "tests" / TESTS[0]).exists():
        raise FileNotFoundError(f"{source} has no tests/{TESTS[0]}: it is not a folder with TRL's source")
    return (source / "VERSION").read_text().strip()


def run(variant: str, tests: Path, offline: bool, hub: Path, select: str | None) -> dict[str, list[str]]:
    """Returns {test: [outcome, reason]} of TRL's tests under one variant."""
    outcomes = tests.parent / f"{variant}.json"
    environment = {
        **os.environ,
        "OFFCORR_CONFORMANCE_TRAINER": variant,
        "OFFCORR_CONFORMANCE_OUTCOMES": str(outcomes),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",  # a reward function there is a hash
    }
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    present = [f"tests/{name}" for name in TESTS if (tests / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["--tb=no", "--disable-warnings", "--continue-on-collection-errors", *present]
    command += ["-k", select] if select else []
    ran = subprocess.run(command, cwd=tests.parent, env=environment, stdout=subprocess.PIPE, text=True)
    if not outcomes.exists():
        raise RuntimeError(f"pytest ended with status {ran.returncode} before the tests:\n{ran.stdout[-4000:]}")
    print(f"{variant}: {ran.stdout.strip().splitlines()[-1]}", flush=True)
    return json.loads(outcomes.read_text())


def compare(results: dict[str, dict[str, list[str]]]) -> list[Difference]:
    """Returns the tests whose outcome under a variant is not that under ``stock``.

    >>> stock = {"test_a": ["passed", ""], "test_b": ["passed", ""]}
    >>> compare({"stock": stock, "offcorr": {"test_a": ["passed", ""], "test_b": ["failed", "AssertionError"]}})[0].test
    'test_b'
    """
    found = []
    stock = results["stock"]
    for variant, outcomes in results.items():
        for test in sorted({*stock, *outcomes}):
            before, after = stock.get(test, ["absent", ""]), outcomes.get(test, ["absent", ""])
            if before[0] != after[0]:
                name = test.rpartition("::")[2].partition("[")[0]
                expected = EXPECTED.get((variant, name), "")
                found.append(Difference(variant, test, before[0], after[0], after[1], expected))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run, compare, print; 1 where there is a difference that is not expected."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a folder with TRL's source, at the tag of the installed version")
    parser.add_argument("--offline", action="store_true", help="with stand-ins for the models and data sets of the hub")
    parser.add_argument("--output", type=Path, help="a JSON file for the outcomes")
    parser.add_argument("--other-version", action="store_true", help="accept the source of another version")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of the three")
    parser.add_argument("-k", dest="select", help="only the tests that match, as in pytest")
    options = parser.parse_args(argv)

    import torch
    import transformers
    import trl

    fetch = f"git clone --depth 1 --branch v{trl.__version__} https://github.com/huggingface/trl .trl-source"
    try:
        version = source_version(options.source)
    except FileNotFoundError as error:
        print(f"{error}; fetch it with\n  {fetch}")
        return 2
    if version != trl.__version__ and not options.other_version:
        print(
            f"{options.source} is TRL {version}, and {trl.__version__} is installed; fetch that one with\n  {fetch}\n"
            "or pass --other-version"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(options.source / "tests", work / "tests")
        if options.offline:
            sys.path.insert(0, str(HERE))
            from stand_ins import trl_hub, with_own_tokens

            trl_hub(work / "hub")
            for name in TESTS:
                test = work / "tests" / name
                if test.exists():
                    test.write_text(with_own_tokens(test.read_text()))
        with ThreadPoolExecutor(options.jobs) as pool:
            every = [
                pool.submit(run, v, work / "tests", options.offline, work / "hub", options.select) for v in VARIANTS
            ]
        results = {variant: future.result() for variant, future in zip(VARIANTS, every, strict=True)}
    differences = compare(results)
    counts = {variant: dict(Counter(outcome for outcome, _ in of.values())) for variant, of in results.items()}
    for variant, count in counts.items():
        print(f"{variant:<10}", ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())))
    for one in differences:
        print(f"{one.variant}: {one.test}: {one.stock} -> {one.here}: {one.reason} [{one.expected or 'NOT EXPECTED'}]")
    if options.output:
        versions = {"trl": trl.__version__, "tests": version, "transformers": transformers.__version__}
        record = {
            "versions": {**versions, "torch": torch.__version__},
            "stand_ins": options.offline,
            "only": options.select,
            "counts": counts,
            "differences": [one._asdict() for one in differences],
            "not_passed_in_stock": {test: of for test, of in results["stock"].items() if of[0] != "passed"},
            "tests": {
                test: " ".join(results[v].get(test, ["absent"])[0] for v in VARIANTS) for test in results["stock"]
            },
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(not results["stock"] or any(not one.expected for one in differences))


if __name__ == "__main__":
    sys.exit(main())
