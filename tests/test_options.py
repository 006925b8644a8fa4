"""Every numeric option of every method, stage, controller and part of a training loop refuses what is no number."""

from __future__ import annotations

import inspect
import math
import sys

import pytest
import torch
from torch import nn

import offcorr
from offcorr import extras, training
from offcorr.methods.registry import catalogue, illustration
from offcorr.stages.base import Controller, Stage
from offcorr.stages.weights import GroupSums

NO_NUMBERS = [True, math.nan, math.inf, -math.inf, "one", [1.0], torch.ones(2), torch.tensor(True)]

NEGATIVE = {"delta", "delta_v", "log_limit", "power", "shift"}
"""Options of stages and methods that may be negative: a shift, a difference, an exponent."""


def numeric(parameter):
    return any(word in str(parameter.annotation) for word in ("int", "float", "Number"))


def options_of(build, without=()):
    parameters = inspect.signature(build).parameters
    return [name for name, one in parameters.items() if numeric(one) and name not in without]


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def stages():
    illustration("minpro")  # so that the methods' own stages are imported
    found = {one for one in subclasses(Stage) if one.__module__.startswith("offcorr.") and not inspect.isabstract(one)}
    bases = {one for one in found if one.__subclasses__() and one.__module__.startswith("offcorr.stages.")}
    return sorted(found - bases - {Controller}, key=lambda one: (one.__module__, one.__name__))


REQUIRED = {
    "low": 0.5,
    "high": 2.0,
    "cap": 2.0,
    "tau": 0.1,
    "sums": GroupSums(torch.zeros(1, dtype=torch.long), torch.ones(1), torch.ones(1)),
}


def required(build):
    parameters = inspect.signature(build).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind != one.VAR_KEYWORD]
    return {name: REQUIRED.get(name, 0.5) for name in needed}


def refuses(build, name, value, **others):
    """The error names the option and shows what came."""
    with pytest.raises((ValueError, TypeError)) as error:
        build(**{**others, name: value})
    assert name in str(error.value), f"{name}={value!r}: {error.value}"
    assert "expected" in str(error.value), str(error.value)


@pytest.mark.parametrize("method", [one.name for one in catalogue()])
def test_methods(method):
    known = next(one for one in catalogue() if one.name == method)
    given = required(known.build)
    for name in options_of(known.build):
        for value in NO_NUMBERS:
            refuses(lambda **options: offcorr.get(method, **options), name, value, **given)
        if name not in NEGATIVE:
            refuses(lambda **options: offcorr.get(method, **options), name, -1.5, **given)


@pytest.mark.parametrize("stage", stages(), ids=lambda stage: f"{stage.__module__.rpartition('.')[2]}.{stage.__name__}")
def test_stages(stage):
    given = required(stage)
    for name in options_of(stage, without=given.keys() & {"sums"}):
        for value in NO_NUMBERS:
            refuses(stage, name, value, **given)
        if name not in NEGATIVE:
            refuses(stage, name, -1.5, **given)


def flags(build):
    return [name for name, one in inspect.signature(build).parameters.items() if str(one.annotation) == "bool"]


FLAGS = [(one, name) for one in stages() for name in flags(one)]
FLAGS += [(getattr(sys.modules[m.build.__module__], m.name), name) for m in catalogue() for name in flags(m.build)]


@pytest.mark.parametrize(("build", "name"), FLAGS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_word_is_no_truth_value(build, name):
    for value in ("false", "no", 0, 1, None, torch.tensor(True)):
        refuses(build, name, value, **required(build))


def test_flags_are_found():
    assert {(build.__name__, name) for build, name in FLAGS} >= {("MinPrefix", "bounded"), ("VACO", "increase_only")}


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, math.nan, math.inf, "one"])
def test_max_length(value):
    refuses(lambda **options: offcorr.get("ppo", aggregate="seq-mean-token-sum-norm", **options), "max_length", value)


def model():
    return nn.Linear(2, 2)


def optimizer():
    return torch.optim.SGD(model().parameters(), lr=1.0)


PARTS = {
    "window": (lambda **o: training.EWMA(model(), **o), [True, -1, math.nan, math.inf, "one"]),
    "reset_below": (lambda **o: training.EWMA(model(), 4, **o), [True, -0.1, 1.5, math.nan, "one"]),
    "proximal_lag": (training.LogLinear, [True, -1, math.nan, math.inf, "one"]),
    "limit": (lambda **o: training.Snapshots(model(), **o), [True, -1, 1.5, math.nan, "one"]),
    "lag": (training.SnapshotRing, [True, -1, 1.5, math.nan, "one"]),
    "base": (lambda **o: training.ESSLearningRate(optimizer(), **o), [True, 0, -1, 1.5, math.nan, "one", [1.0]]),
    "denominator": (lambda **o: training.OPOB(model().parameters(), **o), [True, 0, -1, math.nan, math.inf, "one"]),
    "start": (lambda **o: training.Linear(end=1.0, **o), [True, math.nan, math.inf, "one"]),
    "end": (lambda **o: training.Linear(start=1.0, **o), [True, math.nan, math.inf, "one"]),
    "mu": (extras.CHORD, [True, -0.1, 1.5, math.nan, "one"]),
    "std": (lambda **o: extras.LayerPerturbation(model(), **o), [True, 0, -1, math.nan, math.inf, "one"]),
    "temperature": (training.Monitor, [True, 0, -1, math.nan, math.inf, "one"]),
}
CHARTS = {
    "warmup": [True, 0, 1, -1, 1.5, math.nan, "one"],
    "persistence": [True, 0, -1, 1.5, math.nan, "one"],
    "drift": [True, -1, math.nan, math.inf, "one"],
    "threshold": [True, -1, math.nan, math.inf, "one"],
}
CASES = [(name, build, value) for name, (build, values) in PARTS.items() for value in values]
CASES += [
    (name, build, value)
    for build in (training.Cusum, training.Monitor)
    for name, values in CHARTS.items()
    for value in values
]


@pytest.mark.parametrize(("name", "build", "value"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_parts_of_a_training_loop(name, build, value):
    refuses(build, name, value)


@pytest.mark.parametrize("bounds", [(math.nan, 1.0), (0.0, math.nan), (2.0, 1.0), (True, 1.0), ("one", 1.0)])
def test_limits_of_a_monitor(bounds):
    limit = training.Limit("engine", "offcorr/engine/k3", *bounds, "warning", "k3")
    with pytest.raises(ValueError, match=r"limits\[0\].*expected"):
        training.Monitor(limits=[limit])
