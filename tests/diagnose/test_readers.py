"""``read``: every format, every kind of bad input, and memory."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from offcorr.diagnose import DumpError, Record, read
from offcorr.diagnose.formats import npz
from tests.diagnose.dumps import assert_same, read_all, record, row

ROOT = Path(__file__).resolve().parent.parent.parent


def lines(path: Path, rows: list) -> Path:
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------- the fields of a record


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.jsonl.gz", "dump.log"])
def test_json_lines(tmp_path, name):
    records, warnings = read_all(lines(tmp_path / name, [row(0), "", row(1), row(2)]))
    for found, seed in zip(records, range(3), strict=True):
        assert_same(found, record(seed))
    assert records[1].where == f"{tmp_path / name}, row 3"
    assert warnings == [
        f"{tmp_path / name}, row 1: rollout_logp is nan at 1 of 6 tokens, expected a finite number; "
        "3 rows like this, which are kept"
    ]


def test_a_misspelt_field_is_told(tmp_path):
    """Once for each file, and not where the field is there, too."""
    one = {"prompt_ids": [1], "completion_ids": [2, 3], "rollout_logp": [-1.0, -2.0], "old_logp": [-1.0, -2.0]}
    path = lines(tmp_path / "dump.jsonl", [one | {"enrtopy": [1.0, 1.0]}] * 3)
    asked = f"{path}, row 1: 'enrtopy' is no field of a dump; did you mean 'entropy'?"
    assert [said for said in read_all(path)[1] if "did you mean" in said] == [asked]
    both = lines(tmp_path / "both.jsonl", [one | {"enrtopy": [1.0, 1.0], "entropy": [1.0, 1.0], "note": "x"}])
    assert not any("did you mean" in said for said in read_all(both)[1])


def test_parquet_of_any_writer(tmp_path):
    """Large and fixed lists, nulls, float64, a column of text, and several row groups."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row(seed) | {"text": "hello"} for seed in range(5)]
    rows[2]["entropy"] = rows[3]["reward"] = None
    schema = {name: pa.array([one[name] for one in rows]) for name in rows[0]}
    schema["completion_ids"] = schema["completion_ids"].cast(pa.large_list(pa.int32()))
    schema["old_logp"] = schema["old_logp"].cast(pa.list_(pa.float64(), 6))
    parquet.write_table(pa.table(schema), tmp_path / "some.parquet", row_group_size=2)
    records, warnings = read_all(tmp_path / "some.parquet")
    for seed, found in enumerate(records):
        assert_same(found, record(seed, **({2: {"entropy": None}, 3: {"reward": None}}.get(seed, {}))))
    assert "reward is missing in 1 of 5 records" in warnings
    assert any(one.startswith("entropy is missing in 1 of 5 records: a trainer's dump leaves it") for one in warnings)


def columns(seeds, tokens):
    records = [record(seed, count) for seed, count in zip(seeds, tokens, strict=True)]
    names = ("completion_ids", "rollout_logp", "old_logp", "mask")
    scalars = {
        name: np.array([getattr(one, name) for one in records]) for name in ("reward", "group_id", "rollout_version")
    }
    return records, {name: [getattr(one, name) for one in records] for name in names}, scalars


def assert_these(records, wanted):
    for found, one in zip(records, wanted, strict=True):
        absent = dict.fromkeys(("logp", "entropy", "advantage", "turn_ids", "trainer_version", "step"))
        fields = {name: getattr(one, name) for name in vars(one)} | absent | {"where": ""}
        assert_same(found, Record(**fields))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_end_to_end(tmp_path, save):
    wanted, per_token, scalars = columns(range(4), (6, 3, 9, 5))
    save(
        tmp_path / "dump.npz",
        **{name: np.concatenate(values) for name, values in per_token.items()},
        **scalars,
        prompt_ids=np.concatenate([one.prompt_ids for one in wanted]),
        lengths=[len(one) for one in wanted],
        prompt_lengths=[len(one.prompt_ids) for one in wanted],
        other=np.zeros(7),
    )
    assert_these(read_all(tmp_path / "dump.npz")[0], wanted)


