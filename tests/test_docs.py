"""The pages say what the code is: generated tables, links, public names, the Makefile's help, the packaged files."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import offcorr
from offcorr import cli
from offcorr.cli import docs, tables
from offcorr.methods.registry import catalogue
from offcorr.training.logged import SHORT
from tests.fresh import python

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------- generated tables


def test_generated_tables_are_up_to_date():
    assert cli.main(["docs", "--check", "--root", str(ROOT)]) == 0, "run `make docs`"


def test_a_stale_table_is_noticed_and_repaired(tmp_path):
    for name in docs.GENERATED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace("| ppo = grpo |", "| ppo |"))
    assert cli.main(["docs", "--check", "--root", str(tmp_path)]) == 1
    assert cli.main(["docs", "--write", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "docs/methods.md").read_text() == (ROOT / "docs/methods.md").read_text()


def test_the_page_of_tested_versions_is_that_of_its_results():
    pytest.importorskip("tomllib")
    from tests import matrix

    results = json.loads(matrix.RESULTS.read_text())
    assert matrix.PAGE.read_text() == matrix.page(results), "run `python tests/matrix.py --report`"
    failed = {"outcome": "failed", "failures": ["install: no matching distribution"], "seconds": {"install": 3}}
    page = matrix.page({"3.10 oldest": failed})
    assert "| 3.10 | oldest |" in page and "- Python 3.10, oldest packages: install: no matching distribution" in page
    assert page.count("| not run |") == len(matrix.PYTHONS) * len(matrix.PACKAGES) - 1


def test_every_generated_table_is_on_a_page():
    text = "".join((ROOT / name).read_text() for name in docs.GENERATED)
    assert set(re.findall(r"<!-- table (\w+) -->", text)) == set(tables.TABLES)


def test_the_readme_counts_and_names_methods_that_exist():
    text = (ROOT / "README.md").read_text()
    (published,) = map(int, re.findall(r"\b(\d+) of them published", text))
    assert published == sum(method.paper != "this project" for method in catalogue())
    own = [method.name for method in catalogue() if method.paper == "this project"]
    assert own == ["near_overlap"]  # which docs/which.md names
    assert f"*all {len(catalogue())}*: the {published} published ones" in (ROOT / "docs" / "which.md").read_text()
    rows = re.findall(r"^\| `(\w+)`", text.partition("## Methods")[2], flags=re.M)
    assert len(rows) == 6 and set(rows) <= set(offcorr.available())


def test_the_readme_examples_without_trl_run(capsys):
    text = (ROOT / "README.md").read_text().partition("## Without TRL")[2]
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 2
    own = {}
    try:
        for block in blocks:
            names = {}  # each block as it is when pasted alone
            exec(block, names)
            assert re.fullmatch(r"(loss -?\d\.\d+|\d+ checks passed)\n", capsys.readouterr().out)
            own |= names
    finally:
        if "mine" in offcorr.available():
            offcorr.unregister("mine")
    torch.testing.assert_close(own["batch"].logp.grad, own["out"].coefficient)


# --------------------------------------------------------------------------------------------- methods by paper


def sections_by_paper() -> dict[str, str]:
    """The headings of docs/papers.md that are about methods, each with its text."""
    sections = (ROOT / "docs" / "papers.md").read_text().split("\n## ")[2:]
    return {section.partition("\n")[0]: section for section in sections}


def test_every_name_has_one_heading_in_the_papers():
    named = [name for text in sections_by_paper().values() for name in re.findall(r"`(\w+)`", text.splitlines()[2])]
    assert sorted(named) == sorted(offcorr.available())


def test_a_heading_cites_what_the_registry_cites():
    methods = {name: method for method in catalogue() for name in (method.name, *method.aliases)}
    for title, text in sections_by_paper().items():
        names, _, cited = text.splitlines()[2].partition(" \u00b7 ")
        sources = {methods[name].paper for name in re.findall(r"`(\w+)`", names)}
        ids = {number for source in sources for number in re.findall(r"\d{4}\.\d{5}", source)}
        links = re.findall(r"\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", cited)
        assert all(shown == target for shown, target in links), title
        assert {shown for shown, _ in links} == ids if ids else sources == {cited}, title


def test_a_heading_has_a_text_a_formula_and_one_configuration():
    for title, text in sections_by_paper().items():
        assert text.count("\n$$") == 1 and text.count("```python\n") == 1, title
        words = text.split("\n\n")[2]
        assert len(re.findall(r"[.?](?: |$)", words)) >= 3, f"{title}: what it does, why, how it differs"


# ---------------------------------------------------------------------------------------------------- metrics


def test_every_metric_of_the_short_log_is_explained():
    """A section of its own for what is always logged: formula, healthy range, what to do; the others by name."""
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## What is measured")[0]
    sections = dict(re.findall(r"^### `([^`]*)`\n(.*?)(?=^##)", text, flags=re.DOTALL | re.MULTILINE))
    assert list(sections) == [answer.name for answer in SHORT if answer.logged == "always"]
    for name, section in sections.items():
        assert re.findall(r"^- \*\*(\w+)\.\*\* \S", section, flags=re.M) == ["Formula", "Healthy", "Outside"], name
    others = text.partition("### Only where")[2]
    assert all(f"`{answer.name}`" in others for answer in SHORT if answer.logged != "always")


def test_the_numbers_of_the_metrics_page_are_of_the_kept_runs():
    pytest.importorskip("trl")
    spec = importlib.util.spec_from_file_location("picture", ROOT / "benchmarks" / "metrics_picture.py")
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    page = (ROOT / "docs" / "metrics.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "metrics.json").read_text())
    assert "benchmarks/metrics_picture.py" in page and page == picture.filled(page, kept["runs"])
    assert picture.TABLE.search(page)[0].count("\n") > len(picture.EFFECT)
    for panel in picture.PANELS.values():
        assert set(panel) & kept["runs"]["minpro"]["series"].keys(), panel


def test_the_numbers_of_the_readme_are_those_of_the_kept_demo():
    """The table, cell for cell, and every number of the sentence below the picture."""
    page = (ROOT / "README.md").read_text()
    runs = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["runs"]
    rows = re.findall(r"^\| (TRL's default loss|MinPRO|CTPO) \| (.*) \|$", page, flags=re.M)
    names = {"TRL's default loss": "trl", "MinPRO": "minpro", "CTPO": "ctpo"}
    assert [names[title] for title, _ in rows] == list(runs)
    for title, cells in rows:
        run = runs[names[title]]
        numbers = [run["accuracy"][key] for key in ("start", "peak", "end", "largest_fall")]
        numbers.append(run["means"]["offcorr/staleness/abs_mean"])
        assert cells.split(" | ") == [run["anchor"], *(f"{number:.3f}" for number in numbers)], title
    said = page.partition("](docs/demo.png)")[2].strip().partition("\n")[0]
    for title, rest in re.findall(r"(MinPRO|CTPO)'s ([^()]*\([^()]*\))", said):
        means = {name.removeprefix("offcorr/loss/"): value for name, value in runs[names[title]]["means"].items()}
        size = f"{means['multiplier_vs_ratio']:.2f}".removeprefix("0")
        kinds = [kind for kind in ("dropped", "damped", "amplified") if means[kind] >= 0.005]
        assert re.findall(r"(\.\d+) times|(\d+ %)", rest) == [
            (size, ""),
            *(("", f"{100 * means[kind]:.0f} %") for kind in kinds),
        ], title
        assert re.findall(r"dropped|damped|amplified", rest) == kinds, title
    assert len(re.findall(r"\.\d+ times", said)) == 2


# --------------------------------------------------------------------------------------------- the command line


def test_command_line_lists_every_method():
    done = python("from offcorr import cli; cli.main(['methods', '--markdown'])")
    assert done.returncode == 0, done.stderr
    listed = {name for row in done.stdout.splitlines()[2:] for name in row.split("|")[1].strip().split(" = ")}
    assert listed == set(offcorr.available())


def test_a_reader_may_close_the_pipe():
    command = [sys.executable, "-m", "offcorr.cli", "methods"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as shown:
        shown.stdout.close()
        assert shown.stderr.read() == b""
    assert shown.returncode == 0


# ------------------------------------------------------------------------------------------------------- links


def heading_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in heading_anchors(file), f"{page.name} links to {target}#{anchor}"


# ----------------------------------------------------------------------------------- names and files on the pages

CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which says what things were called before


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_files_on_the_pages_exist(page):
    named = set(re.findall(r"`((?:offcorr|tests|recipes|benchmarks)/[\w./]*(?:\.\w+|/))`", page.read_text()))
    for name in named:
        name = name.replace("NAME.py", "__init__.py")
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_names_on_the_pages_exist(page):
    text = page.read_text()
    modules = {"gates", "ratios", "weights", "rejections", "controllers", "spans", "ops", "testing", "metrics"}
    for module, name in re.findall(r"(?<![\w/.])(\w+)\.([A-Za-z]\w*)", text):
        if module in modules and name not in ("py", "md", "png", "json"):
            assert hasattr(getattr(offcorr, module), name), f"{page.name} names {module}.{name}"
    for name in re.findall(r"(?<![\w/.])offcorr\.(\w+)", text):
        known = (
            hasattr(offcorr, name) or (ROOT / "offcorr" / name).exists() or (ROOT / "offcorr" / f"{name}.py").exists()
        )
        assert known, f"{page.name} names offcorr.{name}"


def test_stages_in_the_migration_tables_exist():
    stages = {name for module in (offcorr.weights, offcorr.rejections) for name in module.__all__}
    tables = (ROOT / "docs" / "migrating.md").read_text().partition("## The policy")[0]
    first_cells = re.findall(r"^\|([^|]*)\|", tables, flags=re.M)
    named = {name for cell in first_cells for name in re.findall(r"`([A-Z]\w+)", cell)}
    assert {"Truncate", "Mask", "Geometric"} <= named <= stages


# ------------------------------------------------------------------------------------------------ public names


def test_every_public_name_has_a_docstring(hooks):
    assert hooks.undocumented() == []


def test_an_undocumented_name_is_found(hooks, tmp_path):
    package = tmp_path / "offcorr"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from offcorr.parts import Base, Child, documented, silent, LIMIT, SPAN\n"
        "from .parts import renamed as other\n"
        "__all__ = ['Base', 'Child', 'documented', 'silent', 'LIMIT', 'SPAN', 'other']\n"
    )
    (package / "parts.py").write_text(
        "LIMIT = 3\nSPAN = 4\n'Documented.'\n"
        "def documented():\n    'Yes.'\n"
        "def silent(): pass\n"
        "def renamed(): pass\n"
        "class Base:\n    'Yes.'\n    def told(self):\n        'Yes.'\n    def untold(self): pass\n"
        "class Child(Base):\n    'Yes.'\n    def told(self): pass\n    def new(self): pass\n    def _own(self): pass\n"
    )
    missing = {"Base.untold", "Child.new", "LIMIT", "silent", "renamed"}
    assert hooks.undocumented(tmp_path) == sorted(f"offcorr.parts.{name}" for name in missing)


def test_a_name_that_is_not_defined_is_an_error(hooks, tmp_path):
    (tmp_path / "offcorr").mkdir()
    (tmp_path / "offcorr" / "__init__.py").write_text("__all__ = ['nowhere']\n")
    with pytest.raises(LookupError, match="nowhere"):
        hooks.undocumented(tmp_path)


def test_the_api_page_lists_every_public_name(hooks):
    page = hooks.api_page()
    for _, _, symbol in hooks.public():
        own_section = isinstance(symbol.node, ast.Module) and f"## `{hooks._shown(symbol.path)}`\n" in page
        assert f"::: {symbol.path}\n" in page or own_section, symbol.path


def test_what_users_import_is_public(hooks):
    """The modules that the pages tell people to import from, so that no `__all__` can go missing unnoticed."""
    modules = {module for module, _, _ in hooks.public()}
    stages = {f"offcorr.stages.{name}" for name in "ratios weights rejections gates controllers spans".split()}
    packages = {f"offcorr.{name}" for name in "metrics testing tokens training rollout data trl extras toy".split()}
    assert {"offcorr", *stages, *packages} <= modules


def test_docstrings_are_prepared_for_the_api_page():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docs_docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ran = doctest.testmod(module)
    assert ran.attempted and not ran.failed


def test_formulas_keep_their_bars_and_spaces(hooks):
    pytest.importorskip("latex2mathml")
    bars = hooks.mathml(r"\lvert g\rvert^2")
    assert bars == hooks.mathml(r"\left\lvert g\right\rvert^2") and 'form="prefix"' in bars
    assert hooks.mathml(r"d\log r").count("<mspace") == 2
    assert not any("<mspace" in hooks.mathml(bare) for bare in (r"\log(r)", r"\log^2 r", r"\min_t r"))
    assert "<mtext>log_low</mtext>" in hooks.mathml(r"\text{log\_low}")


def test_a_displayed_formula_may_go_on_in_another_line(hooks):
    pytest.importorskip("latex2mathml")
    page = hooks.on_page_content(r'<div class="arithmatex">\[a = 1, \qquad b = 2\]</div>')
    assert page.startswith('<div class="formulas"><math') and page.count('display="block"') == 2
    for text in map(Path.read_text, PAGES):
        cases = re.findall(r"\\begin.*?\\end", text, flags=re.DOTALL)
        assert not any("qquad" in part for part in cases), "a formula that would be cut inside"


def test_a_picture_is_a_link_to_itself(hooks):
    picture = '<img alt="x" src="../x.png">'
    assert hooks.on_page_content(picture) == f'<a href="../x.png">{picture}</a>'


def test_code_in_tables_breaks_behind_punctuation(hooks):
    page = hooks.on_page_content("<code>eps_low</code><table><code>clip_max=0.5 a.py b.c</code></table>")
    assert page == "<code>eps_low</code><table><code>clip_<wbr>max=<wbr>0.5 <wbr>a.py <wbr>b.<wbr>c</code></table>"
    assert "<wbr>" not in hooks.on_page_content("<table><code>near_overlap</code></table>")


def test_a_flag_does_not_break_behind_its_hyphens(hooks):
    page = hooks.on_page_content("<code>a-b --save_steps 4</code><pre><code>--model\n</code></pre>")
    assert page.startswith('<code>a-b <span class="flag">--save_steps</span> 4</code>') and page.count("span") == 2


def test_a_page_of_wide_tables_has_its_contents_above_the_first_heading(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="migrating.md"), meta={})
    assert hooks.on_page_markdown("# A\n\n## B\n\n## C\n", page) == "# A\n\n[TOC]\n\n## B\n\n## C\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_list_behind_a_paragraph_has_an_empty_line_before_it(page):
    """Without it Python-Markdown makes the items a part of the paragraph, although GitHub shows a list."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
    item = re.compile(r" *(?:[-*]|\d+\.) ")
    for block in re.split(r"\n\s*\n", text):
        first, *others = block.strip("\n").split("\n")
        assert item.match(first) or not any(map(item.match, others)), block


