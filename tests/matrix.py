"""Every supported Python with the newest and the oldest supported TRL, in fresh environments without constraints.txt.

    make test-matrix                                           # every cell without a passed result
    python tests/matrix.py --python 3.10 --packages oldest --again
    python tests/matrix.py --report                            # write docs/versions.md anew

"newest" leaves every version to the installer; "oldest" asks for the lowest torch, TRL, transformers, accelerate and
datasets that pyproject.toml admits. In each cell: the installation of offcorr[recipes] from a wheel, an import of every
optional part, `make test-library`, and two optimizer steps of the installed command `offcorr train`. Results go to
tests/matrix.json after each cell and from there to docs/versions.md. uv is used where there is one, otherwise pip; the
environments are removed. CUDA builds of torch take about 5 GB each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "matrix.json"
PAGE = ROOT / "docs" / "versions.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PACKAGES = ("newest", "oldest")
SHOWN = ("trl", "torch", "triton", "transformers", "accelerate", "datasets", "numpy")
TEST_TOOLS = ("beartype", "hypothesis", "jaxtyping", "pytest", "pytest-xdist")
TRAIN = "--config minpro --max_steps 2 --train_size 64 --eval_size 8 --per_device_eval_batch_size 8 --output_dir out"

IMPORTS = """
import offcorr.toy, offcorr.rollout, offcorr.extras, offcorr.trl
try:
    import offcorr.trl.async_grpo
    print("yes")
except ImportError as error:
    if "needs trl 1.16 or later" not in str(error):
        raise
    print("needs TRL 1.16")
"""
VERSIONS = f"""
import importlib.metadata as m, json, platform
found = {{name: m.version(name) for name in {SHOWN!r} if any(m.distributions(name=name))}}
print(json.dumps({{"python": platform.python_version(), **found}}))
"""

Cell = dict[str, object]


class Failed(Exception):
    """A step of a cell that failed; the message is the last line of what it printed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--again", action="store_true", help="run cells that have passed, too")
    parser.add_argument("--report", action="store_true", help="run nothing; write docs/versions.md from the results")
    options = parser.parse_args()

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = list(itertools.product(options.python, options.packages))
    for place, (python, packages) in enumerate([] if options.report else wanted, start=1):
        name = f"{python} {packages}"
        if results.get(name, {}).get("outcome") == "passed" and not options.again:
            print(f"[{place}/{len(wanted)}] {name}: passed before, --again repeats it", flush=True)
            continue
        print(f"[{place}/{len(wanted)}] {name}", flush=True)
        results[name] = run_cell(python, packages)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(f"    {results[name]['outcome']}", flush=True)
    PAGE.write_text(page(results))
    return any(results.get(" ".join(cell), {}).get("outcome") != "passed" for cell in wanted)


def run_cell(python: str, packages: str) -> Cell:
    cell: Cell = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    executable = interpreter(python)
    if executable is None:
        return cell | {"outcome": "not run: no interpreter on that machine"}
    with tempfile.TemporaryDirectory(prefix="offcorr-matrix-") as folder:
        environment = Path(folder) / "environment"
        binaries = environment / "bin"
        steps = {
            "install": lambda: install(executable, environment, packages),
            "versions": lambda: json.loads(run(binaries / "python", "-c", VERSIONS, cwd=folder)),
            "asynchronous": lambda: run(binaries / "python", "-W", "ignore", "-c", IMPORTS, cwd=folder).splitlines()[
                -1
            ],
            "tests": lambda: test_core(environment, Path(folder) / "tests.xml"),
            "training": lambda: train(binaries / "offcorr", Path(folder)),
        }
        seconds = {}
        failures = []
        for name, step in steps.items():
            print(f"    {name} ...", end="", flush=True)
            start = time.monotonic()
            try:
                value = step()
                if value is not None:
                    cell[name] = value
                said = "ok"
            except Failed as failed:
                said = str(failed)
                failures.append(f"{name}: {said}")
            seconds[name] = round(time.monotonic() - start)
            print(f" {seconds[name]} s: {said}", flush=True)
            if failures and name == "install":
                break
    return cell | {"seconds": seconds, "outcome": "passed" if not failures else "failed", "failures": failures}