@pytest.mark.parametrize("said_by", ["lengths", "mask"])
def test_npz_padded(tmp_path, said_by):
    wanted, per_token, scalars = columns(range(4), (6, 4, 9, 5))  # the last token of each is in its mask

    def padded(rows, left=False):
        width = max(map(len, rows))
        edges = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
        return np.stack([np.pad(row, edge) for row, edge in zip(rows, edges, strict=True)])

    prompts = [one.prompt_ids for one in wanted]
    arrays = {name: padded(values) for name, values in per_token.items()}
    if said_by == "lengths":
        arrays |= {"lengths": [len(one) for one in wanted], "prompt_lengths": [*map(len, prompts)]}
    arrays["prompt_ids"] = padded(prompts, left=said_by == "mask")
    if said_by == "mask":
        arrays["prompt_mask"] = padded([np.ones(len(one), bool) for one in prompts], left=True)
    np.savez(tmp_path / "dump.npz", **arrays, **scalars)
    assert_these(read_all(tmp_path / "dump.npz")[0], wanted)


def test_an_uncompressed_npz_is_mapped(tmp_path):
    np.savez(tmp_path / "dump.npz", completion_ids=np.arange(5), lengths=np.array([2, 3]))
    arrays = npz._arrays(tmp_path / "dump.npz")
    assert all(isinstance(array, np.memmap) for array in arrays.values())
    assert arrays["completion_ids"].tolist() == [0, 1, 2, 3, 4] and arrays["lengths"].tolist() == [2, 3]


