"""Shape checks at run time: functions whose annotations name a shape are checked on every call.

``install`` puts a hook into Python's import system, before the library is imported.  A function of the library with an
annotation from ``offcorr.shapes`` is then wrapped by jaxtyping and beartype, as is the constructor of a dataclass or a
NamedTuple with such a field; the letters in ``Float[Tensor, "B T"]`` have to agree within one call.  Functions without
such an annotation stay the objects they are: a pointwise function's code object is taken to make its Triton twin, and a
wrapper has another one.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType
from typing import Any, TypeVar

PACKAGE = "offcorr"
TOOLS = ("jaxtyping", "beartype")
SHAPES = ("PerToken", "PerSequence", "TokenMask", "TokenIndex", "Scalar", "IntScalar", "BoolScalar")
"""The names that ``offcorr.shapes`` gives to shapes."""

NAMED = re.compile(rf"\b({'|'.join(SHAPES)})\b")
CHECKED: list[str] = []
"""The functions and constructors that are checked, as "module.qualname"."""

Definition = TypeVar("Definition", bound=Any)


def install() -> bool:
    """Check shapes in every module of the library imported from now on; whether the tools for that are installed."""
    if any(find_spec(tool) is None for tool in TOOLS):
        return False
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} is imported already: its functions can no longer be wrapped")
    sys.meta_path.insert(0, Finder())
    return True


def checked(definition: Definition) -> Definition:
    """The function, or the class, with its annotated shapes checked."""
    if inspect.isclass(definition):
        name = "__new__" if issubclass(definition, tuple) else "__init__"
        setattr(definition, name, _checked(getattr(definition, name), vars(sys.modules[definition.__module__])))
        CHECKED.append(f"{definition.__module__}.{definition.__qualname__}")
        return definition
    CHECKED.append(f"{definition.__module__}.{definition.__qualname__}")
    return _checked(definition, definition.__globals__)


def _checked(function: Any, scope: dict[str, Any]) -> Any:
    """Annotations that name no shape are left out: some are imported for a type checker only."""
    from beartype import BeartypeConf, beartype
    from jaxtyping import jaxtyped

    def text(annotation: Any) -> str:
        return annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")

    named = {name: text(a) for name, a in function.__annotations__.items() if NAMED.search(text(a))}
    function.__annotations__ = {name: eval(annotation, scope) for name, annotation in named.items()}
    return jaxtyped(function, typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))  # an int is a float


class Finder(MetaPathFinder):
    """Finds the library's modules where Python does, and loads them with ``Loader``."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Compiles a module with ``@checked`` on what names a shape; past the cache of compiled files."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if NAMED.search(source.decode()) is None:
            return compile(source, self.path, "exec", dont_inherit=True)
        return compile(Decorate().visit(ast.parse(source)), self.path, "exec", dont_inherit=True)


class Decorate(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [node.returns, *(argument.annotation for argument in arguments)]
        if any(NAMED.search(ast.unparse(a)) for a in annotations if a is not None):
            node.decorator_list.append(self.decorator(node))  # the innermost: it gets the function itself
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        fields = [statement.annotation for statement in node.body if isinstance(statement, ast.AnnAssign)]
        data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        named_tuple = any("NamedTuple" in ast.unparse(base) for base in node.bases)
        if (data or named_tuple) and any(NAMED.search(ast.unparse(a)) for a in fields):
            node.decorator_list.insert(0, self.decorator(node))  # the outermost: the constructor is there
        return node

    @staticmethod
    def decorator(node: ast.stmt) -> ast.expr:
        expression = ast.parse(f"__import__({__name__!r}, fromlist=['checked']).checked", mode="eval").body
        for part in ast.walk(expression):
            ast.copy_location(part, node)
        return expression
