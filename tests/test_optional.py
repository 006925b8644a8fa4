"""Parts of the library that `import offcorr` leaves out: there on first use, or an error that says what to install."""

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import offcorr
from offcorr.optional import RECIPE_NEEDS, require
from tests.fresh import TRAINER, python

ROOT = Path(__file__).resolve().parent.parent
ALSO = {"tokenizers"}  # transformers requires it


@pytest.mark.parametrize(
    "name, attribute, needs",
    [
        ("rollout", "OffPolicy", ("transformers", "accelerate")),
        ("trl", "GRPOConfig", ("trl", "transformers", "accelerate", "datasets")),
        ("toy", "model_path", ("transformers", "datasets", "filelock", "reasoning_gym")),
        ("extras", "CHORD", ()),
        ("integrations", "HOOKS", ()),
    ],
)
def test_an_attribute_on_first_use(name, attribute, needs):
    for package in needs:
        pytest.importorskip(package)
    code = f"import offcorr, sys; assert 'offcorr.{name}' not in sys.modules; offcorr.{name}.{attribute}"
    done = python(code, imported=TRAINER if needs else ("torch",))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement, missing, extra",
    [
        ("from offcorr.trl import GRPOConfig", "trl", "trl"),
        ("from offcorr.trl.async_grpo import AsyncGRPOTrainer", "trl", "trl"),
        ("offcorr.trl", "datasets", "trl"),
        ("offcorr.rollout.OffPolicy", "transformers", "trl"),
        ("from offcorr import rollout", "accelerate", "trl"),
        ("offcorr.toy.model_path()", "reasoning_gym", "recipes"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(statement, missing, extra):
    done = python(f"import sys; sys.modules[{missing!r}] = None\nimport offcorr\n{statement}")
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ModuleNotFoundError: offcorr.") and f'pip install "offcorr[{extra}]"' in said, done.stderr
    assert missing.replace("_", "-") in said


@pytest.mark.parametrize(
    "statement, missing, install",
    [
        ("verl.register()", "verl", "pip install verl"),
        ("skyrl.register('minpro')", "skyrl", 'pip install "skyrl[skyrl-train]"'),
    ],
)
def test_a_missing_trainer_is_named_with_what_installs_it(statement, missing, install):
    done = python(
        f"import sys; sys.modules[{missing!r}] = None\nfrom offcorr.integrations import {missing}\n{statement}"
    )
    said = done.stderr.splitlines()[-1]
    assert said == (
        f"ModuleNotFoundError: offcorr.integrations.{missing}.register() needs {missing}, not installed here: {install}"
    )


def test_an_old_version_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.24.0")
    said = 'this needs torch 2.6 or later, but torch 0.24.0 is installed: pip install "torch>=2.6"'
    with pytest.raises(ImportError, match=re.escape(said)):
        require("this", ["torch>=2.6"], extra="trl")


def test_the_asynchronous_trainer_names_the_trl_it_needs():
    """TRL 1.14, the newest for Python 3.10, has one without packed rows."""
    pytest.importorskip("trl")
    old = (
        "import importlib.metadata as m; v = m.version; m.version = lambda name: '1.14.2' if name == 'trl' else v(name)"
    )
    done = python(f"{old}\nfrom offcorr.trl.async_grpo import AsyncGRPOTrainer", imported=TRAINER)
    said = 'offcorr.trl.async_grpo needs trl 1.16 or later, but trl 1.14.2 is installed: pip install "trl>=1.16"'
    assert said in done.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(offcorr, "rollouts")
    assert {"rollout", "trl", "toy", "extras", "get"} <= set(dir(offcorr))


def _extras() -> dict[str, set[str]]:
    """The packages of each extra of pyproject.toml, those of the extras that it names among them."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found = [Requirement(line) for line in extras[extra]]
        inner = [packages(word) for one in found if one.name == "offcorr" for word in one.extras]
        return {one.name for one in found if one.name != "offcorr"}.union(*inner)

    return {extra: packages(extra) for extra in extras}


def test_every_extra_that_an_error_names_exists_and_installs_what_is_missing():
    """Those of calls of `require`, and those in any text of the code, the recipes and the pages."""
    extras, calls = _extras(), 0
    files = [file for folder in ("offcorr", "recipes", "docs") for file in (ROOT / folder).rglob("*.*")]
    for file in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if file.suffix not in (".py", ".md"):
            continue
        text = file.read_text()
        for named in re.findall(r"offcorr\[([\w,-]+)\]", text):
            assert set(named.split(",")) <= extras.keys(), f"{file}: {named}"
        if file.suffix == ".md":
            continue
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "require":
                continue
            given = {word.arg: word.value for word in call.keywords}
            if "extra" not in given:
                continue
            extra, calls = ast.literal_eval(given["extra"]), calls + 1
            assert extra in extras, f"{file}:{call.lineno} names the extra {extra!r}"
            wanted = RECIPE_NEEDS if isinstance(call.args[1], ast.Name) else ast.literal_eval(call.args[1])
            missing = {Requirement(package).name for package in wanted} - extras[extra] - ALSO
            assert not missing, f"{file}:{call.lineno}: {extra} does not install {missing}"
    assert calls >= 8
