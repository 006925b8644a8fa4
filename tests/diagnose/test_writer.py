"""``DumpWriter``, ``StepDumps`` and ``records_of``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import offcorr
from offcorr.diagnose import DumpWriter, Record, read, records_of
from offcorr.diagnose.writer import StepDumps
from tests.diagnose.dumps import assert_same, read_all, record

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ["dump.parquet", "dump.jsonl", "dump.jsonl.gz"]


def needs_pyarrow(name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")


@pytest.mark.parametrize("name", FILES)
def test_records_come_back_to_the_last_bit(tmp_path, name):
    needs_pyarrow(name)
    rng = np.random.default_rng(0)
    bare = dict.fromkeys(("entropy", "mask", "reward", "advantage", "group_id", "turn_ids", "step"))
    written = [
        record(0),
        record(1, 9, advantage=rng.normal(size=9).astype(np.float32).astype(float), rollout_version=np.arange(9)),
        record(2, 4, **bare),
        record(3, logp=np.array([-np.inf, np.nan, -1e-30, -3e38, 0.0, -0.0]).astype(np.float32).astype(float)),
        record(4, 3, reward=float("nan")),
    ]
    with DumpWriter(tmp_path / name) as writer:
        writer.write(written[:2])
        writer.write(written[2:])
    records, _ = read_all(tmp_path / name)
    for found, wanted in zip(records, written, strict=True):
        assert_same(found, wanted)
    assert np.signbit(records[3].logp[5])


@pytest.mark.parametrize("name", FILES)
def test_doubles_come_back_to_the_last_bit(tmp_path, name):
    needs_pyarrow(name)
    doubles = record(0, old_logp=np.array([-0.1, -1 / 3, -1e-300, -2.0, -1e9, -np.pi]))
    with DumpWriter(tmp_path / name) as writer:
        writer.write([doubles, record(1)])
    records, _ = read_all(tmp_path / name)
    assert_same(records[0], doubles)
    assert_same(records[1], record(1))


def test_what_is_float32_is_stored_as_float32(tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def stored(name, records, **options):
        with DumpWriter(tmp_path / name, **options) as writer:
            writer.write(records)
        schema = parquet.read_schema(tmp_path / name)
        return {str(schema.field(f).type.value_type) for f in ("rollout_logp", "old_logp", "entropy", "advantage")}

    assert stored("a.parquet", [record(0)]) == {"float"}
    assert stored("b.parquet", [record(0)], float64=True) == {"double"}


def test_parquet_in_several_row_groups(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("offcorr.diagnose.writer.ROW_GROUP", 10)
    with DumpWriter(tmp_path / "dump.parquet") as writer:
        writer.write(record(seed) for seed in range(5))
    assert parquet.ParquetFile(tmp_path / "dump.parquet").num_row_groups == 3
    assert [one.step for one in read_all(tmp_path / "dump.parquet")[0]] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (record(1, old_logp=np.full(6, -0.1)), "old_logp holds values that are no float32.*with float64=True"),
        (record(1, group_id="a"), "group_id is 'a', and the first records of .* have int64"),
        (record(1), "turn_ids is in these records and in none of the first 1 of"),
    ],
)
def test_a_later_row_group_that_does_not_fit(tmp_path, monkeypatch, later, message):
    """Said by the writer; what was written before can be read."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("offcorr.diagnose.writer.ROW_GROUP", 1)
    first = record(0, turn_ids=None) if "turn_ids" in message else record(0)
    writer = DumpWriter(tmp_path / "dump.parquet")
    writer.write([first])
    with pytest.raises(ValueError, match=message):
        writer.write([later])
    writer.close()
    (found,), _ = read_all(tmp_path / "dump.parquet")
    assert_same(found, first)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(tmp_path, name):
    needs_pyarrow(name)
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} exists, and no dump is overwritten"):
        DumpWriter(tmp_path / name)
    assert (tmp_path / name).read_text() == "mine"


def test_a_file_that_appeared_meanwhile_is_not_overwritten(tmp_path):
    pytest.importorskip("pyarrow")
    writer = DumpWriter(tmp_path / "dump.parquet")
    writer.write([record(0)])
    (tmp_path / "dump.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match="no dump is overwritten"):
        writer.close()
    assert (tmp_path / "dump.parquet").read_text() == "mine"


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="the path of the dump is .*dump.csv', expected one that ends with one of"):
        DumpWriter(tmp_path / "dump.csv")
    writer = DumpWriter(tmp_path / "dump.jsonl")
    writer.close()
    with pytest.raises(ValueError, match="dump.jsonl is closed, and takes no more records"):
        writer.write([record(0)])


