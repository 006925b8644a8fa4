"""Shapes are checked at run time in these tests, and cost nothing where the tools for that are missing."""

import inspect
import sys

import pytest
import torch

import offcorr
from offcorr import shapes
from offcorr.stages import pointwise, spans
from offcorr.stages.base import Stage
from tests import shape_checks
from tests.conftest import SHAPES_ARE_CHECKED
from tests.fresh import python

checked = pytest.mark.skipif(not SHAPES_ARE_CHECKED, reason="could not import jaxtyping and beartype")


@checked
def test_a_wrong_shape_is_named():
    from jaxtyping import TypeCheckError

    rows = offcorr.batch.Rows(torch.ones(2, 3).bool(), None, torch.float32)
    assert spans.sequence(torch.ones(2, 3), rows).shape == (2, 3)
    with pytest.raises(TypeCheckError, match=r"parameters of offcorr.stages.spans.sequence"):
        spans.sequence(torch.ones(2), rows)
    with pytest.raises(TypeCheckError, match=r"'kept'"):  # its shape agrees with the others', its dtype does not
        offcorr.stages.reference.Factors(*[torch.ones(2, 3)] * 4)


@checked
def test_letters_agree_within_one_call():
    from jaxtyping import TypeCheckError

    kept = torch.ones(2, 4).bool()
    with pytest.raises(TypeCheckError, match=r"'kept'"):
        offcorr.stages.reference.Factors(torch.ones(2, 3), kept, kept, kept)


@checked
def test_whatever_names_a_shape_is_checked():
    """A checked function has the types as annotations; one that was left out would still have their text."""
    left_out = [
        f"{function.__module__}.{function.__qualname__}"
        for name, module in sys.modules.items()
        for function in vars(module).values()
        if name.startswith("offcorr.") and inspect.isfunction(function)
        if any(isinstance(a, str) and shape_checks.NAMED.search(a) for a in function.__annotations__.values())
    ]
    assert not left_out and len(shape_checks.CHECKED) > 20


def test_the_names_are_those_of_the_library():
    own = {
        name for name, value in vars(shapes).items() if name[0].isupper() and name not in ("Any", "Literal", "Tensor")
    }
    assert own - {"Bool", "Float", "Int", "Mismatch", "TYPE_CHECKING"} == set(shape_checks.SHAPES)


def test_pointwise_functions_are_left_as_they_are():
    """The kernel takes their code objects: a wrapper would have another."""
    assert not [name for name, function in vars(pointwise).items() if hasattr(function, "__wrapped__")]
    offcorr.available()
    for cls in Stage.__subclasses__():
        for one in cls.__subclasses__():
            for part in one.PARTS:
                function = inspect.getattr_static(one, part)
                if isinstance(function, staticmethod):
                    assert not hasattr(function.__func__, "__wrapped__"), f"{one.__name__}.{part}"


def test_without_jaxtyping_they_are_any():
    code = """
import sys
sys.modules["jaxtyping"] = None  # as if it were not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jaxtyping" else find_spec(name, *rest)
import typing, offcorr
from offcorr import shapes
assert shapes.PerToken is shapes.Scalar is typing.Any
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