def interpreter(version: str) -> str | None:
    """A Python of this minor version: on PATH, of pyenv, or one that uv has or fetches."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))
    for candidate in filter(None, candidates):  # a shim of pyenv may answer with an error
        done = subprocess.run([candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], **CAPTURED)
        if done.stdout.strip() == version:
            return candidate
    if uv := shutil.which("uv"):
        subprocess.run([uv, "python", "install", version], **CAPTURED)
        done = subprocess.run([uv, "python", "find", version], **CAPTURED)
        return done.stdout.strip() or None
    return None


def install(python: str, environment: Path, packages: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["trl"]]
    floors = [re.sub(r">=([\d.]+).*", r"==\1.*", wanted) for wanted in declared if re.match(r"[\w-]+>=", wanted)]
    oldest = [pin for pin in floors if pin.split("==")[0] in SHOWN and not pin.startswith("numpy")]
    run(python, "-m", "venv", environment)
    binary = environment / "bin" / "python"
    uv = shutil.which("uv")
    pip = [uv, "pip", "install", "--python", binary] if uv else [binary, "-m", "pip", "install"]
    run(*pip, f"{ROOT}[recipes]", *TEST_TOOLS, *(oldest if packages == "oldest" else []))


def test_core(environment: Path, report: Path) -> dict[str, int]:
    # The environment is there already: its mark is newer than what `make` would build it from.
    (environment / "installed").touch()
    command = ("make", "--no-print-directory", "test-library", f"VENV={environment}", f"PYTHON={sys.executable}")
    try:
        run(*command, cwd=ROOT, PYTEST_ADDOPTS=f"--junitxml={report} -p no:cacheprovider")
    except Failed as failed:
        if report.exists() and (broken := failed_tests(report)):
            raise Failed(broken) from None
        raise failed from None
    return counted(report)


def failed_tests(report: Path) -> str:
    """How many tests failed, and the first with the first line of its error."""
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    broken = [(case, bad) for case in cases for bad in case if bad.tag in ("failure", "error")]
    if not broken:
        return ""
    case, bad = broken[0]
    said = (bad.get("message") or "").splitlines() or [""]
    return f"{len(broken)} of {len(cases)} failed; the first: {case.get('classname')}::{case.get('name')}: {said[0]}"


def counted(report: Path) -> dict[str, int]:
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    skipped = sum(child.tag == "skipped" for case in cases for child in case)
    return {"passed": len(cases) - skipped, "skipped": skipped}


def train(command: Path, folder: Path) -> None:
    """Two optimizer steps by the installed command, in a folder without recipes."""
    run(command, "train", *TRAIN.split(), "--use_cpu", "true", "--disable_tqdm", "true", cwd=folder)
    history = json.loads((folder / "out" / "history.json").read_text())
    if max(entry["step"] for entry in history) != 2:
        raise Failed(f"no second optimizer step in the history: {history}")


CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def run(*command: object, cwd: Path | str | None = None, **environment: str) -> str:
    """Runs a command without the caller's PYTHONPATH; returns its output."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=variables, **CAPTURED)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise Failed(lines[-1].strip() if lines else f"exit code {done.returncode}")
    return done.stdout


def page(results: dict[str, Cell]) -> str:
    head = ("Python", "packages", *SHOWN, "core tests", "`offcorr train`", "asynchronous trainer", "seconds")
    rows = [head, ("---",) * len(head)]
    problems = []
    for python, packages in itertools.product(PYTHONS, PACKAGES):
        cell = results.get(f"{python} {packages}", {"outcome": "not run"})
        found = {"python": python} | cell.get("versions", {})
        failures = {failure.partition(":")[0]: failure for failure in cell.get("failures", ())}
        problems += [f"- Python {python}, {packages} packages: {failure}" for failure in failures.values()]
        if "versions" not in cell:
            said = [cell["outcome"], "", ""]
        else:
            tests = cell.get("tests")
            said = [f"{tests['passed']} passed, {tests['skipped']} skipped" if tests else "failed"]
            said += ["failed" if "training" in failures else "passed", cell.get("asynchronous", "failed")]
        seconds = str(sum(cell.get("seconds", {}).values()) or "")
        rows.append((found["python"], packages, *(found.get(package, "") for package in SHOWN), *said, seconds))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    failed = "\n\nWhat failed:\n\n" + "\n".join(problems) if problems else ""
    return f"""# Tested versions

Each row is a fresh environment without `constraints.txt`. In the newest rows the installer chose every version; the
oldest rows have the lowest versions of torch, TRL, transformers, accelerate and datasets that `pyproject.toml` admits.
In each, `offcorr[recipes]` was installed from a wheel, every optional part was imported, `make test-library` was run,
and the installed command `offcorr train` took two optimizer steps. `make test-matrix` writes this page.

The other tests run with the versions in `constraints.txt`, the TRL tests also with the oldest TRL. The seconds are of a
machine that other programs used at the same time.

{table}{failed}
"""


if __name__ == "__main__":
    sys.exit(main())