KILLED = """
import os, signal, sys
from offcorr.diagnose.writer import DumpWriter, StepDumps
from tests.diagnose.dumps import record
dumps, lines = StepDumps(sys.argv[1]), DumpWriter(sys.argv[1] + "/lines.jsonl.gz")
for step in (1, 2, 3):
    dumps.add(step, [record(step)])
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dumps.end()
    lines.write([record(step)])
"""


def test_a_killed_run_leaves_what_it_wrote(tmp_path):
    pytest.importorskip("pyarrow")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=environment, capture_output=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    for paths in (tmp_path.glob("*.parquet"), tmp_path.glob("*.gz")):
        records = list(read(sorted(paths), warn=lambda text: None))
        for found, seed in zip(records, (1, 2), strict=True):
            assert_same(found, record(seed))


# ------------------------------------------------------------------------------------------------- a run's step files


def test_a_file_per_step(tmp_path):
    pytest.importorskip("pyarrow")
    dumps = StepDumps(tmp_path, rank=1, every=2)
    dumps.begin()
    for step in (1, 2, 3):
        if dumps.wants(step):
            dumps.add(step, [record(step)])
            dumps.add(step, [record(step + 10)])
        dumps.end()
    names = ["step_000001.rank_1.parquet", "step_000003.rank_1.parquet"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [one.step for one in read_all(tmp_path)[0]] == [7, 17, 9, 19]


def test_a_second_run_in_a_folder(tmp_path):
    pytest.importorskip("pyarrow")
    for resumed in (False, True):
        dumps = StepDumps(tmp_path)
        dumps.begin(resumed=resumed)
        dumps.add(1, [record(1)])
        dumps.end()
    assert {file.name for file in tmp_path.iterdir()} == {"step_000001.rank_0.parquet", "step_000001.rank_0.2.parquet"}
    with pytest.raises(FileExistsError, match="holds step_000001.rank_0.2.parquet, the dump of another run"):
        StepDumps(tmp_path).begin()
    StepDumps(tmp_path, rank=1).begin()  # another process of the same run


# --------------------------------------------------------------------------------------------------- records of a batch

LENGTHS = (3, 5, 0)


def padded_batch(**changes):
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    mask[1, 2] = False  # a tool's token
    values = {
        "logp": -torch.rand(3, 5),
        "old_logp": -torch.rand(3, 5),
        "rollout_logp": -torch.rand(3, 5),
        "entropy": torch.rand(3, 5),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
        "mask": mask,
        "rewards": torch.tensor([0.5, 0.0, 1.0]),
        "group_ids": torch.tensor([4, 4, 5]),
        "rollout_version": torch.tensor([[2] * 5, [1, 1, 0, 2, 2], [0] * 5]),
        "trainer_version": 2,  # the weights that sampled the first sequence, not those of the others
    }
    return offcorr.Batch(**{**values, **changes})


IDS = torch.arange(15).view(3, 5)
WHOLE = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
PROMPTS = [[1], [2, 3], [4]]


def test_records_of_a_padded_batch():
    batch = padded_batch()
    first, second = records_of(batch, prompt_ids=PROMPTS, completion_ids=IDS, completion_mask=WHOLE, step=8)
    assert_same(
        second,
        Record(
            prompt_ids=np.array([2, 3]),
            completion_ids=np.arange(5, 10),
            **{name: getattr(batch, name)[1].double().numpy() for name in ("rollout_logp", "old_logp", "logp")},
            mask=np.array([True, True, False, True, True]),
            reward=0.0,
            advantage=-1.0,
            group_id=4,
            rollout_version=np.array([1, 1, 0, 2, 2]),
            trainer_version=2,
            step=8,
        ),
    )
    assert len(first) == 3 and first.rollout_version == 2 and first.logp.tolist() == batch.logp[0, :3].tolist()
    assert first.entropy.tolist() == batch.entropy[0, :3].tolist()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"rollout_version": torch.full((3, 5), 2)}, [True, True]),
        ({"rollout_version": torch.tensor([[1] * 5, [2, 2, 0, 2, 2], [0] * 5])}, [False, True]),  # 0: a tool's token
        ({"old_logp": None}, [True, True]),  # it is logp
        ({"rollout_version": None}, [False, False]),
        (
            {"rollout_version": None, "old_logp": torch.full((3, 5), -1.0), "logp": torch.full((3, 5), -1.0005)},
            [True] * 2,
        ),
    ],
)
def test_the_entropy_of_other_weights_than_old_logps_is_left_out(changes, kept):
    records = records_of(padded_batch(**changes), prompt_ids=PROMPTS, completion_ids=IDS, completion_mask=WHOLE)
    assert [record.entropy is not None for record in records] == kept


