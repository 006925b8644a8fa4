"""Tests of the wheel: complete, few dependencies, and nothing of the machine on which it was built."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import offcorr

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("transformers", "trl", "datasets", "accelerate", "peft", "deepspeed")

CORE_REPORT = f"""
import importlib.util, json, sys
import offcorr, torch
batch = offcorr.Batch(
    logp=torch.zeros(2, 3, requires_grad=True),
    advantages=torch.tensor([1.0, -1.0]),
    mask=torch.ones(2, 3, dtype=torch.bool),
)
out = offcorr.get("ppo")(batch)
print(json.dumps(dict(
    file=offcorr.__file__,
    methods=sorted(offcorr.available()),
    coefficient=out.coefficient.tolist(),
    importable=[name for name in {HEAVY!r} if importlib.util.find_spec(name)],
    imported=[name for name in {HEAVY!r} if name in sys.modules],
)))
"""


def run(*command: str | Path, **options) -> str:
    # An installed package is meant, not a checkout that the caller's environment may point to.
    options.setdefault("env", {name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    return [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]


def closure(wanted: list[Requirement]) -> set[str]:
    """Returns the names of the installed distributions that `wanted` (without extras) requires."""
    names: set[str] = set()
    queue = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    while queue:
        name = canonicalize_name(queue.pop().name)
        if name in names:
            continue
        names.add(name)
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        queue += [r for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return names


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with only the wheel and the dependencies of the core.

    The dependencies are linked from this environment, because torch is too large to install for a test.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in closure(requirements(wheel)):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel)
    return environment


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    package = ROOT / "offcorr"
    source = {str(p.relative_to(ROOT)) for p in package.rglob("*.py")} | {"offcorr/py.typed"}
    source |= {f"offcorr/{name}" for name in recipes()}
    assert source <= names, f"missing from the wheel: {sorted(source - names)}"
    assert all(n.startswith("offcorr/") for n in names), sorted(names)
    assert not [n for n in names if "__pycache__" in n]


def recipes() -> list[str]:
    found = [str(path.relative_to(ROOT)) for path in project_files() if path.is_relative_to(ROOT / "recipes")]
    assert {"recipes/grpo.py", "recipes/demo.py", "recipes/configs/minpro.yaml"} <= set(found)
    return found


def test_the_recipes_of_the_wheel_are_those_of_the_checkout(wheel: Path) -> None:
    """One file each: the checkout keeps no copy inside the package."""
    assert not (ROOT / "offcorr" / "recipes").exists()
    with zipfile.ZipFile(wheel) as archive:
        for name in recipes():
            assert archive.read(f"offcorr/{name}") == (ROOT / name).read_bytes()


def test_source_distribution_holds_what_its_tests_read(tmp_path: Path) -> None:
    """All of the project but what only its host reads, so that `make` and the tests run in an unpacked archive."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        held = {name.partition("/")[2] for name in members.getnames()}
    host_only = (".ci/", ".github/", ".pre-commit-config.yaml")
    wanted = {str(path.relative_to(ROOT)) for path in project_files()}
    missing = {name for name in wanted - held if not name.startswith(host_only)}
    assert not missing, f"missing from the source distribution: {sorted(missing)}"


def test_core_needs_torch_einops_numpy_only(wheel: Path) -> None:
    assert {r.name for r in requirements(wheel) if r.marker is None} == {"torch", "einops", "numpy"}


def test_wheel_works_in_an_empty_environment(empty_environment: Path, tmp_path: Path) -> None:
    report = json.loads(run(empty_environment / "bin" / "python", "-I", "-c", CORE_REPORT, cwd=tmp_path))
    assert Path(report["file"]).is_relative_to(empty_environment)
    assert report["importable"] == []
    methods = {p.stem for p in (ROOT / "offcorr" / "methods").glob("[a-z]*.py")} - {"registry"}
    assert methods <= set(report["methods"]), f"undiscovered: {methods - set(report['methods'])}"
    # At ratio 1 the gradient is REINFORCE's, -A / Z; means over two equal lengths of 3 have Z = 6.
    expected = [[-1 / 6] * 3, [1 / 6] * 3]
    assert [pytest.approx(row) for row in expected] == report["coefficient"]


def test_console_script_answers_in_an_empty_environment(empty_environment: Path, tmp_path: Path) -> None:
    assert "offcorr" in run(empty_environment / "bin" / "offcorr", "--help", cwd=tmp_path)


