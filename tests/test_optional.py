"""Parts of the library that `import offcorr` leaves out: there on first use, or an error that says what to install."""

import re

import pytest

import offcorr
from offcorr.optional import require
from tests.fresh import TRAINER, python


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
