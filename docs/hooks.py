"""Hooks of the documentation site (mkdocs.yml), and the check that every public name has a docstring.

Three pages of the site are not files in ``docs/``: the front page is README.md, "Contributing" and "Changelog" are
the files of those names, and the API reference is written from ``__all__``: a module is public when it defines
``__all__``, and the page lists every name in it.  The package is parsed and never imported, so the check runs
wherever Python does:

    python docs/hooks.py        # names that are public and undocumented; fails if there are any

On every page links that lead out of ``docs/`` become links to the repository, formulas between dollar signs become
MathML, which browsers show without a script from elsewhere, and code in tables may break behind punctuation.
"""

from __future__ import annotations

import ast
import functools
import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BLOB = "https://github.com/offcorr/offcorr/blob/main/"
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
WIDE = ("methods.md", "migrating.md", "versions.md")
UNBROKEN = 14  # characters of code in a table, such as near_overlap, that stay in one line
ORDER = (
    "offcorr",
    "offcorr.batch",
    *(f"offcorr.stages.{name}" for name in ("ratios", "weights", "rejections", "gates", "controllers", "spans")),
    "offcorr.stages",
    "offcorr.metrics",
    "offcorr.methods",
    "offcorr.testing",
    "offcorr.training",
    "offcorr.exact",
    "offcorr.trl",
    "offcorr.rollout",
    "offcorr.data",
    "offcorr.integrations",
)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Symbol(NamedTuple):
    """Where a public name is defined, and its docstring."""

    path: str  # offcorr.stages.gates.Clip
    docstring: str | None
    node: ast.AST
    module: str


# ------------------------------------------------------------------------------------------ the package, parsed


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted((root / "offcorr").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def exported(file: Path) -> list[str] | None:
    """The names in ``__all__``; None where the module defines none."""
    for node in parsed(file).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def find(module: str, name: str, root: Path = ROOT) -> Symbol:
    """The definition of ``module.name``, through the imports of the package."""
    files = modules(root)
    if f"{module}.{name}" in files:
        tree = parsed(files[f"{module}.{name}"])
        return Symbol(f"{module}.{name}", ast.get_docstring(tree), tree, f"{module}.{name}")
    body = parsed(files[module]).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, Definition) and node.name == name:
            return Symbol(f"{module}.{name}", ast.get_docstring(node), node, module)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = getattr(getattr(after, "value", None), "value", None)
                documented = isinstance(after, ast.Expr) and isinstance(text, str)
                return Symbol(f"{module}.{name}", text if documented else None, node, module)
        if isinstance(node, ast.ImportFrom):
            source = _absolute(module, node, files)
            for alias in node.names:
                if (alias.asname or alias.name) == name and source.split(".")[0] == "offcorr":
                    return find(source, alias.name, root)
    raise LookupError(f"{module}.__all__ names {name!r}, which {module} does not define")


def _absolute(module: str, node: ast.ImportFrom, files: dict[str, Path]) -> str:
    if not node.level:
        return node.module or ""
    package = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def public(root: Path = ROOT) -> Iterator[tuple[str, str, Symbol]]:
    """(module, name, definition) for every name in every ``__all__``."""
    for module, file in modules(root).items():
        for name in exported(file) or ():
            if not name.startswith("__"):
                yield module, name, find(module, name, root)


def undocumented(root: Path = ROOT) -> list[str]:
    """Public names, and public methods of public classes, without a docstring."""
    missing = {symbol.path for _, _, symbol in public(root) if not symbol.docstring}
    for _, _, symbol in public(root):
        if isinstance(symbol.node, ast.ClassDef):
            for method in _methods(symbol.node):
                if not ast.get_docstring(method) and not _inherits(symbol, method.name, root):
                    missing.add(f"{symbol.path}.{method.name}")
    return sorted(missing)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]


