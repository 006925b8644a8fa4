"""Tests of ``offcorr docs``."""

from pathlib import Path

from offcorr import cli
from offcorr.cli import docs

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_listed_with_its_reader(capsys):
    pages = [page for group in docs.READERS.values() for page in group]
    assert sorted(pages) == sorted(file.stem for file in (ROOT / "docs").glob("*.md"))
    assert cli.main(["docs"]) == 0
    shown = capsys.readouterr().out
    assert "New to offcorr: read quickstart.md first." in " ".join(shown.split())
    for group in docs.READERS.values():
        for page, reader in group.items():
            assert f"{page}.md" in shown and reader in " ".join(shown.split())


def test_a_checkout_is_named_only_for_its_tables(refused):
    assert "--root is given without --write or --check" in refused("docs", "--root", ".")


def test_docs_outside_a_checkout(tmp_path, refused):
    said = refused("docs", "--write", "--root", str(tmp_path))
    assert "not a checkout" in said and "docs/methods.md" in said and "--root" in said


def test_a_page_is_named_with_the_place_where_it_is(capsys, monkeypatch, tmp_path, refused):
    for page in ("which", "which.md", "docs/which.md"):
        assert cli.main(["docs", page]) == 0
        assert capsys.readouterr().out == f"{ROOT / 'docs' / 'which.md'}\nfor you if you must choose a method\n"
    assert "unknown page 'metric', did you mean 'metrics'? `offcorr docs` lists all" in refused("docs", "metric")
    assert "take no PAGE" in refused("docs", "which", "--check")
    monkeypatch.setattr(docs, "CHECKOUT", tmp_path)  # installed without the pages
    assert cli.main(["docs", "which"]) == 0
    assert capsys.readouterr().out.startswith(f"{docs.PAGES}/which.md\n")
