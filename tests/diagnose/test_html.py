"""The HTML report: self-contained, escaped, readable on a phone, with plots whatever the data hold."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import struct
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from offcorr.diagnose import Record, diagnose
from offcorr.diagnose.captions import DRAWN, SEEN
from offcorr.diagnose.causes import CAUSES
from offcorr.diagnose.html import LONGEST_SHOWN, WORST, page
from offcorr.diagnose.plots import plots
from tests.diagnose.simulated import world
from tests.test_site_in_browser import CHROMIUM, FLAGS

VOID = {"meta", "img", "br", "link", "input"}


class Checked(HTMLParser):
    """Tags that are closed in order, their attributes, and the text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.seen if name == tag]


def pictures(parsed):
    """Width, height and caption of each picture, whose bytes are a PNG."""
    found = []
    for image in parsed.all("img"):
        head, data = image["src"].split(",", 1)
        assert head == "data:image/png;base64"
        png = base64.b64decode(data)
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        found.append((*struct.unpack(">II", png[16:24]), image["alt"]))
    return found


def made(rows, tokens, seed=0, **columns):
    rng = np.random.default_rng(seed)
    return [
        Record.of(
            {
                "prompt_ids": [1, 2],
                "completion_ids": rng.integers(3, 9, tokens),
                "rollout_logp": -rng.exponential(size=tokens),
                "old_logp": -rng.exponential(size=tokens),
            }
            | {name: value(row) if callable(value) else value for name, value in columns.items()}
        )
        for row in range(rows)
    ]


def test_nothing_is_loaded_from_elsewhere_and_the_verdict_comes_first():
    text = page(diagnose(world("top_p").records()), ["row 3 is odd"], rescored=["top_p 0.9 explains 99% of it"])
    parsed = Checked(text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parsed.seen}
    for _, attributes in parsed.seen:
        assert "href" not in attributes and attributes.get("src", "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text and "@import" not in text and "http" not in re.sub(r'src="[^"]*"', "", text)
    assert re.search(r"<body>\s*<h1>top_p: ", text)
    assert "row 3 is odd" in parsed.text and "top_p 0.9 explains 99% of it" in parsed.text
    assert len(pictures(parsed)) == 6
    assert text.index("<h1>") < text.index("Causes and what to do") < text.index("Scored again") < text.index("<img")


def test_text_is_escaped():
    records = world("top_p").records()
    evil = '<script>alert("x")</script>'
    named = [
        Record(one.prompt_ids, one.completion_ids, one.rollout_logp, one.old_logp, where=f"{evil} row")
        for one in records
    ]
    text = page(diagnose(named), [evil], decode=lambda id: evil, rescored=[evil])
    parsed = Checked(text)
    assert not parsed.all("script") and evil in parsed.text
    assert text.count("<script") == 0


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(made(2, 3), id="2 sequences of 3 tokens"),
        pytest.param(made(1, 1), id="1 token"),
        pytest.param(made(6, 1), id="one position"),
        pytest.param(made(4, 5, old_logp=[-1.0] * 5, rollout_logp=[-1.0] * 5), id="all the same"),
        pytest.param(made(8, 9, rollout_logp=[-np.inf, -9999.0, np.inf] + [-1.0] * 6), id="infinite"),
        pytest.param(made(8, 9, rollout_logp=[np.nan] * 8 + [-1.0]), id="mostly unscored"),
        pytest.param(made(8, 9, entropy=[0.5] * 9), id="entropy"),
    ],
)
def test_odd_data_have_their_plots(records):
    parsed = Checked(page(diagnose(records)))
    found = pictures(parsed)
    assert len(found) >= 5 and all(min(width, height) > 300 for width, height, _ in found)
    assert "nan nats" not in parsed.text


def drawn(records):
    """The axes of each plot by the beginning of its caption."""
    return {caption: picture.axes[0] for caption, picture in plots(diagnose(records))}


def axes_of(records, words):
    return next(axes for caption, axes in drawn(records).items() if words in caption)


def test_infinite_values_are_drawn_at_the_edge():
    axes = axes_of(made(8, 9, rollout_logp=[-np.inf, np.inf] + [-1.0] * 7), "against the trainer's log-prob")
    y = axes.lines[0].get_ydata()
    assert np.isfinite(y).all() and y.max() == 50 and y.min() == -50


def test_a_single_position_is_a_point_that_can_be_seen():
    line = axes_of(made(6, 1), "over the position").lines[0]
    assert len(line.get_xdata()) == 1 and line.get_marker() == "."


def test_the_profile_over_turns():
    turns = np.repeat([0, 1, 2], 4)
    gap = np.array([0.0, 0.5, 1.0])[turns]
    records = made(5, 12, old_logp=-1 - gap, rollout_logp=-np.ones(12), turn_ids=turns)
    line = axes_of(records, "each turn").lines[0]
    assert line.get_xdata().tolist() == [0, 1, 2] and line.get_ydata() == pytest.approx([0, 0.5, 1])
    assert not any("turn" in caption for caption in drawn(made(5, 12)))
    assert not any("turn" in caption for caption in drawn(made(5, 12, turn_ids=[0] * 12)))


