"""The structure of the library, read from its source: what may import what, and what its classes may not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    ("offcorr.shapes", "offcorr.optional", "offcorr.quiet", "offcorr.folders"),
    ("offcorr.stages.ops", "offcorr.stages.checks", "offcorr.stages.pointwise", "offcorr.flags"),
    ("offcorr.batch",),
    ("offcorr.stages",),
    ("offcorr.accumulators",),
    ("offcorr.metrics",),
    ("offcorr.kernels",),
    ("offcorr.loss", "offcorr.statistics"),
    ("offcorr.correction",),
    ("offcorr.methods",),
    (
        "offcorr.testing",
        "offcorr.check_batches",
        "offcorr.stage_checks",
        "offcorr.closeness",
        "offcorr.diagnose",
        "offcorr.tokens",
    ),
    ("offcorr.training",),
    (
        "offcorr.exact",
        "offcorr.diagnose.variants",
        "offcorr.diagnose.rescore",
        "offcorr.diagnose.informed",
        "offcorr.diagnose.scorable",
        "offcorr.diagnose.command",
        "offcorr.diagnose.html",
    ),
    ("offcorr",),  # the package itself: the names that users see
    ("offcorr.lab",),
    ("offcorr.rollout",),
    ("offcorr.data",),
    ("offcorr.trl", "offcorr.toy", "offcorr.extras", "offcorr.integrations"),
    ("offcorr.cli.tables", "offcorr.cli.guide"),
    ("offcorr.cli.output", "offcorr.cli.launch"),
    ("offcorr.cli.early",),
    ("offcorr.cli.train", "offcorr.cli.check", "offcorr.cli.methods", "offcorr.cli.metrics", "offcorr.cli.docs"),
    ("offcorr.cli", "offcorr.__main__"),
]
"""A module imports from its own layer and from those above it in this list.  The longest prefix counts."""

LATE = {
    ("offcorr.methods.registry", "offcorr.methods"): "its files are imported when a name is first looked up",
    ("offcorr.kernels.dispatch", "offcorr.kernels.launch"): "imports triton, which a core install lacks",
    ("offcorr.kernels.rebind", "offcorr.kernels.ops"): "imports triton, which a core install lacks",
    ("offcorr.lab.mismatch.language", "offcorr.toy.task"): "imports reasoning-gym, which a core install lacks",
    ("offcorr.lab.mismatch.models", "offcorr.toy"): "imports transformers, which a core install lacks",
    ("offcorr.lab.mismatch.models", "offcorr.toy.cache"): "imports transformers, which a core install lacks",
    ("offcorr.exact.invariant", "offcorr.kernels.invariant"): "imports triton, which a core install lacks",
    ("offcorr.kernels.logprob.linear", "offcorr.kernels.logprob.fold"): "imports triton, which a core install lacks",
}
"""Imports of the library inside functions, which the order of the layers does not see: each with its reason."""


class Import(NamedTuple):
    importer: str
    imported: str
    late: bool  # inside a function
    implied: bool  # importing a.b.c imports the package a.b, too
    place: str


@cache
def modules() -> dict[str, Path]:
    """Every module of the library and its file."""
    names = {}
    for file in sorted((ROOT / "offcorr").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@cache
def own_imports(name: str) -> tuple[Import, ...]:
    """The library's modules that a module imports; what only a type checker imports is left out."""
    file = modules()[name].relative_to(ROOT)

    def within(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.orelse:
                    yield from within(statement, late)
                continue
            place = f"{file}:{getattr(child, 'lineno', 0)}"
            for imported in imported_by(child, name):
                yield Import(name, imported, late, False, place)
                package = imported.rpartition(".")[0]
                if "." in package and not f"{name}.".startswith(f"{package}."):
                    yield Import(name, package, late, True, place)
            yield from within(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return tuple(within(tree(name), False))


def imported_by(node: ast.AST, name: str) -> set[str]:
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        package = name.split(".") if modules()[name].name == "__init__.py" else name.split(".")[:-1]
        source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        source = source if node.level else str(node.module)
        named = [f"{source}.{alias.name}" if f"{source}.{alias.name}" in modules() else source for alias in node.names]
    else:
        return set()
    return {one for one in named if one.partition(".")[0] == "offcorr"}


def layer(name: str) -> int:
    fits = [
        (len(prefix), at) for at, layer in enumerate(LAYERS) for prefix in layer if f"{name}.".startswith(f"{prefix}.")
    ]
    exact = [(length, at) for length, at in fits if length > len("offcorr")]
    if not exact and name != "offcorr":
        raise AssertionError(f"{name} is in no layer: add it to LAYERS in tests/test_structure.py")
    return max(exact or fits)[1]


@pytest.mark.parametrize("name", modules())
def test_no_import_goes_upward(name: str) -> None:
    own = [one for one in own_imports(name) if not one.late and not one.implied]
    upward = [f"{one.place} imports {one.imported}" for one in own if layer(one.imported) > layer(name)]
    assert not upward, "\n".join(upward)


def test_no_imports_run_in_a_circle() -> None:
    graph = {name: {one.imported for one in own_imports(name) if not one.late} - {name} for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


def test_every_late_import_has_a_reason() -> None:
    late = {
        (one.importer, one.imported): one.place
        for name in modules()
        for one in own_imports(name)
        if one.late and not one.implied
    }
    unlisted = [f"{place} imports {one[1]}" for one, place in late.items() if one not in LATE]
    assert not unlisted, "inside a function, with no reason in LATE of tests/test_structure.py:\n" + "\n".join(unlisted)
    assert not LATE.keys() - late.keys(), f"no longer imported late: {sorted(LATE.keys() - late.keys())}"


def test_inheritance_is_at_most_two_deep_under_stages() -> None:
    """Stage -> Gate -> Clip."""
    classes = {
        node.name: [ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases]
        for name in modules()
        if name.startswith(("offcorr.stages", "offcorr.methods"))
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str) -> int:
        return max((depth(base) + 1 for base in classes[name] if base in classes), default=0)

    assert depth("Clip") == 2
    deeper = {name: depth(name) for name in classes if depth(name) > 2}
    assert not deeper, f"base classes above each: {deeper}"


@pytest.mark.parametrize(
    "pattern",
    [
        r"type: ignore\[[^\]]*\boverride\b",
        r"except\b[^:\n]*\bAttributeError\b",
        r"\bcan_reorder\b",  # deprecated in triton 3.9, gone in 3.10
    ],
)
def test_the_library_does_without(pattern: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in modules().values()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)


def test_no_docstring_begins_with_a_question_word() -> None:
    """A docstring begins with a noun phrase or a verb in the indicative."""
    found = []
    for name, file in modules().items():
        for node in ast.walk(tree(name)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node) or ""
            if re.match(r"(What|Who|How)\b", docstring):
                line = getattr(node, "lineno", 1)
                found.append(f"{file.relative_to(ROOT)}:{line}: {docstring.splitlines()[0]}")
    assert not found, f"{len(found)} docstrings:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["benchmarks", "recipes"])
def test_what_a_script_imports_from_the_library_exists(folder: str) -> None:
    """Most scripts run in no fast test, and some on a GPU alone: a name that has moved would be found there."""
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "offcorr":
                for alias in node.names:
                    if not _exists(str(node.module), alias.name):
                        missing.append(f"{file.relative_to(ROOT)}:{node.lineno} imports {alias.name} of {node.module}")
    assert not missing, "\n".join(missing)


def _exists(module: str, name: str) -> bool:
    if f"{module}.{name}" in modules():
        return True
    if module not in modules():
        return False
    statements = [node for node in ast.walk(tree(module)) if isinstance(node, ast.stmt)]
    named = {getattr(node, "name", None) for node in statements}
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named |= {part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)}
    return name in named or "__getattr__" in named
