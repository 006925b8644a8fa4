"""The documentation site in a headless Chromium: no page scrolls sideways, every formula is drawn, no link is dead.

The pages are read in an iframe, whose width is the one that their layout sees; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --allow-file-access-from-files --virtual-time-budget=600000"
WIDTHS = (390, 1400)

READER = """<!doctype html><iframe id="frame" height="900"></iframe><pre id="found"></pre><script>
const frame = document.getElementById("frame"), found = {};
const inProse = node => !node.parentElement.closest("code, pre, script, style");
async function read(page, width) {
  frame.width = width;
  await new Promise(loaded => { frame.onload = loaded; frame.src = page; });
  await new Promise(settled => setTimeout(settled, 200));
  const root = frame.contentDocument, content = root.querySelector(".md-content"), text = [];
  const walk = root.createTreeWalker(content, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) if (inProse(walk.currentNode)) text.push(walk.currentNode.data);
  return {
    scrolls: root.documentElement.scrollWidth - frame.contentWindow.innerWidth,
    latex: text.filter(t => /\\$[^$]+\\$|\\\\(_|[a-zA-Z]{2})/.test(t)),
    flat: [...root.querySelectorAll("math")].filter(m => !m.getBoundingClientRect().width).length,
    images: [...root.images].filter(i => i.src.startsWith("file:") && !i.naturalWidth).map(i => i.src),
    links: [...root.links].map(a => a.href).filter(a => a.startsWith("file:")),
    ids: [...root.querySelectorAll("[id]")].map(e => e.id),
  };
}
onload = async () => {
  for (const page of PAGES) for (const width of WIDTHS) found[page + " at " + width] = await read(page, width);
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, dict]:
    """What the browser found on each page of the site at each width."""
    pytest.importorskip("mkdocs")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    site = tmp_path_factory.mktemp("site").resolve()
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site]
    subprocess.run(build, check=True, cwd=ROOT)
    names = sorted(str(file.relative_to(site)) for file in site.rglob("index.html"))
    script = READER.replace("PAGES", json.dumps(names)).replace("WIDTHS", str(list(WIDTHS)))
    (site / "reader.html").write_text(script)
    flags = [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1600,1000"]
    shown = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", (site / "reader.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    found = re.search(r'<pre id="found">(.+?)</pre>', shown, flags=re.DOTALL)
    assert found, "the browser ended before it had read every page"
    pages = json.loads(html.unescape(found[1]))
    assert len(pages) == len(names) * len(WIDTHS)
    for page in pages.values():
        links = [link.removeprefix(site.as_uri() + "/") for link in page["links"]]
        page["links"] = [link for link in links if not link.endswith((".png", ".svg")) or not (site / link).is_file()]
    return pages


@pytest.mark.slow
def test_no_page_scrolls_sideways(pages):
    assert {name: page["scrolls"] for name, page in pages.items() if page["scrolls"] > 0} == {}


@pytest.mark.slow
def test_formulas_and_pictures_are_drawn(pages):
    assert sum(name.startswith("math/") for name in pages) == len(WIDTHS)
    for name, page in pages.items():
        assert (page["latex"], page["flat"], page["images"]) == ([], 0, []), name


@pytest.mark.slow
def test_every_link_within_the_site_has_its_target(pages):
    ids = {name.partition(" at ")[0]: set(page["ids"]) for name, page in pages.items()}
    for name, page in pages.items():
        for link in page["links"]:
            target, _, anchor = link.partition("#")
            target += "index.html" if target.endswith("/") or not target else ""
            assert target in ids, f"{name} links to {link}"
            assert not anchor or anchor in ids[target], f"{name} links to {link}"