def _inherits(symbol: Symbol, name: str, root: Path) -> bool:
    """Whether a class of this package that it inherits from documents the method, or one from elsewhere may."""
    assert isinstance(symbol.node, ast.ClassDef)
    for base in symbol.node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            return True  # torch.nn.Module and the like
        try:
            above = find(symbol.module, base.id, root)
        except LookupError:
            if base.id not in ("NamedTuple", "Protocol", "Generic"):
                return True
            continue
        if isinstance(above.node, ast.ClassDef):
            if any(m.name == name and ast.get_docstring(m) for m in _methods(above.node)):
                return True
            if any(_names(field) == name for field in above.node.body) or _inherits(above, name, root):
                return True
    return False


def _names(node: ast.stmt) -> str | None:
    """The attribute that a class-level annotation declares."""
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


# --------------------------------------------------------------------------------------------------- the API page


def api_page(root: Path = ROOT) -> str:
    """The API reference: one section per public module, one entry per public name."""
    lines = [
        "# API",
        "",
        "Every public name, from the docstrings. Shapes: B sequences of T positions; `PerToken` is [B, T], "
        "`PerSequence` is [B]. Log-probabilities are in nats.",
        "",
    ]
    seen: set[str] = set()
    files = modules(root)
    for module in sorted(files, key=_place):
        names = exported(files[module])
        if not names:
            continue
        lines += [f"## `{_shown(module)}`", "", _first_paragraph(ast.get_docstring(parsed(files[module]))), ""]
        for name in names:
            if name.startswith("__"):
                continue
            symbol = find(module, name, root)
            shown = f"{_shown(module)}.{name}"
            if isinstance(symbol.node, ast.Module) and exported(files[symbol.path]):
                continue  # it has a section of its own
            if isinstance(symbol.node, ast.Module):
                lines += [f"::: {symbol.path}", "    options:", f"      heading: {shown}"]
                lines += [f"      toc_label: {name}", "      members: false", ""]
            elif symbol.path in seen:
                lines += [f"`{shown}` is [`{symbol.path}`][{symbol.path}].", ""]
            else:
                seen.add(symbol.path)
                lines += [f"::: {symbol.path}", "    options:", f"      heading: {shown}"]
                lines += [f"      toc_label: {name}", ""]
    return "\n".join(lines)


def _place(module: str) -> tuple[int, str]:
    """The order of the sections: that of ORDER, each package followed by its modules; then the rest by name."""
    known = [name for name in ORDER if module == name or (module.startswith(f"{name}.") and name != "offcorr")]
    return ORDER.index(max(known, key=len)) if known else len(ORDER), module


def _shown(module: str) -> str:
    """The name under which users import it: offcorr.gates for offcorr.stages.gates."""
    last = module.rpartition(".")[2]
    top = exported(modules()["offcorr"]) or []
    return f"offcorr.{last}" if module == f"offcorr.stages.{last}" and last in top else module


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").split("\n\n")[0].split())


# ------------------------------------------------------------------------------------------------------ the hooks


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of other files."""
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = _links_from(source, (ROOT / source).read_text())
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links that lead out of docs/ links to the repository; show code that prints nothing without prompts.

    Pages of wide tables use the width of the table of contents, too, which then stands above the first heading.
    """
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
        markdown = markdown.replace("\n## ", "\n[TOC]\n\n## ", 1)
    markdown = re.sub(r"(?<=^```python\n)((?:>>> |\.\.\. |\n).*?)(?=^```$)", _copyable, markdown, flags=re.M | re.S)
    return markdown if page.file.src_uri in PAGES else _links_from(f"docs/{page.file.src_uri}", markdown)


def _copyable(block: re.Match[str]) -> str:
    lines = block[1].rstrip("\n").split("\n")
    prompted = all(line.startswith((">>> ", "... ")) or line in ("", "...") for line in lines)
    return "".join(f"{line[4:]}\n" for line in lines) if prompted else block[1]