def test_an_npz_of_one_token_per_sequence(tmp_path):
    """As many sequences as tokens: a version is one per sequence, not a list of one per token."""
    ones = {"lengths": np.ones(3, int), "prompt_lengths": np.ones(3, int), "prompt_ids": np.arange(3)}
    tokens = {"completion_ids": np.arange(3), "rollout_logp": -np.ones(3), "old_logp": -np.ones(3)}
    np.savez(tmp_path / "dump.npz", **ones, **tokens, rollout_version=np.arange(3), advantage=np.arange(3.0))
    rows = [row.fields for row in npz.rows(tmp_path / "dump.npz")]
    assert [(row["rollout_version"], row["advantage"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert all(isinstance(row["rollout_version"], int) for row in rows)
    assert [one.rollout_version for one in read_all(tmp_path)[0]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lengths": None},
            r"completion_ids has shape \(5,\) and nothing says where a sequence ends: expected lengths",
        ),
        ({"lengths": np.array([2, 2])}, r"lengths has shape \(2,\) and sum 4, expected whole numbers whose sum is 5"),
        ({"lengths": np.array([6, -1])}, "expected whole numbers whose sum is 5"),
        ({"old_logp": np.zeros(4)}, r"old_logp has shape \(4,\), expected \(5,\) as completion_ids"),
        ({"reward": np.zeros(3)}, r"reward has shape \(3,\), expected \(2,\), one per sequence"),
        ({"prompt_lengths": np.array([2])}, r"prompt_ids has 1 sequences, expected 2 as completion_ids"),
        ({"prompt_ids": np.zeros((2, 3), int)}, "prompt_lengths has shape .* no larger than the row"),
        ({"completion_ids": None}, "completion_ids missing; present: prompt_ids"),
        ({"logp": np.array([[1.0], [2.0, 3.0]], dtype=object)}, "logp is an array of Python objects.* any code"),
    ],
)
def test_an_npz_that_does_not_fit(tmp_path, changes, message):
    arrays = {
        "prompt_ids": np.arange(4),
        "prompt_lengths": np.array([3, 1]) if "prompt_ids" not in changes else np.array([4, 1]),
        "completion_ids": np.arange(5),
        "rollout_logp": -np.ones(5),
        "old_logp": -np.ones(5),
        "lengths": np.array([2, 3]),
    } | changes
    if "prompt_lengths" in changes:
        arrays["prompt_ids"] = np.arange(2)
    np.savez(tmp_path / "dump.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DumpError, match=message):
        read_all(tmp_path / "dump.npz")


# ------------------------------------------------------------------------------------------ the other trainers' files


def test_prime_rl(tmp_path):
    shared = {"schema_version": 1, "step": 4, "rank": 1, "micro_step": 0, "env_name": "math", "rl_weights": [None] * 5}
    one = {
        **shared,
        "token_ids": [1, 2, 3, 4, 5],
        "loss_mask": [False, False, True, False, True],
        "advantages": [0.0, 0.0, 0.5, 0.5, 0.5],
        "inference_logprobs": [0.0, 0.0, -1.0, 0.0, None],
        "trainer_logprobs": [-11.0, -3.0, -1.5, -2.0, -0.5],
        "entropy": [11.0, 1.0, 2.0, 3.0, 4.0],
        "is_masked": [None] * 5,
    }
    weighted = one | {
        "rl_weights": [0.0, 0.0, 0.0, 0.0, 1.0],
        "ref_kl_weights": [None] * 5,
        "inference_logprobs": [0.0] * 5,
    }
    folder = tmp_path / "token_exports" / "step_4"
    folder.mkdir(parents=True)
    (folder / "STABLE").touch()
    lines(folder / "rank_1.jsonl", [one, weighted, one | {"loss_mask": [False] * 5}])
    (first, second), warnings = read_all(tmp_path)
    assert first.prompt_ids.tolist() == [1, 2] and first.completion_ids.tolist() == [3, 4, 5]
    assert first.old_logp.tolist() == [-1.5, -2.0, -0.5] and first.logp is None
    assert first.rollout_logp[:2].tolist() == [-1.0, 0.0] and np.isnan(first.rollout_logp[2])
    assert first.entropy.tolist() == [2, 3, 4] and first.mask.tolist() == [True, False, True]
    assert first.advantage.tolist() == [0.5] * 3 and first.step == 4
    assert second.mask.tolist() == [False, False, True]
    assert f"{folder / 'STABLE'} is no dump; 1 such files of the folder were skipped" in warnings
    assert any("row 3: no token of the sequence was sampled" in text for text in warnings)


def nemo_lines(path: Path, batch: dict[str, list]) -> Path:
    """As its Logger.log_batched_dict_as_jsonl writes a batch: a batch of one per line."""
    size = len(batch["token_ids"])
    rows = [{**{name: values[i : i + 1] for name, values in batch.items()}, "idx": i} for i in range(size)]
    return lines(path, rows)


NEMO = {
    "content": ["a", "b"],
    "rewards": [1.0, 0.0],
    "input_lengths": [5, 3],
    "token_ids": [[1, 2, 3, 4, 5], [1, 6, 7, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]],
    "sample_loss_mask": [1.0, 0.0],
    "advantages": [[0.5] * 5, [-0.5] * 5],
    "generation_logprobs": [[0.0, 0.0, -1.0, 0.0, -2.0], [0.0, -1.0, -3.0, 0.0, 0.0]],
    "prev_logprobs": [[0.0, -9.0, -1.5, -7.0, -2.5], [0.0, -1.25, -3.5, -6.0, -6.0]],
}


def test_nemo_rl(tmp_path):
    for step in (10, 9):
        nemo_lines(tmp_path / f"train_data_step{step}.jsonl", NEMO)
    records, _ = read_all(tmp_path)
    assert [one.step for one in records] == [9, 9, 10, 10]
    first, second = records[:2]
    assert first.prompt_ids.tolist() == [1, 2] and first.completion_ids.tolist() == [3, 4, 5]
    assert first.rollout_logp.tolist() == [-1.0, 0.0, -2.0] and first.old_logp.tolist() == [-1.5, -7.0, -2.5]
    assert first.mask.tolist() == [True, False, True] and first.reward == 1.0 and first.advantage.tolist() == [0.5] * 3
    assert second.prompt_ids.tolist() == [1] and second.completion_ids.tolist() == [6, 7] and second.mask.all()


def test_nemo_rl_with_dynamic_sampling(tmp_path):
    """The rewards of all samples stand beside those of the ones that were kept."""
    batch = {**NEMO, "rewards": [9.0, 9.0, 1.0, 0.0], "filtered_rewards": [1.0, 0.0]}
    records, _ = read_all(nemo_lines(tmp_path / "train_data_step1.jsonl", batch))
    assert [one.reward for one in records] == [1.0, 0.0]


def test_nemo_rl_without_the_trainers_pass(tmp_path):
    zeros = [[0.0] * 5, [0.0] * 5]
    file = nemo_lines(tmp_path / "train_data_step1.jsonl", NEMO | {"prev_logprobs": zeros})
    with pytest.raises(DumpError, match="placeholder under force_on_policy_ratio=True.*; 2 rows left out"):
        read_all(file)


def slime_pair(folder: Path, number: int = 7) -> tuple[Path, Path]:
    """The files of ``--dump-details``; the samples lie in another order in the train dump's ranks."""
    generated = [
        {
            "group_index": 3,
            "index": i,
            "prompt": "p",
            "tokens": [1, 2, 10 + i, 20 + i],
            "response_length": 2,
            "reward": {"score": 1.0},
            "loss_mask": [1, 1],
            "weight_versions": ["4"] if i else ["4", "5"],
            "rollout_log_probs": [-1.0, -2.0],
            "status": "completed",
            "metadata": {"scores": np.array([1.0, 2.0])},
        }
        for i in range(2)
    ]
    trained = [
        {
            "data_parallel_rank": i,
            "rollout_position": i,
            "tokens": torch.tensor(generated[i]["tokens"]),
            "response_lengths": 2,
            "loss_masks": torch.tensor([1, i], dtype=torch.int),
            "rollout_log_probs": torch.tensor([-1.0, -2.0]),
            "log_probs": torch.tensor([-1.5, -2.25 - i]),
            "advantages": torch.tensor([0.5, 0.5]),
            "rewards": np.float64(0.1),
        }
        for i in range(2)
    ]
    files = folder / "rollout_data" / f"{number}.pt", folder / "train_data" / f"{number}.pt"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": number, "samples": generated}, files[0])
    payload = {"format_version": 2, "rollout_id": number, "rank": 0, "samples": trained, "dp_shards": []}
    torch.save({**payload, "raw_reward": [0.25, 0.75]}, files[1])
    return files


def test_slime(tmp_path):
    slime_pair(tmp_path)
    records, _ = read_all(tmp_path)
    assert [one.completion_ids.tolist() for one in records] == [[10, 20], [11, 21]]
    assert [one.old_logp.tolist() for one in records] == [[-1.5, -2.25], [-1.5, -3.25]]
    assert [one.rollout_version for one in records] == [None, 4] and [one.reward for one in records] == [0.25, 0.75]
    one = records[0]
    assert one.prompt_ids.tolist() == [1, 2] and one.rollout_logp.tolist() == [-1.0, -2.0]
    assert one.mask.tolist() == [True, False] and one.group_id == 3 and one.step == 7


def test_slime_of_an_old_torch(tmp_path):
    """A file that is a pickle, no archive."""
    _, train = slime_pair(tmp_path)
    torch.save(torch.load(train, weights_only=False), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert len(read_all(tmp_path / "old.pt")[0]) == 2


def test_slime_without_a_partner(tmp_path):
    rollout, train = slime_pair(tmp_path)
    (one, _), _ = read_all(train)
    assert one.group_id is None and one.reward == 0.25 and one.old_logp.tolist() == [-1.5, -2.25]
    with pytest.raises(DumpError, match="the rollout dump of slime's rollout 7, which has no log-probs of the trainer"):
        read_all(rollout)


class Surprise:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_a_file_of_torch_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 1, "samples": [Surprise()]}, tmp_path / "1.pt")
    with pytest.raises(DumpError, match=r"1.pt holds \S+ beside tensors, numbers and text, and is not loaded"):
        read_all(tmp_path / "1.pt")
    assert not Path("ran").exists()


def test_a_checkpoint_is_no_dump(tmp_path):
    torch.save({"weight": torch.zeros(3), "bias": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(DumpError, match="model.pt holds weight, bias; expected slime's dump"):
        read_all(tmp_path / "model.pt")


# --------------------------------------------------------------------------------------------------------- bad input


def test_rows_that_are_left_out_are_counted_by_kind(tmp_path):
    short = row(1)["old_logp"][:4]
    file = lines(
        tmp_path / "dump.jsonl",
        [
            row(0),
            row(1, old_logp=short),
            row(2, old_logp=short),
            row(3, completion_ids=None),
            row(4, prompt_ids=[1, 2.5]),
            "{broken}",
            "[1, 2]",
            row(5, mask=[True, None, True, True, True, True]),
            row(6, reward="high"),
            row(7, **{name: [] for name in row(7) if isinstance(row(7)[name], list)}),
            row(8),
        ],
    )
    records, warnings = read_all(file)
    assert [one.step for one in records] == [6, 14]
    expected = [
        r"row 2: old_logp has shape \(4,\), expected \(6,\), a value per token of completion_ids; 2 rows left out",
        r"row 4: completion_ids missing; present: prompt_ids, .*; 1 row left out",
        r"row 5: prompt_ids is \[1, 2.5\], expected a list of whole numbers; 1 row left out",
        r"row 6: no JSON object, of which a line holds one \(.*\); 2 rows left out",
        r"row 8: mask is \[True, None, .*\], expected a list of booleans, or of 0 and 1; 1 row left out",
        r"row 9: reward is 'high', expected a number; 1 row left out",
        r"row 10: no token of the sequence was sampled, expected one at least; 1 row left out",
    ]
    for pattern in expected:
        assert sum(bool(re.fullmatch(rf"{re.escape(str(file))}, {pattern}", text)) for text in warnings) == 1, pattern
    assert len(warnings) == len(expected) + 1  # and the token that is not scored


def test_a_problem_of_several_files_is_told_once(tmp_path):
    short = row(1)["old_logp"][:4]
    for name in "ab":
        lines(tmp_path / f"{name}.jsonl", [row(0), row(1, old_logp=short), row(2, old_logp=short)])
    (told,) = [text for text in read_all(tmp_path)[1] if "old_logp has shape" in text]
    assert told.startswith(f"{tmp_path / 'a.jsonl'}, row 2: ") and told.endswith("; 4 rows left out in 2 files")


def test_a_null_in_a_list_of_whole_numbers(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row(seed) for seed in range(4)]
    rows[1]["completion_ids"][2] = rows[2]["mask"][0] = None
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "dump.parquet")
    records, warnings = read_all(tmp_path / "dump.parquet")
    for found, seed in zip(records, (0, 3), strict=True):
        assert_same(found, record(seed))
    for number, name in ((2, "completion_ids"), (3, "mask")):
        assert any(f"row {number}: {name} is " in text and text.endswith("1 row left out") for text in warnings)


def test_values_that_are_not_finite_are_kept_and_told(tmp_path):
    logp = row(0)["logp"]
    rows = [
        row(0),
        row(1, logp=[float("nan"), *logp[1:]], reward=float("nan")),
        row(2, logp=[-np.inf, *logp[1:]]),
        row(3, old_logp=[*logp[:2], float("nan"), *logp[3:]]),  # where the mask is not set
    ]
    (records, warnings) = read_all(lines(tmp_path / "dump.jsonl", rows))
    assert len(records) == 4 and np.isnan(records[1].logp[0]) and records[2].logp[0] == -np.inf
    assert any(
        "row 2: logp is nan at 1 of 6 tokens" in t and "; 2 rows like this, which are kept" in t for t in warnings
    )
    assert any("row 2: reward is nan, expected a finite number; 1 row like this" in text for text in warnings)
    assert not any("old_logp" in text for text in warnings)


def test_demonstrations_are_counted_and_left_out(tmp_path):
    """No engine sampled them, so their NaN is no problem."""
    nobody = {"rollout_logp": [None] * 6, "origin": "demonstration"}
    rows = [row(0, origin="fresh"), row(1, **nobody), row(2, origin="replay"), row(3, **nobody)]
    told = []
    found = list(read([lines(tmp_path / "dump.jsonl", rows)], warn=told.append))
    assert [record.origin for record in found] == ["fresh", "replay"]
    assert "2 of 4 rows are demonstrations (origin), whose tokens no sampler of this run drew: left out" in told
    assert [text.partition("; ")[2] for text in told if "rollout_logp is nan" in text] == [
        "2 rows like this, which are kept"
    ]


def test_a_dump_of_demonstrations_alone_has_nothing_to_compare(tmp_path):
    rows = [row(seed, origin="demonstration") for seed in range(3)]
    with pytest.raises(DumpError, match=r"all 3 rows are demonstrations .* nothing to compare"):
        list(read([lines(tmp_path / "dump.jsonl", rows)], warn=lambda text: None))


def test_sentinels_are_kept_as_they_are(tmp_path):
    one = row(0, rollout_logp=[-9999.0, 0.0, 0.0, 1.0, -1.0, -1e30])
    (found,), warnings = read_all(lines(tmp_path / "dump.jsonl", [one]))
    assert found.rollout_logp.tolist() == [-9999.0, 0.0, 0.0, 1.0, -1.0, -1e30]
    assert ["a log-prob is not above 0" in text for text in warnings] == [True]


@pytest.mark.parametrize("name", ["dump.jsonl", "dump.jsonl.gz"])
def test_a_truncated_file_is_read_up_to_its_end(tmp_path, name):
    file = lines(tmp_path / name, [row(seed, 200) for seed in range(20)])
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    records, warnings = read_all(file)
    assert 5 < len(records) < 20
    for seed, found in enumerate(records):
        assert_same(found, record(seed, 200))
    (text,) = [text for text in warnings if f"{file}, row {len(records) + 1}: " in text]
    said = text.removeprefix(f"{file}, row {len(records) + 1}: ")
    assert said.startswith(("the last line ends in the middle", "the compressed data ends or breaks here"))


def test_a_truncated_parquet_npz_or_pt_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    from offcorr.diagnose import DumpWriter

    with DumpWriter(tmp_path / "dump.parquet") as writer:
        writer.write([record(seed) for seed in range(3)])
    np.savez(tmp_path / "dump.npz", completion_ids=np.arange(500))
    torch.save({"samples": [{"tokens": torch.arange(500)}]}, tmp_path / "dump.pt")
    for name in ("dump.parquet", "dump.npz", "dump.pt"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[:-200])
        with pytest.raises(DumpError, match=rf"{name} .*cannot be read"):
            read_all(file)


def test_one_bad_file_of_several_is_told_and_passed_over(tmp_path):
    lines(tmp_path / "a.jsonl", [row(0)])
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04" + b"x" * 50)
    lines(tmp_path / "c.jsonl", [row(1)])
    lines(tmp_path / "d.jsonl", [{"content": "text", "score": 1}])
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.jsonl").touch()
    records, warnings = read_all(tmp_path)
    assert [one.step for one in records] == [6, 7]
    (unusable,) = [text for text in warnings if "b.npz" in text]
    assert "cannot be read" in unusable and "nothing more is read of 2 such files" in unusable
    assert f"{tmp_path / 'empty.jsonl'} is no dump; 2 such files of the folder were skipped" in warnings


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", r"x.jsonl is empty \(0 bytes\); expected parquet, npz, "),
        ("x.jsonl", b"\n\n", r"x.jsonl begins with b'\\n\\n', which is no dump; expected "),
        ("x.png", b"\x89PNG\r\n", "x.png begins with .*PNG.*, which is no dump; expected "),
        (
            "x.json",
            b'{\n "a": 1\n}\n',
            "x.json has no usable record: none of its 3 rows is one. .*row 1: no JSON object",
        ),
        (
            "x.jsonl",
            b'{"a": 1, "b": 2}\n',
            "x.jsonl, row 1 is no row of a dump: it has a, b.* expected .* prime-rl's token export",
        ),
        ("x.jsonl", b'{"prompt_ids": [1], "logp": [1]}\n', "completion_ids, rollout_logp missing; present: prompt_ids"),
        ("x.jsonl.gz", gzip.compress(b"", mtime=0), "x.jsonl.gz has no usable record: it has no row"),
    ],
)
def test_a_file_that_is_no_dump(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=message):
        read_all(tmp_path / name)