def test_records_of_a_batch_with_padding_on_the_left():
    flipped = {name: value.flip(1) for name, value in padded_batch()._tensors().items() if value.ndim == 2}
    turned = records_of(
        padded_batch(**flipped),
        prompt_ids=torch.tensor([[0, 1], [2, 3], [0, 4]]),
        prompt_mask=torch.tensor([[0, 1], [1, 1], [0, 1]]),
        completion_ids=IDS.flip(1),
        completion_mask=WHOLE.flip(1),
    )
    straight = records_of(padded_batch(), prompt_ids=PROMPTS, completion_ids=IDS, completion_mask=WHOLE)
    for one, other in zip(turned, straight, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        for name in ("completion_ids", "rollout_logp", "old_logp", "logp", "mask"):
            assert getattr(one, name).tolist() == getattr(other, name)[::-1].tolist(), name
    assert turned[0].entropy.tolist() == straight[0].entropy[::-1].tolist()


def test_records_of_a_packed_batch_that_leaves_tokens_out():
    padded = padded_batch()
    columns = {name: value for name, value in padded._tensors().items() if value.ndim == 2}
    packed = offcorr.Batch.packed(
        **{name: value[padded.mask] for name, value in columns.items()},
        cu_seqlens=torch.tensor([0, 3, 7, 7]),
        advantages=padded.advantages,
        rewards=padded.rewards,
        group_ids=padded.group_ids,
        trainer_version=2,
    )
    ids = [[0, 1, 2], [5, 6, 7, 8, 9], []]
    found = records_of(packed, prompt_ids=PROMPTS, completion_ids=ids, places=[[0, 1, 2], [0, 1, 3, 4], []])
    wanted = records_of(padded, prompt_ids=PROMPTS, completion_ids=IDS, completion_mask=WHOLE)
    assert_same(found[0], wanted[0])
    assert found[1].mask.tolist() == wanted[1].mask.tolist()
    assert found[1].completion_ids.tolist() == [5, 6, 7, 8, 9]
    for name in ("rollout_logp", "old_logp", "logp"):
        one, other = getattr(found[1], name), getattr(wanted[1], name)
        assert one[wanted[1].mask].tolist() == other[wanted[1].mask].tolist() and np.isnan(one[2])


def test_records_of_a_batch_without_the_optional_fields():
    absent = dict.fromkeys(("old_logp", "rollout_logp", "entropy", "rewards", "group_ids", "rollout_version"))
    batch = padded_batch(**absent, trainer_version=None, advantages=torch.ones(3, 5))
    one, _ = records_of(batch, prompt_ids=PROMPTS, completion_ids=IDS, completion_mask=WHOLE)
    assert np.isnan(one.rollout_logp).all() and one.old_logp.tolist() == one.logp.tolist()
    assert one.advantage.tolist() == [1, 1, 1]
    assert {one.entropy, one.reward, one.group_id, one.rollout_version, one.trainer_version, one.step} == {None}


def test_a_record_keeps_nothing_of_the_batch():
    batch = padded_batch(old_logp=-torch.rand(3, 5).double())
    one, _ = records_of(batch, prompt_ids=PROMPTS, completion_ids=[[1, 2, 3], [4] * 5, []])
    before = one.old_logp.copy()
    batch.old_logp.zero_()
    assert one.old_logp.tolist() == before.tolist()


def test_records_of_refuses_what_does_not_fit():
    batch = padded_batch()
    with pytest.raises(ValueError, match="prompt_ids has 2 sequences, expected 3, those of the batch"):
        records_of(batch, prompt_ids=[[1], [2]], completion_ids=IDS)
    with pytest.raises(ValueError, match="completion 1 has 6 tokens, expected at most 5, those of logp"):
        records_of(batch, prompt_ids=PROMPTS, completion_ids=[[1], [1] * 6, [1]])