def test_every_accumulator_of_the_table_is_explained():
    said, *rows = (ROOT / "docs" / "metrics.md").read_text().partition("The accumulators: ")[2].splitlines()
    named = {row.split("|")[-2].strip() for row in rows[: rows.index("<!-- end -->")] if row.startswith("| offcorr/")}
    assert named and {name for name in named if name and f"`{name}`" not in said} == set()


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "math" / "index.html").read_text()
    assert page.count("<math") > 50 and "arithmatex" not in page
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css)"', page), "a page that loads scripts from elsewhere"
    for file in ("math/index.html", "404.html"):
        asks = 'data-md-component="source"' in (tmp_path / "site" / file).read_text()
        assert not asks, f"{file} asks GitHub for the repository's stars"


# ------------------------------------------------------------------------------------------------ the Makefile


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_target_is_in_make_help():
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony is not None
    targets = set(phony[1].replace("\\", " ").split())
    assert targets == set(re.findall(r"^  (\S+)", shown, flags=re.M))


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/lab.md", "docs/which.md"])
def test_the_number_of_methods_is_that_of_the_library(page):
    """Those that `offcorr methods` lists; "published" leaves out the library's own."""
    from offcorr.methods.registry import catalogue

    text = (ROOT / page).read_text()
    told = re.findall(r"\b([45]\d) methods|of the ([45]\d)\.|\*all ([45]\d)\*", text)
    assert told and {int("".join(number)) for number in told} == {len(catalogue())}