@pytest.mark.parametrize("content", [b'{\n "a": 1\n}\n', b"\x89PNG\r\n", b"# notes\n", b"", b'{"accuracy": 0.5}\n'])
def test_a_file_that_is_no_dump_is_told_what_one_is_and_how_to_get_it(tmp_path, content):
    (tmp_path / "summary").write_bytes(content)
    with pytest.raises(DumpError) as told:
        read_all(tmp_path / "summary")
    assert str(told.value).count("A dump has the token ids of sampled sequences") == 1
    assert "`offcorr train --dump_rollouts FOLDER` writes one" in str(told.value)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(DumpError, match="missing.jsonl does not exist; expected a file or a folder"):
        read([tmp_path / "missing.jsonl"], warn=print)
    with pytest.raises(DumpError, match="holds nothing, and no dump; expected"):
        read([tmp_path], warn=print)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DumpError, match="holds a.txt, and no dump"):
        read([tmp_path], warn=print)
    with pytest.raises(DumpError, match="no path was given"):
        read([], warn=print)
    with pytest.raises(TypeError, match="paths is the single path 'a.jsonl', expected a list of paths"):
        read("a.jsonl", warn=print)


def test_a_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="reading .*x.parquet needs pyarrow, not installed here: pip install"):
        read([tmp_path / "x.parquet"], warn=print)