def test_the_profile_over_ages():
    records = made(
        6,
        4,
        old_logp=lambda row: [-1.0 - row % 3] * 4,
        rollout_logp=[-1.0] * 4,
        trainer_version=9,
        rollout_version=lambda row: 9 - row % 3,
    )
    line = axes_of(records, "age of the sampler's weights").lines[0]
    assert line.get_xdata() == pytest.approx([0, 1, 2] * 2) and line.get_ydata() == pytest.approx([0, 1, 2] * 2)
    same = made(6, 4, trainer_version=9, rollout_version=9)
    assert not any("age" in caption for caption in drawn(same))


def test_lags_show_a_shift():
    bars = [bar.get_height() for bar in axes_of(world("shift").records(), "before or after").patches]
    assert np.argmax(np.abs(bars)) in (3, 5) and bars[4] < 0.3


def test_a_caption_says_what_these_data_show():
    turns = np.repeat([0, 1], 4)
    gap = np.array([0.3, 0, 0, 0, 0.1, 0.1, 0.1, 0.1])
    records = made(20, 8, old_logp=-1 - gap, rollout_logp=-np.ones(8), turn_ids=turns)
    captions = " ".join(drawn(records))
    assert "Here 62% of the d are below 0 and 0% above." in captions  # five tokens of eight
    assert "Here it is 0.3 nats at the first token and 0.057 after it." in captions
    assert "Here it is 0.075 nats in the first turn and 0.1 in the last." in captions
    assert "Here the highest bar is at a lag of 0." in " ".join(drawn(world("temperature").records()))


SAID_OF_A_CAUSE = {
    "temperature": {"temperature", "raw_logprobs", "unnormalised"},
    "truncated distribution": set(),
    "leaves tokens out": {"top_p", "top_k", "min_p", "logit_mask"},
    "two sets of weights": {"stale_weights", "adapter_not_synced"},
    "older weights": {"stale_weights"},
    "another prompt": {"chat_template"},
    "new weights": {"weights_swapped"},
    "neighbouring token": {"shift"},
    "history": {"truncated_prompt"},
    "rounding": {"precision", "kv_cache"},
}
"""Words of a caption that point at a cause, and the causes that they may stand beside."""


DIFFERENT = "clean precision stale_weights top_p temperature chat_template shift moe_routing policy_updates".split()


@pytest.mark.parametrize("name", DIFFERENT)
def test_no_caption_points_at_a_cause_that_the_report_does_not_name(name):
    """Whatever the plots look like: by itself no shape is a proof."""
    report = diagnose(world(name).records())
    named = {finding.cause for finding in report.causes}
    for caption, _ in plots(report):
        for words, causes in SAID_OF_A_CAUSE.items():
            assert words not in caption or causes & named, (words, caption)


def test_precision_on_short_similar_completions_is_not_said_to_be_older_weights():
    """Rounded weights move a token id in the same way everywhere, so that the dots lie on the diagonal."""
    shift = np.random.default_rng(1).normal(0, 0.004, 12)

    def rollout(row):
        return -1.5 - shift[ids(row)]

    def ids(row):
        return np.random.default_rng(row).integers(3, 12, 24)

    report = diagnose(made(400, 24, completion_ids=ids, old_logp=[-1.5] * 24, rollout_logp=rollout))
    (told,) = [caption for caption, _ in plots(report) if "two halves" in caption]
    correlation = float(re.search(r"correlation of the two halves is (\d\.\d+)", told)[1])
    assert report.verdict == "precision" and correlation > 0.9
    assert "The verdict, precision: " in told and "no sign of another cause" in told and "older weights" not in told


def test_every_plot_and_every_cause_of_a_caption_is_known():
    assert set(SEEN) <= set(DRAWN)
    assert {cause for causes in SEEN.values() for cause in causes} <= set(CAUSES)


def test_the_sentence_above_the_plots_is_that_of_the_verdict():
    assert "The verdict is clean: what is drawn of d is rounding" in page(diagnose(world("clean").records()))
    assert "The verdict comes from the tests above" in page(diagnose(world("top_p").records()))


def test_the_gap_of_the_updates_has_a_histogram_where_there_is_one():
    moved = made(6, 4, old_logp=[-1.0] * 4, rollout_logp=[-1.1] * 4, logp=[-1.0, -1.5, -1.5, np.nan])
    axes = axes_of(moved, "Histogram of logp - old_logp")
    assert sum(bar.get_height() for bar in axes.patches) == 18  # the NaN is left out
    assert any("Here its mean size is 0.33 nats, and that of d is 0.1." in caption for caption in drawn(moved))
    for same in (made(6, 4), made(6, 4, old_logp=[-1.0] * 4, logp=[-1.0] * 4)):
        assert not any("logp - old_logp" in caption for caption in drawn(same))


