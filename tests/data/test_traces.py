"""Tests of Traces: rows in text and in tokens, files, dumps, and what is refused."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from offcorr.data import Trace, Traces
from offcorr.diagnose import DumpWriter, Record
from tests.rollout.rollout_models import EOS, tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}={% else %}{{ m['content'] }}<eos>."
    "{% endif %}{% endfor %}"
)
ROW = {"prompt": "a3b1=", "completion": "4.c"}


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def ids(words, text):
    return tuple(words(text)["input_ids"])


def test_text_is_tokenised_once_and_ended_with_eos(words):
    rows = [ROW, {"prompt": "c2=", "completion": "2", "ended": False}, {"prompt": "c2=", "completion": "2<eos>"}]
    traces = Traces(rows, words)
    assert len(traces) == 3 and traces.of("c2=")[0].where == "row 2"
    assert traces.of("a3b1=")[0].completion_ids == (*ids(words, "4.c"), EOS)
    assert [trace.completion_ids for trace in traces.of("c2=")] == [ids(words, "2"), (*ids(words, "2"), EOS)]
    assert traces.of("a3b2=") == ()
    assert traces.of([*ids(words, "c2=")]) == traces.of("c2=")
    assert traces.prompts == [ids(words, "a3b1="), ids(words, "c2=")]


def test_no_trace_is_refused(words, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for rows in ([], iter([]), empty):
        with pytest.raises(ValueError, match="^(there are 0 traces to read, expected at least one|.*empty.jsonl.*)"):
            Traces(rows, words)
    with pytest.raises(
        ValueError, match="^keep keeps none of 2 traces, expected at least one: .* whose reward is None"
    ):
        Traces([ROW, ROW], words, keep=lambda trace: trace.reward == 1)


def test_ids_are_taken_as_they_are_and_may_stand_beside_their_text(words):
    completion_ids = [*ids(words, "4.c"), EOS]
    row = {"prompt": "a3b1=", "prompt_ids": ids(words, "a3b1="), "completion_ids": completion_ids}
    for rows in ([row], [row | {"completion": "4.c"}], [row | {"completion": "4.c<eos>"}], Dataset.from_list([row])):
        assert [trace.completion_ids for trace in Traces(rows, words)] == [tuple(completion_ids)]
    cut = Traces([row | {"completion": "4.c", "completion_ids": completion_ids[:-1]}], words)
    assert [*cut][0].completion_ids == tuple(completion_ids[:-1])  # a trace that was cut off


def test_messages_are_tokenised_by_the_chat_template(words):
    prompt = [{"role": "user", "content": "c2"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "2.2"}]}
    traces = Traces([row], words, chat_template=TEMPLATE)
    assert [trace.completion_ids for trace in traces.of(prompt)] == [(*ids(words, "2.2"), EOS)]  # up to the EOS
    assert traces.of(prompt)[0].prompt_ids == ids(words, "c2=")
    with pytest.raises(ValueError, match="row 1: completion: the chat template renders the prompt in another way"):
        Traces([row], words)  # the tokenizer's own template writes "=" only where no answer follows
    with pytest.raises(ValueError, match=r"row 1: completion is \[.*expected text, or after a prompt of messages one"):
        Traces([row | {"completion": row["completion"] * 2}], words, chat_template=TEMPLATE)
    dropping = TEMPLATE.replace("{{ m['content'] }}<eos>", "{{ m['content'][1:] }}<eos>")
    with pytest.raises(ValueError, match=r"row 1: completion does not re-tokenise: .*expected '2\.2'"):
        Traces([row], words, chat_template=dropping)


WRONG = {
    "text that does not come back": (
        {"completion": "4 x"},
        r"completion does not re-tokenise: .*expected '4 x' \(char",
    ),
    "ids of another text": ({"completion_ids": [3, 4, EOS]}, r"completion_ids and completion disagree"),
    "an id outside the vocabulary": (
        {"completion_ids": [3, 99], "completion": None},
        r"completion_ids\[1\] is 99, .*17",
    ),
    "a prompt of other ids": ({"prompt_ids": [3, 4]}, r"prompt_ids is \[3, 4\], expected .*, the tokens of prompt"),
    "a prompt's id outside": ({"prompt_ids": [-1]}, r"prompt_ids\[0\] is -1, expected an id below 17"),
    "too few log-probs": ({"logp": [-1.0, -1.0, -1.0]}, r"logp has 3 numbers, expected 4, one for each token"),
    "a log-prob above 0": ({"logp": [-1.0, 0.5, -1.0, -1.0]}, r"logp\[1\] is 0.5, expected a log-prob"),
    "NaN": ({"logp": [-1.0, -1.0, math.nan, -1.0]}, r"logp\[2\] is nan, expected a log-prob"),
    "None": ({"logp": [-1.0, -1.0, None, -1.0]}, r"logp\[2\] is nan, expected a log-prob"),
    "minus infinity": ({"logp": [-1.0, -1.0, -math.inf, -1.0]}, r"logp\[2\] is -inf, expected a log-prob"),
    "no list": ({"logp": -1.0}, r"logp is -1.0, expected a list of numbers"),
    "no numbers": ({"completion_ids": "345", "completion": None}, r"completion_ids is '345', expected a list of whole"),
    "halves": ({"completion_ids": [2.5], "completion": None}, r"completion_ids is \[2.5\], expected a list of whole"),
    "a reward in words": ({"reward": "good"}, r"reward is 'good', expected a number"),
    "a mask of 2": ({"mask": [1, 2, 1, 1]}, r"mask is 2 at a token, expected 0 and 1"),
    "a mask of nothing": ({"mask": [0, 0, 0, 0]}, r"mask is 0 everywhere, expected 0 and 1"),
    "no completion": ({"completion": None}, r"completion and completion_ids are missing; present: prompt"),
    "no prompt": ({"prompt": None}, r"prompt and prompt_ids are missing; present: completion"),
    "nothing in it": ({"completion_ids": [], "completion": None}, r"completion_ids is empty, expected at least one"),
    "a dump's row": ({"old_logp": [-1.0]}, r"the row is one of a dump .*: read it by Traces.from_dump"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_with_file_row_and_field(words, tmp_path, change, message):
    file = tmp_path / "teacher.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [ROW, ROW | change]))
    with pytest.raises(ValueError, match=rf"teacher\.jsonl, row 2: {message}"):
        Traces(file, words)


def test_files_are_jsonl_plain_or_compressed_and_parquet(words, tmp_path):
    rows = [ROW | {"reward": 1.0, "logp": [-1.0] * 4, "level": 3}, {"prompt": "c2=", "completion": "2", "reward": 0.0}]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    found = [[*Traces(tmp_path / name, words)] for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]
    for traces in found:
        assert [trace.reward for trace in traces] == [1.0, 0.0]
        assert [trace.logp for trace in traces] == [(-1.0,) * 4, None]
        assert [trace.completion_ids for trace in traces] == [trace.completion_ids for trace in found[0]]
    assert len(Traces(tmp_path / "a.jsonl", words, keep=lambda trace: trace.reward == 1)) == 1
    (tmp_path / "d.jsonl").write_text(lines + "\n[1, 2]")
    with pytest.raises(ValueError, match=r"d\.jsonl, row 3: a JSON list, expected an object"):
        Traces(tmp_path / "d.jsonl", words)
    (tmp_path / "e.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"e\.txt begins with b'nothing', expected parquet, JSON lines"):
        Traces(tmp_path / "e.txt", words)
    with pytest.raises(ValueError, match=r"f\.jsonl is no file"):
        Traces(str(tmp_path / "f.jsonl"), words)


def test_a_field_that_is_almost_one_is_named(words):
    with pytest.warns(RuntimeWarning, match="the field 'log_p', which is not read, did you mean 'logp'"):
        Traces([ROW | {"log_p": [-1.0]}], words)


def test_a_dump_gives_its_successful_completions_with_their_log_probs(words, tmp_path):
    def record(prompt, completion, reward, old_logp, mask=None):
        tokens = [*ids(words, completion), EOS]
        mask = np.array([True] * len(tokens) if mask is None else mask)
        old_logp = np.full(len(tokens), old_logp)
        return Record(
            np.array(ids(words, prompt)), np.array(tokens), old_logp - 0.5, old_logp, reward=reward, mask=mask
        )

    masked = [False, True, True]
    records = [
        record("c2=", "22", 1.0, -1.0),
        record("c2=", "22", 1.0, -1.0),  # trained on twice
        record("c2=", "23", 0.0, -1.0),
        record("c2=", "2.", 1.0, math.nan),  # the trainer's log-probs are not there
        record("a3b1=", "44", 1.0, np.array([math.nan, -1.0, -1.0]), masked),
        record("a3b1=", "45", 1.0, -1.0, [False] * 3),
    ]
    with DumpWriter(tmp_path / "dump.parquet") as writer:
        writer.write(records)
    with pytest.warns(RuntimeWarning, match=r"row 6: no token of the sequence was trained on; it is left out"):
        traces = Traces.from_dump(tmp_path / "dump.parquet", words, keep=lambda trace: trace.reward == 1)
    assert [trace.logp for trace in traces.of("c2=")] == [(-1.0,) * 3, None]
    (second,) = traces.of("a3b1=")
    assert second.mask == (0, 1, 1) and second.logp[1:] == (-1.0, -1.0)
    with DumpWriter(tmp_path / "other.parquet") as writer:
        writer.write([Record(np.array([3]), np.array([99]), np.array([-1.0]), np.array([-1.0]))])
    with pytest.raises(ValueError, match=r"other\.parquet, row 1: completion_ids\[0\] is 99"):
        Traces.from_dump([tmp_path / "other.parquet"], words)


def test_a_batch_holds_every_trace_once_before_any_twice(words):
    rows = [{"prompt": "c2=" if i else "a3b1=", "completion": "0123456789"[: i + 1]} for i in range(5)]
    rows[4]["mask"] = [0, 1, 1, 1, 1, 1]
    traces = Traces(rows, words)
    batches = [traces.batch(i, 2) for i in range(5)]
    for batch in batches:
        width = batch["mask"].size(1)
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert (batch["input_ids"][:, -width:][batch["mask"]] > 0).all()  # no padding is learnt
        assert (batch["attention_mask"][:, -width:].bool() >= batch["mask"]).all()
    seen = [tuple(row[real.bool()].tolist()) for b in batches for row, real in zip(*[*b.values()][:2], strict=True)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == sorted(trace.prompt_ids + trace.completion_ids for trace in traces)
    assert seen[:5] != seen[5:]
    assert sum(int(b["mask"].sum()) for b in batches) == 2 * (sum(map(len, traces)) - 1)
    assert torch.equal(traces.batch(1, 2)["input_ids"], batches[1]["input_ids"])
    with pytest.raises(ValueError, match="index=-1 and size=2 of 5 traces"):
        traces.batch(-1, 2)


def test_a_trace_that_is_made_by_hand_is_checked():
    with pytest.raises(ValueError, match=r"^logp has 1 numbers, expected 2"):
        Trace((3,), (3, 4), logp=(-1.0,))
    assert Trace((3,), (3, 4), logp=(math.nan, -1.0), mask=(0, 1)).reward is None