def test_an_object_that_is_not_a_sequence_of_rows_keeps_its_place(tmp_path):
    """A row whose values have not the shapes of its layout: named, not raised."""
    rows = [{name: values[0] for name, values in NEMO.items()}, {name: values[0] for name, values in NEMO.items()}]
    rows[1]["token_loss_mask"] = 3
    records, warnings = read_all(lines(tmp_path / "train_data_step2.jsonl", rows))
    assert len(records) == 1 and any("row 2 is not as NeMo-RL's train_data has it" in text for text in warnings)


def test_progress(tmp_path):
    pytest.importorskip("pyarrow")
    from offcorr.diagnose import DumpWriter

    files = [lines(tmp_path / "a.jsonl", [row(s, 99) for s in range(50)]), tmp_path / "b.parquet"]
    with DumpWriter(files[1]) as writer:
        writer.write([record(s, 99) for s in range(50)])
    files.append(lines(tmp_path / "c.jsonl.gz", [row(s, 99) for s in range(50)]))
    told = []
    assert len(list(read(files, warn=lambda text: None, report=lambda *now: told.append(now)))) == 150
    total = sum(file.stat().st_size for file in files)
    assert {of for _, of in told} == {total} and told[-1][0] == total
    done = [now for now, _ in told]
    thousandths = [now * 1000 // total for now in done]
    assert thousandths == sorted({*thousandths}) and len(done) > 10
    assert done[-2] > files[0].stat().st_size > total / 2  # the first file is the largest


# ------------------------------------------------------------------------------------------------------------- memory

MEMORY = """
import resource, sys
from offcorr.diagnose import read
records = read([sys.argv[1]], warn=lambda text: None)
first, tokens = next(records), 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = len(first) + sum(len(record) for record in records)
print(tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("dump.jsonl.gz", 1000), ("dump.parquet", 3000)])
def test_reading_takes_no_memory_that_grows_with_the_file(tmp_path, name, rows):
    """1 and 3 million tokens, of which the three log-probs and the entropy alone are 32 and 96 MB in memory."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        from offcorr.diagnose import DumpWriter

        with DumpWriter(tmp_path / name) as writer:
            for _ in range(rows // 100):
                writer.write([record(0, 1000)] * 100)
    else:
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
            for _ in range(rows):
                file.write(json.dumps(row(0, 1000)).encode() + b"\n")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / name], capture_output=True, text=True, cwd=ROOT, check=True
    )
    tokens, grown = map(int, done.stdout.split())
    assert tokens == rows * 1000
    assert grown < 24, f"{grown} MiB"