def on_page_content(content: str, **_: Any) -> str:
    r"""Make formulas MathML; let long code in tables break behind punctuation rather than inside a word.

    A displayed formula may go on in another line wherever it has a ``\qquad``.  A picture is a link to itself, since
    some are too wide to read in a page.  A flag such as ``--model`` does not break behind its hyphens.
    """

    def written(match: re.Match[str]) -> str:
        formula = html.unescape(match[2])[2:-2].strip()
        if match[1] == "span":
            return mathml(formula)
        parts = (mathml(part.strip(), "block") for part in formula.split(r"\qquad"))
        return f'<div class="formulas">{"".join(parts)}</div>'

    def breakable(code: re.Match[str]) -> str:
        if len(html.unescape(code[0])) <= UNBROKEN:
            return code[0]
        return re.sub(r"(?<=[\w\"])([ _=,:/|]+|\.(?!\d|(?:py|md|json)\b))(?=[\w\"&-])", r"\1<wbr>", code[0])

    content = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', content)
    content = re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', written, content, flags=re.DOTALL)
    content = re.sub(
        r"<table>.*?</table>", lambda t: re.sub(r"(?<=<code>)[^<]+", breakable, t[0]), content, flags=re.DOTALL
    )
    flags = functools.partial(re.sub, r"(?<![\w-])--[\w-]+", r'<span class="flag">\g<0></span>')
    return re.sub(r"<code>[^<\n]+</code>", lambda code: flags(code[0]), content)


def mathml(formula: str, display: str = "inline") -> str:
    """MathML of a formula in LaTeX.

    latex2mathml makes infix operators of lvert and rvert and of min, max and clip, sets log and exp without the space
    around a function, and keeps the backslash before an underscore in a text.
    """
    from latex2mathml.converter import convert

    formula = re.sub(r"(?<!left)\\l(?=[vV]ert)", r"\\left\\l", formula)
    formula = re.sub(r"(?<!right)\\r(?=[vV]ert)", r"\\right\\r", formula)
    space = '<mspace width="0.17em"/>'
    bare = "(?<!<msub>)(?<!<msup>)"  # a space would take the place of the index
    function = rf"(</m(?:i|n|frac|sup|sub)>)?{bare}(<mi>(?:log|exp|min|max|clip)</mi>)(?=(<m[^o])?)"
    return re.sub(
        function,
        lambda m: (m[1] + space if m[1] else "") + m[2] + (space if m[3] else ""),
        re.sub(f"{bare}<mo>(min|max|clip)</mo>", r"<mi>\1</mi>", convert(formula, display=display)),
    ).replace(r"\_", "_")


def on_post_page(output: str, **_: Any) -> str:
    """Take out the mark by which the theme's script finds the repository's link, to ask GitHub for its stars."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content: str, **_: Any) -> str:
    """The same on the page for addresses that do not exist."""
    return on_post_page(output_content)


def on_pre_build(**_: Any) -> None:
    """Refuse to build while a public name has no docstring."""
    if missing := undocumented():
        from mkdocs.exceptions import PluginError

        raise PluginError("public and undocumented: " + ", ".join(missing))


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site whose API page lacks a public name."""
    page = (Path(config.site_dir) / "api" / "index.html").read_text()
    absent = sorted({s.path for _, _, s in public() if not isinstance(s.node, ast.Module)} - _anchors(page))
    if absent:
        from mkdocs.exceptions import PluginError

        raise PluginError("missing from the API page: " + ", ".join(absent))


def _anchors(page: str) -> set[str]:
    return set(re.findall(r'id="([\w.]+)"', page))


def _links_from(source: str, markdown: str) -> str:
    """Relative links of ``source``, a path in the repository, for a page that lies at the top of the site."""
    own = {path: name for name, path in PAGES.items()}

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in own:
            return f"{match[1]}{own[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{match[1]}{path.removeprefix('docs/')}{anchor})"
        return f"{match[1]}{BLOB}{path}{anchor})"

    return re.sub(r"(\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)


if __name__ == "__main__":
    found = undocumented()
    print("\n".join(found) or f"{len(list(public()))} public names, all documented")
    sys.exit(bool(found))