def test_the_labels_of_an_axis_do_not_overlap():
    """Of means that are small, each label has seven characters."""
    records = made(40, 30, rollout_logp=lambda row: -1 - 1e-4 * np.arange(30), old_logp=[-1.0] * 30)
    for caption, picture in plots(diagnose(records)):
        picture.canvas.draw()
        (axes,) = picture.axes
        boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        boxes = sorted((box.x0, box.x1) for box in boxes)
        assert all(left[1] < right[0] for left, right in zip(boxes, boxes[1:], strict=False)), caption


def test_the_worst_sequences_come_first():
    records = made(20, 4, rollout_logp=[-1.0] * 4, old_logp=lambda row: [-1.0 - 0.01 * row] * 4)
    records = [
        Record(one.prompt_ids, one.completion_ids, one.rollout_logp, one.old_logp, where=f"row {row}")
        for row, one in enumerate(records)
    ]
    text = page(diagnose(records))
    shown = re.findall(r"<h3>(row \d+): mean \|d\| ([\d.]+) nats", text)
    assert [name for name, _ in shown] == [f"row {row}" for row in range(19, 19 - WORST, -1)]
    assert float(shown[0][1]) == pytest.approx(0.19)
    # red: less likely by the trainer; the furthest in full colour, without -- which would be white on white -- nats
    assert "rgba(220,40,40,1.00)" in text


def test_a_long_sequence_is_cut_and_says_so():
    assert f"and {LONGEST_SHOWN:,} more tokens" in page(diagnose(made(2, 2 * LONGEST_SHOWN)))
    assert "more tokens" not in page(diagnose(made(2, LONGEST_SHOWN)))


def test_tokens_are_decoded():
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from tests.rollout.rollout_models import tokenizer

    words = tokenizer()
    ids = words("0=a12", add_special_tokens=False)["input_ids"]
    records = made(2, 5, completion_ids=ids)
    parsed = Checked(page(diagnose(records), decode=lambda id: words.decode([id])))
    assert "0=a12" in parsed.text
    assert any(span.get("title", "").startswith(f"id {ids[0]}: old_logp -") for span in parsed.all("span"))
    assert "--tokenizer" not in parsed.text
    undecoded = Checked(page(diagnose(records))).text
    assert " ".join(map(str, ids)) in undecoded and "with --tokenizer NAME, the folder or hub name" in undecoded


def test_after_updates_the_tokens_show_the_whole_difference():
    """d leaves the trainer's own updates out; where they are the verdict, a token that they moved is the first."""
    records = world("policy_updates").records()
    records[5] = dataclasses.replace(records[5], logp=records[5].rollout_logp - 9.0)
    report = diagnose(records)
    assert report.verdict == "policy_updates"
    text = page(report)
    worst = text[text.index("Sequences that are furthest off") :]
    assert re.search(r"<h3>[^<]*row 6: mean \|logp - rollout_logp\| 9", worst), worst[:600]
    first = next(span for span in Checked(page(report)).all("span") if span.get("title"))
    assert "220,40,40" in first["style"] and "(after the trainer's updates)" in first["title"]
    assert "mean |logp - old_logp|" in Checked(text).text
    assert "logp - rollout_logp" not in Checked(page(diagnose(world("precision").records()))).text


def test_a_narrow_screen_has_no_wide_element():
    """The cells of a table lie below one another; pictures and plots follow the width."""
    text = page(diagnose(world("top_p").records()))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "width=device-width" in text and "td { display: block" in style and "overflow-wrap: anywhere" in style
    assert "img { width: 100% }" in style and "minmax(min(100%, " in style
    assert not re.search(r"[^-]width: [\d.]+(px|rem)", style.replace("max-width", "").replace("min-width", ""))


READER = """<!doctype html><iframe id="frame" height="900" src="report.html"></iframe><pre id="found"></pre><script>
const frame = document.getElementById("frame"), found = {};
onload = async () => {
  for (const width of [400, 1280]) {
    frame.width = width;
    await new Promise(settled => setTimeout(settled, 200));
    const root = frame.contentDocument, all = [root.documentElement, ...root.querySelectorAll("body *")];
    found[width] = all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.tagName);
  }
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_nothing_scrolls_sideways_at_400_and_1280_pixels(tmp_path):
    records = world("temperature", "stale_weights", entropy=False).records()
    (tmp_path / "report.html").write_text(page(diagnose(records), ["a sentence about the data"]))
    (tmp_path / "reader.html").write_text(READER)
    flags = [*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,1000", "--dump-dom"]
    shown = subprocess.run(
        [str(CHROMIUM), *flags, (tmp_path / "reader.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    found = re.search(r'<pre id="found">(.+?)</pre>', shown, flags=re.DOTALL)
    assert found and json.loads(html.unescape(found[1])) == {"400": [], "1280": []}