def test_steps_of_several_runs_are_said(tmp_path):
    from offcorr.diagnose import DumpWriter

    for run in ("one", "other"):
        (tmp_path / run).mkdir()
        with DumpWriter(tmp_path / run / "step_000001.rank_0.parquet") as writer:
            writer.write([record(0), record(1)])
    _, warnings = read_all(tmp_path)
    assert any("hold dumps of the same steps, so these are several runs" in one for one in warnings)
    _, warnings = read_all(tmp_path / "one")
    assert not any("several runs" in one for one in warnings)


def test_the_npz_of_the_page_is_read(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs" / "mismatch.md").read_text()
    [code] = re.findall(r"```python\n([^`]*np\.savez\([^`]*)```", page)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    found = read_all(tmp_path / "dump.npz")[0]
    assert [one.completion_ids.tolist() for one in found] == [[5, 7, 1], [5, 1]]
    assert [one.prompt_ids.tolist() for one in found] == [[2, 3], [2, 4]]


def test_the_folder_of_a_training_points_to_its_dump(tmp_path):
    state = tmp_path / "run" / "checkpoint-2" / "scheduler.pt"
    state.parent.mkdir(parents=True)
    torch.save({"base_lrs": [0.1]}, state)
    with pytest.raises(DumpError, match="run holds the checkpoints of a training, and no dump; .* dump_rollouts named"):
        list(read([tmp_path / "run"], warn=lambda said: None))


def test_a_log_prob_above_0_is_told(tmp_path):
    """One alone makes no cause, and may have most of the gap."""
    rollout_logp = [*row(0)["rollout_logp"]]
    rows = [row(at, rollout_logp=[one, *rollout_logp[1:]]) for at, one in enumerate((-1.0, 0.7, 0.004))]
    records, warnings = read_all(lines(tmp_path / "x.jsonl", rows))
    assert len(records) == 3
    (above,) = (text for text in warnings if "above 0" in text)
    assert "row 2: rollout_logp is 0.7 at 1 of 6 tokens, and a log-prob is not above 0; 1 row like this" in above