def test_the_commands_of_an_empty_environment(empty_environment: Path, tmp_path: Path) -> None:
    """What works without TRL, and a clear word about what does not."""
    command = empty_environment / "bin" / "offcorr"
    assert run(command, "--version", cwd=tmp_path) == f"offcorr {offcorr.__version__}\n"
    assert "eps_high=0.28" in run(command, "methods", "minpro", cwd=tmp_path)
    assert "offcorr/recipes/grpo.py" in run(command, "train", "--help", cwd=tmp_path)
    for name in ("train", "demo"):
        refused = subprocess.run([command, name], cwd=tmp_path, capture_output=True, text=True)
        assert refused.returncode == 2 and 'pip install "offcorr[recipes]"' in refused.stderr
        assert "needs trl, transformers" in refused.stderr and "Traceback" not in refused.stderr
    code = "import offcorr; offcorr.rollout"
    refused = subprocess.run([empty_environment / "bin" / "python", "-I", "-c", code], capture_output=True, text=True)
    assert 'needs transformers, accelerate, not installed here: pip install "offcorr[trl]"' in refused.stderr


def test_the_errors_about_old_packages_name_the_oldest_supported(wheel: Path) -> None:
    """offcorr.trl, and the command, ask for the versions of pyproject.toml."""
    asked = [r for r in requirements(wheel) if not r.marker or 'extra == "trl"' in str(r.marker)]
    floors = {r.name: r.specifier for r in asked}
    found = []
    for file in ("offcorr/trl/__init__.py", "offcorr/optional.py"):
        for name, floor in re.findall(r'"([\w-]+)>=([\d.]+)"', (ROOT / file).read_text()):
            assert f">={floor}" in str(floors[name]).split(","), f"{file} asks for {name}>={floor}"
            found.append(name)
    assert {"trl", "transformers", "accelerate", "datasets"} <= set(found)


def test_core_imports_nothing_heavy_where_it_could(tmp_path: Path) -> None:
    """Where transformers and trl are installed, importing the core must not load them."""
    for name in ("transformers", "trl"):
        pytest.importorskip(name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    report = json.loads(run(sys.executable, "-c", CORE_REPORT, cwd=tmp_path, env=environment))
    assert {"transformers", "trl"} <= set(report["importable"])
    assert report["imported"] == []


def test_constraints_pin_what_the_project_asks_for(wheel: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    # A local version (2.13.0+cpu) exists on some package indexes only.
    assert not [version for version in pins.values() if "+" in version]
    for requirement in requirements(wheel):
        name = canonicalize_name(requirement.name)
        if name in (
            "offcorr",
            "flash-attn",
        ):  # flash-attn needs a GPU's compiler: not installed here
            continue
        assert name in pins, f"{requirement} has no pin in constraints.txt"
        assert pins[name] in requirement.specifier, f"{name}=={pins[name]} is outside {requirement}"


# ---------------------------------------------------------- nothing of one machine in the project

MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|root|(?:home|Users)/\w+)/")
REGISTRY = re.compile(
    r"(?:extra-)?index[-_]url|find[-_]links|trusted[-_]host|file[:]//|pypi[.]org/simple|pytorch[.]org/whl",
    re.I,
)


def project_files() -> list[Path]:
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
        found = [ROOT / name for name in listed.split("\0") if name]
    else:  # an unpacked source distribution
        found = [p for p in ROOT.rglob("*") if "/." not in f"/{p.relative_to(ROOT)}"]
    return [p for p in found if p.is_file()]


@pytest.mark.parametrize(
    "pattern, text",
    [
        (MACHINE, "open('" + "/tm" + "p/out.json')"),
        (MACHINE, "cd " + "/ho" + "me/somebody/offcorr"),
        (REGISTRY, "pip install --extra-index" + "-url https://example.org"),
        (REGISTRY, "--find" + "-links wheels"),
        (REGISTRY, "https://download.pytor" + "ch.org/whl/cpu"),
    ],
)
def test_the_patterns_see_what_they_are_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.parametrize("pattern", [MACHINE, REGISTRY], ids=["machine paths", "registry settings"])
def test_no_file_carries_settings_of_one_machine(pattern: re.Pattern[str]) -> None:
    files = project_files()
    assert ROOT / "pyproject.toml" in files
    hits = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        hits += [f"{path.relative_to(ROOT)}: {m.group()}" for m in pattern.finditer(text)]
    assert not hits, "\n".join(hits)
